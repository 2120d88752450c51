"""An engine that is started again when it dies. Requests in flight get the error; what is on disk stays."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from lazyrag.backend.engine import Cancel, Chunks, Deliver, Engine, EngineInfo, Event, Request
from lazyrag.errors import EngineDeadError

logger = logging.getLogger(__name__)

LONGEST_PAUSE_S = 60.0


class SupervisedEngine:
    """An `Engine` that keeps one engine running. Constructing it starts the engine.

    A death is noticed by the first request that meets it, or by a look every `look_s`. Starting anew is tried until it
    succeeds, after longer and longer pauses; meanwhile requests get `EngineDeadError` at once.

    Args:
        start: makes a new engine; every one has the same `info`.
        pause_s: before the second attempt; doubled before each further one.
        look_s: between two looks at an engine that may be idle.

    Attributes:
        restarts: how often the engine was started again.
    """

    def __init__(self, start: Callable[[], Engine], *, pause_s: float = 1.0, look_s: float = 1.0) -> None:
        self._start, self._pause_s = start, pause_s
        self._engine: Engine | None = start()
        self._info = self._engine.info
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._restart: threading.Thread | None = None
        self.restarts = 0
        threading.Thread(target=self._watch, args=(look_s,), name="lazyrag-watch", daemon=True).start()

    @property
    def info(self) -> EngineInfo:
        """What the text half must know; constant."""
        return self._info

    @property
    def alive(self) -> bool:
        """Whether there is an engine to give requests to. One that has died is started again."""
        engine = self._engine
        if engine is None or engine.alive:
            return engine is not None
        self._replace(engine)
        return False

    def submit(self, request: Request, deliver: Deliver) -> Cancel:
        """See `lazyrag.backend.engine.Engine.submit`."""
        engine = self._engine
        if engine is None:
            deliver(self._dead())
            return lambda: None

        def watched(event: Event) -> None:
            if isinstance(event, EngineDeadError):
                self._replace(engine)
                event = self._dead()  # what the engine says of itself is for its log, and for who starts it
            deliver(event)

        return engine.submit(request, watched)

    def prefetch(
        self, chunks: Chunks, *, prefix: Sequence[int] = (), sink: Sequence[int] = (), namespace: str = ""
    ) -> None:
        """See `lazyrag.backend.engine.Engine.prefetch`."""
        if (engine := self._engine) is not None:
            engine.prefetch(chunks, prefix=prefix, sink=sink, namespace=namespace)

    def pin(self, chunks: Chunks, *, namespace: str = "") -> None:
        """See `lazyrag.backend.engine.Engine.pin`."""
        self._living().pin(chunks, namespace=namespace)

    def unpin(self, chunks: Chunks, *, namespace: str = "") -> None:
        """See `lazyrag.backend.engine.Engine.unpin`."""
        self._living().unpin(chunks, namespace=namespace)

    def forget(self, chunks: Chunks, *, namespace: str = "") -> None:
        """See `lazyrag.backend.engine.Engine.forget`."""
        self._living().forget(chunks, namespace=namespace)

    def _living(self) -> Engine:
        if (engine := self._engine) is None:
            raise self._dead()
        return engine

    def _dead(self) -> EngineDeadError:
        what = "The engine is closed." if self._stopping.is_set() else "The engine stopped and is being started."
        return EngineDeadError(what, fix="" if self._stopping.is_set() else "Try again in a minute.")

    def stats(self) -> dict[str, Any]:
        """The running engine's counters, and how often it was started again."""
        engine = self._engine
        return {**(engine.stats() if engine is not None else {}), "restarts": self.restarts}

    def stop_restarting(self) -> None:
        """From now on a dead engine stays dead: the end of the process is near."""
        self._stopping.set()

    def close(self) -> None:
        """Stop; requests in flight get `EngineDeadError`. Idempotent."""
        with self._lock:
            self._stopping.set()
            engine, self._engine = self._engine, None
            restart = self._restart
        if engine is not None:
            engine.close()
        if restart is not None:
            restart.join()

    # ------------------------------------------------------------ starting again

    def _watch(self, look_s: float) -> None:
        while not self._stopping.wait(look_s):
            self.alive  # noqa: B018  (a dead engine is replaced)

    def _replace(self, dead: Engine) -> None:
        """Begin to start a new engine, unless somebody has."""
        with self._lock:
            if self._stopping.is_set() or self._engine is not dead:
                return
            self._engine = None
            self._restart = threading.Thread(
                target=self._start_again, args=(dead,), name="lazyrag-restart", daemon=True
            )
            self._restart.start()

    def _start_again(self, dead: Engine) -> None:
        logger.warning("The engine stopped. It is started again.")
        try:
            dead.close()
        except Exception as error:
            logger.warning("What is left of the engine could not be closed (%s).", type(error).__name__)
        pause_s = self._pause_s
        while not self._stopping.is_set():
            try:
                engine = self._start()
            except Exception as error:
                logger.error("The engine could not be started (%s). Next attempt in %.0f s.", error, pause_s)
                self._stopping.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            with self._lock:
                stopping = self._stopping.is_set()
                if not stopping:
                    self._engine = engine
                    self.restarts += 1
            if stopping:
                engine.close()
            else:
                logger.warning("The engine runs again.")
            return
