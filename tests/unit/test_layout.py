"""The layout's arithmetic, against a slow restatement of what it promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyrag.backend.layout import Span, lay_out, num_visible
from lazyrag.errors import InputError

PAD = -1


@st.composite
def prompts(draw):
    """(token ids, spans, prefix length, block size): pieces in order, some of them spans, text last."""
    block_size = draw(st.integers(1, 5))
    prefix_len = draw(st.integers(0, 7))
    token_ids, spans = list(range(prefix_len)), []
    for _ in range(draw(st.integers(0, 5))):
        text = draw(st.integers(0, 12))
        token_ids += range(len(token_ids), len(token_ids) + text)
        length = draw(st.integers(1, 9))
        offset = draw(st.integers(0, text // block_size)) * block_size
        spans.append(Span(len(token_ids), length, offset))
        token_ids += range(len(token_ids), len(token_ids) + length)
    token_ids += range(len(token_ids), len(token_ids) + draw(st.integers(1, 9)))
    return token_ids, spans, prefix_len, block_size


def laid_out(prompt):
    token_ids, spans, prefix_len, block_size = prompt
    return lay_out(token_ids, spans, prefix_len=prefix_len, block_size=block_size, pad=PAD)


@given(prompts())
def test_every_token_is_in_the_physical_prompt_once_and_the_rest_is_pads(prompt):
    layout, physical = laid_out(prompt)
    layout.check()
    assert sorted(t for t in physical if t != PAD) == prompt[0]
    assert physical.count(PAD) == layout.num_pads
    assert layout.suffix_start % layout.block_size == 0
    assert PAD not in physical[layout.suffix_start :]


@given(prompts())
def test_true_positions_are_indices_in_the_logical_prompt(prompt):
    layout, physical = laid_out(prompt)
    for j, token in enumerate(physical[layout.suffix_start :]):
        assert layout.true_position(j) == token  # token ids are their own indices
    for segment in layout.segments:
        first = physical[segment.first_block * layout.block_size]
        base = segment.offset + (layout.segments[0].num_tokens if segment.behind_prefix else 0)
        assert segment.shift == first - base


@given(prompts())
def test_a_suffix_token_sees_the_segments_in_front_of_it(prompt):
    layout, physical = laid_out(prompt)
    for j, token in enumerate(physical[layout.suffix_start :]):
        seen = [s for s in layout.segments if physical[s.first_block * layout.block_size] < token]
        assert num_visible(layout, j) == len(seen)
        assert list(layout.segments[: len(seen)]) == seen


@given(prompts())
def test_chunk_tokens_are_the_chunk_up_to_the_segments_end(prompt):
    layout, physical = laid_out(prompt)
    for segment in layout.segments:
        tokens = layout.chunk_tokens(segment, physical)
        first = physical[segment.first_block * layout.block_size] - segment.offset
        num_tokens = segment.offset + segment.num_tokens
        assert tokens[:num_tokens] == list(range(first, first + num_tokens))
        assert set(tokens[num_tokens:]) <= {PAD}
        assert len(tokens) % layout.block_size == 0


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
        [Span(0, 2), Span(4, 2, offset=4)],
        [Span(4, 2, offset=-4)],
        [Span(-1, 2)],
    ],
)
def test_spans_that_cannot_be_are_refused(spans):
    with pytest.raises(InputError):
        lay_out(range(10), spans, prefix_len=0, block_size=4, pad=PAD)


def test_a_span_inside_the_preamble_is_refused():
    with pytest.raises(InputError):
        lay_out(range(10), [Span(2, 2)], prefix_len=4, block_size=4, pad=PAD)


@pytest.mark.parametrize("change", [{"shift": 1}, {"num_blocks": 7}, {"first_block": 3}, {"num_tokens": 0}])
def test_check_sees_a_wrong_segment(change):
    layout, _ = lay_out(range(20), [Span(2, 5), Span(9, 4)], prefix_len=0, block_size=4, pad=PAD)
    broken = replace(layout, segments=(layout.segments[0], replace(layout.segments[1], **change)))
    with pytest.raises(AssertionError):
        broken.check()
