"""The plan covers every key that a query sees, once, and nothing that no query of a tile sees."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyrag.kernels.plan import (
    NOTHING,
    SUFFIX,
    Capacity,
    Context,
    DevicePlan,
    Plan,
    Row,
    Tiling,
    make_plan,
    turn_table,
)
from lazyrag.kernels.rope import Rope


def context(lengths: list[int], visible_from: list[int], page: int, line: int = 1) -> Context:
    first = np.cumsum([0, *(-(-n // page) for n in lengths)])
    columns = zip(first.tolist(), lengths, visible_from, range(line, line + len(lengths)), strict=False)
    segments = list(columns)
    return Context.of(segments, int(first[-1]))


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Row], Tiling, int]:
    group = draw(st.sampled_from([1, 3, 4, 8, 64]))
    page = draw(st.sampled_from([16, 32, 64]))
    tiling = Tiling(group, draw(st.sampled_from([64, 128])), draw(st.sampled_from([64, 128])), page)
    rows, line = [], 1
    for _ in range(draw(st.integers(1, 5))):
        lengths = draw(st.lists(st.integers(1, 700), max_size=6))
        queries = draw(st.integers(1, 150))
        suffix = queries + draw(st.integers(0, 200))
        visible_from = sorted(draw(st.lists(st.integers(0, suffix - 1), min_size=len(lengths), max_size=len(lengths))))
        rows.append(Row(queries, suffix, context(lengths, visible_from, page, line)))
        line += len(lengths)
    return rows, tiling, draw(st.integers(1, 66))


def tiles_of(plan: Plan) -> dict[int, tuple[int, int, int, int]]:
    """Number of a tile -> (request, segment or SUFFIX, first token, end token), as `_expand` lists them."""
    tiles, tile = {}, plan.tiling.tile
    for request, _, tokens, first, _, segment in plan.runs.tolist():
        count = -(-tokens // tile)
        for i in range(count):
            at = first + (count - 1 - i if segment == SUFFIX.value else i)
            assert at not in tiles
            tiles[at] = request, segment, i * tile, min(tokens, (i + 1) * tile)
    return tiles


@given(steps())
@settings(max_examples=100, deadline=None)
def test_every_key_that_a_query_sees_is_walked_once(step: tuple[list[Row], Tiling, int]) -> None:
    rows, tiling, slots = step
    plan = make_plan(rows, tiling, slots)
    tiles = tiles_of(plan)
    assert sorted(tiles) == list(range(plan.size.tiles))
    ranges: dict[int, list[tuple[int, int]]] = {}
    for q0, nq, begin, end, index, _ in plan.work.tolist():
        assert begin < end
        for q in range(nq):
            ranges.setdefault(q0 + q, []).append((begin, end))
        assert index >= 0
    query = 0
    for r, row in enumerate(rows):
        for j in range(row.suffix - row.queries, row.suffix):
            slices = sorted(ranges.pop(query))
            assert all(before[1] == after[0] for before, after in pairwise(slices))
            walked = [tiles[t] for begin, end in slices for t in range(begin, end)]
            assert {request for request, _, _, _ in walked} == {r}
            keys = [(segment, token) for _, segment, first, end in walked for token in range(first, end)]
            assert len(keys) == len(set(keys))
            visible = [s for s, seen in enumerate(row.context.visible_from) if seen <= j]
            assert plan.seen[query] == len(visible)
            wanted = {(s, token) for s in visible for token in range(row.context.num_tokens[s])}
            wanted |= {(SUFFIX.value, token) for token in range(j + 1)}
            assert wanted <= set(keys)
            query += 1
    assert not ranges


@given(steps())
@settings(max_examples=100, deadline=None)
def test_no_query_tile_walks_what_none_of_its_queries_sees(step: tuple[list[Row], Tiling, int]) -> None:
    rows, tiling, slots = step
    plan = make_plan(rows, tiling, slots)
    tiles = tiles_of(plan)
    for q0, nq, begin, end, index, _ in plan.work.tolist():
        for _, segment, first, _ in (tiles[t] for t in range(begin, end)):
            if segment == SUFFIX.value:
                assert first < index + nq
            else:
                assert segment < max(plan.seen[q0 : q0 + nq])


@given(steps())
@settings(max_examples=100, deadline=None)
def test_slices_have_slots_of_their_own_and_come_longest_first(step: tuple[list[Row], Tiling, int]) -> None:
    rows, tiling, slots = step
    plan = make_plan(rows, tiling, slots)
    taken = sorted(slot for *_, slot in plan.work.tolist() if slot >= 0)
    assert taken == list(range(plan.size.slots))
    assert taken == sorted(slot for _, _, first, n in plan.splits.tolist() for slot in range(first, first + n))
    lengths = plan.work[:, 3] - plan.work[:, 2]
    assert (np.diff(lengths) <= 0).all()
    by_query = {(q0, slot): nq for q0, nq, _, _, _, slot in plan.work.tolist() if slot >= 0}
    for q0, nq, first, n in plan.splits.tolist():
        assert n > 1
        assert all(by_query[q0, slot] == nq for slot in range(first, first + n))


@given(steps())
@settings(max_examples=50, deadline=None)
def test_a_plan_fits_the_capacity_it_was_made_for(step: tuple[list[Row], Tiling, int]) -> None:
    rows, tiling, slots = step
    free = make_plan(rows, tiling, slots).size
    tight = Capacity(free.runs, max(len(rows), free.work * 2 // 3), free.splits, free.queries, free.tiles, free.slots)
    query_tiles = sum(-(-row.queries // tiling.block_q) for row in rows)
    if tight.work >= query_tiles:
        plan = make_plan(rows, tiling, slots, tight)
        assert plan.size.work <= tight.work
        assert plan.size.slots <= tight.slots
    else:
        with pytest.raises(ValueError, match="the step needs"):
            make_plan(rows, tiling, slots, tight)


def test_one_long_request_fills_the_gpu() -> None:
    row = Row(1, 64, context([2048] * 10, [0] * 10, 16, 1))
    plan = make_plan([row], Tiling(4, 64, 128, 16), slots=16)
    lengths = plan.work[:, 3] - plan.work[:, 2]
    assert lengths.max() <= -(-plan.size.tiles // 16) + 1
    assert plan.size.slots == plan.size.work


def test_a_batch_of_uneven_requests_keeps_every_processor_busy() -> None:
    """Without slices the longest request would take ten times as long as the average one."""
    rows = [Row(1, 64, context([512] * n, [0] * n, 16, 1)) for n in (1, 1, 1, 1, 1, 1, 1, 40)]
    plan = make_plan(rows, Tiling(4, 64, 128, 16), slots=16)
    lengths = plan.work[:, 3] - plan.work[:, 2]
    assert lengths.max() <= 2.5 * lengths.sum() / 16


def test_many_query_tiles_are_not_cut() -> None:
    plan = make_plan([Row(1, 300) for _ in range(200)], Tiling(4, 64, 128, 16), slots=16)
    assert (plan.size.slots, plan.size.work, plan.size.splits) == (0, 200, 0)


def test_a_million_tokens_fit_the_tables() -> None:
    row = Row(1, 70_000, context([1_000_000, 131_073], [0, 5], 16, 1))
    plan = make_plan([row], Tiling(8, 64, 64, 16), slots=16)
    assert plan.size.tiles == -(-70_000 // 64) + 15_625 + 2_049
    assert plan.runs.max() == SUFFIX.value
    assert (plan.runs[:, 1] == [70_693, 0, 62_500]).all()


@pytest.mark.parametrize("sizes", [(65, 64, 64, 16), (4, 64, 64, 48)], ids=["group", "page"])
def test_sizes_that_do_not_fit_are_refused(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"cannot hold|no whole number"):
        Tiling(*sizes)


def test_line_0_turns_nothing_and_a_line_turns_back() -> None:
    rope = Rope(1e4 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16), 16)
    table = turn_table(rope, [0, 200_001])
    assert torch.equal(table[0], torch.cat([torch.ones(8), torch.zeros(8)]))
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    a, b, cos, sin = *x.chunk(2, -1), *table[1].chunk(2)
    turned = torch.cat([a * cos + b * sin, b * cos - a * sin], -1)
    torch.testing.assert_close(turned, rope.rotate(x, *rope.tables([-200_001])))


# ---------------------------------------------------------------- on the device


def loaded(fixed: bool) -> None:
    rows = [Row(2, 70, context([1, 100, 33], [0, 1, 68], 16, 1)), Row(3, 3), Row(1, 9, context([40], [0], 16, 4))]
    tiling = Tiling(4, 16, 32, 16)
    table = torch.full((3, 20), 2**30, dtype=torch.int32)
    for r, pages in enumerate((1 + 7 + 3 + 5, 1, 3 + 1)):
        table[r, :pages] = 100 * r + torch.arange(pages, dtype=torch.int32)
    plan = make_plan(rows, tiling, slots=4)
    spare = 12
    capacity = Capacity(*(getattr(plan.size, name) + spare for name in Capacity.__slots__))
    device = DevicePlan(tiling, capacity, torch.device("cpu"), fixed=fixed)
    # A larger plan has left its lines in every host buffer.
    other = make_plan([Row(1, 1)] * (plan.size.work + spare), tiling, slots=1)
    assert other.size.work > plan.size.work
    for _ in range(4):
        device.load(other, torch.zeros(len(other.runs), 20, dtype=torch.int32))
    device.load(plan, table)
    for name in ("work", "splits", "seen"):
        mine, theirs = getattr(device, name), torch.from_numpy(getattr(plan, name)).int()
        assert torch.equal(mine[: len(theirs)], theirs)
        assert len(mine) == len(theirs) + spare * fixed
        assert not mine[len(theirs) :].any()
    assert device.num_slots == (capacity if fixed else plan.size).slots
    lines = {(r, s): line for r, _, _, _, line, s in plan.runs.tolist()}
    columns = {(r, s): column for r, column, _, _, _, s in plan.runs.tolist()}
    for number, (r, segment, first, end) in tiles_of(plan).items():
        assert device.tiles[number].tolist() == [end - first, lines[r, segment], segment, first]
        start = columns[r, segment] + first // 16
        pages = [100 * r + start + p if first + p * 16 < end else 0 for p in range(2)]
        assert device.pages[number].tolist() == pages
    assert lines[0, SUFFIX.value] == 0
    assert [lines[0, 0], lines[0, 2], lines[2, 0]] == [1, 3, 4]


@pytest.mark.parametrize("fixed", [False, True], ids=["exact", "fixed"])
def test_tables_and_tiles_on_the_device(interpreted: Callable[..., object], fixed: bool) -> None:
    interpreted(loaded, fixed)


def test_a_plan_beyond_the_capacity_is_not_loaded() -> None:
    tiling, capacity = Tiling(4, 64, 64, 16), Capacity(1, 1, 1, 1, 1, 1)
    device = DevicePlan(tiling, capacity, torch.device("cpu"))
    with pytest.raises(ValueError, match="does not fit"):
        device.load(make_plan([Row(2, 200)], tiling, 1), torch.zeros(1, 20, dtype=torch.int32))
    with pytest.raises(ValueError, match="does not fit"):
        device.load(make_plan([Row(1, 1)], Tiling(4, 64, 128, 16), 1), torch.zeros(1, 20, dtype=torch.int32))


def test_an_ordinary_request_has_no_segments() -> None:
    plan = make_plan([Row(5, 5)], Tiling(4, 64, 64, 16), 4)
    assert len(NOTHING.num_tokens) == 0
    assert plan.runs.tolist() == [[0, 0, 5, 0, 0, SUFFIX.value]]
    assert plan.work.tolist() == [[0, 5, 0, 1, 0, -1]]
