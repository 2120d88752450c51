"""Attention over segments on any GPU, in Triton: the readable kernel, which also runs in Triton's interpreter.

For a query q_t that stands at true position t, and the keys of segment S, stored as they were computed `shift` tokens
away from where they stand now,

    score(t, j)  =  scale * (R(-shift_S) q_t) . k_j          (kernels.rope; the suffix has shift 0)

so a query tile is turned once for each segment that it walks through, and keys are used as they lie in the cache. One
online softmax runs over all tiles of the slice, with scores in units of log2:

    new = max(top, max_j s_j)       total = total 2^(top - new) + sum_j 2^(s_j - new)
                                    acc   = acc   2^(top - new) + sum_j 2^(s_j - new) v_j

The second positional method, ALiBi, turns nothing: score(t, j) = scale * q_t . k_j - slope * (t - true position of j).

Rows of a query tile are tokens x heads of one group: row m is token m // GROUP, head m % GROUP. Pads are never read:
they may hold NaN, and 0 * NaN is NaN.
"""

# A kernel's pointers and numbers have no types in Python, its constants do.
# mypy: allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lazyrag.kernels.checks import check_paged_attention
from lazyrag.kernels.plan import SUFFIX, DevicePlan
from lazyrag.kernels.reduce import Workspace, merge

INTERPRETED = triton.knobs.runtime.interpret
LOG2_E = 1.4426950408889634


@triton.jit
def _dot(a, b, acc, FLOAT32: tl.constexpr):
    """Matrix product plus acc; in full float32 where the operands are, or where the interpreter knows no other."""
    if FLOAT32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def _as(x, dtype: tl.constexpr):
    """What the cache holds in the dtype of the product; fp8 by way of float32, which every GPU converts."""
    if x.dtype == dtype:
        return x
    return x.to(tl.float32).to(dtype)


