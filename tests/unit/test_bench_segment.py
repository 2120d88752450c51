"""`lazyrag bench segment`: its texts, its oracle, and that no figure comes out of wrong answers."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lazyrag.bench import segment
from lazyrag.bench.matcher import Matcher
from lazyrag.bench.segment import FIND, FIRST, LAZYRAG, MIDDLE, Options, WrongAnswerError
from lazyrag.bench.texts import Corpus, Words, puzzling, retrieved
from lazyrag.segmenter import CUT_LOSS, Segmenter
from lazyrag.types import Occurrence, chunk_id

TINY = Options({"a": Corpus(1500), "b": Corpus(300, shared_by_all=True)}, prompts=3, checked=40, change=50, changes=2)


def test_a_seed_gives_one_corpus() -> None:
    chunks = list(Corpus(100).chunks(1))
    assert chunks == list(Corpus(100).chunks(1))
    assert chunks != list(Corpus(100).chunks(2))
    assert len(set(chunks)) == 100
    assert all(790 <= len(chunk) <= 800 and chunk == chunk.strip() for chunk in chunks)


def test_neighbours_overlap_and_notices_are_shared_as_said() -> None:
    chunks = list(Corpus(16, overlap=100).chunks(3))
    shared = [one[-80:] in other for one, other in pairwise(chunks)]
    assert shared == [True] * 7 + [False] + [True] * 7  # two documents of eight chunks
    headed = list(Corpus(50, shared_by_all=True).chunks(3))
    assert len({chunk[:243] for chunk in headed}) == 1
    assert len({chunk[243:] for chunk in headed}) == 50


def test_prompts_show_the_chunks_that_they_say() -> None:
    rng = np.random.default_rng(0)
    chunks = list(Corpus(200).chunks(0))
    prompt = retrieved(chunks, rng, Words(rng))
    assert len(prompt.text) == 100_000
    assert len(prompt.chunks) == 117
    assert all(prompt.text.startswith(chunks[i], start) for start, i in prompt.chunks)


def test_the_oracle_knows_good_answers_from_bad_ones() -> None:
    a, b, c = (f"{letter}{letter * 2} {letter} " * 20 + letter for letter in "abc")
    inner = a[10:70].strip()
    texts = [a, b, c, inner]
    matcher = Matcher((chunk_id(text), text) for text in texts)
    prompt = f"{a}--{b}--{c[:90]}"
    good = [
        Occurrence(chunk_id(a), 0, len(a)),
        Occurrence(chunk_id(b), len(a) + 2, len(a) + 2 + len(b)),
        Occurrence(chunk_id(c), len(a) + len(b) + 4, len(prompt), whole=False),
    ]
    assert matcher.faults(prompt, good, cut_loss=CUT_LOSS) == []
    assert matcher.faults("nothing", [], cut_loss=CUT_LOSS) == []
    start = prompt.index(inner)
    bad = {
        "instead of": good[:1],
        "no such chunk": [*good[:1], good[1]._replace(start=good[1].start + 1), *good[2:]],
        "no beginning": [*good[:2], good[2]._replace(start=good[2].start + 1)],
        "an overlap": [good[0], Occurrence(chunk_id(inner), start, start + len(inner)), *good[1:]],
    }
    for fault, answer in bad.items():
        assert any(fault in found for found in matcher.faults(prompt, answer, cut_loss=CUT_LOSS)), fault
    short = good[2]._replace(end=good[2].start + CUT_LOSS)
    assert matcher.faults(prompt, [*good[:2], short], cut_loss=CUT_LOSS)


def test_the_segmenter_agrees_with_the_oracle_on_overlapping_chunks() -> None:
    """And on the corpora of `lazyrag bench segment`, which checks 10,000 prompts of each."""
    corpus = Corpus(400, chunk=300, overlap=120, notice=150)
    chunks = {chunk_id(text): text for text in corpus.chunks(5)}
    index = segment.AnchorIndex(secret=b"tests")
    index.add(chunks.items())
    segmenter = Segmenter(index, lambda ids: {id: chunks[id] for id in ids})
    matcher = Matcher(chunks.items())
    rng = np.random.default_rng(6)
    words = Words(rng)
    cut = 0
    for _ in range(300):
        prompt = puzzling(list(chunks.values()), rng, words, overlap=120)
        found = segmenter.find(prompt)
        assert matcher.faults(prompt, found, cut_loss=CUT_LOSS) == []
        cut += sum(not occurrence.whole for occurrence in found)
    assert cut > 50


def test_each_corpus_gets_its_rows_and_costs(tmp_path: Path) -> None:
    out = tmp_path / "results" / "segment.json"
    result = segment.bench(TINY, lambda line: None, prompts=2, out=out, command="lazyrag bench segment")
    assert [(row.corpus, row.arm) for row in result.rows] == [
        (name, arm) for name in "ab" for arm in (LAZYRAG, FIRST, MIDDLE, FIND)
    ]
    assert all(0 < row.min <= row.p50 <= row.p99 <= row.max for row in result.rows)
    assert [row.n for row in result.rows[:4]] == [2, 1, 2, 2]
    costs = result.costs["a"]
    assert (costs.chunks, costs.checked) == (1500, 40)
    assert len(costs.add_s) == len(costs.remove_s) == len(costs.save_s) == 2
    assert costs.index_bytes > 1500 * 36
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["command"] == "lazyrag bench segment"
    assert len(written["rows"]) == 8
    assert {"numpy", "daachorse"} <= written["machine"]["versions"].keys()
    lines = segment.tables(result)
    assert sum(line.startswith("| a ") for line in lines) == 5


@pytest.mark.parametrize("checked", [0, 40])
def test_wrong_answers_give_no_figures(checked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = Segmenter.find
    monkeypatch.setattr(Segmenter, "find", lambda self, text: find(self, text)[:-1])
    with pytest.raises(WrongAnswerError):
        segment.bench(
            replace(TINY, checked=checked), lambda line: None, prompts=1, out=tmp_path / "segment.json", command=""
        )
    assert not (tmp_path / "segment.json").exists()
