"""The simulated KV pool, against cases that can be done by hand."""

from __future__ import annotations

import pytest

from lazyrag.bench import hits
from lazyrag.bench.hits import Pool, Trace, hit_ratios, lazy, materialize, prefix, prefix_reorder


def found(rule, num_blocks: int, *requests: tuple[int, ...], blocks: int = 4, rest: int = 1) -> list[int]:
    pool = Pool(num_blocks)
    return [rule(pool, request, blocks, f"question {n}", rest) for n, request in enumerate(requests)]


def test_a_pool_evicts_the_ends_of_runs_first_the_least_recently_used_run_first() -> None:
    pool = Pool(10)
    pool.use([("a", 4), ("b", 4)])
    assert (pool.resident("a"), pool.resident("b")) == (4, 4)
    pool.use([("c", 4)])
    assert (pool.resident("a"), pool.resident("b"), pool.resident("c")) == (4, 2, 4)
    pool.use([("b", 4)])
    assert (pool.resident("a"), pool.resident("b"), pool.resident("c")) == (2, 4, 4)


def test_of_a_request_larger_than_the_pool_the_beginning_stays() -> None:
    pool = Pool(5)
    pool.use([("a", 4), ("b", 4)])
    assert (pool.resident("a"), pool.resident("b")) == (4, 1)


def test_a_prefix_is_found_up_to_the_first_document_that_differs() -> None:
    assert found(prefix, 100, (1, 2, 3), (1, 2, 4), (2, 1, 3), (1, 2, 3)) == [0, 8, 0, 12]


def test_sorted_documents_are_found_in_any_order() -> None:
    assert found(prefix_reorder, 100, (1, 2, 3), (3, 1, 2), (3, 2, 0)) == [0, 12, 0]


def test_one_copy_serves_every_place() -> None:
    assert found(lazy, 100, (1, 2, 3), (3, 1, 2), (9, 3)) == [0, 12, 4]


def test_a_chunk_that_lost_its_end_is_found_in_part() -> None:
    # Two requests of 9 blocks in a pool of 15: document 2, freed before document 1, has lost 2 of its 4 blocks.
    # The question of the first request (1 block, freed first) has gone, too.
    assert found(lazy, 15, (1, 2), (3, 4), (2,)) == [0, 0, 2]


def test_copies_take_room_and_are_found_at_their_place_only() -> None:
    # Room for two originals and their copies; then only the second document's copy at the first place is new.
    assert found(materialize, 100, (1, 2), (1, 2), (2, 1)) == [0, 8, 8]
    # 13 blocks: after the first request originals 1 and 2 (8), copies (8) and the question (1) were used; originals,
    # used first, have 4 left between them. At their places copies are whole.
    assert found(materialize, 13, (1, 2), (1, 2)) == [0, 8]
    assert found(materialize, 9, (1, 2), (2, 1)) == [0, 0]
    assert found(lazy, 9, (1, 2), (2, 1)) == [0, 8]


def test_every_rule_finds_everything_again_in_a_pool_that_holds_all() -> None:
    ratios = hit_ratios(Trace(pool=3, tokens=64, documents=1, warm_up=50, requests=50), 10**9, 1024)
    assert set(ratios.values()) == {1.0}


def test_an_empty_pool_finds_nothing() -> None:
    ratios = hit_ratios(Trace(pool=6, tokens=64, documents=2, warm_up=5, requests=50), 0, 1024)
    assert set(ratios) == {*hits.RULES, "documents"}
    assert set(ratios.values()) == {0.0}


def test_an_lru_of_uniform_documents_finds_what_fits() -> None:
    trace = Trace(pool=20, tokens=64, documents=1, warm_up=200, requests=4000)
    ratio = hit_ratios(trace, 10 * 64 * 1024, 1024)["documents"]
    assert ratio == pytest.approx(10 / 20, abs=0.03)


@pytest.mark.parametrize("skew", hits.SKEWS)
@pytest.mark.parametrize("gigabytes", [1, 5, 10, 50])
def test_lazy_has_the_highest_ratio_and_is_close_to_an_lru_of_documents(skew: float, gigabytes: int) -> None:
    ratios = hit_ratios(Trace(skew=skew, warm_up=200, requests=400), gigabytes * hits.GB, 131072)
    others = {name: ratio for name, ratio in ratios.items() if name not in ("lazy", "documents")}
    # With less room than a request needs, documents sorted by popularity can do as well: within the trace's noise.
    assert ratios["lazy"] >= (0.98 if gigabytes == 1 else 1) * max(others.values())
    assert ratios["lazy"] >= 0.98 * ratios["documents"]
