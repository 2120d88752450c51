"""What the connector's halves say to each other: copies to be made in a step, and what became of earlier ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

COPIED, DONE = "copied", "done"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One chunk, or its tail, between the tiers.

    Attributes:
        job: its number, by which the worker reports.
        request_id: the child's; empty for a chunk that goes from disk to host memory only.
        key, namespace: the chunk's, as `DiskTier` takes them.
        num_tokens: valid tokens of the chunk.
        first_token: of these, the first that is moved; it stands at the start of `block_ids[0]`.
        block_ids: the blocks of tokens [first_token, num_tokens).
        offset: the chunk's place in host memory; None if it has none.
        from_host: a load finds the chunk there; else it is read from disk, into that place if there is one.
        to_disk: a save is written to disk, too.
        quota: bytes that its namespace may have there; None for no limit.
    """

    job: int
    request_id: str
    key: str
    namespace: str
    num_tokens: int
    first_token: int
    block_ids: tuple[int, ...]
    offset: int | None = None
    from_host: bool = False
    to_disk: bool = False
    quota: int | None = None


@dataclass(slots=True)
class Transfers(KVConnectorMetadata):
    """What the workers are to do in one step, in this order. Filled by the scheduler half.

    Attributes:
        wipes: blocks to be filled with zeros; nobody uses them.
        clears: (offset, bytes) of host memory to be filled with zeros; nobody uses it.
        pinned: names of the chunks that the disk is to keep; None if that has not changed.
        fetches: from disk to host memory.
        is_idle: the step computes nothing.
        begun_s: when it was scheduled, by `time.monotonic`.
    """

    wipes: list[int] = field(default_factory=list)
    clears: list[tuple[int, int]] = field(default_factory=list)
    pinned: frozenset[str] | None = None
    fetches: list[Transfer] = field(default_factory=list)
    loads: list[Transfer] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)
    is_idle: bool = False
    begun_s: float = 0.0


@dataclass(slots=True)
class Progress(KVConnectorWorkerMetadata):
    """What a worker has done since its last report; of several workers, all of it.

    Attributes:
        steps: (job, `COPIED` or `DONE`, whether it went well). A save is `COPIED` when its blocks are free to change;
            every job is `DONE` when it touches nothing any more.
        loaded: (tier, bytes, seconds) of copies out of a tier.
    """

    steps: list[tuple[int, str, bool]] = field(default_factory=list)
    loaded: list[tuple[str, int, float]] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """This worker's and another's."""
        assert isinstance(other, Progress)
        return Progress([*self.steps, *other.steps], [*self.loaded, *other.loaded])


@dataclass
class TransferStats(KVConnectorStats):
    """`DiskTier.counters` of one step; with several ranks, their sum."""

    data: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return TransferStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data
