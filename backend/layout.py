"""From a prompt with reusable segments to the block table that vLLM sees. Pure integers.

Logical order is the prompt's own; positions are counted in it. Physical order is the block table's:

    logical     [ preamble ][    A    ][ lit ][   B   ][ question ...
    physical    [ A A A pad | B B pad  |  preamble lit question generated ... ]
                 ^blk 0       ^blk 3     ^suffix_block

All segments come first, in logical order, each padded to whole blocks: a contiguous computed prefix for vLLM. The
suffix (every literal token in logical order, unpadded, then the generated tokens) is what the request computes itself.
With j the index of a token inside the suffix:

    suffix token j sees segment S     <=>   j >= S.visible_from
    true position of suffix token j    =    j + sum(S.num_tokens for S with S.visible_from <= j)
    S.start (true)                     =    S.visible_from + sum(T.num_tokens for T before S)
    S.shift                            =    S.start - S.base

`base` is the local position that the segment's first token had when it was computed: its index in its chunk, plus the
length of the shared preamble if the chunk was computed behind it. K is stored rotated at local positions, so the score
of a query at true position t is (R(-shift) q_t) . k, with q_t rotated at t.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from lazyrag.errors import InputError


@dataclass(frozen=True, slots=True)
class Span:
    """A reusable run of the logical prompt: tokens [start, start + num_tokens); `offset` as in `types.Segment`."""

    start: int
    num_tokens: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class LaidSegment:
    """A segment's place in the block table and in the prompt. Filled by `lay_out`, read-only afterwards.

    Attributes:
        first_block: index in the request's block table.
        num_blocks: whole blocks, the last one padded.
        num_tokens: valid tokens.
        visible_from: literal tokens logically in front of the segment.
        shift: true start minus base (module docstring).
        offset: index in the chunk of the segment's first token, a multiple of the block size.
        behind_prefix: computed behind segment 0, the shared preamble.
    """

    first_block: int
    num_blocks: int
    num_tokens: int
    visible_from: int
    shift: int
    offset: int = 0
    behind_prefix: bool = False

    @property
    def end_block(self) -> int:
        return self.first_block + self.num_blocks

    @property
    def last_block(self) -> int:
        return self.end_block - 1


@dataclass(frozen=True, slots=True)
class Layout:
    """The block table of one request. Filled by `lay_out` when the scheduler accepts the request."""

    block_size: int
    segments: tuple[LaidSegment, ...]
    suffix_block: int

    @property
    def suffix_start(self) -> int:
        """Physical position of the first suffix token."""
        return self.suffix_block * self.block_size

    @property
    def num_reusable_tokens(self) -> int:
        return sum(s.num_tokens for s in self.segments)

    @property
    def num_pads(self) -> int:
        return self.suffix_start - self.num_reusable_tokens

    def true_position(self, j: int) -> int:
        """True position of suffix token j."""
        return j + sum(s.num_tokens for s in self.segments if s.visible_from <= j)

    def chunk_tokens(self, segment: LaidSegment, token_ids: Sequence[int]) -> list[int]:
        """The segment's chunk from its first token to the segment's end, padded to whole blocks.

        A segment with an offset has the chunk's head right in front of it, among the literals.

        Args:
            segment: one of `segments`.
            token_ids: the physical prompt (or longer), as `lay_out` returns it.
        """
        head_end = self.suffix_start + segment.visible_from
        blocks = slice(segment.first_block * self.block_size, segment.end_block * self.block_size)
        return [*token_ids[head_end - segment.offset : head_end], *token_ids[blocks]]

    def check(self) -> None:
        """Assert the invariants; called in tests and when a layout arrives at a worker in debug mode."""
        block = seen = 0
        visible_from = 0
        for s in self.segments:
            assert s.num_tokens > 0
            assert s.num_blocks == -(-s.num_tokens // self.block_size)
            assert s.first_block == block
            assert s.visible_from >= visible_from
            assert s.offset % self.block_size == 0
            base = s.offset + (self.segments[0].num_tokens if s.behind_prefix else 0)
            assert s.shift == s.visible_from + seen - base
            block, visible_from, seen = s.end_block, s.visible_from, seen + s.num_tokens
        assert self.suffix_block == block


def lay_out(
    token_ids: Sequence[int], spans: Sequence[Span], *, prefix_len: int, block_size: int, pad: int
) -> tuple[Layout, list[int]]:
    """Lay a logical prompt out.

    Args:
        token_ids: the logical prompt, [N].
        spans: reusable runs, ordered, disjoint; the prompt does not end in one.
        prefix_len: the first tokens are a shared preamble: segment 0, and every span was computed behind it.
        block_size: tokens a block.
        pad: token id for the pads (never read by attention).

    Returns:
        the layout and the physical prompt, [layout.suffix_start + number of literal tokens].

    Raises:
        InputError: spans that overlap, are empty or reach the end; an offset that is no multiple of the block size.
    """
    check_spans(spans, prefix_len, len(token_ids))
    literals, contents = take_apart(token_ids, spans, prefix_len)
    return lay_out_parts(literals, spans, contents, prefix_len=prefix_len, block_size=block_size, pad=pad)


def take_apart(token_ids: Sequence[int], spans: Sequence[Span], prefix_len: int) -> tuple[list[int], list[list[int]]]:
    """A logical prompt as its literal tokens and the tokens of each segment, the preamble's first."""
    literals: list[int] = []
    contents = [list(token_ids[:prefix_len])] if prefix_len else []
    position = prefix_len
    for span in spans:
        end = span.start + span.num_tokens
        literals += token_ids[position : span.start]
        contents.append(list(token_ids[span.start : end]))
        position = end
    literals += token_ids[position:]
    return literals, contents


