"""A block's hash covers what its K and V depend on, and nothing else.

The hash function of these tests is the tuple of its arguments, so equal hashes are equal inputs.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyrag.backend.hashing import (
    NAME_DIGITS,
    ExtraKeys,
    block_hashes,
    chunk_hashes,
    chunk_key,
    chunk_name,
    head_names,
)
from lazyrag.backend.layout import Layout, Span, lay_out, take_apart

PAD, BLOCK = 0, 4
KEYS = ExtraKeys(("lora", "salt"), ("lora",))


def spell(parent, tokens, extra):
    return (parent, tuple(tokens), extra)


def stock(token_ids, keys=KEYS):
    """The chain of an ordinary prompt."""
    chain = []
    for start in range(0, len(token_ids) - BLOCK + 1, BLOCK):
        parent = chain[-1] if chain else None
        chain.append(spell(parent, token_ids[start : start + BLOCK], keys.rest if chain else keys.first))
    return chain


def marked(token_ids):
    """The chain of a padded chunk: that of an ordinary prompt but for its padded last block."""
    chain = stock(padded(token_ids))
    if num_valid := len(token_ids) % BLOCK:
        parent, tokens, extra = chain[-1]
        chain[-1] = (parent, tokens, (*extra, ("pads", num_valid)))
    return chain


def of_segments(layout, contents, keys=KEYS):
    """The hashes of all segments' blocks, as the scheduler puts them together."""
    hashes, behind = [], None
    for segment, content in zip(layout.segments, contents, strict=True):
        of_chunk = chunk_hashes(
            content,
            block_size=BLOCK,
            pad=PAD,
            keys=keys,
            hash_block=spell,
            behind=behind if segment.behind_first else None,
        )
        hashes += of_chunk[segment.offset // BLOCK :][: segment.num_blocks]
        behind = behind or hashes[-1]
    return hashes


def hashed(parts, prefix=(), keys=KEYS, sink=()):
    """(layout, hashes) of literals (lists) and chunks (tuples of tokens, or (tokens, offset, end))."""
    token_ids, spans = list(prefix), []
    for part in parts:
        if isinstance(part, list):
            token_ids += part
            continue
        tokens, offset, end = part if isinstance(part[0], tuple) else (part, 0, len(part))
        spans.append(Span(len(token_ids) + offset, end - offset, offset))
        token_ids += tokens[:end]
    layout, physical = lay_out(token_ids, spans, prefix_len=len(prefix), block_size=BLOCK, pad=PAD, sink=sink)
    _, contents = take_apart(token_ids, spans, len(prefix))
    known = of_segments(layout, [sink, *contents] if sink else contents, keys)
    return layout, known + block_hashes(layout, physical, known, keys, spell)


def of_segment(result, index):
    layout, hashes = result
    return hashes[layout.segments[index].first_block : layout.segments[index].end_block]


def of_suffix(result):
    layout, hashes = result
    return hashes[layout.suffix_block :]


def padded(tokens):
    return [*tokens, *[PAD] * (-len(tokens) % BLOCK)]


A, B, C = tuple(range(100, 109)), tuple(range(200, 208)), tuple(range(300, 301))
TEXT, MORE = list(range(10, 31)), list(range(40, 61))
PREFIX, ALIGNED = tuple(range(500, 507)), tuple(range(510, 518))


# ---------------------------------------------------------------- segments


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20), st.lists(st.integers(1, 5), max_size=9))
def test_a_chunks_hashes_are_those_of_its_tokens_as_a_prompt_and_its_pads_are_marked(chunk, before):
    assert of_segment(hashed([before, B, tuple(chunk), TEXT]), 1) == marked(chunk)


def test_a_chunks_hashes_do_not_depend_on_its_place():
    places = [hashed([A, TEXT]), hashed([TEXT, A, MORE]), hashed([B, C, TEXT, A, TEXT], keys=KEYS)]
    assert len({tuple(of_segment(r, len(r[0].segments) - 1)) for r in places}) == 1


def test_every_chain_starts_with_the_salt():
    hashes = [of_segment(hashed([A, B, TEXT], keys=ExtraKeys((salt,))), i)[0] for salt in "xy" for i in (0, 1)]
    assert len(set(hashes)) == 4
    assert [h[2] for h in hashes] == [("x",), ("x",), ("y",), ("y",)]


