"""Problems for the attention kernels, the exact answer, and how far a kernel may be from it.

A problem is a paged cache in which only real tokens are finite: every pad, every free page and every partial result is
NaN, and block tables point outside the cache behind a request's last page. So a kernel that reads one token too many,
or multiplies one with zero, cannot pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lazyrag.kernels import reference
from lazyrag.kernels.rope import Rope

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OUTSIDE = 2**30


@dataclass(frozen=True)
class Request:
    """`segments`: (tokens, shift, visible from) of each."""

    segments: tuple[tuple[int, int, int], ...]
    suffix: int
    queries: int

    @property
    def lengths(self) -> tuple[int, ...]:
        return (*(n for n, _, _ in self.segments), self.suffix)


@dataclass(frozen=True)
class Case:
    """`shared`: pairs of (request, segment) with the same pages. `heads_first`: a page is [head, token] in memory."""

    name: str
    requests: tuple[Request, ...]
    kv_heads: int = 2
    group: int = 4
    head_size: int = 64
    rotary_dim: int | None = None
    neox: bool = True
    page: int = 16
    dtype: str = "float32"
    fp8: bool = False
    fp8_query: bool = False
    alibi: bool = False
    heads_first: bool = False
    shared: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = ()

    def __str__(self) -> str:
        sizes = (
            f"{self.name}-Hq{self.kv_heads * self.group}-H{self.kv_heads}-D{self.head_size}-P{self.page}-{self.dtype}"
        )
        flags = {
            "fp8": self.fp8,
            "fp8_query": self.fp8_query,
            "alibi": self.alibi,
            "interleaved": not self.neox,
            f"R{self.rotary_dim}": self.rotary_dim is not None,
            "heads_first": self.heads_first,
        }
        return "-".join([sizes, *(flag for flag, is_set in flags.items() if is_set)])


@dataclass
class Problem:
    case: Case
    query: Tensor  # [Q, Hq, D], a strided slice
    kv_cache: Tensor  # [blocks, H, page, 2 * D]
    block_table: Tensor
    rope: Rope
    scale: float
    k_scale: float
    v_scale: float
    slopes: Tensor

    def keys(self, request: int, run: int) -> tuple[Tensor, Tensor]:
        """Stored keys and values of a segment, or of the suffix (the last run), in float32 and to scale, [n, H, D]."""
        first, end, tokens = columns(self.case, request, run)
        k, v = reference.gather(self.kv_cache, self.block_table[request, first:end], tokens)
        return k * self.k_scale, v * self.v_scale


def columns(case: Case, request: int, run: int) -> tuple[int, int, int]:
    """First and end column of a run in the block table, and its tokens."""
    lengths = case.requests[request].lengths
    first = sum(-(-n // case.page) for n in lengths[:run])
    return first, first + -(-lengths[run] // case.page), lengths[run]


def make_problem(case: Case, device: torch.device = DEVICE) -> Problem:
    random = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
    dtype = getattr(torch, case.dtype)
    needed = [columns(case, r, len(q.lengths) - 1)[1] for r, q in enumerate(case.requests)]
    num_blocks = sum(needed) + 5
    shape = (num_blocks, case.page, case.kv_heads, 2 * case.head_size)
    kv = torch.randn(shape, generator=random)
    permutation = torch.randperm(num_blocks, generator=random).int()
    table = torch.full((len(case.requests), max(needed) + 2), OUTSIDE, dtype=torch.int32)
    start = 0
    for r, count in enumerate(needed):
        table[r, :count] = permutation[start : start + count]
        start += count
    for (r, s), (r2, s2) in case.shared:
        (first, end, n), (first2, end2, n2) = columns(case, r, s), columns(case, r2, s2)
        assert n == n2
        table[r2, first2:end2] = table[r, first:end]
    real = torch.zeros(num_blocks, case.page, dtype=torch.bool)
    for r, request in enumerate(case.requests):
        for run in range(len(request.lengths)):
            first, end, tokens = columns(case, r, run)
            for i, block in enumerate(table[r, first:end].tolist()):
                real[block, : min(case.page, tokens - i * case.page)] = True
    kv[~real] = float("nan")
    kv = kv.to(torch.float8_e4m3fn if case.fp8 else dtype).transpose(1, 2)
    num_queries, heads = sum(q.queries for q in case.requests), case.kv_heads * case.group
    qkv = torch.randn(num_queries, heads + 2, case.head_size, generator=random).to(dtype)
    qkv[:, heads:] = float("nan")
    q_scale = 0.5 if case.fp8_query else 1.0
    if case.fp8_query:
        qkv = qkv.to(torch.float8_e4m3fn)
    rotary_dim = case.head_size if case.rotary_dim is None else case.rotary_dim
    inv_freq = 500_000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    return Problem(
        case,
        qkv.to(device)[:, :heads],
        (kv.contiguous() if case.heads_first else kv).to(device),
        table.to(device),
        Rope(inv_freq, case.head_size, case.neox),
        q_scale * case.head_size**-0.5,
        *((0.5, 2.0) if case.fp8 else (1.0, 1.0)),
        (2.0 ** -torch.arange(1, heads + 1)).float().to(device),
    )


# ---------------------------------------------------------------- answers


def per_request(problem: Problem) -> Iterator[tuple[int, Request, Tensor]]:
    """Number, request and queries of each request."""
    start = 0
    for r, request in enumerate(problem.case.requests):
        yield r, request, problem.query[start : start + request.queries]
        start += request.queries


def exact(problem: Problem) -> Tensor:
    """The oracle's answer in float32."""
    if problem.case.alibi:
        return torch.cat([exact_alibi(problem, r, request, q) for r, request, q in per_request(problem)])
    out = []
    for r, request, q in per_request(problem):
        runs = [
            reference.KeyRun(*problem.keys(r, s), shift, visible_from)
            for s, (_, shift, visible_from) in enumerate(request.segments)
        ]
        k, v = problem.keys(r, len(request.segments))
        freq = problem.rope.inv_freq.to(q.device)
        out.append(
            reference.suffix_attention(q, runs, k, v, scale=problem.scale, inv_freq=freq, neox=problem.case.neox)
        )
    return torch.cat(out)


