"""Places in host memory: never two for a byte, never one lost, never one taken from under a copy."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyrag.backend.tiers.host import ALIGNMENT, HostMemory, Place, Shelf
from lazyrag.backend.tiers.policy import Cost, Lru
from lazyrag.errors import ConfigError


def key(number: int, namespace: str = "") -> tuple[str, str]:
    return namespace, f"{number:064x}" + "0" * 32


def put(shelf: Shelf, number: int, num_bytes: int = ALIGNMENT, namespace: str = "") -> Place | None:
    """A chunk that is there, and asked for as often as all others."""
    shelf.policy.asked(key(number, namespace))
    place = shelf.take(key(number, namespace), num_bytes, num_bytes / ALIGNMENT)
    if place is not None:
        place.is_ready = True
        shelf.done(place)
    return place


def test_places_are_given_until_the_memory_is_full_and_then_by_eviction() -> None:
    shelf = Shelf(4 * ALIGNMENT + 100, Lru())
    assert all(put(shelf, n, 2 * ALIGNMENT - 5) is not None for n in range(2))
    assert shelf.num_used_bytes == shelf.num_bytes == 4 * ALIGNMENT
    assert put(shelf, 2) is not None
    assert shelf.find(key(0)) is None
    assert shelf.find(key(1)) is not None
    assert shelf.counters["evictions"] == 1
    shelf.check()


def test_a_chunk_that_is_larger_than_all_memory_evicts_nobody() -> None:
    shelf = Shelf(4 * ALIGNMENT, Lru())
    put(shelf, 0)
    assert put(shelf, 1, 5 * ALIGNMENT) is None
    assert shelf.find(key(0)) is not None


def test_a_hole_is_made_of_neighbours() -> None:
    shelf = Shelf(4 * ALIGNMENT, Lru())
    for number in range(4):
        put(shelf, number)
    assert put(shelf, 4, 2 * ALIGNMENT).offset == 0
    assert [shelf.find(key(n)) is not None for n in range(5)] == [False, False, True, True, True]


def test_what_is_being_copied_stays() -> None:
    shelf = Shelf(2 * ALIGNMENT, Lru())
    coming = shelf.take(key(0), ALIGNMENT, 1.0)
    used = put(shelf, 1)
    shelf.use(used)
    assert put(shelf, 2) is None
    shelf.done(used)
    assert put(shelf, 2) is not None
    assert shelf.find(key(0)) is coming


def test_a_dropped_place_is_free_when_its_last_copy_has_ended() -> None:
    shelf = Shelf(ALIGNMENT, Lru())
    place = put(shelf, 0)
    shelf.use(place)
    shelf.drop(place)
    shelf.drop(place)
    assert shelf.find(key(0)) is None
    assert put(shelf, 1) is None
    shelf.done(place)
    assert put(shelf, 1) is not None


def test_pinned_chunks_are_not_evicted_and_find_room() -> None:
    shelf = Shelf(2 * ALIGNMENT, Cost())
    put(shelf, 0)
    put(shelf, 1)
    shelf.pin({key(0)[1][:64]})
    for number in range(2, 9):
        put(shelf, number)
    assert shelf.find(key(0)) is not None
    shelf.unpin({key(0)[1][:64]})
    shelf.policy.asked(key(9))
    shelf.pin({key(9)[1][:64]})
    for _ in range(5):
        shelf.policy.asked(key(8))
        shelf.policy.asked(key(0))
    assert shelf.take(key(9), ALIGNMENT, 1.0) is not None, "a pinned chunk is worth any other"


def test_chunks_are_named_within_their_namespace() -> None:
    shelf = Shelf(9 * ALIGNMENT, Lru())
    mine, other = put(shelf, 1, namespace="mine"), put(shelf, 1, namespace="other")
    assert shelf.named({key(1)[1][:64]}, "mine") == [mine]
    assert shelf.named({key(1)[1][:64]}, "other") == [other]
    assert shelf.named({key(2)[1][:64]}, "mine") == []


steps = st.lists(st.tuples(st.sampled_from(["put", "use", "done", "drop"]), st.integers(0, 9), st.integers(1, 2000)))


@settings(max_examples=150, deadline=None)
@given(steps, st.sampled_from([Lru, Cost]))
def test_places_and_holes_are_all_of_the_memory_whatever_happens(steps: list, make: type) -> None:
    shelf = Shelf(10 * ALIGNMENT, make())
    users: list[Place] = []
    for what, number, num_bytes in steps:
        place = shelf.find(key(number))
        if what == "put" and place is None:
            put(shelf, number, num_bytes)
        elif what == "use" and place is not None:
            shelf.use(place)
            users.append(place)
        elif what == "done" and users:
            shelf.done(users.pop(number % len(users)))
        elif what == "drop" and place is not None:
            shelf.drop(place)
        shelf.check()
        ranges = sorted((p.offset, p.offset + p.num_bytes) for p in {id(p): p for p in users}.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges)), "a copy's place"
    for place in users:
        shelf.done(place)
    for number in range(10):
        if (place := shelf.find(key(number))) is not None:
            shelf.drop(place)
    assert shelf.num_used_bytes == 0, "bytes leaked"


def test_memory_is_bytes_that_are_there_once() -> None:
    memory = HostMemory(4 * ALIGNMENT, torch.device("cpu"))
    memory.at(ALIGNMENT, 10).fill_(7)
    assert memory.at(0, 4 * ALIGNMENT).sum() == 70
    assert memory.temporary(8).numel() == 8
    memory.close()
    assert memory.at(0, 1).numel() == 0


def test_memory_that_is_not_there_is_an_error_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match="kv_host_bytes"):
        HostMemory(1 << 62, torch.device("cpu"))
