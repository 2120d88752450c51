"""Both halves of the KV connector under the real scheduler, with a worker that computes a known row for each token.

The stand-in for the model writes K and V that say what they are, NaN for pads, into a cache that is
NaN from the start. Before a request runs that reuses chunks, it compares every row of its segments with what the
chunk's own prefill gives: a chunk that was not computed, not loaded, or not of this prompt does not pass.
"""

import functools
import json
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

pytest.importorskip("vllm")

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from lazyrag.backend import control, wire
from lazyrag.backend.engine import PREFETCH_COUNTERS, TIER_COUNTERS
from lazyrag.backend.hashing import chunk_name
from lazyrag.backend.layout import Span
from lazyrag.backend.plugin.scheduler import LazyAsyncScheduler, LazyScheduler
from lazyrag.backend.tiers import connector, disk, mover, policy
from lazyrag.backend.tiers.connector import LazyRAGConnector
from lazyrag.backend.tiers.disk import DiskTier
from lazyrag.backend.tiers.transfers import Transfer
from lazyrag.errors import ConfigError, UnsupportedError

FINGERPRINT = "0123456789abcdef" * 4
LAYERS = ("model.layers.0.attn", "model.layers.1.attn")
HEADS, HEAD_SIZE, NUM_BLOCKS = 2, 4, 64

PREAMBLE = list(range(400, 419))
A, B, C = list(range(10, 47)), list(range(50, 82)), list(range(90, 95))
QUESTION = list(range(200, 209))
WARM = control.control_to_args(control.WARM)
"""What makes a request one that only warms."""


@functools.cache
def row(context: tuple[int, ...], layer: int, heads: range) -> torch.Tensor:
    """K and V of the last token of a context in one layer, [heads, 2 * HEAD_SIZE]; distinct for distinct arguments."""
    seeds = [crc32(f"{context} {layer} {head}".encode()) for head in heads]
    return torch.tensor(seeds, dtype=torch.float64).div(2**32).float()[:, None] + torch.arange(2 * HEAD_SIZE)


