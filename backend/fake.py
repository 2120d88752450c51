"""An engine without a model: for tests, examples and dry runs.

Answers are a pure function of the prompt's token ids, so two plans with the same ids get the same answer. A chunk's
blocks are computed once for each namespace and preamble or sink and are resident afterwards, in whatever prompt and at
whatever position they are used. vLLM's cache of ordinary prompt prefixes is not imitated.

All requests in flight advance together, one token a step, on the engine's one thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeAlias

from lazyrag.backend.engine import (
    Cancel,
    Chunks,
    Deliver,
    Delta,
    EngineInfo,
    Request,
    no_prefetch_counters,
    no_tier_counters,
    prefetch_requests,
)
from lazyrag.backend.layout import Span, lay_out
from lazyrag.backend.local import check_length
from lazyrag.errors import EngineDeadError, EngineError, InputError, RequestError
from lazyrag.modes import ReuseMode
from lazyrag.tokens import Tokenizer
from lazyrag.types import COMPUTED, DISK, HBM, HOST, Reuse, Segment

BlockKey: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Namespace, preamble or sink, and the chunk's tokens up to the block's end."""

WORDS = ("blue", "stone", "river", "seven", "light", "under", "paper", "north", "glass", "early", "green", "salt")


def words(request: Request) -> str:
    """Eight words picked by a hash of the request's token ids; the default reply."""
    digest = blake2b(repr(list(request.token_ids)).encode(), digest_size=8).digest()
    return " ".join(WORDS[byte % len(WORDS)] for byte in digest)


@dataclass(slots=True, eq=False)
class _Running:
    """A request in flight. Only the engine's thread advances it; any thread may set `cancelled`."""

    deltas: Iterator[Delta]
    deliver: Deliver
    cancelled: threading.Event = field(default_factory=threading.Event)


