"""Turns, medians, deadlines and the search for a rate."""

from __future__ import annotations

import pytest

from lazyrag.bench.samples import Deadline, Reading, Summary, highest_rate, rank, take_turns


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def turns(rounds: int = 6, limit_s: float | None = None, seldom: frozenset[str] = frozenset(), cost: float = 1.0):
    clock, log = Clock(), []

    def measure(name: str) -> Reading:
        log.append(name)
        clock.now += cost
        return Reading(len(log), 1.0)

    readings = take_turns(
        ["a", "b", "c"], measure, rounds=rounds, seldom=seldom, deadline=Deadline(limit_s, clock), clock=clock
    )
    return log, readings


def test_a_summary_is_the_median_with_its_range() -> None:
    readings = [Reading(value, gauge) for value, gauge in ((5, 2), (1, 1), (30, 9))]
    assert Summary.of(readings) == Summary(5, 1, 30, 3, 2)
    assert Summary.of(readings[:2]).value == 3


def test_everybody_is_measured_once_a_round_and_each_goes_first_in_turn() -> None:
    log, readings = turns(rounds=3)
    assert log == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert [len(r) for r in readings.values()] == [3, 3, 3]


def test_what_takes_long_is_measured_in_every_fourth_round() -> None:
    log, readings = turns(rounds=9, seldom=frozenset({"b"}))
    assert {name: len(r) for name, r in readings.items()} == {"a": 9, "b": 3, "c": 9}
    assert log[:3] == ["a", "b", "c"]


def test_no_round_begins_that_would_not_end_in_time() -> None:
    _, readings = turns(rounds=9, limit_s=10.0)
    assert [len(r) for r in readings.values()] == [3, 3, 3]


def test_the_first_round_is_measured_in_any_case() -> None:
    _, readings = turns(rounds=9, limit_s=0.0)
    assert [len(r) for r in readings.values()] == [1, 1, 1]


def test_without_a_limit_time_never_ends() -> None:
    assert Deadline(None).allows(1e12)


@pytest.mark.parametrize(("count", "percent", "place"), [(100, 99, 99), (101, 99, 100), (20, 99, 20), (1, 50, 1)])
def test_a_percentile_is_a_nearest_rank(count: int, percent: float, place: int) -> None:
    assert rank(count, percent) == place


@pytest.mark.parametrize("limit", [0.3, 1.0, 3.3, 17.0])
def test_the_highest_rate_is_found_within_a_fifth(limit: float) -> None:
    for start in (1.0, limit, limit / 50, limit * 50):
        found = highest_rate(lambda rate: rate <= limit, start=start)
        assert limit / 1.2 <= found <= limit


def test_a_search_from_a_rate_nearby_takes_few_trials() -> None:
    tried: list[float] = []
    highest_rate(lambda rate: bool(tried.append(rate)) or rate <= 3.3, start=3.0)
    assert len(tried) <= 4


def test_a_rate_beyond_the_search_is_its_end() -> None:
    assert highest_rate(lambda rate: True, high=8) == 8
    assert highest_rate(lambda rate: False) == 0
