"""The gate: the cheapest mode that is good enough on a model, or none. Nothing passes that was not shown to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, TypeAlias

from lazyrag.calibration import Calibration, behind, deciding
from lazyrag.client import LazyRAG, start_engine
from lazyrag.config import Config
from lazyrag.errors import ConfigError, InputError
from lazyrag.modes import EXACT, ReuseMode
from lazyrag.quality import cloze
from lazyrag.quality.data import DataSet, Passage, Question
from lazyrag.quality.evaluate import FULL, NONE, Result, Score, Start, Tell, evaluate
from lazyrag.quality.scores import CONFIDENCE, Estimate, cautious, needed

Measure: TypeAlias = Literal["likelihood", "f1"]
DEFAULT_BOUND: Mapping[Measure, float] = {"likelihood": 0.02, "f1": 0.01}
CANDIDATES = ("lazy", "sink", "prefix", "lazy+first_k=16", "sink+first_k=16", "sink+first_k=32")
"""From cheap to dear."""

ENOUGH = 30
"""Questions that a finding needs: of fewer, intervals are narrower than they say. Drawn from 100 real questions
(benchmarks/quality/smollm2-135m-nq10-cpu.json), the true loss of mode prefix lay above the interval, 2.5% being
nominal, for 19% of samples of 3 questions, 7% of 10, 5% of 30 and 3% of 100; of F1, where few answers count, 50%, 16%,
6% and 4%."""


MOST_RECOMPUTED = 0.5
"""Of the passages' tokens: a mode that computes more of them anew is hardly cheaper than full attention."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What a mode may lose.

    Losses may sit in few questions, none of which is in the sample, so the interval counts one of them in (`cautious`).
    Of samples of modes that lose just the bound, 4,000 each, so many passed falsely, 2.5% being nominal; a dash: none
    can pass. "all": a question loses all that its passages add (2 to 4 nats, full attention right in 60%)
    or nothing; "skewed": so, and what they add is spread exponentially; "swaps": of F1, 4% of the answers turn right.

        bound                    n = 50   n = 100
        likelihood 5%,  all      -        1.3%
        likelihood 5%,  skewed   -        5.2%
        likelihood 10%, all      1.5%     2.0%
        likelihood 10%, skewed   5.5%     4.5%
        F1 1 point,     swaps    0.5%     0.9%

    Attributes:
        measure: "likelihood": of the right answers; the loss is a share of what the passages add. "f1": of the greedy
            answers; the loss is full attention's F1 less the mode's.
        most: the loss, whose whole interval must lie below it; above 0 and below 1.

    Raises:
        InputError: there can be no such bound.
    """

    measure: Measure = "likelihood"
    most: float = DEFAULT_BOUND["likelihood"]

    def __post_init__(self) -> None:
        if not 0 < self.most < 1:
            raise InputError(
                f"A bound of {self.most:g} judges nothing.", fix="Name one above 0 and below 1: --bound 0.02"
            )

    @property
    def questions(self) -> int:
        """How many a mode must be asked to pass, at least."""
        return max(ENOUGH, needed(self.most))

    def lost(self, result: Result, score: Score) -> Estimate | None:
        """What a mode loses; None if that cannot be told: passages are of no sure use, or few of them are reused."""
        # Passages that are no use show no loss, whatever a mode does to them; nor do such as are computed anyway.
        if score.recomputed > MOST_RECOMPUTED:
            return None
        mine, full, none = (result.arms[name].replies for name in (score.mode, FULL, NONE))
        if self.measure == "likelihood":
            if not result.benefit.low > 0:
                return None
            return cautious(
                [f.logprob - m.logprob for f, m in zip(full, mine, strict=True)],
                [f.logprob - n.logprob for f, n in zip(full, none, strict=True)],
            )
        # Who loses all of a benefit below the bound would pass.
        if not result.f1_benefit.low > self.most:
            return None
        return cautious([f.f1 - m.f1 for f, m in zip(full, mine, strict=True)], [1.0] * len(full))

    def holds(self, result: Result, score: Score) -> bool:
        """Whether a mode is good enough for sure."""
        lost = self.lost(result, score)
        return lost is not None and lost.high <= self.most

    def finding(self, result: Result, score: Score) -> str:
        """What was found for a mode, in words."""
        lost = self.lost(result, score)
        if lost is None:
            return f"{score.mode}: no loss can be measured, for {self._why_not(result, score)}"
        of = "of what the passages add" if self.measure == "likelihood" else "of F1"
        found = f"{score.mode} loses {lost.value:.1%} {of}, surely no more than {lost.high:.1%}"
        if self.holds(result, score):
            return f"{found}; {self.most:.1%} are allowed"
        doubt = "" if lost.low > self.most else "; more questions might show that it is less"
        return f"{found}; only {self.most:.1%} are allowed{doubt}"

    def _why_not(self, result: Result, score: Score) -> str:
        if score.recomputed == 1:
            return "no passage is long enough to be reused"
        if score.recomputed > MOST_RECOMPUTED:
            return f"{score.recomputed:.0%} of the passages are computed anew, more than {MOST_RECOMPUTED:.0%}"
        if self.measure == "likelihood":
            return "the passages make the right answers no likelier for sure"
        gain = result.f1_benefit
        gained = f"{gain.value:.1%} [{gain.low:.1%}, {gain.high:.1%}] of F1"
        return f"the passages add {gained}, not surely more than {self.most:.1%}"


def calibrate(
    config: Config,
    folder: Path,
    questions: Sequence[Question],
    *,
    modes: Sequence[str] = CANDIDATES,
    bound: Bound | None = None,
    chat: bool = True,
    data: Mapping[str, Any] | None = None,
    out: Path | None = None,
    tell: Tell = lambda line: None,
    start: Start = start_engine,
) -> tuple[Calibration, Result]:
    """Measure modes, the cheapest first, until one is good enough.

    Args:
        config: of the engines; see `evaluate`.
        folder: of the model.
        questions: what to ask; equal ones (text and answers) count once.
        modes: from cheap to dear. One that computes chunks behind the preamble is passed over if there is none.
        bound: what may be lost; None: two percent of what the passages add.
        chat: see `evaluate`.
        data: see `evaluate`.
        out: see `evaluate`.
        tell: is given lines about what happens.
        start: makes an engine.

    Returns:
        What is to be used from now on, and all that was measured.

    Raises:
        InputError: there are fewer questions than the bound needs, or as `evaluate`.
        LazyRAGError: as `evaluate`.
    """
    bound = bound or Bound()
    given = len(questions)
    questions = list({(one.question, one.answers): one for one in reversed(questions)}.values())[::-1]
    if len(questions) < given:
        tell(f"{given - len(questions)} questions are left out: they are asked already.")
    if len(questions) < bound.questions:
        raise InputError(
            f"{len(questions)} questions are too few to judge a mode by: --bound {bound.most:g} needs at least "
            f"{bound.questions} different ones.",
            fix="Ask more (--limit, a DATA.jsonl with more questions, a store with more documents), or allow more.",
        )
    parsed = [ReuseMode.parse(mode) for mode in modes]
    wanted = [str(mode) for mode in parsed if config.preamble or mode.kind != "prefix"]
    findings: list[str] = []

    def is_enough(result: Result, score: Score) -> bool:
        findings.append(bound.finding(result, score))
        tell(findings[-1])
        return bound.holds(result, score)

    result = evaluate(
        config, folder, questions, wanted, chat=chat, data=data, out=out, tell=tell, start=start, enough=is_enough
    )
    measured = (result.score(mode) for mode in wanted if mode in result.arms)
    good = next((score for score in measured if bound.holds(result, score)), None)
    on = f"{_measured_on(questions, result)}, {CONFIDENCE:.0%} intervals"
    settings = deciding(config, folder)
    today = datetime.now(timezone.utc).date().isoformat()
    if good is None:
        why = f"no mode is good enough ({on}): {'; '.join(findings)}"
        return Calibration(EXACT, why, measured=today, settings=settings), result
    why = f"{bound.finding(result, good)} ({on})"
    return Calibration(good.mode, why, behind(good.mode, config), today, settings), result


def _measured_on(questions: Sequence[Question], result: Result) -> str:
    """What a finding holds for, in words: more or longer passages may lose more."""
    passages = sum(len(question.passages) for question in questions)
    tokens = sum(reply.passage_tokens for reply in result.arms[FULL].replies)
    each = f"{passages / len(questions):g} passages of {tokens / max(passages, 1):.0f} tokens"
    return f"{len(questions)} questions, each of {each}"


def questions_of_store(rag: LazyRAG, count: int, seed: int = 0) -> DataSet:
    """Questions made from the documents of a client's store, of its namespace: see `cloze`.

    Copying a name is easier than answering a question, so what these questions say of a mode is the least that it
    loses.

    Raises:
        ConfigError: there is no store.
        InputError: its documents give no questions.
    """
    store = rag.store
    if store is None:
        raise ConfigError(
            "There are no documents to make questions from.",
            fix="Name a store (--store DIR), or a DATA.jsonl with questions: README shows a line.",
        )
    texts = sorted(text for _, text in store.texts(rag.config.namespace))
    passages = tuple(Passage("", text) for text in texts)
    made = tuple(cloze.questions(passages, limit=count, seed=seed))
    if not made:
        raise InputError("The documents in the store give no questions.", fix="Name a DATA.jsonl: README shows a line.")
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return DataSet("made from the store's documents", digest, made, passages)
