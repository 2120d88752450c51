"""The seam between the text half and whatever runs the model.

An engine offers one way to run a request, `submit`, which calls back from any thread. Everything else that callers want
(an iterator, an async iterator, a batch, warming chunks) is derived from it here, once, for every engine.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from lazyrag.errors import RequestTimeoutError
from lazyrag.types import DISK, HBM, HOST, Choice, ChunkId, Citation, Reuse, Segment

WARMED_AT_ONCE = 16
TIER_POLICIES = ("cost", "lru")
"""By what a tier decides whom to give up: seconds saved for the bytes, and how often; or who was used last."""

TIER_COUNTERS = ("chunks", "bytes", "budget", "hits", "misses", "loads", "saves", "evictions", "failures", "skipped")
"""What a tier holds now and may hold (`budget` 0: there is no such tier, or no limit), and since the start: look-ups of
chunks that the tiers above it lacked, and how often one was copied out of it, into it, dropped for room, could not be
read or written, or was found and computed all the same, for that was faster. `bytes` of "hbm" are those in use by
requests; the rest of the pool may hold chunks, too, and be had for others. What the disk holds is not counted at each
answer: its `chunks` and `bytes` are 0."""
PREFETCH_COUNTERS = ("asked", "used", "late", "wasted")
"""Chunks asked for; of those that were brought up: found in the pool by a request, still under way when a request came,
gone again before any."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to generate.

    Attributes:
        temperature: 0 is greedy.
        frequency_penalty, presence_penalty: OpenAI's, -2 to 2: what a token's logit loses for each time that it was
            generated, and for having been at all. Prompts do not count. Log-probabilities are those before.
        json_schema: the answer is JSON that fits this (vLLM's guided decoding).
        structural_tag: the answer has this form, a structural tag in vLLM's terms; not together with `json_schema`.
        timeout_s: seconds from `submit` to the last token; then the helpers below cancel the request. None: no limit.
        allowed_token_ids: generate none but these; empty: any. Log-probabilities are the model's own all the same.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    json_schema: Mapping[str, Any] | None = None
    structural_tag: Mapping[str, Any] | None = None
    timeout_s: float | None = None
    allowed_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, already tokenised, in its own (logical) order.

    Attributes:
        segments: the reusable runs of `token_ids`, ordered, disjoint; at least one literal token follows the last.
        prefix_len, sink: see `PromptPlan`. Any engine that reuses chunks takes requests of any mode.
        namespace: tenant; KV is never shared between namespaces. Empty: the default namespace.
        kv_quota: bytes of KV that the namespace may have on disk; what would exceed them is not kept. None: no limit.
        warms_only: nothing is generated: the only delta comes when the KV of the segments is there (and kept, if the
            engine has tiers), and says where it came from. An engine that reuses no chunks answers as always.
    """

    token_ids: Sequence[int]
    segments: Sequence[Segment] = ()
    prefix_len: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    namespace: str = ""
    sink: Sequence[int] = ()
    kv_quota: int | None = None
    warms_only: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """What became known since the last delta.

    Attributes:
        text, token_ids: newly generated.
        logprobs: for each new token {token id: log-probability}, if asked for.
        finish_reason: None until the last delta, then "stop", "length" or "abort".
        reuse: set on the last delta.
        ttft_s: seconds from `submit` to the first token; set on the last delta.
        citations, mode: see `Answer`; set on the last delta by `LazyRAG`, which knows documents and findings.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Mapping[int, float], ...] = ()
    finish_reason: str | None = None
    reuse: Reuse | None = None
    ttft_s: float | None = None
    citations: tuple[Citation, ...] = ()
    mode: Choice | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the text half must know of an engine; all constant while it lives.

    Attributes:
        tokenizer: folder with tokenizer.json and tokenizer_config.json.
        mode: the `ReuseMode` of requests that say nothing else, as text. An engine of mode exact reuses no chunks for
            any request.
        max_model_len: tokens of prompt and answer together.
        kv_bytes_per_token: over all layers, K and V.
        kv_bytes_per_chunk: that a chunk on disk takes besides, at most.
        fingerprint: of model weights, tokenizer, dtype, RoPE and KV format; KV with another one is not usable.
    """

    model: str
    tokenizer: str
    mode: str
    max_model_len: int
    block_size: int
    kv_bytes_per_token: int
    fingerprint: str
    kv_bytes_per_chunk: int = 0


Event: TypeAlias = Delta | Exception
Deliver: TypeAlias = Callable[[Event], None]
Cancel: TypeAlias = Callable[[], None]
Chunks: TypeAlias = Iterable[tuple[ChunkId, Sequence[int]]]
"""Chunks with their tokens."""


class Engine(Protocol):
    """Runs requests. Thread-safe: `submit` may be called from any thread or event loop."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def alive(self) -> bool:
        """Whether it takes requests. False, at the latest, when a request has met `EngineDeadError`."""
        ...

    def submit(self, request: Request, deliver: Deliver) -> Cancel:
        """Start a request and return at once.

        `deliver` is called from the engine's thread with every `Delta` in order; the one with `finish_reason` is
        the last. A `lazyrag.errors.EngineError` is the last event, too. After cancel nothing more is promised.
        """
        ...

    def prefetch(
        self, chunks: Chunks, *, prefix: Sequence[int] = (), sink: Sequence[int] = (), namespace: str = ""
    ) -> None:
        """Begin to bring the KV of chunks nearer, for a request that will probably hold them. Returns at once.

        What is on disk or in host memory is copied up as far as there is room that no request needs; nothing is
        computed. An engine without tiers, or one that is closed, does nothing.

        Args:
            chunks: those that the request will hold, in any order.
            prefix: the preamble that they are computed behind (mode `prefix`).
            sink: the tokens that they are computed behind (mode `sink`).
            namespace: see `Request`.
        """
        ...

    def pin(self, chunks: Chunks, *, namespace: str = "") -> None:
        """Let no tier but the pool evict the KV of chunks, computed or not yet, until `unpin` or the engine's end.

        Raises:
            EngineError: the engine is closed, or has died.
        """
        ...

    def unpin(self, chunks: Chunks, *, namespace: str = "") -> None:
        """Undo `pin`; chunks that were not pinned are no error. Raises as `pin`."""
        ...

    def forget(self, chunks: Chunks, *, namespace: str = "") -> None:
        """Drop the KV of chunks from every tier, whatever it was computed behind; in memory, of their heads, too.

        When this returns no later request finds it, none of its files is there, and none comes: copies that were under
        way have ended. What held it in memory is wiped as soon as no request uses it. A request in flight that still
        lacks one computes it anew, for itself alone. Pins of the chunks end.
        Heads on disk may be chunks of their own: that is for the store to know. Raises as `pin`.
        """
        ...

    def stats(self) -> dict[str, Any]:
        """Counters since start.

        requests, prompt_tokens, reused_tokens; segments by the source of their KV (`lazyrag.types`);
        tiers: for each of "hbm", "host", "disk": `TIER_COUNTERS`, as of the last request that was answered;
        prefetch: `PREFETCH_COUNTERS`, in chunks.
        """
        ...

    def close(self) -> None:
        """Stop; requests in flight get `EngineDeadError`. Idempotent."""
        ...


