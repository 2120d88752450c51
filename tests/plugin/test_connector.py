"""Both halves of the KV connector under the real scheduler, with a worker that computes a known row for each token.

The stand-in for the model writes K and V that say what they are, NaN for pads, into a cache that is
NaN from the start. Before a request runs that reuses chunks, it compares every row of its segments with what the
chunk's own prefill gives: a chunk that was not computed, not loaded, or not of this prompt does not pass.
"""

import json
import pickle
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

from lazyrag.backend import wire
from lazyrag.backend.layout import Span
from lazyrag.backend.plugin.scheduler import LazyAsyncScheduler, LazyScheduler
from lazyrag.backend.tiers.connector import LazyRAGConnector, Transfer, token_rows
from lazyrag.backend.tiers.disk import DiskTier
from lazyrag.errors import ConfigError, UnsupportedError

FINGERPRINT = "0123456789abcdef" * 4
LAYERS = ("model.layers.0.attn", "model.layers.1.attn")
HEADS, HEAD_SIZE, NUM_BLOCKS = 2, 4, 64

PREAMBLE = list(range(400, 419))
A, B, C = list(range(10, 47)), list(range(50, 82)), list(range(90, 95))
QUESTION = list(range(200, 209))


def row(context: Sequence[int], layer: int, heads: range) -> torch.Tensor:
    """K and V of the last token of a context in one layer, [heads, 2 * HEAD_SIZE]; distinct for distinct arguments."""
    seeds = [crc32(f"{list(context)} {layer} {head}".encode()) for head in heads]
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
        return token_rows(self.caches[layer]).flatten(0, 1)

    def write(self, slot: int, context: Sequence[int] | None) -> None:
        for number, layer in enumerate(LAYERS):
            block, offset = divmod(slot, self.caches[layer].shape[2])
            self.caches[layer][block, :, offset] = torch.nan if context is None else row(context, number, self.heads)

    def assert_holds(self, slots: Sequence[int], tokens: Sequence[int], before: Sequence[int]) -> None:
        for number, layer in enumerate(LAYERS):
            found = self.slots(layer)[torch.tensor(slots)]
            context = [*before, *tokens]
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
        return self.scheduler.connector._tier

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

    def run(self, limit: int = 60) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            self.step()
            if not self.in_flight and not self.scheduler.has_requests():
                return
        raise AssertionError(f"{limit} steps did not finish {list(self.scheduler.requests)}")

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


def test_a_chunk_is_on_disk_before_its_request_is_answered(folder: Path) -> None:
    engine = Engine(folder)
    engine.ask(A, B)
    while not engine.reports:
        engine.step()
        if engine.reports or any(name == "r" for name in engine.computed):
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
        tier = worker.connector._tier
        load = tier.load

        def late(key: str, form: Any, *, namespace: str, tier: DiskTier = tier, load: Any = load) -> Any:
            tier.delete(key, namespace=namespace)
            return load(key, form, namespace=namespace)

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


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("missing", ["root", "fingerprint"])
def test_an_incomplete_configuration_is_refused(folder: Path, missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        Engine(folder, extra={missing: None})


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
