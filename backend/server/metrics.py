"""Counters of the server for Prometheus. Numbers only: no text, no names of tenants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lazyrag.types import COMPUTED, DISK, HBM, HOST, PromptPlan, Reuse

BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Gauges: TypeAlias = Mapping[str, tuple[str, float]]
"""Name -> (meaning, value) of what others know."""

TIER_GAUGES = {
    "chunks": "Chunks in a tier.",
    "bytes": "Bytes of KV in a tier.",
    "budget": "Bytes that it may hold; 0: no limit.",
}
"""What `Engine.stats()["tiers"]` says of a tier now. Whatever else it says is counted since the engine's start."""


class Metrics:
    """What one server counts.

    Args:
        gauges: asked at each scrape.
        engine: the engine's `stats`, asked at each scrape.
    """

    def __init__(self, gauges: Callable[[], Gauges], engine: Callable[[], Mapping[str, Any]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Now(gauges, engine))
        self._responses = Counter(
            "lazyrag_responses", "Answers by route and status.", ("route", "status"), registry=self._registry
        )
        self._generations, self._prompt, self._reused, self._generated = (
            Counter(f"lazyrag_{name}", help, registry=self._registry)
            for name, help in (
                ("generations", "Finished generations."),
                ("prompt_tokens", "Tokens of their prompts."),
                ("reused_tokens", "Of these, tokens that were not computed."),
                ("generated_tokens", "Tokens that were generated."),
            )
        )
        self._segments, self._segment_tokens = (
            Counter(f"lazyrag_{name}", help, ("source",), registry=self._registry)
            for name, help in (
                ("segments", "Chunks in prompts, by source of the KV."),
                ("segment_tokens", "Tokens of chunks in prompts, by source of the KV."),
            )
        )
        for source in (HBM, HOST, DISK, COMPUTED):
            self._segments.labels(source)
            self._segment_tokens.labels(source)
        self._ttft = Histogram(
            "lazyrag_ttft_seconds", "Time to the first token.", buckets=BUCKETS_S, registry=self._registry
        )
        self._share = Histogram(
            "lazyrag_reused_share",
            "Share of a prompt's tokens that were not computed.",
            buckets=SHARES,
            registry=self._registry,
        )

    def answered(self, route: str, status: int) -> None:
        """Count an answer."""
        self._responses.labels(route, str(status)).inc()

    def add(self, plan: PromptPlan, reuse: Reuse | None, num_generated: int, ttft_s: float | None) -> None:
        """Count a finished generation."""
        self._generations.inc()
        self._generated.inc(num_generated)
        if reuse is not None:
            self._prompt.inc(reuse.prompt_tokens)
            self._reused.inc(reuse.reused_tokens)
            self._share.observe(reuse.reused_tokens / max(reuse.prompt_tokens, 1))
            for segment, source in zip(plan.segments, reuse.sources, strict=False):
                self._segments.labels(source).inc()
                self._segment_tokens.labels(source).inc(segment.num_tokens)
        if ttft_s is not None:
            self._ttft.observe(ttft_s)

    def exposition(self) -> bytes:
        """All of it as text."""
        return generate_latest(self._registry)


class _Now(Collector):
    """What is asked for at each scrape."""

    def __init__(self, gauges: Callable[[], Gauges], engine: Callable[[], Mapping[str, Any]]) -> None:
        self._gauges, self._engine = gauges, engine

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering asks nobody."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        for name, (help, value) in self._gauges().items():
            yield GaugeMetricFamily(f"lazyrag_{name}", help, value)
        stats = self._engine()
        families: dict[str, Metric] = {}
        for tier, counts in stats.get("tiers", {}).items():
            for name, value in counts.items():
                if value is None:  # no limit
                    continue
                if name not in families:
                    kind = GaugeMetricFamily if name in TIER_GAUGES else CounterMetricFamily
                    families[name] = kind(f"lazyrag_tier_{name}", _meaning(name), labels=("tier",))
                families[name].add_metric((tier,), value)  # type: ignore[attr-defined]
        yield from families.values()
        for name, value in stats.get("prefetch", {}).items():
            yield CounterMetricFamily(f"lazyrag_prefetch_{name}", f"Chunks that were prefetched: {name}.", value)


def _meaning(name: str) -> str:
    return TIER_GAUGES.get(name, f"Of a tier since the engine's start: {name.replace('_', ' ')}.")
