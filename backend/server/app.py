"""The server: routes put together, what is common to all of them, and how it runs."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from traceback import extract_tb
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lazyrag._version import __version__
from lazyrag.backend.server import documents, native, openai
from lazyrag.backend.server.auth import Keys, is_loopback
from lazyrag.backend.server.metrics import CONTENT_TYPE
from lazyrag.backend.server.problems import Problem, problem_of, response_of
from lazyrag.backend.server.service import Limits, Operator, Service, ServiceOf
from lazyrag.errors import ConfigError, EngineDeadError, InputError, LazyRAGError

if TYPE_CHECKING:
    from lazyrag.backend.server.supervisor import SupervisedEngine
    from lazyrag.client import LazyRAG

logger = logging.getLogger(__name__)

GRACE_S = 15
"""How long a server that is told to stop waits for requests under way."""


def create_app(
    rag: LazyRAG,
    *,
    keys: Keys | None = None,
    limits: Limits | None = None,
    engine: SupervisedEngine | None = None,
) -> FastAPI:
    """The application.

    Args:
        rag: a client with an engine. It answers for its own namespace, and gives clients for those of the keys.
        keys: API keys; without any, only this machine is served.
        limits: what is taken at most.
        engine: the engine of `rag`, if it is supervised: then /ready tells when it is away.
    """
    service = Service(rag, keys or Keys(), limits or Limits(), engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        yield
        service.close()

    app = FastAPI(title="LazyRAG", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(LazyRAGError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_middleware(_Limit, num_bytes=service.limits.body_bytes)
    app.add_middleware(_Watch, service=service)
    for router in (openai.router, documents.router, native.router):
        app.include_router(router)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the server runs."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Whether it can answer now."""
        return JSONResponse({"ready": service.is_ready}, 200 if service.is_ready else 503)

    @app.get("/metrics")
    async def metrics(caller: Operator, service: ServiceOf) -> Response:
        """Counters for Prometheus, over all namespaces; for operators."""
        return Response(await asyncio.to_thread(service.metrics.exposition), media_type=CONTENT_TYPE)

    return app


# ---------------------------------------------------------------- errors


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return response_of(error)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, LazyRAGError)
    return response_of(problem_of(error))


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]  # which holds what was given, too: that is not repeated
    if first["type"] == "json_invalid":
        fault = InputError(
            "The request's body is not JSON:", why=f"it cannot be read from character {first['loc'][-1]} on."
        )
        return response_of(Problem(400, "invalid_request", fault))
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    fix = "Add it; GET /openapi.json says what it holds." if first["type"] == "missing" and place else ""
    fault = InputError(f"The request cannot be read at {place or 'its body'}:", why=f"{first['msg']}.", fix=fix)
    return response_of(Problem(400, "invalid_request", fault, param=place or None))


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    fault = InputError(
        f"{error.detail}.", fix="GET /openapi.json lists what there is." if error.status_code == 404 else ""
    )
    response = response_of(Problem(error.status_code, f"http_{error.status_code}", fault))
    response.headers.update(error.headers or {})
    return response


class _Watch:
    """Counts answers, and answers what nobody foresaw. The log gets its place only: a traceback could show a prompt."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def seen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, seen)
        except asyncio.CancelledError:  # uvicorn's, when `GRACE_S` are over; whoever is answered sees it break off
            logger.warning("A request was cut off, for the server stops.")
            if not status:
                await response_of(problem_of(EngineDeadError("The server stops.")))(scope, receive, seen)
        except Exception as error:
            place = extract_tb(error.__traceback__)[-1]
            logger.error("A request failed: %s at %s:%s.", type(error).__name__, place.filename, place.lineno)
            if not status:
                fault = LazyRAGError("The server failed.", why=f"{type(error).__name__}; its log says where.")
                await response_of(Problem(500, "server_error", fault))(scope, receive, seen)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._service.metrics.answered(route, status)


class _Limit:
    """Refuses bodies that are too large, as soon as they are."""

    def __init__(self, app: ASGIApp, num_bytes: int) -> None:
        self._app, self._num_bytes = app, num_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        declared = next((v for k, v in scope.get("headers", ()) if k == b"content-length"), b"")
        if declared.isdigit() and int(declared[:20]) > self._num_bytes:
            await response_of(self._problem())(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._num_bytes:
                raise HTTPException(413, "The request is too large")  # the kind that routes let through
            return message

        await self._app(scope, counted, send)

    def _problem(self) -> Problem:
        fault = InputError("The request is too large:", why=f"the server takes {self._num_bytes} bytes.")
        return Problem(413, "http_413", fault)


# ---------------------------------------------------------------- running


def bound(host: str, port: int, keys: Keys) -> socket.socket:
    """A socket that nobody can connect to yet: that the port is free is known before the engine starts.

    Raises:
        ConfigError: the address cannot be had, or is open to others and there are no keys.
    """
    if not keys and not is_loopback(host):
        raise ConfigError(
            f"Without API keys, {host} would be open to everybody who can reach it.",
            fix="Name a key file: --api-keys FILE. Or serve this machine only: --host 127.0.0.1.",
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"The server cannot listen on {host} port {port}:", why=f"{why}.") from None
    return listener


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, started: Callable[[], None], stopping: Callable[[], None]) -> None:
        super().__init__(config)
        self._started, self._stopping = started, stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._stopping()
        super().handle_exit(sig, frame)


def run(
    app: FastAPI,
    listener: socket.socket,
    *,
    started: Callable[[], None] = lambda: None,
    stopping: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal says stop; then no new requests are taken, and those under way have `GRACE_S` to end.

    Documents that are coming in are not waited for: what was stored stays, and the request gets 503.

    Args:
        app: made by `create_app`.
        listener: made by `bound`.
        started: called when the server can be reached.
        stopping: called when it is told to stop.
    """

    def stop() -> None:
        app.state.service.stopping.set()
        stopping()

    # No access log: paths hold ids of documents.
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=GRACE_S)
    with _outliving(signal.SIGINT, signal.SIGTERM):
        _Server(config, started, stop).run(sockets=[listener])


@contextmanager
def _outliving(*signals: signal.Signals) -> Iterator[None]:
    """Uvicorn raises a signal that it was stopped by once more at its end; the caller has things to close then."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {one: signal.signal(one, lambda number, frame: None) for one in signals}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
