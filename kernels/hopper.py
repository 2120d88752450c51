"""Attention over segments on Hopper (sm_90), in Gluon: one warp fetches, one or two warpgroups compute.

Same maths, plan, partial results and merge as `kernels.portable`; three things are particular.

Pages by TMA. A tile is gathered by one box of [page, 64 columns] for each page and 64 columns of a head, 128-byte
swizzled, so that the boxes of a tile stack to an ordinary operand of wgmma:

    ring entry          [ D / 64 column blocks ][ TILE / PAGE pages ][ PAGE tokens ][ 64 columns ]

Pads are neither read nor multiplied. The box of a segment's last page starts at a *negative* token of that page, so TMA
fills the missing rows with zeros and the real tokens stand at the end of the box (`_hide` knows); a page behind the end
starts at token PAGE: all zeros, no traffic.

Overlap. Scores of a tile and values of the one before it are in flight together, and both rings are filled ahead.

The turned query is an operand in registers: the products of two warpgroups ask for most of what shared memory delivers,
and there the query would be read again for every tile. A *turn* (another rotation of the query, once for each segment)
reads the raw query, which stays in shared memory, and a line of cosines and sines that comes along with the tile's keys
(`RAW`). Interleaved and partial rotations pair other columns: their turns go from global to shared memory.
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
REGISTERS = gl.constexpr(240)
"""Of a thread of the second consumer: two of these and the producer's 24 are what three warpgroups start with."""
BOX = gl.constexpr(64)
"""Columns of a TMA box: 128 bytes, the widest swizzle."""


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
    RAW: gl.constexpr,
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
        if RAW:  # the tile's turn comes along
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
    q, _, _, q0, nq, q_stride, head = query
    m = FIRST + gl.arange(0, 64, gl.SliceLayout(1, L))
    return q + (q0 + m // GROUP) * q_stride + (head * GROUP + m % GROUP) * D, m // GROUP < nq


@gluon.jit
def _keep_raw(query, FIRST: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr):
    """The query rows of a consumer, as they came, in shared memory."""
    _, _, kept, _, _, _, _ = query
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    rows, live = _query_rows(query, FIRST, GROUP, D, L)
    d = gl.arange(0, D, gl.SliceLayout(0, L))
    kept.index(FIRST // 64).store(gl.load(rows[:, None] + d[None, :], mask=live[:, None], other=0.0))


@gluon.jit
def _turn_raw(raw, line, D: gl.constexpr, Q: gl.constexpr):
    """Rows in shared memory, all of whose dimensions are turned (NeoX pairs) by a line of cosines and sines there."""
    H: gl.constexpr = D // 2
    a = raw.slice(0, H, 1).load(Q).to(gl.float32)
    b = raw.slice(H, H, 1).load(Q).to(gl.float32)
    cos = line.slice(0, H, 1).load(Q)
    sin = line.slice(H, H, 1).load(Q)
    both = gl.join((a * cos + b * sin).to(raw.dtype), (b * cos - a * sin).to(raw.dtype))
    # A pair's dimensions are in the same thread: this moves nothing.
    return gl.convert_layout(both.permute([0, 2, 1]).reshape([64, D]), Q)


@gluon.jit
def _turn_from_global(
    query, line, FIRST: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, R: gl.constexpr, NEOX: gl.constexpr
):
    """Turn R dimensions, kept in either way, by a line of the table in global memory; to shared memory."""
    _, turns, kept, _, _, _, _ = query
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
    turned = x * cos[None, :] + y * gl.where(is_a, sin, -sin)[None, :]
    kept.index(FIRST // 64).store(turned.to(kept.dtype))
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
    Q: gl.constexpr,
):
    """A consumer's query, turned by a line: in registers, [64, D], if RAW; else in shared memory, and the line."""
    _, _, kept, _, _, _, _ = query
    if RAW:
        return _turn_raw(kept.index(FIRST // 64), turn_buffer.index(stage), D, Q)
    else:
        _turn_from_global(query, line, FIRST, GROUP, D, R, NEOX)
        return line


@gluon.jit
def _start_scores(
    query,
    turned,
    keys,
    j,
    FIRST: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    RAW: gl.constexpr,
    S: gl.constexpr,
):
    """Put the scores of the slice's tile j, which is there, in flight; `turned` is what `_turn` gave."""
    _, _, kept, _, _, _, _ = query
    zero = gl.zeros([64, TILE], gl.float32, S)
    k = keys.index(j % STAGES).permute([1, 0])
    if RAW:
        return warpgroup_mma(turned, k, zero, use_acc=False, is_async=True)
    else:
        return warpgroup_mma(kept.index(FIRST // 64), k, zero, use_acc=False, is_async=True)


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
):
    """Query rows FIRST .. FIRST + 63 of the tile."""
    query, to, walk, ring, scale_log2 = rows
    k_buffer, v_buffer, turn_buffer, full_k, full_v, free_k, free_v = ring
    _, _, _, q0, nq, _, head = query
    tiles, begin, end, seen, index0 = walk
    out, out_stride, part, stat, slot, kv_heads = to
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    Q: gl.constexpr = gl.DotOperandLayout(0, S, 2)
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

    mbarrier.wait(full_k.index(0), 0)
    turned = _turn(query, turn_buffer, tile[1], 0, FIRST, GROUP, D, R, NEOX, RAW, Q)
    s = _start_scores(query, turned, keys, 0, FIRST, TILE, STAGES, RAW, S)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(free_k.index(0), count=1)
    p, top, total, shrink = _softmax(s, tile, top, total, sight, scale_log2, TILE, PAGE, S)
    a = gl.convert_layout(p.to(dtype), A)
    line = tile[1]
    next_line = gl.load(tiles + (begin + 1) * 4 + 1)
    for i in range(begin + 1, end):
        j = i - begin
        last_line, line = line, next_line
        tile = _tile(tiles, i)  # not wanted before the scores are there
        next_line = gl.load(tiles + (i + 1) * 4 + 1)
        mbarrier.wait(full_k.index(j % STAGES), (j // STAGES) & 1)
        if line != last_line:
            turned = _turn(query, turn_buffer, line, j % STAGES, FIRST, GROUP, D, R, NEOX, RAW, Q)
        s = _start_scores(query, turned, keys, j, FIRST, TILE, STAGES, RAW, S)
        acc = _start_values(a, acc, full_v, values, j - 1, STAGES)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(free_k.index(j % STAGES), count=1)
        p, top, total, shrink = _softmax(s, tile, top, total, sight, scale_log2, TILE, PAGE, S)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free_v.index((j - 1) % STAGES), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
        a = gl.convert_layout(p.to(dtype), A)
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
        full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        free_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        free_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        kept = gl.allocate_shared_memory(desc.dtype, [N, 64, D], Q)
        turn_buffer = full_k  # a stand-in, not used unless it is needed
        if RAW:
            turn_buffer = gl.allocate_shared_memory(gl.float32, [STAGES, 1, R], turn_desc.layout)
        k_buffer = gl.allocate_shared_memory(desc.dtype, [BOXES, 1, PAGE, BOX], desc.layout)
        v_buffer = gl.allocate_shared_memory(desc.dtype, [BOXES, 1, PAGE, BOX], desc.layout)
        for stage in gl.static_range(STAGES):
            mbarrier.init(full_k.index(stage), count=1)
            mbarrier.init(full_v.index(stage), count=1)
            mbarrier.init(free_k.index(stage), count=N)
            mbarrier.init(free_v.index(stage), count=N)
        fence_async_shared()
        ring = (k_buffer, v_buffer, turn_buffer, full_k, full_v, free_k, free_v)
        query = (q, turns, kept, q0, nq, q_stride, head)
        to = (out, out_stride, part, stat, slot, kv_heads)
        walk = (tiles, begin, end, seen, index0)
        fetch = (desc, turn_desc, ring, tiles, pages, begin, end, head * 2 * D)
        rows = (query, to, walk, ring, scale_log2)
        # (Constants stay constants only where they are written inside the call.)
        if N == 1:
            gl.warp_specialize(
                [
                    (_consume, (rows, 0, GROUP, BLOCK_M, TILE, PAGE, D, R, NEOX, STAGES, RAW)),
                    (_produce, (fetch, TILE, PAGE, D, R, STAGES, RAW)),
                ],
                [1],
                [24],
            )
        else:
            gl.warp_specialize(
                [
                    (_consume, (rows, 0, GROUP, BLOCK_M, TILE, PAGE, D, R, NEOX, STAGES, RAW)),
                    (_consume, (rows, 64, GROUP, BLOCK_M, TILE, PAGE, D, R, NEOX, STAGES, RAW)),
                    (_produce, (fetch, TILE, PAGE, D, R, STAGES, RAW)),
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
        chunk: slices of a row that are merged at once.
        max_registers: of a thread at start: 65536 / threads of all blocks of an SM. The producer gives its share away.
    """

    stages: int
    raw: bool = False
    chunk: int = 16
    max_registers: int = 168


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
    if tiling.block_m not in (64, 128) or (launch.raw and (rotary_dim < head_size or not neox)):
        raise ValueError(
            f"{launch} cannot run query tiles of {tiling.block_m} rows with {rotary_dim} turned dimensions"
        )
    cache = describe_cache(kv_cache)
    _attend[(kv_heads, len(plan.work))](
        cache,
        describe_turns(turns) if launch.raw else cache,
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
    }
