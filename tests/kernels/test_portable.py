"""The portable kernel: against the oracle in Triton's interpreter, and through the compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cases import Case, Request, Tile, batches, check_portable, make_problem, solve
from offline import A100, H200, LLAMA_8B, RTX_4090, Compiled, compile_portable

from lazyrag.kernels.dispatch import FP8, Gpu, Shape

Interpreted = Callable[..., object]
"""Calls a function in another process (conftest.py)."""

DECODE, PREFILL = Tile(block_m=16, slots=4), Tile(block_m=32, slots=1)
FEW = Request(((50, 5, 0), (31, 60, 1)), 12, 3)
"""A short request that has everything: pads, two shifts, a literal between the segments."""


def every_batch(queries: int, **sizes: object) -> list[Case]:
    return [Case(name, requests, **sizes, **more) for name, (requests, more) in batches(queries).items()]


@pytest.mark.parametrize("case", every_batch(1), ids=str)
def test_decode_over_segments_is_exact(interpreted: Interpreted, case: Case) -> None:
    interpreted(check_portable, case, DECODE)


@pytest.mark.parametrize("case", every_batch(9, kv_heads=1, head_size=32), ids=str)
def test_prefill_of_a_suffix_over_segments_is_exact(interpreted: Interpreted, case: Case) -> None:
    interpreted(check_portable, case, PREFILL)


@pytest.mark.parametrize("case", every_batch(3, head_size=16)[-2:], ids=str)
def test_a_plan_of_fixed_size_gives_the_same(interpreted: Interpreted, case: Case) -> None:
    interpreted(check_portable, case, Tile(block_m=16, slots=8, fixed=True))


@pytest.mark.parametrize(("group", "block_m"), [(1, 16), (3, 16), (7, 32), (8, 16), (71, 128)], ids=lambda n: str(n))
def test_any_number_of_heads_may_share_a_key_head(interpreted: Interpreted, group: int, block_m: int) -> None:
    interpreted(check_portable, Case("few", (FEW,), kv_heads=1, group=group, head_size=16), Tile(block_m, slots=2))


@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
def test_heads_of_every_size(interpreted: Interpreted, head_size: int) -> None:
    interpreted(check_portable, Case("few", (FEW,), kv_heads=1, head_size=head_size), DECODE)


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [96, 32, 24])
def test_partial_and_interleaved_rotations(interpreted: Interpreted, rotary_dim: int, neox: bool) -> None:
    case = Case("few", (FEW,), kv_heads=1, head_size=96, rotary_dim=rotary_dim, neox=neox)
    interpreted(check_portable, case, DECODE)


@pytest.mark.parametrize("page", [32, 64])
def test_pages_of_every_size(interpreted: Interpreted, page: int) -> None:
    ragged, _ = batches(2)["ragged"]
    interpreted(check_portable, Case("ragged", ragged, kv_heads=1, head_size=16, page=page), DECODE)


def test_a_cache_with_the_heads_of_a_page_in_front(interpreted: Interpreted) -> None:
    interpreted(check_portable, Case("few", (FEW,), head_size=16, heads_first=True), DECODE)


def test_half_precision_is_as_good_as_plain_torch(interpreted: Interpreted) -> None:
    ragged, _ = batches(4)["ragged"]
    interpreted(check_portable, Case("ragged", ragged, kv_heads=1, dtype="float16"), DECODE)


def test_fp8_keys_and_values_are_scaled(interpreted: Interpreted) -> None:
    interpreted(check_portable, Case("few", (FEW,), kv_heads=1, fp8=True), DECODE)
    interpreted(check_portable, Case("few", (FEW,), kv_heads=1, fp8=True, dtype="float16"), DECODE)


def test_fp8_queries_are_turned_as_exactly_as_others(interpreted: Interpreted) -> None:
    """vLLM quantises queries where the cache is: they are turned in float32, and rounded once."""
    requests, _ = batches(3)["literals-between"]
    for dtype in ("float32", "float16"):
        case = Case("between", requests, kv_heads=1, head_size=32, fp8=True, fp8_query=True, dtype=dtype)
        interpreted(check_portable, case, DECODE)


@pytest.mark.parametrize("queries", [1, 9])
def test_alibi_sees_true_distances(interpreted: Interpreted, queries: int) -> None:
    """Segments stand at true positions with literals between them; nothing is rotated."""
    for name in ("literals-between", "mixed"):
        requests, _ = batches(queries)[name]
        interpreted(check_portable, Case(name, requests, head_size=32, alibi=True), DECODE)


def test_a_context_of_128k_tokens(interpreted: Interpreted) -> None:
    """Positions, tiles and shifts beyond 16 bits; a shift beyond the context's length."""
    request = Request(((131_072, 200_000, 0), (65, -131_000, 1)), 30, 2)
    interpreted(check_portable, Case("long", (request,), kv_heads=1, group=1, head_size=16, page=64), Tile(tile=1024))


def wrong(change: str) -> None:
    from lazyrag.kernels import portable

    problem = make_problem(Case("few", (FEW,), head_size=16))

    def attend(query, kv_cache, output, plan, workspace, *, scale, turns, neox):
        if change == "heads":
            kv_cache = kv_cache[:, :1]
        elif change == "page":
            kv_cache = torch.cat([kv_cache, kv_cache], 2)
        elif change == "dtype":
            kv_cache = kv_cache.half()
        elif change == "turns":
            turns = torch.cat([turns, turns], 1)
        elif change == "output":
            output = output.transpose(1, 2).contiguous().transpose(1, 2)
        return portable.attend(query, kv_cache, output, plan, workspace, scale=scale, turns=turns, neox=neox)

    solve(problem, DECODE, attend, repeats=1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("heads", "kv_cache must have shape"),
        ("page", "kv_cache must have shape"),
        ("dtype", "kv_cache must be torch.float32 as output or float8_e4m3fn"),
        ("turns", "lines of 32, must be even and at most 16"),
        ("output", "heads of a token must be contiguous in output"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(interpreted: Interpreted, change: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        interpreted(wrong, change)


@pytest.mark.parametrize(
    ("shape", "gpu", "name"),
    [
        (LLAMA_8B, A100, "many"),
        (replace(LLAMA_8B, head_size=256, rotary_dim=256, dtype=torch.float32, kv_dtype=torch.float32), A100, "few"),
        (replace(LLAMA_8B, kv_dtype=FP8), RTX_4090, "few"),
        (replace(LLAMA_8B, head_size=96, rotary_dim=24, neox=False), H200, "few"),
        (replace(LLAMA_8B, head_size=256, rotary_dim=256), H200, "many"),
        (replace(LLAMA_8B, kv_dtype=FP8), H200, "many"),
    ],
    ids=["llama-A100", "float32-D256-A100", "fp8-RTX4090", "partial-H200", "D256-H200", "fp8-H200"],
)
def test_a_variant_compiles_and_fits_a_block(compiled: Interpreted, shape: Shape, gpu: Gpu, name: str) -> None:
    """The interpreter takes what the compiler does not. And keys are loaded ahead of their use: the compiler gives that
    up without a word if the loop carries a value that it does not change."""
    result = compiled(compile_portable, shape, gpu, name)
    assert isinstance(result, Compiled)
    assert result.shared_bytes <= gpu.shared_bytes
    assert "cp.async" in result.ptx


def test_alibi_compiles(compiled: Interpreted) -> None:
    result = compiled(compile_portable, replace(LLAMA_8B, rotary_dim=0), H200, "few", True)
    assert isinstance(result, Compiled)
    assert "cp.async" in result.ptx
