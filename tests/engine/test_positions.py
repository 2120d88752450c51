import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lazyrag.backend.layout import Layout, Span, lay_out
from lazyrag.backend.plugin.positions import TruePositions, write_true_positions

BLOCK = 16


@st.composite
def layouts(draw) -> Layout:
    spans, position = [], 0
    for _ in range(draw(st.integers(1, 5))):
        position += draw(st.integers(0, 20))
        spans.append(Span(position, draw(st.integers(1, 40))))
        position += spans[-1].num_tokens
    literals = draw(st.integers(1, 30))
    return lay_out(range(position + literals), spans, prefix_len=0, block_size=BLOCK, pad=0)[0]


@given(layouts(), st.integers(0, 50), st.integers(1, 30))
def test_every_suffix_token_stands_where_the_prompt_has_it(layout, first, num_tokens):
    positions = TruePositions(layout).of(layout.suffix_start + first, num_tokens)
    assert positions.tolist() == [layout.true_position(j) for j in range(first, first + num_tokens)]


def test_only_lazy_rows_are_overwritten_and_twice_is_as_once():
    layout, _ = lay_out(range(40), [Span(3, 20)], prefix_len=0, block_size=BLOCK, pad=0)
    buffer = torch.arange(100, 112)
    # An ordinary row of 4 tokens, a lazy one with its 2nd to 6th suffix token, an ordinary one, and tokens of no row.
    how = ([0, 4, 9, 10], [4, layout.suffix_start + 6, 7], [None, layout, None])
    for _ in range(2):
        write_true_positions(buffer, *how)
        assert buffer.tolist() == [100, 101, 102, 103, 1, 2, 23, 24, 25, 109, 110, 111]


def test_tokens_of_a_segment_are_never_computed_in_a_request_that_uses_it():
    layout, _ = lay_out(range(40), [Span(3, 20)], prefix_len=0, block_size=BLOCK, pad=0)
    with pytest.raises(RuntimeError, match=r"physical position 31 .* suffix starts at 32"):
        TruePositions(layout).of(31, 5)