class _Deadline:
    """When a request must have ended; a `timeout_s` of None, or beyond what a clock can wait for, never comes."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.at = None
        if timeout_s is not None and timeout_s < threading.TIMEOUT_MAX / 2:
            self.at = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float | None:
        return None if self.at is None else max(0.0, self.at - time.monotonic())

    def error(self) -> RequestTimeoutError:
        return RequestTimeoutError(
            f"The request did not end within {self.timeout_s} seconds and was cancelled.",
            fix="Allow more time, or generate fewer tokens.",
        )


def stream(engine: Engine, request: Request) -> Iterator[Delta]:
    """Yield the request's deltas as they come. Closing the iterator early cancels the request."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    deadline = _Deadline(request.sampling.timeout_s)
    cancel = engine.submit(request, events.put)
    done = False
    try:
        while not done:
            try:
                event = events.get(timeout=deadline.left_s)
            except queue.Empty:
                raise deadline.error() from None
            if isinstance(event, Exception):
                done = True
                raise event
            done = event.finish_reason is not None
            yield event
    finally:
        if not done:
            cancel()


async def astream(engine: Engine, request: Request) -> AsyncGenerator[Delta, None]:
    """As `stream`, without blocking the caller's event loop."""
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[Event] = asyncio.Queue()

    def deliver(event: Event) -> None:
        # The caller's loop may be closed (its task was cancelled, asyncio.run returned): then nobody waits.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(events.put_nowait, event)

    deadline = _Deadline(request.sampling.timeout_s)
    cancel = engine.submit(request, deliver)
    done = False
    try:
        while not done:
            try:
                event = await asyncio.wait_for(events.get(), deadline.left_s)
            except asyncio.TimeoutError:
                raise deadline.error() from None
            if isinstance(event, Exception):
                done = True
                raise event
            done = event.finish_reason is not None
            yield event
    finally:
        if not done:
            cancel()


