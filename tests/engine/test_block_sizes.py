"""The CPU backend takes every block size that vLLM offers there."""

import pytest
from engines import Config, Text
from oracle import Prompt, Use
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from lazyrag.backend.local import device_arguments
from lazyrag.modes import ReuseMode


@pytest.mark.parametrize(
    "engine",
    [Config(f"blocks-{n}", num_blocks=60, block_size=n) for n in (32, 128)],
    ids=str,
    indirect=True,
)
def test_chunks_are_reused_with_blocks_of(engine):
    text, size = Text(11), engine.config.block_size
    a, b, c = Use(text(37)), Use(text(128)), Use(text(200))
    engine.check(Prompt([text(11), a, text(5), b, c, text(21)]), children=3)
    padded = sum(-(-n // size) * size for n in (200, 37, 128))
    engine.check(Prompt([c, text(30), a, text(5), b, text(9)]), children=0, cached=[padded])
    head = Use(c.chunk, offset=128)
    engine.check(Prompt([c.chunk[:128], head, text(2)]), Prompt([text(50)]), children=0)


@pytest.mark.parametrize(("given", "taken"), [(None, 32), (16, 32), (32, 32), (48, 64)])
def test_an_exact_engine_on_a_cpu_gets_blocks_that_vllms_own_attention_takes(given, taken):
    arguments = {"block_size": given, "kv_cache_memory_bytes": None}
    block_size = device_arguments(arguments, ReuseMode.parse("exact"))["block_size"]
    assert block_size == taken
    assert all(block_size % size.base == 0 for size in CPUAttentionBackend.get_supported_kernel_block_sizes())
    assert given is None or device_arguments(arguments, ReuseMode.parse("lazy"))["block_size"] == given
