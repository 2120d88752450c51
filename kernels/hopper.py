"""Attention over segments on Hopper (sm_90), in Gluon: one warp fetches, one or two warpgroups compute.

Same maths, plan, partial results and merge as `kernels.portable`; three things are particular.

Pages by TMA. A tile is gathered by one box of [page, 64 columns] for each page and 64 columns of a head, 128-byte
swizzled, so that the boxes of a tile stack to an ordinary operand of wgmma:

    ring entry          [ D / 64 column blocks ][ TILE / PAGE pages ][ PAGE tokens ][ 64 columns ]

Pads are neither read nor multiplied. The box of a segment's last page starts at a *negative* token of that page, so TMA
fills the missing rows with zeros and the real tokens stand at the end of the box (`_hide` knows); a page behind the end
starts at token PAGE: all zeros, no traffic.

Overlap. Scores of a tile and values of the one before it are in flight together, and both rings are filled ahead.

A *turn* (another rotation of the query, once for each segment) reads shared memory only where there is room (`RAW`):
the raw query stays there, and the line of cosines and sines comes along with the tile's keys. Where there is room for
two turned queries (`AHEAD`), two more warps turn the query for the next segment while this one is computed. Otherwise a
turn reads global memory, which also serves interleaved and partial rotations.
"""

# A kernel's pointers and numbers have no types in Python, its constants do.
# mypy: allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from lazyrag.kernels.checks import check_paged_attention
from lazyrag.kernels.plan import SUFFIX, DevicePlan, Tiling
from lazyrag.kernels.portable import LOG2_E
from lazyrag.kernels.reduce import Workspace, merge

# Gluon renames things: `async_copy_global_to_shared` and `_reinterpret` until Triton 3.6, the names below later on.
_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
_load_box = tma.async_load if _RENAMED.value else tma.async_copy_global_to_shared

HEAD_SIZES = (64, 128)
"""Whole boxes, and results that fit the registers of a warpgroup (256 would spill half of them)."""

NO_LIMIT = gl.constexpr(1 << 30)
BOX = gl.constexpr(64)
"""Columns of a TMA box: 128 bytes, the widest swizzle."""
TURN_ROWS = gl.constexpr(16)
"""Rows that the warps turn at once that turn ahead: few, for they have few registers."""


