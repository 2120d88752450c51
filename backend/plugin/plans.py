"""Attention plans of steps on a GPU: from the rows of a batch to `kernels.plan`, in memory that graphs can read.

A step is planned on the host from a few hundred integers, sent in two copies (tables and true positions), and shared by
all layers; nothing waits for the device. All plans share one arena: one step is in flight on the stream at a time. What
a captured graph reads lies at places that follow from its bucket alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lazyrag.backend.layout import MOST_SINK, Layout
from lazyrag.backend.plugin.positions import TruePositions
from lazyrag.kernels import dispatch
from lazyrag.kernels.plan import (
    Arena,
    Capacity,
    Context,
    DevicePlan,
    Row,
    Staging,
    make_plan,
    turn_table,
)
from lazyrag.kernels.reduce import Workspace
from lazyrag.kernels.rope import Rope

_TILE = 64
"""The smallest tile of any kernel: bounds the number of tiles."""
_MOST_TILES = 1 << 20
_MOST_RUNS = 1 << 14
_SLICES = 4
"""Partial results that the workspace holds, for each thread block that runs at once."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """What a captured graph serves: steps of up to so many tokens and rows, padded to both."""

    num_tokens: int
    num_rows: int

    @property
    def is_decode(self) -> bool:
        """One token for each row. Other steps have fewer rows than tokens."""
        return self.num_tokens == self.num_rows


@dataclass(frozen=True, slots=True, eq=False)
class Reused:
    """What a step needs of a lazy request. Made when the request arrives.

    Attributes:
        context: its segments in the order of its block table.
        by_place: the same in the order of their places in the cache, for tokens that see all of them. Requests that
            share documents then walk them in the same order, whatever the order in their prompts, and find in the GPU's
            L2 cache what another one has just read.
        all_seen_from: index of the first suffix token that sees all segments.
    """

    context: Context
    by_place: Context
    all_seen_from: int
    positions: TruePositions
    suffix_start: int


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What all layers need of a step; valid until the next one is planned."""

    variant: dispatch.Variant
    plan: DevicePlan
    workspace: Workspace
    turns: Tensor
    neox: bool

    def attend(
        self,
        query: Tensor,
        kv_cache: Tensor,
        output: Tensor,
        scale: float,
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """One layer's attention.

        Args:
            query: [T, Hq, D], rotated at true positions; tokens behind those of the step are not read.
            kv_cache: [num_blocks, H, block_size, 2 * D], the step's keys and values stored.
            output: [T, Hq, D], written for the tokens of the step.
            scale: of the scores.
            k_scale: what stored keys are multiplied with (fp8).
            v_scale: what stored values are multiplied with (fp8).
        """
        dispatch.attend(
            self.variant,
            query,
            kv_cache,
            output,
            self.plan,
            self.workspace,
            scale=scale,
            turns=self.turns,
            neox=self.neox,
            k_scale=k_scale,
            v_scale=v_scale,
        )


class Planner:
    """Plans the steps of one worker.

    Attributes:
        turns: the table of rotations, a line for every shift there can be; a shift back is a negative index.

    Args:
        rope: the model's.
        shape: of its attention, on this rank.
        device: the worker's.
        gpu: what the device is.
        max_num_rows: requests in a step.
        max_num_tokens: tokens in a step.
        max_model_len: tokens of a request, pads included.
    """

    def __init__(
        self,
        rope: Rope,
        shape: dispatch.Shape,
        device: torch.device,
        gpu: dispatch.Gpu,
        *,
        max_num_rows: int,
        max_num_tokens: int,
        max_model_len: int,
    ) -> None:
        self._shape, self._device, self._gpu = shape, device, gpu
        self._neox = rope.neox
        # A line for every shift that there can be: nothing to compute or send for a request.
        on_device = Rope(rope.inv_freq.to(device), rope.head_size, rope.neox)
        # Shifts back, as of chunks that were computed behind a sink, are the last lines.
        shifts = torch.arange(max_model_len + MOST_SINK, device=device)
        self._num_forward = max_model_len
        self.turns = turn_table(on_device, torch.where(shifts < max_model_len, shifts, shifts - len(shifts)))
        kinds = dispatch.variants(shape, self._gpu).values()
        self._slots = {kind.name: kind.slots(self._gpu, shape.kv_heads) for kind in kinds}
        cells = max(_SLICES * self._slots[kind.name] * kind.tiling.block_m for kind in kinds)
        self._workspace = Workspace(cells, shape.kv_heads, 1, shape.head_size, device)
        tiles = min(_MOST_TILES, max_num_rows * (max_model_len // _TILE + _TILE))
        entries = 6 * (_SLICES * max(self._slots.values()) + 8 + max_num_tokens) + 5 * max_num_tokens + 6 * _MOST_RUNS
        self._pages_per_tile = max(kind.tiling.tile for kind in kinds) // shape.page
        self._graph_arena = Arena(entries, tiles, self._pages_per_tile, device)
        self._eager_arena = Arena(entries, 1 << 12, self._pages_per_tile, device)
        self._in_graphs: dict[Bucket, tuple[dispatch.Variant, DevicePlan]] = {}
        self._positions = Staging(max_num_tokens, torch.int64, device)

    def describe(self, layout: Layout, blocks: Sequence[int]) -> Reused:
        """What the steps of a request need of its layout.

        Args:
            layout: the request's.
            blocks: its block table.
        """
        shifts = [s.shift for s in layout.segments]
        if not all(-MOST_SINK <= shift < self._num_forward for shift in shifts):
            raise RuntimeError(
                f"segments are moved by {shifts} tokens, the table has [{-MOST_SINK}, {self._num_forward})"
            )
        segments = [(s.first_block, s.num_tokens, s.visible_from, s.shift % len(self.turns)) for s in layout.segments]
        context = Context.of(segments, layout.suffix_block)
        by_place = Context.of(sorted(segments, key=lambda segment: blocks[segment[0]]), layout.suffix_block)
        all_seen_from = int(context.visible_from[-1]) if segments else 0
        return Reused(context, by_place, all_seen_from, TruePositions(layout), layout.suffix_start)

    def fits_graphs(self, num_rows: int, num_tokens: int, reused: Collection[Reused]) -> bool:
        """Whether the graphs' memory holds a step's tables.

        Args:
            num_rows: requests of the step.
            num_tokens: of all of them, physically, with this step's tokens.
            reused: of the lazy ones.
        """
        runs = num_rows + sum(len(one.context.num_tokens) for one in reused)
        return runs <= _MOST_RUNS and num_tokens // _TILE + 2 * runs < len(self._graph_arena.tiles)

    def make(
        self,
        query_start: Sequence[int],
        seq_lens: Sequence[int],
        reused: Sequence[Reused | None],
        block_table: Tensor,
        positions: Tensor | None,
        bucket: Bucket | None,
    ) -> Step:
        """Plan a step, and give the model its true positions.

        Args:
            query_start: each row's first token of the batch, and the end of the last.
            seq_lens: each row's physical length with this step's tokens.
            reused: of each row, None for ordinary ones. Rows without tokens stand at the end.
            block_table: int32 [rows, columns] on the device.
            positions: int64 [tokens or more] on the device, the buffer that the model reads; overwritten.
            bucket: of the graph that will run, None if none does.
        """
        host = self._positions.take()
        rows = []
        for row, one in enumerate(reused):
            start, end = query_start[row], query_start[row + 1]
            if start == end:
                break
            first = seq_lens[row] - (end - start)
            if one is None:
                rows.append(Row(end - start, seq_lens[row]))
                host[start:end] = np.arange(first, seq_lens[row])
            else:
                all_seen = first - one.suffix_start >= one.all_seen_from
                context = one.by_place if all_seen else one.context
                rows.append(Row(end - start, seq_lens[row] - one.suffix_start, context))
                host[start:end] = one.positions.of(first, end - start)
        if positions is not None:
            self._positions.send(positions[: query_start[len(rows)]])
        if bucket is None:
            variant, plan = self._plan_eagerly(rows, block_table)
        else:
            variant, plan = self._in_graphs[bucket]
            tables = make_plan(rows, variant.tiling, self._slots[variant.name], plan.capacity)
            plan.load(tables, block_table)
        return Step(variant, plan, self._workspace, self.turns, self._neox)

    def add_graph(self, bucket: Bucket) -> None:
        """Choose the kernel for the steps of a bucket."""
        if bucket in self._in_graphs:
            return
        most_queries = 1 if bucket.is_decode else bucket.num_tokens
        variant = dispatch.choose(self._shape, self._gpu, num_rows=bucket.num_rows, most_queries=most_queries)
        slots, block_q = self._slots[variant.name], variant.tiling.block_q
        query_tiles = min(bucket.num_tokens, bucket.num_rows + bucket.num_tokens // block_q)
        # What is not used costs little, but every layer pays for it: blocks for one and a half times the GPU.
        capacity = Capacity(
            runs=_MOST_RUNS,
            work=max(slots + slots // 2, query_tiles) + 8,
            splits=min(query_tiles, 2 * slots),
            queries=bucket.num_tokens,
            tiles=len(self._graph_arena.tiles) - 1,
            slots=2 * slots + 8,
        )
        plan = DevicePlan(
            variant.tiling, capacity, arena=self._graph_arena, fixed=True, most_queries=min(most_queries, block_q)
        )
        self._in_graphs[bucket] = variant, plan

    def _plan_eagerly(self, rows: Sequence[Row], block_table: Tensor) -> tuple[dispatch.Variant, DevicePlan]:
        most_queries = max(row.queries for row in rows)
        variant = dispatch.choose(self._shape, self._gpu, num_rows=len(rows), most_queries=most_queries)
        slots = self._slots[variant.name]
        many = 1 << 30
        limit = Capacity(runs=many, work=many, splits=many, queries=many, tiles=many, slots=_SLICES * slots)
        tables = make_plan(rows, variant.tiling, slots, limit)
        size, arena = tables.size, self._eager_arena
        if size.entries > len(arena.tables) or size.tiles >= len(arena.tiles):
            entries, tiles = max(2 * size.entries, len(arena.tables)), max(2 * size.tiles, len(arena.tiles))
            self._eager_arena = Arena(entries, tiles, self._pages_per_tile, self._device)
        plan = DevicePlan(variant.tiling, size, arena=self._eager_arena)
        plan.load(tables, block_table)
        return variant, plan

    def compile(self, attend: Callable[[Step], None]) -> None:
        """Compile every kernel that a step without a graph may run.

        Args:
            attend: has a layer attend in a step of one token.
        """
        # Long enough to be worth two slices.
        longest = 64 * max(variant.tiling.tile for variant in dispatch.variants(self._shape, self._gpu).values())
        table = torch.zeros(1, longest // self._shape.page, dtype=torch.int32, device=self._device)
        for variant in dispatch.variants(self._shape, self._gpu).values():
            for slots in (1, 2):
                tables = make_plan([Row(1, 64 * variant.tiling.tile)], variant.tiling, slots)
                plan = DevicePlan(variant.tiling, tables.size, self._device)
                plan.load(tables, table)
                attend(Step(variant, plan, self._workspace, self.turns, self._neox))
