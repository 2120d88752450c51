"""Models and settings that cannot work are refused when the engine starts, with the reason and the fix."""

import pytest
import torch
from engines import PLUGIN

from lazyrag.errors import UnsupportedError

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore:`torch")]


def start(folder, **arguments):
    from vllm import LLM

    settings = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": 256,
        "kv_cache_memory_bytes": 1 << 26,
        "scheduler_cls": f"{PLUGIN}.scheduler.LazyScheduler",
        "worker_cls": f"{PLUGIN}.worker_cpu.LazyCPUWorker",
        "additional_config": {"lazyrag": {"debug": True}},
    }
    return LLM(model=str(folder), **(settings | arguments))


@pytest.fixture
def save(tmp_path):
    def save(config_class, model_class, **settings):
        torch.manual_seed(0)
        model_class(config_class(vocab_size=256, **settings)).float().save_pretrained(tmp_path)
        return tmp_path

    return save


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def test_a_model_with_absolute_positions(save):
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = save(GPT2Config, GPT2LMHeadModel, n_embd=64, n_layer=2, n_head=2, n_positions=512)
    with pytest.raises(UnsupportedError, match="has no rotary embedding"):
        start(folder)


def test_a_model_that_rotates_otherwise_than_it_seems_to(tiny_model, monkeypatch):
    """The rotation found in the model is tried out in every layer; here it is said to be another one."""
    from lazyrag.backend.plugin import worker
    from lazyrag.kernels.rope import Rope

    def find_rope(model):
        rope, _ = stock(model)
        return Rope(rope.inv_freq * 1.01, rope.head_size, rope.neox), None

    stock = worker.find_rope
    monkeypatch.setattr(worker, "find_rope", find_rope)
    with pytest.raises(UnsupportedError, match=r"In 3 of the model's 3 layers \(model\.layers\.0\.self_attn\.attn, "):
        start(tiny_model)


def test_a_model_with_sliding_windows(save):
    from transformers import MistralConfig, MistralForCausalLM

    folder = save(MistralConfig, MistralForCausalLM, **SMALL, sliding_window=64)
    with pytest.raises(UnsupportedError, match=r"Layer model\.layers\.0\.self_attn\.attn has a sliding window"):
        start(folder)


def test_an_engine_with_the_stock_scheduler(tiny_model):
    with pytest.raises(UnsupportedError, match=r"The scheduler is Scheduler, .* Set scheduler_cls="):
        start(tiny_model, scheduler_cls=None)


def test_all_reasons_are_given_at_once(tiny_model):
    with pytest.raises(UnsupportedError) as refusal:
        start(tiny_model, scheduler_cls=None, enable_prefix_caching=False)
    assert str(refusal.value).count("\n  - ") == 2
    assert "Prefix caching is off" in str(refusal.value)


def test_an_ordinary_engine_of_the_same_process_keeps_vllms_own_attention(tiny_model):
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from lazyrag.backend.plugin.attention_cpu import LazyCPUImpl

    for arguments, impl in (
        ({}, LazyCPUImpl),
        ({"scheduler_cls": None, "worker_cls": "auto"}, CPUAttentionBackendImpl),
    ):
        llm = start(tiny_model, **arguments)
        context = llm.llm_engine.engine_core.engine_core.vllm_config.compilation_config.static_forward_context
        assert {type(layer.impl) for layer in context.values()} == {impl}
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()
