"""Host memory as a tier: who has which place in it (the scheduler's half), and the memory itself (each worker's half).

The scheduler decides for all workers: a chunk has the same place in each worker's memory, which holds that worker's
heads of it. Places are contiguous, so a chunk is read from disk, checked, written and copied in one piece. Where no
hole is large enough, chunks are evicted in the policy's order until there is one.
"""

from __future__ import annotations

import mmap
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from lazyrag.backend.hashing import NAME_DIGITS
from lazyrag.backend.tiers.policy import ChunkKey, Policy
from lazyrag.errors import ConfigError

ALIGNMENT = 512
"""Of places, in bytes: no two chunks share a cache line, and numbers of any size are aligned."""


@dataclass(eq=False, slots=True)
class Place:
    """A chunk's place. Only the shelf that gave it changes it.

    Attributes:
        key: the chunk's.
        offset, num_bytes: of the place; a multiple of `ALIGNMENT`.
        is_ready: it holds the chunk.
        is_gone: nobody finds it any more; it is free when its last user is done.
        users: copies under way into it or out of it.
    """

    key: ChunkKey
    offset: int
    num_bytes: int
    is_ready: bool = False
    is_gone: bool = False
    users: int = 0


class Shelf:
    """Places for chunks under a budget.

    Args:
        num_bytes: of the memory.
        policy: which chunks are given up.

    Attributes:
        counters: evictions, refusals (chunks that were not worth their place); never cleared.
    """

    def __init__(self, num_bytes: int, policy: Policy) -> None:
        self.num_bytes = num_bytes // ALIGNMENT * ALIGNMENT
        self.policy = policy
        self.counters: Counter[str] = Counter()
        self._pinned: set[str] = set()
        self._places: dict[ChunkKey, Place] = {}
        self._holes: list[tuple[int, int]] = [(0, self.num_bytes)] if self.num_bytes else []
        """(offset, bytes), ascending, no two of them adjacent."""

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_used_bytes(self) -> int:
        """Bytes of all places, of those that are gone but in use, too."""
        return self.num_bytes - sum(size for _, size in self._holes)

    def find(self, key: ChunkKey) -> Place | None:
        """The chunk's place, which may not be ready yet."""
        return self._places.get(key)

    def take(self, key: ChunkKey, num_bytes: int, seconds: float) -> Place | None:
        """A new place for a chunk that has none, with one user; None if there is no room that it is worth.

        Args:
            key: the chunk.
            num_bytes: that it needs.
            seconds: that having it saves.
        """
        assert key not in self._places
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        victims = self._victims(size)
        if victims is None:
            return None
        if victims and not self._is_pinned(key):
            keys = [victim.key for victim in victims]
            if not self.policy.admits(key, size, seconds, keys):
                self.counters["refusals"] += 1
                return None
        for victim in victims:
            self._remove(victim, evicted=True)
            self.counters["evictions"] += 1
        at = next(i for i, (_, hole) in enumerate(self._holes) if hole >= size)
        offset, hole = self._holes.pop(at)
        if hole > size:
            self._holes.insert(at, (offset + size, hole - size))
        place = self._places[key] = Place(key, offset, size, users=1)
        self.policy.added(key, size, seconds)
        return place

    def use(self, place: Place) -> None:
        """Another copy begins that uses the place."""
        place.users += 1

    def done(self, place: Place) -> None:
        """A copy that used the place has ended."""
        place.users -= 1
        if place.is_gone and not place.users:
            self._free(place)

    def drop(self, place: Place) -> None:
        """Let nobody find the chunk here any more."""
        if not place.is_gone:
            self._remove(place, evicted=False)

    def places(self) -> list[Place]:
        """All that can be found."""
        return list(self._places.values())

    def named(self, names: Set[str], namespace: str) -> list[Place]:
        """The places of chunks with these names (`hashing.chunk_name`)."""
        return [p for (space, key), p in self._places.items() if space == namespace and key[:NAME_DIGITS] in names]

    def pin(self, names: Iterable[str]) -> None:
        """Do not evict chunks with these names."""
        self._pinned.update(names)

    def unpin(self, names: Iterable[str]) -> None:
        """Undo `pin`."""
        self._pinned.difference_update(names)

    def _is_pinned(self, key: ChunkKey) -> bool:
        return key[1][:NAME_DIGITS] in self._pinned

    def _victims(self, size: int) -> list[Place] | None:
        """Whom to evict for a hole of this size; None if all that can go is not enough."""
        if size > self.num_bytes:
            return None
        holes, victims = list(self._holes), []
        order = self.policy.order()
        while not any(hole >= size for _, hole in holes):
            place = next((p for key in order if self._may_go(p := self._places[key])), None)
            if place is None:
                return None
            victims.append(place)
            _add_hole(holes, place.offset, place.num_bytes)
        return victims

    def _may_go(self, place: Place) -> bool:
        return place.is_ready and not place.users and not self._is_pinned(place.key)

    def _remove(self, place: Place, *, evicted: bool) -> None:
        del self._places[place.key]
        self.policy.removed(place.key, evicted=evicted)
        place.is_gone = True
        if not place.users:
            self._free(place)

    def _free(self, place: Place) -> None:
        _add_hole(self._holes, place.offset, place.num_bytes)

    def check(self) -> None:
        """Assert that places and holes are all of the memory, each byte once."""
        taken = sorted([(p.offset, p.num_bytes) for p in self._places.values()] + self._holes)
        ends = [offset + size for offset, size in taken]
        assert all(end <= start for end, (start, _) in zip(ends, taken[1:], strict=False)), "places overlap"
        assert all(a + size < b for (a, size), (b, _) in pairwise(self._holes)), "a hole is split"


