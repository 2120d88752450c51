"""One process for each engine: started together, asked one at a time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lazyrag.bench import child
from lazyrag.errors import EngineDeadError

CLOSE_S = 30


class EngineProcess:
    """An engine that is being started; `ready` waits for it.

    Args:
        name: in error messages.
        spec: how to start it.
    """

    def __init__(self, name: str, spec: child.Spec) -> None:
        self._name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=child.main, args=(theirs, spec), name=f"lazyrag-bench-{name}")
        self._process.start()
        theirs.close()

    def ready(self) -> dict[str, Any]:
        """Wait until the engine runs.

        Returns:
            `child.Server.facts`.

        Raises:
            LazyRAGError: it does not start.
        """
        facts: dict[str, Any] = self._answer()
        return facts

    def call(self, method: str, **arguments: Any) -> Any:
        """Have the engine do something, and wait.

        Args:
            method: of `child.Server`.
            **arguments: its.

        Raises:
            LazyRAGError: it failed.
        """
        self._connection.send((method, arguments))
        return self._answer()

    def _answer(self) -> Any:
        try:
            status, value = self._connection.recv()
        except (EOFError, ConnectionError):
            raise EngineDeadError(
                f"The process of the engine {self._name!r} is gone.", why="What it logged is above."
            ) from None
        if status == "error":
            raise value
        return value

    def close(self) -> None:
        """Hang up, upon which the process ends."""
        self._connection.close()
        self._process.join(CLOSE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextmanager
def engines(specs: Mapping[str, child.Spec]) -> Iterator[dict[str, EngineProcess]]:
    """Engines by name, in the course of starting; closed at the end."""
    running: dict[str, EngineProcess] = {}
    try:
        for name, spec in specs.items():
            running[name] = EngineProcess(name, spec)
        yield running
    finally:
        for engine in running.values():
            engine.close()
