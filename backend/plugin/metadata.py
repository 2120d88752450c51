"""From the rows of a batch to what the kernels attend to. Once a step, for all layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lazyrag.backend.layout import Layout
from lazyrag.kernels import sdpa


def make_rows(
    query_start: Sequence[int],
    seq_lens: Sequence[int],
    block_table: sdpa.Indices,
    layouts: Sequence[Layout | None],
    block_size: int,
) -> list[sdpa.Row]:
    """Rows for `kernels.sdpa`.

    Args:
        query_start: each row's first token of the batch, and the end of the last.
        seq_lens: each row's physical length with this step's tokens.
        block_table: the blocks of each row, [rows, any].
        layouts: of each row, None for ordinary ones.
        block_size: tokens a block.
    """
    rows = []
    for row, layout in enumerate(layouts):
        start, num_queries = query_start[row], query_start[row + 1] - query_start[row]
        if num_queries:
            runs = _runs(layout, num_queries, seq_lens[row], block_table[row], block_size)
            rows.append(sdpa.Row(start, num_queries, tuple(runs)))
    return rows


def _runs(
    layout: Layout | None, num_queries: int, seq_len: int, blocks: sdpa.Indices, block_size: int
) -> Iterator[sdpa.Run]:
    suffix_block = layout.suffix_block if layout is not None else 0
    suffix_len = seq_len - suffix_block * block_size
    # Suffix index of the first query.
    first = suffix_len - num_queries
    for s in layout.segments if layout is not None else ():
        if s.visible_from < suffix_len:
            yield sdpa.Run(blocks[s.first_block : s.end_block], s.num_tokens, s.shift, max(0, s.visible_from - first))
    past = suffix_len if num_queries == 1 else first
    if past:
        yield sdpa.Run(blocks[suffix_block:], past)


def as_indices(tensor: object) -> sdpa.Indices:
    """A CPU tensor of integers as int64 numbers."""
    return np.asarray(tensor).astype(np.int64)