def generate(engine: Engine, requests: Sequence[Request]) -> list[Delta | Exception]:
    """Run requests together; for each the sum of its deltas, or its error. Order is kept."""
    results: dict[int, Delta | Exception] = {}
    events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
    parts: list[list[Delta]] = [[] for _ in requests]
    deadlines = [_Deadline(request.sampling.timeout_s) for request in requests]
    cancels: list[Cancel] = []
    try:
        for i, request in enumerate(requests):
            cancels.append(engine.submit(request, lambda event, i=i: events.put((i, event))))  # type: ignore[misc]
        while len(results) < len(requests):
            try:
                i, event = events.get(timeout=_first(deadlines, results))
            except queue.Empty:
                for i, deadline in enumerate(deadlines):
                    if i not in results and deadline.left_s == 0:
                        results[i] = deadline.error()
                        cancels[i]()
                continue
            if i in results:  # it ended as its deadline passed
                continue
            if isinstance(event, Exception):
                results[i] = event
                continue
            parts[i].append(event)
            if event.finish_reason is not None:
                results[i] = joined(parts[i])
    finally:
        for i, cancel in enumerate(cancels):
            if i not in results:
                cancel()
    return [results[i] for i in range(len(requests))]


async def agenerate(engine: Engine, requests: Sequence[Request]) -> list[Delta | Exception]:
    """As `generate`, without blocking the caller's event loop. Cancelling it cancels every request."""

    async def one(request: Request) -> Delta | Exception:
        try:
            return joined([delta async for delta in astream(engine, request)])
        except Exception as error:
            return error

    return list(await asyncio.gather(*map(one, requests)))


def _first(deadlines: Sequence[_Deadline], done: Mapping[int, object]) -> float | None:
    """Seconds until the first deadline of a request that is not done."""
    left = [d.left_s for i, d in enumerate(deadlines) if d.at is not None and i not in done]
    return min((s for s in left if s is not None), default=None)


def joined(deltas: Sequence[Delta]) -> Delta:
    """One delta that says what all of them said, the last of which is final."""
    last = deltas[-1]
    return Delta(
        text="".join(d.text for d in deltas),
        token_ids=tuple(t for d in deltas for t in d.token_ids),
        logprobs=tuple(p for d in deltas for p in d.logprobs),
        finish_reason=last.finish_reason,
        reuse=last.reuse,
        ttft_s=last.ttft_s,
        citations=last.citations,
        mode=last.mode,
    )


