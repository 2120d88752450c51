"""True positions of suffix tokens.

vLLM counts a token's position in its request's padded, physical order; the model must see the prompt's. With j the
index of a token within the suffix, its true position is j plus the tokens of all segments that it sees (layout.py).

The positions are written in place into the runner's own buffer, while the attention metadata is built: by then the
slots of the new tokens are computed from the physical positions, and the model has not read the buffer yet. They are a
function of the layout and the lengths alone, so building twice is harmless.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lazyrag.backend.layout import Layout


class TruePositions:
    """Of the suffix tokens of one request. Made when the request arrives.

    Args:
        layout: the request's.
    """

    def __init__(self, layout: Layout) -> None:
        self._suffix_start = layout.suffix_start
        self._visible_from = np.array([s.visible_from for s in layout.segments], dtype=np.int64)
        self._before = np.cumsum([0, *(s.num_tokens for s in layout.segments)])
        self._last_visible_from = int(self._visible_from[-1]) if layout.segments else 0

    def of(self, first: int, num_tokens: int) -> NDArray[np.int64]:
        """Of the tokens at physical positions [first, first + num_tokens).

        Raises:
            RuntimeError: they begin before the suffix. A segment's tokens are never computed in a request that uses
                them.
        """
        j = first - self._suffix_start
        if j < 0:
            raise RuntimeError(
                f"Tokens from physical position {first} on were scheduled in a request whose suffix starts at "
                f"{self._suffix_start}: its segments must be cached."
            )
        if j >= self._last_visible_from:  # behind all segments, as every generated token
            start = j + int(self._before[-1])
            return np.arange(start, start + num_tokens)
        suffix = np.arange(j, j + num_tokens)
        seen = np.searchsorted(self._visible_from, suffix, side="right")
        return np.asarray(suffix + self._before[seen])


def write_true_positions(
    positions: Tensor, query_start: Sequence[int], seq_lens: Sequence[int], layouts: Sequence[Layout | None]
) -> None:
    """Overwrite the positions of lazy rows, on a CPU.

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
            positions[start:end] = torch.from_numpy(TruePositions(layout).of(seq_lens[row] - num_tokens, num_tokens))
