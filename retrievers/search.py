"""Query -> the chunks that answer it best, each with the places to cite."""

from __future__ import annotations

import threading

import numpy as np

from lazyrag.errors import ConfigError
from lazyrag.retrievers.embed import Embedder
from lazyrag.retrievers.store import Store
from lazyrag.retrievers.vectors import VectorIndex
from lazyrag.types import ChunkId, Hit


class Searcher:
    """Searches a store. Thread-safe; follows what other processes ingest, from one search to the next.

    Args:
        store: not owned.
        embedder: the one that the documents were ingested with.

    Raises:
        ConfigError: they were ingested with another one, or with none.
    """

    def __init__(self, store: Store, embedder: Embedder) -> None:
        used = store.settings().get("embedding")
        if used != embedder.name:
            raise ConfigError(
                f"The store in {store.directory} cannot be searched with the embedder {embedder.name!r}.",
                why=f"Its documents were embedded with {used!r}." if used else "Its documents were never embedded.",
                fix="Use the same embedder." if used else "Ingest them again with an embedder.",
            )
        self._store = store
        self._embedder = embedder
        self._indexes: dict[str, VectorIndex] = {}
        self._lock = threading.Lock()

    def search(
        self, query: str, k: int = 4, *, namespace: str = "", mmr: bool = False, diversity: float = 0.5
    ) -> list[Hit]:
        """The k chunks nearest to the query, nearest first.

        Equal texts are one hit: its chunk is the place in the oldest document, `Hit.also` are the others.

        Args:
            query: any text.
            k: how many; fewer come back if the namespace holds fewer.
            namespace: whose documents.
            mmr: weigh nearness to the query against nearness to the hits chosen before (maximal marginal relevance), in
                the order of choice.
            diversity: with `mmr`, the weight of the second: 0 is as without it, 1 forgets the query after one hit.
        """
        index = self._index(namespace)
        index.refresh()
        vector = self._embedder.embed_query(query)
        found = index.search(vector, max(4 * k, 20) if mmr else k)
        if mmr:
            found = self._diverse(found, k, diversity, namespace)
        places = self._store.spans_of([id for id, _ in found], namespace)
        # What another process deleted between the two look-ups is no hit.
        return [Hit(places[id][0], score, tuple(places[id][1:])) for id, score in found if id in places]

    def _index(self, namespace: str) -> VectorIndex:
        with self._lock:
            if namespace not in self._indexes:
                self._indexes[namespace] = VectorIndex(self._store, namespace)
            return self._indexes[namespace]

    def _diverse(
        self, found: list[tuple[ChunkId, float]], k: int, diversity: float, namespace: str
    ) -> list[tuple[ChunkId, float]]:
        """Choose k of the found chunks, one by one: near to the query, far from those chosen before."""
        vectors = self._store.vectors_of([id for id, _ in found], namespace)
        found = [(id, score) for id, score in found if id in vectors]
        if not found:
            return []
        matrix = np.stack([vectors[id] for id, _ in found])  # [n, dim]
        scores = np.array([score for _, score in found], dtype=np.float32)
        nearest = np.zeros_like(scores)  # to any of the chosen ones
        chosen: list[int] = []
        while len(chosen) < min(k, len(found)):
            gain = (1 - diversity) * scores - diversity * nearest
            gain[chosen] = -np.inf
            chosen.append(int(np.argmax(gain)))
            nearest = np.maximum(nearest, matrix @ matrix[chosen[-1]])
        return [found[i] for i in chosen]
