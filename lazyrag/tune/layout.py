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

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lazyrag.errors import ConfigError

LITERAL = -1
KINDS = ("exact", "lazy", "sink", "prefix")
Part: TypeAlias = tuple[Sequence[int], bool]
"""Tokens, and whether they are a chunk whose KV is reused."""


@dataclass(frozen=True, slots=True)
class Mode:
    """What of a prompt is reused.

    Attributes:
        kind: one of `KINDS`.
        first_k: tokens at the head of each chunk that are computed in the prompt's own context.
    """

    kind: str
    first_k: int = 0

    @classmethod
    def parse(cls, text: str) -> Mode:
        """Read "lazy", "sink+first_k=16" and the like.

        Raises:
            ConfigError: there is no such mode.
        """
        found = re.fullmatch(r"([a-z-]+)(?:\+first_k=(\d+))?", text.strip())
        kind = {"lazy-prefix": "prefix"}.get(found[1], found[1]) if found else ""
        if not found or kind not in KINDS or (kind == "exact" and found[2]):
            raise ConfigError(
                f"{text!r} is no mode to tune for.",
                fix=f"Use one of {', '.join(KINDS)}; those but exact may end in +first_k=16 (or another number).",
            )
        return cls(kind, int(found[2] or 0))

    def __str__(self) -> str:
        return f"{self.kind}+first_k={self.first_k}" if self.first_k else self.kind


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt with its answer as one row; every list has one entry a token (module docstring)."""

    token_ids: list[int]
    positions: list[int]
    owners: list[int]
    hidden: list[bool]

    def __len__(self) -> int:
        return len(self.token_ids)


def lay_out(parts: Sequence[Part], mode: Mode, *, prefix_len: int = 0, sink: Sequence[int] = ()) -> Row:
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


def reused(parts: Sequence[Part], mode: Mode) -> int:
    """How many of a prompt's tokens are not computed for it once its chunks' KV is there."""
    return sum(max(0, len(chunk) - mode.first_k) for chunk in _chunks(parts)) if mode.kind != "exact" else 0


def _chunks(parts: Sequence[Part]) -> Iterator[Sequence[int]]:
    return (tokens for tokens, is_chunk in parts if is_chunk)
