"""What is kept, and whether to load or to compute: decided as promised, on traces and on injected figures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lazyrag.backend.tiers.host import Shelf
from lazyrag.backend.tiers.policy import COMPUTE, Cost, Lru, Policy, Speeds
from lazyrag.bench.hits import Trace
from lazyrag.types import DISK, HOST

SIZE = 512


def key(number: object) -> tuple[str, str]:
    return "", f"{number:0>64}"


def hit_ratio(policy: Policy, asked: list[tuple[object, int]], num_bytes: int) -> float:
    """Of chunks asked for one after the other, the part that a shelf of this size holds; misses are put into it.

    A chunk saves as many seconds as it has bytes: what tells them apart is how often they are asked for.
    """
    shelf = Shelf(num_bytes, policy)
    hits = 0
    for name, size in asked:
        policy.asked(key(name))
        place = shelf.find(key(name))
        hits += place is not None
        if place is None and (place := shelf.take(key(name), size, float(size))) is not None:
            place.is_ready = True
            shelf.done(place)
    shelf.check()
    return hits / len(asked)


def documents(skew: float, pool: int = 200) -> list[tuple[object, int]]:
    trace = Trace(pool=pool, skew=skew, warm_up=0, requests=600)
    return [(number, SIZE) for draw in trace.draws() for number in draw]


# ---------------------------------------------------------------- what is kept


@pytest.mark.parametrize("skew", [0.0, 0.6, 1.1, 2.1])
@pytest.mark.parametrize("share", [0.05, 0.25])
def test_cost_finds_at_least_what_lru_finds(skew: float, share: float) -> None:
    asked, room = documents(skew), int(200 * share) * SIZE
    cost, lru = hit_ratio(Cost(), asked, room), hit_ratio(Lru(), asked, room)
    assert cost >= lru - 0.005, (cost, lru)
    if 0.6 <= skew <= 1.1:
        assert cost > lru + 0.03, (cost, lru)


def test_a_scan_of_chunks_that_are_asked_for_once_does_not_flush_what_is_hot() -> None:
    hot = [(f"hot{i}", SIZE) for i in range(8)] * 5
    scan = [(f"once{i}", SIZE) for i in range(100)]
    asked = hot + [item for i, item in enumerate(scan) for item in (item, hot[i % 8])]
    assert hit_ratio(Cost(), asked, 10 * SIZE) > 0.9 * (len(asked) - 108) / len(asked)
    flushed = hot + scan + hot
    kept = [hit_ratio(policy, flushed, 10 * SIZE) * len(flushed) for policy in (Cost(), Lru())]
    assert kept == [32 + 40, 32 + 32]


def test_what_was_popular_once_goes_in_the_end() -> None:
    policy = Cost(half_life=50)
    old, new = [("old", SIZE)] * 100, [(f"new{i % 3}", SIZE) for i in range(600)]
    shelf_of_two = hit_ratio(policy, old + new, 3 * SIZE)
    assert shelf_of_two > 0.9 * (len(old) + len(new)) / (len(old) + len(new)) - 0.2
    assert key("old") not in list(policy.order())


def test_what_saves_more_for_its_bytes_stays() -> None:
    policy = Cost()
    shelf = Shelf(4 * SIZE, policy)
    for name, size, seconds in (("slow to compute", 2 * SIZE, 9.0), ("quick to compute", 2 * SIZE, 1.0)):
        policy.asked(key(name))
        place = shelf.take(key(name), size, seconds)
        place.is_ready = True
        shelf.done(place)
    policy.asked(key("another"))
    assert shelf.take(key("another"), SIZE, 2.0) is not None
    assert shelf.find(key("slow to compute")) is not None
    assert shelf.find(key("quick to compute")) is None


@pytest.mark.parametrize("make", [Cost, Lru])
def test_a_policy_offers_all_that_is_held_and_nothing_else(make: Callable[[], Policy]) -> None:
    policy = make()
    for number in range(5):
        policy.asked(key(number))
        policy.added(key(number), SIZE, 1.0)
    policy.removed(key(3), evicted=True)
    policy.removed(key(1), evicted=False)
    policy.asked(key(0))
    order = list(policy.order())
    assert set(order) == {key(0), key(2), key(4)}
    assert order[-1] == key(0), "what was asked for last goes last"


# ---------------------------------------------------------------- load or compute


@pytest.mark.parametrize(
    ("tier", "rate", "faster"),
    [(HOST, 50e9, True), (HOST, 0.05e9, False), (DISK, 6e9, True), (DISK, 1e9, False)],
)
def test_the_faster_way_is_taken_on_both_sides_of_break_even(tier: str, rate: float, faster: bool) -> None:
    """An 8B model: 128 KiB a token, 33,000 tokens a second: break-even is at 4.3 GB/s."""
    tokens, num_bytes = 2048, 2048 << 17
    speeds = Speeds()
    assert speeds.is_loading_faster(tier, num_bytes, tokens), "nobody knows how long computing takes"
    speeds.computed(33_000, 1.0)
    speeds.loaded(tier, int(rate), 1.0)
    assert speeds.is_loading_faster(tier, num_bytes, tokens) == faster


def test_figures_move_with_what_is_measured_and_small_samples_say_nothing() -> None:
    speeds = Speeds()
    speeds.computed(10, 1e-9)
    assert speeds.rate(COMPUTE) is None
    speeds.computed(1000, 1.0)
    assert speeds.rate(COMPUTE) == pytest.approx(1000)
    for _ in range(40):
        speeds.computed(2000, 1.0)
    assert speeds.rate(COMPUTE) == pytest.approx(2000, rel=1e-3)
    before = speeds.rate(DISK)
    speeds.loaded(DISK, 1000, 10.0)
    assert speeds.rate(DISK) == before
    speeds.loaded(DISK, 10**9, 1.0)
    assert speeds.rate(DISK) == pytest.approx(1e9), "a start value is a guess"


def test_a_tier_that_was_slow_is_tried_again_some_day() -> None:
    speeds = Speeds({COMPUTE: 10_000})
    for rate in (2e9, 2e9, 1e6):  # two good loads do not hide a bad one
        speeds.loaded(DISK, 10**8, 10**8 / rate)
    skipped = 0
    while not speeds.is_loading_faster(DISK, 10_000_000, 100):
        speeds.skipped(DISK)
        skipped += 1
    assert 10 < skipped < 500


def test_a_chunk_is_never_worth_nothing() -> None:
    assert Speeds({COMPUTE: 1e12}).saved_s(10**9, 1) > 0