class Worker:
    """One rank: its heads of the cache, its half of the connector."""

    def __init__(
        self, config: VllmConfig, kv_config: KVCacheConfig, rank: int, ranks: int, block_size: int, dtype: torch.dtype
    ) -> None:
        self.heads = range(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
        shape = (NUM_BLOCKS * config.cache_config.block_size // block_size, len(self.heads), block_size, 2 * HEAD_SIZE)
        self.caches = {layer: torch.full(shape, torch.nan, dtype=dtype) for layer in LAYERS}
        config.parallel_config.rank = rank
        self.connector = LazyRAGConnector(config, KVConnectorRole.WORKER, kv_config)
        self.connector.register_kv_caches(self.caches)

    def slots(self, layer: str) -> torch.Tensor:
        return mover.token_rows(self.caches[layer]).flatten(0, 1)

    def write(self, slot: int, context: Sequence[int] | None) -> None:
        for number, layer in enumerate(LAYERS):
            block, offset = divmod(slot, self.caches[layer].shape[2])
            self.caches[layer][block, :, offset] = (
                torch.nan if context is None else row(tuple(context), number, self.heads)
            )

    def assert_holds(self, slots: Sequence[int], tokens: Sequence[int], before: Sequence[int]) -> None:
        for number, layer in enumerate(LAYERS):
            found = self.slots(layer)[torch.tensor(slots)]
            context = (*before, *tokens)
            rows = [row(context[: len(before) + i + 1], number, self.heads) for i in range(len(tokens))]
            torch.testing.assert_close(found, torch.stack(rows).to(found.dtype), rtol=0, atol=0)

    def transfer(self, metadata: Any, forward: Callable[[], None], *, loads_first: bool) -> KVConnectorOutput:
        """What vLLM's model runner does around a forward pass; 0.26 loads in front of it, 0.32 behind it."""
        connector = self.connector
        connector.bind_connector_metadata(pickle.loads(pickle.dumps(metadata)))
        if loads_first:
            connector.start_load_kv(None)
        forward()
        if not loads_first:
            connector.start_load_kv(None)
        connector.wait_for_save()
        output = KVConnectorOutput()
        output.finished_sending, output.finished_recving = connector.get_finished(set())
        output.invalid_block_ids = connector.get_block_ids_with_load_errors()
        output.kv_connector_stats = pickle.loads(pickle.dumps(connector.get_kv_connector_stats()))
        output.kv_connector_worker_meta = pickle.loads(pickle.dumps(connector.build_connector_worker_meta()))
        connector.clear_connector_metadata()
        return output


class Engine:
    """A scheduler with its connector and workers, stepped by hand.

    With a `depth` of 2 it is the asynchronous scheduler, and a step is scheduled before the last one's output is known.
    """

    def __init__(
        self,
        folder: Path,
        *,
        budget: int = 256,
        block_size: int = 16,
        kernel_block_size: int | None = None,
        ranks: int = 1,
        dtype: torch.dtype = torch.float32,
        loads_first: bool = False,
        depth: int = 1,
        extra: dict[str, Any] | None = None,
    ) -> None:
        settings = {"root": str(folder / "kv"), "fingerprint": FINGERPRINT, **(extra or {})}
        self.config = VllmConfig(
            model_config=ModelConfig(str(folder / "model"), skip_tokenizer_init=True, max_model_len=1024),
            cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=min(16, budget),
                max_num_batched_tokens=budget,
                max_model_len=1024,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            device_config=DeviceConfig("cpu"),
            additional_config={"lazyrag": {"debug": True}},
            kv_transfer_config=KVTransferConfig(
                kv_connector="LazyRAGConnector",
                kv_connector_module_path="lazyrag.backend.tiers.connector",
                kv_role="kv_both",
                kv_connector_extra_config=settings,
            ),
        )
        self.config.cache_config.num_gpu_blocks = NUM_BLOCKS
        self.config.parallel_config.world_size = ranks
        self.config.scheduler_config.async_scheduling = depth > 1  # the CPU platform switches it off
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=dtype)
        groups = [KVCacheGroupSpec(list(LAYERS), spec)]
        kv_config = KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        self.scheduler = (LazyAsyncScheduler if depth > 1 else LazyScheduler)(
            self.config, kv_config, StructuredOutputManager(self.config), block_size, log_stats=True
        )
        hash_function = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(block_size, hash_function)
        size = kernel_block_size or block_size
        self.workers = [Worker(self.config, kv_config, rank, ranks, size, dtype) for rank in range(ranks)]
        self.aggregator = KVOutputAggregator(ranks)
        self.loads_first = loads_first
        self.in_flight: deque[tuple[Any, Any]] = deque()
        self.depth = depth
        self.block_size = block_size
        self.known: list[tuple[list[int], list[int]]] = []
        """(chunk, preamble) of every chunk that was asked for."""
        self.loads: list[Transfer] = []
        self.saves: list[Transfer] = []
        self.asked: list[str] = []
        self.computed: dict[str, int] = {}
        """Tokens computed so far, by request."""
        self.reports: dict[str, dict[str, Any]] = {}
        self.errors: dict[str, str] = {}

    @property
    def disk(self) -> DiskTier:
        return self.scheduler.connector.disk

    @property
    def counters(self) -> dict[str, int]:
        return dict(self.scheduler.connector.counters)

    def ask(
        self, *chunks: list[int], name: str = "r", preamble: Sequence[int] = (), salt: str | None = None, **args: Any
    ) -> None:
        """Add a request: the preamble, the chunks with a literal between them, the question."""
        self.asked.append(name)
        self.scheduler.add_request(self.request(*chunks, name=name, preamble=preamble, salt=salt, **args))

    def request(
        self, *chunks: list[int], name: str = "r", preamble: Sequence[int] = (), salt: str | None = None, **args: Any
    ) -> Request:
        """As `ask`, without adding it."""
        prompt, spans = list(preamble), []
        for chunk in chunks:
            prompt += [300] * bool(spans)
            spans.append(Span(len(prompt), len(chunk)))
            prompt += chunk
            self.known.append((chunk, list(preamble)))
        if preamble:
            self.known.append((list(preamble), []))
        extra = {**wire.spans_to_args(spans, len(preamble)), **args}
        return Request(
            request_id=name,
            prompt_token_ids=prompt + QUESTION,
            sampling_params=SamplingParams(max_tokens=2, temperature=0, extra_args=extra or None),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=self.hasher,
        )

    def step(self) -> None:
        """One step, as vLLM's engine core makes it."""
        if self.scheduler.has_requests():
            self.in_flight.append(self.begin_step())
            if len(self.in_flight) < self.depth and self.in_flight[-1][0].num_scheduled_tokens:
                return
        self.end_step(*self.in_flight.popleft())

    def begin_step(self) -> tuple[Any, Any]:
        """Schedule a step and run it."""
        output = self.scheduler.schedule()
        self.loads += output.kv_connector_metadata.loads
        self.saves += output.kv_connector_metadata.saves
        names = list(output.num_scheduled_tokens)
        results = [
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[[7] if self.is_complete(name) else [] for name in names],
                kv_connector_output=worker.transfer(
                    output.kv_connector_metadata,
                    lambda worker=worker: self.forward(worker, output.num_scheduled_tokens),
                    loads_first=self.loads_first,
                ),
            )
            for worker in self.workers
        ]
        for name, count in output.num_scheduled_tokens.items():
            self.computed[name] = self.computed.get(name, 0) + count
        for save in output.kv_connector_metadata.saves:
            request = self.scheduler.requests[save.request_id]
            child = request.sampling_params.extra_args[wire.CHILD]
            assert request.num_computed_tokens >= child["first_token"] + child["num_tokens"], (
                "only whole chunks are saved"
            )
        return output, self.aggregator.aggregate(results)

    def end_step(self, output: Any, result: Any) -> None:
        """Let the scheduler know what came out."""
        for of_client in self.scheduler.update_from_output(output, result).values():
            for one in of_client.outputs:
                assert one.request_id in self.asked, "children are invisible"
                if str(one.finish_reason) == "error":
                    self.errors[one.request_id] = str(one.stop_reason)
                elif one.finish_reason is not None:
                    self.reports[one.request_id] = (one.kv_transfer_params or {}).get(wire.REPORT, {})

    def run(self, limit_s: float = 60) -> None:
        """Step until nothing is left to do, nor under way."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if not self.in_flight and not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"in {limit_s} s were not finished: {list(self.scheduler.requests)}")

    def empty_pool(self) -> None:
        """Nothing is resident any more, and nothing may be read that was."""
        assert self.scheduler.reset_prefix_cache(), "blocks leaked"
        for worker in self.workers:
            for cache in worker.caches.values():
                cache[:] = torch.nan

    def begin_operation(
        self, operation: str, *chunks: list[int], salt: str | None = None, name: str = "operation"
    ) -> None:
        """Have something done with chunks."""
        if operation == control.PREFETCH:
            self.ask(*chunks, name=name, salt=salt, **control.control_to_args(operation))
        else:
            self.ask(name=name, salt=salt, **control.control_to_args(operation, chunks))

    def operate(self, operation: str, *chunks: list[int], salt: str | None = None, name: str = "operation") -> None:
        """Have something done with chunks, and its answer come."""
        self.begin_operation(operation, *chunks, salt=salt, name=name)
        while name not in self.reports:
            self.step()

    @property
    def tiers(self) -> dict[str, dict[str, int]]:
        return self.scheduler.connector.report()

    def check_no_leak(self) -> None:
        """Nothing is under way, and the tiers let everything go."""
        connector = self.scheduler.connector
        assert not connector._jobs
        assert not any(worker.connector._mover.is_busy for worker in self.workers)
        assert not any(place.users for place in connector._shelf.places())
        connector._shelf.check()
        connector.reset_cache()
        assert connector._shelf.num_used_bytes == 0
        assert self.scheduler.reset_prefix_cache()

    def sources(self, name: str = "r") -> list[str]:
        return self.reports[name]["sources"]

    def chunk_tokens_computed(self) -> int:
        """Tokens that children computed, pads included."""
        return sum(count for name, count in self.computed.items() if name.startswith(wire.CHILD_PREFIX))

    # ------------------------------------------------------------ the stand-in for the model

    def is_complete(self, name: str) -> bool:
        request = self.scheduler.requests[name]
        return request.num_computed_tokens >= request.num_tokens

    def slots(self, name: str) -> list[int]:
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        return [block * self.block_size + offset for block in blocks for offset in range(self.block_size)]

    def forward(self, worker: Worker, num_scheduled_tokens: dict[str, int]) -> None:
        for name, count in num_scheduled_tokens.items():
            request, slots = self.scheduler.requests[name], self.slots(name)
            for position in range(request.num_computed_tokens - count, request.num_computed_tokens):
                worker.write(slots[position], self.context(request, position))
        for name in num_scheduled_tokens:
            request, slots = self.scheduler.requests[name], self.slots(name)
            layout = (request.sampling_params.extra_args or {}).get(wire.LAYOUT, {"segments": []})
            for first_block, _, num_tokens, *_ in layout["segments"]:
                start = first_block * self.block_size
                tokens = request.all_token_ids[start : start + num_tokens]
                before = next(before for chunk, before in self.known if chunk[:num_tokens] == tokens)
                worker.assert_holds(slots[start : start + num_tokens], tokens, before)

    def context(self, request: Request, position: int) -> list[int] | None:
        """What the KV at a position depends on: None for a pad, all tokens up to it for an ordinary request."""
        tokens = list(request.all_token_ids)
        if not request.request_id.startswith(wire.CHILD_PREFIX):
            return tokens[: position + 1]
        layout = (request.sampling_params.extra_args or {}).get(wire.LAYOUT)
        start = layout["suffix_block"] * self.block_size if layout else 0
        chunk, before = next(
            (chunk, before)
            for chunk, before in self.known
            if bool(before) == bool(layout) and tokens[start : start + len(chunk)] == chunk
        )
        index = position - start
        return [*before, *chunk[: index + 1]] if index < len(chunk) else None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": len(LAYERS),
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "dtype": "float32",
        "bos_token_id": 1,
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return tmp_path


def files(folder: Path) -> list[Path]:
    return sorted((folder / "kv").rglob("*.safetensors"))


def warmed(folder: Path, *chunks: list[int], preamble: Sequence[int] = (), **settings: Any) -> Engine:
    """An engine that has computed and saved these chunks."""
    engine = Engine(folder, **settings)
    engine.ask(*chunks, preamble=preamble)
    engine.run()
    return engine


def steps(engine: Engine, count: int = 30) -> None:
    """So many that whatever can end by then has ended."""
    for _ in range(count):
        engine.step()


ORDERS = {
    "loads behind the forward pass": {},
    "loads before it": {"loads_first": True},
    "loads behind it, asynchronous": {"depth": 2},
    "loads before it, asynchronous": {"loads_first": True, "depth": 2},
}


@pytest.fixture(params=ORDERS.values(), ids=ORDERS)
def order(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


# ---------------------------------------------------------------- save and load


def test_a_new_engine_loads_what_another_has_computed(folder: Path, order: dict[str, Any]) -> None:
    first = warmed(folder, A, B, C)
    assert first.sources() == ["computed"] * 3
    assert first.counters["saved"] == 3
    second = Engine(folder, **order)
    second.ask(B, A, C)
    second.run()
    assert second.sources() == ["disk"] * 3
    assert second.chunk_tokens_computed() == 0
    row_bytes = len(LAYERS) * HEADS * 2 * HEAD_SIZE * 4
    assert second.counters == {"loaded": 3, "loaded_bytes": (len(A) + len(B) + len(C)) * row_bytes}
    second.ask(A, name="again")
    second.run()
    assert second.sources("again") == ["hbm"]
    assert second.counters["loaded"] == 3


def test_loaded_pads_are_left_as_they_are(folder: Path) -> None:
    warmed(folder, A)
    engine = Engine(folder)
    engine.ask(A)
    engine.run()
    (load,) = engine.loads
    slots = [block * engine.block_size + offset for block in load.block_ids for offset in range(engine.block_size)]
    for worker in engine.workers:
        assert torch.isnan(worker.slots(LAYERS[0])[torch.tensor(slots[len(A) :])]).all()


@pytest.mark.parametrize("budget", [16, 24, 48])
def test_a_chunk_computed_in_several_steps_is_saved_once_it_is_whole(
    folder: Path, budget: int, order: dict[str, Any]
) -> None:
    first = Engine(folder, budget=budget, **order)
    first.ask(A, B, C)
    first.ask(B, A, name="other")
    first.run()
    assert len(first.saves) == first.counters["saved"] == 3
    second = Engine(folder, budget=budget, **order)
    second.ask(C, B, A)
    second.run()
    assert second.sources() == ["disk"] * 3


@pytest.mark.parametrize("extra", [{}, WARM], ids=["an ordinary request", "one that only warms"])
def test_a_chunk_is_on_disk_before_its_request_is_answered(folder: Path, extra: dict[str, Any]) -> None:
    engine = Engine(folder)
    engine.ask(A, B, **extra)
    while not engine.reports:
        engine.step()
    assert len(files(folder)) == 2


def test_chunks_behind_a_preamble_are_loaded_with_it(folder: Path) -> None:
    first = warmed(folder, A, B, preamble=PREAMBLE)
    assert first.counters["saved"] == 3
    second = Engine(folder)
    second.ask(B, A, preamble=PREAMBLE)
    second.run()
    assert second.sources() == ["disk"] * 2
    assert second.counters["loaded"] == 3
    assert second.chunk_tokens_computed() == 0
    second.ask(A, name="other preamble", preamble=PREAMBLE[:-1])
    second.run()
    assert second.sources("other preamble") == ["computed"]


def test_block_size_does_not_matter_to_what_was_saved(folder: Path) -> None:
    warmed(folder, A, B, C, block_size=16)
    second = Engine(folder, block_size=32)
    second.ask(A, B, C)
    second.run()
    assert second.sources() == ["disk"] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kv_of_two_bytes_comes_back_bit_for_bit(folder: Path, dtype: torch.dtype) -> None:
    warmed(folder, A, B, C, dtype=dtype)
    second = Engine(folder, dtype=dtype)
    second.ask(A, B, C)
    second.run()
    assert second.sources() == ["disk"] * 3


def test_an_attention_backend_may_split_the_blocks(folder: Path) -> None:
    warmed(folder, A, B, C, block_size=32, kernel_block_size=16)
    second = Engine(folder, block_size=32, kernel_block_size=8)
    second.ask(A, B, C)
    second.run()
    assert second.sources() == ["disk"] * 3


def test_only_the_evicted_tail_of_a_chunk_is_loaded(folder: Path) -> None:
    engine = warmed(folder, A)
    pool = engine.scheduler.kv_cache_manager.block_pool
    tail = [block.block_id for block in pool.blocks if block.block_hash is not None][2:]
    pool.evict_blocks(set(tail))
    for worker in engine.workers:
        for cache in worker.caches.values():
            cache[tail] = torch.nan
    engine.ask(A, name="again")
    engine.run()
    assert [(load.first_token, len(load.block_ids)) for load in engine.loads] == [(32, 1)]
    assert engine.sources("again") == ["disk"]


def test_two_requests_share_one_load(folder: Path) -> None:
    warmed(folder, A, B)
    engine = Engine(folder)
    engine.ask(A, B, name="one")
    engine.ask(B, A, name="two")
    engine.run()
    assert engine.sources("one") == ["disk"] * 2
    assert engine.sources("two") == ["hbm"] * 2
    assert engine.counters["loaded"] == 2


# ---------------------------------------------------------------- what must not reach the disk


def test_namespaces_do_not_share_files(folder: Path) -> None:
    warmed(folder, A)
    engine = Engine(folder)
    engine.ask(A, salt="tenant")
    engine.run()
    assert engine.sources() == ["computed"]
    assert len({file.parent.parent for file in files(folder)}) == 2


def test_requests_of_clients_never_reach_the_disk(folder: Path) -> None:
    """Not an ordinary one, not one with chunks, and not one that claims to be a child."""
    engine = Engine(folder)
    engine.ask(A)
    engine.ask(name="ordinary")
    forged = wire.WireChild(key="ab" * 16, first_token=0, num_tokens=9, may_load=True)
    engine.ask(name="forged", **{wire.CHILD: forged})
    engine.ask(name=f"{wire.CHILD_PREFIX}forged", **{wire.CHILD: forged})
    engine.run()
    assert len(files(folder)) == 1
    assert "ab" * 16 not in {file.stem for file in files(folder)}
    assert list(engine.errors) == [f"{wire.CHILD_PREFIX}forged"]


def test_the_connector_itself_answers_children_only(folder: Path) -> None:
    """Behind the scheduler, which lets no client's claim through: a second lock on the same door."""
    engine = warmed(folder, A)
    (file,) = files(folder)
    claim = wire.WireChild(key=file.stem, first_token=0, num_tokens=len(A), may_load=True)
    look_up = engine.scheduler.connector.get_num_new_matched_tokens
    assert look_up(engine.request(name=f"{wire.CHILD_PREFIX}0", **{wire.CHILD: claim}), 0) == (48, True)
    assert look_up(engine.request(name="client", **{wire.CHILD: claim}), 0) == (0, False)
    assert look_up(engine.request(name=f"{wire.CHILD_PREFIX}0"), 0) == (0, False)


