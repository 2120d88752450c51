"""A scheduler with a model runner that computes what a token's KV *means* instead of numbers.

The KV of a token is a function of everything it attends to. `_meaning` is that function, in a normal form; the fake
runner writes it into the slots that the scheduler hands out and, before a request reads a slot, compares it with what
the request's own prompt says must be there. A block that is shared wrongly, computed in the wrong context, or read
before it was written fails at once, whatever the hashes say.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_USE_V2_MODEL_RUNNER="0", VLLM_CPU_KVCACHE_SPACE="1")

import pytest
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lazyrag.backend import control, wire
from lazyrag.backend.contents import Sender
from lazyrag.backend.layout import Span, take_apart
from lazyrag.backend.plugin.scheduler import LazyAsyncScheduler, LazyScheduler
from lazyrag.backend.tiers.transfers import COPIED, DONE, Progress

BLOCK = 4
MAX_MODEL_LEN = 400

# ---------------------------------------------------------------- prompts


@dataclass(frozen=True)
class Chunk:
    """A chunk in a prompt: tokens [offset, end) may be reused, the first `offset` stand there as literals.

    `gaps` are ranges behind `offset` that stand there as literals, too.
    """

    tokens: tuple[int, ...]
    offset: int = 0
    end: int | None = None
    gaps: tuple[tuple[int, int], ...] = ()

    @property
    def shown(self) -> tuple[int, ...]:
        return self.tokens[: self.end]

    @property
    def runs(self) -> list[tuple[int, int]]:
        """What may be reused."""
        starts = [self.offset, *(end for _, end in self.gaps)]
        ends = [*(start for start, _ in self.gaps), len(self.shown)]
        return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]


@dataclass(frozen=True)
class Prompt:
    """Literals (tuples of tokens) and chunks in logical order, behind an optional preamble; or a sink, not shown."""

    parts: tuple[Any, ...]
    prefix: tuple[int, ...] = ()
    salt: str | None = None
    lora: str | None = None
    sink: tuple[int, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        shown = [part.shown if isinstance(part, Chunk) else part for part in self.parts]
        return [*self.prefix, *(token for tokens in shown for token in tokens)]

    @property
    def spans(self) -> list[Span]:
        spans, start = [], len(self.prefix)
        for part in self.parts:
            if isinstance(part, Chunk):
                spans += [Span(start + a, b - a, a, len(part.shown)) for a, b in part.runs]
            start += len(part.shown if isinstance(part, Chunk) else part)
        return spans

    @property
    def items(self) -> list[tuple[Any, ...]]:
        """("text", tokens) and ("chunk", preamble, tokens up to the segment's end, offset), in logical order."""
        items: list[tuple[Any, ...]] = [("chunk", (), self.prefix, 0)] if self.prefix else []
        for part in self.parts:
            if isinstance(part, Chunk):
                at = 0
                for start, end in part.runs:
                    items.append(("text", part.tokens[at:start]))
                    items.append(("chunk", self.prefix or self.sink, part.tokens[:end], start))
                    at = end
                items.append(("text", part.shown[at:]))
            else:
                items.append(("text", part))
        return items


def prompt(
    *parts: Any,
    prefix: Sequence[int] = (),
    salt: str | None = None,
    lora: str | None = None,
    sink: Sequence[int] = (),
) -> Prompt:
    return Prompt(tuple(p if isinstance(p, Chunk) else tuple(p) for p in parts), tuple(prefix), salt, lora, tuple(sink))


# ---------------------------------------------------------------- what a token's KV means


def _meaning(owner: tuple[Any, ...], context: Sequence[tuple[Any, ...]]) -> int:
    """Of a context, ending with the token itself. Contexts that give the same K and V are the same here.

    A chunk that stands where it was computed, behind exactly what it was computed behind, is plain text.
    """
    plain: tuple[int, ...] = ()
    rest: list[tuple[Any, ...]] = []
    for item in context:
        if item[0] == "text":
            if not rest:
                plain += tuple(item[1])
            elif item[1]:
                rest.append(item)
            continue
        _, preamble, tokens, offset = item
        if not rest and plain == (*preamble, *tokens[:offset]):
            plain += tokens[offset:]
        else:
            rest.append(item)
    merged: list[tuple[Any, ...]] = []
    for item in rest:  # neighbouring texts are one text
        if merged and item[0] == merged[-1][0] == "text":
            merged[-1] = ("text", merged[-1][1] + tuple(item[1]))
        else:
            merged.append(item)
    return hash((owner, plain, tuple(merged)))


@dataclass
class Running:
    """A request as the runner knows it."""

    owner: tuple[Any, ...]
    items: list[tuple[Any, ...]]
    suffix_start: int
    segments: list[tuple[int, int]]  # (first block, valid tokens) of each chunk item
    token_ids: list[int]
    blocks: list[int] = field(default_factory=list)
    num_hidden: int = 0  # the first tokens, padded: a sink
    meanings: dict[int, int | None] = field(default_factory=dict)  # by position; later tokens change none of them

    def expected(self, position: int) -> int | None:
        """The meaning of the KV at a physical position; None for what is not read: a pad or a sink."""
        if position not in self.meanings:
            self.meanings[position] = self._meaning_at(position)
        return self.meanings[position]

    def _meaning_at(self, position: int) -> int | None:
        if position < self.num_hidden:
            return None
        if position >= self.suffix_start:
            return _meaning(self.owner, self.context(position - self.suffix_start))
        chunks = [item for item in self.items if item[0] == "chunk"]
        for (first_block, num_tokens), (_, preamble, tokens, offset) in zip(self.segments, chunks, strict=True):
            index = position - first_block * BLOCK
            if 0 <= index < -(-num_tokens // BLOCK) * BLOCK:
                if index >= num_tokens:
                    return None
                return _meaning(self.owner, [("text", (*preamble, *tokens[: offset + index + 1]))])
        raise AssertionError(f"no segment at {position}")

    def context(self, j: int) -> list[tuple[Any, ...]]:
        """What suffix token j sees, itself included, in logical order."""
        context: list[tuple[Any, ...]] = []
        left = j + 1
        for item in self.items:
            if item[0] == "chunk":
                context.append(item)
                continue
            context.append(("text", item[1][:left]))
            left -= len(item[1])
            if left <= 0:
                return context
        literals = sum(len(item[1]) for item in self.items if item[0] == "text")
        start = self.suffix_start + literals
        context.append(("text", tuple(self.token_ids[start : start + left])))
        return context


class Runner:
    """Executes scheduler outputs in order."""

    def __init__(self, prompts: dict[str, Prompt], requests: dict[str, Request]) -> None:
        self.prompts = prompts
        self.requests = requests
        self.kv: dict[tuple[int, int], int | None] = {}
        self.running: dict[str, Running] = {}
        self.loads_fail = False

    def execute(self, output: Any) -> ModelRunnerOutput:
        for request_id in output.finished_req_ids:
            self.running.pop(request_id, None)
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self.running[new.req_id] = self._start(new)
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            request, blocks = self.running[request_id], cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                request.blocks = []
            request.blocks += blocks[0] if blocks else []
            computed[request_id] = cached.num_computed_tokens[i]
        loaded = self._load(output)
        if not output.total_num_scheduled_tokens:
            return replace(EMPTY_MODEL_RUNNER_OUTPUT, kv_connector_output=loaded)
        for request_id, n in output.num_scheduled_tokens.items():  # every layer writes before it attends
            self._write(self.running[request_id], computed[request_id], n)
        sampled = []
        for request_id, n in output.num_scheduled_tokens.items():
            request, end = self.running[request_id], computed[request_id] + n
            self._read(request_id, request, computed[request_id])
            sampled.append([self._sample(request)] if end == len(request.token_ids) else [])
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=loaded,
        )

    def _load(self, output: Any) -> KVConnectorOutput | None:
        """What the connector was told to load: the right KV, or none and a report of the blocks that lack it."""
        transfers = output.kv_connector_metadata
        if transfers is None:
            return None
        loads, invalid = transfers.loads, set()
        steps = [(load.job, DONE, not self.loads_fail) for load in loads]
        steps += [(save.job, step, True) for save in transfers.saves for step in (COPIED, DONE)]
        for load in loads:
            if self.loads_fail:
                invalid.update(load.block_ids)
                continue
            request = self.requests[load.request_id]
            child = request.sampling_params.extra_args[wire.CHILD]
            running = self._start(
                SimpleNamespace(
                    req_id=request.request_id,
                    prompt_token_ids=request.prompt_token_ids,
                    sampling_params=request.sampling_params,
                    lora_request=request.lora_request,
                    block_ids=[()],
                )
            )
            for index in range(load.first_token, load.num_tokens):
                block = load.block_ids[(index - load.first_token) // BLOCK]
                self.kv[block, index % BLOCK] = running.expected(child["first_token"] + index)
        return KVConnectorOutput(
            finished_recving={load.request_id for load in loads},
            invalid_block_ids=invalid,
            kv_connector_worker_meta=Progress(steps),
        )

    def _start(self, new: Any) -> Running:
        args = new.sampling_params.extra_args or {}
        layout = args.get(wire.LAYOUT)
        lora = new.lora_request.lora_name if new.lora_request else None
        token_ids = list(new.prompt_token_ids)
        if new.req_id.startswith(wire.CHILD_PREFIX):
            owner = self._child_owner(new.req_id)
            if layout is None:
                running = Running(owner, [("text", tuple(token_ids))], 0, [], token_ids)
            else:
                ((first_block, num_blocks, num_tokens, visible_from, shift),) = layout["segments"]
                assert (first_block, visible_from, shift, num_blocks) == (0, 0, 0, layout["suffix_block"])
                items = [
                    ("chunk", (), tuple(token_ids[:num_tokens]), 0),
                    ("text", tuple(token_ids[num_blocks * BLOCK :])),
                ]
                running = Running(owner, items, num_blocks * BLOCK, [(0, num_tokens)], token_ids)
        else:
            given = self.prompts[new.req_id]
            segments = [(s[0], s[2]) for s in layout["segments"]] if layout else []
            start = layout["suffix_block"] * BLOCK if layout else 0
            items = given.items if layout else [("text", tuple(given.token_ids))]
            num_hidden = -(-len(given.sink) // BLOCK) * BLOCK if layout else 0
            running = Running((given.salt, lora), items, start, segments, token_ids, num_hidden=num_hidden)
        running.blocks = list(new.block_ids[0])
        return running

    def _child_owner(self, request_id: str) -> tuple[Any, ...]:
        request = self.requests[request_id]
        return (request.cache_salt, request.lora_request.lora_name if request.lora_request else None)

    def _slot(self, request: Running, position: int) -> tuple[int, int]:
        return (request.blocks[position // BLOCK], position % BLOCK)

    def _write(self, request: Running, start: int, n: int) -> None:
        for position in range(start, start + n):
            assert position >= request.suffix_start, "a segment's token is computed inside a request that uses it"
            self.kv[self._slot(request, position)] = request.expected(position)

    def _read(self, request_id: str, request: Running, num_computed: int) -> None:
        for position in range(num_computed):
            expected, slot = request.expected(position), self._slot(request, position)
            if expected is not None:
                assert self.kv.get(slot) == expected, f"{request_id} reads the wrong KV at {position} (block {slot[0]})"

    def _sample(self, request: Running) -> int:
        token = 3 + request.expected(len(request.token_ids) - 1) % 500  # type: ignore[operator]
        request.token_ids.append(token)
        return token


# ---------------------------------------------------------------- an engine around it


class Engine:
    """Scheduler and runner in the order in which vLLM's engine core runs them."""

    def __init__(
        self,
        model: Path,
        *,
        is_async: bool = False,
        scheduler_class: type | None = None,
        num_blocks: int = 200,
        max_num_seqs: int = 16,
        budget: int = 256,
        **config: Any,
    ) -> None:
        vllm_config = make_config(model, is_async=is_async, max_num_seqs=max_num_seqs, budget=budget, **config)
        vllm_config.cache_config.num_gpu_blocks = num_blocks
        hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(BLOCK, hash_function)
        if scheduler_class is None:
            scheduler_class = LazyAsyncScheduler if is_async else LazyScheduler
        self.scheduler = scheduler_class(
            vllm_config=vllm_config,
            kv_cache_config=make_pool(num_blocks),
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
            include_finished_set=True,
        )
        self.finished: set[str] = set()
        self.prompts: dict[str, Prompt] = {}
        self.runner = Runner(self.prompts, self.scheduler.requests)
        self.max_in_flight = 2 if is_async else 1
        self.in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.steps: list[dict[str, int]] = []
        self.outputs: dict[str, list[Any]] = {}
        self.num_added = 0
        self.sender = Sender()

    def add(
        self,
        given: Prompt,
        *,
        max_tokens: int = 4,
        request_id: str | None = None,
        extra: Any = None,
        token_ids: Sequence[int] | None = None,
        warms_only: bool = False,
        **options: Any,
    ) -> str:
        request_id = request_id or f"r{self.num_added}"
        self.num_added += 1
        self.prompts[request_id] = given
        args, token_ids = extra, token_ids or given.token_ids
        if extra is None:
            asked = wire.WireRequest(given.spans, len(given.prefix), sink=given.sink)
            if self.num_added % 2 and asked.spans:  # every other request names the tokens of its chunks
                token_ids, contents = take_apart(token_ids, asked.spans, asked.prefix_len)
                names, sent = self.sender.names(list(enumerate(contents)), namespace=given.salt or "")
                asked = replace(asked, names=names, contents=sent)
            args = wire.request_to_args(asked) | (control.control_to_args(control.WARM) if warms_only else {})
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=args or None, **options
        )
        lora = LoRARequest(given.lora, 1 + hash(given.lora) % 1000, "/nowhere") if given.lora else None
        self.scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=token_ids,
                sampling_params=params,
                pooling_params=None,
                cache_salt=given.salt,
                lora_request=lora,
                arrival_time=float(self.num_added),
                block_hasher=self.hasher,
            )
        )
        self.outputs[request_id] = []
        return request_id

    def step(self) -> None:
        """One step of the engine core; with a batch queue, as with asynchronous scheduling."""
        while self.scheduler.has_requests() and len(self.in_flight) < self.max_in_flight:
            scheduled = self.scheduler.schedule()
            self.steps.append(dict(scheduled.num_scheduled_tokens))
            assert not self.scheduler_pins & scheduled.num_scheduled_tokens.keys(), "a running request holds pins"
            self.in_flight.append((scheduled, self.runner.execute(scheduled)))
        if self.in_flight:
            for of_client in self.scheduler.update_from_output(*self.in_flight.popleft()).values():
                self.finished |= of_client.finished_requests or set()
                for output in of_client.outputs:
                    assert output.request_id in self.outputs, f"{output.request_id} is nobody's request"
                    self.outputs[output.request_id].append(output)

    def run(self, max_steps: int = 3000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self.in_flight:
                break
            self.step()
        else:
            raise AssertionError(f"no end after {max_steps} steps")
        manager = self.scheduler.kv_cache_manager
        assert manager.block_pool.get_num_free_blocks() == manager.block_pool.num_gpu_blocks - 1, (
            "blocks are left in use"
        )

    def generate(self, *prompts: Prompt, **options: Any) -> list[Answer]:
        ids = [self.add(given, **options) for given in prompts]
        self.run()
        return [self.answer(request_id) for request_id in ids]

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def answer(self, request_id: str) -> Answer:
        return Answer(request_id, self.prompts[request_id], self.outputs[request_id])

    @property
    def scheduler_pins(self) -> set[str]:
        """Ids of the requests that hold pins."""
        pins = getattr(self.scheduler, "_pins", None)
        return set(pins._held) if pins is not None else set()

    @property
    def stats(self) -> dict[str, int]:
        stats: dict[str, int] = self.scheduler.lazyrag_stats()
        return stats

    @property
    def children(self) -> int:
        """Children that finished so far."""
        return self.stats["children_computed"] + self.stats["children_loaded"]


@dataclass
class Answer:
    request_id: str
    prompt: Prompt
    outputs: list[Any]

    @property
    def token_ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.new_token_ids]

    @property
    def finish_reason(self) -> str | None:
        return str(self.outputs[-1].finish_reason) if self.outputs and self.outputs[-1].finished else None

    @property
    def report(self) -> Any:
        return wire.report_from_params(self.outputs[-1].kv_transfer_params)

    @property
    def sources(self) -> list[str]:
        sources: list[str] = self.report["sources"]
        return sources

    @property
    def error(self) -> Any:
        return wire.error_from_params(self.outputs[-1].kv_transfer_params)

    @property
    def warmed(self) -> bool:
        """It was answered without a token, as a request that only warms is."""
        return self.finish_reason == "stop" and self.report is not None and not self.token_ids

    @property
    def right(self) -> bool:
        """Every token is what the logical prompt says, computed without any cache."""
        token_ids = list(self.prompt.token_ids)
        reusable = self.prompt.spans or self.prompt.prefix
        items = self.prompt.items if reusable else [("text", tuple(token_ids))]
        for token in self.token_ids:
            if token != 3 + _meaning((self.prompt.salt, self.prompt.lora), items) % 500:
                return False
            items = [*items, ("text", (token,))]
        return bool(self.token_ids)


def make_config(
    model: Path,
    *,
    is_async: bool = False,
    max_num_seqs: int = 16,
    budget: int = 256,
    **changes: Any,
) -> VllmConfig:
    """A real configuration of a small model, without any file but its config.json."""
    parts: dict[str, Any] = {
        "model_config": ModelConfig(
            model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN, seed=0
        ),
        "scheduler_config": SchedulerConfig(
            max_num_seqs=min(max_num_seqs, budget),
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        "cache_config": CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        "parallel_config": ParallelConfig(),
        "device_config": DeviceConfig("cpu"),
        "additional_config": {"lazyrag": {"debug": True}},
    }
    config = VllmConfig(**{**parts, **changes})
    config.scheduler_config.async_scheduling = is_async  # the CPU platform switches it off
    return config


def make_pool(num_blocks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 600,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    """Tests that use `new_engine` run with both schedulers."""
    return bool(request.param)


@pytest.fixture
def new_engine(model_folder: Path, is_async: bool) -> Any:
    """A factory of engines; see `Engine`."""

    def make(**options: Any) -> Engine:
        return Engine(model_folder, is_async=is_async, **options)

    return make


@pytest.fixture(scope="session")
def lib() -> SimpleNamespace:
    """What tests build with; importlib mode lets test files import nothing from each other."""
    return SimpleNamespace(
        Chunk=Chunk,
        prompt=prompt,
        BLOCK=BLOCK,
        MAX_MODEL_LEN=MAX_MODEL_LEN,
        make_config=make_config,
        make_pool=make_pool,
        Engine=Engine,
        KVTransferConfig=KVTransferConfig,
    )
