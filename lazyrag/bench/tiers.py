"""How long the first token takes, by where the documents' KV is: the same request, the KV put there beforehand.

    hot            in the engine's pool
    host           in host memory, the pool has been emptied; loaded if that is measured to be faster than computing
    prefetched     in host memory, and the engine was told of it 200 ms before
    disk           on disk only, the files out of the operating system's cache; loaded in any case
    disk rule      the same, if loading is measured to be faster than computing
    slow disk, slow disk rule   the same with a disk that gives `SLOW` times what break-even would take
    recompute      nowhere (an ordinary request, salted)
    floor          not measured: bytes of the documents' KV / measured bandwidth of pinned copies to the device + hot

Before all figures: the answers from every place are those of the pool, log-probability by log-probability.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from lazyrag.bench import report
from lazyrag.bench.engines import EngineProcess
from lazyrag.bench.gate import Check
from lazyrag.bench.measure import NotMeasuredError
from lazyrag.bench.metrics import METRICS, TIERS
from lazyrag.bench.report import Result
from lazyrag.bench.samples import Deadline, Reading, Summary, take_turns
from lazyrag.bench.workload import Draw, Prompt, Traffic, Workload
from lazyrag.types import COMPUTED, DISK, HBM, HOST

WORKLOADS = {
    "llama-8b": Workload(documents=10, tokens=2048),
    "tiny": Workload(documents=4, tokens=400, question=16),
}
FLOOR = "floor"
AHEAD_S = 0.2
SLOW = 0.25
BOUND = 0.05
"""Of the root mean square of differences of log-probabilities between places: the same bits of KV are read, and only
the order of sums may differ."""
SOURCES = {"hot": {HBM}, "host": {HOST, COMPUTED}, "prefetched": {HBM}, "disk": {DISK}, "slow disk": {DISK}}
"""Where a request may have its documents from, if the arm is what it says; of two the rule has the choice."""


def host_bytes(workload: Workload, kv_bytes_per_token: int) -> int:
    """Host memory that holds the documents, and some."""
    return int(1.5 * workload.documents * workload.tokens * kv_bytes_per_token) + (64 << 20)


class Places:
    """Puts the documents' KV where an arm wants it, and takes the time.

    Args:
        engine: with host memory and a folder.
        workload: a request; all are about the same documents.
        vocabulary: of its tokens.
    """

    def __init__(self, engine: EngineProcess, workload: Workload, vocabulary: tuple[int, int]) -> None:
        self._engine, self._workload = engine, workload
        self._traffic = Traffic(workload, vocabulary)
        self._draw: Draw | None = None
        self.sources: dict[str, Counter[str]] = {}

    def next(self) -> None:
        """The next question, the documents in another order."""
        self._draw = self._traffic.draw()

    def prompt(self, *, spans: bool = True) -> Prompt:
        """The request."""
        assert self._draw is not None
        return self._traffic.prompt(self._draw, order="fresh", spans=spans, salted=not spans)

    def read(self, arm: str) -> Reading:
        """Prepare, and take the time to the first token."""
        if arm == "recompute":
            timed = self._engine.call("generate", prompts=[self.prompt(spans=False)], max_tokens=1)
            return Reading(timed.ms, timed.gauge_ms)
        self.put(arm)
        if arm == "host":
            self._engine.call("set_disk", bytes_per_s=None, always_load=False)
        timed, sources = self._engine.call("generate_from_tiers", prompt=self.prompt())
        self.sources.setdefault(arm, Counter()).update(sources)
        self._engine.call("set_disk", bytes_per_s=None, always_load=False)
        return Reading(timed.ms, timed.gauge_ms)

    def put(self, arm: str) -> None:
        """Bring the documents' KV where the arm wants it."""
        engine, prompt = self._engine, self.prompt()
        if arm == "hot":
            engine.call("generate", prompts=[prompt], max_tokens=1)
            return
        if "disk" in arm:
            slow = self.break_even() * SLOW if arm.startswith("slow") else None
            engine.call("empty_host")
            engine.call("set_disk", bytes_per_s=slow, always_load=True)
            if arm.endswith("rule"):  # it must have met this disk
                engine.call("forget")
                engine.call("generate", prompts=[prompt], max_tokens=1)
                engine.call("empty_host")
                engine.call("set_disk", bytes_per_s=slow, always_load=False)
        else:  # all of it in host memory: what is not comes from disk
            engine.call("set_disk", bytes_per_s=None, always_load=True)
            engine.call("forget")
            engine.call("generate", prompts=[prompt], max_tokens=1)
        engine.call("forget")
        if arm == "prefetched":
            engine.call("prefetch", prompt=prompt, ahead_s=AHEAD_S)

    def break_even(self) -> float:
        """Bytes a second at which loading takes as long as computing."""
        facts: dict[str, float] = self._engine.call("speeds")
        return facts["compute"] * facts["kv_bytes_per_token"]


