"""The kernels on the GPU against the oracle: every variant that `dispatch` may pick there, and the portable kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import Case, Problem, Request, Tile, batches, check, check_portable, make_problem, plan_rows, solve
from offline import GPT_J, LLAMA_8B, SMOLLM
from torch import Tensor

from lazyrag.kernels import dispatch, portable
from lazyrag.kernels.plan import Capacity, DevicePlan, Tiling, make_plan, turn_table
from lazyrag.kernels.reduce import Workspace

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HOPPER = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU (sm_90)"
)
SHAPES = {
    "llama": LLAMA_8B,
    "smollm-p32": SMOLLM,
    "gptj-fp16-p64": GPT_J,
    "mha": replace(LLAMA_8B, num_heads=2, kv_heads=2),
    "mqa8": replace(LLAMA_8B, num_heads=8, kv_heads=1),
    "group7-p64": replace(LLAMA_8B, num_heads=28, kv_heads=4, page=64),
    "group71-d64": replace(LLAMA_8B, num_heads=71, kv_heads=1, head_size=64, rotary_dim=64),
}
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
BATCHES = list(batches(1))


def case_of(shape: dispatch.Shape, batch: str, queries: int) -> Case:
    requests, more = batches(queries, long=8)[batch]
    return Case(
        batch,
        requests,
        shape.kv_heads,
        shape.group,
        shape.head_size,
        shape.rotary_dim,
        shape.neox,
        shape.page,
        DTYPES[shape.dtype],
        **more,
    )


def run(variant: dispatch.Variant, problem: Problem, slots: int, fixed: bool = False) -> Tensor:
    tiling = variant.tiling
    size = Tile(tiling.block_m, tiling.tile, slots, fixed)
    return solve(problem, size, partial(dispatch.attend, variant))


def hopper_variants() -> list[tuple[str, str]]:
    h200 = dispatch.Gpu((9, 0), 132, 232_448)
    return [(name, variant) for name, shape in SHAPES.items() for variant in dispatch.variants(shape, h200)]


@HOPPER
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("shape", "name"), hopper_variants())
def test_a_hopper_variant_is_exact(shape: str, name: str, batch: str) -> None:
    model = SHAPES[shape]
    gpu = dispatch.Gpu.of(torch.device("cuda", 0))
    variant = dispatch.variants(model, gpu)[name]
    for queries in {"decode": (1,), "few": (1, 5)}.get(name, (7, 150)):
        problem = make_problem(case_of(model, batch, queries))
        for slots in (1, variant.slots(gpu, model.kv_heads)):
            check(problem, run(variant, problem, slots, fixed=slots > 1))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["few", "many"])
@pytest.mark.parametrize("shape", ["llama", "smollm-p32", "gptj-fp16-p64"])
def test_a_portable_variant_is_exact(shape: str, name: str, batch: str) -> None:
    gpu = dispatch.Gpu.of(torch.device("cuda", 0))
    # A page order that the Hopper kernel does not serve selects the portable one.
    model = replace(SHAPES[shape], heads_side_by_side=False)
    variant = dispatch.variants(model, gpu)[name]
    for queries in (1, 3) if name == "few" else (33, 150):
        problem = make_problem(replace(case_of(model, batch, queries), heads_first=True))
        check(problem, run(variant, problem, variant.slots(gpu, model.kv_heads)))


FEW = Request(((50, 5, 0), (310, 60, 1)), 12, 3)


@pytest.mark.parametrize(
    "case",
    [
        *(Case("few", (FEW,), head_size=d, dtype="bfloat16") for d in (96, 256)),
        Case("few", (FEW,), head_size=96, rotary_dim=24, dtype="bfloat16"),
        Case("few", (FEW,), head_size=128, dtype="float32"),
        Case("few", (FEW,), head_size=128, dtype="bfloat16", fp8=True),
        Case("few", (FEW,), head_size=64, dtype="float16", fp8=True),
        Case("few", (FEW,), head_size=128, dtype="bfloat16", fp8=True, fp8_query=True),
        Case("few", (FEW,), head_size=64, alibi=True),
    ],
    ids=str,
)
def test_the_portable_kernel_serves_what_the_hopper_kernel_does_not(case: Case) -> None:
    check_portable(case, Tile(block_m=16, slots=8))
    check_portable(case, Tile(block_m=64, slots=1))


def attend_with(variant: dispatch.Variant | None) -> Callable[..., Tensor]:
    return portable.attend if variant is None else partial(dispatch.attend, variant)


@HOPPER
@pytest.mark.parametrize("name", ["decode", "few", "whole", "portable"])
def test_one_captured_graph_serves_every_later_batch(name: str) -> None:
    """Three batches of other lengths, segments and visibility through one launch and one set of buffers."""
    device, gpu = torch.device("cuda", 0), dispatch.Gpu.of(torch.device("cuda", 0))
    variant = None if name == "portable" else dispatch.variants(LLAMA_8B, gpu)[name]
    tiling = Tiling(4, 16, 64, 16) if variant is None else variant.tiling
    steps = [
        (Request(((300, 5, 0), (64, 9, 0)), 20, 1), Request((), 7, 1), Request(((1000, 70, 3),), 65, 1)),
        (Request((), 1, 1), Request(((2000, 5, 0),) * 5, 500, 1), Request(((1, 3, 0),), 3, 1)),
        (
            Request(tuple((17, i, i) for i in range(20)), 11, 1),
            Request(((512, 8, 0),), 64, 1),
            Request(((4000, 11, 0),), 90, 1),
        ),
    ]
    capacity = Capacity(runs=64, work=90, splits=16, queries=3, tiles=400, slots=90)
    plan = DevicePlan(tiling, capacity, device, fixed=True)
    workspace = Workspace(capacity.slots, 8, tiling.block_m, 128, device)
    cache = torch.full((2000, 16, 8, 256), float("nan"), dtype=torch.bfloat16, device=device).transpose(1, 2)
    turns = torch.zeros(64, 128, device=device)
    query = torch.zeros(3, 32, 128, dtype=torch.bfloat16, device=device)
    out = torch.zeros_like(query)
    table = torch.zeros(3, 700, dtype=torch.int32, device=device)
    graph = None
    for number, requests in enumerate(steps):
        problem = make_problem(Case(f"step{number}", requests, 8, 4, 128, dtype="bfloat16"), device)
        cache.fill_(float("nan"))
        cache[: len(problem.kv_cache)] = problem.kv_cache
        rows, shifts = plan_rows(problem.case)
        turns[: len(shifts)] = turn_table(problem.rope, shifts).to(device)
        query.copy_(problem.query)
        table[:, : problem.block_table.shape[1]] = problem.block_table
        plan.load(make_plan(rows, tiling, 16, capacity), table)
        if graph is None:
            launch = partial(attend_with(variant), query, cache, out, plan, workspace, scale=problem.scale, turns=turns)
            launch()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                launch()
        out.fill_(float("nan"))
        workspace.part.fill_(float("nan"))
        graph.replay()
        check(problem, out)


@HOPPER
@pytest.mark.parametrize("name", ["decode", "few", "whole", "portable"])
def test_a_cache_of_more_than_2_31_elements(name: str) -> None:
    """Offsets into the cache need 64 bits: the pages in use lie at its far end."""
    device, gpu = torch.device("cuda", 0), dispatch.Gpu.of(torch.device("cuda", 0))
    variant = None if name == "portable" else dispatch.variants(LLAMA_8B, gpu)[name]
    tiling = Tiling(4, 16, 64, 16) if variant is None else variant.tiling
    small = make_problem(case_of(LLAMA_8B, "literals-between", 1), device)
    per_block = 16 * 8 * 256
    num_blocks = 2**31 // per_block + 2 * len(small.kv_cache)
    cache = torch.empty(num_blocks, 16, 8, 256, dtype=torch.bfloat16, device=device).transpose(1, 2)
    offset = num_blocks - len(small.kv_cache)
    cache[offset:] = small.kv_cache
    assert offset * per_block > 2**31
    table = torch.where(small.block_table < len(small.kv_cache), small.block_table + offset, small.block_table)
    large = replace(small, kv_cache=cache, block_table=table.int())
    out = solve(large, Tile(tiling.block_m, tiling.tile, 16), attend_with(variant))
    check(small, out)


@HOPPER
@pytest.mark.parametrize("name", ["decode", "few", "whole"])
def test_the_ring_of_keys_and_values_gives_the_same_bits_every_time(name: str) -> None:
    """A missing barrier shows as bits that change: many launches, beside copies that disturb their timing."""
    gpu = dispatch.Gpu.of(torch.device("cuda", 0))
    variant = dispatch.variants(LLAMA_8B, gpu)[name]
    queries = {"decode": 1, "few": 5}.get(name, 150)
    lengths = [(137 + 64 * i, 31 * i, 0) for i in range(20)]
    problem = make_problem(Case("ring", (Request(tuple(lengths), 200, queries),) * 2, 8, 4, 128, dtype="bfloat16"))
    noise = torch.empty(1 << 26, device="cuda")
    other = torch.cuda.Stream()

    def attend(*args: object, **kwargs: object) -> Tensor:
        with torch.cuda.stream(other):
            for _ in range(20):
                noise.copy_(noise.flip(0))
        first = dispatch.attend(variant, *args, **kwargs).clone()
        for _ in range(200):
            assert torch.equal(dispatch.attend(variant, *args, **kwargs), first)
        return first

    check(problem, solve(problem, Tile(variant.tiling.block_m, variant.tiling.tile, 16), attend, repeats=1))