def no_tier_counters() -> dict[str, dict[str, int]]:
    """`Engine.stats()["tiers"]` of an engine that has not said anything yet."""
    return {tier: dict.fromkeys(TIER_COUNTERS, 0) for tier in (HBM, HOST, DISK)}


def no_prefetch_counters() -> dict[str, int]:
    """The same of `Engine.stats()["prefetch"]`."""
    return dict.fromkeys(PREFETCH_COUNTERS, 0)


def prefetch_requests(
    chunks: Chunks, prefix: Sequence[int], sink: Sequence[int], namespace: str, info: EngineInfo
) -> list[Request]:
    """Requests that name these chunks, as few as the model's context allows; a chunk that is too long is left out."""
    size = info.block_size
    limit = info.max_model_len - 2 - _padded(len(prefix), size) - _padded(len(sink), size)
    groups: list[list[tuple[ChunkId, Sequence[int]]]] = [[]]
    left = limit
    for chunk_id, ids in {tuple(ids): (chunk_id, ids) for chunk_id, ids in chunks}.values():
        length = _padded(len(ids), size)
        if not 0 < length <= limit:
            continue
        if length > left:
            groups.append([])
            left = limit
        groups[-1].append((chunk_id, ids))
        left -= length
    requests = []
    for group in filter(None, groups):
        token_ids, segments = list(prefix), []
        for chunk_id, ids in group:
            segments.append(Segment(chunk_id, len(token_ids), len(ids)))
            token_ids += ids
        one = Sampling(max_tokens=1)
        requests.append(
            Request([*token_ids, 0], segments, prefix_len=len(prefix), sampling=one, namespace=namespace, sink=sink)
        )
    return requests


def _padded(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size) * block_size


def warm(
    engine: Engine,
    chunks: Iterable[tuple[ChunkId, Sequence[int]]],
    *,
    prefix: Sequence[int] = (),
    sink: Sequence[int] = (),
    namespace: str = "",
    kv_quota: int | None = None,
    batch: int = WARMED_AT_ONCE,
) -> Generator[tuple[ChunkId, Reuse | Exception], None, None]:
    """Make the engine hold (and keep, if it has tiers) the KV of chunks, up to `batch` of them in flight at all times.

    Each chunk is sent as a request `[prefix][chunk]` and a token, since no prompt ends in a segment, that is not run
    itself (`Request.warms_only`). Yields for each chunk, in order, its id and what was reused, or the error.

    Args:
        engine: the engine to warm.
        chunks: (chunk id, token ids) pairs.
        prefix: the preamble to compute them behind (mode `prefix`).
        sink: the tokens to compute them behind (mode `sink`).
        namespace: see `Request`.
        kv_quota: see `Request`.
        batch: how many chunks are in flight at once.
    """
    in_flight: deque[tuple[ChunkId, _Submitted]] = deque()
    one = Sampling(max_tokens=1, ignore_eos=True)

    def oldest() -> tuple[ChunkId, Reuse | Exception]:
        id, submitted = in_flight[0]
        result = submitted.result()
        in_flight.popleft()
        return id, result

    try:
        for id, ids in chunks:
            segment = Segment(id, len(prefix), len(ids))
            tokens = [*prefix, *ids, 0]
            request = Request(tokens, (segment,), len(prefix), one, namespace, sink, kv_quota, warms_only=True)
            in_flight.append((id, _Submitted(engine, request)))
            if len(in_flight) == batch:
                yield oldest()
        while in_flight:
            yield oldest()
    finally:
        for _, submitted in in_flight:
            submitted.cancel()


class _Submitted:
    """A request in flight, of which only the end is looked at."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.cancel = engine.submit(request, self._events.put)

    def result(self) -> Reuse | Exception:
        """Wait for what was reused, or for the error."""
        while True:
            event = self._events.get()
            if isinstance(event, Exception):
                return event
            if event.finish_reason is not None:
                return event.reuse or Reuse(0, 0)
