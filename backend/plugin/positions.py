"""True positions of suffix tokens.

vLLM counts a token's position in its request's padded, physical order; the model must see the prompt's. With j the
index of a token within the suffix, its true position is j plus the tokens of all segments that it sees (layout.py).

On vLLM's V1 runner the positions are written in place into the runner's own buffer, while the attention metadata is
built: by then the slots of the new tokens are computed from the physical positions, and the model has not read the
buffer yet. They are a function of the layout and the lengths alone, so building twice is harmless.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lazyrag.backend.layout import Layout


def true_positions(layout: Layout, first: int, num_tokens: int) -> Tensor:
    """True positions of the request's tokens at physical positions [first, first + num_tokens), int64.

    Raises:
        RuntimeError: they begin before the suffix. A segment's tokens are never computed in a request that uses them.
    """
    if first < layout.suffix_start:
        raise RuntimeError(
            f"Tokens from physical position {first} on were scheduled in a request whose suffix starts at "
            f"{layout.suffix_start}: its segments must be cached."
        )
    j = torch.arange(first - layout.suffix_start, first - layout.suffix_start + num_tokens)
    visible_from = torch.tensor([s.visible_from for s in layout.segments])
    num_reusable = torch.tensor([0, *(s.num_tokens for s in layout.segments)]).cumsum(0)
    return j + num_reusable[torch.searchsorted(visible_from, j, right=True)]


def write_true_positions(
    positions: Tensor, query_start: Sequence[int], seq_lens: Sequence[int], layouts: Sequence[Layout | None]
) -> None:
    """Overwrite the positions of lazy rows.

    Args:
        positions: of the batch's tokens, the buffer that the model reads.
        query_start: each row's first token in it, and the end of the last.
        seq_lens: each row's physical length with this step's tokens.
        layouts: of each row, None for ordinary ones.
    """
    for row, layout in enumerate(layouts):
        start, end = query_start[row], query_start[row + 1]
        if layout is not None and end > start:
            num_tokens = end - start
            positions[start:end] = true_positions(layout, seq_lens[row] - num_tokens, num_tokens)
