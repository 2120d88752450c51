"""The chunks that one namespace knows: what its store holds, and what was registered by hand.

Keeps the segmenter's index in step with the store, which other processes may change at any time.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from lazyrag.anchors import AnchorIndex
from lazyrag.segmenter import Segmenter
from lazyrag.types import ChunkId, canonical, chunk_id

if TYPE_CHECKING:
    from lazyrag.retrievers.store import Store
    from lazyrag.tokens import Tokenizer


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
        self._tokens: dict[ChunkId, tuple[int, ...]] = {}
        self._index = AnchorIndex(secret=store.secret if store else secrets.token_bytes(32))
        self._indexed: set[ChunkId] = set()
        self._generation = -1
        self._lock = threading.RLock()
        self.segmenter = Segmenter(self._index, self.texts)

    def register(self, texts: Iterable[str]) -> list[ChunkId]:
        """Make texts known as chunks; their ids in order. Nothing is computed."""
        given = [(chunk_id(text), canonical(text)) for text in texts]
        with self._lock:
            fresh = {id: text for id, text in given if id not in self._registered}
            self._registered |= fresh
            self._add([(id, text) for id, text in fresh.items() if id not in self._indexed])
        return [id for id, _ in given]

    def refresh(self) -> None:
        """Take over what the store has gained and lost since the last call. Cheap if nothing changed."""
        if self._store is None:
            return
        with self._lock:
            generation = self._store.generation(self._namespace)
            if generation == self._generation:
                return
            stored = self._store.chunk_ids(self._namespace)
            gone = self._indexed - stored - self._registered.keys()
            self._index.remove(gone)
            self._indexed -= gone
            for id in gone:
                self._tokens.pop(id, None)
            new = stored - self._indexed
            self._add(
                [(id, text) for id, text in self._store.texts(self._namespace) if id in new]
                if len(new) > len(stored) // 2
                else list(self._store.get_texts(new, self._namespace).items())
            )
            self._generation = generation

    def _add(self, items: Sequence[tuple[ChunkId, str]]) -> None:
        self._index.add(items)
        self._indexed |= {id for id, _ in items}

    def texts(self, ids: Iterable[ChunkId]) -> Mapping[ChunkId, str]:
        """The canonical texts of those chunks that are known."""
        ids = list(ids)
        known = {id: self._registered[id] for id in ids if id in self._registered}
        missing = [id for id in ids if id not in known]
        return known | self._store.get_texts(missing, self._namespace) if self._store and missing else known

    def tokens(self, id: ChunkId) -> tuple[int, ...]:
        """The chunk's token ids; empty if it is unknown or its text does not survive the tokenizer."""
        found = self._tokens.get(id)
        if found is None:
            if id in self._registered:
                text = self._registered[id]
                found = tuple(self._tokenizer.encode_plain(text)) if self._tokenizer.round_trips(text) else ()
            else:
                found = self._store.get_tokens([id], self._namespace).get(id, ()) if self._store else ()
            self._tokens[id] = found
        return found

    def __len__(self) -> int:
        return len(self._indexed)
