"""What every route works with: the caller's client, a bounded queue, generation that ends when the caller is gone."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, TypeVar

from fastapi import Depends, Request
from fastapi.responses import StreamingResponse
from starlette.types import Send

from lazyrag.backend.engine import Delta, Sampling
from lazyrag.backend.server.auth import Keys, is_loopback, names_loopback
from lazyrag.backend.server.metrics import Gauges, Metrics
from lazyrag.backend.server.problems import RETRY_S, Problem
from lazyrag.backend.server.rebuild import Rebuilding
from lazyrag.errors import ConfigError, RequestError
from lazyrag.modes import ReuseMode
from lazyrag.types import PromptPlan

if TYPE_CHECKING:
    from lazyrag.backend.server.supervisor import SupervisedEngine
    from lazyrag.client import LazyRAG, Prompt

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server takes.

    Attributes:
        body_bytes: of one request; more is answered with 413.
        places: prompts and searches that are done or wait at one time; more are answered with 429.
        writes: the same, of one namespace's writes: they may wait long, and nobody's prompts for them.
    """

    body_bytes: int = 16 << 20
    places: int = 256
    writes: int = 32


class Queue:
    """Counts what is done or waits. Used in the event loop only."""

    def __init__(self, size: int) -> None:
        self.size, self.used, self.refused = size, 0, 0

    @contextmanager
    def places(self, count: int = 1) -> Iterator[None]:
        """Take places, and give them back at the end.

        Raises:
            Problem: there are too few now (429), or in any case (400).
        """
        if count > self.size:
            raise Problem(
                400,
                "too_many_prompts",
                RequestError(f"The request has {count} prompts.", why=f"The server takes {self.size} at a time."),
            )
        if self.used + count > self.size:
            self.refused += count
            raise Problem(
                429,
                "rate_limit_exceeded",
                RequestError(
                    "The server is busy:", why=f"{self.used} of {self.size} places are taken.", fix="Try again."
                ),
                retry_s=RETRY_S,
            )
        self.used += count
        try:
            yield
        finally:
            self.used -= count


@dataclass(slots=True)
class Call:
    """One prompt to answer. `plan` is made by `Service.deltas` and stands from the first delta on."""

    rag: LazyRAG
    prompt: Prompt
    sampling: Sampling
    hints: Sequence[str] = ()
    tools: Sequence[Any] | None = None
    special: str = "allow"
    mode: str | None = None
    plan: PromptPlan | None = field(default=None)

    def planned(self) -> PromptPlan:
        """The prompt's plan.

        Raises:
            ConfigError: a mode that clients may not ask for.
            LazyRAGError: see `LazyRAG.plan`.
        """
        if self.mode is not None and ReuseMode.parse(self.mode).recompute and not self._may_recompute():
            raise ConfigError(
                f"Mode {self.mode} cannot be asked for:",
                why="recompute loads the model's first layers beside the engine, which this server's settings forbid.",
                fix="Set serve_recompute for the server, or run it in such a mode. first_k needs nothing of the kind.",
            )
        return self.rag.plan(self.prompt, hints=self.hints, tools=self.tools, special=self.special, mode=self.mode)

    def _may_recompute(self) -> bool:
        return self.rag.config.serve_recompute or bool(ReuseMode.parse(self.rag.choice.mode).recompute)


