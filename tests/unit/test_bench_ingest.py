"""`lazyrag bench ingest`: what it measures is an ingest of everything, and its stand-ins take as long as they say."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazyrag.bench import ingest
from lazyrag.errors import ConfigError, InputError


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
    assert ingest._IdleEmbedder(0.01).embed_documents(["a", "b", "c"]).shape == (3, 384)
    embedded = time.monotonic()
    engine: Any = ingest._IdleEngine(0.01)
    chunks = [(str(n), (n,)) for n in range(20)]
    assert [id for id, _ in ingest._warmed(engine, "", chunks)] == [id for id, _ in chunks]
    # It sleeps so long at least; how much longer is the system's matter.
    assert embedded - begun >= 0.03
    assert time.monotonic() - embedded >= 0.2


def test_a_case_or_a_model_that_there_is_not_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(ConfigError, match="No model is named"):
        ingest.bench(["stand-ins"], 40, print, model="", out=None, command="")
    with pytest.raises(InputError, match=r"Known: stand-ins, embedding, prefill"):
        ingest.bench(["stand-ins", "reading"], 40, print, model="", out=None, command="")
