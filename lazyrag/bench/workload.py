"""What is asked of an engine, as data, and the token ids that come of it. Pure; the same in every run.

A request is    title document title document ... question

where a document always brings its own title (the literals, none or a few tokens, in front of each document but the
first) and every question is new. Tokens are random: an engine's speed does not depend on what they say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from random import Random
from typing import Literal, TypeAlias

Order: TypeAlias = Literal["fresh", "sorted"]
"""Of a request's documents: as they are drawn, or by number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A stream of requests.

    Attributes:
        documents: in a request.
        tokens: of a document.
        literal: tokens between two documents.
        question: tokens behind the last document.
        output: tokens to generate.
        batch: requests sent together.
        shared: the requests of a batch are about the same documents; else each has its own.
        new: no document was ever seen before.
        first_k: tokens of each document that an arm which computes some in their place computes.
        pool: documents that a request's are drawn from, without replacement; 0: all requests are about the same ones.
        skew: a document of the pool is drawn with a probability proportional to rank^-skew.
        arrivals: requests of a Poisson stream; 0: the next is sent when the last is answered.
        kv_bytes: the engines' KV pool must have this size; 0: any.
    """

    documents: int
    tokens: int
    literal: int = 0
    question: int = 64
    output: int = 1
    batch: int = 1
    shared: bool = True
    new: bool = False
    first_k: int = 0
    pool: int = 0
    skew: float = 0.0
    arrivals: int = 0
    kv_bytes: int = 0

    @property
    def name(self) -> str:
        """Says all that distinguishes a workload from others of the same metric."""
        parts = [f"{self.documents}x{self.tokens}+{self.question}" if self.documents else f"{self.question} tokens"]
        if self.literal:
            parts.append(f"{self.literal} between")
        if self.new:
            parts.append("all new")
        if self.first_k:
            parts.append(f"first {self.first_k} computed")
        if self.pool:
            parts += [f"pool {self.pool}", f"zipf {self.skew:g}"]
        if self.batch > 1:
            parts.append(f"batch {self.batch}")
            if self.documents and not self.pool:
                parts.append("shared" if self.shared else "distinct")
        if self.kv_bytes:
            parts.append(f"KV {self.kv_bytes / 1e9:g} GB")
        return ", ".join(parts)

    @property
    def num_tokens(self) -> int:
        """Of one request: prompt and answer."""
        literals = self.literal * max(0, self.documents - 1)
        return self.documents * self.tokens + literals + self.question + self.output

    @property
    def num_cached_tokens(self) -> int:
        """Which an engine must hold so that all of a batch's requests can run together and find their documents."""
        copies = 1 if self.shared else self.batch
        return copies * self.documents * self.tokens + self.batch * (self.num_tokens - self.documents * self.tokens)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as it is sent to an engine.

    Attributes:
        token_ids: [N].
        spans: (start, number of tokens) of each reusable run; none for an ordinary request.
        documents: names the tokens of each span.
        salt: requests with different salts share no KV.
        first_k: tokens of each run that are computed in their place all the same.
    """

    token_ids: list[int]
    spans: tuple[tuple[int, int], ...] = ()
    documents: tuple[str, ...] = ()
    salt: str = ""
    first_k: int = 0


@dataclass(frozen=True, slots=True)
class Draw:
    """One request before an arm makes a prompt of it: which documents, in a fresh order, and the question."""

    documents: tuple[int, ...]
    question: list[int]


def zipf(pool: int, skew: float) -> list[float]:
    """The weight of each document of a pool; number 0 is the most popular one."""
    return [rank**-skew for rank in range(1, pool + 1)]


def sample(random: Random, weights: Sequence[float], count: int) -> list[int]:
    """`count` different indices, each draw proportional to the weights of those that are left.

    The largest of u^(1/weight) are such a sample in the order drawn (Efraimidis and Spirakis 2006).
    """
    keys = [random.random() ** (1 / weight) for weight in weights]
    return sorted(range(len(weights)), key=keys.__getitem__, reverse=True)[:count]


class Traffic:
    """The requests of a workload, one by one.

    Args:
        workload: which requests.
        vocabulary: token ids are drawn from [low, high).
        seed: another one, other documents.
    """

    def __init__(self, workload: Workload, vocabulary: tuple[int, int], seed: int = 0) -> None:
        self.workload = workload
        self._vocabulary = range(*vocabulary)
        identity = f"{workload} {seed}"
        self._random, self._name = Random(identity), sha256(identity.encode()).hexdigest()[:16]
        self._documents: list[tuple[list[int], list[int]]] = []
        self._num_forgotten = 0
        self._add(workload.pool or workload.documents)
        self._weights = zipf(workload.pool, workload.skew)
        self._num_salts = 0

    def _add(self, count: int) -> None:
        for _ in range(count):
            self._documents.append(
                (self.random_tokens(self.workload.literal), self.random_tokens(self.workload.tokens))
            )

    def random_tokens(self, count: int) -> list[int]:
        """New ones at every call."""
        return self._random.choices(self._vocabulary, k=count)

    def draw(self) -> Draw:
        """The next request."""
        count = self.workload.documents
        if self.workload.new:
            self._num_forgotten += count
            self._documents.clear()
            self._add(count)
        chosen = sample(self._random, self._weights, count) if self.workload.pool else list(range(count))
        self._random.shuffle(chosen)
        return Draw(tuple(chosen), self.random_tokens(self.workload.question))

    def prompt(self, draw: Draw, *, order: Order, spans: bool, salted: bool, in_part: bool = False) -> Prompt:
        """A drawn request as an arm sends it.

        Args:
            draw: of this traffic; for a workload with new documents, the last one.
            order: of the documents.
            spans: mark the documents as reusable.
            salted: under a salt of its own, so that nothing is found in any cache.
            in_part: of each document `first_k` tokens are computed in their place.
        """
        token_ids: list[int] = []
        places, names = [], []
        for number in draw.documents if order == "fresh" else sorted(draw.documents):
            title, document = self._documents[number]
            token_ids += title if token_ids else []
            places.append((len(token_ids), len(document)))
            names.append(f"{self._name} {self._num_forgotten + number}")
            token_ids += document
        self._num_salts += salted
        salt = f"{self._random.random()}-{self._num_salts}" if salted else ""
        token_ids += draw.question
        if not spans:
            return Prompt(token_ids, salt=salt)
        return Prompt(token_ids, tuple(places), tuple(names), salt, self.workload.first_k if in_part else 0)

    def arrivals(self, rate: float) -> list[float]:
        """Seconds from the start to each arrival of a Poisson stream, `rate` a second."""
        now, arrivals = 0.0, []
        for _ in range(self.workload.arrivals):
            now += self._random.expovariate(rate)
            arrivals.append(now)
        return arrivals
