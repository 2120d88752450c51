"""Documents -> store. First a plan that can be shown, then a run that can be stopped at any moment and started again.

    parse -> split -> embed -> store (one transaction a document) -> delete -> embed what has no vector -> index
                                  |
                                  +-> warm; then what was stored before and is not warm

Three threads work at the same time: the caller's reads, splits and stores, one embeds the group of documents that was
read last, and one has the engine compute what was stored. Between them wait a group or two, and `_AHEAD` chunks.

Nothing is remembered of an interrupted run, because nothing needs to be: what is in the store is whole, so the next
plan finds it unchanged, and chunks that have no vector, or whose KV is not known to be kept, are embedded and warmed. A
changed document replaces its old version in one step; chunks that it keeps are neither embedded nor warmed again.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from itertools import compress, islice
from math import isfinite
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lazyrag.care import Forget, models_of, remove_doomed_kv
from lazyrag.errors import (
    EngineDeadError,
    InputError,
    LazyRAGError,
    LoadError,
    MissingExtraError,
    QuotaError,
    StoreError,
)
from lazyrag.loaders import MAX_BYTES, Failure, Scan, Source, scan
from lazyrag.retrievers.embed import Embedder
from lazyrag.retrievers.store import NO_QUOTA, Store
from lazyrag.retrievers.vectors import VectorIndex
from lazyrag.splitter import Splitter
from lazyrag.types import COMPUTED, HBM, HOST, ChunkId, Document, EncodedChunk, Quota, Reuse

if TYPE_CHECKING:
    from lazyrag.quota import KVQuota

PARSE, SPLIT, EMBED, STORE, DELETE, INDEX, WARM = STAGES = (
    "parse",
    "split",
    "embed",
    "store",
    "delete",
    "index",
    "warm",
)

EMBED_BATCH = 64
_GROUP = EMBED_BATCH  # chunks that are split before their documents are embedded and stored
_MARK = 32  # warmed chunks that are journaled at once
_AHEAD = 512  # chunks that wait for the engine

Warm: TypeAlias = Callable[[Iterable[tuple[ChunkId, Sequence[int]]]], Iterator[tuple[ChunkId, Reuse | Exception]]]
"""Computes (or finds) the KV of chunks given as id and tokens; `lazyrag.backend.engine.warm`, bound to an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How files and documents differ from what is stored.

    Attributes:
        added: not in the store yet.
        changed: in the store, but made from other bytes, or split or embedded in another way.
        unchanged: ids of documents that need no work.
        missing: ids of stored documents below the given files and folders whose files are gone.
        failed: what cannot be read.
        skipped: files in the given folders that were passed over.
        interrupted: the run before did not come to its end (or is still running, in another process).
    """

    added: tuple[Source, ...]
    changed: tuple[Source, ...]
    unchanged: tuple[str, ...]
    missing: tuple[str, ...]
    failed: tuple[Failure, ...]
    skipped: tuple[str, ...]
    interrupted: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes that will be read."""
        return sum(source.num_bytes for source in (*self.added, *self.changed))


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestPlan(Difference):
    """What a run would do, and what it needs for that. Made by `plan`.

    Attributes:
        quota: what the namespace may hold.
    """

    store: Store = field(repr=False)
    splitter: Splitter = field(repr=False)
    embedder: Embedder | None = field(repr=False)
    namespace: str
    quota: Quota = NO_QUOTA

    @property
    def ids(self) -> list[str]:
        """Of all documents that were given and can be read."""
        return [*(source.id for source in (*self.added, *self.changed)), *self.unchanged]

    @property
    def settings(self) -> dict[str, str]:
        """What the store is tied to by this ingest."""
        embedding = {"embedding": self.embedder.name} if self.embedder else {}
        return {"tokenizer": self.splitter.tokenizer.fingerprint, **embedding}