class Service:
    """A server's state. Used in the event loop only.

    Args:
        rag: answers for its own namespace, and is the source of the clients of the others.
        keys: without any, only callers on this machine are served, as `rag`'s namespace.
        limits: what is taken.
        engine: the engine that `rag` runs on, if it is supervised.

    Attributes:
        stopping: set when the server is told to stop. Writes look at it, for they may take long.
    """

    def __init__(self, rag: LazyRAG, keys: Keys, limits: Limits, engine: SupervisedEngine | None) -> None:
        self.root, self.keys, self.limits, self.engine = rag, keys, limits, engine
        self.queue = Queue(limits.places)
        self.metrics = Metrics(self._gauges, lambda: rag.engine.stats())
        self.stopping = threading.Event()
        self.rebuilding = Rebuilding(self.stopping)
        self._rags: dict[str, LazyRAG] = {}
        # Writing to a store takes long: planning must not wait for it, nor one tenant for another. One write at a time
        # is enough for a tenant.
        self._writers: dict[str, tuple[Queue, ThreadPoolExecutor]] = {}

    @property
    def model(self) -> str:
        """The model's name for clients: the last part of its folder's or its own name."""
        config = self.root.config
        return (config.model or str(self.root.model)).rstrip("/").rpartition("/")[2]

    @property
    def is_ready(self) -> bool:
        """Whether a request would find an engine."""
        return self.engine is None or self.engine.alive

    def _gauges(self) -> Gauges:
        return {
            "places_taken": ("Prompts and searches that are done or wait.", self.queue.used),
            "places": ("How many of them may be.", self.queue.size),
            "places_refused": ("How many were refused since the start.", self.queue.refused),
            "engine_up": ("Whether there is an engine.", int(self.is_ready)),
            "engine_restarts": ("How often the engine was started again.", self.engine.restarts if self.engine else 0),
        }

    def look_at_kv(self, *, rebuild: bool) -> list[str]:
        """What is to be said of namespaces whose KV on disk is another model's; for the start of a server.

        Args:
            rebuild: begin to compute, in the background, what no namespace has for this model.
        """
        said = []
        for namespace in sorted(self.keys.namespaces) or [self.root.config.namespace]:
            rag = self.client_for(namespace)
            state = rag.kv_state() if rag.store is not None else None
            if state is None or state.kept == state.chunks:
                continue
            if state.of_another:
                whose = f" of namespace {namespace!r}" if namespace else ""
                then = "is computed in the background" if rebuild else "is computed when it is used (or: --rebuild-kv)"
                said.append(
                    f"{state.chunks - state.kept} of {state.chunks} chunks{whose}: their KV on disk is of another model"
                    f" or of other settings, and is not used; it {then}. To free its space: lazyrag gc --other-models"
                )
            if rebuild:
                self.rebuilding.start(rag)
        return said

    def close(self) -> None:
        """Have writes under way end, and wait for that."""
        self.stopping.set()
        self.rebuilding.close()
        for _, writer in self._writers.values():
            writer.shutdown(cancel_futures=True)

    async def write(
        self, rag: LazyRAG, function: Callable[Concatenate[LazyRAG, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run something that writes to the store, given a client of its namespace, after what came before of that."""
        namespace = rag.config.namespace
        if namespace not in self._writers:
            writer = ThreadPoolExecutor(1, thread_name_prefix="lazyrag-writer")
            self._writers[namespace] = Queue(self.limits.writes), writer
        queue, writer = self._writers[namespace]
        with queue.places():
            return await asyncio.get_running_loop().run_in_executor(writer, lambda: function(rag, *args, **kwargs))

    # ------------------------------------------------------------ who asks

    def client_of(self, request: Request) -> LazyRAG:
        """The client of the caller's namespace.

        Raises:
            Problem: no key, an unknown one (401), or without keys a caller who may be elsewhere (403).
        """
        if not self.keys:
            host = request.client.host if request.client else None
            if not (is_loopback(host) and names_loopback(request.headers.get("host"))):
                raise Problem(
                    403,
                    "not_local",
                    ConfigError(
                        "Without API keys, only requests from this machine to localhost are served.",
                        fix="Start the server with --api-keys FILE.",
                    ),
                )
            return self.root
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        namespace = self.keys.namespace(key.strip()) if scheme.lower() == "bearer" else None
        if namespace is None:
            raise Problem(
                401,
                "invalid_api_key",
                ConfigError("The API key is missing or unknown.", fix="Send it: Authorization: Bearer KEY."),
            )
        return self.client_for(namespace)

    def client_for(self, namespace: str) -> LazyRAG:
        """The client of a namespace, within its quota."""
        if namespace not in self._rags:
            settings = self.keys.settings(namespace)
            is_root = namespace == self.root.config.namespace and not settings
            self._rags[namespace] = self.root if is_root else self.root.for_namespace(namespace, **settings)
        return self._rags[namespace]

    # ------------------------------------------------------------ answers

    async def deltas(self, call: Call) -> AsyncGenerator[Delta, None]:
        """Plan a prompt and answer it. Closing the generator cancels; its place in the queue is the caller's matter."""
        plan = await asyncio.to_thread(call.planned)
        call.plan = plan
        generated = 0
        async with aclosing(call.rag.astream(plan, call.sampling)) as deltas:
            async for delta in deltas:
                generated += len(delta.token_ids)
                if delta.finish_reason is not None:
                    self.metrics.add(plan, delta.reuse, generated, delta.ttft_s)
                yield delta

    async def whole(self, call: Call) -> list[Delta]:
        """All of an answer's deltas."""
        async with aclosing(self.deltas(call)) as deltas:
            return [delta async for delta in deltas]


async def _service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


async def _caller(request: Request) -> Any:
    found: Service = request.app.state.service
    return found.client_of(request)


async def _operator(request: Request) -> Any:
    found: Service = request.app.state.service
    rag = found.client_of(request)
    if not found.keys.is_operator(rag.config.namespace):
        raise Problem(
            403,
            "not_an_operator",
            ConfigError(
                "Only operators may see what concerns all tenants.",
                fix="Name the key's namespace in the key file: operators = [...].",
            ),
        )
    return rag


ServiceOf = Annotated[Service, Depends(_service)]
Caller = Annotated[Any, Depends(_caller)]
"""The caller's client, a `LazyRAG`, which is known to type checkers only."""
Operator = Annotated[Any, Depends(_operator)]
"""The same, of a caller who may see what concerns all tenants."""


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The work's result; if the caller disconnects first, the work is cancelled.

    Raises:
        Problem: the caller has disconnected.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Problem(499, "client_disconnected", RequestError("The client has disconnected."))
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def begun(stream: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The same stream, after its first item has come: an error before it can still have a status of its own."""
    try:
        first = await anext(stream)
    except BaseException:
        await stream.aclose()
        raise

    async def all_of_it() -> AsyncGenerator[T, None]:
        async with aclosing(stream):
            yield first
            async for item in stream:
                yield item

    return all_of_it()


async def lines(values: AsyncGenerator[Mapping[str, Any], None]) -> AsyncGenerator[str, None]:
    """Values as JSON, one a line."""
    async with aclosing(values):
        async for value in values:
            yield json.dumps(value) + "\n"


class Stream(StreamingResponse):
    """A body that is closed, and with it the generation behind it, when the caller is gone."""

    def __init__(self, content: AsyncGenerator[str, None], media_type: str) -> None:
        headers: Mapping[str, str] = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(content, media_type=media_type, headers=headers)
        self._content = content

    async def stream_response(self, send: Send) -> None:
        """Send the body."""
        async with aclosing(self._content):
            await super().stream_response(send)


def merged(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T | Exception], None]:
    """The items of several streams as they come, with the stream's number; an error is its stream's last item."""
    items: asyncio.Queue[tuple[int, T | Exception | None]] = asyncio.Queue()

    async def feed(number: int, stream: AsyncIterator[T]) -> None:
        try:
            async for item in stream:
                items.put_nowait((number, item))
        except Exception as error:
            items.put_nowait((number, error))
        else:
            items.put_nowait((number, None))

    async def run() -> AsyncGenerator[tuple[int, T | Exception], None]:
        tasks = [asyncio.create_task(feed(number, stream)) for number, stream in enumerate(streams)]
        try:
            left = len(tasks)
            while left:
                number, item = await items.get()
                if item is None or isinstance(item, Exception):
                    left -= 1
                if item is not None:
                    yield number, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    return run()
