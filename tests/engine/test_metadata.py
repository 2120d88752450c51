import numpy as np

from lazyrag.backend.layout import Span, lay_out
from lazyrag.backend.plugin.metadata import make_rows

# [lit 3][A 20][lit 4][B 7][lit 6]: A in blocks 0-1, B in block 2, the suffix of 13 tokens from block 3 on.
LAYOUT, _ = lay_out(range(40), [Span(3, 20), Span(27, 7)], prefix_len=0, block_size=16, pad=0)
BLOCKS = np.array([[70, 71, 72, 73, 74]])


def runs(num_queries, suffix_len, layout=LAYOUT):
    seq_len = (layout.suffix_start if layout else 0) + suffix_len
    (row,) = make_rows([5, 5 + num_queries], [seq_len], BLOCKS, [layout], 16)
    assert (row.start, row.num_queries) == (5, num_queries)
    return [(r.blocks[0], r.num_tokens, r.shift, r.first_query) for r in row.runs]


def test_a_whole_suffix_sees_each_segment_from_its_place_on():
    assert runs(13, 13) == [(70, 20, 3, 3), (72, 7, 27, 7)]


def test_a_later_part_of_the_suffix_also_sees_the_earlier():
    assert runs(8, 13) == [(70, 20, 3, 0), (72, 7, 27, 2), (73, 5, 0, 0)]


def test_an_early_part_does_not_see_later_segments():
    assert runs(5, 5) == [(70, 20, 3, 3)]
    assert runs(3, 3) == []


def test_a_single_query_sees_itself_in_the_cache():
    assert runs(1, 14) == [(70, 20, 3, 0), (72, 7, 27, 0), (73, 14, 0, 0)]
    assert runs(1, 1) == [(73, 1, 0, 0)]


def test_ordinary_rows_see_their_past():
    assert runs(6, 30, layout=None) == [(70, 24, 0, 0)]
    assert runs(1, 30, layout=None) == [(70, 30, 0, 0)]
    assert runs(30, 30, layout=None) == []


def test_rows_without_queries_are_left_out():
    assert make_rows([0, 0, 1], [9, 1], np.zeros((2, 1), int), [None, None], 16)[0].num_queries == 1
