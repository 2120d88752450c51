"""Readings of one workload from running engines, arms in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lazyrag.bench.arms import ARMS, Arm
from lazyrag.bench.child import Served, Timed
from lazyrag.bench.engines import EngineProcess
from lazyrag.bench.metrics import Case, Kind, Metric
from lazyrag.bench.samples import Deadline, Reading, highest_rate, rank, take_turns
from lazyrag.bench.workload import Draw, Prompt, Traffic, Workload
from lazyrag.errors import LazyRAGError

SLO_MS, PERCENT = 500.0, 99
WARM_UP = 2


class NotMeasuredError(LazyRAGError):
    """A workload cannot be measured here and now; the others can."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What readings are taken with.

    Attributes:
        engines: by the names that arms give.
        vocabulary: [low, high) of token ids.
        rounds: of an interleaved measurement, at most.
        deadline: after which no round begins.
        rates: of each arm, the last one found: where the next search begins.
    """

    engines: Mapping[str, EngineProcess]
    vocabulary: tuple[int, int]
    rounds: int
    deadline: Deadline
    rates: dict[str, float] = field(default_factory=dict)

    def read(self, metric: Metric, case: Case) -> dict[str, dict[str, list[Reading]]]:
        """Measure a workload.

        Returns:
            by metric (a batch serves two) and arm, the readings.

        Raises:
            NotMeasuredError: documents that should have been in the cache were not, or time is up.
            LazyRAGError: a request failed.
        """
        kind, workload = case
        arms = [arm for name in metric.arms if (arm := ARMS[name]).engine in self.engines]
        if kind == "batch":
            return self._batches(arms, workload, metric.seldom)
        if kind == "rate":
            return {metric.name: {arm.name: [self._rate(arm, workload)] for arm in arms}}
        return {metric.name: self._interleaved(kind, arms, workload, metric.seldom)}

    # ------------------------------------------------------------ requests that are sent when the last is answered

    def _interleaved(
        self, kind: Kind, arms: Sequence[Arm], workload: Workload, seldom: frozenset[str]
    ) -> dict[str, list[Reading]]:
        batch = Batch(workload, self.vocabulary)
        measure = {"ttft": self._ttft, "decode": self._step, "throughput": self._throughput, "ingest": self._ingest}[
            kind
        ]
        by_name = {arm.name: arm for arm in arms}
        for k in range(WARM_UP):
            batch.draw()
            for arm in arms:
                if k == 0 or arm.name not in seldom:
                    measure(arm, batch)
        return take_turns(
            list(by_name),
            lambda name: measure(by_name[name], batch, check=True),
            rounds=self.rounds if kind == "ttft" else max(3, self.rounds // 2),
            seldom=seldom if len(by_name) > len(seldom & set(by_name)) else frozenset(),
            deadline=self.deadline,
            begin=batch.draw,
        )

    def _ttft(self, arm: Arm, batch: Batch, check: bool = False) -> Reading:
        timed = self._generate(arm, batch, 1, check)
        return Reading(timed.ms, timed.gauge_ms)

    def _step(self, arm: Arm, batch: Batch, check: bool = False) -> Reading:
        steps = batch.workload.output - 1
        one = self._generate(arm, batch, 1, check)
        batch.ask_anew()
        all_ = self._generate(arm, batch, 1 + steps, check)
        return Reading((all_.ms - one.ms) / steps, one.gauge_ms)

    def _throughput(self, arm: Arm, batch: Batch, check: bool = False) -> Reading:
        workload = batch.workload
        timed = self._generate(arm, batch, workload.output, check)
        return Reading(workload.batch * workload.num_tokens / timed.ms * 1e3, timed.gauge_ms)

    def _ingest(self, arm: Arm, batch: Batch, check: bool = False) -> Reading:
        workload = batch.workload
        timed: Timed = self.engines[arm.engine].call("compute", prompts=batch.prompts(arm))
        return Reading(workload.batch * workload.documents * workload.tokens / timed.ms * 1e3, timed.gauge_ms)

    def _generate(self, arm: Arm, batch: Batch, max_tokens: int, check: bool) -> Timed:
        prompts = batch.prompts(arm)
        timed: Timed = self.engines[arm.engine].call("generate", prompts=prompts, max_tokens=max_tokens)
        if check and expects_hits(arm, batch.workload):
            computed = batch.workload.first_k if arm.in_part else 0
            reused = batch.workload.documents * (batch.workload.tokens - computed)
            if min(timed.found) < reused - BLOCK:
                raise NotMeasuredError(
                    f"Only {min(timed.found)} of {reused} document tokens were still cached for the arm {arm.name!r}.",
                    fix="Give the engines a larger KV pool.",
                )
        return timed

    # ------------------------------------------------------------ requests that are sent together, or as they come

    def _batches(
        self, arms: Sequence[Arm], workload: Workload, seldom: frozenset[str]
    ) -> dict[str, dict[str, list[Reading]]]:
        """Each from an empty cache, for arms that share an engine must not find what another left."""
        traffic = Traffic(workload, self.vocabulary)
        draws: list[Draw] = []
        served: dict[str, list[Served]] = {arm.name: [] for arm in arms}

        def begin() -> None:
            draws[:] = [traffic.draw() for _ in range(workload.batch)]

        def serve(arm: Arm, drawn: Sequence[Draw]) -> Served:
            engine = self.engines[arm.engine]
            engine.call("forget")
            prompts = [prompt_of(traffic, draw, arm) for draw in drawn]
            result: Served = engine.call(
                "serve",
                prompts=prompts,
                arrivals=[0.0] * len(prompts),
                max_tokens=workload.output,
                in_turn=arm.in_turn,
            )
            return result

        def measure(name: str) -> Reading:
            result = serve(ARMS[name], draws)
            served[name].append(result)
            return Reading(result.total_s, result.gauge_ms)

        for arm in arms:  # what is compiled when it is first used
            serve(arm, [traffic.draw()])
        names = list(served)
        rounds = max(3, self.rounds // 4)
        take_turns(names, measure, rounds=rounds, seldom=seldom, deadline=self.deadline, begin=begin)

        def readings(value: Callable[[Served], float]) -> dict[str, list[Reading]]:
            return {name: [Reading(value(s), s.gauge_ms) for s in results] for name, results in served.items()}

        return {
            "table11_ttft": readings(lambda s: sum(s.ttft_ms) / len(s.ttft_ms)),
            "table11_throughput": readings(lambda s: len(s.ttft_ms) / s.total_s),
        }

    def _rate(self, arm: Arm, workload: Workload) -> Reading:
        """Of one arm, on a cache that has served as many requests before."""
        engine, traffic = self.engines[arm.engine], Traffic(workload, self.vocabulary)
        max_late = workload.arrivals - rank(workload.arrivals, PERCENT)
        gauges = []

        def serve(arrivals: Sequence[float], slo_ms: float | None = None) -> Served:
            if not self.deadline.allows():
                raise NotMeasuredError("Time was up before the rate was found.")
            prompts = [prompt_of(traffic, traffic.draw(), arm) for _ in arrivals]
            result: Served = engine.call(
                "serve",
                prompts=prompts,
                arrivals=arrivals,
                max_tokens=workload.output,
                in_turn=arm.in_turn,
                slo_ms=slo_ms,
                max_late=max_late,
            )
            gauges.append(result.gauge_ms)
            return result

        def passes(rate: float) -> bool:
            return not serve(traffic.arrivals(rate), SLO_MS).gave_up

        engine.call("forget")
        warm_up = serve([0.0] * workload.arrivals)
        # Of what it can serve at all, a quarter in time: near enough to begin with.
        rate = highest_rate(passes, start=self.rates.get(arm.name) or workload.arrivals / warm_up.total_s / 4)
        self.rates[arm.name] = rate
        return Reading(rate, sum(gauges) / len(gauges))


BLOCK = 64
"""A prefix is cached in whole blocks: up to so many tokens of it may lack, on any engine."""


class Batch:
    """The requests of a workload that are sent together, drawn anew for each round."""

    def __init__(self, workload: Workload, vocabulary: tuple[int, int]) -> None:
        self.workload = workload
        own = 1 if workload.shared else workload.batch
        self._traffic = [Traffic(workload, vocabulary, seed) for seed in range(own)] * (workload.batch // own)
        self._draws: list[Draw] = []

    def draw(self) -> None:
        """The next round's."""
        self._draws = [traffic.draw() for traffic in self._traffic]

    def ask_anew(self) -> None:
        """The same documents in the same order, with other questions."""
        pairs = zip(self._traffic, self._draws, strict=True)
        self._draws = [Draw(draw.documents, t.random_tokens(self.workload.question)) for t, draw in pairs]

    def prompts(self, arm: Arm) -> list[Prompt]:
        """As an arm sends them."""
        return [prompt_of(t, draw, arm) for t, draw in zip(self._traffic, self._draws, strict=True)]


def prompt_of(traffic: Traffic, draw: Draw, arm: Arm) -> Prompt:
    """A drawn request as an arm sends it."""
    return traffic.prompt(draw, order=arm.order, spans=arm.spans, salted=arm.salted, in_part=arm.in_part)


def expects_hits(arm: Arm, workload: Workload) -> bool:
    """Whether the arm's figure means that all documents were cached."""
    cached = arm.spans or (arm.order == "sorted" and not arm.salted)
    return cached and not workload.new and not workload.pool