@triton.jit
def _turned(
    q_rows,
    live,
    turns,
    line,
    D: tl.constexpr,
    BD: tl.constexpr,
    R: tl.constexpr,
    NEOX: tl.constexpr,
    dtype: tl.constexpr,
):
    """R(-shift) of a query tile, [BLOCK_M, BD]: a pair of dimensions (a, b) -> (a cos + b sin, b cos - a sin)."""
    d = tl.arange(0, BD)
    x = tl.load(q_rows[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
    if R == 0:
        return _as(x, dtype)
    rotated = d < R
    if NEOX:
        pair, is_a = d % (R // 2), d < R // 2
        partner = tl.where(is_a, d + R // 2, d - R // 2)
    else:
        pair, is_a = d // 2, d % 2 == 0
        partner = d ^ 1
    cos = tl.load(turns + line * R + pair, mask=rotated, other=1.0)
    sin = tl.load(turns + line * R + R // 2 + pair, mask=rotated, other=0.0)
    y = tl.load(q_rows[:, None] + partner[None, :], mask=live[:, None] & rotated[None, :], other=0.0)
    return (x.to(tl.float32) * cos[None, :] + y.to(tl.float32) * tl.where(is_a, sin, -sin)[None, :]).to(dtype)


@triton.jit
def _attend(
    q,
    kv,
    out,
    part,
    stat,
    turns,
    work,
    tiles,
    pages,
    seen,
    slopes,
    positions,
    key_positions,
    scale_log2,
    v_scale,
    q_stride,
    out_stride,
    page_stride,
    head_stride,
    token_stride,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    R: tl.constexpr,
    NEOX: tl.constexpr,
    ALIBI: tl.constexpr,
    FLOAT32: tl.constexpr,
):
    """One slice of one query tile for one key head. R = 0: queries are not turned."""
    head, kv_heads = tl.program_id(0), tl.num_programs(0)
    line = work + tl.program_id(1) * 6
    q0, nq, begin, end = tl.load(line), tl.load(line + 1), tl.load(line + 2), tl.load(line + 3)
    index0, slot = tl.load(line + 4), tl.load(line + 5)
    if begin >= end:  # a line that only fills the table
        return
    P: tl.constexpr = TILE // PAGE
    dtype: tl.constexpr = out.dtype.element_ty
    # [BLOCK_M]
    m = tl.arange(0, BLOCK_M)
    token = m // GROUP
    live = token < nq
    query_head = head * GROUP + m % GROUP
    q_rows = q + (q0 + token) * q_stride + query_head * D
    sees = tl.load(seen + q0 + token, mask=live, other=0)
    index = index0 + token
    # [BD], [TILE]
    d = tl.arange(0, BD)
    n = tl.arange(0, TILE)
    in_page = head.to(tl.int64) * head_stride + (n % PAGE) * token_stride
    if ALIBI:
        slope = tl.load(slopes + query_head, mask=live, other=0.0) * 1.4426950408889634
        position = tl.load(positions + q0 + token, mask=live, other=0)

    top = tl.full([BLOCK_M], -1e30, tl.float32)  # finite: a row that sees nothing of a tile must not make NaN
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BD], tl.float32)
    turned = tl.zeros([BLOCK_M, BD], dtype)
    turn = 1  # this tile has another turn line than the last one
    # What tells where a tile's keys lie is loaded one iteration ahead of them.
    tile = tiles + begin * 4
    valid, turn_line, segment, start = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    page = tl.load(pages + begin * P + n // PAGE)
    for i in tl.range(begin, end):
        tile = tiles + (i + 1) * 4
        next_valid, next_line = tl.load(tile), tl.load(tile + 1)
        next_segment, next_start = tl.load(tile + 2), tl.load(tile + 3)
        next_page = tl.load(pages + (i + 1) * P + n // PAGE)

        at = kv + page.to(tl.int64) * page_stride + in_page
        real = n < valid
        k = tl.load(at[None, :] + d[:, None], mask=real[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(at[:, None] + (D + d)[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
        if turn != 0:
            turned = _turned(q_rows, live, turns, turn_line, D, BD, R, NEOX, dtype)
        s = _dot(turned, _as(k, dtype), tl.zeros([BLOCK_M, TILE], tl.float32), FLOAT32) * scale_log2
        if ALIBI:
            key_position = tl.load(key_positions + i * TILE + n)
            s -= slope[:, None] * (position[:, None] - key_position[None, :]).to(tl.float32)
        # how many of the tile's tokens a row sees
        limit = tl.where(segment == SUFFIX, index - start + 1, tl.where(segment < sees, TILE, 0))
        s = tl.where((n[None, :] < limit[:, None]) & real[None, :], s, float("-inf"))

        new = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp2(top - new)
        p = tl.exp2(s - new[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = _dot(p.to(dtype), _as(v, dtype), acc * shrink[:, None], FLOAT32)
        top = new
        # The flag, not the line, is carried: a loop that hands an argument on unchanged is not pipelined (Triton 3.6).
        turn = (next_line != turn_line).to(tl.int32)
        valid, turn_line, segment, start, page = next_valid, next_line, next_segment, next_start, next_page

    acc *= v_scale
    columns = (d < D)[None, :]
    if slot < 0:
        rows = out + (q0 + token) * out_stride + query_head * D
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(rows[:, None] + d[None, :], result, mask=live[:, None] & columns)
    else:
        cell = slot.to(tl.int64) * kv_heads + head
        tl.store(part + (cell * BLOCK_M + m)[:, None] * BD + d[None, :], acc, mask=live[:, None])
        tl.store(stat + cell * 2 * BLOCK_M + m, top)
        tl.store(stat + cell * 2 * BLOCK_M + BLOCK_M + m, total)


@dataclass(frozen=True, slots=True, eq=False)
class Alibi:
    """ALiBi for a step.

    Attributes:
        slopes: float32 [Hq].
        positions: int32 [Q], true position of each query.
        key_positions: int32 [T, tile], true position of each token of each tile; pads may hold anything.
    """

    slopes: Tensor
    positions: Tensor
    key_positions: Tensor


@dataclass(frozen=True, slots=True)
class Launch:
    """How the kernel is compiled: warps of a block, and how many key tiles are loaded ahead."""

    num_warps: int = 4
    num_stages: int = 3


def attend(
    query: Tensor,
    kv_cache: Tensor,
    output: Tensor,
    plan: DevicePlan,
    workspace: Workspace,
    *,
    scale: float,
    turns: Tensor | None = None,
    neox: bool = True,
    alibi: Alibi | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    launch: Launch = Launch(),
) -> Tensor:
    """Attention of a step's queries to their segments and suffixes.

    Args:
        query: [Q, Hq, D], rotated at true positions, in the dtype of `output` or in float8_e4m3fn; tokens may be
            strided.
        kv_cache: [num_blocks, H, page, 2 * D], a token's key and value side by side, in the dtype of `output` or in
            float8_e4m3fn; any strides but the last.
        output: [Q, Hq, D]; rows beyond the plan's queries are left as they are.
        plan: of this step.
        workspace: for the plan's slots.
        scale: of the scores; what fp8 queries are multiplied with is part of it.
        turns: float32 [lines, R], cos | sin (`plan.turn_table`); R <= D dimensions are rotated. None: positions
            are not rotations.
        neox: rotated pairs are (i, i + R/2), otherwise (2i, 2i + 1).
        alibi: linear biases, in place of rotations.
        k_scale: what stored keys are multiplied with (fp8).
        v_scale: what stored values are multiplied with (fp8).
        launch: how the kernel is compiled.

    Returns:
        `output`.

    Raises:
        ValueError: shapes, strides, dtypes or devices that do not fit.
    """
    check_paged_attention(query, kv_cache, output, page=plan.tiling.page, group=plan.tiling.group, turns=turns)
    head_size, kv_heads = query.shape[2], kv_cache.shape[1]
    page_stride, head_stride, token_stride, _ = kv_cache.stride()
    nothing = plan.seen
    _attend[(kv_heads, len(plan.work))](
        query,
        kv_cache,
        output,
        workspace.part,
        workspace.stat,
        nothing if turns is None else turns,
        plan.work,
        plan.tiles,
        plan.pages,
        plan.seen,
        nothing if alibi is None else alibi.slopes,
        nothing if alibi is None else alibi.positions,
        nothing if alibi is None else alibi.key_positions,
        scale * k_scale * LOG2_E,
        v_scale,
        query.stride(0),
        output.stride(0),
        page_stride,
        head_stride,
        token_stride,
        GROUP=plan.tiling.group,
        BLOCK_M=plan.tiling.block_m,
        TILE=plan.tiling.tile,
        PAGE=plan.tiling.page,
        D=head_size,
        BD=triton.next_power_of_2(head_size),
        R=0 if turns is None else turns.shape[1],
        NEOX=neox,
        ALIBI=alibi is not None,
        FLOAT32=INTERPRETED or output.dtype == torch.float32,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    merge(output, plan, workspace, kv_heads)
    return output