@given(st.integers(1, 16), st.integers(0, 3))
def test_a_part_of_a_chunk_has_the_chunks_hashes(end, first_block):
    chunk = tuple(range(100, 116))
    offset = min(first_block, (end - 1) // BLOCK) * BLOCK
    part = of_segment(hashed([TEXT, (chunk, offset, end), MORE]), 0)
    assert part == marked(chunk[:end])[offset // BLOCK :]


@pytest.mark.parametrize("prefix", [PREFIX, ALIGNED], ids=["padded", "aligned"])
def test_a_chunk_behind_the_preamble_hashes_as_text_behind_it(prefix):
    chunks = [tuple(range(100, 108)), (tuple(range(100, 116)), 4, 12)]
    parent_layout, _ = parent = hashed([TEXT, *chunks, MORE], prefix=prefix)
    preamble = parent_layout.segments[0]
    assert of_segment(parent, 0) == marked(prefix)
    for index, tokens in ((1, tuple(range(100, 108))), (2, tuple(range(100, 112)))):
        child = Layout(BLOCK, (preamble,), preamble.num_blocks)
        hashes = block_hashes(child, [*padded(prefix), *tokens], of_segments(child, [prefix]), KEYS, spell)
        segment = of_segment(parent, index)
        assert hashes[-len(segment) :] == segment


def test_a_chunk_behind_a_preamble_is_not_the_chunk_alone():
    alone, behind, other = hashed([A, TEXT]), hashed([A, TEXT], prefix=PREFIX), hashed([A, TEXT], prefix=PREFIX[:-1])
    assert len({tuple(of_segment(r, -1)) for r in (alone, behind, other)}) == 3


@pytest.mark.parametrize("behind", [PREFIX, ALIGNED], ids=["padded", "aligned"])
def test_a_chunk_behind_a_sink_is_the_chunk_behind_a_preamble_of_its_tokens(behind):
    ours, theirs = hashed([TEXT, A, MORE], sink=behind), hashed([TEXT, A, MORE], prefix=behind)
    assert [of_segment(ours, i) for i in (0, 1)] == [of_segment(theirs, i) for i in (0, 1)]
    assert not set(of_segment(ours, 1)) & set(of_segment(hashed([TEXT, A, MORE]), 0))


def test_a_sink_is_no_part_of_the_text():
    """The literals in front of the first chunk are an ordinary prompt; behind it they depend on what it saw."""
    alone, behind, other = hashed([TEXT, A, MORE]), *(hashed([TEXT, A, MORE], sink=sink) for sink in (PREFIX, ALIGNED))
    shared = len(TEXT) // BLOCK
    assert of_suffix(alone)[:shared] == of_suffix(behind)[:shared] == of_suffix(other)[:shared] == stock(TEXT)
    assert len({of_suffix(result)[shared] for result in (alone, behind, other)}) == 3
    assert of_suffix(hashed([B, TEXT], sink=ALIGNED))[0] not in {of_suffix(hashed([B, TEXT]))[0], stock([*B, *TEXT])[2]}


def test_a_chunk_right_behind_an_aligned_preamble_is_an_ordinary_prompt():
    assert of_segment(hashed([A, TEXT], prefix=ALIGNED), 1) == marked([*ALIGNED, *A])[2:]


# ---------------------------------------------------------------- suffix


def test_text_in_front_of_the_first_chunk_is_an_ordinary_prompt():
    assert of_suffix(hashed([TEXT, A, MORE]))[: len(TEXT) // BLOCK] == stock(TEXT)


def test_text_behind_an_aligned_first_chunk_goes_on_with_its_chain():
    assert of_suffix(hashed([B, TEXT])) == stock([*B, *TEXT])[len(B) // BLOCK :]


def test_text_behind_a_padded_first_chunk_does_not():
    assert of_suffix(hashed([A, TEXT]))[0] != stock([*padded(A), *TEXT])[len(padded(A)) // BLOCK]


def test_chunks_that_come_later_do_not_change_earlier_text():
    one, two = hashed([A, TEXT, B, MORE]), hashed([A, TEXT, C, MORE])
    shared = len(TEXT) // BLOCK
    assert of_suffix(one)[:shared] == of_suffix(two)[:shared]
    assert of_suffix(one)[shared] != of_suffix(two)[shared]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param([TEXT, A[::-1], MORE], id="another chunk"),
        pytest.param([TEXT[:-1], A, TEXT[-1:] + MORE], id="one token earlier"),
        pytest.param([TEXT, (*A, PAD, PAD, PAD), MORE], id="pads that are valid tokens"),
        pytest.param([TEXT, A, A, MORE], id="twice"),
        pytest.param([TEXT + MORE], id="no chunk"),
        pytest.param([TEXT, (A, 0, 8), MORE], id="cut short"),
    ],
)
def test_text_behind_a_chunk_depends_on_the_chunk_its_length_and_its_place(other):
    ours, theirs = of_suffix(hashed([TEXT, A, MORE])), of_suffix(hashed(other))
    assert not set(ours[len(TEXT) // BLOCK :]) & set(theirs)


def test_text_in_front_of_an_aligned_chunk_is_not_text_behind_it():
    assert of_suffix(hashed([TEXT[:2], B, TEXT[2:]]))[0] != of_suffix(hashed([B, TEXT]))[0]


def test_text_behind_a_chunk_depends_on_how_much_of_it_is_reused():
    """Same text, same place, same last block: here the chunk's head is text, there it is text and chunk."""
    part, whole = hashed([TEXT, (A, 4, 9), MORE]), hashed([[*TEXT, *A[:4]], A, MORE])
    assert of_segment(part, 0) == of_segment(whole, 0)[1:]
    assert of_suffix(part)[len(TEXT) // BLOCK + 1] != of_suffix(whole)[len(TEXT) // BLOCK + 1]


def test_a_block_with_pads_is_no_block_of_text_with_their_tokens():
    as_text = {*stock([*padded(A), *MORE]), *of_segment(hashed([tuple(padded(A)), MORE]), 0)}
    assert set(of_segment(hashed([A, MORE]), 0)) - as_text == {marked(A)[-1]}


def test_the_order_of_chunks_matters_to_the_text_behind_them():
    assert of_suffix(hashed([A, B, TEXT]))[0] != of_suffix(hashed([B, A, TEXT]))[0]


pieces = st.lists(
    st.one_of(
        st.lists(st.integers(0, 2), min_size=1, max_size=6),
        st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple),
    ),
    max_size=5,
)


def meaning(parts, num_literals):
    """What the suffix up to a literal depends on: texts and chunks in order; an aligned first chunk is text."""
    seen, left = [], num_literals
    for part in parts:
        if isinstance(part, tuple):
            aligned_start = not seen and len(part) % BLOCK == 0
            if not aligned_start:
                seen.append(part)
                continue
        elif left <= 0:
            break
        text = list(part) if isinstance(part, tuple) else part[:left]
        left -= 0 if isinstance(part, tuple) else len(part)
        if seen and isinstance(seen[-1], list):
            seen[-1] = seen[-1] + text
        else:
            seen.append(text)
        if left <= 0 and isinstance(part, list):
            break
    return seen


@settings(max_examples=400)
@given(pieces, pieces, st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_equal_suffix_hashes_mean_equal_contexts(one, two, tail):
    one, two = [*one, tail], [*two, tail]
    ours, theirs = of_suffix(hashed(one)), of_suffix(hashed(two))
    for i, block_hash in enumerate(ours):
        for j, other in enumerate(theirs):
            if block_hash == other:
                assert meaning(one, (i + 1) * BLOCK) == meaning(two, (j + 1) * BLOCK)


@given(pieces, st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 30))
def test_hashes_of_generated_tokens_are_the_same_one_by_one(parts, tail, step):
    token_ids, spans = [], []
    for part in [*parts, tail[:1]]:
        if isinstance(part, tuple):
            spans.append(Span(len(token_ids), len(part)))
        token_ids += part
    layout, physical = lay_out(token_ids, spans, prefix_len=0, block_size=BLOCK, pad=PAD)
    everything = [*physical, *tail]
    known = of_segments(layout, take_apart(token_ids, spans, 0)[1])
    grown = known + block_hashes(layout, physical, known, KEYS, spell)
    for end in range(len(physical), len(everything) + 1, step):
        grown += block_hashes(layout, everything[:end], grown, KEYS, spell)
    grown += block_hashes(layout, everything, grown, KEYS, spell)
    assert grown == known + block_hashes(layout, everything, known, KEYS, spell)
    assert len(grown) == len(everything) // BLOCK


# ---------------------------------------------------------------- keys on disk


def test_a_key_names_tokens_preamble_salt_and_adapter():
    keys = [
        chunk_key([1, 2, 3]),
        chunk_key([1, 2]),
        chunk_key([3], prefix=[1, 2]),
        chunk_key([2, 3], prefix=[1]),
        chunk_key([1, 2, 3], salt="1"),
        chunk_key([1, 2, 3], lora="1"),
        chunk_key([1, 2, 3], salt="1", lora="1"),
        chunk_key([1, 2, 3], salt="11"),
        chunk_key([]),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 96 and int(key, 16) >= 0 for key in keys)


def test_a_key_begins_with_the_name_of_the_chunk_whatever_it_was_computed_behind_or_with():
    name = chunk_name([1, 2, 3], salt="s")
    for behind in ({}, {"prefix": [4, 5]}, {"lora": "l"}):
        assert chunk_key([1, 2, 3], salt="s", **behind)[:NAME_DIGITS] == name
    assert len({name, chunk_name([1, 2, 3]), chunk_name([1, 2], salt="s"), chunk_name([1, 2, 3], salt="t")}) == 4


def test_the_heads_of_a_chunk_are_named_as_chunks_of_their_own():
    tokens = [7, 0, 2**31, 7]
    assert head_names(tokens, salt="s") == [chunk_name(tokens[:n], salt="s") for n in range(1, 5)]
    assert head_names([]) == []


def test_a_key_is_the_same_in_every_process():
    code = "from lazyrag.backend.hashing import chunk_key; print(chunk_key([1, 2**31], prefix=[7], salt='é', lora='l'))"
    seen = {chunk_key([1, 2**31], prefix=[7], salt="é", lora="l")}
    for seed in ("0", "1"):
        run = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        )
        seen.add(run.stdout.decode().strip())
    assert len(seen) == 1


def test_a_key_never_changes_by_accident():
    assert chunk_key([1, 2, 3], prefix=[4], salt="s", lora="l") == KNOWN_KEY


KNOWN_KEY = "43dce2431f779093a677bb3cc2aa86c70d0b753b61185c7e4aaaa63b585429e61719278d7c883b0ab5ebc4bd868e1867"
