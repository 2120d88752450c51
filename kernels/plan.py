"""From the requests of a step to what the attention kernels walk: tiles of keys and slices of work.

A request's block table holds its segments, each padded to whole pages, and then its suffix. The plan cuts that into
*tiles* of up to `tile` tokens that never cross a border, and lists them in an order of its own:

    block table   [ seg 0 | seg 1 | .. | suffix ]
    tiles         [ suffix, last tile first | seg 0 | seg 1 | .. ]
                         ^begin                         ^end        of a query tile that sees segments 0 and 1

A suffix token sees a prefix of its suffix (causality) and a prefix of the segments (`Context.visible_from`). In this
order both are neighbours, so a *query tile* (`block_q` tokens of one request) needs one half-open range of tiles and
never touches a tile that none of its tokens may see. A range is cut into *slices* so that the grid fills the GPU; the
slices of a query tile leave partial results that `kernels.reduce` merges.

Everything here is made once a step and shared by all layers. The host part is numpy on a few hundred integers; a small
device kernel spreads it over the tiles, so the attention loop searches neither segments nor block tables.

Tables, int32, one line each:

    runs    [R, 6]  request, first page (column of its block table), tokens, first tile, turn line, segment or SUFFIX
    tiles   [T, 4]  valid tokens, turn line, segment or SUFFIX, index of the first token in its run
    pages   [T, tile / page]  physical pages
    work    [W, 6]  first query, queries, first tile, end tile, suffix index of the first query, slot or -1 if not cut
    splits  [M, 4]  first query, queries, first slot, slices: the query tiles that were cut
    seen    [Q]     number of segments that each query sees

A *turn line* is a line of the table of rotations (`turn_table`); line 0 turns by nothing and serves every suffix.
"""

# A kernel's pointers and numbers have no types in Python, its constants do.
# mypy: allow-incomplete-defs

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lazyrag.kernels.rope import Rope

SUFFIX = tl.constexpr(1 << 30)
"""The "segment number" of suffix tiles: beyond every visibility limit."""

SLICE_OVERHEAD = 2
"""Cost of starting a slice, and again of merging one, in tiles (H200: about 2 us against 1 us a tile)."""

_EXPAND_TILES = 32


# ---------------------------------------------------------------- what a step consists of


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """The segments of one request, in block-table order. Made when the request arrives, read-only afterwards.

    Attributes:
        runs: [1 + S, 6] lines of the table `runs`, the suffix's first; a step fills in request, tiles, suffix tokens.
        visible_from: [S] index of the first suffix token that sees the segment; ascending.
    """

    runs: np.ndarray
    visible_from: np.ndarray

    @classmethod
    def of(cls, segments: Sequence[tuple[int, int, int, int]], suffix_page: int) -> Context:
        """From (first page, tokens, visible from, turn line) of each segment."""
        lines = [(0, page, tokens, 0, line, s) for s, (page, tokens, _, line) in enumerate(segments)]
        runs = np.array([(0, suffix_page, 0, 0, 0, SUFFIX.value), *lines], dtype=np.int64)
        return cls(runs, np.array([visible_from for _, _, visible_from, _ in segments], dtype=np.int64))

    @property
    def first_page(self) -> np.ndarray:
        """[S] column of the block table where each segment starts."""
        return self.runs[1:, 1]

    @property
    def num_tokens(self) -> np.ndarray:
        """[S] valid tokens."""
        return self.runs[1:, 2]

    @property
    def line(self) -> np.ndarray:
        """[S] turn line of each segment."""
        return self.runs[1:, 4]

    @property
    def suffix_page(self) -> int:
        """Column where the suffix starts."""
        return int(self.runs[0, 1])


NOTHING = Context.of([], 0)
"""The context of an ordinary request: all of its tokens are suffix."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request in one step.

    Attributes:
        queries: tokens computed in this step, the last ones of the suffix; at least 1.
        suffix: tokens of the suffix, the step's queries included.
        context: what it reuses.
    """

    queries: int
    suffix: int
    context: Context = NOTHING


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes that a kernel is compiled for.

    Attributes:
        group: query heads that share a key head.
        block_m: rows (tokens x group) of a query tile.
        tile: tokens of a key tile, a multiple of `page`.
        page: tokens of a page of the cache.
    """

    group: int
    block_m: int
    tile: int
    page: int

    def __post_init__(self) -> None:
        if self.group > self.block_m:
            raise ValueError(f"a query tile of {self.block_m} rows cannot hold the {self.group} heads of a group")
        if self.tile % self.page:
            raise ValueError(f"a tile of {self.tile} tokens is no whole number of pages of {self.page}")

    @property
    def block_q(self) -> int:
        """Query tokens of a query tile."""
        return self.block_m // self.group


@dataclass(frozen=True, slots=True)
class Capacity:
    """Lines of each table. A captured graph serves every plan that fits its capacity."""

    runs: int
    work: int
    splits: int
    queries: int
    tiles: int
    slots: int

    @property
    def entries(self) -> int:
        """Numbers in the tables that come from the host."""
        return self.work * 6 + self.splits * 4 + self.queries + self.runs * 6


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A step on the host: the tables of the module docstring (`tiles` and `pages` exist on the device only).

    Attributes:
        size: lines in use; `size.slots` counts partial results, 0 if no query tile was cut.
        longest: tokens of the longest run.
        most_queries: tokens of the largest query tile.
    """

    tiling: Tiling
    runs: np.ndarray
    work: np.ndarray
    splits: np.ndarray
    seen: np.ndarray
    size: Capacity
    longest: int
    most_queries: int


