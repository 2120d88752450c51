"""The layout's arithmetic, against a slow restatement of what it promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyrag.backend.layout import Span, lay_out, take_apart
from lazyrag.errors import InputError

PAD = -1


@st.composite
def prompts(draw):
    """(token ids, spans, prefix length, block size, sink): text and chunks, of whose blocks any may be spans."""
    block_size = draw(st.integers(1, 5))
    prefix_len = draw(st.integers(0, 7))
    spans, position = [], prefix_len
    for _ in range(draw(st.integers(0, 5))):
        position += draw(st.integers(0, 12))
        length, whole = draw(st.integers(1, 25)), draw(st.booleans())
        for start in range(0, length, block_size):
            end = min(start + draw(st.integers(1, 3)) * block_size, length)
            if draw(st.booleans()) and (not spans or spans[-1].start + spans[-1].num_tokens <= position + start):
                spans.append(Span(position + start, end - start, start, length if whole else 0))
        position += length
    token_ids = list(range(position + draw(st.integers(1, 9))))
    sink = range(1000, 1000 + draw(st.integers(0, 7))) if not prefix_len else ()
    return token_ids, spans, prefix_len, block_size, sink


def laid_out(prompt):
    token_ids, spans, prefix_len, block_size, sink = prompt
    return lay_out(token_ids, spans, prefix_len=prefix_len, block_size=block_size, pad=PAD, sink=sink)


@given(prompts())
def test_every_token_is_in_the_physical_prompt_once_and_the_rest_is_pads(prompt):
    layout, physical = laid_out(prompt)
    layout.check()
    assert sorted(t for t in physical if t != PAD) == [*prompt[0], *prompt[4]]
    assert physical.count(PAD) == layout.num_pads
    assert layout.suffix_start % layout.block_size == 0
    assert PAD not in physical[layout.suffix_start :]


@given(prompts())
def test_true_positions_are_indices_in_the_logical_prompt(prompt):
    layout, physical = laid_out(prompt)
    for j, token in enumerate(physical[layout.suffix_start :]):
        assert layout.true_position(j) == token  # token ids are their own indices
    for segment in layout.visible:
        first = physical[segment.first_block * layout.block_size]
        base = segment.offset + (layout.segments[0].num_tokens if segment.behind_first else 0)
        assert segment.shift == first - base


@given(prompts())
def test_a_suffix_token_sees_the_segments_in_front_of_it(prompt):
    layout, physical = laid_out(prompt)
    for j, token in enumerate(physical[layout.suffix_start :]):
        seen = [s for s in layout.visible if physical[s.first_block * layout.block_size] < token]
        assert sum(s.visible_from <= j for s in layout.visible) == len(seen)
        assert list(layout.visible[: len(seen)]) == seen


@given(prompts())
def test_a_sink_is_the_first_segment_and_seen_by_no_token(prompt):
    layout, physical = laid_out(prompt)
    sink = list(prompt[4])
    hidden = [s for s in layout.segments if s not in layout.visible]
    assert hidden == list(layout.segments[: bool(sink)])
    assert physical[: len(sink)] == sink
    assert all(segment.behind_first == bool(sink or prompt[2]) for segment in layout.segments[1:])


@given(prompts())
def test_a_prompt_is_taken_apart_into_literals_and_whole_chunks(prompt):
    token_ids, spans, prefix_len, *_ = prompt
    literals, contents = take_apart(token_ids, spans, prefix_len)
    reused = {t for span in spans for t in range(span.start, span.start + span.num_tokens)}
    assert literals == [t for t in token_ids[prefix_len:] if t not in reused]
    chunks = contents[bool(prefix_len) :]
    for span, chunk in zip(spans, chunks, strict=True):
        assert chunk == list(range(span.chunk_start, span.chunk_end))
        assert chunk[span.offset :][: span.num_tokens] == list(range(span.start, span.start + span.num_tokens))


@given(prompts())
def test_segments_are_whole_blocks_one_behind_the_other(prompt):
    layout, _ = laid_out(prompt)
    block = 0
    for segment in layout.segments:
        assert segment.first_block == block
        block = segment.end_block
        assert segment.last_block == block - 1
    assert layout.suffix_block == block


@pytest.mark.parametrize(
    "spans",
    [
        [Span(0, 0)],
        [Span(6, 4)],
        [Span(0, 4), Span(3, 2)],
        [Span(4, 2), Span(0, 2)],
        [Span(11, 2)],
        [Span(4, 2, offset=3)],
        [Span(2, 2, offset=4)],
        [Span(4, 2, offset=-4)],
        [Span(-1, 2)],
        [Span(2, 3, chunk_tokens=5)],
        [Span(2, 4, chunk_tokens=9)],
        [Span(2, 4, chunk_tokens=3)],
    ],
)
def test_spans_that_cannot_be_are_refused(spans):
    with pytest.raises(InputError):
        lay_out(range(10), spans, prefix_len=0, block_size=4, pad=PAD)


def test_a_span_inside_the_preamble_is_refused():
    with pytest.raises(InputError):
        lay_out(range(10), [Span(2, 2)], prefix_len=4, block_size=4, pad=PAD)
    with pytest.raises(InputError, match="no part of a chunk"):
        lay_out(range(10), [Span(6, 2, offset=4)], prefix_len=4, block_size=4, pad=PAD)


def test_a_preamble_and_a_sink_exclude_each_other():
    with pytest.raises(InputError, match="a preamble and a sink"):
        lay_out(range(10), [Span(5, 2)], prefix_len=4, block_size=4, pad=PAD, sink=[1])


@pytest.mark.parametrize("change", [{"shift": 1}, {"num_blocks": 7}, {"first_block": 3}, {"num_tokens": 0}])
def test_check_sees_a_wrong_segment(change):
    layout, _ = lay_out(range(20), [Span(2, 5), Span(9, 4)], prefix_len=0, block_size=4, pad=PAD)
    broken = replace(layout, segments=(layout.segments[0], replace(layout.segments[1], **change)))
    with pytest.raises(AssertionError):
        broken.check()
