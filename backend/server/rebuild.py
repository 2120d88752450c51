"""KV that is computed in the background: of every chunk of a namespace that has none on disk for this model."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lazyrag.errors import EngineDeadError, LazyRAGError
from lazyrag.ingest import Summary

if TYPE_CHECKING:
    from lazyrag.client import LazyRAG

logger = logging.getLogger(__name__)

AT_ONCE = 2
"""Chunks that are computed at a time: requests come first."""
PAUSE_S = 5.0
"""Until it goes on after the engine has died."""


@dataclass(frozen=True, slots=True)
class State:
    """Of one namespace's rebuilding.

    Attributes:
        done, total: chunks.
        error: why it stopped; empty if it did not.
    """

    running: bool = False
    done: int = 0
    total: int = 0
    error: str = ""


class Rebuilding:
    """One thread for each namespace that is rebuilt.

    Args:
        stopping: set when the server stops; what is under way then ends after the chunks that are being computed.
    """

    def __init__(self, stopping: threading.Event) -> None:
        self._states: dict[str, State] = {}
        self._threads: list[threading.Thread] = []
        self._stopping = stopping
        self._lock = threading.Lock()

    def state(self, namespace: str) -> State:
        """How far it is."""
        return self._states.get(namespace, State())

    def start(self, rag: LazyRAG) -> None:
        """Begin with a client's namespace, unless it is under way."""
        namespace = rag.config.namespace
        with self._lock:
            if self._stopping.is_set() or self.state(namespace).running:
                return
            self._states[namespace] = State(running=True)
            thread = threading.Thread(target=self._run, args=(rag,), name="lazyrag-rebuild", daemon=True)
            self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
            thread.start()

    def start_if_needed(self, rag: LazyRAG) -> None:
        """Begin if there is KV to compute; not after an error, such as a full quota, which would come again."""
        if rag.keeps_kv and not self.state(rag.config.namespace).error:
            kv = rag.kv_state()
            if kv.kept < kv.chunks:
                self.start(rag)

    def close(self) -> None:
        """Wait for the end, once `stopping` is set; what was computed is kept."""
        with self._lock:
            assert self._stopping.is_set()
        for thread in self._threads:
            thread.join()

    def _run(self, rag: LazyRAG) -> None:
        namespace, error = rag.config.namespace, ""
        while not self._stopping.is_set():
            try:
                error = self._pass(rag)
                break
            except EngineDeadError:
                self._stopping.wait(PAUSE_S)
            except LazyRAGError as refused:
                error = str(refused)
                break
            except Exception as unforeseen:
                error = f"{type(unforeseen).__name__}; it can be begun again."
                break
        if error:
            logger.error("KV is no longer computed in the background: %s", error)
        state = self.state(namespace)
        self._states[namespace] = State(False, state.done, state.total, error)

    def _pass(self, rag: LazyRAG) -> str:
        """What could not be computed; empty if all was, or if the server stops."""
        events = rag.rebuild_kv(batch=AT_ONCE)
        try:
            for event in events:
                if self._stopping.is_set():
                    return ""
                if isinstance(event, Summary):
                    return str(event.failed[0].error) if event.failed else ""
                if event.stage == "warm":
                    self._states[rag.config.namespace] = State(True, event.done, event.total)
        finally:
            events.close()
        return ""
