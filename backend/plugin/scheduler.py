"""The scheduler of a lazy engine: vLLM's own, with requests whose segments come from child requests.

A lazy request waits at the gate until all blocks of its segments are resident; then vLLM finds them as an ordinary
prefix-cache hit and computes the suffix. What is missing is computed by children, hidden requests at the head of the
queue, often in the same step: vLLM publishes a block's hash when it schedules the block, and every layer writes all K
and V of a step before it attends.

Three rules keep the cache clean:
 - a lazy request computes suffix tokens only (the gate, and `_allocate` as the fail-safe behind it);
 - what a connector loads stays without hashes, invisible to others, until the load has succeeded;
 - pins hold what is resident until the request runs (`pins`).

And these keep the engine going:
 - whoever waits holds no blocks: a child whose load has succeeded is done, it computes nothing;
 - pins leave running requests and children what they need to go on;
 - so when nothing runs and nothing is being loaded, only pins can be in the way: they are dropped for a step, and the
   first in the queue has the whole pool.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from dataclasses import asdict, dataclass
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from lazyrag.backend import control, wire
from lazyrag.backend.engine import no_prefetch_counters, no_tier_counters
from lazyrag.backend.hashing import chunk_name, head_names
from lazyrag.backend.plugin import checks, compat
from lazyrag.backend.plugin.pins import Budget, Pins
from lazyrag.backend.plugin.requests import Child, LazyRequest, RequestMaker, engine_settings
from lazyrag.backend.plugin.residents import Residents
from lazyrag.errors import CapacityError, LazyRAGError, RequestError, UnknownContentError
from lazyrag.types import HBM

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from lazyrag.backend.hashing import BlockHash
    from lazyrag.backend.tiers.transfers import Transfers

log = logging.getLogger(__name__)

_LOOK_AHEAD = 16
"""Waiting requests among which one may be preferred, and whose chunks are evicted last."""
_MOST_KEPT = 8192
"""Blocks that are put in order: about two milliseconds."""
_MOST_OVERTAKEN = 8
"""Times that one of them may be overtaken."""
_MOST_PREFETCHED = 4096
_MAX_STUCK_STEPS = 4
"""Steps without any progress after which the oldest lazy request is given an error. One suffices by construction."""


@dataclass
class Counters:
    """Since the engine's start.

    Attributes:
        requests: lazy requests accepted.
        refused: requests answered with an error by the scheduler.
        segments_resident: segments whose blocks were all resident when their request arrived.
        segments_missing: the others.
        children_computed, children_loaded: finished children, by where their KV came from.
        loads_failed: children whose load failed; their chunks were computed then.
        gated: times that a waiting request was passed over because a segment was missing.
        fail_safe: times that `_allocate` refused what the gate had let through.
    """

    requests: int = 0
    refused: int = 0
    segments_resident: int = 0
    segments_missing: int = 0
    children_computed: int = 0
    children_loaded: int = 0
    loads_failed: int = 0
    gated: int = 0
    fail_safe: int = 0


@dataclass
class Removal:
    """What must end before it is said that chunks are forgotten.

    Attributes:
        children: that have begun one of them, by request id; what they save counts, too.
        copies: of one of them, by number.
    """

    children: set[str]
    copies: set[int]


class LazyMixin(compat.Gate):
    """What a lazy engine's scheduler does on top of vLLM's. Use `LazyScheduler` or `LazyAsyncScheduler`."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        structured_output_manager: Any,
        block_size: int,
        hash_block_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        checks.check_scheduler(
            vllm_config,
            kv_cache_config,
            block_size=block_size,
            hash_block_size=hash_block_size or block_size,
            is_async=isinstance(self, AsyncScheduler),
        )
        super().__init__(vllm_config, kv_cache_config, structured_output_manager, block_size, hash_block_size, **kwargs)
        self._debug = engine_settings(vllm_config).debug
        self._pool = self.kv_cache_manager.block_pool
        self._pins = Pins(self._pool)
        self._requests = RequestMaker(
            vllm_config,
            block_size=block_size,
            num_blocks=self._pool.num_gpu_blocks - 1,  # one is vLLM's null block
        )
        self._counters = Counters()
        self._lazy: dict[str, LazyRequest] = {}
        """By request id: clients' lazy requests, and children that are computed behind a preamble or a sink."""
        self._children: dict[str, Child] = {}
        """In flight, by request id."""
        self._child_of: dict[BlockHash, Child] = {}
        """The same, by the hash of the chunk's last block."""
        self._failures: dict[str, LazyRAGError] = {}
        """By request id: accepted only to be answered with this error."""
        self._unloadable: set[BlockHash] = set()
        """Chunks (last block) whose load failed: computed the next time, and saved anew."""
        self._admitted: dict[str, LazyRequest] = {}
        """Clients' lazy requests that get children and pins in this step, oldest first; set by `_admit`."""
        self._closed = False
        """The gate met a request that must wait for room: nobody behind it may pass in this step."""
        self.serves_in_turn = False
        """Requests run as they come, and what was used least recently is evicted first; for comparison (bench)."""
        self._is_in_order = True
        """Nothing has changed since waiting requests, and what may be evicted, were put in order."""
        self._num_stuck = 0
        self._refused_when_idle = False
        self._operations: dict[str, tuple[control.Control, LazyRequest | None]] = {}
        """What clients ask of the tiers, by request id: to be done at the start of the next step."""
        self._done_operations: set[str] = set()
        """Ids of those that are to be answered."""
        self._removals: dict[str, Removal] = {}
        """Of those that have chunks forgotten, once they have begun."""
        self._residents = Residents(self._pool)
        (group,) = kv_cache_config.kv_cache_groups  # see checks
        self._block_bytes = group.kv_cache_spec.page_size_bytes * len(group.layer_names)
        self._doomed: set[str] = set()
        """Children in flight whose chunk is to be forgotten once they end."""
        self._spare: Budget | None = None
        """What this step's waiting requests leave free; None if they lack something. Set by `_admit`."""
        self._copying = Pins(self._pool)
        """The blocks that are being copied out, by the number of the save."""
        self._unsaved: list[tuple[int, EngineCoreOutput, set[int]]] = []
        """Last outputs, with the index of their client, that wait for these saves of what was computed for them."""
        self._updated_s = 0.0
        self._prefetches = Counter(no_prefetch_counters())
        self._prefetched: OrderedDict[BlockHash, None] = OrderedDict()
        """Chunks (last block) that were brought up before anybody needed them."""
        self._stock_allocate = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate
        self._stock_find = self.kv_cache_manager.get_computed_blocks
        self.kv_cache_manager.get_computed_blocks = self._find
        self._stock_estimate = self.kv_cache_manager.estimate_cached_tokens
        self.kv_cache_manager.estimate_cached_tokens = self._estimate
        self._stock_common = self.kv_cache_manager.get_num_common_prefix_blocks
        self.kv_cache_manager.get_num_common_prefix_blocks = self._common

    # ---------------------------------------------------------------- vLLM's scheduler interface

    def add_request(self, request: Request) -> None:
        """Accept a request; one that cannot be served gets an error output. Never raises for what a client sent."""
        is_new = request.request_id not in self.requests
        if is_new:  # what is still known of an earlier request with this id is about that one
            self._lazy.pop(request.request_id, None)
            self._failures.pop(request.request_id, None)
        try:
            asked = control.control_from_args((request.sampling_params and request.sampling_params.extra_args) or {})
            lazy = self._requests.rewrite(request)
            if lazy is not None and asked is not None and asked.operation == control.WARM:
                lazy.warms_only, asked = True, None
            if is_new and asked is not None:
                self._operations[request.request_id] = (asked, lazy)
                if asked.operation == control.PREFETCH and lazy is not None:
                    self._prefetches["asked"] += len(lazy.chains) - lazy.num_preamble
            elif is_new and lazy is not None:
                self._accept(lazy)
        except LazyRAGError as error:
            self._fail(request.request_id, error)
        except Exception:
            # vLLM stops the engine, and with it everybody's requests, for an exception from here.
            log.exception("Request %s could not be prepared", request.request_id)
            self._fail(request.request_id, RequestError("The scheduler could not prepare the request (see its log)."))
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step."""
        self._closed = self._refused_when_idle = False
        if self._lazy or self._children or self._operations:
            self._forget_finished()
            self._drop_orphans()
            self._admit()
            self._operate()
            self._spawn()
            if self._spare is None and not self._is_in_order and not self.serves_in_turn:
                self._put_in_order()
        output = super().schedule(*args, **kwargs)
        if self._lazy:
            self._after_schedule(output)
        if self.connector is not None:
            self._note_copies(output.kv_connector_metadata)
        if self._debug:
            self._check()
        return output

    def may_run(self, request: Request) -> bool:
        """The gate; see `compat`."""
        request_id = request.request_id
        if request_id in self._failures or self._is_operation(request_id):
            return False
        if self._closed and request_id not in self._children:  # those may stand anywhere, once they were preempted
            return False
        lazy = self._lazy.get(request_id)
        if lazy is None or request.num_computed_tokens > 0:
            return True
        # Admitted: what was resident at the start of the step is pinned, only the rest can have changed since then.
        admitted = request_id in self._admitted
        lazy.missing = self._missing(lazy, lazy.missing if admitted else range(len(lazy.layout.segments)))
        if not lazy.missing:
            return not lazy.warms_only
        self._counters.gated += 1
        self._closed = not admitted and not lazy.is_child
        return False

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Process a step's output; children stay invisible, lazy requests carry their report."""
        failed = self.finish_requests(list(self._failures), RequestStatus.FINISHED_ERROR) if self._failures else []
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        if self.connector is not None:
            self._see_copies(scheduler_output)
        for of_client in outputs.values():
            self._take_children(of_client)
            for output in list(of_client.outputs):
                lazy = self._lazy.get(output.request_id)
                if lazy is not None:
                    report = {**lazy.report(), **(self._tiers() if output.finish_reason is not None else {})}
                    output.kv_transfer_params = {**(output.kv_transfer_params or {}), wire.REPORT: report}
                    if output.finish_reason is not None and self._holds_back(output, lazy):
                        of_client.outputs.remove(output)
        for request in failed:
            of_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            of_client.outputs.append(_error_output(request, self._failures[request.request_id]))
        self._failures = {}
        self._answer_operations(outputs)
        self._release_saved(outputs)
        self._finish_loaded()
        self._answer_warmed(outputs)
        if self._debug:
            self._check()
        return outputs

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        """Finish requests from outside (an abort); their pins go at once, their children at the next step."""
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._pins.release(request.request_id)
        return finished

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Empty the prefix cache. Pins do not count as use: waiting requests get their chunks computed again."""
        self._pins.release_all()
        done: bool = super().reset_prefix_cache(*args, **kwargs)
        return done

    def lazyrag_stats(self) -> dict[str, int]:
        """`Counters`, and how many lazy requests and children are in flight."""
        return {**asdict(self._counters), "lazy_in_flight": len(self._lazy), "children_in_flight": len(self._children)}

    # ---------------------------------------------------------------- copies between the pool and other tiers

    def _note_copies(self, transfers: Transfers) -> None:
        transfers.begun_s = time.monotonic()
        transfers.wipes += self._residents.take_wipes()
        for load in transfers.loads:
            self._children[load.request_id].tier = self.connector.source_of(load)
        for save in transfers.saves:
            self._copying.hold(str(save.job), [self._pool.blocks[block_id] for block_id in save.block_ids])

    def _see_copies(self, scheduler_output: SchedulerOutput) -> None:
        """Give the blocks up that were copied out, and learn how fast the model is."""
        for number in self.connector.take_copied():
            self._copying.release(str(number))
        begun_s, now = max(scheduler_output.kv_connector_metadata.begun_s, self._updated_s), time.monotonic()
        self._updated_s = now
        scheduled = scheduler_output.num_scheduled_tokens.items()
        num_tokens = sum(count for request_id, count in scheduled if self._requests.is_child(request_id))
        if 2 * num_tokens >= scheduler_output.total_num_scheduled_tokens:  # decoding says nothing of it
            self.connector.speeds.computed(num_tokens, now - begun_s)

    def _saves_of(self, lazy: LazyRequest) -> set[int]:
        """The saves under way of chunks that were computed for a request, or for another and shared.

        Who only warms is told that a chunk is kept, so it waits for everybody's saves of it.
        """
        if self.connector is None:
            return set()
        saves: set[int] = self.connector.saves_of(child.request_id for child in (*lazy.asked, *lazy.children.values()))
        if lazy.warms_only:
            salt = lazy.request.cache_salt
            names = {chunk_name(content.token_ids, salt=salt) for content in lazy.contents}
            saves |= self.connector.saves_named(names, namespace=salt or "")
        return saves

    def _holds_back(self, output: EngineCoreOutput, lazy: LazyRequest) -> bool:
        """Keep a request's last output until what was computed for it is saved; whether it has to wait."""
        saves = self._saves_of(lazy)
        if saves:
            self._unsaved.append((lazy.request.client_index, output, saves))
        return bool(saves)

    def _release_saved(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Let those outputs go that have waited for a save."""
        waiting, self._unsaved = self._unsaved, []
        for client_index, output, saves in waiting:
            saves = {number for number in saves if self.connector.is_under_way(number)}
            if saves:
                self._unsaved.append((client_index, output, saves))
            else:
                output.kv_transfer_params[wire.REPORT] |= self._tiers()  # as they are now
                outputs.setdefault(client_index, EngineCoreOutputs()).outputs.append(output)

    # ---------------------------------------------------------------- what clients ask of the tiers

    def _is_operation(self, request_id: str) -> bool:
        return request_id in self._operations or request_id in self._done_operations

    def _operate(self) -> None:
        """Do what was asked, or go on with it."""
        for request_id, (asked, lazy) in list(self._operations.items()):
            if request_id in self.requests:  # not aborted
                if not self._is_done(request_id, asked, lazy):
                    continue
                if request_id not in self._failures:
                    self._done_operations.add(request_id)
            del self._operations[request_id]
            self._removals.pop(request_id, None)

    def _is_done(self, request_id: str, asked: control.Control, lazy: LazyRequest | None) -> bool:
        """Do what was asked, or go on with it; whether that was all."""
        if asked.operation in (control.PREFETCH, control.WARM):
            return lazy is None or self._prefetch(lazy)
        salt = self.requests[request_id].cache_salt
        if asked.operation != control.FORGET:
            names = {chunk_name(tokens, salt=salt) for tokens in asked.chunks}
            if self.connector is not None:
                (self.connector.pin if asked.operation == control.PIN else self.connector.unpin)(names)
            return True
        try:
            if request_id not in self._removals:
                self._removals[request_id] = self._forget(asked.chunks, salt)
            return self._has_ended(self._removals[request_id])
        except OSError as error:
            what = f"Chunk KV cannot be removed from disk: {error.strerror}."
            self._fail(request_id, RequestError(what, why="In memory it is forgotten."))
            return True

    def _forget(self, chunks: Sequence[Sequence[int]], salt: str | None) -> Removal:
        names = {chunk_name(tokens, salt=salt) for tokens in chunks}
        heads = {name for tokens in chunks for name in head_names(tokens, salt=salt)}
        self._residents.forget(heads)
        for lazy in self._lazy.values():
            lazy.forgotten |= names
        begun = set()
        for child in self._children.values():
            if child.name not in heads:
                continue
            self._doomed.add(child.request_id)
            if self.requests[child.request_id].num_computed_tokens:
                begun.add(child.request_id)
            if child.name in names and self.connector is not None:
                self.connector.doom(child.request_id)
        copies = self.connector.forget(names, heads, namespace=salt or "") if self.connector is not None else ()
        return Removal(begun, set(copies))

    def _has_ended(self, removal: Removal) -> bool:
        """Whether no file can come any more of what was to be forgotten, and none come back."""
        if self.connector is None:
            return True
        removal.copies |= self.connector.saves_of(removal.children)
        removal.copies = {number for number in removal.copies if self.connector.is_under_way(number)}
        removal.children &= self._children.keys()
        return not removal.children and not removal.copies and self.connector.is_synced()

    def _prefetch(self, lazy: LazyRequest) -> bool:
        """Begin to load what is missing, as far as nobody else needs the blocks.

        Returns:
            whether that was all; else the preamble or sink must be there first, which is being loaded.
        """
        waits = False
        for index, content in enumerate(lazy.contents):
            chain = content.chain
            found = chain.look_up(self._pool)
            blocks = [block for block in found if block is not None]
            if len(blocks) == len(found):  # last in the queue of those to be evicted
                self._pool.touch(blocks)
                self._pool.free_blocks(reversed(blocks))
                continue
            last_hash = chain.hashes[-1]
            if self.connector is None or last_hash in self._child_of or last_hash in self._unloadable:
                continue
            child, request, behind_first = self._requests.make_child(lazy, index, may_load=True)
            if self.connector.finds(request) is None:
                continue
            if behind_first is not None and lazy.contents[0].chain.hashes[-1] in self._child_of:
                waits = True
                continue
            absent = {h for h, block in zip(chain.hashes, found, strict=True) if block is None}
            needs_preamble = behind_first is not None and self._missing(behind_first, [0])
            if needs_preamble or self._spare is None or not self._spare.take(blocks, absent, 0):
                self.connector.fetch(request)
                continue
            self._add_child(child, request, behind_first)
            self.connector.load_early(request)
            if index >= lazy.num_preamble:
                self._prefetched[child.key] = None
            while len(self._prefetched) > _MOST_PREFETCHED:
                self._prefetched.popitem(last=False)
                self._prefetches["wasted"] += 1
            super().add_request(request)
            compat.put_first(self, request)
        return not waits

    def _note_prefetched(self, lazy: LazyRequest, missing: Iterable[int]) -> None:
        """Whether it was of use that a request's chunks were brought up before."""
        gone = set(missing)
        for index, content in enumerate(lazy.contents):
            last_hash = content.chain.hashes[-1]
            if last_hash in self._prefetched:
                del self._prefetched[last_hash]
                kind = "late" if last_hash in self._child_of else "wasted" if index in gone else "used"
                self._prefetches[kind] += 1

    def _answer_operations(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        done, self._done_operations = self._done_operations, set()
        for request in self.finish_requests(list(done), RequestStatus.FINISHED_STOPPED) if done else ():
            of_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            of_client.outputs.append(_output(request, {wire.REPORT: self._tiers()}))

    def _answer_warmed(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Answer the requests that only warm, once all of their chunks are computed."""
        done = [lazy for lazy in self._lazy.values() if lazy.warms_only and self._is_warm(lazy)]
        ids = [lazy.request.request_id for lazy in done]
        for request in self.finish_requests(ids, RequestStatus.FINISHED_STOPPED) if ids else ():
            lazy = self._lazy[request.request_id]
            output = _output(request, {wire.REPORT: {**lazy.report(), **self._tiers()}})
            if not self._holds_back(output, lazy):
                outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)

    def _is_warm(self, lazy: LazyRequest) -> bool:
        """Whether all chunks of a request are resident, and no child that was made for one is under way.

        Blocks that another text has in common with a chunk may still be computed in the step that is under way: whoever
        reads them comes in a later one.
        """
        if any(content.chain.hashes[-1] in self._child_of for content in lazy.contents):
            return False
        return not self._missing(lazy, range(len(lazy.chains)))

    def _tiers(self) -> dict[str, Any]:
        """What every last answer says of the tiers (see `control`)."""
        tiers = self.connector.report() if self.connector is not None else no_tier_counters()
        num_blocks = self._pool.num_gpu_blocks - 1
        tiers[HBM] |= {
            "chunks": len(self._residents),
            "budget": num_blocks * self._block_bytes,
            "bytes": (num_blocks - self._pool.get_num_free_blocks()) * self._block_bytes,
            "hits": self._counters.segments_resident,
            "misses": self._counters.segments_missing,
            "loads": self._counters.children_loaded,
            "saves": self._counters.children_computed,
            "failures": self._counters.loads_failed,
        }
        return {control.TIERS: tiers, control.PREFETCHED: dict(self._prefetches)}

    # ---------------------------------------------------------------- requests

    def _accept(self, lazy: LazyRequest) -> None:
        if self._debug:
            lazy.layout.check()
        self._forget_leftovers(lazy)
        num_segments = len(lazy.layout.segments)
        missing = self._missing(lazy, range(num_segments))
        num_missing = len(missing)
        if self._prefetched:
            self._note_prefetched(lazy, missing)
        self._lazy[lazy.request.request_id] = lazy
        self._is_in_order = False
        self._counters.requests += 1
        self._counters.segments_missing += num_missing
        self._counters.segments_resident += num_segments - num_missing

    def _fail(self, request_id: str, error: LazyRAGError) -> None:
        if not isinstance(error, UnknownContentError):  # the client sends it again by itself
            log.warning("Request %s is answered with %s: %s", request_id, type(error).__name__, error)
            self._counters.refused += 1
        self._failures[request_id] = error

    def _missing(self, lazy: LazyRequest, indices: Iterable[int]) -> list[int]:
        """Which of these segments have a block that is not resident."""
        return [i for i in indices if self._resident(lazy, i) is None]

    def _resident(self, lazy: LazyRequest, index: int) -> list[KVCacheBlock] | None:
        """The blocks of a segment, if all are there and are to stay."""
        child = self._child_of.get(lazy.contents[index].chain.hashes[-1])
        if child is not None and not self._may_share(lazy, child):
            return None
        return lazy.chains[index].resident(self._pool)

    def _may_share(self, lazy: LazyRequest, child: Child) -> bool:
        """Whether a child in flight brings a request all that its answer promises: the KV, and that it is kept.

        Who came after the chunk was forgotten wants it anew, and what the child computes is kept if there is time. Else
        the request waits until the child has ended and nobody finds its blocks, and then gets a child of its own.
        """
        if self.connector is None or lazy.is_child or child.name in lazy.forgotten:
            return True
        if self.connector.keep(child.request_id):
            return True
        self._doomed.add(child.request_id)
        return False

    def _forget_leftovers(self, lazy: LazyRequest) -> None:
        """Let a new request find nothing that is there only for those whose chunk was forgotten since they came."""
        forgotten = set[str]().union(*(other.forgotten for other in self._lazy.values()))
        if forgotten:
            salt = lazy.request.cache_salt
            wanted = {chunk_name(content.token_ids, salt=salt) for content in lazy.contents}
            self._forget_finished()  # takes note of what children have left
            self._residents.forget(wanted & forgotten)

    def _forget_finished(self) -> None:
        for request_id in [i for i in self._lazy if i not in self.requests]:
            self._pins.release(request_id)
            self._residents.forget(self._lazy.pop(request_id).forgotten)
            self._is_in_order = False
        for child in [c for c in self._children.values() if c.request_id not in self.requests]:
            self._forget_child(child)

    def _forget_child(self, child: Child) -> None:
        del self._children[child.request_id]
        del self._child_of[child.key]
        self._is_in_order = False
        self._lazy.pop(child.request_id, None)
        self._residents.note(child.name, child.block_hashes)
        if child.request_id in self._doomed:
            self._doomed.remove(child.request_id)
            self._residents.forget([child.name])

    def _drop_orphans(self) -> None:
        """Abort the children that nobody waits for any more, but for those that have begun: they are soon done."""
        waiting = [c for c in self._children.values() if not self.requests[c.request_id].num_computed_tokens]
        if not waiting:
            return
        awaited = {child.request_id for lazy in self._lazy.values() for child in lazy.children.values()}
        orphans = [child for child in waiting if child.request_id not in awaited]
        super().finish_requests([child.request_id for child in orphans], RequestStatus.FINISHED_ABORTED)
        for child in orphans:
            self._forget_child(child)

    # ---------------------------------------------------------------- a step

    def _admit(self) -> None:
        """Decide which waiting lazy requests get their children and pins: oldest first, as far as all would fit."""
        self._pins.release_all()
        self._admitted = {}
        # A running request may need one more block at any step, a child those of its prompt: they must not be preempted
        # for the sake of pins.
        num_ahead = sum(request.request_id not in self._children for request in self.running)
        begun = [child for child in self._children.values() if self.requests[child.request_id].num_computed_tokens]
        budget = Budget(
            self._pool.get_num_free_blocks() - num_ahead - sum(self._num_blocks_lacked_by(child) for child in begun),
            coming=(block_hash for child in begun for block_hash in child.block_hashes),
        )
        wanted: list[tuple[str, list[KVCacheBlock], int]] = []
        self._spare = budget
        for request in compat.waiting_requests(self):
            request_id = request.request_id
            if request_id in self._children or request_id in self._failures or self._is_operation(request_id):
                continue
            lazy = self._lazy.get(request_id)
            num_blocks = -(-(request.num_tokens + 1) // self.block_size)
            if lazy is None:
                fits = budget.take((), (), num_blocks)
            else:
                resident, absent = self._look_up(lazy)
                num_own = 0 if lazy.warms_only else self._num_own_blocks(lazy, num_blocks)
                fits = budget.take(resident, absent, num_own)
            if not fits:
                self._spare = None
            if not fits and num_ahead:
                break  # whoever is alone gets all there is
            if lazy is not None:
                self._admitted[request_id] = lazy
                # When stuck, it may be pins that somebody lacks blocks for.
                if not self._num_stuck and (fits or budget.take(resident, (), 0)):
                    wanted.append((request_id, resident, num_ahead))
            num_ahead += 1
            if self._num_stuck or not fits or num_ahead >= self.max_num_running_reqs:
                break
        for request_id, resident, rank in wanted:
            # Whoever is given blocks before anybody else needs no pins.
            missing = any(lazy.missing for lazy in self._admitted.values())
            if rank or missing or self._children or self._operations:
                self._pins.hold(request_id, resident)

    def _put_in_order(self) -> None:
        """Let the pool's chunks be used before they are evicted, where not all that waits fits at once.

        Of the requests at the head of those that wait for room, the one that has the least to compute goes first; and
        what will be asked for soonest is evicted last (Belady 1966, as far as the queue shows), the rest by last use.
        """
        self._is_in_order = True
        waiting = (
            (request, self._lazy.get(request.request_id))
            for request in compat.waiting_requests(self)
            if request.request_id not in self._admitted and request.request_id not in self._children
        )
        # Ordinary requests are not overtaken, nor those that were preempted; who waits for a grammar could not run.
        ready = takewhile(lambda one: one[1] and one[0].status == RequestStatus.WAITING, waiting)
        ahead = [lazy for _, lazy in islice(ready, _LOOK_AHEAD) if lazy is not None]
        if not ahead:
            return
        costs = [self._num_to_compute(lazy) for lazy in ahead]
        best = costs.index(min(costs))
        overtaken = ahead[:best]
        if overtaken and all(lazy.num_overtaken < _MOST_OVERTAKEN for lazy in overtaken):
            for lazy in overtaken:
                lazy.num_overtaken += 1
            compat.put_before(self, ahead[best].request, ahead[0].request)
            ahead.insert(0, ahead.pop(best))
        kept: list[list[KVCacheBlock]] = []
        num_kept = 0
        for chain in dict.fromkeys(chain for lazy in ahead for chain in lazy.chains):
            if num_kept < _MOST_KEPT and (blocks := chain.resident(self._pool)):
                kept.append(blocks)
                num_kept += len(blocks)
        for blocks in reversed(kept):
            self._pool.touch(blocks)
            self._pool.free_blocks(reversed(blocks))

    def _num_to_compute(self, lazy: LazyRequest) -> int:
        """Tokens, before a request's first one comes."""
        absent = (chain for chain in set(lazy.chains) if chain.resident(self._pool) is None)
        own = 0 if lazy.warms_only else lazy.request.num_tokens - lazy.layout.suffix_start
        num_tokens: int = own + self.block_size * sum(len(chain.hashes) for chain in absent)
        return num_tokens

    def _num_own_blocks(self, lazy: LazyRequest, num_blocks: int) -> int:
        """Of a request's `num_blocks`, those that nobody shares with it."""
        return num_blocks - lazy.layout.suffix_block

    def _look_up(self, lazy: LazyRequest) -> tuple[list[KVCacheBlock], set[BlockHash]]:
        """The resident blocks of a request's segments and the hashes that children lack; sets `lazy.missing`."""
        resident: list[KVCacheBlock] = []
        absent: set[BlockHash] = set()
        lazy.missing = []
        for i, chain in enumerate(lazy.chains):
            blocks = self._resident(lazy, i)
            if blocks is not None:
                resident += blocks
                continue
            lazy.missing.append(i)
            whole = lazy.contents[i].chain
            found = whole.look_up(self._pool)
            own = found if chain is whole else chain.look_up(self._pool)
            resident += [block for block in own if block is not None]
            absent |= {h for h, block in zip(whole.hashes, found, strict=True) if block is None}
        return resident, absent

    def _num_blocks_lacked_by(self, child: Child) -> int:
        (block_ids,) = self.kv_cache_manager.get_block_ids(child.request_id)
        return child.first_block + len(child.block_hashes) - len(block_ids)

    def _spawn(self) -> None:
        """Put children for all missing segments of the admitted requests at the head of the queue, oldest first."""
        wanted = [(lazy, i) for lazy in self._admitted.values() for i in lazy.missing]
        new = [request for lazy, i in wanted if (request := self._child_for(lazy, i)) is not None]
        for request in reversed(new):
            super().add_request(request)
            compat.put_first(self, request)

    def _child_for(self, lazy: LazyRequest, index: int) -> Request | None:
        """The request to be added for a missing segment; None if one in flight is shared, or its end waited for."""
        last_hash = lazy.contents[index].chain.hashes[-1]
        child = self._child_of.get(last_hash)
        if child is not None:
            if self._may_share(lazy, child):
                lazy.children[index] = child
            return None
        may_load = last_hash not in self._unloadable
        child, request, behind_first = self._requests.make_child(lazy, index, may_load=may_load)
        lazy.children[index] = child
        lazy.asked.append(child)
        self._add_child(child, request, behind_first)
        if child.name in lazy.forgotten and self.connector is not None:
            self.connector.doom(child.request_id)
        return request

    def _add_child(self, child: Child, request: Request, behind_first: LazyRequest | None) -> None:
        self._children[child.request_id] = self._child_of[child.key] = child
        if behind_first is not None:
            self._lazy[child.request_id] = behind_first

    def _find(self, request: Request, *args: Any, **kwargs: Any) -> tuple[KVCacheBlocks, int, int]:
        """`KVCacheManager.get_computed_blocks` of this engine: a lazy request's blocks are known by segment.

        The stock method looks up every block of the prompt. Events are its own.
        """
        manager, lazy = self.kv_cache_manager, self._lazy.get(request.request_id)
        if lazy is None or args or kwargs or manager.enable_kv_cache_events:
            found: tuple[KVCacheBlocks, int, int] = self._stock_find(request, *args, **kwargs)
            return found
        blocks: list[KVCacheBlock] = []
        for chain in lazy.chains:
            resident = chain.resident(self._pool)
            if resident is None:
                blocks += takewhile(lambda block: block is not None, chain.look_up(self._pool))
                break
            blocks += resident
        else:
            # The last token is computed in any case: its logits are wanted.
            for block_hash in request.block_hashes[len(blocks) : (request.num_tokens - 1) // self.block_size]:
                cached = self._pool.get_cached_block(block_hash, [0])
                if not cached:
                    break
                blocks += cached
        num_hits = len(blocks) * self.block_size
        compat.count_hits(manager, request, num_hits)
        return manager.create_kv_cache_blocks((blocks,)), num_hits, 0

    def _estimate(self, request: Request) -> int:
        """`KVCacheManager.estimate_cached_tokens` of this engine, which asks every block of a request."""
        ours = request.request_id in self._lazy or request.request_id in self._children
        full_blocks = request.num_computed_tokens // self.block_size * self.block_size
        num_tokens: int = full_blocks if ours else self._stock_estimate(request)
        return num_tokens

    def _common(self, request_id: str) -> list[int]:
        """`KVCacheManager.get_num_common_prefix_blocks` of this engine.

        Blocks that all requests begin with serve cascade attention, which takes a prompt for one text.
        """
        if self._lazy:
            return [0] * len(self.kv_cache_config.kv_cache_groups)
        return list(self._stock_common(request_id))

    def _allocate(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        **kwargs: Any,
    ) -> KVCacheBlocks | None:
        """`KVCacheManager.allocate_slots` of this engine, with the fail-safe."""
        lazy, child = self._lazy.get(request.request_id), self._children.get(request.request_id)
        starts = request.num_computed_tokens == 0
        if num_external_computed_tokens > 0 and (child is None or not kwargs.get("delay_cache_blocks")):
            raise RuntimeError(
                f"The KV connector loads into {request.request_id}. It may load into children only, and only as what "
                "vLLM calls an asynchronous load: others must not find the blocks before the load has succeeded."
            )
        if starts and lazy is not None and num_new_computed_tokens < lazy.layout.suffix_start:
            self._counters.fail_safe += 1
            self._refused_when_idle |= not self.running
            return None
        blocks = self._stock_allocate(
            request,
            num_new_tokens,
            num_new_computed_tokens,
            new_computed_blocks,
            num_lookahead_tokens,
            num_external_computed_tokens,
            **kwargs,
        )
        if blocks is None:
            self._refused_when_idle |= not self.running
        elif starts:
            if child is not None:
                child.is_loaded = num_external_computed_tokens > 0
            if lazy is not None and lazy.cached_suffix_tokens is None:
                lazy.cached_suffix_tokens = num_new_computed_tokens - lazy.layout.suffix_start
        return blocks

    def _after_schedule(self, output: SchedulerOutput) -> None:
        for request_id in output.num_scheduled_tokens:
            self._pins.release(request_id)
        loading = any(self.requests[request_id].num_computed_tokens for request_id in self._children)
        busy = output.total_num_scheduled_tokens or self.running or loading or self._copying.held
        stuck = self._refused_when_idle and not busy
        self._num_stuck = self._num_stuck + 1 if stuck else 0
        if self._num_stuck > _MAX_STUCK_STEPS:
            self._fail_oldest()

    def _fail_oldest(self) -> None:
        for request in compat.waiting_requests(self):
            lazy = self._lazy.get(request.request_id)
            if lazy is not None and not lazy.is_child:
                self._fail(
                    request.request_id,
                    CapacityError(
                        "The request does not fit into the engine's KV pool beside what its chunks need.",
                        fix="Give the engine more KV memory, or send fewer or shorter chunks.",
                    ),
                )
                return

    def _take_children(self, of_client: EngineCoreOutputs) -> None:
        """Take the children's outputs out of a client's, and note which of them are done."""
        if of_client.finished_requests:
            of_client.finished_requests = {i for i in of_client.finished_requests if not self._requests.is_child(i)}
        seen = [output for output in of_client.outputs if output.request_id in self._children]
        if not seen:
            return
        of_client.outputs = [output for output in of_client.outputs if output.request_id not in self._children]
        for output in seen:
            if output.finish_reason is None:
                continue
            child = self._children[output.request_id]
            if output.finish_reason == FinishReason.ERROR:
                # It stays missing, so that a child that may not load follows.
                self._forget_child(child)
                for lazy in self._lazy.values():
                    lazy.asked = [asked for asked in lazy.asked if asked is not child]
                self._counters.loads_failed += 1
                self._unloadable.add(child.key)
            else:
                self._done(child)

    def _finish_loaded(self) -> None:
        """End the children whose load has succeeded: what they hold gets its hashes, and is free to be used."""
        loaded = [child for child in self._children.values() if child.request_id in self.finished_recving_kv_req_ids]
        for child in loaded:
            request = self.requests[child.request_id]
            self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
            self._done(child)
        super().finish_requests([child.request_id for child in loaded], RequestStatus.FINISHED_STOPPED)

    def _done(self, child: Child) -> None:
        self._forget_child(child)
        self._unloadable.discard(child.key)
        self._counters.children_loaded += child.is_loaded
        self._counters.children_computed += not child.is_loaded

    def _check(self) -> None:
        """Assert the invariants; debug mode only."""
        manager = self.kv_cache_manager.coordinator.single_type_managers[0]
        deferred = (blocks for _, blocks in self.deferred_frees)
        self._pins.check([*manager.req_to_blocks.values(), *deferred, *self._copying.held])
        assert self._children.keys() == {child.request_id for child in self._child_of.values()}
        log.debug("%s", self.lazyrag_stats())


def _error_output(request: Request, error: LazyRAGError) -> EngineCoreOutput:
    return _output(request, wire.error_to_params(error), str(error))


def _output(request: Request, params: dict[str, Any], stop_reason: str | None = None) -> EngineCoreOutput:
    """The only answer to a request that was not run."""
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        stop_reason=stop_reason,
        kv_transfer_params=params,
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )


class LazyScheduler(LazyMixin, Scheduler):
    """For engines without asynchronous scheduling (the CPU platform)."""


class LazyAsyncScheduler(LazyMixin, AsyncScheduler):
    """For engines with asynchronous scheduling (the default on GPUs)."""