@pytest.mark.parametrize(("resident", "loadable"), [(0, 0), (16, 0), (32, 48), (64, 16), (80, 0), (96, 0)])
def test_a_load_begins_where_the_resident_blocks_end(folder: Path, resident: int, loadable: int) -> None:
    """A chunk at [32, 80) of its child's prompt, behind a preamble that must be resident."""
    engine = warmed(folder, A)
    (file,) = files(folder)
    claim = wire.WireChild(key=file.stem, first_token=32, num_tokens=len(A), may_load=True)
    child = engine.request(name=f"{wire.CHILD_PREFIX}0", **{wire.CHILD: claim})
    assert engine.scheduler.connector.get_num_new_matched_tokens(child, resident) == (loadable, loadable > 0)


# ---------------------------------------------------------------- failures


def vanish(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between look-up and load every file disappears."""
    for worker in engine.workers:
        tier = worker.connector.disk
        load = tier.load

        def late(key: str, form: Any, *, namespace: str, out: Any, tier: DiskTier = tier, load: Any = load) -> Any:
            tier.delete(key, namespace=namespace)
            return load(key, form, namespace=namespace, out=out)

        monkeypatch.setattr(tier, "load", late)


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def num_tokens(file: Path) -> int:
    data = file.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])[LAYERS[0]]["shape"][0]


def test_a_file_that_vanishes_before_its_load_is_computed_for_everybody(
    folder: Path, order: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed(folder, A, B)
    engine = Engine(folder, **order)
    vanish(engine, monkeypatch)
    engine.ask(A, B, name="one")
    engine.ask(B, A, name="two")
    engine.ask(name="ordinary")
    engine.run()
    assert engine.sources("one") == ["computed"] * 2
    assert engine.sources("two") == ["hbm"] * 2
    assert [engine.reports[name]["children_loaded"] for name in ("one", "two")] == [0, 0]
    assert engine.reports["ordinary"] == {}
    assert not engine.errors
    assert "loaded" not in engine.counters
    assert len(files(folder)) == engine.counters["saved"] == 2


def test_damage_found_by_the_worker_is_computed_and_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    warmed(folder, A, B)
    flip(files(folder)[0], -1)
    engine = Engine(folder)
    engine.ask(A, B)
    engine.run()
    assert sorted(engine.sources()) == ["computed", "disk"]
    assert engine.counters["damaged"] == engine.counters["loaded"] == engine.counters["saved"] == 1
    assert sum("checksum" in record.message for record in caplog.records) == 1


def test_damage_found_at_look_up_is_computed_and_saved_anew(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    warmed(folder, A, B)
    flip(files(folder)[0], 40)
    engine = Engine(folder)
    engine.ask(A, B)
    engine.run()
    assert sorted(engine.sources()) == ["computed", "disk"]
    assert engine.counters["damaged"] == engine.counters["saved"] == engine.counters["loaded"] == 1
    third = Engine(folder)
    third.ask(A, B)
    third.run()
    assert third.sources() == ["disk"] * 2


@pytest.mark.parametrize("which", ["the preamble", "a chunk"])
def test_a_failed_load_behind_a_preamble_is_computed_behind_it(folder: Path, which: str) -> None:
    warmed(folder, A, B, preamble=PREAMBLE)
    (file,) = [
        file for file in files(folder) if num_tokens(file) == (len(PREAMBLE) if which == "the preamble" else len(A))
    ]
    flip(file, -1)
    engine = Engine(folder)
    engine.ask(A, B, preamble=PREAMBLE)
    engine.run()
    assert engine.sources() == (["disk"] * 2 if which == "the preamble" else ["computed", "disk"])
    assert engine.counters["damaged"] == 1


def test_a_full_disk_costs_no_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(folder)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lazyrag.backend.tiers.disk._write", full)
    engine.ask(A, B)
    engine.run()
    assert engine.sources() == ["computed"] * 2
    assert not files(folder)


def test_a_preempted_child_is_saved_from_the_blocks_it_has_in_the_end(folder: Path) -> None:
    engine = Engine(folder, budget=16)
    engine.ask(A)
    engine.step()
    (child,) = engine.scheduler.running
    engine.scheduler.running.remove(child)
    engine.scheduler._preempt_request(child, 0.0)
    engine.ask(name="takes the freed blocks")
    engine.run()
    assert engine.counters["saved"] == 1
    second = Engine(folder)
    second.ask(A)
    second.run()
    assert second.sources() == ["disk"]


# ---------------------------------------------------------------- several ranks


def test_each_rank_stores_its_heads(folder: Path) -> None:
    warmed(folder, A, B, ranks=2)
    assert len(files(folder)) == 4
    engine = Engine(folder, ranks=2)
    engine.ask(B, A)
    engine.run()
    assert engine.sources() == ["disk"] * 2
    assert engine.counters["loaded"] == 4
    assert warmed(folder, A).sources() == ["computed"]


@pytest.mark.parametrize("damage", ["gone", "flipped"])
def test_one_ranks_missing_file_is_a_miss_for_all(folder: Path, damage: str) -> None:
    warmed(folder, A, ranks=2)
    (file,) = [file for file in files(folder) if ".1of2" in file.name]
    file.unlink() if damage == "gone" else flip(file, -1)
    engine = Engine(folder, ranks=2)
    engine.ask(A)
    engine.run()
    assert engine.sources() == ["computed"]


# ---------------------------------------------------------------- host memory

HOST_ONLY = {"root": None, "host_bytes": 1 << 20}
BOTH = {"host_bytes": 1 << 20}
ROW_BYTES = len(LAYERS) * HEADS * 2 * HEAD_SIZE * 4


def test_what_the_pool_has_lost_comes_from_host_memory(folder: Path, order: dict[str, Any]) -> None:
    engine = warmed(folder, A, B, C, extra=HOST_ONLY, **order)
    assert engine.tiers["host"]["chunks"] == engine.tiers["host"]["saves"] == 3
    engine.empty_pool()
    engine.ask(C, B, A, name="again")
    engine.run()
    assert engine.sources("again") == ["host"] * 3
    assert (engine.tiers["host"]["hits"], engine.tiers["host"]["loads"]) == (3, 3)
    engine.ask(A, name="hot")
    engine.run()
    assert engine.sources("hot") == ["hbm"]
    assert not files(folder)
    engine.check_no_leak()


@pytest.mark.parametrize(
    "settings",
    [{"dtype": torch.bfloat16}, {"block_size": 32, "kernel_block_size": 16}, {"ranks": 2}, {"budget": 16}],
    ids=str,
)
def test_host_memory_holds_any_shape(folder: Path, settings: dict[str, Any]) -> None:
    engine = warmed(folder, A, B, C, extra=HOST_ONLY, **settings)
    engine.empty_pool()
    engine.ask(B, C, A, name="again")
    engine.run()
    assert engine.sources("again") == ["host"] * 3
    engine.check_no_leak()


def test_what_is_loaded_from_disk_is_in_host_memory_from_then_on(folder: Path, order: dict[str, Any]) -> None:
    warmed(folder, A, B, preamble=PREAMBLE)
    engine = Engine(folder, extra=BOTH, **order)
    engine.ask(A, B, preamble=PREAMBLE)
    engine.run()
    assert engine.sources() == ["disk"] * 2
    engine.empty_pool()
    engine.ask(B, A, preamble=PREAMBLE, name="again")
    engine.run()
    assert engine.sources("again") == ["host"] * 2
    assert engine.tiers["disk"]["loads"] == engine.tiers["host"]["loads"] == 3
    engine.check_no_leak()


def test_a_request_takes_each_chunk_from_where_it_is(folder: Path) -> None:
    warmed(folder, A)
    engine = Engine(folder, extra=BOTH)
    engine.ask(B, name="to host memory")
    engine.run()
    engine.empty_pool()
    engine.ask(C, name="to the pool")
    engine.run()
    engine.ask(A, B, C, list(range(420, 440)), name="mixed")
    engine.run()
    assert engine.sources("mixed") == ["disk", "host", "hbm", "computed"]
    engine.check_no_leak()


def test_host_memory_keeps_to_its_budget(folder: Path) -> None:
    budget = (len(A) + len(B)) * ROW_BYTES + 1024
    engine = Engine(folder, extra={"host_bytes": budget, "policy": "lru"})
    chunks = [[100 + n] * 30 + list(range(n, n + 5)) for n in range(6)]
    for n, chunk in enumerate(chunks):
        engine.ask(chunk, name=f"{n}")
        engine.run()
        assert engine.tiers["host"]["bytes"] <= budget
    assert engine.tiers["host"]["evictions"] == 4
    engine.empty_pool()
    engine.ask(chunks[5], chunks[0], name="again")
    engine.run()
    assert engine.sources("again") == ["host", "disk"]
    engine.check_no_leak()


def test_namespaces_do_not_share_host_memory(folder: Path) -> None:
    engine = warmed(folder, A, extra=HOST_ONLY)
    engine.empty_pool()
    engine.ask(A, name="other", salt="tenant")
    engine.run()
    assert engine.sources("other") == ["computed"]
    assert engine.tiers["host"]["chunks"] == 2


def test_chunks_are_not_ready_and_blocks_not_free_before_a_copy_has_ended(
    folder: Path, order: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device's copies outlast the step. Here they are made at once, and end when the test says so."""
    engine = Engine(folder, extra=HOST_ONLY, **order)
    gate = {"open": False}
    ended = mover._Copying.ended
    monkeypatch.setattr(mover._Copying, "ended", lambda self: ended(self) if gate["open"] else None)
    pool = engine.scheduler.kv_cache_manager.block_pool

    engine.ask(A)
    steps(engine)
    assert engine.saves
    assert not engine.reports, "the answer waits for the save"
    assert all(pool.blocks[block].ref_cnt for block in engine.saves[0].block_ids)
    assert engine.scheduler.has_requests(), "the engine goes on looking"
    gate["open"] = True
    engine.run()
    assert engine.sources() == ["computed"]
    assert not any(pool.blocks[block].ref_cnt for block in engine.saves[0].block_ids)
    engine.empty_pool()
    gate["open"] = False
    engine.ask(A, name="again")
    engine.ask(name="beside it")
    steps(engine)
    assert "beside it" in engine.reports
    assert "again" not in engine.reports
    gate["open"] = True
    engine.run()
    assert engine.sources("again") == ["host"]
    engine.check_no_leak()


def test_an_answer_waits_until_what_was_computed_for_it_is_on_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(folder, extra=BOTH)
    may_write = hold_writes(monkeypatch)
    engine.ask(A)
    steps(engine)
    assert not engine.reports
    may_write.set()
    engine.run()
    assert len(files(folder)) == 1
    engine.check_no_leak()


def test_who_warms_a_chunk_waits_until_it_is_on_disk_whoever_computed_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(folder, extra=BOTH)
    may_write = hold_writes(monkeypatch)
    engine.ask(A)
    steps(engine)
    engine.ask(A, name="warms", **control.control_to_args(control.WARM))
    engine.ask(A, name="asks")
    steps(engine)
    assert list(engine.reports) == ["asks"]
    assert not files(folder)
    may_write.set()
    engine.run()
    assert engine.sources("warms") == ["hbm"]
    engine.check_no_leak()


# ---------------------------------------------------------------- failures with host memory


def test_a_full_disk_leaves_host_memory_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(folder, extra=BOTH)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "_write", full)
    engine.ask(A, B)
    engine.run()
    assert engine.sources() == ["computed"] * 2
    engine.empty_pool()
    engine.ask(A, B, name="again")
    engine.run()
    assert engine.sources("again") == ["host"] * 2
    assert not files(folder)
    engine.check_no_leak()


