"""Our vLLM KV connector: chunk KV between the engine's pool and the disk, for child requests only.

A child computes one chunk (backend/plugin/requests.py) and names it in `extra_args["lazyrag_child"]`. No other request
is looked up, loaded or saved: its tokens are no prompt of their own, so nothing could be stored under them.

    scheduler   look up: every rank's file is there and its header fits            get_num_new_matched_tokens
                plan the step's loads and saves                                     build_connector_meta
    worker      read, verify, and only then write K and V into the child's blocks   start_load_kv
                copy out and write the files of chunks that became complete         wait_for_save
    scheduler   what arrived becomes visible to other requests; what failed never does

Loads are what vLLM calls asynchronous: the child's blocks get their hashes after the worker has reported the load, so a
load that fails has nobody to mislead. The child then ends with an error (kv_load_failure_policy "fail", vLLM's default)
and the scheduler makes another one, which may only save. A save is done before the step's output leaves the worker:
once a warming request is answered, its chunks are durable.

Files hold a chunk's valid tokens as the cache has them: K rotated at the chunk's own positions, pads left out. They do
not depend on the block size.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from lazyrag.backend import wire
from lazyrag.backend.tiers.disk import Bytes, DiskTier, Form
from lazyrag.errors import ConfigError, StoreError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint8: "U8",
}
"""Of the cache tensor, by safetensors' names."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One chunk, or its tail, between the disk and blocks of the pool.

    Attributes:
        request_id: the child's.
        key, namespace: the chunk's, as `DiskTier` takes them.
        num_tokens: valid tokens of the chunk.
        first_token: of these, the first that is moved; it stands at the start of `block_ids[0]`.
        block_ids: the blocks of tokens [first_token, num_tokens).
    """

    request_id: str
    key: str
    namespace: str
    num_tokens: int
    first_token: int
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class Transfers(KVConnectorMetadata):
    """What the workers are to do in one step. Filled by the scheduler half."""

    loads: list[Transfer] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)


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


@dataclass(slots=True)
class _Child:
    """A scheduled child.

    Attributes:
        request: vLLM's; it knows how far the child is.
        block_ids: all its blocks in order, kept up to date from step to step.
    """

    request: Request
    block_ids: list[int]


class LazyRAGConnector(KVConnectorBase_V1, SupportsHMA):
    """Both halves; vLLM makes one with the scheduler's role and one in each worker.

    Every engine that uses it has one group of KV layers (backend/plugin/checks.py); `SupportsHMA` keeps vLLM from
    regrouping them for the connector's sake.

    `kv_connector_extra_config`: `root` and `fingerprint` as `DiskTier` takes them, optionally `budget_bytes`.

    Attributes:
        counters: scheduler half: `DiskTier.counters` of all processes since the engine's start.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.counters: Counter[str] = Counter()
        self._block_size: int = vllm_config.cache_config.block_size
        self._tier = _tier(vllm_config, role)
        # Scheduler half.
        self._children: dict[str, _Child] = {}
        self._loads: list[Transfer] = []
        # Worker half.
        self._caches: dict[str, torch.Tensor] = {}
        self._arrived: set[str] = set()
        self._unreadable: set[int] = set()
        if role == KVConnectorRole.SCHEDULER:
            self._tier.sweep()

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a save that is lost to a preemption is made when the chunk is computed again."""
        return False

    # ---------------------------------------------------------------- scheduler half

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens beyond the resident ones can be loaded, and whether they arrive between steps (always)."""
        child = _child(request)
        if child is None or not child["may_load"]:
            return 0, False
        end = child["first_token"] + self._padded(child["num_tokens"])
        if not child["first_token"] <= num_computed_tokens < end:
            return 0, False
        if not self._tier.contains(child["key"], namespace=_namespace(request)):
            return 0, False
        return end - num_computed_tokens, True

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Note a child's blocks, and its load if it has one."""
        child = _child(request)
        if child is None:
            return
        block_ids = list(blocks.get_block_ids()[0])
        self._children[request.request_id] = _Child(request, block_ids)
        if num_external_tokens:
            skipped = self._padded(child["num_tokens"]) - num_external_tokens
            self._loads.append(self._transfer(request, child, block_ids, skipped))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Transfers:
        """The step's loads, and the saves of chunks whose last token it computes."""
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, new_block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            # A resumed request has been through update_state_after_alloc with all its blocks.
            if request_id in self._children and new_block_ids and request_id not in cached.resumed_req_ids:
                self._children[request_id].block_ids += new_block_ids[0]
        transfers = Transfers(loads=self._loads)
        self._loads = []
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            if request_id not in self._children:
                continue
            request, block_ids = self._children[request_id].request, self._children[request_id].block_ids
            child = _child(request)
            assert child is not None
            end = child["first_token"] + child["num_tokens"]
            if request.num_computed_tokens < end <= request.num_computed_tokens + num_tokens:
                transfers.saves.append(self._transfer(request, child, block_ids, 0))
        return transfers

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a child. Its blocks are free to go: saves never outlive their step."""
        self._children.pop(request.request_id, None)
        return False, None

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Sum the workers' counters up, and those of the look-ups."""
        if connector_output.kv_connector_stats is not None:
            self.counters.update(connector_output.kv_connector_stats.data)
        self.counters.update(self._tier.counters)
        self._tier.counters.clear()

    def _transfer(self, request: Request, child: wire.WireChild, block_ids: list[int], first_token: int) -> Transfer:
        start = (child["first_token"] + first_token) // self._block_size
        end = (child["first_token"] + self._padded(child["num_tokens"])) // self._block_size
        return Transfer(
            request_id=request.request_id,
            key=child["key"],
            namespace=_namespace(request),
            num_tokens=child["num_tokens"],
            first_token=first_token,
            block_ids=tuple(block_ids[start:end]),
        )

    def _padded(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size) * self._block_size

    # ---------------------------------------------------------------- worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's cache tensors, one a layer.

        Raises:
            UnsupportedError: another engine of this process has registered its own; vLLM keeps one connector a process.
        """
        if self._caches:
            raise UnsupportedError(
                "A second engine in this process cannot use chunk KV on disk:",
                why="vLLM would give it the first engine's KV connector.",
                fix="Run it in another process (leave VLLM_ENABLE_V1_MULTIPROCESSING at 1), or without a disk tier.",
            )
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load the step's chunks. Nothing is written into the cache that was not verified as a whole."""
        for load in self._transfers().loads:
            self._arrived.add(load.request_id)
            try:
                self._load(load)
            except StoreError:
                self._unreadable.update(load.block_ids)

    def wait_for_save(self) -> None:
        """Save the step's chunks; the forward pass has been submitted, copying waits for it."""
        for save in self._transfers().saves:
            form, data = self._copy_out(save)
            self._tier.save(save.key, form, data, namespace=save.namespace)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """No sends; the loads of this step, failed ones included."""
        arrived, self._arrived = self._arrived, set()
        return None, arrived or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks of this step's failed loads."""
        unreadable, self._unreadable = self._unreadable, set()
        return unreadable

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """The step's counters, None if there are none."""
        data = dict(self._tier.counters)
        self._tier.counters.clear()
        return TransferStats(data=data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Counters as they come back from another process."""
        return TransferStats(data=data or {})

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: no request of this step reads what this step loads."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing yet: chunks are copied out after the forward pass."""

    def _transfers(self) -> Transfers:
        transfers = self._get_connector_metadata()
        assert isinstance(transfers, Transfers)
        return transfers

    def _form(self, num_tokens: int) -> Form:
        cache = next(iter(self._caches.values()))
        _, _, heads, row = token_rows(cache).shape
        return Form(tuple(self._caches), DTYPES[cache.dtype], (num_tokens, heads, row))

    def _places(self, transfer: Transfer) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and offset in a cache tensor of each token that is moved, both [tokens].

        The tensor's blocks may be smaller than the scheduler's: an attention backend may split them.
        """
        cache = token_rows(next(iter(self._caches.values())))
        tokens = torch.arange(transfer.num_tokens - transfer.first_token)
        blocks = torch.tensor(transfer.block_ids)
        slots = blocks[tokens // self._block_size] * self._block_size + tokens % self._block_size
        size = cache.shape[1]
        return (slots // size).to(cache.device), (slots % size).to(cache.device)

    def _load(self, load: Transfer) -> None:
        form, places = self._form(load.num_tokens), self._places(load)
        data = torch.from_numpy(self._tier.load(load.key, form, namespace=load.namespace))
        for cache, layer in zip(self._caches.values(), data.chunk(len(form.layers)), strict=True):
            rows = layer.view(cache.dtype).view(form.shape)[load.first_token :]
            token_rows(cache)[places] = rows.to(cache.device)

    def _copy_out(self, save: Transfer) -> tuple[Form, Bytes]:
        form, places = self._form(save.num_tokens), self._places(save)
        layers = torch.stack([token_rows(cache)[places] for cache in self._caches.values()])
        return form, layers.view(torch.uint8).flatten().cpu().numpy()


def token_rows(cache: torch.Tensor) -> torch.Tensor:
    """A layer's cache, [blocks, heads, tokens of a block, row], as [blocks, tokens of a block, heads, row].

    A row is K and V of one token and head side by side, in the attention backend's order. This is the layout of vLLM's
    FlashAttention and Triton backends and of our CPU one. (vLLM's own CPU backend mixes the tokens of a block.)
    """
    return cache.transpose(1, 2)


def _tier(vllm_config: VllmConfig, role: KVConnectorRole) -> DiskTier:
    config: Mapping[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
    for name in ("root", "fingerprint"):
        if not config.get(name):
            raise ConfigError(
                f"The KV connector has no {name}.",
                fix=f'Put "{name}" into kv_connector_extra_config, or use LocalEngine.',
            )
    parallel = vllm_config.parallel_config
    return DiskTier(
        config["root"],
        config["fingerprint"],
        config.get("budget_bytes"),
        rank=parallel.rank if role == KVConnectorRole.WORKER else 0,
        ranks=parallel.world_size,
    )


def _child(request: Request) -> wire.WireChild | None:
    """What a child says of its chunk; None for every other request, whatever its client wrote."""
    if not request.request_id.startswith(wire.CHILD_PREFIX) or request.sampling_params is None:
        return None
    child: wire.WireChild | None = (request.sampling_params.extra_args or {}).get(wire.CHILD)
    return child


def _namespace(request: Request) -> str:
    return request.cache_salt or ""
