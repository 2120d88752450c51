"""Published figures are those of the measured run that is kept beside the code."""

from __future__ import annotations

import json
from pathlib import Path

SHOWN = ("ttft_hot", "ttft_hot_literals", "decode_step")


def test_the_readmes_table_is_made_of_the_measured_rows(root: Path) -> None:
    rows = json.loads((root / "lazyrag/bench/results/h200.json").read_text(encoding="utf-8"))["rows"]
    value = {(row["metric"], row["workload"], row["arm"]): row["value"] for row in rows}
    readme = (root / "README.md").read_text(encoding="utf-8")
    shown = dict.fromkeys((row["metric"], row["workload"]) for row in rows if row["metric"] in SHOWN)
    assert shown
    for metric, workload in shown:
        arms = [value.get((metric, workload, arm)) for arm in ("lazy", "perfect", "prefix")]
        cells = ["" if ms is None else f"{ms:.1f}" for ms in arms]
        ratio = value[metric, workload, "lazy"] / value[metric, workload, "perfect"]
        assert f"| {metric}, {workload} | {' | '.join(cells)} | {ratio:.2f} |\n" in readme


def test_each_row_has_what_it_needs_to_be_believed(root: Path) -> None:
    result = json.loads((root / "lazyrag/bench/results/h200.json").read_text(encoding="utf-8"))
    assert result["machine"]["gpu"]
    assert result["machine"]["commit"] not in ("", "unknown")
    assert result["machine"]["versions"]["vllm"]
    assert all(check["passed"] for check in result["gate"])
    keys = {"workload", "metric", "arm", "value", "unit", "baseline", "ratio", "n", "min", "max"}
    assert all(keys <= row.keys() for row in result["rows"])
