from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyrag.errors import ConfigError
from lazyrag.modes import KINDS, ReuseMode, default_block_size


@given(
    st.sampled_from([kind for kind in KINDS if kind != "exact"]),
    st.integers(0, 10).map(lambda blocks: 16 * blocks),
    st.integers(0, 99).map(lambda percent: percent / 100),
)
def test_a_mode_is_its_text(kind: str, first_k: int, recompute: float) -> None:
    mode = ReuseMode(kind, first_k, recompute)
    assert ReuseMode.parse(str(mode)) == mode
    assert ReuseMode.parse(mode) is mode


def test_modes_are_written_short() -> None:
    modes = [ReuseMode("exact"), ReuseMode("sink", first_k=16), ReuseMode("lazy", recompute=0.1)]
    assert [str(mode) for mode in modes] == ["exact", "sink+first_k=16", "lazy+recompute=0.1"]
    assert str(ReuseMode.parse("prefix+recompute=0.10+first_k=032")) == "prefix+first_k=32+recompute=0.1"


def test_the_old_name_of_prefix_is_understood() -> None:
    assert ReuseMode.parse("lazy-prefix") == ReuseMode("prefix")
    assert ReuseMode.parse("lazy-prefix+first_k=16") == ReuseMode("prefix", first_k=16)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "exact, lazy, sink, prefix"),
        ("lzy", "exact, lazy, sink, prefix"),
        ("lazy+firstk=16", "'firstk=16'"),
        ("lazy+first_k", "number"),
        ("lazy+first_k=1.5", "number"),
        ("lazy+first_k=-16", "0 or more"),
        ("lazy+first_k=16+first_k=32", "'first_k=32'"),
        ("lazy+recompute=1", "below 1"),
        ("lazy+recompute=-0.1", "below 1"),
        ("lazy+recompute=nan", "below 1"),
        ("exact+first_k=16", "computes everything"),
        (None, "no mode"),
    ],
)
def test_what_is_no_mode_is_refused_with_a_sentence(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(word)):
        ReuseMode.parse(text)


@pytest.mark.parametrize(("first_k", "size"), [(0, 32), (16, 16), (32, 32), (48, 16), (64, 32)])
def test_the_default_block_fits_the_mode(first_k: int, size: int) -> None:
    assert default_block_size(ReuseMode("lazy", first_k)) == size
    assert first_k % size == 0
