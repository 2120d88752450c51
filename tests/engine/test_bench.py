"""`lazyrag bench` end to end: two engines in processes of their own, the gate, figures as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.engine
def test_a_quick_run_passes_the_gate_and_reports_every_arm(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = ["bench", "--shape", "tiny", "--quick", "--rounds", "1", "--json", "--out", str(out)]
    metrics = ["--metrics", "ttft_hot_literals,ttft_first_k,ttft_few_shot,decode_step,ingest,table11_ttft"]
    code = "import sys; from lazyrag.cli import main; sys.argv[0] = 'lazyrag'; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *command, *metrics],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert values == json.loads(out.read_text())
    assert values["skipped"] == []
    assert all(check["passed"] for check in values["gate"])
    assert {check["must_agree"] for check in values["gate"]} == {True, False}
    assert {(row["metric"], row["arm"]) for row in values["rows"]} == {
        *(("ttft_hot_literals", arm) for arm in ("lazy", "perfect", "prefix", "recompute")),
        *(("ttft_first_k", arm) for arm in ("first-k", "lazy", "perfect", "prefix")),
        *(("ttft_few_shot", arm) for arm in ("lazy", "perfect", "prefix", "recompute")),
        *(("decode_step", arm) for arm in ("lazy", "perfect")),
        *(("ingest", arm) for arm in ("lazy", "stock")),
        *(("table11_ttft", arm) for arm in ("lazy", "lazy-in-turn", "prefix", "prefix-reorder")),
    }
    assert all(row["value"] > 0 and row["gauge_ms"] > 0 for row in values["rows"])
    assert set(values["engines"]) == {"stock", "lazy"}
    assert "scheduler_cls" not in values["engines"]["stock"]["arguments"]
    assert "LazyScheduler" in values["engines"]["lazy"]["arguments"]["scheduler_cls"]
