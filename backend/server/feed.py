"""Files -> a running server. The server compares, splits, embeds and warms; this reads files and sends what it lacks.

    scan -> which of them are needed (digests only) -> parse -> send, some at a time -> delete what is gone
         -> wait until what was there before is warm, too

As with `lazyrag.ingest`, nothing is remembered of a run that was stopped: what the server has acknowledged is stored,
and the next run is told that it is not needed any more.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from os import PathLike
from typing import Any, Protocol

from lazyrag.errors import EngineDeadError, InputError, LazyRAGError, MissingExtraError, RequestError
from lazyrag.ingest import DELETE, PARSE, STORE, WARM, Difference, Progress, Summary
from lazyrag.loaders import MAX_BYTES, Failure, Source, scan
from lazyrag.types import Document

MOST_COMPARED = 10_000
"""Digests in one request."""
MOST_SENT = 32
"""Documents in one request."""
MOST_CHARS = 1 << 20
"""Characters of them, beyond which no further one is put in."""
LOOK_S = 0.5
"""Between two looks at what the server computes in the background."""


class Server(Protocol):
    """What `lazyrag.backend.remote.RemoteRAG` offers for documents."""

    def needed(self, digests: Mapping[str, str]) -> tuple[list[str], list[str]]: ...
    def document_ids(self) -> Iterator[str]: ...
    def add_documents(self, documents: Sequence[tuple[Document, Source]], *, warm: bool) -> Mapping[str, Any]: ...
    def delete_document(self, id: str) -> Mapping[str, Any]: ...
    def kv(self) -> Mapping[str, Any]: ...
    def rebuild_kv(self) -> None: ...


def compare(server: Server, paths: Iterable[str | PathLike[str]], *, max_bytes: int = MAX_BYTES) -> Difference:
    """Compare files with the documents of a server. Reads every file once; changes nothing.

    Raises:
        InputError: see `lazyrag.loaders.scan`.
        EngineDeadError: the server cannot be reached.
    """
    found = scan(paths, max_bytes=max_bytes)
    sources: dict[str, Source] = {}
    for source in found.sources:
        if source.id in sources:
            error = InputError(f"Two documents have the id {source.id}.", why="The second one is left out.")
            found.failed.append(Failure(source.id, error))
        sources.setdefault(source.id, source)
    added: list[str] = []
    changed: list[str] = []
    digests = iter(sources.items())
    while batch := {id: source.sha256 for id, source in islice(digests, MOST_COMPARED)}:
        new, other = server.needed(batch)
        added += new
        changed += other
    needed = {*added, *changed}
    return Difference(
        added=tuple(sources[id] for id in added),
        changed=tuple(sources[id] for id in changed),
        unchanged=tuple(id for id in sources if id not in needed),
        missing=tuple(id for id in server.document_ids() if id not in sources and found.misses(id)),
        failed=tuple(found.failed),
        skipped=tuple(found.skipped),
    )


def feed(
    server: Server, difference: Difference, *, sync: bool = False, warm: bool = True
) -> Iterator[Progress | Summary]:
    """Bring a server to what the files say; the last event is the Summary. Closing the iterator stops after a step.

    Args:
        server: where to.
        difference: made now by `compare`; a file that has changed since then is a failure.
        sync: delete the documents that are missing.
        warm: have the server compute the KV of every chunk now. It goes on with that if this is stopped.

    Raises:
        EngineDeadError: the server cannot be reached, or its engine stays away.
    """
    yield from _Feed(server, difference, warm).events(sync)


class _Feed:
    """One run, and its counters."""

    def __init__(self, server: Server, difference: Difference, warm: bool) -> None:
        self._server, self._difference, self._warm = server, difference, warm
        self._failed = list(difference.failed)
        self._counts = dict.fromkeys(("added", "changed", "chunks_added", "chunks_removed", "embedded", "warmed"), 0)
        self._num_bytes = self._stored = 0

    def events(self, sync: bool) -> Iterator[Progress | Summary]:
        difference = self._difference
        sources = [*difference.added, *difference.changed]
        batch: list[tuple[Document, Source]] = []
        for number, source in enumerate(sources, 1):
            try:
                batch.append((source.load(), source))
                self._num_bytes += source.num_bytes
                yield Progress(PARSE, number, len(sources), self._num_bytes)
            except (InputError, MissingExtraError) as error:
                yield self._failure(PARSE, number, len(sources), source.id, error)
            if len(batch) == MOST_SENT or sum(len(document.text) for document, _ in batch) >= MOST_CHARS:
                yield from self._send(batch, len(sources))
                batch.clear()
        yield from self._send(batch, len(sources))
        deleted = 0
        for id in difference.missing if sync else ():
            self._counts["chunks_removed"] += self._server.delete_document(id)["chunks_removed"]
            deleted += 1
            yield Progress(DELETE, deleted, len(difference.missing), self._num_bytes)
        if self._warm:
            yield from self._rest()
        yield Summary(
            **self._counts,
            unchanged=len(difference.unchanged),
            deleted=deleted,
            missing=0 if sync else len(difference.missing),
            failed=tuple(self._failed),
        )

    def _send(self, batch: Sequence[tuple[Document, Source]], total: int) -> Iterator[Progress]:
        """Send documents; if they are refused together, each by itself."""
        if not batch:
            return
        try:
            answer = self._server.add_documents(batch, warm=self._warm)
        except EngineDeadError:
            raise
        except LazyRAGError as error:
            if len(batch) == 1:
                yield self._failure(STORE, self._stored, total, batch[0][1].id, error)
            else:
                for one in batch:
                    yield from self._send([one], total)
            return
        for name in self._counts:
            self._counts[name] += answer[name]
        self._stored += answer["added"] + answer["changed"] + answer["unchanged"]
        for failed in answer["failed"]:
            refused = RequestError("The server did not take it:", why=failed["error"])
            yield self._failure(STORE, self._stored, total, failed["id"], refused)
        yield Progress(STORE, self._stored, total, self._num_bytes)

    def _rest(self) -> Iterator[Progress]:
        """What the server has stored and not warmed."""
        kv = self._server.kv()
        if not kv["on_disk"] or kv["kept"] == kv["chunks"]:
            return
        before = kv["kept"]
        self._server.rebuild_kv()
        while (kv := self._server.kv())["rebuilding"]["running"]:
            yield Progress(WARM, kv["kept"] - before, kv["chunks"] - before, self._num_bytes)
            time.sleep(LOOK_S)
        warmed = max(0, kv["kept"] - before)
        self._counts["warmed"] += warmed
        if why := kv["rebuilding"]["error"]:
            error = RequestError("The server did not compute the KV of all chunks:", why=why)
            yield self._failure(WARM, warmed, kv["chunks"] - before, "the server", error)

    def _failure(self, stage: str, done: int, total: int, source: str, error: LazyRAGError) -> Progress:
        failure = Failure(source, error)
        self._failed.append(failure)
        return Progress(stage, done, total, self._num_bytes, (failure,))
