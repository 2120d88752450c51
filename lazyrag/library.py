"""The chunks that one namespace knows: what its store holds, and what was registered by hand.

Keeps the segmenter's index in step with the store, which other processes may change at any time. A large index is kept
in the store's folder, so that the next process need not make it again. That file may be of any age: a chunk's id is a
digest of its text, so what an old index holds is right, and comparing ids says what it lacks.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING

from lazyrag.anchors import MIN_CHARS, AnchorIndex
from lazyrag.errors import StoreError
from lazyrag.segmenter import SHORTEST_HINT, Segmenter
from lazyrag.types import ChunkId, canonical, chunk_id

if TYPE_CHECKING:
    from pathlib import Path

    from lazyrag.retrievers.store import Store
    from lazyrag.tokens import Tokenizer

logger = logging.getLogger(__name__)

SAVE_AFTER = 4096
"""Changed chunks after which the index is written; making it anew for so many takes about 0.1 s."""


class Library:
    """Texts and tokens of known chunks by id, and the segmenter that finds them. Thread-safe.

    Args:
        tokenizer: encodes what was registered by hand; stored chunks carry their tokens.
        store: None if there is none.
        namespace: whose chunks.
    """

    def __init__(self, tokenizer: Tokenizer, store: Store | None = None, namespace: str = "") -> None:
        self._tokenizer = tokenizer
        self._store = store
        self._namespace = namespace
        self._registered: dict[ChunkId, str] = {}
        self._unindexed: dict[ChunkId, str] = {}
        self._index = _load(store, namespace) if store is not None else AnchorIndex(secret=secrets.token_bytes(32))
        self._unindexable: set[ChunkId] = set()
        self._unsaved = 0
        self._generation = -1
        self._lock = threading.RLock()
        self.segmenter = Segmenter(self._index, self.texts)

    def __len__(self) -> int:
        return len(self._index) + len(self._unindexable)

    @property
    def registered(self) -> list[str]:
        """The texts that were registered by hand."""
        return list(self._registered.values())

    def register(self, texts: Iterable[str]) -> list[ChunkId]:
        """Make texts known as chunks; their ids in order. Nothing is computed."""
        given = [(chunk_id(text), canonical(text)) for text in texts]
        with self._lock:
            self._registered |= dict(given)
            self._add(given)
        return [id for id, _ in given]

    def forget(self, ids: Iterable[ChunkId]) -> dict[ChunkId, tuple[int, ...]]:
        """Forget texts that were registered by hand; the KV that may go with them, as ids and tokens.

        The store, if there is one, has noted that KV as doomed.

        Raises:
            StoreError: the store fails. Nothing is forgotten.
        """
        with self._lock:
            texts = {id: self._registered[id] for id in ids if id in self._registered}
            stored = self._store.get_texts(texts, self._namespace) if self._store else {}
            gone = {id: text for id, text in texts.items() if id not in stored}
            kv = {id: tokens for id, text in gone.items() if (tokens := self._tokenizer.encode_chunk(text))}
            if self._store and kv:
                self._store.doom(kv, self._namespace)
            for id in texts:
                del self._registered[id]
            self._remove(gone)
        return kv

    def refresh(self) -> None:
        """Take over what the store has gained and lost since the last call. Cheap if nothing changed."""
        if self._store is None:
            return
        with self._lock:
            # Read before the ids: whatever is written in between is looked at again next time.
            generation = self._store.generation(self._namespace)
            if generation == self._generation:
                return
            stored, others = self._index.compare(self._store.chunk_ids(self._namespace))
            new = set(stored)  # those that are not indexed
            gone = {*others, *(self._unindexable - new)} - self._registered.keys()
            self._remove(gone)
            self._unsaved += len(gone) + self._add(self._stored_texts(new - self._unindexable))
            self._generation = generation
            if self._unsaved >= SAVE_AFTER:
                self._save(self._store)

    def _remove(self, ids: Collection[ChunkId]) -> None:
        self._index.remove(ids)
        self._unindexable.difference_update(ids)
        for id in ids:
            self._unindexed.pop(id, None)

    def _stored_texts(self, ids: set[ChunkId]) -> Iterator[tuple[ChunkId, str]]:
        assert self._store is not None
        if len(ids) <= len(self._index):
            yield from self._store.get_texts(ids, self._namespace).items()
        else:
            yield from ((id, text) for id, text in self._store.texts(self._namespace) if id in ids)

    def _add(self, items: Iterable[tuple[ChunkId, str]]) -> int:
        """Index chunks; how many of them could be."""
        seen = 0

        def noted() -> Iterator[tuple[ChunkId, str]]:
            nonlocal seen
            for id, text in items:
                seen += 1
                text = canonical(text)
                if len(text) < MIN_CHARS and self._tokenizer.spells_control(text):
                    self._unindexed[id] = text
                yield id, text

        unindexable = self._index.add(noted())
        self._unindexable.update(unindexable)
        return seen - len(unindexable)

    def _save(self, store: Store) -> None:
        """Keep the index; if that fails, the next change has it tried again."""
        folder = _folder(store, self._namespace)
        try:
            self._index.save(folder)
        except OSError as error:
            logger.warning("The chunk index cannot be kept in %s (%s); starts are slower.", folder, error.strerror)
        else:
            self._unsaved = 0

    def texts(self, ids: Iterable[ChunkId]) -> Mapping[ChunkId, str]:
        """The canonical texts of those chunks that are known."""
        ids = list(ids)
        known = {id: self._registered[id] for id in ids if id in self._registered}
        missing = [id for id in ids if id not in known]
        return known | self._store.get_texts(missing, self._namespace) if self._store and missing else known

    def short_texts(self) -> list[str]:
        """The chunks that are too short for the index and spell a control token: they must be looked for, too."""
        with self._lock:
            return list(self._unindexed.values())

    def is_short_one_in(self, text: str) -> bool:
        """Whether a text holds a chunk that is too short for the index, though of some words. Looks at every chunk."""
        lengths = range(SHORTEST_HINT, MIN_CHARS)
        with self._lock:
            registered = [short for short in self._registered.values() if len(short) in lengths]
        stored = self._store is not None and self._store.is_any_in(text, self._namespace, lengths=lengths)
        return stored or any(short in text for short in registered)

    def tokens(self, id: ChunkId) -> tuple[int, ...]:
        """The chunk's token ids; empty if it is unknown or its text does not survive the tokenizer."""
        text = self._registered.get(id)
        if text is not None:
            return self._tokenizer.encode_chunk(text)
        return self._store.get_tokens([id], self._namespace).get(id, ()) if self._store else ()


def _folder(store: Store, namespace: str) -> Path:
    return store.directory / "anchors" / blake2b(namespace.encode(), digest_size=8).hexdigest()


def _load(store: Store, namespace: str) -> AnchorIndex:
    """The index as it was last saved; an empty one if there is none or it is of no use."""
    folder = _folder(store, namespace)
    try:
        return AnchorIndex.load(folder, secret=store.secret)
    except StoreError as error:
        if folder.exists():
            logger.warning("%s It is made again.", error)
        return AnchorIndex(secret=store.secret)
