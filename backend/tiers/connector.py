"""Our vLLM KV connector: chunk KV between the engine's pool, host memory and disk, for child requests only.

A child computes one chunk (backend/plugin/requests.py) and names it in `extra_args["lazyrag_child"]`. No other request
is looked up, loaded or saved: its tokens are no prompt of their own, so nothing could be stored under them.

    scheduler   look up: host memory, then disk; is loading faster than computing?      get_num_new_matched_tokens
                give places in host memory; plan the step's copies                      build_connector_meta
    worker      begin to read from disk, then loads from host memory;                   bind_connector_metadata,
                nothing unverified is written into the child's blocks                   start_load_kv
                begin saves, behind the forward pass                                    wait_for_save
                see which copies have ended (mover.py)                                  get_finished
    scheduler   what arrived becomes visible to other requests; what failed never does

Loads are what vLLM calls asynchronous: the child's blocks get their hashes after the worker has reported the load, so a
load that fails has nobody to mislead. The child then ends with an error (kv_load_failure_policy "fail", vLLM's default)
and the scheduler makes another one, which may only save. Copies outlast their step, beside the steps of others; no
request of a step reads what is being loaded, so there is no layer to wait for, in a graph or outside of one.

The scheduler keeps the blocks of a save until they were copied out, and the last output of a request until the chunks
that were computed for it are saved: once a warming request is answered, its chunks are durable.

Host memory and files hold a chunk's valid tokens as the cache has them: K rotated at the chunk's own positions, pads
left out. They do not depend on the block size.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from lazyrag.backend import wire
from lazyrag.backend.engine import no_tier_counters
from lazyrag.backend.hashing import NAME_DIGITS
from lazyrag.backend.tiers.disk import DiskTier, sync_folders
from lazyrag.backend.tiers.host import Place, Shelf
from lazyrag.backend.tiers.mover import Mover
from lazyrag.backend.tiers.policy import POLICIES, ChunkKey, Speeds
from lazyrag.backend.tiers.transfers import COPIED, DONE, Progress, Transfer, Transfers, TransferStats
from lazyrag.errors import ConfigError, UnsupportedError
from lazyrag.types import DISK, HOST

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)
MOST_FETCHES = 64
"""Chunks that are brought from disk to host memory at a time because somebody may need them."""
MOST_UNPLACED_BYTES = 1 << 30
"""Of one worker's loads from disk that have no place in host memory. Beyond it, loads wait for those under way."""


@dataclass(slots=True)
class _Child:
    """A scheduled child.

    Attributes:
        request: vLLM's; it knows how far the child is.
        block_ids: all its blocks in order, kept up to date from step to step.
    """

    request: Request
    block_ids: list[int]

    @property
    def end(self) -> int:
        """Tokens of its prompt up to the chunk's last one."""
        child = _child(self.request)
        assert child is not None
        return child["first_token"] + child["num_tokens"]


@dataclass(slots=True)
class _Job:
    """A copy that the workers were told to make.

    Attributes:
        key: the chunk's.
        place: in host memory; None if it has none there.
        request_id: the child's; empty for a fetch.
        is_save: out of the pool; else into host memory or the pool.
        source: the tier that a load reads from; empty for a save.
        num_bytes: that it copies.
        left: by step, workers that have not reported it.
        is_well: no worker has failed.
        is_doomed: the chunk, or one that it begins, was forgotten meanwhile: its place is to be cleared.
        is_deleted: the chunk was forgotten: its file is to be removed, if this writes one.
    """

    key: ChunkKey
    place: Place | None
    request_id: str
    is_save: bool
    source: str
    num_bytes: int
    left: dict[str, int]
    is_well: bool = True
    is_doomed: bool = False
    is_deleted: bool = False


