"""Each unsupported setting is refused with its reason and its fix, all of them at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

from lazyrag.backend import wire
from lazyrag.backend.plugin import checks, compat
from lazyrag.backend.plugin.scheduler import LazyScheduler
from lazyrag.errors import UnsupportedError

SHAPE = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def full(**changes):
    return FullAttentionSpec(**{**SHAPE, **changes})


def supported():
    """The settings that the checks look at, as an engine that is fine has them."""
    return SimpleNamespace(
        additional_config={"lazyrag": {"debug": True}},
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(runner_type="generate", is_encoder_decoder=False, disable_cascade_attn=True),
        speculative_config=None,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            use_ubatching=False,
        ),
        scheduler_config=SimpleNamespace(policy="fcfs", async_scheduling=False),
        kv_transfer_config=None,
    )


def transfer(name=checks.CONNECTOR, module=checks.CONNECTOR_MODULE, policy="fail"):
    return SimpleNamespace(kv_connector=name, kv_connector_module_path=module, kv_load_failure_policy=policy)


def changed(path, value):
    config = supported()
    *owners, name = path.split(".")
    target = config
    for owner in owners:
        target = getattr(target, owner)
    assert hasattr(target, name)
    setattr(target, name, value)
    return config


def check(config, *, specs=None, block_size=16, hash_block_size=16, is_async=False):
    groups = [KVCacheGroupSpec(["layer"], spec) for spec in (specs or [full()])]
    pool = SimpleNamespace(kv_cache_groups=groups)
    checks.check_scheduler(config, pool, block_size=block_size, hash_block_size=hash_block_size, is_async=is_async)


def reasons(config, **pool):
    with pytest.raises(UnsupportedError) as raised:
        check(config, **pool)
    return [line for line in str(raised.value).splitlines() if line.startswith("  - ")]


def test_a_supported_engine_passes():
    check(supported())
    check(changed("kv_transfer_config", transfer()))
    check(changed("scheduler_config.async_scheduling", True), is_async=True)
    check(changed("additional_config", {}))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("cache_config.enable_prefix_caching", False, ("Prefix caching", "enable_prefix_caching=True")),
        ("model_config.runner_type", "pooling", ("pooling",)),
        ("model_config.is_encoder_decoder", True, ("encoder-decoder",)),
        ("model_config.disable_cascade_attn", False, ("Cascade", "disable_cascade_attn=True")),
        ("speculative_config", SimpleNamespace(), ("Speculative", "speculative_config")),
        ("parallel_config.decode_context_parallel_size", 2, ("Context parallel",)),
        ("parallel_config.prefill_context_parallel_size", 2, ("Context parallel",)),
        ("parallel_config.pipeline_parallel_size", 2, ("Pipeline", "pipeline_parallel_size=1")),
        ("parallel_config.use_ubatching", True, ("enable_dbo",)),
        ("scheduler_config.policy", "priority", ("priority", "fcfs")),
        ("scheduler_config.async_scheduling", True, ("LazyAsyncScheduler",)),
        ("kv_transfer_config", transfer(name="LMCacheConnectorV1"), ("LMCacheConnectorV1", checks.CONNECTOR)),
        ("kv_transfer_config", transfer(module="elsewhere"), (checks.CONNECTOR_MODULE,)),
        ("kv_transfer_config", transfer(policy="recompute"), ("kv_load_failure_policy", "'fail'")),
        ("additional_config", {"lazyrag": {"mod": "lazy"}}, ("unknown", "mod")),
    ],
)
def test_a_setting_is_refused_with_reason_and_fix(path, value, words):
    (reason,) = reasons(changed(path, value))
    for word in words:
        assert word in reason


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        ({"specs": [full(), full()]}, ("2 kinds",)),
        ({"specs": [SlidingWindowSpec(**SHAPE, sliding_window=64)]}, ("SlidingWindowSpec",)),
        ({"specs": [full(sliding_window=64)]}, ("window",)),
        ({"specs": [full(attention_chunk_size=64)]}, ("local chunk",)),
        ({"specs": [full(non_causal=True)]}, ("causal",)),
        ({"hash_block_size": 8}, ("hash covers 8",)),
        ({"block_size": 32, "hash_block_size": 32}, ("[16]", "32")),
        ({"is_async": True}, ("lazyrag.backend.plugin.scheduler.LazyScheduler",)),
    ],
)
def test_a_pool_is_refused_with_reason(pool, words):
    (reason,) = reasons(supported(), **pool)
    for word in words:
        assert word in reason


def test_all_reasons_are_shown_at_once():
    config = changed("cache_config.enable_prefix_caching", False)
    config.speculative_config = SimpleNamespace()
    config.scheduler_config.policy = "priority"
    assert len(reasons(config, specs=[full(), full()])) == 4


def test_settings_alone_can_be_checked_before_the_start():
    checks.check_config(supported())
    with pytest.raises(UnsupportedError, match="Prefix caching"):
        checks.check_config(changed("cache_config.enable_prefix_caching", False))


def test_an_untested_vllm_is_refused_unless_allowed(monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.99.0")
    (reason,) = reasons(supported())
    assert "0.99.0" in reason
    assert checks.ALLOW_UNTESTED in reason
    monkeypatch.setenv(checks.ALLOW_UNTESTED, "1")
    check(supported())


def test_on_cuda_only_the_version_is_taken_that_has_run_there(monkeypatch):
    config = changed("device_config.device_type", "cuda")
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.33.0")
    check(supported())
    (reason,) = reasons(config)
    assert "vLLM 0.33.0 was never tested with LazyRAG on CUDA" in reason
    assert "Install one of 0.26.0, or" in reason
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.26.0")
    check(config)


def test_a_refusal_is_left_for_the_process_that_starts_the_engine(monkeypatch, tmp_path):
    monkeypatch.setenv(wire.REFUSALS, str(tmp_path / "refusals"))
    assert "Prefix caching" in reasons(changed("cache_config.enable_prefix_caching", False))[0]
    assert "Prefix caching" in (tmp_path / "refusals").read_text()


def test_refuse_passes_when_nothing_is_found():
    checks.refuse([None, None])


def test_the_scheduler_checks_before_it_starts(new_engine, lib, model_folder, is_async):
    with pytest.raises(UnsupportedError, match="scheduler class"):
        new_engine(scheduler_class=_OtherKind if is_async else _OtherKindAsync)


class _OtherKind(LazyScheduler):
    """Given to an engine with asynchronous scheduling."""


class _OtherKindAsync(LazyScheduler, AsyncScheduler):
    """Given to an engine without asynchronous scheduling."""
