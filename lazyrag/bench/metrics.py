"""What is measured: each metric's meaning, its arms, which of them are compared, and on which workloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from lazyrag.bench.workload import Workload
from lazyrag.errors import InputError

Kind: TypeAlias = Literal["ttft", "decode", "ordinary", "throughput", "ingest", "batch", "rate", "simulated"]
Case: TypeAlias = tuple["Kind", Workload]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric.

    Attributes:
        name: in reports.
        about: what a value is, in a sentence.
        unit: of a value.
        compare: (arm, baseline) pairs; a ratio is the arm's value over the baseline's.
        seldom: arms that are measured every fourth round only, for they take long.
    """

    name: str
    about: str
    unit: str
    compare: tuple[tuple[str, str], ...]
    seldom: frozenset[str] = field(default_factory=frozenset)

    @property
    def arms(self) -> tuple[str, ...]:
        """Every arm that is measured, in the order of their turns."""
        return tuple(dict.fromkeys(name for pair in self.compare for name in pair))


LONG = frozenset({"recompute", "prefix"})
LONG_POOLED = frozenset({"prefix", "prefix-reorder", "materialize-ordered", "lazy-in-turn"})
TTFT = "milliseconds from sending one request to its first token; nothing else runs"
ON_HOT = (("lazy", "perfect"), ("lazy", "prefix"), ("lazy", "recompute"))
STREAMED = (("lazy", "materialize"), ("lazy", "prefix"))
POOLED = (
    ("lazy", "materialize"), ("lazy", "materialize-ordered"), ("lazy-in-turn", "materialize"), ("lazy", "lazy-in-turn"),
    ("lazy", "prefix"), ("lazy", "prefix-reorder"),
)  # fmt: skip
TIERS = "tier_ttft"
FROM_TIERS = (
    ("host", "floor"), ("host", "recompute"), ("host", "hot"), ("prefetched", "hot"),
    ("disk", "recompute"), ("disk rule", "disk"), ("disk rule", "recompute"),
    ("slow disk", "recompute"), ("slow disk rule", "slow disk"), ("slow disk rule", "recompute"),
)  # fmt: skip

METRICS = {
    metric.name: metric
    for metric in (
        Metric("ttft_hot", f"{TTFT}; its documents are cached, in a fresh order", "ms", ON_HOT, LONG),
        Metric("ttft_hot_literals", f"{TTFT}; the same, with literals between the documents", "ms", ON_HOT, LONG),
        Metric("ttft_first_k", f"{TTFT}; its documents are cached, the first tokens of each computed in place", "ms",
               (("first-k", "lazy"), ("first-k", "perfect"), ("first-k", "prefix")), frozenset({"prefix"})),
        Metric("ttft_few_shot", f"{TTFT}; many short examples in a fresh order, all cached", "ms", ON_HOT, LONG),
        Metric("decode_step", "milliseconds a token: (t(1 + n tokens) - t(1 token)) / n", "ms", (("lazy", "perfect"),)),
        Metric("cold", f"{TTFT}; no document was seen before", "ms", (("lazy", "recompute"),)),
        Metric("ordinary", "requests without documents to reuse: time to the first token, a step, or tokens a second",
               "ms", (("plugin", "stock"),)),
        Metric("ingest", "document tokens a second, when documents that are new are sent for their KV alone (to stock:"
               " for one token)", "tok/s", (("lazy", "stock"),)),
        Metric("table11_ttft", "mean milliseconds to the first token of requests that are sent together", "ms", POOLED,
               LONG_POOLED),
        Metric("table11_throughput", "requests a second, of requests that are sent together", "1/s", POOLED,
               LONG_POOLED),
        Metric("rate_at_slo", "highest rate of a Poisson stream (1/s) at which the 99th of 100 times to the first token"
               " is at most 500 ms, to within a fifth", "1/s", STREAMED),
        Metric(TIERS, f"{TTFT}; by where its documents' KV is (tiers.py)", "ms", FROM_TIERS,
               frozenset({"recompute", "disk", "disk rule", "slow disk", "slow disk rule"})),
        Metric("hit_ratio", "of the document tokens asked for, the part whose KV is in the pool (simulated, see hits)",
               "1", tuple(("lazy", name) for name in ("prefix", "prefix-reorder", "materialize", "documents"))),
    )
}  # fmt: skip
"""In order of weight."""


