"""How good an answer is, and how sure one can be of a mean.

Exact match and F1 are those of SQuAD (Rajpurkar et al. 2016, section 6.1): texts are compared in lower case, without
punctuation, articles and superfluous space, with the best of the right answers.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2_000
CAUTIOUS_RESAMPLES = 10_000
CONFIDENCE = 0.95
TAIL = (1 - CONFIDENCE) / 2

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

Floats = NDArray[np.float64]


def normalized(text: str) -> str:
    """A text as SQuAD compares it."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, right: Sequence[str]) -> float:
    """1 if the answer is one of the right ones, else 0."""
    return float(any(normalized(answer) == normalized(one) for one in right))


def f1(answer: str, right: Sequence[str]) -> float:
    """The harmonic mean of precision and recall over words, of the right answer for which it is highest."""
    return max(_f1(normalized(answer).split(), normalized(one).split()) for one in right)


def _f1(answer: list[str], right: list[str]) -> float:
    if not answer or not right:
        return float(answer == right)
    common = sum((Counter(answer) & Counter(right)).values())
    return 2 * common / (len(answer) + len(right))


# ---------------------------------------------------------------- means


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value, and the interval that holds it with probability `CONFIDENCE`."""

    value: float
    low: float
    high: float


def estimate(statistic: Callable[..., Any], *samples: Sequence[float], seed: int = 0) -> Estimate:
    """A statistic with its percentile bootstrap interval (Efron 1979).

    Args:
        statistic: of arrays [..., n] over their last axis, vectorised.
        *samples: [n] each; what has the same index belongs to the same question, and is drawn together.
        seed: of the resampling.
    """
    arrays = [np.asarray(sample, dtype=np.float64) for sample in samples]
    n = len(arrays[0])
    drawn = np.random.default_rng(seed).integers(n, size=(RESAMPLES, n))
    resampled = statistic(*(array[drawn] for array in arrays))
    low, high = np.quantile(resampled, (TAIL, 1 - TAIL))
    return Estimate(float(statistic(*arrays)), float(low), float(high))


def cautious(lost: Sequence[float], at_stake: Sequence[float], seed: int = 0) -> Estimate:
    """The share that is lost of what is at stake, for decisions: losses that no question of the sample shows count too.

    The interval is that of the Bayesian bootstrap (Rubin 1981: weights are exponential) over the sample and one
    question more, which loses all that is at stake on average. Where every question loses all or nothing of the same,
    its upper end is Clopper's and Pearson's (1934), Beta(lost + 1, n - lost). The ordinary bootstrap of a sample
    without a loss has the interval [0, 0].

    Args:
        lost: [n], by question.
        at_stake: [n], of the same questions.
        seed: of the weights.
    """
    sample = np.array([lost, at_stake], dtype=np.float64)
    mean_stake = sample[1].mean()
    with_worst = np.append(sample, [[mean_stake], [mean_stake]], axis=1)
    weights = np.random.default_rng(seed).exponential(size=(CAUTIOUS_RESAMPLES, with_worst.shape[1]))
    shares = np.divide(*(with_worst @ weights.T))
    low, high = np.quantile(shares, (TAIL, 1 - TAIL))
    return Estimate(float(sample[0].mean() / mean_stake), float(low), float(high))


def needed(most: float) -> int:
    """Of how many questions, none of which loses anything, the interval of `cautious` ends below `most`, 0 to 1."""
    return math.ceil(math.log(TAIL) / math.log1p(-most))


def mean(values: Floats) -> Any:
    """The mean over the last axis."""
    return values.mean(-1)


def lost_share(mode: Floats, full: Floats, none: Floats) -> Any:
    """What of the passages' benefit, which is the gain of `full` over `none`, a mode loses."""
    return (full - mode).mean(-1) / (full - none).mean(-1)
