"""`lazyrag bench ingest`: what it measures is an ingest of everything, and its stand-ins take as long as they say."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lazyrag.bench import ingest
from lazyrag.errors import InputError


def test_a_case_gets_its_row(
    model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "COST_S", 0.001)
    model = model_folder("byte-level")
    (model / "config.json").write_text("{}")
    out = tmp_path / "results" / "ingest.json"
    said: list[str] = []
    result = ingest.bench(["stand-ins"], 40, said.append, model=str(model), out=out, command="lazyrag bench ingest")
    (row,) = result.rows
    assert row.chunks >= 40
    assert row.slower_s == pytest.approx(0.001 * row.chunks)
    assert row.share == row.slower_s / row.ingest_s
    assert 0 < row.early_bytes <= row.most_bytes
    assert [line.partition(":")[0] for line in said] == ["stand-ins"] * 3
    written = json.loads(out.read_text(encoding="utf-8"))
    assert (written["command"], len(written["rows"])) == ("lazyrag bench ingest", 1)
    assert sum(line.startswith("| stand-ins ") for line in ingest.tables(result)) == 1


def test_a_stand_in_takes_what_a_chunk_costs() -> None:
    begun = time.monotonic()
    assert len(ingest._IdleEmbedder(0.01).embed_documents(["a", "b", "c"])) == 3
    assert [id for id, _ in ingest._idle(0.01, [("x", (1,)), ("y", (2,))])] == ["x", "y"]
    assert time.monotonic() - begun >= 0.05, "it sleeps at least so long"


def test_a_case_that_there_is_not_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(InputError, match=r"Known: stand-ins, embedding, prefill"):
        ingest.bench(["stand-ins", "reading"], 40, print, model="", out=None, command="")
