"""Texts with an id, a vector and metadata each, kept in a store: what a framework's vector store is made of.

    record   id, text, vector, metadata
    store    a document of that id whose one chunk is the text; its vector and metadata as any document's

So what is added is known to every prompt of the namespace from the next one on, its KV is kept, found and deleted as
that of documents that were ingested, and these are found by a search, too. A text has one vector, the first that it was
given: records whose texts are equal share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lazyrag import care
from lazyrag.errors import InputError
from lazyrag.retrievers.embed import normalised
from lazyrag.retrievers.store import NO_QUOTA, Store
from lazyrag.retrievers.vectors import VectorIndex
from lazyrag.tokens import Tokenizer
from lazyrag.types import (
    CONTENT,
    DOCUMENT,
    EMPTY,
    Chunk,
    ChunkId,
    Document,
    EncodedChunk,
    Metadata,
    Quota,
    canonical,
    chunk_id,
)


@dataclass(frozen=True, slots=True)
class Record:
    """A text to keep.

    Attributes:
        id: another record of the same id takes this one's place.
        text: outer whitespace is not kept.
        source: what a citation shows.
        content: the record in the framework's own form; not looked into.
        document: id of the document that it is from.
        vector: [dim], of any length but 0 (it is normalised); None: the text cannot be searched for.
        start: where the text begins in the document that it is from, in characters.
    """

    id: str
    text: str
    source: str
    content: str
    document: str | None = None
    vector: Sequence[float] | None = None
    metadata: Metadata = field(default_factory=lambda: EMPTY, hash=False)
    start: int = 0
    page: int | None = None


class Passage(NamedTuple):
    """A text of a document, and where it stands."""

    text: str
    start: int = 0
    page: int | None = None


def record_id(place: Chunk) -> str:
    """The record that stands at a place; of ingested documents, whose chunks are none, the chunk."""
    return place.document_id if CONTENT in place.metadata else place.id


class Records:
    """The records of a namespace of a store. Thread-safe.

    Args:
        store: not owned.
        tokenizer: the model's.
        namespace: whose records.
        quota: what the namespace may hold.
        forget: has an engine forget chunks that went, see `lazyrag.care.remove_doomed_kv`.
        pinning: changes are made inside of it: it tells an engine of chunks that are pinned from then on, or no longer.
    """

    def __init__(
        self,
        store: Store,
        tokenizer: Tokenizer,
        namespace: str = "",
        quota: Quota = NO_QUOTA,
        *,
        forget: care.Forget | None = None,
        pinning: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._quota = quota
        self._forget, self._pinning = forget, pinning
        self._store = store
        self._tokenizer = tokenizer
        self._namespace = namespace
        self._index = VectorIndex(store, namespace)

    # ------------------------------------------------------------ writing

    def put(self, records: Iterable[Record], embedding: str) -> list[ChunkId]:
        """Write records, each in one step: a reader sees the old one or the new one. Returns their chunks' ids.

        Args:
            records: what to write.
            embedding: names the model that made the vectors.

        Raises:
            InputError: a text that is empty or not Unicode, metadata that `Store.put_document` refuses, or vectors of
                different lengths.
            QuotaError: the namespace would hold more than it may; what came before is written.
            StoreError: the store holds vectors of another model.
        """
        records = list(records)
        lengths = {len(record.vector) for record in records if record.vector is not None}
        if len(lengths) > 1:
            raise InputError(f"The vectors have different lengths: {', '.join(map(str, sorted(lengths)))}.")
        if lengths:
            self._store.require(embedding=embedding, dim=str(*lengths))
        ids = []
        with self._changing():
            for record in records:
                document = Document(record.id, record.text, record.source, metadata=record.metadata)
                own = {CONTENT: record.content, DOCUMENT: record.document}
                passage = Passage(record.text, record.start, record.page)
                ids += self._put(document, [passage], vector=record.vector, own=own)
        return ids

    def put_document(self, document: Document, passages: Iterable[Passage]) -> list[ChunkId]:
        """Write a document whose chunks are these passages, in the place of its old version. Returns their ids.

        Args:
            document: its text is not looked at.
            passages: in its order.

        Raises:
            InputError: a passage that is empty or not Unicode, or metadata that `Store.put_document` refuses.
            QuotaError: the namespace would hold more than it may.
        """
        with self._changing():
            return self._put(document, passages)

    def _put(
        self,
        document: Document,
        passages: Iterable[Passage],
        *,
        vector: Sequence[float] | None = None,
        own: Metadata = EMPTY,
    ) -> list[ChunkId]:
        self._store.require(tokenizer=self._tokenizer.fingerprint)
        chunks = [self._encoded(document, passage) for passage in passages]
        vectors = {} if vector is None else {chunks[0].chunk.id: _row(vector)}
        self._store.put_document(
            document, chunks, vectors=vectors, namespace=self._namespace, quota=self._quota, own=own
        )
        return [encoded.chunk.id for encoded in chunks]

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Whatever becomes of it, KV follows what was changed."""
        with self._pinning():
            try:
                yield
            finally:
                care.remove_doomed_kv(self._store, self._forget)

    def _encoded(self, document: Document, passage: Passage) -> EncodedChunk:
        text = canonical(passage.text)
        if not text:
            raise InputError(f"A text of {document.id} is empty.", why="Nothing could be found in it.")
        tokens = self._tokenizer.encode_chunk(text)
        start = passage.start + passage.text.index(text)
        end = start + len(text)
        place = Chunk(chunk_id(text), text, len(tokens), document.id, document.source, start, end, passage.page)
        return EncodedChunk(place, tokens)

    def delete(self, ids: Iterable[str]) -> None:
        """Delete records and documents by id, with the KV of chunks that only they held."""
        with self._pinning():
            care.delete(self._store, ids, self._namespace, self._forget)

    def delete_document(self, id: str) -> None:
        """Delete a document, and the records that are from it, likewise."""
        known = self._store.documents(self._namespace)
        self.delete([stored.id for stored in known if id in (stored.id, stored.metadata.get(DOCUMENT))])

    # ------------------------------------------------------------ reading

    def get(self, ids: Iterable[str]) -> list[Chunk]:
        """The places of those records (or chunks) that exist, in order."""
        ids = list(dict.fromkeys(ids))
        chunks = self._store.spans_of(ids, self._namespace)
        found = (self._store.chunks_of(id, self._namespace) or chunks.get(id, ())[:1] for id in ids)
        return [place for places in found for place in places]

    @property
    def store_id(self) -> str:
        """Another one for another store."""
        return self._store.id

    def all(self) -> Iterator[Chunk]:
        """Every place of every chunk, by document."""
        return self._store.chunks(self._namespace)

    def search(
        self, vector: Sequence[float], k: int, accept: Callable[[Chunk], bool] = lambda place: True
    ) -> list[tuple[Chunk, float]]:
        """The k nearest records that are accepted, nearest first, with their cosine similarity.

        Raises:
            StoreError: the vector has another length than the stored ones.
        """
        self._index.refresh()
        count = k
        while True:
            near = self._index.search(_row(vector), count)
            places = self._store.spans_of([id for id, _ in near], self._namespace)
            hits: dict[str, tuple[Chunk, float]] = {}
            for id, score in near:
                for place in filter(accept, places.get(id, ())):
                    hits.setdefault(record_id(place), (place, score))
            if len(hits) >= k or count >= len(self._index):
                return list(hits.values())[:k]
            count *= 4

    def vectors(self, ids: Iterable[ChunkId]) -> Mapping[ChunkId, NDArray[np.float32]]:
        """The vectors of chunks, [dim] each, of norm 1."""
        return self._store.vectors_of(ids, self._namespace)

    def save(self) -> None:
        """Keep the search index, so that the next process need not make it again. The records are kept without this.

        Raises:
            StoreError: it cannot be written.
        """
        self._index.refresh()
        self._index.save()


def _row(vector: Sequence[float]) -> NDArray[np.float32]:
    row: NDArray[np.float32] = normalised(np.asarray([vector], np.float32))[0]
    return row
