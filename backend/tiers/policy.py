"""What a tier keeps, and whether to load or to compute. Pure: no clock, no disk, no device.

A chunk is worth what it saves: the seconds that computing it takes longer than loading it, each time that it is asked
for, against the bytes that it takes. `Cost` orders chunks by

    priority = age + times asked for * seconds saved / bytes        (GreedyDual-Size-Frequency, Cherkasova 1998)

where `age` is the priority of what was evicted last: whoever is not asked for any more is overtaken in the end. A chunk
that is not worth more than those that would have to go for it is not admitted (as in TinyLFU, Einziger et al. 2017):
what is asked for once does not flush what is asked for again and again. `Lru` keeps what was asked for last.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop
from typing import Protocol, TypeAlias

from lazyrag.backend.engine import TIER_POLICIES
from lazyrag.types import DISK, HOST

ChunkKey: TypeAlias = tuple[str, str]
"""Namespace, and `hashing.chunk_key`."""


class Policy(Protocol):
    """Which chunks a tier gives up. Told of everything that happens to them."""

    def asked(self, key: ChunkKey) -> None:
        """A request wants this chunk, which the tier holds or not."""
        ...

    def added(self, key: ChunkKey, num_bytes: int, seconds: float) -> None:
        """The tier holds it from now on.

        Args:
            key: the chunk.
            num_bytes: that it takes.
            seconds: that are saved each time that it need not be computed.
        """
        ...

    def removed(self, key: ChunkKey, *, evicted: bool) -> None:
        """The tier does not hold it any more; `evicted` for the sake of another."""
        ...

    def order(self) -> Iterator[ChunkKey]:
        """What the tier holds, first out first."""
        ...

    def admits(self, key: ChunkKey, num_bytes: int, seconds: float, victims: Sequence[ChunkKey]) -> bool:
        """Whether a chunk that the tier lacks is worth evicting these for."""
        ...


class Lru:
    """Least recently used first out; everybody is admitted."""

    def __init__(self) -> None:
        self._held: OrderedDict[ChunkKey, None] = OrderedDict()

    def asked(self, key: ChunkKey) -> None:
        """See `Policy`."""
        if key in self._held:
            self._held.move_to_end(key)

    def added(self, key: ChunkKey, num_bytes: int, seconds: float) -> None:
        """See `Policy`."""
        self._held[key] = None

    def removed(self, key: ChunkKey, *, evicted: bool) -> None:
        """See `Policy`."""
        del self._held[key]

    def order(self) -> Iterator[ChunkKey]:
        """See `Policy`."""
        return iter(list(self._held))

    def admits(self, key: ChunkKey, num_bytes: int, seconds: float, victims: Sequence[ChunkKey]) -> bool:
        """See `Policy`."""
        return True


class Cost:
    """What saves the fewest seconds for its bytes first out (see above).

    Args:
        most_remembered: chunks whose requests are counted, those that the tier lacks included.
        half_life: requests after which all counts are halved, so that what was popular once is not so for ever.
    """

    def __init__(self, most_remembered: int = 1 << 16, half_life: int = 1 << 14) -> None:
        self._most_remembered, self._half_life = most_remembered, half_life
        self._counts: OrderedDict[ChunkKey, float] = OrderedDict()
        self._num_asked = 0
        self._age = 0.0
        self._priority: dict[ChunkKey, float] = {}
        self._density: dict[ChunkKey, float] = {}
        """Of each chunk held: seconds a byte."""

    def asked(self, key: ChunkKey) -> None:
        """See `Policy`."""
        self._counts[key] = self._counts.get(key, 0.0) + 1
        self._counts.move_to_end(key)
        if len(self._counts) > self._most_remembered:
            self._counts.popitem(last=False)
        self._num_asked += 1
        if self._num_asked % self._half_life == 0:
            for known in self._counts:
                self._counts[known] /= 2
        if key in self._density:
            self._priority[key] = self._age + self._worth(key, self._density[key])

    def added(self, key: ChunkKey, num_bytes: int, seconds: float) -> None:
        """See `Policy`."""
        self._density[key] = seconds / num_bytes
        self._priority[key] = self._age + self._worth(key, self._density[key])

    def removed(self, key: ChunkKey, *, evicted: bool) -> None:
        """See `Policy`."""
        del self._density[key]
        priority = self._priority.pop(key)
        if evicted:
            self._age = max(self._age, priority)

    def order(self) -> Iterator[ChunkKey]:
        """See `Policy`."""
        heap = [(priority, number, key) for number, (key, priority) in enumerate(self._priority.items())]
        heapify(heap)
        while heap:
            yield heappop(heap)[2]

    def admits(self, key: ChunkKey, num_bytes: int, seconds: float, victims: Sequence[ChunkKey]) -> bool:
        """See `Policy`."""
        worth = self._worth(key, seconds / num_bytes)
        return all(worth >= self._worth(victim, self._density[victim]) for victim in victims)

    def _worth(self, key: ChunkKey, density: float) -> float:
        return self._counts.get(key, 0.0) * density


POLICIES: Mapping[str, type[Cost] | type[Lru]] = dict(zip(TIER_POLICIES, (Cost, Lru), strict=True))


# ---------------------------------------------------------------- load or compute

COMPUTE = "compute"
START = {HOST: 20e9, DISK: 2e9}
"""Bytes a second that are believed until something was measured."""
START_TOKENS = 1e4
"""Tokens a second, where a figure is needed before one was measured."""
LEAST_BYTES, LEAST_TOKENS = 1 << 20, 256
"""Smaller transfers and steps say nothing of bandwidth and speed."""
WEIGHT = 0.3
"""Of the newest measurement in the average."""
DECAY = 0.98
"""Of the seconds that a tier is believed to take, at each load that was left out for them: one that was slow is tried
again some day."""
READERS = min(4, os.cpu_count() or 1)
"""Threads that read from disk at a time."""
LATENCY_S = {HOST: 0.2e-3, DISK: 1e-3}
"""Of a load, whatever its size."""


class Speeds:
    """How fast tiers and model are here: moving averages of the seconds that a byte or a token was measured to take.

    Args:
        start: figures to begin with: bytes a second by tier, tokens a second as `COMPUTE`.
    """

    def __init__(self, start: Mapping[str, float] | None = None) -> None:
        self._seconds = {name: 1 / rate for name, rate in {**START, **(start or {})}.items()}
        """Of a byte or a token."""
        self._measured: set[str] = set()

    def rate(self, name: str) -> float | None:
        """Bytes or tokens a second; None if there is no figure."""
        return 1 / self._seconds[name] if name in self._seconds else None

    def loaded(self, tier: str, num_bytes: int, seconds: float) -> None:
        """So long it took to copy so much out of a tier."""
        if num_bytes >= LEAST_BYTES:
            self._note(tier, seconds / num_bytes)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """So long it took to compute so many tokens."""
        if num_tokens >= LEAST_TOKENS:
            self._note(COMPUTE, seconds / num_tokens)

    def skipped(self, tier: str) -> None:
        """A chunk was computed, for this tier was believed to take longer."""
        self._seconds[tier] *= DECAY

    def load_s(self, tier: str, num_bytes: int) -> float:
        """Seconds to load so much."""
        return LATENCY_S[tier] + num_bytes * self._seconds[tier]

    def compute_s(self, num_tokens: int) -> float:
        """Seconds to compute so many tokens."""
        return num_tokens * self._seconds.get(COMPUTE, 1 / START_TOKENS)

    def saved_s(self, num_bytes: int, num_tokens: int) -> float:
        """Seconds that a chunk in host memory saves; more than none, for its place may be free."""
        return max(self.compute_s(num_tokens) - self.load_s(HOST, num_bytes), 1e-9)

    def is_loading_faster(self, tier: str, num_bytes: int, num_tokens: int) -> bool:
        """Whether a chunk takes less time to load than to compute; yes, before anybody knows how long computing takes.

        What waits ahead does not count. Computing what waits behind other loads would end sooner only if it ran beside
        them for nothing; on an H200 one computed chunk among nine loaded ones took its whole time from the request
        (116 ms in place of 70), and it takes the device from all others, which loading does not.
        """
        return COMPUTE not in self._seconds or self.load_s(tier, num_bytes) <= self.compute_s(num_tokens)

    def _note(self, name: str, seconds: float) -> None:
        seconds = max(seconds, 1e-15)
        if name in self._measured:
            seconds = WEIGHT * seconds + (1 - WEIGHT) * self._seconds[name]
        self._measured.add(name)
        self._seconds[name] = seconds