# ---------------------------------------------------------------- host: the plan of a step


@lru_cache(maxsize=4096)
def _best_slice(counts: tuple[int, ...], slots: int) -> int:
    """The slice length (in tiles) with the shortest schedule on `slots` processors, longest slices first."""
    total, longest = sum(counts), counts[0]
    room = max(slots, len(counts))
    fits = next(
        c for c in range(max(1, total // room), longest + 1) if c == longest or sum(-(-n // c) for n in counts) <= room
    )
    candidates = {fits} | {min(longest, max(4, -(-total * 4 // (slots * f)))) for f in (4, 5, 6, 8, 12)}
    best_end, best = float("inf"), longest
    for length in sorted(candidates, reverse=True):
        slices = [
            n / -(-n // length) + SLICE_OVERHEAD * (1 + (n > length)) for n in counts for _ in range(-(-n // length))
        ]
        ends = [0.0] * slots
        for cost in sorted(slices, reverse=True):
            heapq.heapreplace(ends, ends[0] + cost)
        if max(ends) < best_end:
            best_end, best = max(ends), length
    return best


def _slice_length(counts: np.ndarray, slots: int) -> int:
    """Into slices of how many tiles ranges of `counts` tiles are cut."""
    longest = int(counts.max())
    if len(counts) > 8 * slots:  # more query tiles than can run at once, many times over: they level out by themselves
        return longest
    # Rounded, so that the search is repeated only when a batch has grown by a few percent.
    grain = max(1, longest // 32)
    return _best_slice(tuple(np.sort(-(-counts // grain) * grain)[::-1].tolist()), slots)


def make_plan(rows: Sequence[Row], tiling: Tiling, slots: int, capacity: Capacity | None = None) -> Plan:
    """Plan a step.

    Args:
        rows: the step's requests, in the order of the block table and of the queries.
        tiling: sizes of the kernel that will run.
        slots: thread blocks that run at once for one key head (SMs x blocks an SM / key heads), at least 1.
        capacity: an upper bound for every table; longer slices are chosen until the plan fits.

    Raises:
        ValueError: the plan cannot fit the capacity.
    """
    tile, block_q = tiling.tile, tiling.block_q
    # per request, [B]
    numbers = [(row.queries, row.suffix, len(row.context.runs)) for row in rows]
    queries, suffix, num_runs = np.array(numbers, dtype=np.int64).T
    first_query, suffix_run, num_segments = _before(queries), _before(num_runs), num_runs - 1

    # runs: the suffix of a request, then its segments, [R]
    runs = np.concatenate([row.context.runs for row in rows])
    runs[:, 0] = np.arange(len(rows)).repeat(num_runs)
    runs[suffix_run, 2] = suffix
    first_tile = np.zeros(len(runs) + 1, dtype=np.int64)
    (-(-runs[:, 2] // tile)).cumsum(out=first_tile[1:])
    runs[:, 3] = first_tile[:-1]

    # seen: all segments, except for queries in front of a segment, [Q]
    seen = np.repeat(num_segments, queries)
    for r, row in enumerate(rows):
        start = row.suffix - row.queries
        if num_segments[r] and start < row.context.visible_from[-1]:
            index = np.arange(start, row.suffix)
            seen[first_query[r] : first_query[r] + row.queries] = np.searchsorted(
                row.context.visible_from, index, "right"
            )

    # query tiles, [M]
    num_tiles = -(-queries // block_q)
    owner = np.repeat(np.arange(len(rows)), num_tiles)
    offset = (np.arange(len(owner)) - _before(num_tiles)[owner]) * block_q
    count = np.minimum(block_q, queries[owner] - offset)
    query = first_query[owner] + offset
    index = suffix[owner] - queries[owner] + offset
    after_suffix = first_tile[suffix_run + 1][owner]
    begin = after_suffix - -(-(index + count) // tile)
    end = first_tile[suffix_run[owner] + 1 + seen[query + count - 1]]

    # slices, [W]
    counts = end - begin
    length = _slice_length(counts, slots)
    while True:
        slices = -(-counts // length)
        cut = slices > 1
        taken = np.where(cut, slices, 0)
        size = Capacity(len(runs), int(slices.sum()), int(cut.sum()), len(seen), int(first_tile[-1]), int(taken.sum()))
        if capacity is None or _fits(size, capacity):
            break
        if not cut.any():
            raise ValueError(f"the step needs {size}, more than {capacity}")
        length = max(length + 1, length * 5 // 4)
    of = np.repeat(np.arange(len(owner)), slices)
    part = np.arange(len(of)) - _before(slices)[of]
    first_slot = _before(taken)
    work = np.empty((len(of), 6), dtype=np.int64)
    work[:, 0], work[:, 1] = query[of], count[of]
    work[:, 2] = begin[of] + counts[of] * part // slices[of]
    work[:, 3] = begin[of] + counts[of] * (part + 1) // slices[of]
    work[:, 4] = index[of]
    work[:, 5] = np.where(cut[of], first_slot[of] + part, -1)
    # Longest first: the hardware hands blocks out in this order.
    work = work[np.argsort(work[:, 2] - work[:, 3], kind="stable")]
    splits = np.stack([query, count, first_slot, slices], 1)[cut]
    return Plan(tiling, runs, work, splits, seen, size, int(runs[:, 2].max()), int(count.max()))


def _before(counts: np.ndarray) -> np.ndarray:
    """Sum of what stands in front of each entry."""
    return np.asarray(counts.cumsum() - counts)


def _fits(size: Capacity, capacity: Capacity) -> bool:
    return all(map(operator.le, _lines(size), _lines(capacity)))


_lines = operator.attrgetter(*(field.name for field in fields(Capacity)))


def turn_table(rope: Rope, shifts: Sequence[int] | Tensor) -> Tensor:
    """Lines of the table of rotations: float32 [S, R], cos | sin of shift * frequency, made in float64.

    A kernel turns a query back by `shift` with one. Line 0 of a kernel's table must be `turn_table(rope, [0])`.
    """
    angle = torch.as_tensor(shifts, dtype=torch.float64)[:, None] * rope.inv_freq
    return torch.cat([angle.cos(), angle.sin()], 1).float()


# ---------------------------------------------------------------- device: tables and tiles


@triton.jit
def _expand(runs, block_table, tiles, pages, table_stride, TILE: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr):
    """One program spreads N tiles of a run: `runs` and the block table -> `tiles` and `pages`."""
    P: tl.constexpr = TILE // PAGE
    run = runs + tl.program_id(0) * 6
    request, column, tokens = tl.load(run), tl.load(run + 1), tl.load(run + 2)
    first, line, segment = tl.load(run + 3), tl.load(run + 4), tl.load(run + 5)
    # [N]
    i = tl.program_id(1) * N + tl.arange(0, N)
    real = i * TILE < tokens
    last = (tokens + TILE - 1) // TILE - 1
    at = first + tl.where(segment == SUFFIX, last - i, i)
    tl.store(tiles + at * 4, tl.minimum(tokens - i * TILE, TILE), mask=real)
    tl.store(tiles + at * 4 + 1, i * 0 + line, mask=real)
    tl.store(tiles + at * 4 + 2, i * 0 + segment, mask=real)
    tl.store(tiles + at * 4 + 3, i * TILE, mask=real)
    # [N, P]
    p = i[:, None] * P + tl.arange(0, P)[None, :]
    page = tl.load(block_table + request * table_stride + column + p, mask=p * PAGE < tokens, other=0)
    tl.store(pages + at[:, None] * P + tl.arange(0, P)[None, :], page, mask=real[:, None])


class Staging:
    """Host buffers used in turn: one is written again only after its copy to the device has ended.

    Args:
        size: entries.
        dtype: of an entry.
        device: where they are copied to.
        depth: buffers; a step waits for the copy of the step `depth` before.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, depth: int = 4) -> None:
        pinned = device.type == "cuda"
        self._buffers = [torch.zeros(size, dtype=dtype, pin_memory=pinned) for _ in range(depth)]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        self._copied = [torch.cuda.Event() for _ in range(depth)] if pinned else []
        self._next = 0

    def take(self) -> np.ndarray:
        """The next buffer, to be filled and sent."""
        if self._copied:
            self._copied[self._next].synchronize()
        return self._arrays[self._next]

    def send(self, target: Tensor) -> None:
        """Copy the buffer's beginning to the device, behind all that was launched before. Does not wait."""
        target.copy_(self._buffers[self._next][: len(target)], non_blocking=True)
        if self._copied:
            self._copied[self._next].record()
        self._next = (self._next + 1) % len(self._buffers)


class Arena:
    """Memory for the tables of a step. Plans of several kernels and graphs may share one: a step uses one plan.

    Args:
        size: entries of work, splits, seen and runs together.
        tiles: key tiles.
        pages_per_tile: the most that a kernel has.
    """

    def __init__(self, size: int, tiles: int, pages_per_tile: int, device: torch.device) -> None:
        # The kernels look ahead by one tile.
        self.tiles = torch.zeros(tiles + 1, 4, dtype=torch.int32, device=device)
        self.pages = torch.zeros((tiles + 1) * pages_per_tile, dtype=torch.int32, device=device)
        self.tables = torch.zeros(size, dtype=torch.int32, device=device)
        self.staging = Staging(size, torch.int32, device)

    @classmethod
    def of(cls, tiling: Tiling, capacity: Capacity, device: torch.device) -> Arena:
        """Just enough for plans of one kernel."""
        return cls(capacity.entries, capacity.tiles, tiling.tile // tiling.page, device)


class DevicePlan:
    """The tables of a step on the device, in buffers that stay where they are.

    Attributes:
        work, splits, seen, tiles, pages: the tables of the module docstring, valid after `load` until the next one.
        num_slots: partial results that the kernels may write; 0: nothing to merge.
        most_rows: query rows (tokens x group) of the largest query tile.

    Args:
        tiling: of the plans that will be loaded.
        capacity: lines that the tables may have.
        device: where they are; or
        arena: memory for them, shared with other plans. Only the plan that was loaded last is valid.
        fixed: every launch covers the whole capacity, unused lines do nothing, and the tables never move: for CUDA
            graphs, where one captured launch must serve every later plan.
        most_queries: of a query tile in a fixed plan; None: as many as fit.
    """

    work: Tensor
    splits: Tensor
    seen: Tensor

    def __init__(
        self,
        tiling: Tiling,
        capacity: Capacity,
        device: torch.device | None = None,
        *,
        arena: Arena | None = None,
        fixed: bool = False,
        most_queries: int | None = None,
    ) -> None:
        self.tiling, self.capacity, self.fixed = tiling, capacity, fixed
        self._arena = arena or Arena.of(tiling, capacity, device or torch.device("cpu"))
        per_tile = tiling.tile // tiling.page
        if len(self._arena.tiles) <= capacity.tiles or len(self._arena.tables) < capacity.entries:
            raise ValueError(f"the arena is too small for {capacity}")
        self.tiles = self._arena.tiles
        self.pages = self._arena.pages[: len(self.tiles) * per_tile].view(-1, per_tile)
        self._lay_out(capacity)
        self.num_slots = capacity.slots
        self._most_queries = most_queries or tiling.block_q
        self.most_rows = self._most_queries * tiling.group

    def load(self, plan: Plan, block_table: Tensor) -> None:
        """Take over a plan: one copy from the host, then the device kernel that lists the tiles. Does not wait.

        Args:
            plan: of this tiling, within the capacity.
            block_table: int32 [requests, columns]; columns behind a request's last page are not read.

        Raises:
            ValueError: another tiling, or a plan beyond the capacity.
        """
        fits = _fits(plan.size, self.capacity) and (not self.fixed or plan.most_queries <= self._most_queries)
        if plan.tiling != self.tiling or not fits:
            raise ValueError(f"a plan of {plan.tiling}, {plan.size} does not fit {self.tiling}, {self.capacity}")
        if not self.fixed:
            self.num_slots, self.most_rows = plan.size.slots, plan.most_queries * self.tiling.group
        # The graph does not read the runs: only those in use are copied.
        if self.fixed:
            size = replace(self.capacity, runs=plan.size.runs)
        else:
            size = plan.size
            self._lay_out(size)
        host = self._arena.staging.take()
        start = 0
        for table, lines in (
            (plan.work, size.work),
            (plan.splits, size.splits),
            (plan.seen, size.queries),
            (plan.runs, size.runs),
        ):
            used, end = start + table.size, start + lines * (table.shape[1] if table.ndim == 2 else 1)
            host[start:used] = table.ravel()
            host[used:end] = 0
            start = end
        self._arena.staging.send(self._arena.tables[:start])
        _expand[(len(plan.runs), triton.cdiv(plan.longest, _EXPAND_TILES * self.tiling.tile))](
            self._runs,
            block_table,
            self.tiles,
            self.pages,
            block_table.stride(0),
            TILE=self.tiling.tile,
            PAGE=self.tiling.page,
            N=_EXPAND_TILES,
            num_warps=1,
        )

    def _lay_out(self, size: Capacity) -> None:
        """Views of the one buffer; the runs are last, so that their number moves nothing else."""
        lengths = (size.work * 6, size.splits * 4, size.queries, size.runs * 6)
        work, splits, self.seen, runs = self._arena.tables[: size.entries].split(lengths)
        self.work, self.splits, self._runs = work.view(-1, 6), splits.view(-1, 4), runs.view(-1, 6)