def true_positions(request: Request) -> tuple[list[Tensor], Tensor]:
    """Of each segment's tokens, and of the suffix's."""
    index = torch.arange(request.suffix)
    suffix = index + sum(((index >= seen) * n for n, _, seen in request.segments), torch.zeros_like(index))
    before = [sum(n for n, _, _ in request.segments[:s]) for s in range(len(request.segments))]
    segments = [seen + b + torch.arange(n) for b, (n, _, seen) in zip(before, request.segments, strict=True)]
    return segments, suffix


def exact_alibi(problem: Problem, r: int, request: Request, q: Tensor) -> Tensor:
    """Naive ALiBi: all keys side by side, a bias for each pair of true positions, one softmax."""
    keys, values = zip(*(problem.keys(r, run) for run in range(len(request.lengths))), strict=True)
    k, v = (torch.cat(x).repeat_interleave(problem.case.group, 1) for x in (keys, values))
    segments, suffix = true_positions(request)
    at = torch.cat([*segments, suffix]).to(q.device)
    j = torch.arange(request.suffix - request.queries, request.suffix)
    seen = [(j[:, None] >= visible).expand(-1, n) for n, _, visible in request.segments]
    seen.append(torch.arange(request.suffix)[None, :] <= j[:, None])
    distance = suffix[j].to(q.device)[:, None] - at[None, :]
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * problem.scale - problem.slopes[:, None, None] * distance
    hidden = ~torch.cat(seen, 1).to(q.device)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def plain(problem: Problem) -> Tensor:
    """What plain torch makes of it in the problem's dtype: keys are turned and rounded, then two matrix products."""
    dtype, out = getattr(torch, problem.case.dtype), []
    freq = problem.rope.inv_freq.to(problem.query.device)
    for r, request, q in per_request(problem):
        keys, values, hidden = [], [], []
        j = torch.arange(request.suffix - request.queries, request.suffix, device=q.device)[:, None]
        for run, n in enumerate(request.lengths):
            k, v = problem.keys(r, run)
            if run < len(request.segments):
                _, shift, visible_from = request.segments[run]
                k = reference.rotate(k, shift, freq, neox=problem.case.neox)
                hidden.append((j < visible_from).expand(-1, n))
            else:
                hidden.append(torch.arange(n, device=q.device)[None, :] > j)
            keys.append(k.to(dtype).repeat_interleave(problem.case.group, 1))
            values.append(v.to(dtype).repeat_interleave(problem.case.group, 1))
        scores = torch.einsum("qhd,khd->hqk", q.to(dtype), torch.cat(keys)) * problem.scale
        weights = scores.masked_fill(torch.cat(hidden, 1), float("-inf")).float().softmax(-1).to(dtype)
        out.append(torch.einsum("hqk,khd->qhd", weights, torch.cat(values)))
    return torch.cat(out)


