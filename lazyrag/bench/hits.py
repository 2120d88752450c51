"""How much of what is asked for is found in a KV pool of a given size: a simulation driven by a trace. Pure.

The hit ratio is, over all requests behind a warm-up, document tokens whose KV was in the pool when their request
arrived, divided by document tokens asked for. Requests come one by one; what the running request holds while it runs is
not counted against the budget, what stays in the pool behind it is.

A pool of 1 GB holds less than one request of 5x2048 tokens of an 8B model: there, what counts is which part of the last
request stays, and sorting by popularity keeps the best one.

vLLM's rule is simulated at the granularity of its blocks. A request's blocks are freed last one first, so they are
evicted from the prompt's end; a block is found only if all blocks in front of it, in its chain, are. The question's
blocks are never asked for again but take their room all the same. Rules differ in what a chain is:

    prefix          the whole prompt is one chain
    prefix-reorder  the same, documents sorted by popularity (the best order there is; a real system has to guess it)
    materialize     each document is a chain (the original) and each use copies it to blocks of the request, with K
                    turned to the document's place. An original is done with when it is copied; the copies are in the
                    pool like any other block, and are found again for the same document at the same place. If copies
                    took no room and were dropped at once, this rule would be `lazy`.
    lazy            each document is a chain, used in place
    documents       an LRU of whole documents, nothing else in the pool: what `lazy` should come close to
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from lazyrag.bench.workload import sample, zipf

BLOCK_SIZE = 16
GB = 10**9


@dataclass(frozen=True, slots=True)
class Trace:
    """Which documents are asked for.

    Attributes:
        pool: documents there are.
        tokens: of a document, a multiple of the block size.
        documents: of a request, drawn without replacement.
        skew: a document is drawn with a probability proportional to rank^-skew.
        question: tokens.
        warm_up: requests before counting begins.
        requests: that are counted.
    """

    pool: int = 100
    tokens: int = 2048
    documents: int = 5
    skew: float = 0.0
    question: int = 64
    warm_up: int = 1000
    requests: int = 10_000
    seed: int = 0

    @property
    def name(self) -> str:
        """In reports."""
        return f"{self.documents} of {self.pool}x{self.tokens}, zipf {self.skew:g}"

    def draws(self) -> list[tuple[int, ...]]:
        """The documents of every request, in its order; number 0 is the most popular."""
        random, weights = Random(f"{self.seed} {self.skew}"), zipf(self.pool, self.skew)
        return [tuple(sample(random, weights, self.documents)) for _ in range(self.warm_up + self.requests)]


class Pool:
    """A KV pool: runs of blocks under a key, least recently used first out, each run from its end.

    Args:
        num_blocks: that fit.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free = num_blocks
        self._runs: OrderedDict[Hashable, int] = OrderedDict()

    def resident(self, key: Hashable) -> int:
        """How many of a run's first blocks are there."""
        return self._runs.get(key, 0)

    def use(self, runs: Sequence[tuple[Hashable, int]]) -> None:
        """A request has used these runs (key, blocks), in the order of its block table, and is done."""
        for key, num_blocks in reversed(runs):
            self._free += self._runs.pop(key, 0)
            self._runs[key] = num_blocks
            self._free -= num_blocks
        while self._free < 0:
            key, num_blocks = next(iter(self._runs.items()))
            dropped = min(num_blocks, -self._free)
            self._free += dropped
            if dropped == num_blocks:
                del self._runs[key]
            else:
                self._runs[key] = num_blocks - dropped


Serve: TypeAlias = Callable[[Pool, tuple[int, ...], int, Hashable, int], int]
"""(pool, documents, blocks a document, key of the question, its blocks) -> blocks found."""


def prefix(pool: Pool, documents: tuple[int, ...], blocks: int, question: Hashable, rest: int) -> int:
    """The whole prompt is one chain."""
    found = 0
    for end in range(1, len(documents) + 1):
        here = pool.resident(documents[:end])
        found += here
        if here < blocks:
            break
    pool.use([*((documents[: end + 1], blocks) for end in range(len(documents))), (question, rest)])
    return found


def prefix_reorder(pool: Pool, documents: tuple[int, ...], blocks: int, question: Hashable, rest: int) -> int:
    """The same, documents sorted."""
    return prefix(pool, tuple(sorted(documents)), blocks, question, rest)


def materialize(pool: Pool, documents: tuple[int, ...], blocks: int, question: Hashable, rest: int) -> int:
    """A copy at this place is found, or else the original; what is not found is computed, and copied."""
    places = list(enumerate(documents))
    copies = [pool.resident(place) for place in places]
    originals = [pool.resident(document) for document in documents]
    found = sum(max(pair) for pair in zip(copies, originals, strict=True))
    pool.use([(d, blocks) for d, copy in zip(documents, copies, strict=True) if copy < blocks])
    pool.use([*((place, blocks) for place in places), (question, rest)])
    return found


def lazy(pool: Pool, documents: tuple[int, ...], blocks: int, question: Hashable, rest: int) -> int:
    """Each document is a chain of its own, used in place."""
    found = sum(pool.resident(document) for document in documents)
    pool.use([*((document, blocks) for document in documents), (question, rest)])
    return found


RULES: dict[str, Serve] = {
    "prefix": prefix,
    "prefix-reorder": prefix_reorder,
    "materialize": materialize,
    "lazy": lazy,
}
DOCUMENTS = "documents"


def hit_ratios(trace: Trace, budget_bytes: int, kv_bytes_per_token: int) -> dict[str, float]:
    """The hit ratio of every rule on a trace.

    Args:
        trace: the requests, the same for every rule.
        budget_bytes: of the pool.
        kv_bytes_per_token: of the model, over all layers, K and V.
    """
    draws = trace.draws()
    blocks, rest = trace.tokens // BLOCK_SIZE, -(-trace.question // BLOCK_SIZE)
    num_blocks = budget_bytes // (kv_bytes_per_token * BLOCK_SIZE)
    ratios = {}
    for name, serve in RULES.items():
        pool, found = Pool(num_blocks), []
        for number, documents in enumerate(draws):
            found.append(serve(pool, documents, blocks, f"question {number}", rest))
        ratios[name] = sum(found[trace.warm_up :]) / (trace.requests * trace.documents * blocks)
    ratios[DOCUMENTS] = _whole_documents(trace, draws, num_blocks // blocks)
    return ratios


def _whole_documents(trace: Trace, draws: Sequence[tuple[int, ...]], capacity: int) -> float:
    recent: OrderedDict[int, None] = OrderedDict()
    found = 0
    for number, documents in enumerate(draws):
        found += sum(document in recent for document in documents) if number >= trace.warm_up else 0
        for document in reversed(documents):
            recent.pop(document, None)
            recent[document] = None
        while len(recent) > capacity:
            recent.popitem(last=False)
    return found / (trace.requests * trace.documents)


SKEWS = (0.0, 1.1, 2.1)
BUDGETS_BYTES = tuple(gigabytes * GB for gigabytes in (1, 5, 10, 50))
