"""Scores of answers and intervals of means, compared with implementations that nobody here wrote."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyrag.quality.scores import cautious, estimate, exact_match, f1, lost_share, mean, needed

squad = pytest.importorskip("transformers.data.metrics.squad_metrics")
scipy_stats = pytest.importorskip("scipy.stats")

WORDS = st.sampled_from(["the", "a", "An", "Paris", "paris,", "in", "1901", "(the", "Wilhelm", "the-end", "", "é"])
TEXTS = st.lists(WORDS, max_size=6).map(" ".join)


@given(answer=TEXTS, right=TEXTS)
def test_exact_match_and_f1_are_those_of_squad(answer: str, right: str) -> None:
    assert exact_match(answer, [right]) == squad.compute_exact(right, answer)
    assert f1(answer, [right]) == pytest.approx(squad.compute_f1(right, answer))


def test_the_best_of_the_right_answers_counts() -> None:
    right = ["Wilhelm Conrad Röntgen", "Röntgen"]
    assert exact_match("The Röntgen.", right) == 1
    assert f1("Conrad Röntgen", right) == pytest.approx(0.8)
    assert f1("nobody", right) == 0


def test_an_interval_is_that_of_the_percentile_bootstrap() -> None:
    sample = np.random.default_rng(0).gamma(2.0, size=80)
    found = estimate(mean, sample)
    theirs = scipy_stats.bootstrap((sample,), np.mean, method="percentile", rng=1).confidence_interval
    assert found.value == pytest.approx(sample.mean())
    assert (found.low, found.high) == (pytest.approx(theirs.low, abs=0.03), pytest.approx(theirs.high, abs=0.03))


def test_what_belongs_together_is_drawn_together() -> None:
    """Questions differ far more than modes do; paired, what they have in common says nothing."""
    random = np.random.default_rng(0)
    none = random.normal(-5, 3, size=50)
    full = none + 2
    mode = none + 2 - 0.4 + random.normal(0, 0.01, size=50)
    found = estimate(lost_share, mode, full, none)
    assert found.value == pytest.approx(0.2, abs=0.01)
    assert found.high - found.low < 0.01


@pytest.mark.parametrize(("n", "bad"), [(50, 0), (50, 3), (200, 0), (200, 20)])
def test_a_cautious_interval_of_questions_lost_whole_ends_where_clopper_and_pearson_say(n: int, bad: int) -> None:
    found = cautious([1.0] * bad + [0.0] * (n - bad), [1.0] * n)
    assert found.value == pytest.approx(bad / n)
    exact = scipy_stats.binomtest(bad, n).proportion_ci(0.95, method="exact")
    assert found.high == pytest.approx(exact.high, rel=0.03)


def test_as_many_questions_are_needed_as_make_the_interval_of_no_loss_end_at_the_bound() -> None:
    for most in (0.01, 0.02, 0.3):
        n = needed(most)
        assert scipy_stats.binomtest(0, n).proportion_ci(0.95, method="exact").high <= most
        assert scipy_stats.binomtest(0, n - 1).proportion_ci(0.95, method="exact").high > most


def test_the_same_samples_have_the_same_interval() -> None:
    assert estimate(mean, [1.0, 2.0, 5.0]) == estimate(mean, [1.0, 2.0, 5.0])