@dataclass(frozen=True, slots=True)
class Progress:
    """A step that was done.

    Attributes:
        stage: one of STAGES. Stages take turns until everything is stored.
        done: documents (parse, split, store, delete) or chunks (embed, warm) so far; 1 of 1 for index.
        total: as far as known; that of `embed` grows while documents are split.
        num_bytes: read so far, of all documents.
        failures: what could not be done in this step; the run goes on.
    """

    stage: str
    done: int
    total: int
    num_bytes: int
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class Summary:
    """The last event of a run.

    Attributes:
        added: documents, as `changed`, `unchanged`, `deleted` and `missing` (gone, but kept).
        chunks_added: chunks that the namespace did not hold before, as `chunks_removed`, `embedded` and `warmed`.
        failed: everything that could not be done.
    """

    added: int = 0
    changed: int = 0
    unchanged: int = 0
    deleted: int = 0
    missing: int = 0
    chunks_added: int = 0
    chunks_removed: int = 0
    embedded: int = 0
    warmed: int = 0
    failed: tuple[Failure, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 if all was done, 1 if some of it failed."""
        return 1 if self.failed else 0


def plan(
    store: Store,
    paths: Iterable[str | PathLike[str]] | Scan = (),
    *,
    splitter: Splitter,
    embedder: Embedder | None = None,
    documents: Iterable[Document | Source] = (),
    namespace: str = "",
    max_bytes: int = MAX_BYTES,
    quota: Quota = NO_QUOTA,
) -> IngestPlan:
    """Compare documents with the store. Reads every file once; changes nothing.

    Args:
        store: where they shall be.
        paths: see `lazyrag.loaders.scan`; or what it has found.
        splitter: how they are split.
        embedder: makes them searchable; None: they are not.
        documents: from elsewhere than files. They are never missing. One with fields that cannot be is a failure. A
            `Source` says itself when it has changed.
        namespace: whose they are.
        max_bytes: see `lazyrag.loaders.scan`.
        quota: what the namespace may hold.

    Raises:
        InputError: a path or a document where a list is meant, or a path that is empty or none.
        StoreError: the store was made with another tokenizer or embedder.
    """
    if isinstance(documents, (Document, str, bytes, Mapping)):
        raise InputError("One document was given where a list of documents is meant.", fix="Pass a list: [document].")
    found = paths if isinstance(paths, Scan) else scan(paths, max_bytes=max_bytes)
    for number, document in enumerate(documents, 1):
        if isinstance(document, Source):
            found.sources.append(document)
        elif why := _unfit(document):
            id = getattr(document, "id", "")
            name = id if isinstance(id, str) and id and _is_unicode(id) else f"document {number}"
            found.failed.append(Failure(name, InputError(f"{name} cannot be ingested:", why=why)))
        else:
            found.sources.append(_source(document))
    recipe = _recipe(splitter, embedder)
    known = {stored.id: (stored.sha256, stored.recipe) for stored in store.documents(namespace)}
    new, changed, unchanged = _compare(found, known, recipe)
    here = {source.id for source in found.sources}
    last = store.last_run(namespace)
    made = IngestPlan(
        store=store,
        splitter=splitter,
        embedder=embedder,
        namespace=namespace,
        added=tuple(new),
        changed=tuple(changed),
        unchanged=tuple(unchanged),
        missing=tuple(id for id in known if id not in here and found.misses(id)),
        failed=tuple(found.failed),
        skipped=tuple(found.skipped),
        interrupted=last is not None and last.finished_at is None,
        quota=quota,
    )
    store.expect(**made.settings)
    return made


def run(
    plan: IngestPlan,
    *,
    sync: bool = False,
    warm: Warm | None = None,
    rest: bool = True,
    fingerprint: str | None = None,
    bytes_per_token: int = 0,
    bytes_per_chunk: int = 0,
    forget: Forget | None = None,
) -> Iterator[Progress | Summary]:
    """Do what the plan says, step by step; the last event is the Summary. Closing the iterator stops after a step.

    Args:
        plan: made now; a file that has changed since then is a failure.
        sync: delete the documents that are missing.
        warm: has the KV computed of every chunk of the namespace that is not known to be warm. None: the first prompt
            that holds a chunk pays for it.
        rest: warm what is in the store besides the plan's documents, too.
        fingerprint: names the place where `warm` leaves the KV: model, KV format, and what chunks are computed behind.
            What the engine then holds is noted (`Store.mark_warm`), and not warmed again. None: the KV does not outlive
            the process.
        bytes_per_token: of KV, to keep within the plan's quota.
        bytes_per_chunk: that its file takes besides.
        forget: has an engine forget chunks that went, see `lazyrag.care.remove_doomed_kv`.

    Raises:
        StoreError: the store was made with another tokenizer or embedder, or fails.
        EngineDeadError: the engine stopped while warming.
    """
    yield from _Run(plan, bytes_per_token, bytes_per_chunk, forget).events(sync, warm, rest, fingerprint)


def _unfit(document: object) -> str:
    """Why this cannot be ingested; empty if it can."""
    if not isinstance(document, Document):
        return f"it is a {type(document).__name__}, not a Document."
    given: Any = document  # whose fields may be anything
    texts = {"id": given.id, "text": given.text, "source": given.source}
    texts |= {"title": given.title} if given.title is not None else {}
    for name, value in texts.items():
        if not isinstance(value, str):
            return f"its {name} is a {type(value).__name__}, not a str."
    if not given.id:
        return "its id is empty."
    if not isinstance(given.metadata, Mapping):
        return f"its metadata is a {type(given.metadata).__name__}, not a mapping."
    if not all(isinstance(name, str) and _is_scalar(value) for name, value in given.metadata.items()):
        return "its metadata holds a name that is no str, or a value that is no str, bool, finite number or None."
    if not all(map(_is_unicode, (*texts.values(), *given.metadata, *given.metadata.values()))):
        return "one of its texts holds a lone surrogate, which is not Unicode."
    if not _are_pages(given.pages):
        return "its pages are no ascending whole numbers that begin with 0."
    return ""


def _is_scalar(value: object) -> bool:
    if isinstance(value, int):
        return value.bit_length() <= 64  # longer ones are no numbers to most readers of JSON
    return value is None or isinstance(value, str) or (isinstance(value, float) and isfinite(value))


def _is_unicode(value: object) -> bool:
    try:
        str(value).encode()
    except UnicodeEncodeError:
        return False
    return True


def _are_pages(pages: object) -> bool:
    if not isinstance(pages, Sequence) or not all(type(start) is int for start in pages):
        return False
    return list(pages) == sorted(pages) and list(pages[:1]) in ([], [0])


def _source(document: Document) -> Source:
    """A document from elsewhere, as something to ingest."""
    content = [document.text, document.source, document.title, dict(document.metadata), document.pages]
    data = json.dumps(content, sort_keys=True).encode()
    return Source(document.id, sha256(data).hexdigest(), len(data), None, lambda: document)


def source_of(document: Document, sha256: str, mtime: float | None) -> Source:
    """A document from elsewhere, of which is known what it was made from.

    Its fields are looked at when it is loaded: a `LoadError` says what is wrong with them.
    """

    def load() -> Document:
        if why := _unfit(document):
            raise LoadError("The document cannot be ingested:", why=why)
        return document

    return Source(document.id, sha256, len(document.text), mtime, load)


def _recipe(splitter: Splitter, embedder: Embedder | None) -> str:
    return f"{splitter.recipe} {embedder.name if embedder else '-'}"


def _compare(
    found: Scan, known: Mapping[str, tuple[str, str]], recipe: str
) -> tuple[list[Source], list[Source], list[str]]:
    """What is new, what is changed, and the ids of what is neither. A second document of one id is a failure."""
    new, changed, unchanged = [], [], []
    seen: set[str] = set()
    for source in found.sources:
        if source.id in seen:
            error = InputError(f"Two documents have the id {source.id}.", why="The second one is left out.")
            found.failed.append(Failure(source.id, error))
        elif source.id not in known:
            new.append(source)
        elif known[source.id] != (source.sha256, recipe):
            changed.append(source)
        else:
            unchanged.append(source.id)
        seen.add(source.id)
    return new, changed, unchanged


class _Warming:
    """Has chunks computed from a thread of its own: the engine works while documents are read, split and embedded.

    Args:
        warm: computes them.
        note: called in that thread with each result.
    """

    def __init__(self, warm: Warm, note: Callable[[ChunkId, Reuse | Exception], None]) -> None:
        self._note = note
        self._chunks: queue.Queue[tuple[ChunkId, tuple[int, ...]] | None] = queue.Queue(_AHEAD)
        self._results: queue.SimpleQueue[tuple[ChunkId, Reuse | Exception] | BaseException | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._is_over = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(warm,), name="lazyrag-warm", daemon=True)
        self._thread.start()

    def offer(self, chunk: tuple[ChunkId, tuple[int, ...]]) -> Iterator[tuple[ChunkId, Reuse | Exception]]:
        """Have a chunk computed; while too many wait, the results of others. After an error nothing is taken."""
        while not self._is_over:
            try:
                self._chunks.put_nowait(chunk)
            except queue.Full:
                yield from self._next(wait=True)
            else:
                return

    def results(self) -> Iterator[tuple[ChunkId, Reuse | Exception]]:
        """What has come by now."""
        while not self._is_over and not self._results.empty():
            yield from self._next(wait=False)

    def finish(self) -> Iterator[tuple[ChunkId, Reuse | Exception]]:
        """Wait for all.

        Raises:
            BaseException: what the engine's side ended with.
        """
        yield from self._end()
        while not self._is_over:
            yield from self._next(wait=True)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop after what is under way. Idempotent."""
        self._stopping.set()
        for _ in self._end():
            pass
        self._thread.join()

    def _end(self) -> Iterator[tuple[ChunkId, Reuse | Exception]]:
        while not self._is_over:
            try:
                self._chunks.put_nowait(None)
            except queue.Full:
                yield from self._next(wait=True)
            else:
                return

    def _next(self, *, wait: bool) -> Iterator[tuple[ChunkId, Reuse | Exception]]:
        item = self._results.get(block=wait)
        if item is None or isinstance(item, BaseException):
            self._is_over, self._error = True, item
        else:
            yield item

    def _run(self, warm: Warm) -> None:
        try:
            for id, result in warm(self._given()):
                self._note(id, result)
                self._results.put((id, result))
        except BaseException as error:
            self._results.put(error)
        else:
            self._results.put(None)

    def _given(self) -> Iterator[tuple[ChunkId, tuple[int, ...]]]:
        while (chunk := self._chunks.get()) is not None and not self._stopping.is_set():
            yield chunk


@dataclass(slots=True)
class _Ready:
    """A document that waits to be stored."""

    source: Source
    document: Document
    chunks: list[EncodedChunk]


class _Embedding:
    """Embeds texts in a thread of its own, batch by batch in the order in which they were given.

    Args:
        embedder: makes the vectors.
    """

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lazyrag-embed")

    def begin(self, texts: Mapping[ChunkId, str]) -> list[_Batch]:
        """Have texts embedded."""
        ids = list(texts)
        size = -(-len(ids) // max(1, -(-len(ids) // EMBED_BATCH)))  # as few as possible, all of about one size
        batches = (ids[start : start + size] for start in range(0, len(ids), max(1, size)))
        return [(batch, self._pool.submit(self._embed, [texts[id] for id in batch])) for batch in batches]

    def _embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return self._embedder.embed_documents(texts)

    def close(self) -> None:
        """Stop after the batch under way."""
        self._pool.shutdown(cancel_futures=True)


_Batch: TypeAlias = "tuple[list[ChunkId], Future[NDArray[np.float32]]]"


@dataclass(slots=True)
class _Group:
    """Documents whose chunks are being embedded.

    Attributes:
        ids: of their chunks.
        vectors: of those that the store, or a group before this one, has; the others' come with `batches`.
    """

    documents: list[_Ready]
    ids: set[ChunkId]
    vectors: dict[ChunkId, NDArray[np.float32]]
    batches: list[_Batch]


class _Run:
    """One run: its counters, and its stages as generators of events."""

    def __init__(self, plan: IngestPlan, bytes_per_token: int, bytes_per_chunk: int, forget: Forget | None) -> None:
        self._plan, self._forget = plan, forget
        self._bytes_per_token, self._bytes_per_chunk = bytes_per_token, bytes_per_chunk
        self._store = plan.store
        self._failed = list(plan.failed)
        self._num_bytes = 0
        self._added = self._changed = self._deleted = 0
        self._chunks_added = self._chunks_removed = self._embedded = self._warmed = 0
        self._split = self._stored = self._to_embed = 0
        self._embedding = _Embedding(plan.embedder) if plan.embedder is not None else None
        self._warming: _Warming | None = None
        self._fingerprint: str | None = None
        self._quota: KVQuota | None = None
        self._given = self._done = self._beyond = self._unused = 0
        self._offered: set[ChunkId] = set()  # chunks that the store does not know to be warm
        self._computing: dict[ChunkId, tuple[int, ...]] = {}
        self._unmarked: dict[ChunkId, tuple[int, ...]] = {}

    def events(
        self, sync: bool, warm: Warm | None, rest: bool, fingerprint: str | None
    ) -> Iterator[Progress | Summary]:
        plan, store = self._plan, self._store
        dim = {}
        if plan.embedder is not None and "embedding" not in store.settings():  # else it is not asked, which may load it
            dim = {"dim": str(plan.embedder.dim)}
        store.require(**plan.settings, **dim)
        key = store.start_run(plan.namespace)
        if warm is not None:
            self._fingerprint = fingerprint
            if plan.quota.kv_bytes is not None and fingerprint:
                from lazyrag.quota import KVQuota

                self._quota = KVQuota(store, plan.namespace, plan.quota.kv_bytes)
            self._warming = _Warming(warm, self._note)
        try:
            yield from self._documents()
            if sync:
                yield from self._delete()
            remove_doomed_kv(store, self._forget)
            if self._embedding is not None:
                yield from self._complete(self._embedding)
                yield self._index()
            if self._warming is not None:
                yield from self._rest(None if rest else self._plan.ids)
        finally:
            if self._embedding is not None:
                self._embedding.close()
            try:
                if self._warming is not None:
                    self._warming.close()
                    self._unused += sum(map(self._size, self._computing.values()))
                    self._mark()
            finally:
                if self._quota is not None:
                    self._quota.close()
            remove_doomed_kv(store, self._forget)
        summary = self._summary(sync)
        counts = asdict(replace(summary, failed=())) | {"failed": [failure.source for failure in summary.failed]}
        store.finish_run(key, counts)
        yield summary

    # ------------------------------------------------------------ stages

    def _documents(self) -> Iterator[Progress]:
        sources = [*self._plan.added, *self._plan.changed]
        documents: list[_Ready] = []
        groups: deque[_Group] = deque()
        for number, source in enumerate(sources, 1):
            try:
                document = source.load()
                self._num_bytes += source.num_bytes
                yield self._progress(PARSE, number, len(sources))
                documents.append(_Ready(source, document, self._plan.splitter.split(document)))
                self._split += 1
                yield self._progress(SPLIT, self._split, len(sources))
            except (InputError, MissingExtraError) as error:
                yield self._failure(PARSE, number, len(sources), source.id, error)
            # Small documents are embedded together; a large one does not wait for others.
            if sum(len(ready.chunks) for ready in documents) >= _GROUP:
                groups.append(self._begin(documents, groups))
                documents = []
                if len(groups) > 1:  # the last one is being embedded while the one before is stored
                    yield from self._put(groups, len(sources))
        groups.append(self._begin(documents, groups))
        while groups:
            yield from self._put(groups, len(sources))

    def _begin(self, documents: list[_Ready], before: Iterable[_Group]) -> _Group:
        """Begin to embed the chunks of documents, but for those that have a vector or get one with a group before."""
        texts = {encoded.chunk.id: encoded.chunk.text for ready in documents for encoded in ready.chunks}
        if self._embedding is None:
            return _Group(documents, set(texts), {}, [])
        # Vectors that are stored are kept, too: a document of this group, or another process, may drop the chunk before
        # the document that needs it is stored.
        vectors = self._store.vectors_of(texts, self._plan.namespace)
        coming = set[ChunkId]().union(*(group.ids for group in before))
        new = {id: text for id, text in texts.items() if id not in vectors and id not in coming}
        self._to_embed += len(new)
        return _Group(documents, set(texts), vectors, self._embedding.begin(new))

    def _put(self, groups: deque[_Group], total: int) -> Iterator[Progress]:
        """Store the documents of the first group."""
        group = groups.popleft()
        yield from self._embedded_batches(group.batches, group.vectors)
        for later in groups:
            later.vectors |= {id: group.vectors[id] for id in later.ids & group.vectors.keys()}
        new = {source.id for source in self._plan.added}
        for ready in group.documents:
            source = ready.source
            try:
                change = self._store.put_document(
                    ready.document,
                    ready.chunks,
                    vectors=group.vectors,
                    sha256=source.sha256,
                    recipe=_recipe(self._plan.splitter, self._plan.embedder),
                    mtime=source.mtime,
                    namespace=self._plan.namespace,
                    quota=self._plan.quota,
                )
            except InputError as error:
                yield self._failure(STORE, self._stored, total, source.id, error)
                continue
            self._chunks_added += len(change.added)
            self._chunks_removed += len(change.removed)
            self._added += source.id in new
            self._changed += source.id not in new
            self._stored += 1
            yield self._progress(STORE, self._stored, total)
            if self._warming is not None:
                new_chunks = set(change.added)
                chunks = {encoded.chunk.id: encoded.token_ids for encoded in ready.chunks}
                yield from self._offer((id, tokens) for id, tokens in chunks.items() if id in new_chunks)

    def _embedded_batches(
        self, batches: Iterable[_Batch], vectors: dict[ChunkId, NDArray[np.float32]]
    ) -> Iterator[Progress]:
        """Wait for vectors, and add them to those that there are."""
        for ids, made in batches:
            vectors.update(zip(ids, made.result(), strict=True))
            self._embedded += len(ids)
            yield self._progress(EMBED, self._embedded, self._to_embed)

    def _complete(self, embedding: _Embedding) -> Iterator[Progress]:
        """Embed the namespace's chunks that have no vector: another process stored them without, or dropped it."""
        bare = self._store.without_vector(self._plan.namespace)
        for start in range(0, len(bare), _GROUP):
            texts = self._store.get_texts(bare[start : start + _GROUP], self._plan.namespace)
            vectors: dict[ChunkId, NDArray[np.float32]] = {}
            self._to_embed += len(texts)
            yield from self._embedded_batches(embedding.begin(texts), vectors)
            self._store.put_vectors(vectors, self._plan.namespace)

    def _delete(self) -> Iterator[Progress]:
        for id in self._plan.missing:
            self._chunks_removed += len(self._store.delete_document(id, self._plan.namespace).removed)
            self._deleted += 1
            yield self._progress(DELETE, self._deleted, len(self._plan.missing))

    def _index(self) -> Progress:
        index = VectorIndex(self._store, self._plan.namespace)
        index.refresh()
        try:
            index.save()
        except StoreError as error:
            return self._failure(INDEX, 1, 1, str(index.path), error)
        return self._progress(INDEX, 1, 1)

    # ------------------------------------------------------------ warming

    def _offer(self, chunks: Iterable[tuple[ChunkId, tuple[int, ...]]]) -> Iterator[Progress]:
        """Give chunks to the engine, within the quota; what it has done meanwhile is told."""
        assert self._warming is not None
        new = ((id, tokens) for id, tokens in chunks if tokens and id not in self._offered)
        while page := dict(islice(new, _MARK)):
            self._offered |= page.keys()
            for id, tokens in self._within_quota(page):
                self._given += 1
                self._computing[id] = tokens
                for result in self._warming.offer((id, tokens)):
                    yield from self._take(*result)
        for result in self._warming.results():
            yield from self._take(*result)

    def _within_quota(self, page: Mapping[ChunkId, tuple[int, ...]]) -> Iterator[tuple[ChunkId, tuple[int, ...]]]:
        if self._quota is None:
            yield from page.items()
            return
        fits = self._quota.reserve(list(map(self._size, page.values())))
        self._beyond += fits.count(False)
        yield from compress(page.items(), fits)

    def _take(self, id: ChunkId, result: Reuse | Exception) -> Iterator[Progress]:
        """Note what became of a chunk."""
        self._done += 1
        if isinstance(result, Exception):
            if isinstance(result, EngineDeadError) or not isinstance(result, LazyRAGError):
                raise result
            yield self._failure(WARM, self._done, self._given, id, result)
            return
        self._warmed += 1
        yield self._progress(WARM, self._done, self._given)

    def _note(self, id: ChunkId, result: Reuse | Exception) -> None:
        """Called in the engine's thread, so that a kill costs little whatever the other one is busy with."""
        tokens = self._computing.pop(id)
        if isinstance(result, Reuse) and self._is_kept(id, result):
            self._unmarked[id] = tokens
            self._unused += 0 if COMPUTED in result.sources else self._size(tokens)
            if len(self._unmarked) == _MARK:
                self._mark()
        else:
            self._unused += self._size(tokens)

    def _size(self, tokens: Sequence[int]) -> int:
        """Bytes of a chunk's file."""
        return len(tokens) * self._bytes_per_token + self._bytes_per_chunk

    def _is_kept(self, id: ChunkId, result: Reuse) -> bool:
        """Whether there is a file.

        Without sources the engine took the chunk for ordinary text. One that it found in memory has lost its file if
        another process deleted the chunk: it is saved when it is computed again.
        """
        if not self._fingerprint or not result.sources:
            return False
        if not {HBM, HOST}.intersection(result.sources):
            return True
        return self._fingerprint[:16] in models_of(self._store, id, self._plan.namespace)

    def _mark(self) -> None:
        """Note as warm what the engine keeps; from then on the store says that it need not be offered."""
        chunks, namespace = self._unmarked, self._plan.namespace
        if chunks and self._fingerprint:
            self._store.mark_warm(chunks, self._fingerprint, namespace)
            self._store.doom(chunks, namespace)  # another process may have deleted one while it was computed
            self._offered -= chunks.keys()
            self._unmarked = {}
        if self._quota is not None and self._unused:
            self._quota.give_back(self._unused)
            self._unused = 0

    def _rest(self, documents: Sequence[str] | None) -> Iterator[Progress]:
        """What was in the store already (None), or in these documents, and is not warm; then wait for all."""
        assert self._warming is not None
        # What is marked meanwhile leaves `_offered`, but not the page of the store that was read before.
        offered = set(self._offered)
        unwarmed = self._store.unwarmed(self._fingerprint or "", self._plan.namespace, of=documents)
        yield from self._offer((id, tokens) for id, tokens in unwarmed if id not in offered)
        for result in self._warming.finish():
            yield from self._take(*result)
        if self._beyond:
            full = QuotaError(
                f"KV of {self._beyond} chunks is not kept:",
                why=f"the namespace may keep {self._plan.quota.kv_bytes} bytes. They are computed when they are used.",
                fix="Delete documents, or have the quota raised.",
            )
            yield self._failure(WARM, self._done, self._given, self._plan.namespace or "the store", full)

    # ------------------------------------------------------------ events

    def _progress(self, stage: str, done: int, total: int) -> Progress:
        return Progress(stage, done, total, self._num_bytes)

    def _failure(self, stage: str, done: int, total: int, source: str, error: LazyRAGError) -> Progress:
        failure = Failure(source, error)
        self._failed.append(failure)
        return Progress(stage, done, total, self._num_bytes, (failure,))

    def _summary(self, sync: bool) -> Summary:
        return Summary(
            added=self._added,
            changed=self._changed,
            unchanged=len(self._plan.unchanged),
            deleted=self._deleted,
            missing=0 if sync else len(self._plan.missing),
            chunks_added=self._chunks_added,
            chunks_removed=self._chunks_removed,
            embedded=self._embedded,
            warmed=self._warmed,
            failed=tuple(self._failed),
        )
