"""Rows, JSON, tables; options as they are typed; the gate keeps figures back."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lazyrag.bench import report, run
from lazyrag.bench.gate import Check, joined, questions
from lazyrag.bench.report import Result, Row
from lazyrag.bench.samples import Summary
from lazyrag.bench.shapes import make_model, read_model
from lazyrag.errors import ConfigError, InputError

COMPARE = (("lazy", "perfect"), ("lazy", "prefix"))
SUMMARIES = {"lazy": Summary(8, 7, 9, 5, 2), "perfect": Summary(10, 9, 11, 5, 2), "prefix": Summary(80, 80, 80, 1, 3)}


def result(rows: list[Row]) -> Result:
    machine = {"gpu": [], "cpu": "a CPU", "cores": 2, "versions": {"vllm": "0"}, "commit": "abc"}
    return Result(machine, "lazyrag bench", rows=rows)


def test_a_row_compares_with_one_baseline_and_every_baseline_has_its_own() -> None:
    rows = report.rows("ttft_hot", "10x512+64", "ms", COMPARE, SUMMARIES)
    assert [(row.arm, row.baseline, row.ratio) for row in rows] == [
        ("lazy", "perfect", 0.8),
        ("lazy", "prefix", 0.1),
        ("perfect", "perfect", 1),
        ("prefix", "prefix", 1),
    ]
    assert (rows[0].value, rows[0].min, rows[0].max, rows[0].n, rows[0].gauge_ms) == (8, 7, 9, 5, 2)


def test_a_row_holds_what_the_result_files_promise() -> None:
    names = [field.name for field in fields(Row)]
    assert names[:7] == ["workload", "metric", "arm", "value", "unit", "baseline", "ratio"]


def test_a_baseline_of_zero_has_no_ratio() -> None:
    rows = report.rows(
        "hit_ratio", "w", "1", (("lazy", "prefix"),), {"lazy": Summary(1, 1, 1, 1), "prefix": Summary(0, 0, 0, 1)}
    )
    assert rows[0].ratio is None


def test_a_plot_has_every_arm_of_every_workload(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        *report.rows("ttft_hot", "10x512+64", "ms", COMPARE, SUMMARIES),
        *report.rows("ttft_hot", "10x2048+64", "ms", COMPARE, SUMMARIES),
        *report.rows(
            "hit_ratio", "w", "1", (("lazy", "prefix"),), {"lazy": SUMMARIES["lazy"], "prefix": Summary(0, 0, 0, 1)}
        ),
    ]
    report.plot(rows, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    for row in rows:
        assert drawn.count(f">{row.workload}: {row.arm}<") == 1
        assert f">{row.metric}<" in drawn
    report.plot(rows, tmp_path / "plot.png")
    with pytest.raises(InputError, match="cannot be written"):
        report.plot(rows, tmp_path / "plot.nothing")
    with pytest.raises(InputError, match="nothing was measured"):
        report.plot([], tmp_path / "plot.svg")


def test_a_result_is_written_whole_and_can_be_read_again(tmp_path: Path) -> None:
    found = result(report.rows("ttft_hot", "w", "ms", COMPARE, SUMMARIES))
    found.gate = [Check("a case", 0.1, 0.2)]
    found.save(tmp_path / "results" / "here.json")
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["here.json"]
    read = json.loads((tmp_path / "results" / "here.json").read_text())
    assert read["rows"][0]["ratio"] == 0.8
    assert read["gate"][0]["passed"] is True
    assert read["machine"]["commit"] == "abc"


def test_a_table_has_one_line_for_each_arm() -> None:
    lines = report.tables(result(report.rows("ttft_hot", "w", "ms", COMPARE, SUMMARIES)))
    body = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]
    assert [(cells[1], cells[2], cells[7]) for cells in body] == [
        ("lazy", "8.000", "-"),
        ("perfect", "10.000", "0.800"),
        ("prefix", "80.000", "0.100"),
    ]


def test_the_simulated_metric_needs_no_engine_and_prints_its_definition() -> None:
    found = run.bench(run.Options(metrics=("hit_ratio",)), lambda line: pytest.fail(line))
    assert len(found.rows) == 3 * 4 * 8
    assert any("document tokens whose KV was in the pool" in line for line in report.tables(found))


def test_what_was_not_measured_is_said_with_the_reason() -> None:
    found = result([])
    found.skipped = [("cold", "w", "time was up")]
    assert report.tables(found)[-1] == "- cold | w | time was up"


def test_the_machine_names_versions_and_commit() -> None:
    machine = report.machine()
    assert machine["versions"]["lazyrag"]
    assert machine["commit"]


# ---------------------------------------------------------------- the gate


@pytest.mark.parametrize(
    ("deviation", "must_agree", "passed"),
    [
        (0.1, True, True),
        (0.3, True, False),
        (math.nan, True, False),
        (0.3, False, True),
        (0.1, False, False),
        (math.nan, False, False),
    ],
)
def test_a_check_passes_if_it_is_near_or_if_it_is_wrong_on_purpose(
    deviation: float, must_agree: bool, passed: bool
) -> None:
    assert Check("a case", deviation, 0.2, must_agree).passed is passed


def test_a_failed_gate_leaves_no_figures(tmp_path: Path) -> None:
    found = result([])
    found.gate = [Check("right", 0.1, 0.2), Check("chunks between literals", 0.3, 0.2)]
    told: list[str] = []
    with pytest.raises(run.GateError, match="chunks between literals"):
        run._check_gate(found, run.Options(out=tmp_path / "r.json"), told.append)
    assert [line[:4] for line in told] == ["ok  ", "FAIL"]
    assert json.loads((tmp_path / "r.json").read_text())["rows"] == []


def test_the_gate_asks_right_and_wrong_cases_that_a_prompt_can_have() -> None:
    asked = questions(lambda count: [7] * count)
    assert {question.must_agree for question in asked} == {True, False}
    for question in asked:
        ends = [start + length for start, length in question.prompt.spans]
        assert all(end < len(question.prompt.token_ids) for end in ends)


def test_parts_are_joined_in_order() -> None:
    prompt = joined([[1], [2, 2], [3]], {1})
    assert (prompt.token_ids, prompt.spans) == ([1, 2, 2, 3], ((1, 2),))
    assert len(prompt.documents) == 1


# ---------------------------------------------------------------- options and models


def test_options_are_read_as_they_are_typed() -> None:
    options = run.options(shape="tiny", metrics="cold, ingest", kv_gb=1.5, capture_sizes="1,8", engine_args='{"a": 1}')
    assert options.metrics == ("cold", "ingest")
    assert options.kv_bytes == 1_500_000_000
    assert options.capture_sizes == (1, 8)
    assert options.engine_args == {"a": 1}
    assert (options.rounds, run.options(shape="tiny", quick=True).rounds) == (run.ROUNDS, run.QUICK_ROUNDS)


@pytest.mark.parametrize(("gpus", "shape"), [([], "tiny"), (["NVIDIA H200, 580"], "llama-8b")])
def test_the_shape_is_one_that_the_machine_can_run(
    gpus: list[str], shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "gpus", lambda: gpus)
    assert run.options().shape == shape
    assert run.options(shape="tiny").shape == "tiny"


@pytest.mark.parametrize(
    "wrong",
    [
        {"engine_args": "{"},
        {"engine_args": "[1]"},
        {"capture_sizes": "1,two"},
        {"kv_gb": float("nan")},
        {"kv_gb": float("inf")},
        {"kv_gb": 0.0},
        {"out": Path("/")},
        {"out": Path("/nowhere/at/all.json")},
    ],
)
def test_options_that_cannot_be_read_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        run.options(shape="tiny", **wrong)


def test_workloads_are_chosen_by_what_their_names_say() -> None:
    with pytest.raises(InputError, match=r"zipf 3.*zipf 1\.1"):
        run.bench(run.options(shape="llama-8b", metrics="rate_at_slo", only="zipf 3"), print)


def test_an_unknown_shape_or_metric_is_an_error_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="llama-8b"):
        run.bench(run.Options(shape="huge", metrics=("ttft_hot",)), lambda line: None)
    with pytest.raises(InputError, match="No metric"):
        run.bench(run.Options(metrics=("speed",)), lambda line: None)


def test_the_shape_of_llama_8b_is_a_model_without_weights(tmp_path: Path) -> None:
    model = make_model("llama-8b", tmp_path / "m")
    assert model.dummy
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["config.json"]
    assert model.vocabulary[1] < 128256


def test_a_folder_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model(tmp_path, dummy=False)