def check_spans(spans: Sequence[Span], prefix_len: int, num_tokens: int) -> None:
    """Segments of a prompt of `num_tokens` are ordered, disjoint, not empty, and end before its last token.

    Raises:
        InputError: they are not.
    """
    position = 0
    for start, length in [(0, prefix_len)] * bool(prefix_len) + [(s.start, s.num_tokens) for s in spans]:
        end = start + length
        if length <= 0 or start < position or end >= num_tokens:
            raise InputError(
                f"Segment [{start}, {end}) of a prompt of {num_tokens} tokens cannot be reused:",
                why="segments must be ordered, disjoint, not empty, and end before the prompt's last token.",
            )
        position = end


def lay_out_parts(
    literals: Sequence[int],
    spans: Sequence[Span],
    contents: Sequence[Sequence[int]],
    *,
    prefix_len: int,
    block_size: int,
    pad: int,
) -> tuple[Layout, list[int]]:
    """Lay out a logical prompt that is given in parts (`take_apart`); otherwise as `lay_out`."""
    num_tokens = len(literals) + sum(map(len, contents))
    check_spans(spans, prefix_len, num_tokens)
    runs = [(Span(0, prefix_len), False)] if prefix_len else []
    runs += [(span, bool(prefix_len)) for span in spans]
    if [span.num_tokens for span, _ in runs] != [len(content) for content in contents]:
        raise InputError("The lengths of the segments' tokens are not those of the spans.")
    segments: list[LaidSegment] = []
    head: list[int] = []
    position = reusable = 0
    for (span, behind_prefix), content in zip(runs, contents, strict=True):
        if span.offset < 0 or span.offset % block_size or span.start - span.offset < position:
            raise InputError(
                f"Segment at token {span.start} has offset {span.offset}:",
                why=f"it must be a multiple of the block size ({block_size}), with the chunk's head in front of it.",
            )
        base = span.offset + (prefix_len if behind_prefix else 0)
        segments.append(
            LaidSegment(
                first_block=len(head) // block_size,
                num_blocks=-(-span.num_tokens // block_size),
                num_tokens=span.num_tokens,
                visible_from=span.start - reusable,
                shift=span.start - base,
                offset=span.offset,
                behind_prefix=behind_prefix,
            )
        )
        head += content
        head += [pad] * (-span.num_tokens % block_size)
        reusable += span.num_tokens
        position = span.start + span.num_tokens
    layout = Layout(block_size, tuple(segments), len(head) // block_size)
    head += literals
    return layout, head


def num_visible(layout: Layout, j: int) -> int:
    """How many of the layout's segments (a prefix of the list) suffix token j sees."""
    return bisect_right([s.visible_from for s in layout.segments], j)