def metrics(names: Sequence[str]) -> list[Metric]:
    """The metrics with these names.

    Raises:
        InputError: there is no such metric.
    """
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise InputError(f"No metric is named {', '.join(unknown)}.", fix=f"Known: {', '.join(METRICS)}.")
    return [METRICS[name] for name in names]


# ---------------------------------------------------------------- workloads


def _cases(
    hot: Sequence[Workload], decode: Sequence[Workload], *, chunks: int, chunk: int, block: int
) -> dict[str, list[Case]]:
    """What can be derived from hot requests and decode batches; `block` is the smallest `first_k` there is."""
    middle = hot[len(hot) // 2]
    return {
        "ttft_hot": [("ttft", w) for w in hot],
        "ttft_hot_literals": [("ttft", replace(w, literal=12)) for w in hot],
        "ttft_first_k": [("ttft", replace(w, first_k=block)) for w in hot],
        "decode_step": [("decode", w) for w in decode],
        "cold": [("ttft", replace(w, new=True)) for w in hot],
        "ordinary": [
            ("ttft", middle),
            ("ttft", replace(hot[0], new=True)),
            *(("decode", w) for w in decode[:2]),
            ("throughput", Workload(documents=1, tokens=chunk, batch=chunks, new=True, shared=False, output=32)),
        ],
        "ingest": [("ingest", Workload(documents=1, tokens=chunk, question=0, batch=chunks, new=True, shared=False))],
    }


def _decode(documents: int, tokens: int, batch: int, steps: int, shared: bool = True) -> Workload:
    return Workload(documents=documents, tokens=tokens, batch=batch, shared=shared, output=1 + steps)


def _pooled(zipfs: Sequence[float], *, pool: int, tokens: int, arrivals: int, kv_bytes: int = 0) -> list[Case]:
    shape = Workload(documents=5, tokens=tokens, pool=pool, output=8, arrivals=arrivals, kv_bytes=kv_bytes)
    return [("rate", replace(shape, skew=skew)) for skew in zipfs]


def _llama_8b() -> dict[str, list[Case]]:
    hot = [Workload(documents=n, tokens=size) for n, size in ((10, 512), (10, 2048), (5, 8192))]
    decode = [_decode(10, 2048, batch, 64) for batch in (1, 8, 32, 64)]
    decode += [
        _decode(10, 2048, 8, 64, shared=False),
        _decode(10, 512, 32, 64, shared=False),
        _decode(10, 256, 64, 64, shared=False),
    ]
    table11 = Workload(documents=5, tokens=8192, pool=16, batch=32, output=8, kv_bytes=10 * 10**9)
    return {
        **_cases(hot, decode, chunks=64, chunk=512, block=16),
        "ttft_few_shot": [("ttft", Workload(documents=32, tokens=64, literal=2))],
        "table11_ttft": [("batch", table11)],
        "table11_throughput": [("batch", table11)],
        # Three engines, each with such a pool, fit one GPU of 141 GB.
        "rate_at_slo": _pooled((0, 1.1, 2.1), pool=100, tokens=2048, arrivals=100, kv_bytes=24 * 10**9),
    }


def _tiny() -> dict[str, list[Case]]:
    hot = [Workload(documents=n, tokens=size, question=16) for n, size in ((4, 128), (4, 400))]
    decode = [replace(_decode(4, 256, batch, 8), question=16) for batch in (1, 4)]
    table11 = Workload(documents=3, tokens=256, pool=6, batch=8, question=16, output=4)
    return {
        **_cases(hot, decode, chunks=8, chunk=128, block=32),
        "ttft_few_shot": [("ttft", Workload(documents=12, tokens=40, literal=2, question=16))],
        "table11_ttft": [("batch", table11)],
        "table11_throughput": [("batch", table11)],
        "rate_at_slo": _pooled((1.1,), pool=10, tokens=256, arrivals=20),
    }


CASES = {"llama-8b": _llama_8b(), "tiny": _tiny()}
"""By shape and metric; `hit_ratio` is simulated, and `tier_ttft` has workloads of its own (tiers.py)."""
