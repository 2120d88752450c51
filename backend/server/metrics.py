"""Counters of the server in Prometheus' text format. Numbers only: no text, no names of tenants."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lazyrag.types import COMPUTED, DISK, HBM, PromptPlan, Reuse

BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(slots=True)
class Metrics:
    """Counted in the server's event loop only.

    Attributes:
        responses: by (route, status).
        segment_tokens: tokens of chunks, by where their KV came from.
        ttft_counts: for each of `BUCKETS_S`, requests whose first token came within it but no earlier bucket; the last
            one counts the rest.
    """

    responses: Counter[tuple[str, int]] = field(default_factory=Counter)
    generations: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    segment_tokens: Counter[str] = field(default_factory=Counter)
    ttft_counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    ttft_sum_s: float = 0.0

    def add(self, plan: PromptPlan, reuse: Reuse | None, num_generated: int, ttft_s: float | None) -> None:
        """Count a finished generation."""
        self.generations += 1
        self.generated_tokens += num_generated
        if reuse is not None:
            self.prompt_tokens += reuse.prompt_tokens
            self.reused_tokens += reuse.reused_tokens
            for segment, source in zip(plan.segments, reuse.sources, strict=False):
                self.segment_tokens[source] += segment.num_tokens
        if ttft_s is not None:
            self.ttft_counts[bisect_left(BUCKETS_S, ttft_s)] += 1
            self.ttft_sum_s += ttft_s

    def exposition(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """All of it as text.

        Args:
            gauges: name -> (meaning, value) of what others know.
        """
        return "\n".join([*self._lines(gauges), ""])

    def _lines(self, gauges: Mapping[str, tuple[str, float]]) -> Iterator[str]:
        yield from _head("lazyrag_responses_total", "counter", "Answers by route and status.")
        for (route, status), count in sorted(self.responses.items()):
            yield f'lazyrag_responses_total{{route="{route}",status="{status}"}} {count}'
        for name, help, value in (
            ("generations", "Finished generations.", self.generations),
            ("prompt_tokens", "Tokens of their prompts.", self.prompt_tokens),
            ("reused_tokens", "Of these, tokens that were not computed.", self.reused_tokens),
            ("generated_tokens", "Tokens that were generated.", self.generated_tokens),
        ):
            yield from _head(f"lazyrag_{name}_total", "counter", help)
            yield f"lazyrag_{name}_total {value}"
        yield from _head("lazyrag_segment_tokens_total", "counter", "Tokens of chunks in prompts, by source of the KV.")
        for source in (HBM, DISK, COMPUTED):
            yield f'lazyrag_segment_tokens_total{{source="{source}"}} {self.segment_tokens[source]}'
        yield from _head("lazyrag_ttft_seconds", "histogram", "Time to the first token.")
        total = 0
        for bound, count in zip((*BUCKETS_S, "+Inf"), self.ttft_counts, strict=True):
            total += count
            yield f'lazyrag_ttft_seconds_bucket{{le="{bound}"}} {total}'
        yield f"lazyrag_ttft_seconds_sum {self.ttft_sum_s}"
        yield f"lazyrag_ttft_seconds_count {total}"
        for name, (help, number) in gauges.items():
            yield from _head(f"lazyrag_{name}", "gauge", help)
            yield f"lazyrag_{name} {number}"


def _head(name: str, kind: str, help: str) -> Iterator[str]:
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} {kind}"