@gluon.jit
def _stacked(boxes, ENTRIES: gl.constexpr, TILE: gl.constexpr, D: gl.constexpr):
    """The boxes of a ring as operands of wgmma, [ENTRIES, TILE, D]."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    if _RENAMED:
        return boxes.reinterpret(boxes.dtype, [ENTRIES, TILE, D], LAYOUT)
    else:
        return boxes._reinterpret(boxes.dtype, [ENTRIES, TILE, D], LAYOUT)


@gluon.jit
def _tile(tiles, i):
    """Valid tokens, turn line, segment and start of tile i."""
    tile = tiles + i * 4
    return gl.load(tile), gl.load(tile + 1), gl.load(tile + 2), gl.load(tile + 3)


# ---------------------------------------------------------------- producer: one warp


@gluon.jit
def _fetch(
    desc,
    buffer,
    full,
    pages,
    i,
    valid,
    entry,
    column,
    TILE: gl.constexpr,
    PAGE: gl.constexpr,
    D: gl.constexpr,
):
    """Gather the keys (or values) of tile i into one entry of a ring."""
    P: gl.constexpr = TILE // PAGE
    C: gl.constexpr = D // BOX
    for p in gl.static_range(P):
        page = gl.load(pages + i * P + p)
        real = gl.minimum(gl.maximum(valid - p * PAGE, 0), PAGE)
        first = gl.where(real == 0, PAGE, real - PAGE)
        for c in gl.static_range(C):
            _load_box(desc, [page, first, column + c * BOX], full, buffer.index((entry * C + c) * P + p))


@gluon.jit
def _produce(
    fetch,
    TILE: gl.constexpr,
    PAGE: gl.constexpr,
    D: gl.constexpr,
    R: gl.constexpr,
    STAGES: gl.constexpr,
    LINES: gl.constexpr,
):
    desc, turn_desc, ring, tiles, pages, begin, end, column = fetch
    k_buffer, v_buffer, turn_buffer, full_k, full_v, free_k, free_v = ring
    BYTES: gl.constexpr = TILE * D * 2
    for i in range(begin, end):
        j = i - begin
        stage = j % STAGES
        free = ((j // STAGES) & 1) ^ 1
        mbarrier.wait(free_k.index(stage), free)
        valid, line, _, _ = _tile(tiles, i)
        if LINES:  # the tile's turn comes along
            mbarrier.expect(full_k.index(stage), BYTES + R * 4)
            _load_box(turn_desc, [line, 0], full_k.index(stage), turn_buffer.index(stage))
        else:
            mbarrier.expect(full_k.index(stage), BYTES)
        _fetch(desc, k_buffer, full_k.index(stage), pages, i, valid, stage, column, TILE, PAGE, D)
        mbarrier.wait(free_v.index(stage), free)
        mbarrier.expect(full_v.index(stage), BYTES)
        _fetch(desc, v_buffer, full_v.index(stage), pages, i, valid, stage, column + D, TILE, PAGE, D)


# ---------------------------------------------------------------- consumers: warpgroups of 64 query rows


@gluon.jit
def _query_rows(query, FIRST: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, L: gl.constexpr):
    """Pointers to the rows FIRST .. FIRST + 63 of a query tile, and which of them exist."""
    q, _, _, _, q0, nq, q_stride, head = query
    m = FIRST + gl.arange(0, 64, gl.SliceLayout(1, L))
    return q + (q0 + m // GROUP) * q_stride + (head * GROUP + m % GROUP) * D, m // GROUP < nq


@gluon.jit
def _keep_raw(query, FIRST: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr):
    """The query rows of a consumer, as they came, in shared memory."""
    _, _, raw, _, _, _, _, _ = query
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    rows, live = _query_rows(query, FIRST, GROUP, D, L)
    d = gl.arange(0, D, gl.SliceLayout(0, L))
    raw.index(FIRST // 64).store(gl.load(rows[:, None] + d[None, :], mask=live[:, None], other=0.0))


@gluon.jit
def _turn_rows(raw, turned, cos, sin, H: gl.constexpr, L: gl.constexpr):
    """Turn all 2 H dimensions (NeoX pairs) of some rows."""
    a = raw.slice(0, H, 1).load(L).to(gl.float32)
    b = raw.slice(H, H, 1).load(L).to(gl.float32)
    turned.slice(0, H, 1).store((a * cos + b * sin).to(turned.dtype))
    turned.slice(H, H, 1).store((b * cos - a * sin).to(turned.dtype))


@gluon.jit
def _turn_from_raw(raw, turned, line, D: gl.constexpr):
    """Turn a consumer's rows by a line of cosines and sines in shared memory."""
    H: gl.constexpr = D // 2
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // H, H // 8], [4, 1], [1, 0])
    _turn_rows(raw, turned, line.slice(0, H, 1).load(L), line.slice(H, H, 1).load(L), H, L)
    fence_async_shared()