def _add_hole(holes: list[tuple[int, int]], offset: int, size: int) -> None:
    """Add a hole, joined with those that it touches."""
    at = bisect(holes, (offset, 0))
    if at < len(holes) and holes[at][0] == offset + size:
        size += holes.pop(at)[1]
    if at and sum(holes[at - 1]) == offset:
        offset, size = holes[at - 1][0], holes[at - 1][1] + size
        holes[at - 1] = (offset, size)
    else:
        holes.insert(at, (offset, size))


class HostMemory:
    """A worker's part of the tier: bytes that its device can copy from and to by itself.

    Args:
        num_bytes: of the whole.
        device: of the KV cache; the memory is pinned for a CUDA device, which takes a while.

    Raises:
        ConfigError: there is not so much memory, or it cannot be pinned.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if not num_bytes:
            return
        try:
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise _too_much(num_bytes, str(error)) from error
        with suppress(OSError):  # pinning goes page by page
            pages.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.from_numpy(np.frombuffer(pages, np.uint8))
        if self._is_cuda:
            code = _cudart().cudaHostRegister(self._bytes.data_ptr(), num_bytes, 0)
            if code.value != 0:
                raise _too_much(num_bytes, f"cudaHostRegister gave error {code.value}")

    def at(self, offset: int, num_bytes: int) -> torch.Tensor:
        """The bytes of a place."""
        return self._bytes[offset : offset + num_bytes]

    def temporary(self, num_bytes: int) -> torch.Tensor:
        """Bytes beside the tier, as long as they are referred to."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)

    def close(self) -> None:
        """Give the memory back. No copy may be under way."""
        if self._is_cuda and len(self._bytes):
            _cudart().cudaHostUnregister(self._bytes.data_ptr())
        self._bytes = torch.empty(0, dtype=torch.uint8)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _too_much(num_bytes: int, why: str) -> ConfigError:
    return ConfigError(
        f"{num_bytes} bytes of host memory cannot be had for chunk KV:",
        why=f"{why}.",
        fix="Set kv_host_bytes to less; pinned memory is not swapped, and `ulimit -l` may limit it.",
    )
