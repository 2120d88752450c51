"""How a prompt's tokens see each other in each mode, as one row of tokens for one forward pass.

A chunk's tokens see their own chunk only; literal tokens see whatever stands before them. Where a chunk's KV was
computed behind something (`sink`, `prefix`), or the KV that literals see is not the one that the chunk was computed
with (`first_k`), the row has *hidden* tokens: only their own chunk sees them. For a chunk `c0 c1 c2 c3` at position 7:

    lazy               index      7   8   9  10            sink         index      7   8   9  10  11  12
                       token     c0  c1  c2  c3                         token     s0  s1  c0  c1  c2  c3
                       position   7   8   9  10                         position   5   6   7   8   9  10
                       owner      0   0   0   0                         owner      0   0   0   0   0   0
                                                                        hidden     x   x
    first_k=2          index      7   8   9  10  11  12
                       token     c0  c1  c0  c1  c2  c3
                       position   7   8   7   8   9  10     c0 c1 are computed twice: as literals, which see all before,
                       owner      -   -   0   0   0   0     and as what c2 c3 were computed behind
                       hidden             x   x

A query at index i sees a key at index j <= i if the key's owner is the query's, or the query is a literal and the key
is not hidden. Attention depends on differences of positions only (RoPE), so a chunk at its true position is the one
that was computed at position 0 and moved. Hidden tokens may have negative positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lazyrag.errors import ConfigError
from lazyrag.modes import ReuseMode

LITERAL = -1
Part: TypeAlias = tuple[Sequence[int], bool]
"""Tokens, and whether they are a chunk whose KV is reused."""


def tunable(text: str) -> ReuseMode:
    """A mode that a model can be tuned for, from its text.

    Raises:
        ConfigError: there is no such mode, or it chooses what to compute by measuring the model.
    """
    mode = ReuseMode.parse(text)
    if mode.recompute:
        raise ConfigError(
            f"A model cannot be tuned for {mode}:",
            why="which blocks are computed is measured of the model itself.",
            fix="Tune for the mode without recompute.",
        )
    return mode


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt with its answer as one row; every list has one entry a token (module docstring)."""

    token_ids: list[int]
    positions: list[int]
    owners: list[int]
    hidden: list[bool]

    def __len__(self) -> int:
        return len(self.token_ids)


def lay_out(parts: Sequence[Part], mode: ReuseMode, *, prefix_len: int = 0, sink: Sequence[int] = ()) -> Row:
    """The row of a prompt.

    Args:
        parts: the prompt's literals and chunks in order. The last one is literal.
        mode: what is reused; in mode exact, chunks are literals.
        prefix_len: tokens of the preamble, for mode prefix.
        sink: tokens that chunks are computed behind, for mode sink.
    """
    row = Row([], [], [], [])
    begin = [token for tokens, _ in parts for token in tokens]
    behind = {"sink": sink, "prefix": begin[:prefix_len]}.get(mode.kind, ())
    start = 0
    for number, (tokens, is_chunk) in enumerate(parts):
        if not is_chunk or mode.kind == "exact":
            _append(row, tokens, start, LITERAL, hidden=False)
        else:
            head = min(mode.first_k, len(tokens))
            _append(row, tokens[:head], start, LITERAL, hidden=False)
            if head < len(tokens):
                _append(row, [*behind, *tokens[:head]], start - len(behind), number, hidden=True)
                _append(row, tokens[head:], start + head, number, hidden=False)
        start += len(tokens)
    return row


def _append(row: Row, tokens: Sequence[int], start: int, owner: int, *, hidden: bool) -> None:
    row.token_ids.extend(tokens)
    row.positions.extend(range(start, start + len(tokens)))
    row.owners.extend([owner] * len(tokens))
    row.hidden.extend([hidden] * len(tokens))
