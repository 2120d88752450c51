"""The slices of a query tile become one result: merge by log-sum-exp.

Slice i of a query row leaves, of the scores s_j (in units of log2) of its keys j,

    top_i = max_j s_j        total_i = sum_j 2^(s_j - top_i)        acc_i = sum_j 2^(s_j - top_i) v_j

and the row's attention is, with top = max_i top_i,

    sum_i 2^(top_i - top) acc_i  /  sum_i 2^(top_i - top) total_i.

A slice in which a row sees no key leaves top_i = -1e30, total_i = 0, acc_i = 0, which weighs nothing.
"""

# A kernel's pointers and numbers have no types in Python, its constants do.
# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from lazyrag.kernels.plan import DevicePlan


@triton.jit
def _merge(
    part,
    stat,
    out,
    splits,
    out_stride,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    head, kv_heads = tl.program_id(0), tl.num_programs(0)
    line = splits + tl.program_id(1) * 4
    q0, nq, slot0, slices = tl.load(line), tl.load(line + 1), tl.load(line + 2), tl.load(line + 3)
    if PDL:  # started early: the attention kernel may still be writing
        gdc_wait()
    if tl.program_id(2) * ROWS < nq * GROUP:
        i = tl.arange(0, CHUNK)
        r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        d = tl.arange(0, BD)
        live = r < nq * GROUP
        top = tl.full([ROWS], -1e30, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BD], tl.float32)
        for first in range(0, slices, CHUNK):
            # [ROWS, CHUNK]
            real = live[:, None] & (first + i < slices)[None, :]
            cell = (slot0 + first + i).to(tl.int64) * kv_heads + head
            at = stat + cell[None, :] * 2 * BLOCK_M + r[:, None]
            top_i = tl.load(at, mask=real, other=-1e30)
            total_i = tl.load(at + BLOCK_M, mask=real, other=0.0)
            # [ROWS, CHUNK, BD]
            row = (cell[None, :] * BLOCK_M + r[:, None])[:, :, None]
            acc_i = tl.load(part + row * BD + d[None, None, :], mask=real[:, :, None], other=0.0)
            new = tl.maximum(top, tl.max(top_i, 1))
            weight = tl.exp2(top_i - new[:, None])
            shrink = tl.exp2(top - new)
            total = total * shrink + tl.sum(weight * total_i, 1)
            acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * acc_i, 1)
            top = new
        to = (q0 + r // GROUP) * out_stride + (head * GROUP + r % GROUP) * D
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + to[:, None] + d[None, :], result, mask=live[:, None] & (d < D)[None, :])


class Workspace:
    """Partial results of the slices, shared by all layers; what it holds means something within one layer only.

    Args:
        slots: partial results, `Capacity.slots` of the plans that will run.
        block_m: rows of a query tile, the largest of the kernels that will run.
    """

    def __init__(self, slots: int, kv_heads: int, block_m: int, head_size: int, device: torch.device) -> None:
        width = triton.next_power_of_2(head_size)
        self.part = torch.empty(slots, kv_heads, block_m, width, device=device)
        self.stat = torch.empty(slots, kv_heads, 2, block_m, device=device)


def merge(
    out: Tensor, plan: DevicePlan, workspace: Workspace, kv_heads: int, *, chunk: int = 16, early: bool = False
) -> None:
    """Finish the query tiles that the plan cut.

    Args:
        out: [queries, Hq, D], where the attention kernel wrote the others.
        plan: that the attention kernel ran.
        workspace: that it wrote to.
        kv_heads: heads of the keys.
        chunk: slices of a row that are in flight at once. Many are soonest there, few let an SM hold more rows.
        early: the attention kernel allows its successor to start before it has ended (sm_90).
    """
    if not plan.num_slots:
        return
    head_size = out.shape[2]
    width = triton.next_power_of_2(head_size)
    # One row for each warp of 32 lanes x 4 floats: the sum over slices stays inside a thread.
    rows = max(1, 512 // width)
    launch = {"launch_pdl": True} if early else {}
    _merge[(kv_heads, len(plan.splits), triton.cdiv(plan.most_rows, rows))](
        workspace.part,
        workspace.stat,
        out,
        plan.splits,
        out.stride(0),
        GROUP=plan.tiling.group,
        BLOCK_M=plan.tiling.block_m,
        D=head_size,
        BD=width,
        ROWS=rows,
        CHUNK=chunk,
        PDL=early,
        num_warps=4,
        **launch,
    )