def measure(
    engine: EngineProcess,
    workload: Workload,
    vocabulary: tuple[int, int],
    result: Result,
    tell: Callable[[str], None],
    *,
    rounds: int,
    deadline: Deadline,
) -> None:
    """Check the answers, measure every arm, and add the figures to a result.

    Raises:
        NotMeasuredError: documents were not where they should have been.
        LazyRAGError: a request failed.
    """
    metric = METRICS[TIERS]
    places = Places(engine, workload, vocabulary)
    places.next()
    engine.call("generate", prompts=[places.prompt()], max_tokens=1)  # computed, kept in host memory and on disk
    result.gate += checks(engine, places)
    if not all(check.passed for check in result.gate):
        return
    for arm in ("recompute", "host", "hot"):
        places.next()
        places.read(arm)
    arms = [arm for arm in metric.arms if arm != FLOOR]
    places.sources.clear()
    readings = take_turns(arms, places.read, rounds=rounds, seldom=metric.seldom, deadline=deadline, begin=places.next)
    for arm, sources in SOURCES.items():
        found = places.sources[arm]
        if not found.keys() <= sources:
            raise NotMeasuredError(
                f"Documents of the arm {arm!r} came from {dict(found)}, not from {' or '.join(sorted(sources))} alone.",
                fix="Give the engine a larger KV pool, and the machine more free memory.",
            )
    summaries = {arm: Summary.of(of_arm) for arm, of_arm in readings.items()}
    facts: dict[str, Any] = engine.call("bandwidth")
    num_bytes = workload.documents * workload.tokens * engine.call("speeds")["kv_bytes_per_token"]
    floor = num_bytes / facts["bytes_per_s"] * 1e3 + summaries["hot"].value
    summaries[FLOOR] = Summary(floor, floor, floor, facts["n"])
    tell(f"{TIERS}: {num_bytes / 1e9:.3f} GB, {facts['bytes_per_s'] / 1e9:.2f} GB/s to the device")
    for arm, found in places.sources.items():
        tell(f"{TIERS}: {arm}: documents from {dict(found)}")
    result.engines["tiers"] = result.engines.get("tiers", {}) | {
        "bandwidth": facts,
        "num_bytes": num_bytes,
        "sources": {arm: dict(sources) for arm, sources in places.sources.items()},
        "speeds": engine.call("speeds"),
        "tiers": engine.call("tiers"),
    }
    rows = report.rows(TIERS, workload.name, metric.unit, metric.compare, summaries)
    result.rows += rows
    for row in rows:
        tell(f"{TIERS}: {row.arm} {row.value:.2f} ms, {row.ratio:.3f} of {row.baseline} (n {row.n})")


def checks(engine: EngineProcess, places: Places) -> list[Check]:
    """The answers from every place, compared with those from the pool."""
    found = []
    (expected,) = _logprobs(engine, places, "hot")
    for arm in ("host", "prefetched", "disk"):
        (logprobs,) = _logprobs(engine, places, arm)
        errors = [expected[token] - logprob for token, logprob in logprobs.items() if token in expected]
        rms = math.sqrt(sum(error**2 for error in errors) / len(errors)) if errors else math.nan
        found.append(Check(f"answers from {arm}", rms, BOUND))
    return found


def _logprobs(engine: EngineProcess, places: Places, arm: str) -> list[dict[int, float]]:
    """Of the first token, the likeliest ones."""
    places.put(arm)
    ((_, logprobs),) = engine.call("answers", prompts=[places.prompt()], max_tokens=1, logprobs=20)
    engine.call("set_disk", bytes_per_s=None, always_load=False)
    return list(logprobs)
