"""Repeated measurements and what is said of them. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Reading:
    """One measurement.

    Attributes:
        value: in the metric's unit.
        gauge_ms: how long a fixed piece of work took the CPU right before (`child.gauge`).
    """

    value: float
    gauge_ms: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Several readings of the same: medians, and the range. What is simulated has no gauge."""

    value: float
    min: float
    max: float
    n: int
    gauge_ms: float | None = None

    @classmethod
    def of(cls, readings: Sequence[Reading]) -> Summary:
        """Of at least one reading."""
        values = [reading.value for reading in readings]
        gauge = median(reading.gauge_ms for reading in readings)
        return cls(median(values), min(values), max(values), len(values), gauge)


class Deadline:
    """When to stop.

    Args:
        limit_s: seconds from now; None for never.
        clock: seconds, monotonic.
    """

    def __init__(self, limit_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = math.inf if limit_s is None else clock() + limit_s

    def allows(self, seconds: float = 0.0) -> bool:
        """Whether something that takes so long would be done in time."""
        return self._clock() + seconds < self._end


def take_turns(
    names: Sequence[Key],
    measure: Callable[[Key], Reading],
    *,
    rounds: int,
    seldom: frozenset[Key] = frozenset(),
    every: int = 4,
    deadline: Deadline,
    begin: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[Key, list[Reading]]:
    """Measure each in turn, round by round, so that clocks and moods of the machine are the same for all.

    Who begins changes from round to round. It ends early when another round would not end in time.

    Args:
        names: what is measured.
        measure: takes one reading.
        rounds: at most.
        seldom: these are measured in every `every`-th round only, the first one included.
        every: see `seldom`.
        deadline: see above; the first round is measured in any case.
        begin: called at the start of a round.
        clock: seconds.
    """
    readings: dict[Key, list[Reading]] = {name: [] for name in names}
    longest = 0.0
    for k in range(rounds):
        if k and not deadline.allows(longest):
            break
        start = clock()
        begin()
        first = k % len(names)
        for name in [*names[first:], *names[:first]]:
            if name not in seldom or k % every == 0:
                readings[name].append(measure(name))
        longest = max(longest, clock() - start)
    return readings


def rank(count: int, percent: float) -> int:
    """The place of a percentile among `count` ascending values, the first being 1 (nearest rank)."""
    return max(1, math.ceil(percent / 100 * count))


def highest_rate(
    passes: Callable[[float], bool], *, start: float = 1.0, low: float = 1 / 16, high: float = 256.0, steps: int = 2
) -> float:
    """The highest rate found that passes, on the assumption that those below it pass, too.

    From `start` it doubles or halves until the border is between two rates, and halves that interval (on a logarithmic
    scale) `steps` times. A trial takes its time: with two steps the rate is found to within a fifth, in five trials
    or so from a `start` that is near.

    Returns:
        0 if nothing from `low` on passes; `high` at most.
    """
    good, bad = 0.0, math.inf
    rate = min(max(start, low), high)
    while low <= rate <= high and not (good and bad < math.inf):
        if passes(rate):
            good, rate = rate, rate * 2
        else:
            bad, rate = rate, rate / 2
    if not good or bad == math.inf:
        return good
    for _ in range(steps):
        middle = math.sqrt(good * bad)
        if passes(middle):
            good = middle
        else:
            bad = middle
    return good