def assert_close(out: Tensor, answer: Tensor, plain_out: Tensor, num_keys: int) -> None:
    """A 16-bit result may be off by twice what plain torch in the same dtype is, beside the rounding of the output.

    Plain torch in float32 is the oracle itself but for the order of sums; there the bound is what another order makes
    of a sum of `num_keys` terms of random sign, relative to the sum: eps * sqrt(num_keys).
    """
    assert torch.isfinite(out).all(), "not finite"
    error, allowed = out.float() - answer, plain_out.float() - answer
    off = f"off by {error.norm() / answer.norm():.2e} of the norm, plain torch by {allowed.norm() / answer.norm():.2e}"
    if out.dtype == torch.float32:
        assert error.norm() <= torch.finfo(torch.float32).eps * num_keys**0.5 * answer.norm(), off
        return
    rounding = (answer.to(out.dtype) + 0.3 - 0.3).float() - answer
    assert error.norm() <= 2 * allowed.norm() + rounding.norm(), off
    assert error.abs().max() <= 2 * allowed.abs().max() + 2 * rounding.abs().max(), off


# ---------------------------------------------------------------- running a kernel


@dataclass(frozen=True)
class Tile:
    """Sizes of a kernel that do not follow from the case; `slots` as of `plan.make_plan`; `fixed`: as in a graph."""

    block_m: int = 16
    tile: int = 64
    slots: int = 4
    fixed: bool = False


def plan_rows(case: Case):
    """The case's requests as rows of a plan, and the shift of each line of their table of rotations."""
    from lazyrag.kernels.plan import Context, Row

    rows, shifts = [], [0]
    for r, request in enumerate(case.requests):
        segments = [
            (columns(case, r, s)[0], n, seen, len(shifts) + s) for s, (n, _, seen) in enumerate(request.segments)
        ]
        context = Context.of(segments, columns(case, r, len(segments))[0])
        rows.append(Row(request.queries, request.suffix, context))
        shifts += [shift for _, shift, _ in request.segments]
    return rows, shifts


def solve(problem: Problem, size: Tile, attend: Callable[..., Tensor], repeats: int = 2) -> Tensor:
    """Plan the problem and run a kernel over it, twice: what the first run left behind must not matter."""
    # Imported here: the interpreter's process says first that Triton shall be interpreted.
    from lazyrag.kernels.plan import Capacity, DevicePlan, Tiling, make_plan, turn_table
    from lazyrag.kernels.reduce import Workspace

    case, device = problem.case, problem.query.device
    rows, shifts = plan_rows(case)
    plan = make_plan(rows, Tiling(case.group, size.block_m, size.tile, case.page), size.slots)
    more = 3 if size.fixed else 0
    capacity = Capacity(*(getattr(plan.size, name) + more for name in Capacity.__slots__))
    on_device = DevicePlan(plan.tiling, capacity, device, fixed=size.fixed)
    on_device.load(plan, problem.block_table)
    workspace = Workspace(max(1, capacity.slots), case.kv_heads, size.block_m, case.head_size, device)
    outs = []
    for _ in range(repeats):
        workspace.part.fill_(float("nan"))
        workspace.stat.fill_(float("nan"))
        out = torch.full(problem.query.shape, float("nan"), dtype=getattr(torch, case.dtype), device=device)
        if case.alibi:
            kwargs = {"alibi": alibi(problem, on_device, plan)}
        else:
            kwargs = {"turns": turn_table(problem.rope, shifts).to(device), "neox": case.neox}
        if case.fp8:
            kwargs |= {"k_scale": problem.k_scale, "v_scale": problem.v_scale}
        outs.append(attend(problem.query, problem.kv_cache, out, on_device, workspace, scale=problem.scale, **kwargs))
    for out in outs[1:]:
        assert torch.equal(out, outs[0]), "two runs differ"
    return outs[0]