class LazyRAGConnector(KVConnectorBase_V1, SupportsHMA):
    """Both halves; vLLM makes one with the scheduler's role and one in each worker.

    Every engine that uses it has one group of KV layers (backend/plugin/checks.py); `SupportsHMA` keeps vLLM from
    regrouping them for the connector's sake.

    `kv_connector_extra_config`:
        root, fingerprint, budget_bytes: as `DiskTier` takes them; without a root nothing is kept on disk.
        host_bytes: of host memory, all workers together; 0 or None for none.
        policy: a name of `policy.POLICIES`; which chunks host memory gives up.
        speeds: figures to begin with, as `policy.Speeds` takes them.

    Attributes:
        counters: scheduler half: `DiskTier.counters` of all processes since the engine's start.
        speeds: scheduler half: what loading and computing were measured to take.
        token_bytes: of a token's KV in one worker.
        disk: None if nothing is kept there.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config: Mapping[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._ranks: int = vllm_config.parallel_config.world_size
        host_bytes = (config.get("host_bytes") or 0) // self._ranks
        self.counters: Counter[str] = Counter()
        self._block_size: int = vllm_config.cache_config.block_size
        self.disk = _disk(vllm_config, role, config)
        # Scheduler half.
        (group,) = kv_cache_config.kv_cache_groups
        self.token_bytes = group.kv_cache_spec.page_size_bytes * len(group.layer_names) // self._block_size
        self.speeds = Speeds(config.get("speeds"))
        self._shelf = Shelf(host_bytes, _policy(config.get("policy") or "cost")()) if host_bytes else None
        self._host_bytes = self._shelf.num_bytes if self._shelf is not None else 0
        self._children: dict[str, _Child] = {}
        self._next = Transfers()
        """What the next step's workers are to do; saves are found out at its end."""
        self._pinned: frozenset[str] = frozenset()
        self._doomed: set[str] = set()
        """Children whose chunk is not to be kept."""
        self._early: set[str] = set()
        """Children whose chunk is loaded even where computing is faster: nobody waits for them yet."""
        self._numbers = count()
        self._jobs: dict[int, _Job] = {}
        self._copied: list[int] = []
        self._counts: dict[str, Counter[str]] = {HOST: Counter(), DISK: Counter()}
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="lazyrag-sync")
        self._syncing: list[Future[None]] = []
        """Removals of files on their way to be durable."""
        # Worker half.
        self._mover: Mover | None = None
        if role == KVConnectorRole.SCHEDULER and self.disk is not None:
            self.disk.sweep()

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a save that is lost to a preemption is made when the chunk is computed again."""
        return False

    # ---------------------------------------------------------------- scheduler half: vLLM's interface

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the resident ones can be loaded, and whether they arrive between steps (always).

        None for their number: the chunk is on its way to host memory, or too much is being read; ask again.
        """
        child = _child(request)
        if child is None or not child["may_load"]:
            return 0, False
        end = child["first_token"] + self._padded(child["num_tokens"])
        if not child["first_token"] <= num_computed_tokens < end:
            return 0, False
        key = _key(request, child)
        if self._shelf is not None and (place := self._shelf.find(key)) is not None and not place.is_ready:
            return None, False
        tier = self._tier_of(key)
        if tier == DISK and self._is_reading_enough():
            return None, False
        if tier is None:
            return 0, False
        num_tokens = child["num_tokens"]
        is_faster = self.speeds.is_loading_faster(tier, num_tokens * self.token_bytes, num_tokens)
        if not is_faster and request.request_id not in self._early:
            return 0, False
        return end - num_computed_tokens, True

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Note a child's blocks, and its load if it has one."""
        child = _child(request)
        if child is None:
            return
        block_ids = list(blocks.get_block_ids()[0])
        key = _key(request, child)
        if request.request_id not in self._children:
            self._count_look_up(key, is_loaded=num_external_tokens > 0)
        self._children[request.request_id] = _Child(request, block_ids)
        if num_external_tokens:
            skipped = self._padded(child["num_tokens"]) - num_external_tokens
            self._next.loads.append(self._load(request, child, block_ids, skipped))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Transfers:
        """The step's copies: loads, and saves of chunks whose last token it computes."""
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, new_block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            # A resumed request has been through update_state_after_alloc with all its blocks.
            if request_id in self._children and new_block_ids and request_id not in cached.resumed_req_ids:
                self._children[request_id].block_ids += new_block_ids[0]
        transfers, self._next = self._next, Transfers()
        transfers.is_idle = not scheduler_output.total_num_scheduled_tokens
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            if request_id not in self._children:
                continue
            begun = self._children[request_id]
            if begun.request.num_computed_tokens < begun.end <= begun.request.num_computed_tokens + num_tokens:
                save = self._save(begun.request, begun.block_ids)
                transfers.saves += [save] if save is not None else []
        return transfers

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a child. Its blocks are free to go: the scheduler holds those of saves."""
        self._children.pop(request.request_id, None)
        self._doomed.discard(request.request_id)
        self._early.discard(request.request_id)
        return False, None

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take note of what the workers have done, and sum the counters up."""
        if connector_output.kv_connector_stats is not None:
            self.counters.update(connector_output.kv_connector_stats.data)
        if self.disk is not None:
            self.counters.update(self.disk.take_counters())
        progress = connector_output.kv_connector_worker_meta
        if progress is None:
            return
        assert isinstance(progress, Progress)
        for tier, num_bytes, seconds in progress.loaded:
            self.speeds.loaded(tier, num_bytes, seconds)
        for number, step, is_well in progress.steps:
            job = self._jobs[number]
            job.is_well &= is_well
            job.left[step] -= 1
            if job.left[step] == 0:
                self._step(number, job, step)

    def reset_cache(self) -> bool:
        """Empty host memory, but for what is being copied; the disk is no cache."""
        if (shelf := self._shelf) is not None:
            for place in shelf.places():
                if not place.users:
                    shelf.drop(place)
        return True

    def has_pending_push_work(self) -> bool:
        """Copies are under way whose end must be seen, though no request waits for any."""
        return bool(self._jobs)

    # ---------------------------------------------------------------- scheduler half: our scheduler's interface

    def finds(self, request: Request) -> str | None:
        """The tier that a child's chunk would be loaded from; None if there is none."""
        child = _child(request)
        assert child is not None
        key = _key(request, child)
        if self._shelf is not None and self._shelf.find(key) is not None:
            return HOST
        return self._tier_of(key)

    def load_early(self, request: Request) -> None:
        """Load this child's chunk, whatever is faster: nobody waits for it yet."""
        self._early.add(request.request_id)

    def fetch(self, request: Request) -> None:
        """Bring a child's chunk from disk to host memory, if it is worth its place there."""
        child = _child(request)
        assert child is not None
        key = _key(request, child)
        num_fetches = sum(not job.request_id for job in self._jobs.values())
        if self._shelf is None or num_fetches >= MOST_FETCHES or self._shelf.find(key) is not None:
            return
        self._shelf.policy.asked(key)
        place = self._take_place(key, child)
        if place is not None:
            job = self._job(key, child, place, "", source=DISK)
            self._next.fetches.append(self._transfer(job, "", child, (), 0, key, place))

    def pin(self, names: Set[str]) -> None:
        """Do not evict chunks with these names (`hashing.chunk_name`)."""
        self._set_pinned(self._pinned | names)

    def unpin(self, names: Set[str]) -> None:
        """Undo `pin`."""
        self._set_pinned(self._pinned - names)

    def forget(self, names: Set[str], heads: Set[str], *, namespace: str) -> set[int]:
        """Drop what the tiers hold of chunks, and their pins.

        Args:
            names: of the chunks.
            heads: the same, and of what begins them: these places in host memory are cleared. Their files stay: some
                may be chunks of their own.
            namespace: of the chunks.

        Returns:
            the copies under way of any of these: until they have ended, a file may come.

        Raises:
            OSError: a file cannot be removed.
        """
        under_way = set()
        for number, job in self._jobs.items():
            name = job.key[1][:NAME_DIGITS]
            if job.key[0] == namespace and name in heads:
                under_way.add(number)
                job.is_doomed = True
                job.is_deleted |= name in names
        self._set_pinned(self._pinned - names)
        if (shelf := self._shelf) is not None:
            for place in shelf.named(heads, namespace):
                shelf.drop(place)
                if not place.users:
                    self._next.clears.append((place.offset, place.num_bytes))
        if self.disk is not None:
            self._sync(self.disk.forget(names, namespace=namespace))
        return under_way

    def is_synced(self) -> bool:
        """Whether no power cut brings back a file that was removed.

        Raises:
            OSError: one may come back.
        """
        while self._syncing and self._syncing[0].done():
            self._syncing.pop(0).result()
        return not self._syncing

    def doom(self, request_id: str) -> None:
        """Keep nothing of what this child brings: its chunk was forgotten."""
        self._doomed.add(request_id)

    def keep(self, request_id: str) -> bool:
        """Undo `doom`, unless it is too late; whether what this child brings is kept."""
        if request_id in self._doomed:
            begun = self._children.get(request_id)
            if begun is not None and begun.request.num_computed_tokens >= begun.end:
                return False  # its last token was given to a step, or it loads what is no longer on disk
            self._doomed.remove(request_id)
        return True

    def saves_of(self, request_ids: Iterable[str]) -> set[int]:
        """The saves under way of what these children have computed."""
        ids = set(request_ids)
        return {number for number, job in self._jobs.items() if job.is_save and job.request_id in ids}

    def saves_named(self, names: Set[str], *, namespace: str) -> set[int]:
        """The saves under way of chunks with these names (`hashing.chunk_name`), whoever computed them."""
        jobs = ((number, job) for number, job in self._jobs.items() if job.is_save and job.key[0] == namespace)
        return {number for number, job in jobs if job.key[1][:NAME_DIGITS] in names}

    def is_under_way(self, number: int) -> bool:
        """Whether a copy has not ended, well or not."""
        return number in self._jobs

    def take_copied(self) -> list[int]:
        """The saves whose blocks are free to change, since the last call."""
        copied, self._copied = self._copied, []
        return copied

    def source_of(self, load: Transfer) -> str:
        """The tier that a load reads from."""
        return HOST if load.from_host else DISK

    def report(self) -> dict[str, dict[str, int]]:
        """`lazyrag.backend.engine.TIER_COUNTERS` of every tier but the pool."""
        tiers = no_tier_counters()
        for tier, counts in self._counts.items():
            tiers[tier] |= counts
        if self._shelf is not None:
            tiers[HOST] |= {
                "chunks": len(self._shelf),
                "bytes": self._shelf.num_used_bytes * self._ranks,
                "budget": self._shelf.num_bytes * self._ranks,
                "evictions": self._shelf.counters["evictions"],
            }
        if self.disk is not None:
            tiers[DISK] |= {
                "budget": self.disk.budget_bytes or 0,
                "saves": self.counters["saved"],
                "evictions": self.counters["evicted"],
            }
        return tiers

    # ---------------------------------------------------------------- scheduler half: parts

    def _tier_of(self, key: ChunkKey) -> str | None:
        """The highest tier that holds a chunk ready to be loaded."""
        if self._shelf is not None and (place := self._shelf.find(key)) is not None and place.is_ready:
            return HOST
        namespace, name = key
        return DISK if self.disk is not None and self.disk.contains(name, namespace=namespace) else None

    def _is_reading_enough(self) -> bool:
        """Whether what is being read from disk into memory beside the tier is as much as that may be."""
        unplaced = (job.num_bytes for job in self._jobs.values() if job.source == DISK and job.place is None)
        return sum(unplaced) > MOST_UNPLACED_BYTES

    def _count_look_up(self, key: ChunkKey, *, is_loaded: bool) -> None:
        if self._shelf is not None:
            self._shelf.policy.asked(key)
        tier = self._tier_of(key)
        if self._shelf is not None:
            self._counts[HOST]["hits" if tier == HOST else "misses"] += 1
        if self.disk is not None and tier != HOST:
            self._counts[DISK]["hits" if tier == DISK else "misses"] += 1
        if tier is not None and not is_loaded:
            self._counts[tier]["skipped"] += 1
            self.speeds.skipped(tier)

    def _load(self, request: Request, child: wire.WireChild, block_ids: list[int], first_token: int) -> Transfer:
        key, place = _key(request, child), None
        is_ready = False
        is_kept = request.request_id not in self._doomed
        if is_kept:
            self._want(key)
        if self._shelf is not None and is_kept:
            place = self._shelf.find(key)
            is_ready = place is not None and place.is_ready
            if place is None:
                place = self._take_place(key, child)
            elif is_ready:
                self._shelf.use(place)
            else:  # it was not on its way when it was looked for, in the same step
                raise AssertionError(f"the place of {request.request_id} is being filled by another")
        job = self._job(key, child, place, request.request_id, source=HOST if is_ready else DISK)
        return self._transfer(job, request.request_id, child, tuple(block_ids), first_token, key, place)

    def _save(self, request: Request, block_ids: list[int]) -> Transfer | None:
        """None if nobody would keep the chunk, or all do already."""
        child = _child(request)
        if child is None or request.request_id in self._doomed:
            return None
        key, place = _key(request, child), None
        if self._shelf is not None and self._shelf.find(key) is None:
            place = self._take_place(key, child)
        self._want(key)
        namespace, name = key
        to_disk = self.disk is not None and not self.disk.contains(name, namespace=namespace)
        if place is None and not to_disk:
            return None
        job = self._job(key, child, place, request.request_id, source="")
        self._counts[HOST]["saves"] += place is not None
        return self._transfer(job, request.request_id, child, tuple(block_ids), 0, key, place, to_disk=to_disk)

    def _want(self, key: ChunkKey) -> None:
        """Have the file stay that a save under way writes, or has written, of a chunk that was forgotten since."""
        for job in self._jobs.values():
            if job.key == key:
                job.is_deleted = False

    def _take_place(self, key: ChunkKey, child: wire.WireChild) -> Place | None:
        assert self._shelf is not None
        num_bytes = child["num_tokens"] * self.token_bytes
        return self._shelf.take(key, num_bytes, self.speeds.saved_s(num_bytes, child["num_tokens"]))

    def _job(self, key: ChunkKey, child: wire.WireChild, place: Place | None, request_id: str, *, source: str) -> int:
        number = next(self._numbers)
        left = {DONE: self._ranks} | ({} if source else {COPIED: self._ranks})
        num_bytes = child["num_tokens"] * self.token_bytes
        self._jobs[number] = _Job(key, place, request_id, not source, source, num_bytes, left)
        return number

    def _transfer(
        self,
        job: int,
        request_id: str,
        child: wire.WireChild,
        block_ids: tuple[int, ...],
        first_token: int,
        key: ChunkKey,
        place: Place | None,
        *,
        to_disk: bool = False,
    ) -> Transfer:
        start = (child["first_token"] + first_token) // self._block_size
        end = (child["first_token"] + self._padded(child["num_tokens"])) // self._block_size
        return Transfer(
            job=job,
            request_id=request_id,
            key=key[1],
            namespace=key[0],
            num_tokens=child["num_tokens"],
            first_token=first_token,
            block_ids=block_ids[start:end],
            offset=place.offset if place is not None else None,
            from_host=self._jobs[job].source == HOST,
            to_disk=to_disk,
            quota=child["quota"],
        )

    def _step(self, number: int, job: _Job, step: str) -> None:
        """All workers have made a step of a job."""
        place, shelf = job.place, self._shelf
        if step == COPIED:
            self._copied.append(number)
            if place is not None:
                place.is_ready = True
            return
        del self._jobs[number]
        if not job.is_save:
            self._counts[job.source]["loads" if job.is_well else "failures"] += 1
        if place is not None:
            assert shelf is not None
            if not job.is_save and not place.is_ready:
                place.is_ready = job.is_well
                self._counts[HOST]["saves"] += job.is_well
            if not place.is_ready:
                shelf.drop(place)
            shelf.done(place)
            if job.is_doomed and not place.users:
                self._next.clears.append((place.offset, place.num_bytes))
        if job.is_deleted and job.is_save and self.disk is not None:
            try:
                self._sync(self.disk.delete(job.key[1], namespace=job.key[0]))
            except OSError as error:  # an exception from here would end every request
                log.warning("The KV file of a deleted chunk stays on disk: %s.", error.strerror)

    def _sync(self, folders: Set[Path]) -> None:
        if folders:
            self._syncing.append(self._syncer.submit(sync_folders, folders))

    def _set_pinned(self, names: frozenset[str]) -> None:
        if self._shelf is not None:
            self._shelf.unpin(self._pinned - names)
            self._shelf.pin(names - self._pinned)
        self._pinned = self._next.pinned = names

    def _padded(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size) * self._block_size

    # ---------------------------------------------------------------- worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's cache tensors, one a layer, and the host memory.

        Raises:
            UnsupportedError: another engine of this process has registered its own; vLLM keeps one connector a process.
            ConfigError: there is not so much host memory.
        """
        if self._mover is not None:
            raise UnsupportedError(
                "A second engine in this process cannot use chunk KV outside its pool:",
                why="vLLM would give it the first engine's KV connector.",
                fix="Run it in another process (leave VLLM_ENABLE_V1_MULTIPROCESSING at 1), or without tiers.",
            )
        self._mover = Mover(kv_caches, self._block_size, self.disk, self._host_bytes)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin to read from disk: that touches no block, so it need not wait for a forward pass as the rest may."""
        super().bind_connector_metadata(connector_metadata)
        self._moving.read(self._transfers())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads from host memory. Nothing is written into the cache that was not verified as a whole."""
        self._moving.begin(self._transfers())

    def wait_for_save(self) -> None:
        """Begin the step's saves; the forward pass has been submitted, copying waits for it."""
        self._moving.save(self._transfers().saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """No sends; the loads that have ended, failed ones included."""
        self._moving.poll(is_idle=self._transfers().is_idle)
        return None, self._moving.take_arrived() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks of the failed ones."""
        return self._moving.take_unreadable()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """The step's counters, None if there are none."""
        data = self.disk.take_counters() if self.disk is not None else {}
        return TransferStats(data=data) if data else None

    def build_connector_worker_meta(self) -> Progress | None:
        """What has been done, None if nothing."""
        return self._moving.take_progress()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Counters as they come back from another process."""
        return TransferStats(data=data or {})

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: no request of this step reads what is being loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing yet: chunks are copied out after the forward pass."""

    def shutdown(self) -> None:
        """Wait until what was saved is on disk, and what was removed is gone."""
        self._syncer.shutdown()
        if self._mover is not None:
            self._mover.close()

    @property
    def _moving(self) -> Mover:
        assert self._mover is not None, "the worker's half, after register_kv_caches"
        return self._mover

    def _transfers(self) -> Transfers:
        transfers = self._get_connector_metadata()
        assert isinstance(transfers, Transfers)
        return transfers


def _disk(vllm_config: VllmConfig, role: KVConnectorRole, config: Mapping[str, Any]) -> DiskTier | None:
    if not config.get("root"):
        if not config.get("host_bytes"):
            raise ConfigError(
                "The KV connector has neither a root nor host_bytes: it could keep nothing.",
                fix='Put "root" or "host_bytes" into kv_connector_extra_config, or use LocalEngine.',
            )
        return None
    if not config.get("fingerprint"):
        raise ConfigError(
            "The KV connector has no fingerprint.",
            fix='Put "fingerprint" into kv_connector_extra_config, or use LocalEngine.',
        )
    parallel = vllm_config.parallel_config
    return DiskTier(
        config["root"],
        config["fingerprint"],
        config.get("budget_bytes"),
        rank=parallel.rank if role == KVConnectorRole.WORKER else 0,
        ranks=parallel.world_size,
    )


def _policy(name: str) -> Any:
    if name not in POLICIES:
        raise ConfigError(f"There is no tier policy {name!r}.", fix=f"Known: {', '.join(POLICIES)}.")
    return POLICIES[name]


def _key(request: Request, child: wire.WireChild) -> ChunkKey:
    return request.cache_salt or "", child["key"]


def _child(request: Request) -> wire.WireChild | None:
    """What a child says of its chunk; None for every other request, whatever its client wrote."""
    if not request.request_id.startswith(wire.CHILD_PREFIX) or request.sampling_params is None:
        return None
    child: wire.WireChild | None = (request.sampling_params.extra_args or {}).get(wire.CHILD)
    return child
