"""The Hopper kernel compiles, fits a block's shared memory and keeps its results in registers; it runs in tests/gpu.

Compiling needs no GPU and takes some seconds for each variant (Triton keeps what it has compiled). It is done by the
Triton that comes with vLLM on GPU machines (`make .triton-3.6.0` fetches it), and by the one that is installed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from offline import GPT_J, H200, LLAMA_8B, SMOLLM, Compiled, compile_variant, spilled_bytes

from lazyrag.kernels import hopper
from lazyrag.kernels.dispatch import Shape, variants
from lazyrag.kernels.plan import Capacity, DevicePlan, Tiling
from lazyrag.kernels.reduce import Workspace

RESERVED = 1024
"""Shared memory that CUDA takes for each block, in bytes."""


VARIANTS = {
    "llama-whole": (LLAMA_8B, "whole"),
    "llama-decode": (LLAMA_8B, "decode"),
    "llama-few": (LLAMA_8B, "few"),
    "smollm-whole": (SMOLLM, "whole"),
    "smollm-decode": (SMOLLM, "decode"),
    "smollm-few": (SMOLLM, "few"),
    "gptj-decode": (GPT_J, "decode"),
    "gptj-few": (GPT_J, "few"),
    "gptj-whole": (GPT_J, "whole"),
}


@pytest.mark.parametrize("name", ["llama-whole", "gptj-few"])
def test_a_variant_compiles_with_the_installed_triton(compiled: Callable[..., object], name: str) -> None:
    assert_fits_an_sm(compiled(compile_variant, *VARIANTS[name]), *VARIANTS[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_compiles_with_the_triton_of_vllm(compiled_as_on_gpus: Callable[..., object], name: str) -> None:
    assert_fits_an_sm(compiled_as_on_gpus(compile_variant, *VARIANTS[name]), *VARIANTS[name])


def assert_fits_an_sm(result: object, shape: Shape, name: str) -> None:
    assert isinstance(result, Compiled)
    blocks = variants(shape, H200)[name].blocks_per_sm
    assert blocks * (result.shared_bytes + RESERVED) <= H200.shared_bytes + RESERVED
    assert "wgmma.mma_async" in result.ptx
    assert "cp.async.bulk.tensor" in result.ptx
    assert not [note for note in result.notes if "serialized" in note]
    assert spilled_bytes(result) <= 32


def attend(query: torch.Tensor, kv_cache: torch.Tensor, launch: hopper.Launch, block_m: int = 64) -> torch.Tensor:
    plan = DevicePlan(Tiling(4, block_m, 64, 16), Capacity(1, 1, 1, 1, 1, 1), query.device)
    workspace = Workspace(1, 1, 64, 64, query.device)
    turns = torch.zeros(1, 64)
    return hopper.attend(query, kv_cache, query, plan, workspace, scale=1.0, turns=turns, launch=launch)


def test_tensors_that_it_cannot_run_are_refused() -> None:
    query, cache = torch.zeros(2, 4, 64, dtype=torch.bfloat16), torch.zeros(3, 16, 1, 128, dtype=torch.bfloat16)
    launch = hopper.Launch(stages=2)
    with pytest.raises(ValueError, match="needs 16-bit tensors"):
        attend(query.float(), cache.float().transpose(1, 2), launch)
    with pytest.raises(ValueError, match="needs 16-bit tensors"):
        attend(query, torch.zeros(3, 1, 16, 128, dtype=torch.float8_e4m3fn), launch)
    with pytest.raises(ValueError, match="query tiles of 32 rows"):
        attend(query, cache.transpose(1, 2), launch, block_m=32)


def test_a_cache_is_described_by_pages_and_columns() -> None:
    cache = torch.zeros(5, 32, 2, 128, dtype=torch.bfloat16).transpose(1, 2)
    description = hopper.describe_cache(cache)
    assert (description.shape, description.strides) == ([5, 32, 256], [32 * 256, 256, 1])
    assert description.block_shape == [1, 32, 64]