@gluon.jit
def _line(turns, line, D: gl.constexpr, L: gl.constexpr):
    """A line of cosines and sines from global memory."""
    at = turns + line * D + gl.arange(0, D // 2, gl.SliceLayout(0, L))[None, :]
    return gl.load(at), gl.load(at + D // 2)


@gluon.jit
def _first_turn(query, line, FIRST: gl.constexpr, D: gl.constexpr):
    """A consumer turns its rows itself at the start, where it has nothing else to do."""
    _, turns, raw, turned, _, _, _, _ = query
    H: gl.constexpr = D // 2
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // H, H // 8], [4, 1], [1, 0])
    cos, sin = _line(turns, line, D, L)
    _turn_rows(raw.index(FIRST // 64), turned.index(FIRST // 64), cos, sin, H, L)
    fence_async_shared()


@gluon.jit
def _turn_ahead(query, walk, turn_ring, N: gl.constexpr, D: gl.constexpr):
    """Two warps: all later turns of a slice, each into the buffer that the consumers have left.

    Turn t is written to buffer t % 2. What is free, or full, for the first time has phase 0: turns 1 and 2.
    """
    _, turns, raw, turned, _, _, _, _ = query
    tiles, begin, end, _, _ = walk
    full_q, free_q = turn_ring
    H: gl.constexpr = D // 2
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // H, H // 8], [2, 1], [1, 0])
    turn = 0
    last_line = gl.load(tiles + begin * 4 + 1)
    for i in range(begin + 1, end):
        line = gl.load(tiles + i * 4 + 1)
        if line != last_line:
            turn += 1
            cos, sin = _line(turns, line, D, L)
            mbarrier.wait(free_q.index(turn % 2), ((turn - 1) // 2) & 1)
            for n in range(N):
                for r in gl.static_range(64 // TURN_ROWS):
                    rows = raw.index(n).slice(r * TURN_ROWS, TURN_ROWS, 0)
                    to = turned.index(turn % 2 * N + n).slice(r * TURN_ROWS, TURN_ROWS, 0)
                    _turn_rows(rows, to, cos, sin, H, L)
            fence_async_shared()
            mbarrier.arrive(full_q.index(turn % 2), count=1)
        last_line = line


@gluon.jit
def _turn_from_global(
    query, turned, line, FIRST: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, R: gl.constexpr, NEOX: gl.constexpr
):
    """Turn R dimensions, kept in either way, by a line of the table in global memory."""
    _, turns, _, _, _, _, _, _ = query
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    rows, live = _query_rows(query, FIRST, GROUP, D, L)
    d = gl.arange(0, D, gl.SliceLayout(0, L))
    if NEOX:
        pair = d % (R // 2)
        partner = (d + R // 2) % R
        is_a = d < R // 2
    else:
        pair = d // 2
        partner = d ^ 1
        is_a = d % 2 == 0
    rotated = d < R
    cos = gl.load(turns + line * R + pair, mask=rotated, other=1.0)
    sin = gl.load(turns + line * R + R // 2 + pair, mask=rotated, other=0.0)
    x = gl.load(rows[:, None] + d[None, :], mask=live[:, None], other=0.0).to(gl.float32)
    y = gl.load(rows[:, None] + partner[None, :], mask=live[:, None], other=0.0).to(gl.float32)
    turned.store((x * cos[None, :] + y * gl.where(is_a, sin, -sin)[None, :]).to(turned.dtype))
    fence_async_shared()


@gluon.jit
def _turn(
    query,
    turn_buffer,
    line,
    stage,
    FIRST: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    R: gl.constexpr,
    NEOX: gl.constexpr,
    RAW: gl.constexpr,
):
    _, _, raw, turned, _, _, _, _ = query
    if RAW:
        _turn_from_raw(raw.index(FIRST // 64), turned.index(FIRST // 64), turn_buffer.index(stage), D)
    else:
        _turn_from_global(query, turned.index(FIRST // 64), line, FIRST, GROUP, D, R, NEOX)


@gluon.jit
def _start_scores(
    query,
    turn_buffer,
    full_k,
    keys,
    turn,
    line,
    last_line,
    j,
    FIRST: gl.constexpr,
    GROUP: gl.constexpr,
    N: gl.constexpr,
    TILE: gl.constexpr,
    D: gl.constexpr,
    R: gl.constexpr,
    NEOX: gl.constexpr,
    STAGES: gl.constexpr,
    RAW: gl.constexpr,
    AHEAD: gl.constexpr,
    S: gl.constexpr,
):
    """Turn the query if tile j of the slice wants another turn than the last one; put the tile's scores in flight."""
    _, _, _, turned, _, _, _, _ = query
    stage = j % STAGES
    if RAW:  # the line comes with the keys
        mbarrier.wait(full_k.index(stage), (j // STAGES) & 1)
    if not AHEAD and line != last_line:
        _turn(query, turn_buffer, line, stage, FIRST, GROUP, D, R, NEOX, RAW)
    if not RAW:
        mbarrier.wait(full_k.index(stage), (j // STAGES) & 1)
    zero = gl.zeros([64, TILE], gl.float32, S)
    k = keys.index(stage).permute([1, 0])
    q = turned.index(turn % 2 * N + FIRST // 64)
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def _next_turn(turn_ring, turn):
    """Leave a turn, whose last scores are there, for the next one."""
    full_q, free_q = turn_ring
    mbarrier.arrive(free_q.index(turn % 2), count=1)
    mbarrier.wait(full_q.index((turn + 1) % 2), (turn // 2) & 1)
    return turn + 1


@gluon.jit
def _start_values(p, acc, full_v, values, j, STAGES: gl.constexpr):
    """Put the weighted sum of the values of the slice's tile j in flight."""
    stage = j % STAGES
    mbarrier.wait(full_v.index(stage), (j // STAGES) & 1)
    return warpgroup_mma(p, values.index(stage), acc, is_async=True)


@gluon.jit
def _hide(s, tile, sees, index, TILE: gl.constexpr, PAGE: gl.constexpr, L: gl.constexpr):
    """-inf for pads, for segments that a row does not see, and for later suffix tokens."""
    valid, _, segment, start = tile
    n = gl.arange(0, TILE, gl.SliceLayout(0, L))
    left = valid - n // PAGE * PAGE
    in_page = n % PAGE - gl.maximum(PAGE - left, 0)  # a partial page's tokens stand at the end of its box
    token = start + n // PAGE * PAGE + in_page
    limit = gl.where(segment < sees, NO_LIMIT, 0)
    limit = gl.where(segment == SUFFIX, index + 1, limit)
    return gl.where((in_page >= 0)[None, :] & (token[None, :] < limit[:, None]), s, float("-inf"))


@gluon.jit
def _hide_pads(s, tile, TILE: gl.constexpr, PAGE: gl.constexpr, L: gl.constexpr):
    valid, _, _, _ = tile
    n = gl.arange(0, TILE, gl.SliceLayout(0, L))
    real = n % PAGE >= PAGE - (valid - n // PAGE * PAGE)
    return gl.where(real[None, :], s, float("-inf"))


@gluon.jit
def _mask(s, tile, sees, all_see, index, all_after, TILE: gl.constexpr, PAGE: gl.constexpr, L: gl.constexpr):
    """Hide what a row does not see; most tiles need nothing, or a mask for pads only."""
    valid, _, segment, start = tile
    if (segment >= all_see) & ((segment != SUFFIX) | (start + TILE > all_after)):
        s = _hide(s, tile, sees, index, TILE, PAGE, L)
    elif valid < TILE:
        s = _hide_pads(s, tile, TILE, PAGE, L)
    return s


@gluon.jit
def _softmax(s, tile, top, total, sight, scale_log2, TILE: gl.constexpr, PAGE: gl.constexpr, S: gl.constexpr):
    """One step of the online softmax: weights of the tile's tokens, and by what earlier results shrink."""
    sees, all_see, index, all_after = sight
    s = _mask(s, tile, sees, all_see, index, all_after, TILE, PAGE, S)
    new = gl.maximum(top, gl.max(s, 1) * scale_log2)
    shrink = gl.exp2(top - new)
    p = gl.exp2(s * scale_log2 - new[:, None])
    return p, new, total * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _consume(
    rows,
    FIRST: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    TILE: gl.constexpr,
    PAGE: gl.constexpr,
    D: gl.constexpr,
    R: gl.constexpr,
    NEOX: gl.constexpr,
    STAGES: gl.constexpr,
    RAW: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """Query rows FIRST .. FIRST + 63 of the tile."""
    query, to, walk, ring, turn_ring, scale_log2 = rows
    k_buffer, v_buffer, turn_buffer, full_k, full_v, free_k, free_v = ring
    _, _, _, _, q0, nq, _, head = query
    tiles, begin, end, seen, index0 = walk
    out, out_stride, part, stat, slot, kv_heads = to
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    dtype: gl.constexpr = k_buffer.dtype
    keys = _stacked(k_buffer, STAGES, TILE, D)
    values = _stacked(v_buffer, STAGES, TILE, D)
    # [64]
    m = FIRST + gl.arange(0, 64, gl.SliceLayout(1, S))
    sees = gl.load(seen + q0 + m // GROUP, mask=m // GROUP < nq, other=NO_LIMIT - 1)
    sight = (sees, gl.min(sees, 0), index0 + m // GROUP, index0 + FIRST // GROUP + 1)
    top = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, S))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, S))
    acc = gl.zeros([64, D], gl.float32, O)
    tile = _tile(tiles, begin)
    if RAW:
        _keep_raw(query, FIRST, GROUP, D)
    if AHEAD:
        _, free_q = turn_ring
        _first_turn(query, tile[1], FIRST, D)
        mbarrier.arrive(free_q.index(1), count=1)  # the raw query is there, the second buffer is free

    N: gl.constexpr = BLOCK_M // 64
    turn = 0
    s = _start_scores(
        query, turn_buffer, full_k, keys, turn, tile[1], -1, 0,
        FIRST, GROUP, N, TILE, D, R, NEOX, STAGES, RAW, AHEAD, S,
    )  # fmt: skip
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(free_k.index(0), count=1)
    p, top, total, shrink = _softmax(s, tile, top, total, sight, scale_log2, TILE, PAGE, S)
    a = gl.convert_layout(p.to(dtype), A)
    last_line = tile[1]
    tile = _tile(tiles, begin + 1)
    for i in range(begin + 1, end):
        j = i - begin
        next_tile = _tile(tiles, i + 1)
        if AHEAD and tile[1] != last_line:
            turn = _next_turn(turn_ring, turn)
        s = _start_scores(
            query, turn_buffer, full_k, keys, turn, tile[1], last_line, j,
            FIRST, GROUP, N, TILE, D, R, NEOX, STAGES, RAW, AHEAD, S,
        )  # fmt: skip
        acc = _start_values(a, acc, full_v, values, j - 1, STAGES)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(free_k.index(j % STAGES), count=1)
        p, top, total, shrink = _softmax(s, tile, top, total, sight, scale_log2, TILE, PAGE, S)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free_v.index((j - 1) % STAGES), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
        a = gl.convert_layout(p.to(dtype), A)
        last_line = tile[1]
        tile = next_tile
    acc = _start_values(a, acc, full_v, values, end - begin - 1, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])

    mo = FIRST + gl.arange(0, 64, gl.SliceLayout(1, O))
    d = gl.arange(0, D, gl.SliceLayout(0, O))
    live = (mo // GROUP < nq)[:, None]
    if slot < 0:
        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, O))[:, None]
        row = (q0 + mo // GROUP) * out_stride + (head * GROUP + mo % GROUP) * D
        gl.store(out + row[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=live)
    else:
        cell = slot.to(gl.int64) * kv_heads + head
        gl.store(part + (cell * BLOCK_M + mo)[:, None] * D + d[None, :], acc, mask=live)
        gl.store(stat + cell * 2 * BLOCK_M + m, top)
        gl.store(stat + cell * 2 * BLOCK_M + BLOCK_M + m, total)


# ---------------------------------------------------------------- kernel


@gluon.jit
def _attend(
    desc,
    turn_desc,
    q,
    out,
    part,
    stat,
    turns,
    work,
    tiles,
    pages,
    seen,
    scale_log2,
    q_stride,
    out_stride,
    GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    TILE: gl.constexpr,
    PAGE: gl.constexpr,
    D: gl.constexpr,
    R: gl.constexpr,
    NEOX: gl.constexpr,
    STAGES: gl.constexpr,
    RAW: gl.constexpr,
    AHEAD: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """One slice of one query tile for one key head; `turn_desc` is used if lines come along with keys."""
    gdc_launch_dependents()  # the merge may be put in place; it waits for our end
    head, kv_heads = gl.program_id(0), gl.num_programs(0)
    item = work + gl.program_id(1) * 6
    q0, nq = gl.load(item), gl.load(item + 1)
    begin, end = gl.load(item + 2), gl.load(item + 3)
    index0, slot = gl.load(item + 4), gl.load(item + 5)
    if begin < end:  # else a line that only fills the table
        N: gl.constexpr = BLOCK_M // 64  # consumers
        BOXES: gl.constexpr = STAGES * (D // BOX) * (TILE // PAGE)
        Q: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
        LINES: gl.constexpr = RAW and not AHEAD
        turned = gl.allocate_shared_memory(desc.dtype, [2 * N if AHEAD else N, 64, D], Q)
        full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        free_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        free_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        raw, turn_buffer, full_q, free_q = turned, full_k, full_k, full_k  # stand-ins, not used unless they are needed
        if RAW:
            raw = gl.allocate_shared_memory(desc.dtype, [N, 64, D], Q)
        if LINES:
            turn_buffer = gl.allocate_shared_memory(gl.float32, [STAGES, 1, R], turn_desc.layout)
        k_buffer = gl.allocate_shared_memory(desc.dtype, [BOXES, 1, PAGE, BOX], desc.layout)
        v_buffer = gl.allocate_shared_memory(desc.dtype, [BOXES, 1, PAGE, BOX], desc.layout)
        for stage in gl.static_range(STAGES):
            mbarrier.init(full_k.index(stage), count=1)
            mbarrier.init(full_v.index(stage), count=1)
            mbarrier.init(free_k.index(stage), count=N)
            mbarrier.init(free_v.index(stage), count=N)
        if AHEAD:
            full_q = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
            free_q = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
            for buffer in gl.static_range(2):
                mbarrier.init(full_q.index(buffer), count=1)
                mbarrier.init(free_q.index(buffer), count=N)
        fence_async_shared()
        turn_ring = (full_q, free_q)
        ring = (k_buffer, v_buffer, turn_buffer, full_k, full_v, free_k, free_v)
        query = (q, turns, raw, turned, q0, nq, q_stride, head)
        to = (out, out_stride, part, stat, slot, kv_heads)
        walk = (tiles, begin, end, seen, index0)
        fetch = (desc, turn_desc, ring, tiles, pages, begin, end, head * 2 * D)
        rows = (query, to, walk, ring, turn_ring, scale_log2)
        # (Constants stay constants only where they are written inside the call.)
        if N == 1:
            gl.warp_specialize(
                [
                    (_consume, (rows, 0, GROUP, BLOCK_M, TILE, PAGE, D, R, NEOX, STAGES, RAW, AHEAD)),
                    (_produce, (fetch, TILE, PAGE, D, R, STAGES, LINES)),
                ],
                [1],
                [24],
            )
        elif AHEAD:
            gl.warp_specialize(
                [
                    (_consume, (rows, 0, GROUP, BLOCK_M, TILE, PAGE, D, R, NEOX, STAGES, RAW, AHEAD)),
                    (_consume, (rows, 64, GROUP, BLOCK_M, TILE, PAGE, D, R, NEOX, STAGES, RAW, AHEAD)),
                    (_produce, (fetch, TILE, PAGE, D, R, STAGES, LINES)),
                    (_turn_ahead, (query, walk, turn_ring, N, D)),
                ],
                [4, 1, 2],
                [REGISTERS, 24, 504 - 2 * REGISTERS],  # of 65536: 504 for one thread of each warpgroup
            )
        else:
            gl.warp_specialize(
                [
                    (_consume, (rows, 0, GROUP, BLOCK_M, TILE, PAGE, D, R, NEOX, STAGES, RAW, AHEAD)),
                    (_consume, (rows, 64, GROUP, BLOCK_M, TILE, PAGE, D, R, NEOX, STAGES, RAW, AHEAD)),
                    (_produce, (fetch, TILE, PAGE, D, R, STAGES, LINES)),
                ],
                [4, 1],
                [REGISTERS, 24],
            )


@dataclass(frozen=True, slots=True)
class Launch:
    """How the kernel is compiled.

    Attributes:
        stages: tiles of keys and of values that are in flight.
        raw: turn the query from shared memory (whole-head NeoX rotations only).
        ahead: and one segment ahead, by warps of their own (two consumers only).
        chunk: slices of a row that are merged at once.
        max_registers: of a thread at start: 65536 / threads of all blocks of an SM. The producer gives its share away.
        registers: of the second consumer.
    """

    stages: int
    raw: bool = False
    ahead: bool = False
    chunk: int = 16
    max_registers: int = 168
    registers: int = 240


def can_run(query: Tensor, kv_cache: Tensor) -> bool:
    """Whether the kernel serves these tensors: 16-bit, heads of 64 or 128, a token's heads side by side."""
    head_size = query.shape[2]
    side_by_side = kv_cache.shape[1] == 1 or kv_cache.stride(1) == 2 * head_size
    return (
        head_size in HEAD_SIZES
        and query.dtype in (torch.bfloat16, torch.float16)
        and kv_cache.dtype == query.dtype
        and side_by_side
    )


def attend(
    query: Tensor,
    kv_cache: Tensor,
    output: Tensor,
    plan: DevicePlan,
    workspace: Workspace,
    *,
    scale: float,
    turns: Tensor,
    neox: bool = True,
    launch: Launch,
) -> Tensor:
    """Attention of a step's queries to their segments and suffixes; arguments as of `portable.attend`.

    Raises:
        ValueError: tensors that do not fit each other, the plan or this kernel (`can_run`).
    """
    tiling = plan.tiling
    check_paged_attention(query, kv_cache, output, page=tiling.page, group=tiling.group, turns=turns)
    head_size, kv_heads, rotary_dim = query.shape[2], kv_cache.shape[1], turns.shape[1]
    if not can_run(query, kv_cache):
        raise ValueError(
            f"the Hopper kernel needs 16-bit tensors, heads of {HEAD_SIZES} and tokens whose heads lie side by side; "
            f"got {query.dtype}, {kv_cache.dtype}, heads of {head_size}, strides {kv_cache.stride()}"
        )
    if (
        tiling.block_m not in (64, 128)
        or (launch.raw and (rotary_dim < head_size or not neox))
        or (launch.ahead and not (launch.raw and tiling.block_m == 128))
    ):
        raise ValueError(
            f"{launch} cannot run query tiles of {tiling.block_m} rows with {rotary_dim} turned dimensions"
        )
    cache = describe_cache(kv_cache)
    _attend[(kv_heads, len(plan.work))](
        cache,
        describe_turns(turns) if launch.raw and not launch.ahead else cache,
        query,
        output,
        workspace.part,
        workspace.stat,
        turns,
        plan.work,
        plan.tiles,
        plan.pages,
        plan.seen,
        scale * LOG2_E,
        query.stride(0),
        output.stride(0),
        **constants(tiling, head_size, rotary_dim, neox, launch),
        num_warps=4,
        maxnreg=launch.max_registers,
    )
    merge(output, plan, workspace, kv_heads, chunk=launch.chunk, early=True)
    return output


def describe_cache(kv_cache: Tensor) -> TensorDescriptor:
    """TMA's view of a layer's cache: [num_blocks, page, H * 2 D] in boxes of one page by 64 columns."""
    blocks, kv_heads, page, width = kv_cache.shape
    shape, strides = [blocks, page, kv_heads * width], [kv_cache.stride(0), kv_cache.stride(2), 1]
    layout = gl.NVMMASharedLayout(128, 16, rank=3)
    return TensorDescriptor(kv_cache, shape, strides, [1, page, BOX.value], layout)


def describe_turns(turns: Tensor) -> TensorDescriptor:
    """TMA's view of the table of rotations, in boxes of one line."""
    lines, width = turns.shape
    return TensorDescriptor(turns, [lines, width], [width, 1], [1, width], gl.NVMMASharedLayout(0, 32, rank=2))


def constants(tiling: Tiling, head_size: int, rotary_dim: int, neox: bool, launch: Launch) -> dict[str, object]:
    """The values that a variant of the kernel is compiled for."""
    return {
        "GROUP": tiling.group,
        "BLOCK_M": tiling.block_m,
        "TILE": tiling.tile,
        "PAGE": tiling.page,
        "D": head_size,
        "R": rotary_dim,
        "NEOX": neox,
        "STAGES": launch.stages,
        "RAW": launch.raw,
        "AHEAD": launch.ahead,
        "REGISTERS": launch.registers,
    }