class FakeEngine:
    """A deterministic `Engine` without torch or vLLM. Constructing it starts nothing.

    Args:
        tokenizer: folder with tokenizer.json and tokenizer_config.json.
        mode: a `ReuseMode` as text.
        model: the name that `info` shows.
        max_model_len: tokens of prompt and answer together.
        block_size: tokens a block.
        reply: the text to answer with.
        error: asked for every request; an error that it returns is the request's only event.
        delay_s: seconds that a step takes.

    Attributes:
        requests: every request that was submitted, oldest first.
        prefetched: requests that name the chunks that were to be prefetched, oldest first.
        pinned: (namespace, tokens) of each pinned chunk.
    """

    def __init__(
        self,
        tokenizer: str | Path,
        *,
        mode: str = "lazy",
        model: str = "fake",
        max_model_len: int = 4096,
        block_size: int = 16,
        reply: Callable[[Request], str] = words,
        error: Callable[[Request], EngineError | None] = lambda request: None,
        delay_s: float = 0.0,
    ) -> None:
        self._tokenizer = Tokenizer.from_folder(tokenizer)
        self._info = EngineInfo(
            model=model,
            tokenizer=str(tokenizer),
            mode=str(ReuseMode.parse(mode)),
            max_model_len=max_model_len,
            block_size=block_size,
            kv_bytes_per_token=0,
            fingerprint=f"fake-{self._tokenizer.fingerprint}",
        )
        self._reply, self._error, self._delay_s = reply, error, delay_s
        self.requests: list[Request] = []
        self.prefetched: list[Request] = []
        self.pinned: set[tuple[str, tuple[int, ...]]] = set()
        self._resident: set[BlockKey] = set()
        self._counters: Counter[str] = Counter()
        self._running: list[_Running] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def info(self) -> EngineInfo:
        """What the text half must know; constant."""
        return self._info

    @property
    def alive(self) -> bool:
        """Whether it was not closed."""
        return not self._closed

    def submit(self, request: Request, deliver: Deliver) -> Cancel:
        """See `lazyrag.backend.engine.Engine.submit`."""
        running = _Running(self._run(request, time.monotonic()), deliver)
        with self._changed:
            self.requests.append(request)
            closed = self._closed
            if not closed:
                self._running.append(running)
                self._changed.notify()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._steps, name="lazyrag-fake-engine", daemon=True)
                    self._thread.start()
        if closed:
            deliver(EngineDeadError("The engine is closed."))
        return running.cancelled.set

    def stats(self) -> dict[str, Any]:
        """See `lazyrag.backend.engine.Engine.stats`; `chunks` counts blocks, and nothing has a size."""
        keys = ("requests", "prompt_tokens", "reused_tokens", HBM, HOST, DISK, COMPUTED)
        with self._changed:
            counters = {key: self._counters[key] for key in keys}
            tiers, prefetches = no_tier_counters(), no_prefetch_counters()
            tiers[HBM]["chunks"] = len(self._resident)
            prefetches["asked"] = self._counters["asked"]
        return {**counters, "tiers": tiers, "prefetch": prefetches}

    def prefetch(
        self, chunks: Chunks, *, prefix: Sequence[int] = (), sink: Sequence[int] = (), namespace: str = ""
    ) -> None:
        """Count what is asked for; there is no tier to bring it from."""
        with self._changed:
            self.prefetched += prefetch_requests(chunks, prefix, sink, namespace, self._info)
            self._counters["asked"] = sum(len(request.segments) for request in self.prefetched)

    def pin(self, chunks: Chunks, *, namespace: str = "") -> None:
        """See `lazyrag.backend.engine.Engine.pin`."""
        with self._alive():
            self.pinned |= {(namespace, tuple(ids)) for _, ids in chunks}

    def unpin(self, chunks: Chunks, *, namespace: str = "") -> None:
        """See `lazyrag.backend.engine.Engine.unpin`."""
        with self._alive():
            self.pinned -= {(namespace, tuple(ids)) for _, ids in chunks}

    def forget(self, chunks: Chunks, *, namespace: str = "") -> None:
        """See `lazyrag.backend.engine.Engine.forget`."""
        with self._alive():
            for _, ids in chunks:
                chunk = tuple(ids)
                self.pinned.discard((namespace, chunk))
                gone = {
                    key for key in self._resident if key[0] == namespace and key[2] and chunk[: len(key[2])] == key[2]
                }
                self._resident -= gone

    @contextmanager
    def _alive(self) -> Iterator[None]:
        with self._changed:
            if self._closed:
                raise EngineDeadError("The engine is closed.")
            yield

    def close(self) -> None:
        """Stop; requests in flight get `EngineDeadError`. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # ------------------------------------------------------------ the engine's thread

    def _steps(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._running or self._closed)
                batch = list(self._running)
                if self._closed:
                    break
            time.sleep(self._delay_s)
            for running in batch:
                if self._ends(running):
                    with self._changed:
                        self._running.remove(running)
        for running in batch:
            running.deliver(EngineDeadError("The engine was closed while this request was in flight."))

    def _ends(self, running: _Running) -> bool:
        """Advance a request by one token; whether that was its last."""
        if running.cancelled.is_set():
            return True
        try:
            delta = next(running.deltas)
        except EngineError as error:
            running.deliver(error)
            return True
        except Exception as error:  # a fault of this request's, or ours: the others go on
            running.deliver(EngineError("The request failed inside the engine.", why=f"{type(error).__name__}."))
            return True
        running.deliver(delta)
        return delta.finish_reason is not None

    def _run(self, request: Request, submitted: float) -> Iterator[Delta]:
        if error := self._error(request):
            raise error
        self._check(request)
        reuse = self._prefill(request)
        ttft_s = None
        if request.warms_only:
            self._count(reuse)
            yield Delta(finish_reason="stop", reuse=reuse)
            return
        for delta in self._decode(request):
            ttft_s = ttft_s or time.monotonic() - submitted
            if delta.finish_reason is not None:
                self._count(reuse)
                delta = replace(delta, reuse=reuse, ttft_s=ttft_s)
            yield delta

    def _check(self, request: Request) -> None:
        check_length(request, self._info.max_model_len)
        try:
            self._tokenizer.decode(request.sampling.allowed_token_ids)
        except OverflowError:
            raise RequestError("allowed_token_ids holds what is no token.") from None
        spans = [Span(s.start, s.num_tokens, s.offset, s.chunk_tokens) for s in request.segments]
        block_size = self._info.block_size
        try:
            lay_out(
                request.token_ids,
                spans,
                prefix_len=request.prefix_len,
                block_size=block_size,
                pad=0,
                sink=request.sink,
            )
        except InputError as error:
            raise RequestError(error.what, why=error.why, fix=error.fix) from error

    def _count(self, reuse: Reuse) -> None:
        with self._changed:
            self._counters.update(
                requests=1,
                prompt_tokens=reuse.prompt_tokens,
                reused_tokens=reuse.reused_tokens,
                **Counter(reuse.sources),
            )

    def _prefill(self, request: Request) -> Reuse:
        """Make the request's chunks resident; what was so before is reused."""
        preamble = tuple(request.token_ids[: request.prefix_len])
        reused = 0
        if preamble:
            key = (request.namespace, preamble, ())
            reused += len(preamble) if key in self._resident else 0
            self._resident.add(key)
        sources = []
        block_size, computed = self._info.block_size, set[int]()
        for segment in request.segments:
            blocks = list(self._blocks(request, segment, preamble or tuple(request.sink)))
            end = -(-(segment.offset + segment.num_tokens) // block_size)
            start = segment.start - segment.offset
            # Of a chunk of which several parts are used, all are computed for the first.
            held = self._resident.issuperset(blocks[segment.offset // block_size : end]) and start not in computed
            reused += segment.num_tokens if held else 0
            sources.append(HBM if held else COMPUTED)
            computed |= set() if held else {start}
            self._resident.update(blocks)
        return Reuse(len(request.token_ids), reused, tuple(sources))

    def _blocks(self, request: Request, segment: Segment, behind: tuple[int, ...]) -> Iterator[BlockKey]:
        """The blocks of the segment's chunk."""
        span = Span(segment.start, segment.num_tokens, segment.offset, segment.chunk_tokens)
        chunk = tuple(request.token_ids[span.chunk_start : span.chunk_end])
        for start in range(0, len(chunk), self._info.block_size):
            yield request.namespace, behind, chunk[: start + self._info.block_size]

    def _decode(self, request: Request) -> Iterator[Delta]:
        """The reply, token by token. A character that spans tokens comes with its last one."""
        sampling = request.sampling
        limit = min(sampling.max_tokens, self._info.max_model_len - len(request.token_ids))
        ids = self._tokenizer.encode_plain(self._reply(request))
        if allowed := sampling.allowed_token_ids:
            ids = [id if id in allowed else allowed[0] for id in ids]
        if sampling.ignore_eos:
            ids = list(islice(cycle(ids), limit + 1))
        full, ids = len(ids) > limit, ids[:limit]
        text = self._tokenizer.decode(ids)
        stops = [(text.index(stop), len(stop)) for stop in sampling.stop if stop in text]
        cut, stop_len = min(stops, default=(len(text), 0))
        shown = 0
        for n, token in enumerate(ids, start=1):
            known = len(text) if n == len(ids) else len(self._tokenizer.decode(ids[:n]).rstrip("\ufffd"))
            stopped = bool(stops) and known >= cut + stop_len
            reason = "stop" if stopped else None if n < len(ids) else "length" if full else "stop"
            end = max(shown, min(known, cut))
            logprobs = () if sampling.logprobs is None else ({token: 0.0},)
            yield Delta(text[shown:end], (token,), logprobs, reason)
            shown = end
            if stopped:
                return
        if not ids:
            yield Delta(finish_reason="stop")
