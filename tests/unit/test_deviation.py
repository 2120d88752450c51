"""Scores are measured once for a chunk, a model and what its KV is computed behind, and kept with the chunk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lazyrag.backend.fake import FakeEngine
from lazyrag.client import LazyRAG
from lazyrag.deviation import Deviations
from lazyrag.errors import ConfigError
from lazyrag.types import Document, chunk_id

A = "The fox crossed the river by the old bridge at night, and nobody saw where it went. " * 8
B = "Apples were sold in the harbour until the railway came, and then there were none. " * 8


@pytest.fixture
def model(model_folder: Callable[..., Path]) -> Path:
    folder = model_folder("byte-level")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[int, ...]]]:
    """What was measured: number of tokens, and what stands in front. The last tokens differ most."""
    calls: list[tuple[int, tuple[int, ...]]] = []

    def scores(self: Deviations, token_ids: Sequence[int], behind: Sequence[int] = ()) -> list[float]:
        calls.append((len(token_ids), tuple(behind)))
        return [float(n) for n in range(len(token_ids))]

    monkeypatch.setattr(Deviations, "scores", scores)
    return calls


def client(model: Path, **settings: Any) -> LazyRAG:
    return LazyRAG(model=str(model), block_size=16, **settings)


def test_recompute_takes_the_blocks_that_were_measured_to_differ_most(
    model: Path, measured: list[tuple[int, tuple[int, ...]]]
) -> None:
    rag = client(model, mode="lazy+recompute=0.3")
    rag.register([A, B])
    for mode, sink in (("lazy+recompute=0.3", ()), ("sink+recompute=0.3", rag._planner_for_engine().sink)):
        for _ in range(2):
            plan = rag.plan(f"Read:\n{A}\n\n{B}\n\nWhy?", mode=mode)
            chunks = [piece for piece in plan.pieces if piece.reuse]
            for piece in chunks:
                ((start, end),) = piece.computed
                assert end == len(piece.token_ids)
                assert start % 16 == 0
                assert 0.2 < (end - start) / end < 0.4
        assert measured == [(len(piece.token_ids), sink) for piece in chunks]
        measured.clear()


def test_no_other_mode_measures_anything(model: Path, measured: list[tuple[int, tuple[int, ...]]]) -> None:
    rag = client(model)
    rag.register([A])
    for mode in ("exact", "lazy", "sink+first_k=16"):
        rag.plan(f"{A}\n\nWhy?", mode=mode)
    assert measured == []


def test_scores_are_kept_in_the_store_and_go_with_the_chunk(
    model: Path, tmp_path: Path, measured: list[tuple[int, tuple[int, ...]]]
) -> None:
    def plan() -> Any:
        rag = client(model, store=tmp_path / "kb", mode="lazy+recompute=0.3", embedder="hash")
        return rag, rag.plan(f"{A}\n\nWhy?")

    first = client(model, store=tmp_path / "kb", mode="lazy+recompute=0.3", embedder="hash")
    list(first.ingest(documents=[Document("a", A, "a.txt")], warm=False))
    (_, before), (rag, after) = plan(), plan()
    assert before == after
    assert before.pieces[0].computed
    num_chunks = len({piece.chunk_id for piece in before.pieces if piece.reuse})
    assert len(measured) == num_chunks, "by the first client only"
    rag.delete(["a"])
    list(rag.ingest(documents=[Document("a", A, "a.txt")], warm=False))
    plan()
    assert len(measured) == 2 * num_chunks, "a deleted chunk leaves no scores behind"


def test_warming_a_chunk_measures_it(model: Path, measured: list[tuple[int, tuple[int, ...]]]) -> None:
    for mode, num_measured in (("sink", 0), ("sink+recompute=0.3", 1)):
        engine = FakeEngine(model, mode=mode)
        rag = LazyRAG(model=str(model), engine=engine)
        for _ in rag.warm(rag.register([A])):
            assert len(measured) == num_measured
        rag.plan(f"{A}\n\nWhy?")
        assert len(measured) == num_measured
        engine.close()


def test_an_unknown_chunk_has_no_scores(model: Path, measured: list[tuple[int, tuple[int, ...]]]) -> None:
    assert len(client(model)._scores()(chunk_id("never seen"), ())) == 0
    assert measured == []


def test_who_knows_a_chunk_does_not_wait_for_another_that_is_measured_once(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_measure, measuring, calls = threading.Event(), threading.Event(), []

    def scores(self: Deviations, token_ids: Sequence[int], behind: Sequence[int] = ()) -> list[float]:
        calls.append(len(token_ids))
        if len(calls) > 1:
            measuring.set()
            assert may_measure.wait(30)
        return [0.0] * len(token_ids)

    monkeypatch.setattr(Deviations, "scores", scores)
    rag = client(model)
    known, new = rag.register([A, B])
    of = rag._scores()
    of(known, ())
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(of, new, ()) for _ in range(2)]
        assert measuring.wait(30)
        assert len(of(known, ())) == calls[0]
        may_measure.set()
        assert {len(future.result()) for future in waiting} == {calls[1]}
    assert len(calls) == 2


def test_what_could_not_be_measured_is_tried_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Deviations, token_ids: Sequence[int], behind: Sequence[int] = ()) -> list[float]:
        raise ConfigError("The model cannot be loaded.")

    rag = client(model)
    (id,) = rag.register([A])
    scores = rag._scores()
    with monkeypatch.context() as patch:
        patch.setattr(Deviations, "scores", broken)
        with pytest.raises(ConfigError):
            scores(id, ())
    monkeypatch.setattr(Deviations, "scores", lambda self, ids, behind=(): [0.0] * len(ids))
    assert len(scores(id, ()))


def test_tenants_share_the_layers_that_measure_and_nothing_that_was_measured(
    model: Path, measured: list[tuple[int, tuple[int, ...]]]
) -> None:
    mine = client(model)
    theirs = mine.for_namespace("theirs")
    (id,) = mine.register([A])
    assert mine._scores()._deviations is theirs._scores()._deviations
    assert len(mine._scores()(id, ())) > 0
    assert len(theirs._scores()(id, ())) == 0
