"""What the benchmark asks: requests as data."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from lazyrag.bench.arms import ARMS
from lazyrag.bench.measure import Batch, expects_hits, prompt_of
from lazyrag.bench.metrics import CASES, METRICS, metrics
from lazyrag.bench.workload import Traffic, Workload, sample, zipf
from lazyrag.errors import InputError

WORDS = (1000, 100_000)
LAZY, PERFECT, PREFIX, RECOMPUTE = (ARMS[name] for name in ("lazy", "perfect", "prefix", "recompute"))


def cut(prompt) -> list[tuple[int, ...]]:
    return [tuple(prompt.token_ids[start : start + length]) for start, length in prompt.spans]


def test_a_prompt_has_as_many_tokens_as_its_workload_says() -> None:
    workload = Workload(documents=4, tokens=50, literal=12, question=7)
    traffic = Traffic(workload, WORDS)
    prompt = prompt_of(traffic, traffic.draw(), LAZY)
    assert len(prompt.token_ids) + workload.output == workload.num_tokens == 4 * 50 + 3 * 12 + 7 + 1
    assert prompt.spans == ((0, 50), (62, 50), (124, 50), (186, 50))
    assert set(prompt.token_ids) <= set(range(*WORDS))


def test_every_request_has_its_documents_in_a_fresh_order_and_a_new_question() -> None:
    workload = Workload(documents=6, tokens=5, question=4)
    traffic = Traffic(workload, WORDS)
    prompts = [prompt_of(traffic, traffic.draw(), LAZY) for _ in range(20)]
    assert len({frozenset(cut(prompt)) for prompt in prompts}) == 1
    assert len({tuple(cut(prompt)) for prompt in prompts}) > 10
    assert len({tuple(prompt.token_ids[-4:]) for prompt in prompts}) == 20


def test_a_document_brings_its_own_title_wherever_it_stands() -> None:
    workload = Workload(documents=3, tokens=5, literal=2, question=1)
    traffic = Traffic(workload, WORDS)
    titles = Counter()
    for _ in range(20):
        prompt = prompt_of(traffic, traffic.draw(), LAZY)
        for start, length in prompt.spans[1:]:
            titles[tuple(prompt.token_ids[start - 2 : start + length])] += 1
    assert len(titles) == 3


def test_the_perfect_arm_always_sends_the_same_prefix_and_the_question_last() -> None:
    traffic = Traffic(Workload(documents=5, tokens=9, literal=3, question=4), WORDS)
    prompts = [prompt_of(traffic, traffic.draw(), PERFECT) for _ in range(5)]
    assert len({tuple(p.token_ids[:-4]) for p in prompts}) == 1
    assert all(not p.spans and not p.salt for p in prompts)


def test_arms_of_a_round_are_asked_the_same_up_to_the_order() -> None:
    batch = Batch(Workload(documents=4, tokens=9, batch=3), WORDS)
    batch.draw()
    for lazy, prefix, perfect in zip(*(batch.prompts(arm) for arm in (LAZY, PREFIX, PERFECT)), strict=True):
        assert lazy.token_ids == prefix.token_ids
        assert sorted(lazy.token_ids) == sorted(perfect.token_ids)


def test_first_k_is_asked_the_same_and_computes_the_head_of_each_document() -> None:
    batch = Batch(Workload(documents=4, tokens=9, first_k=4), WORDS)
    batch.draw()
    (ours,), (lazy,) = (batch.prompts(arm) for arm in (ARMS["first-k"], LAZY))
    assert (ours.token_ids, ours.spans, ours.first_k, lazy.first_k) == (lazy.token_ids, lazy.spans, 4, 0)


def test_no_two_recomputed_requests_share_a_salt() -> None:
    traffic = Traffic(Workload(documents=1, tokens=4), WORDS)
    draw = traffic.draw()
    assert len({prompt_of(traffic, draw, RECOMPUTE).salt for _ in range(50)}) == 50


def test_new_documents_are_new_in_every_request() -> None:
    workload = Workload(documents=2, tokens=8, new=True)
    traffic = Traffic(workload, WORDS)
    seen = [d for _ in range(10) for d in cut(prompt_of(traffic, traffic.draw(), LAZY))]
    assert len(set(seen)) == 20


@pytest.mark.parametrize(("shared", "documents"), [(True, 4), (False, 12)])
def test_requests_of_a_batch_share_their_documents_or_do_not(shared: bool, documents: int) -> None:
    workload = Workload(documents=4, tokens=9, batch=3, shared=shared)
    batch = Batch(workload, WORDS)
    batch.draw()
    assert len({d for prompt in batch.prompts(LAZY) for d in cut(prompt)}) == documents


def test_asking_anew_keeps_documents_and_order() -> None:
    batch = Batch(Workload(documents=3, tokens=5, question=4, batch=2), WORDS)
    batch.draw()
    before = batch.prompts(LAZY)
    batch.ask_anew()
    after = batch.prompts(LAZY)
    assert [p.token_ids[:-4] for p in before] == [p.token_ids[:-4] for p in after]
    assert all(a.token_ids[-4:] != b.token_ids[-4:] for a, b in zip(before, after, strict=True))


def test_a_workload_is_the_same_in_every_run() -> None:
    workload = Workload(documents=3, tokens=5, pool=9, skew=1.1)
    first, second = (Traffic(workload, WORDS) for _ in range(2))
    for _ in range(5):
        assert prompt_of(first, first.draw(), LAZY) == prompt_of(second, second.draw(), LAZY)


def test_documents_of_a_request_are_drawn_without_replacement_and_by_popularity() -> None:
    random, weights = Random(0), zipf(10, 1.1)
    draws = [sample(random, weights, 3) for _ in range(3000)]
    assert all(len(set(draw)) == 3 for draw in draws)
    first = Counter(draw[0] for draw in draws)
    for number in range(10):
        assert first[number] / 3000 == pytest.approx(weights[number] / sum(weights), abs=0.03)


def test_arrivals_are_a_stream_of_the_rate_that_was_asked_for() -> None:
    arrivals = Traffic(Workload(documents=1, tokens=1, arrivals=4000), WORDS).arrivals(20.0)
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(200, rel=0.1)


def test_only_arms_that_should_find_everything_are_checked_for_it() -> None:
    hot = Workload(documents=2, tokens=8)
    checked = {name for name, arm in ARMS.items() if expects_hits(arm, hot)}
    reusing = {"lazy", "lazy-in-turn", "first-k", "materialize", "materialize-ordered"}
    assert checked == reusing | {"prefix-reorder", "perfect", "stock", "plugin"}
    assert not expects_hits(LAZY, Workload(documents=2, tokens=8, new=True))
    assert not expects_hits(LAZY, Workload(documents=2, tokens=8, pool=4))


# ---------------------------------------------------------------- metrics


def test_every_metric_has_workloads_for_every_shape_or_is_simulated() -> None:
    for shape, cases in CASES.items():
        assert set(cases) == set(METRICS) - {"hit_ratio", "tier_ttft"}, shape


def test_workloads_of_a_metric_have_names_of_their_own() -> None:
    for cases in CASES.values():
        for metric, found in cases.items():
            names = [f"{kind} {workload.name}" for kind, workload in found]
            assert len(set(names)) == len(names), metric


def test_metrics_compare_arms_that_exist() -> None:
    for metric in METRICS.values():
        assert metric.name in ("hit_ratio", "tier_ttft") or set(metric.arms) <= set(ARMS)
        assert metric.seldom <= set(metric.arms)


def test_an_unknown_metric_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match="ttft_hot_literals"):
        metrics(["ttft_hot", "speed"])


def test_a_name_stands_for_one_document_only() -> None:
    documents: dict[str, tuple[int, ...]] = {}
    hot = Workload(documents=2, tokens=8)
    for workload in (replace(hot, new=True), hot, replace(hot, output=9)):
        for seed in range(2):
            traffic = Traffic(workload, WORDS, seed)
            for _ in range(5):
                prompt = prompt_of(traffic, traffic.draw(), LAZY)
                for name, tokens in zip(prompt.documents, cut(prompt), strict=True):
                    assert documents.setdefault(name, tokens) == tokens
    assert len(documents) == 2 * (5 * 2 + 2 + 2)
