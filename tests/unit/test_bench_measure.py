"""Readings from engines that only say how long they took."""

from __future__ import annotations

from typing import Any

import pytest

from lazyrag.bench.child import Served, Timed
from lazyrag.bench.measure import Bench, NotMeasuredError
from lazyrag.bench.metrics import METRICS
from lazyrag.bench.samples import Deadline
from lazyrag.bench.workload import Workload


class FakeEngine:
    """Takes 10 ms a prompt and 3 ms a step; fast at rates up to `capacity`."""

    def __init__(self, name: str, log: list[tuple[str, str]], found: int = 10**6, capacity: float = 5.0) -> None:
        self.name, self.log, self.found, self.capacity = name, log, found, capacity

    def call(self, method: str, **arguments: Any) -> Any:
        self.log.append((self.name, method))
        if method == "forget":
            return None
        if method == "compute":
            return Timed(5.0 * len(arguments["prompts"]), 0.5, ())
        prompts, arrivals = arguments["prompts"], arguments.get("arrivals")
        if method == "serve":
            late = arguments.get("slo_ms") and len(arrivals) / arrivals[-1] > self.capacity
            return Served((20.0, 40.0), 2.0, 1.0, gave_up=bool(late))
        ms = 10.0 * len(prompts) + 3.0 * (arguments["max_tokens"] - 1)
        return Timed(ms, 0.5, tuple(self.found for _ in prompts))


def bench(log: list[tuple[str, str]], rounds: int = 5, limit_s: float | None = None, **fake: Any) -> Bench:
    engines: dict[str, Any] = {name: FakeEngine(name, log, **fake) for name in ("stock", "lazy")}
    return Bench(engines, (10, 500), rounds, Deadline(limit_s))


def test_arms_are_measured_in_turn() -> None:
    log: list[tuple[str, str]] = []
    found = bench(log, rounds=2).read(METRICS["cold"], ("ttft", Workload(documents=2, tokens=30, new=True)))
    assert [name for name, _ in log] == ["lazy", "stock"] * 3 + ["stock", "lazy"]
    assert [len(readings) for readings in found["cold"].values()] == [2, 2]
    assert {r.value for readings in found["cold"].values() for r in readings} == {10.0}


def test_a_step_is_what_further_tokens_take() -> None:
    workload = Workload(documents=2, tokens=30, batch=4, output=9)
    found = bench([], rounds=6).read(METRICS["decode_step"], ("decode", workload))
    assert {r.value for readings in found["decode_step"].values() for r in readings} == {3.0}
    assert {len(readings) for readings in found["decode_step"].values()} == {3}


def test_throughput_counts_prompts_and_answers() -> None:
    workload = Workload(documents=1, tokens=98, question=1, batch=4, new=True, shared=False)
    found = bench([]).read(METRICS["ordinary"], ("throughput", workload))
    assert found["ordinary"]["plugin"][0].value == pytest.approx(4 * 100 / 0.040)


def test_an_ingest_counts_the_documents_tokens_alone() -> None:
    log: list[tuple[str, str]] = []
    workload = Workload(documents=1, tokens=98, question=0, batch=4, new=True, shared=False)
    found = bench(log).read(METRICS["ingest"], ("ingest", workload))
    assert set(log) == {("lazy", "compute"), ("stock", "compute")}
    assert found["ingest"]["lazy"][0].value == pytest.approx(4 * 98 / 0.020)


def test_what_was_not_cached_is_not_measured_as_hot() -> None:
    with pytest.raises(NotMeasuredError, match="document tokens"):
        bench([], found=100).read(METRICS["ttft_hot"], ("ttft", Workload(documents=4, tokens=300)))


def test_a_batch_begins_with_an_empty_cache_and_serves_two_metrics() -> None:
    log: list[tuple[str, str]] = []
    workload = Workload(documents=2, tokens=30, pool=6, batch=2)
    found = bench(log, rounds=4).read(METRICS["table11_ttft"], ("batch", workload))
    # Three rounds of lazy, each arm once to warm up, and once all that are seldom measured; no engine for materialize.
    assert [method for _, method in log] == ["forget", "serve"] * (4 + 3 + 3)
    assert found["table11_ttft"]["lazy"][0].value == 30.0
    assert found["table11_throughput"]["lazy"][0].value == 1.0


def test_a_rate_is_searched_on_a_cache_that_has_served_before() -> None:
    log: list[tuple[str, str]] = []
    workload = Workload(documents=2, tokens=30, pool=6, arrivals=400)
    found = bench(log).read(METRICS["rate_at_slo"], ("rate", workload))
    assert log[:3] == [("lazy", "forget"), ("lazy", "serve"), ("lazy", "serve")]
    assert found["rate_at_slo"]["lazy"][0].value == pytest.approx(5, rel=0.3)


def test_the_next_search_begins_at_the_rate_of_the_last_one() -> None:
    log: list[tuple[str, str]] = []
    measure = bench(log)
    for skew in (0.0, 1.1):
        workload = Workload(documents=2, tokens=30, pool=6, arrivals=400, skew=skew)
        log.clear()
        measure.read(METRICS["rate_at_slo"], ("rate", workload))
    assert len([name for name, method in log if (name, method) == ("lazy", "serve")]) <= 1 + 4


def test_a_rate_is_not_searched_beyond_the_deadline() -> None:
    workload = Workload(documents=2, tokens=30, pool=6, arrivals=4)
    with pytest.raises(NotMeasuredError, match="Time was up"):
        bench([], limit_s=0).read(METRICS["rate_at_slo"], ("rate", workload))