@pytest.mark.parametrize("ranks", [1, 2])
def test_damage_that_is_found_on_the_way_to_host_memory_stays_out_of_it(folder: Path, ranks: int) -> None:
    warmed(folder, A, B, ranks=ranks)
    flip(files(folder)[0], -1)
    engine = Engine(folder, extra=BOTH, ranks=ranks)
    engine.ask(A, B)
    engine.run()
    assert sorted(engine.sources()) == ["computed", "disk"]
    engine.empty_pool()
    engine.ask(B, A, name="again")
    engine.run()
    of_b, of_a = engine.sources("again")
    assert of_a == "host", "what was computed instead of the damaged file"
    # With several ranks, the load that failed may have ended B's before each had confirmed its place.
    assert of_b == "host" or (ranks > 1 and of_b == "disk")
    engine.check_no_leak()


def test_a_file_that_vanishes_before_its_load_gives_its_place_back(
    folder: Path, order: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed(folder, A, B)
    engine = Engine(folder, extra=BOTH, **order)
    vanish(engine, monkeypatch)
    engine.ask(A, B, name="one")
    engine.ask(B, A, name="two")
    engine.run()
    assert engine.sources("one") == ["computed"] * 2
    assert engine.tiers["disk"]["failures"] == 2
    assert engine.tiers["host"]["chunks"] == 2, "what was computed instead"
    engine.check_no_leak()


# ---------------------------------------------------------------- load or compute


@pytest.mark.parametrize("tier", ["disk", "host"])
@pytest.mark.parametrize(("rate", "source"), [(1e12, None), (1.0, "computed")], ids=["fast", "slow"])
def test_a_chunk_is_loaded_where_that_is_faster_than_computing_it(
    folder: Path, tier: str, rate: float, source: str | None
) -> None:
    engine = warmed(folder, A, extra={**BOTH, "speeds": {tier: rate, "compute": 1e3}})
    if tier == "disk":
        engine.scheduler.connector.reset_cache()
    engine.empty_pool()
    engine.ask(A, name="again")
    engine.run()
    assert engine.sources("again") == [source or tier]
    assert engine.tiers[tier]["skipped"] == (source is not None)


@pytest.mark.parametrize("tier", ["disk", "host"])
@pytest.mark.parametrize("slow", ["loading", "computing"])
def test_what_is_measured_to_be_slower_is_left_alone(
    folder: Path, tier: str, slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody tells the engine any speed; what is slow here takes two milliseconds a token more."""
    monkeypatch.setattr(policy, "LEAST_BYTES", 1)
    monkeypatch.setattr(policy, "LEAST_TOKENS", 1)
    pause_s = 2e-3 * len(A)
    engine = Engine(folder, extra=BOTH)
    if slow == "computing":
        forward = engine.forward

        def compute(worker: Worker, num_scheduled_tokens: dict[str, int]) -> None:
            time.sleep(2e-3 * sum(num_scheduled_tokens.values()))
            forward(worker, num_scheduled_tokens)

        monkeypatch.setattr(engine, "forward", compute)
    elif tier == "disk":
        load = engine.workers[0].connector.disk.load

        def read(*args: Any, **kwargs: Any) -> Any:
            time.sleep(pause_s)
            return load(*args, **kwargs)

        monkeypatch.setattr(engine.workers[0].connector.disk, "load", read)
    else:
        rows = mover.Mover._places

        def places(self: mover.Mover, transfer: Transfer) -> Any:
            self._lanes.pause_s = pause_s if transfer.from_host else 0.0
            return rows(self, transfer)

        close = mover._Copying.close
        monkeypatch.setattr(mover.Mover, "_places", places)
        lanes = engine.workers[0].connector._mover._lanes
        monkeypatch.setattr(mover._Copying, "close", lambda self: (time.sleep(lanes.pause_s), close(self)))

    found = []
    for turn in range(3):
        engine.ask(A, name=f"{turn}")
        engine.run()
        found += engine.sources(f"{turn}")
        engine.empty_pool()
        if tier == "disk":
            engine.scheduler.connector.reset_cache()
    # The first load finds out: where computing is known and loading is not, a start value is believed.
    assert found == ["computed", tier, tier if slow == "computing" else "computed"]


def test_files_are_read_while_the_model_computes(
    folder: Path, order: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed(folder, A)
    engine = Engine(folder, **order)
    is_reading, load, forward = threading.Event(), engine.workers[0].connector.disk.load, engine.forward

    def read(*args: Any, **kwargs: Any) -> Any:
        is_reading.set()
        return load(*args, **kwargs)

    def compute(*args: Any) -> None:
        assert is_reading.wait(30), "a pass that needs no load has to end before the load begins"
        forward(*args)

    monkeypatch.setattr(engine.workers[0].connector.disk, "load", read)
    monkeypatch.setattr(engine, "forward", compute)
    engine.ask(A, B)
    engine.run()
    assert engine.sources() == ["disk", "computed"]


def test_reads_without_a_place_in_host_memory_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them needs a buffer of its own until it is in the pool."""
    warmed(folder, A, B, C)
    monkeypatch.setattr(connector, "MOST_UNPLACED_BYTES", 0)
    engine = Engine(folder)
    engine.ask(A, B, C)
    begun = []
    while not engine.reports:
        before = len(engine.loads)
        engine.step()
        begun.append(len(engine.loads) - before)
    assert max(begun) == 1
    assert engine.sources() == ["disk"] * 3
    engine.run()


# ---------------------------------------------------------------- prefetch


def test_prefetched_chunks_are_in_the_pool_when_their_request_comes(folder: Path, order: dict[str, Any]) -> None:
    warmed(folder, A, B)
    engine = Engine(folder, extra=BOTH, **order)
    engine.operate(control.PREFETCH, A, B, C)
    engine.run()
    engine.operate(control.PREFETCH, B, A, name="resident already")
    loads = len(engine.loads)
    engine.ask(B, A, C)
    engine.run()
    assert engine.sources() == ["hbm", "hbm", "computed"], "nothing is computed for a prefetch"
    assert len(engine.loads) == loads == 2
    assert dict(engine.scheduler._prefetches) == {"asked": 5, "used": 2, "late": 0, "wasted": 0}
    engine.check_no_leak()


def test_a_prefetch_loads_where_computing_would_be_faster(folder: Path) -> None:
    """It costs nobody time, and a prefetch computes nothing."""
    engine = warmed(folder, A, extra={**BOTH, "speeds": {"host": 1.0, "disk": 1.0, "compute": 1e6}})
    engine.empty_pool()
    engine.operate(control.PREFETCH, A)
    engine.run()
    assert len(engine.loads) == 1
    engine.ask(A, name="later")
    engine.run()
    assert engine.sources("later") == ["hbm"]
    engine.check_no_leak()


def hold_reads(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Let no file that was read arrive before the second event is set; the first one says that one was read."""
    tier = engine.workers[0].connector.disk
    was_read, may_arrive, load = threading.Event(), threading.Event(), tier.load

    def slowly(*args: Any, **kwargs: Any) -> Any:
        data = load(*args, **kwargs)
        was_read.set()
        assert may_arrive.wait(30)
        return data

    monkeypatch.setattr(tier, "load", slowly)
    return was_read, may_arrive


def test_a_request_that_comes_meanwhile_shares_the_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warmed(folder, A)
    engine = Engine(folder, extra=BOTH)
    _, may_arrive = hold_reads(engine, monkeypatch)
    engine.operate(control.PREFETCH, A)
    engine.ask(A)
    engine.step()
    may_arrive.set()
    engine.run()
    assert engine.sources() == ["hbm"]
    assert len(engine.loads) == 1
    assert engine.scheduler._prefetches["late"] == 1
    engine.check_no_leak()


def test_what_was_prefetched_for_nobody_is_counted(folder: Path) -> None:
    engine = warmed(folder, A, extra=HOST_ONLY)
    engine.empty_pool()
    engine.operate(control.PREFETCH, A)
    engine.run()
    engine.empty_pool()
    engine.ask(A, name="too late")
    engine.run()
    assert engine.sources("too late") == ["host"]
    assert engine.scheduler._prefetches["wasted"] == 1


def test_a_prefetch_takes_no_block_that_a_waiting_request_needs(folder: Path) -> None:
    """It goes to host memory then."""
    warmed(folder, A, B)
    engine = Engine(folder, extra=BOTH, budget=16)
    long = [list(range(n, n + 190)) for n in (0, 200, 100, 300, 10, 210, 110, 290)]
    engine.ask(*long[:4], name="large")
    engine.ask(*long[4:], name="waits")
    engine.operate(control.PREFETCH, A, B)
    assert not engine.loads
    engine.run()
    assert engine.tiers["host"]["chunks"] >= 2
    engine.empty_pool()
    engine.ask(A, B, name="again")
    engine.run()
    assert engine.sources("again") == ["host"] * 2
    engine.check_no_leak()


def test_a_damaged_file_is_no_harm_to_a_prefetch(folder: Path) -> None:
    warmed(folder, A, B)
    flip(files(folder)[0], -1)
    engine = Engine(folder, extra=BOTH)
    engine.operate(control.PREFETCH, A, B)
    engine.run()
    engine.ask(A, B)
    engine.run()
    assert sorted(engine.sources()) == ["computed", "hbm"]
    engine.check_no_leak()


# ---------------------------------------------------------------- forget, and keep


def blocks_of(engine: Engine, *chunks: list[int]) -> list[int]:
    """The blocks that hold chunks now."""
    found = []
    for child in engine.loads + engine.saves:
        found += child.block_ids
    return sorted(set(found))


def test_a_forgotten_chunk_is_in_no_tier(folder: Path, order: dict[str, Any]) -> None:
    engine = warmed(folder, A, B, extra=BOTH, **order)
    blocks = blocks_of(engine, A, B)
    (worker,) = engine.workers
    memory = worker.connector._mover._memory
    assert len(files(folder)) == 2
    assert memory.at(0, 1 << 20).any()
    engine.operate(control.FORGET, A, B)
    engine.run()
    assert files(folder) == []
    assert engine.tiers["host"]["chunks"] == engine.tiers["host"]["bytes"] == 0
    assert not memory.at(0, 1 << 20).any(), "host memory is cleared"
    for layer in LAYERS:
        assert not worker.caches[layer][blocks].any(), "blocks are wiped"
    engine.ask(A, B, name="again")
    engine.run()
    assert engine.sources("again") == ["computed"] * 2
    engine.check_no_leak()


def test_other_chunks_and_other_tenants_keep_theirs(folder: Path) -> None:
    engine = warmed(folder, A, B, extra=BOTH)
    engine.ask(A, name="tenant", salt="tenant")
    engine.run()
    engine.operate(control.FORGET, A)
    engine.ask(A, B, name="mine")
    engine.ask(A, name="theirs", salt="tenant")
    engine.run()
    assert engine.sources("mine") == ["computed", "hbm"]
    assert engine.sources("theirs") == ["hbm"]
    engine.operate(control.FORGET, A, salt="tenant", name="theirs, too")
    engine.empty_pool()
    engine.ask(A, B, name="mine again")
    engine.ask(A, name="theirs again", salt="tenant")
    engine.run()
    assert engine.sources("mine again") == ["host"] * 2
    assert engine.sources("theirs again") == ["computed"]


def test_a_chunk_that_is_forgotten_on_its_way_arrives_nowhere(
    folder: Path, order: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed(folder, A)
    engine = Engine(folder, extra=BOTH, **order)
    was_read, may_arrive = hold_reads(engine, monkeypatch)
    engine.operate(control.PREFETCH, A)
    while not engine.loads:
        engine.step()
    assert was_read.wait(30)
    engine.begin_operation(control.FORGET, A, name="forget")
    steps(engine)
    assert "forget" not in engine.reports, "while a copy is under way, nobody says that the chunk is gone"
    may_arrive.set()
    engine.run()
    assert "forget" in engine.reports
    assert files(folder) == []
    assert engine.tiers["host"]["chunks"] == engine.tiers["host"]["bytes"] == 0
    engine.ask(A, name="again")
    engine.run()
    assert engine.sources("again") == ["computed"]
    engine.check_no_leak()


def hold_writes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no file be written before the event is set."""
    may_write, write = threading.Event(), disk._write

    def slowly(*args: Any) -> None:
        assert may_write.wait(30)
        write(*args)

    monkeypatch.setattr(disk, "_write", slowly)
    return may_write


def test_no_file_of_a_forgotten_chunk_comes_after_the_answer(
    folder: Path, order: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(folder, extra=BOTH, **order)
    may_write = hold_writes(monkeypatch)
    engine.ask(A)
    steps(engine)
    engine.begin_operation(control.FORGET, A)
    steps(engine)
    assert "operation" not in engine.reports
    may_write.set()
    while "operation" not in engine.reports:
        engine.step()
    assert files(folder) == []
    engine.run()
    assert files(folder) == []
    engine.check_no_leak()


def test_what_begins_a_forgotten_chunk_keeps_its_own_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of its own may be the first sentence of another one."""
    head = A[:20]
    engine = Engine(folder, extra=BOTH)
    may_write = hold_writes(monkeypatch)
    engine.ask(head)
    steps(engine)
    engine.begin_operation(control.FORGET, A)
    may_write.set()
    engine.run()
    assert len(files(folder)) == 1
    engine.empty_pool()
    engine.ask(head, name="again")
    engine.run()
    assert engine.sources("again") == ["disk"], "host memory is cleared: it may have held a part of the forgotten chunk"
    engine.check_no_leak()


def test_a_chunk_that_is_wanted_again_while_it_is_forgotten_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(folder, extra=BOTH)
    may_write = hold_writes(monkeypatch)
    engine.ask(A, name="first")
    steps(engine)
    engine.begin_operation(control.FORGET, A)
    steps(engine)
    engine.ask(A, name="again")
    steps(engine)
    may_write.set()
    engine.run()
    assert engine.sources("again") == ["computed"]
    assert len(files(folder)) == 1, "its request was answered, so its chunk is on disk"
    engine.check_no_leak()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_before", range(5))
@pytest.mark.parametrize("num_between", range(1, 4))
@pytest.mark.parametrize("extra", [{}, WARM], ids=["ordinary requests", "some that only warm"])
def test_a_chunk_that_is_wanted_again_at_any_time_is_kept(
    folder: Path, depth: int, num_before: int, num_between: int, extra: dict[str, Any]
) -> None:
    """Whatever of it is computed, or there, for a request that came before it was forgotten."""
    engine = Engine(folder, extra=BOTH, budget=16, depth=depth)
    engine.ask(A, B, name="first", **extra)
    for _ in range(num_before):
        engine.step()
    engine.begin_operation(control.FORGET, A)
    for _ in range(num_between):
        if engine.in_flight or engine.scheduler.has_requests():
            engine.step()
    engine.ask(A, name="again", **extra)
    engine.run()
    assert len(files(folder)) == 2
    engine.empty_pool()
    engine.ask(A, B, name="later")
    engine.run()
    assert "computed" not in engine.sources("later")
    engine.check_no_leak()


def test_who_wants_a_chunk_again_does_not_use_what_loads_for_those_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed(folder, A)
    engine = Engine(folder, extra=BOTH)
    was_read, may_arrive = hold_reads(engine, monkeypatch)
    engine.operate(control.PREFETCH, A)
    while not engine.loads:
        engine.step()
    assert was_read.wait(30)
    engine.begin_operation(control.FORGET, A, name="forget")
    steps(engine)
    engine.ask(A, name="again")
    steps(engine)
    may_arrive.set()
    engine.run()
    assert engine.sources("again") == ["computed"]
    assert len(files(folder)) == 1
    engine.check_no_leak()


@pytest.mark.parametrize("budget", [16, 256])
@pytest.mark.parametrize("extra", [{}, WARM], ids=["an ordinary request", "one that only warms"])
def test_a_request_that_still_lacks_a_forgotten_chunk_keeps_it_nowhere(
    folder: Path, budget: int, extra: dict[str, Any]
) -> None:
    engine = Engine(folder, extra=BOTH, budget=budget)
    engine.ask(A, B, **extra)
    engine.begin_operation(control.FORGET, A)
    engine.run()
    assert sorted(engine.sources()) == ["computed"] * 2
    assert len(files(folder)) == 1
    engine.ask(A, B, name="again")
    engine.run()
    assert engine.sources("again") == ["computed", "hbm"]
    engine.check_no_leak()


def test_the_engine_knows_the_name_of_every_chunk_in_its_pool(folder: Path) -> None:
    """Also when it stops remembering those that were evicted."""
    engine = Engine(folder, block_size=4, extra=HOST_ONLY)
    for n in range(40):
        chunk = [n + 1] * 40
        engine.ask(chunk, name=f"{n}")
        engine.run()
        assert chunk_name(chunk) in engine.scheduler._residents._hashes
    assert len(engine.scheduler._residents) < 40


def test_forgetting_ends_a_pin(folder: Path) -> None:
    engine = Engine(folder, extra={"host_bytes": 3 * len(A) * ROW_BYTES, "policy": "lru"})
    engine.operate(control.PIN, A, name="pin")
    engine.operate(control.FORGET, A, name="forget")
    for n, chunk in enumerate([A, *([100 + n] * 40 for n in range(8))]):
        engine.ask(chunk, name=f"{n}")
        engine.run()
    engine.empty_pool()
    engine.ask(A, name="gone")
    engine.run()
    assert engine.sources("gone") == ["disk"]
    assert engine.workers[0].connector.disk.pinned == frozenset()


def test_blocks_in_use_are_wiped_when_they_are_free(folder: Path) -> None:
    engine = Engine(folder, extra=BOTH)
    engine.ask(A)
    while "r" not in engine.computed:
        engine.step()
    engine.operate(control.FORGET, A)
    engine.run()
    engine.ask(name="another step")
    engine.run()
    (worker,) = engine.workers
    blocks = blocks_of(engine, A)
    used = [block for block in blocks if engine.scheduler.kv_cache_manager.block_pool.blocks[block].block_hash]
    for layer in LAYERS:
        assert not worker.caches[layer][[block for block in blocks if block not in used]].nan_to_num(0).any()


def test_pinned_chunks_outlast_a_flood(folder: Path) -> None:
    budget = 3 * len(A) * ROW_BYTES
    engine = Engine(folder, extra={"host_bytes": budget, "policy": "lru"})
    engine.operate(control.PIN, A, name="pin")
    flood = [[100 + n] * 40 for n in range(8)]
    for n, chunk in enumerate([A, *flood]):
        engine.ask(chunk, name=f"{n}")
        engine.run()
    engine.empty_pool()
    engine.ask(A, flood[0], name="kept")
    engine.run()
    assert engine.sources("kept") == ["host", "disk"]
    engine.operate(control.UNPIN, A, name="unpin")
    for n, chunk in enumerate(flood[1:]):
        engine.ask(chunk, name=f"again {n}")
        engine.run()
        engine.empty_pool()
    engine.ask(A, name="gone")
    engine.run()
    assert engine.sources("gone") == ["disk"]


def test_pinned_chunks_are_not_evicted_from_disk(folder: Path) -> None:
    size = warmed(folder, A) and files(folder)[0].stat().st_size
    engine = Engine(folder, extra={"budget_bytes": 3 * size})
    engine.operate(control.PIN, A, name="pin")
    for n in range(8):
        engine.ask([100 + n] * 40, name=f"{n}")
        engine.run()
    engine.empty_pool()
    engine.ask(A, name="kept")
    engine.run()
    assert engine.sources("kept") == ["disk"]


def test_answers_say_how_the_tiers_are(folder: Path) -> None:
    engine = warmed(folder, A, extra=BOTH)
    tiers = engine.reports["r"][control.TIERS]
    assert {tier: tuple(counters) for tier, counters in tiers.items()} == dict.fromkeys(
        ("hbm", "host", "disk"), TIER_COUNTERS
    )
    assert (tiers["host"]["saves"], tiers["disk"]["saves"]) == (1, 1)
    assert tiers["hbm"]["saves"] == 1
    assert tuple(engine.reports["r"][control.PREFETCHED]) == PREFETCH_COUNTERS


# ---------------------------------------------------------------- quotas


@pytest.mark.parametrize("extra", [{}, WARM], ids=["prompts", "warming"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_prompts_compute_beyond_their_namespaces_quota_goes_unsaved(
    folder: Path, ranks: int, extra: dict[str, Any]
) -> None:
    engine = warmed(folder, A, extra=BOTH, ranks=ranks)
    quota = 2 * sum(file.stat().st_size for file in files(folder))
    for chunk in (B, [9] * 40, C):
        engine.ask(chunk, name=f"{len(chunk)}", **{wire.QUOTA: quota}, **extra)
        engine.run()
        assert engine.sources(f"{len(chunk)}") == ["computed"]
    assert len(files(folder)) == 2 * ranks, "there was room for one of like size"
    engine.ask([9] * 40, salt="theirs", name="theirs", **{wire.QUOTA: quota})
    engine.run()
    assert len(files(folder)) == 3 * ranks
    engine.empty_pool()
    engine.ask(B, [9] * 40, C, name="again", **{wire.QUOTA: quota})
    engine.run()
    assert engine.sources("again") == ["host"] * 3, "the quota is one of disk"


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("extra", "named"),
    [({"root": None}, "root"), ({"fingerprint": None}, "fingerprint"), ({"host_bytes": 9, "policy": "x"}, "policy")],
    ids=str,
)
def test_an_incomplete_configuration_is_refused(folder: Path, extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Engine(folder, extra=extra)


def test_a_second_engine_in_the_process_is_refused(folder: Path) -> None:
    worker = Engine(folder).workers[0]
    with pytest.raises(UnsupportedError, match="second engine"):
        worker.connector.register_kv_caches(worker.caches)


def test_an_engine_starts_with_its_store_under_the_budget(folder: Path) -> None:
    warmed(folder, A, B, C)
    sizes = sorted(file.stat().st_size for file in files(folder))
    engine = Engine(folder, extra={"budget_bytes": sum(sizes) - 1})
    assert 0 < len(files(folder)) < 3
    engine.ask(A, B, C)
    engine.run()
    assert engine.disk.usage().num_bytes < sum(sizes)
