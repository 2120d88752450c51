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
length of what the chunk was computed behind. K is stored rotated at local positions, so the score of a query at true
position t is (R(-shift) q_t) . k, with q_t rotated at t.

What chunks are computed behind is either the prompt's own preamble or a sink: tokens that no prompt holds. Both are
segment 0, so that they are made resident and kept like any segment. A sink is `hidden`: no token of the request sees
it, and it has no place in the prompt. Behind a sink, `shift` may be negative.

A chunk may be used in several segments, with literals where its other blocks would be: these are computed in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lazyrag.errors import InputError

MOST_SINK = 256
"""Tokens of a sink: bounds how far a segment can be shifted back."""


@dataclass(frozen=True, slots=True)
class Span:
    """A reusable run of the logical prompt: tokens [start, start + num_tokens).

    Attributes:
        offset, chunk_tokens: as in `types.Segment`.
    """

    start: int
    num_tokens: int
    offset: int = 0
    chunk_tokens: int = 0

    @property
    def chunk_start(self) -> int:
        """Where the chunk begins in the prompt."""
        return self.start - self.offset

    @property
    def chunk_end(self) -> int:
        """Where the chunk ends in the prompt."""
        return self.chunk_start + (self.chunk_tokens or self.offset + self.num_tokens)


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
        behind_first: computed behind segment 0, the preamble or a sink.
        hidden: no token of the request sees it (a sink).
    """

    first_block: int
    num_blocks: int
    num_tokens: int
    visible_from: int
    shift: int
    offset: int = 0
    behind_first: bool = False
    hidden: bool = False

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
    def visible(self) -> tuple[LaidSegment, ...]:
        """The segments that the suffix sees; all but a sink."""
        return tuple(s for s in self.segments if not s.hidden)

    @property
    def num_pads(self) -> int:
        return self.suffix_start - sum(s.num_tokens for s in self.segments)

    def true_position(self, j: int) -> int:
        """True position of suffix token j."""
        return j + sum(s.num_tokens for s in self.visible if s.visible_from <= j)

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
            assert not s.hidden or (s.first_block, s.visible_from, s.shift, s.offset) == (0, 0, 0, 0)
            base = s.offset + (self.segments[0].num_tokens if s.behind_first else 0)
            assert s.shift == s.visible_from + seen - base
            block, visible_from = s.end_block, s.visible_from
            seen += 0 if s.hidden else s.num_tokens
        assert self.suffix_block == block


def lay_out(
    token_ids: Sequence[int],
    spans: Sequence[Span],
    *,
    prefix_len: int,
    block_size: int,
    pad: int,
    sink: Sequence[int] = (),
) -> tuple[Layout, list[int]]:
    """Lay a logical prompt out.

    Args:
        token_ids: the logical prompt, [N].
        spans: reusable runs, ordered, disjoint; the prompt does not end in one.
        prefix_len: the first tokens are a shared preamble: segment 0, and every span was computed behind it.
        block_size: tokens a block.
        pad: token id for the pads (never read by attention).
        sink: every span was computed behind these tokens: segment 0, which is no part of the logical prompt.

    Returns:
        the layout and the physical prompt, [layout.suffix_start + number of literal tokens].

    Raises:
        InputError: spans that overlap, are empty or reach the end; an offset that is no multiple of the block size;
            both a preamble and a sink.
    """
    check_spans(spans, prefix_len, len(token_ids))
    literals, contents = take_apart(token_ids, spans, prefix_len)
    contents = [list(sink), *contents] if sink else contents
    return lay_out_parts(
        literals, spans, contents, prefix_len=prefix_len, block_size=block_size, pad=pad, sink_len=len(sink)
    )


def take_apart(token_ids: Sequence[int], spans: Sequence[Span], prefix_len: int) -> tuple[list[int], list[list[int]]]:
    """A logical prompt as its literal tokens and the tokens of each segment's chunk, the preamble's first."""
    literals: list[int] = []
    contents = [list(token_ids[:prefix_len])] if prefix_len else []
    position, chunk = prefix_len, (0, 0)
    for span in spans:
        literals += token_ids[position : span.start]
        if chunk == (span.chunk_start, span.chunk_end):
            contents.append(contents[-1])
        else:
            chunk = span.chunk_start, span.chunk_end
            contents.append(list(token_ids[slice(*chunk)]))
        position = span.start + span.num_tokens
    literals += token_ids[position:]
    return literals, contents


def check_spans(spans: Sequence[Span], prefix_len: int, num_tokens: int) -> None:
    """Segments of a prompt of `num_tokens` are ordered, disjoint, not empty, and end before its last token.

    Raises:
        InputError: they are not, or a span's chunk does not stand around it.
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
    for span in spans:
        end = span.start + span.num_tokens
        if span.offset < 0 or span.chunk_start < prefix_len or not end <= span.chunk_end <= num_tokens:
            raise InputError(
                f"Segment [{span.start}, {end}) is no part of a chunk at [{span.chunk_start}, {span.chunk_end}):",
                why="a segment's chunk must stand around it in the prompt, behind the preamble.",
            )


def lay_out_parts(
    literals: Sequence[int],
    spans: Sequence[Span],
    contents: Sequence[Sequence[int]],
    *,
    prefix_len: int,
    block_size: int,
    pad: int,
    sink_len: int = 0,
) -> tuple[Layout, list[int]]:
    """Lay out a logical prompt that is given in parts (`take_apart`); otherwise as `lay_out`.

    Args:
        literals: the tokens outside of all segments.
        spans: see `lay_out`.
        contents: the tokens of the preamble or sink, if there is one, and of each span's chunk.
        prefix_len: see `lay_out`.
        block_size: see `lay_out`.
        pad: see `lay_out`.
        sink_len: the first of `contents` is a sink of so many tokens.
    """
    if prefix_len and sink_len:
        raise InputError("A prompt has a preamble and a sink:", why="its chunks are computed behind one of them.")
    num_tokens = len(literals) + prefix_len + sum(span.num_tokens for span in spans)
    check_spans(spans, prefix_len, num_tokens)
    first_len = prefix_len or sink_len
    runs = [Span(0, first_len)] * bool(first_len) + list(spans)
    if [run.chunk_end - run.chunk_start for run in runs] != [len(content) for content in contents]:
        raise InputError("The lengths of the segments' tokens are not those of the spans.")
    segments: list[LaidSegment] = []
    head: list[int] = []
    reusable = 0
    for number, (run, content) in enumerate(zip(runs, contents, strict=True)):
        end = run.offset + run.num_tokens
        if run.offset % block_size or (end % block_size and end < len(content)):
            raise InputError(
                f"The segment at token {run.start} is tokens [{run.offset}, {end}) of its chunk:",
                why=f"it must begin and end between two blocks ({block_size} tokens), or with the chunk.",
            )
        behind_first, hidden = number > 0 and first_len > 0, number == 0 and sink_len > 0
        segments.append(
            LaidSegment(
                first_block=len(head) // block_size,
                num_blocks=-(-run.num_tokens // block_size),
                num_tokens=run.num_tokens,
                visible_from=run.start - reusable,
                shift=run.chunk_start - (first_len if behind_first else 0),
                offset=run.offset,
                behind_first=behind_first,
                hidden=hidden,
            )
        )
        head += content[run.offset : end]
        head += [pad] * (-run.num_tokens % block_size)
        reusable += 0 if hidden else run.num_tokens
    layout = Layout(block_size, tuple(segments), len(head) // block_size)
    head += literals
    return layout, head
