"""Pages of a cache copied to other pages, their keys turned on: what a system does that keeps one copy for each use.

LazyRAG itself never copies. The benchmark's arm `materialize` does, and this is its kernel: one pass that reads and
writes each page once.
"""

# A kernel's pointers and numbers have no types in Python, its constants do.
# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _copy(
    cache,
    sources,
    targets,
    lines,
    turns,
    stride_page,
    stride_head,
    stride_token,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
):
    """One program copies one head's part of a page: keys in dimensions [0, D), values in [D, 2 D)."""
    i, head = tl.program_id(0), tl.program_id(1)
    page = tl.arange(0, PAGE)[:, None] * stride_token + head * stride_head
    read = cache + tl.load(sources + i).to(tl.int64) * stride_page + page
    write = cache + tl.load(targets + i).to(tl.int64) * stride_page + page
    # keys, [PAGE, R / 2] a half
    pair = tl.arange(0, R // 2)[None, :]
    line = turns + tl.load(lines + i) * R
    cos, sin = tl.load(line + pair), tl.load(line + R // 2 + pair)
    a, b = tl.load(read + pair).to(tl.float32), tl.load(read + R // 2 + pair).to(tl.float32)
    tl.store(write + pair, (a * cos - b * sin).to(cache.dtype.element_ty))
    tl.store(write + R // 2 + pair, (b * cos + a * sin).to(cache.dtype.element_ty))
    # values, [PAGE, D]
    value = D + tl.arange(0, D)[None, :]
    tl.store(write + value, tl.load(read + value))


def copy_turned(cache: Tensor, sources: Tensor, targets: Tensor, lines: Tensor, turns: Tensor) -> None:
    """Copy pages of one layer, their keys turned on by their line. Does not wait.

    Args:
        cache: [pages, H, page, 2 D], keys and values; D a power of two, all of it rotated in NeoX style.
        sources: int32 [N] pages to read.
        targets: int32 [N] pages to write; none of them a source.
        lines: int32 [N] line of the table for each page.
        turns: float32 [L, D], see `plan.turn_table`.

    Raises:
        ValueError: shapes that the kernel does not serve.
    """
    _, heads, page, width = cache.shape
    head_size = width // 2
    if turns.shape[1] != head_size or head_size & (head_size - 1) or page & (page - 1) or cache.stride(3) != 1:
        raise ValueError(f"pages {list(cache.shape)} cannot be turned with a table of {turns.shape[1]} columns")
    _copy[(len(sources), heads)](
        cache, sources, targets, lines, turns, *cache.stride()[:3], PAGE=page, D=head_size, R=head_size
    )
