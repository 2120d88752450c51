"""What LazyRAG refuses at start-up: each unsupported setting with its reason and its fix, all of them at once.

A check is a function that returns None, or one line: what was found, why it cannot be, what to set.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec

from lazyrag.backend import wire
from lazyrag.backend.plugin import compat
from lazyrag.backend.plugin.requests import engine_settings
from lazyrag.errors import InputError, UnsupportedError

ALLOW_UNTESTED = "LAZYRAG_ALLOW_UNTESTED_VLLM"
CONNECTOR = "LazyRAGConnector"
CONNECTOR_MODULE = "lazyrag.backend.tiers.connector"


def refuse(reasons: Iterable[str | None]) -> None:
    """Raise one `UnsupportedError` that lists every reason; `None` entries are passed checks.

    Raises:
        UnsupportedError: at least one reason is given.
    """
    found = [reason for reason in reasons if reason is not None]
    if found:
        lines = "".join(f"\n  - {reason}" for reason in found)
        text = f"LazyRAG cannot run with this model or these engine settings:{lines}"
        if path := os.environ.get(wire.REFUSALS):
            Path(path).write_text(text, encoding="utf-8")
        raise UnsupportedError(text)


def check_config(vllm_config: Any) -> None:
    """Refuse an engine by its settings alone; can run before the engine is started.

    Raises:
        UnsupportedError: with every reason.
    """
    refuse(check(vllm_config) for check in CONFIG_CHECKS)


def check_scheduler(
    vllm_config: Any, kv_cache_config: Any, *, block_size: int, hash_block_size: int, is_async: bool
) -> None:
    """Refuse an engine by its settings and its KV pool; runs in the scheduler's process.

    Args:
        vllm_config: the engine's.
        kv_cache_config: the pool's, with its groups of layers.
        block_size: tokens that the scheduler counts as a block.
        hash_block_size: tokens that one hash covers.
        is_async: the scheduler class in use is asynchronous.

    Raises:
        UnsupportedError: with every reason.
    """
    pool = Pool(vllm_config, kv_cache_config, block_size, hash_block_size, is_async)
    refuse([*(check(vllm_config) for check in CONFIG_CHECKS), *(check(pool) for check in POOL_CHECKS)])


# ---------------------------------------------------------------- by settings


def _version(vllm_config: Any) -> str | None:
    version, on_cuda = compat.vllm_version(), vllm_config.device_config.device_type == "cuda"
    versions = compat.TESTED_ON_CUDA if on_cuda else compat.TESTED_VERSIONS
    if version in versions or os.environ.get(ALLOW_UNTESTED) == "1":
        return None
    tested = ", ".join(versions)
    return (
        f"vLLM {version} was never tested with LazyRAG{' on CUDA' if on_cuda else ''}, which relies on its internals. "
        f"Install one of {tested}, or set {ALLOW_UNTESTED}=1."
    )


def _own_settings(vllm_config: Any) -> str | None:
    try:
        engine_settings(vllm_config)
    except InputError as error:
        return str(error)
    return None


def _prefix_caching(vllm_config: Any) -> str | None:
    if vllm_config.cache_config.enable_prefix_caching:
        return None
    return "Prefix caching is off, and chunks are found through it. Set enable_prefix_caching=True."


def _generation(vllm_config: Any) -> str | None:
    model = vllm_config.model_config
    if model.runner_type == "generate" and not model.is_encoder_decoder:
        return None
    return "The model is a pooling or encoder-decoder model; only decoder-only text generation can reuse chunks."


def _speculation(vllm_config: Any) -> str | None:
    if vllm_config.speculative_config is None:
        return None
    return (
        "Speculative decoding is on: a drafter has its own positions and drops the last cached block. "
        "Start without speculative_config."
    )


def _context_parallel(vllm_config: Any) -> str | None:
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size == 1 and parallel.prefill_context_parallel_size == 1:
        return None
    return "Context parallelism splits a chunk's tokens over devices. Set both context parallel sizes to 1."


def _pipeline_parallel(vllm_config: Any) -> str | None:
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        return None
    return (
        "Pipeline parallelism was never tested with LazyRAG. Set pipeline_parallel_size=1 (tensor parallelism works)."
    )


def _ubatching(vllm_config: Any) -> str | None:
    if not vllm_config.parallel_config.use_ubatching:
        return None
    return "Dual batch overlap slices the attention metadata. Start without enable_dbo and ubatch_size."


def _cascade(vllm_config: Any) -> str | None:
    # Gone in later versions, where there is nothing to switch off.
    if getattr(vllm_config.model_config, "disable_cascade_attn", True):
        return None
    return "Cascade attention assumes that a common prefix is at the same place for all. Set disable_cascade_attn=True."


def _policy(vllm_config: Any) -> str | None:
    policy = vllm_config.scheduler_config.policy
    if policy == "fcfs":
        return None
    return (
        f"The scheduling policy is {policy!r}: a request that is preempted in the step it was scheduled in leaves "
        "blocks that look computed. Set scheduling_policy='fcfs'."
    )


def _connector(vllm_config: Any) -> str | None:
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return None
    if (transfer.kv_connector, transfer.kv_connector_module_path) != (CONNECTOR, CONNECTOR_MODULE):
        return (
            f"The KV connector {transfer.kv_connector!r} would store and load blocks of lazy requests as if they were "
            f"prefixes. Use {CONNECTOR} of {CONNECTOR_MODULE}, or none."
        )
    if transfer.kv_load_failure_policy != "fail":
        return (
            "kv_load_failure_policy is not 'fail': vLLM would compute a chunk anew in the middle of the request that "
            "uses it. Set it to 'fail'; LazyRAG then computes the chunk in a child request."
        )
    return None


CONFIG_CHECKS = (
    _version,
    _own_settings,
    _prefix_caching,
    _generation,
    _speculation,
    _context_parallel,
    _pipeline_parallel,
    _ubatching,
    _cascade,
    _policy,
    _connector,
)

# ---------------------------------------------------------------- by KV pool


@dataclass(frozen=True, slots=True)
class Pool:
    """What the checks of the scheduler look at besides the settings; see `check_scheduler`."""

    vllm_config: Any
    kv_cache_config: Any
    block_size: int
    hash_block_size: int
    is_async: bool


def _groups(pool: Pool) -> str | None:
    num_groups = len(pool.kv_cache_config.kv_cache_groups)
    if num_groups == 1:
        return None
    return (
        f"The model's layers have {num_groups} kinds of KV cache (sliding windows, state-space layers, ...); "
        "chunks need one. Use a model in which every layer has full attention."
    )


def _full_attention(pool: Pool) -> str | None:
    for group in pool.kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        windowed = getattr(spec, "sliding_window", None) is not None
        chunked = getattr(spec, "attention_chunk_size", None) is not None
        if type(spec) is not FullAttentionSpec or windowed or chunked or getattr(spec, "non_causal", False):
            return (
                f"The model keeps its KV as {type(spec).__name__} or limits what a token sees (window, local chunk, "
                "non-causal). Use a model in which every layer has full causal attention."
            )
    return None


def _hash_size(pool: Pool) -> str | None:
    sizes = {group.kv_cache_spec.block_size for group in pool.kv_cache_config.kv_cache_groups}
    if {pool.block_size, pool.hash_block_size} == sizes:
        return None
    return (
        f"A KV block has {sorted(sizes)} tokens, the scheduler's {pool.block_size}, and a hash covers "
        f"{pool.hash_block_size}: they must be equal. Leave the hash block size unset and set block_size only."
    )


def _scheduler_class(pool: Pool) -> str | None:
    wanted = bool(pool.vllm_config.scheduler_config.async_scheduling)
    if wanted == pool.is_async:
        return None
    name = "LazyAsyncScheduler" if wanted else "LazyScheduler"
    return (
        f"async_scheduling is {wanted}, the scheduler class is for {pool.is_async}. "
        f"Set scheduler_cls='lazyrag.backend.plugin.scheduler.{name}'."
    )


POOL_CHECKS = (_groups, _full_attention, _hash_size, _scheduler_class)