def alibi(problem: Problem, on_device, plan):
    """True positions for the kernel's second method: of the queries, and of each token of each tile."""
    from lazyrag.kernels.plan import SUFFIX
    from lazyrag.kernels.portable import Alibi

    tile = plan.tiling.tile
    keys = torch.full((len(on_device.tiles), tile), OUTSIDE, dtype=torch.int32)
    queries = []
    positions = [true_positions(request) for request in problem.case.requests]
    for request, (_, suffix) in zip(problem.case.requests, positions, strict=True):
        queries.append(suffix[request.suffix - request.queries :])
    for r, _, tokens, first_tile, _, segment in plan.runs.tolist():
        segments, suffix = positions[r]
        at = suffix if segment == SUFFIX.value else segments[segment]
        count = -(-tokens // tile)
        for i in range(count):
            part = at[i * tile : (i + 1) * tile]
            keys[first_tile + (count - 1 - i if segment == SUFFIX.value else i), : len(part)] = part
    device = problem.query.device
    return Alibi(problem.slopes, torch.cat(queries).int().to(device), keys.to(device))


def check_portable(case: Case, size: Tile) -> None:
    """The portable kernel is right about a case."""
    from lazyrag.kernels import portable

    problem = make_problem(case)
    check(problem, solve(problem, size, portable.attend))


def check(problem: Problem, out: Tensor) -> None:
    """An answer is right."""
    case, answer = problem.case, exact(problem)
    num_keys = max(sum(request.lengths) for request in case.requests)
    assert_close(out, answer, answer if case.alibi else plain(problem), num_keys)


# ---------------------------------------------------------------- what requests look like


def batches(queries: int, long: int = 1) -> dict[str, tuple[tuple[Request, ...], dict[str, object]]]:
    """Batches of requests that compute `queries` tokens each; `long` stretches some segments (for a GPU)."""
    q = queries
    ragged = ((1, 5, 0), (16, 21, 0), (17, 900, 0), (64, 77, 0), (100, 40_000, 0), (63 * long, 3, 0))
    between = tuple((n, shift, 2 * i + 1) for i, (n, shift, _) in enumerate(ragged))
    twenty = tuple((16 + 7 * i, 11 * i, 0) for i in range(20))
    return {
        "ragged": ((Request(ragged, 40 + q, q), Request(((33, 7, 0),), q, q)), {}),
        "no-segments": ((Request((), 70 + q, q), Request((), q, q)), {}),
        "twenty-segments": ((Request(twenty, 20 + q, q),), {}),
        "shared-chunk": (
            (
                Request(((50, 5, 0), (31, 60, 0)), 9 + q, q),
                Request(((20, 1, 0), (50, 131_072, 0)), 3 + q, q),
            ),
            {"shared": (((0, 0), (1, 1)),)},
        ),
        "chunk-twice": ((Request(((50, 5, 0), (50, -60, 0)), 9 + q, q),), {"shared": (((0, 0), (0, 1)),)}),
        "mixed": (
            (
                Request(((50, 5, 0), (50, 60, 0)), 9 + q, q),
                Request((), 30 + q, q),
                Request(((200 * long, 9, 0),), q, q),
            ),
            {},
        ),
        "whole-tiles": (
            (
                Request(((128, 9, 0), (64, 40, 0), (192, 3, 0)), 128 + q, q),
                Request(((112, 9, 0), (80, 40, 0)), q, q),
            ),
            {},
        ),
        "literals-between": ((Request(between, 4 + q, q), Request(between[:2], q, q)), {}),
    }
