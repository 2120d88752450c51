"""Nearest chunks of a vector: exact inner products in memory (FAISS), kept on disk as a cache of the store.

The truth is the store's table of vectors, so the file needs no transaction with it: it names the generation of the
store that it stands for, and at any other it is as good as none, as one that is damaged or of another store. In memory
an index follows the store by comparing keys: a vector never changes under its key, and no key is given twice. A file
must not: a store that was restored from a backup gives the keys since then once more.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from lazyrag.errors import StoreError
from lazyrag.retrievers.store import Store
from lazyrag.types import ChunkId

logger = logging.getLogger(__name__)

FORMAT = 2
_BATCH = 4096  # vectors read from the store at once


class VectorIndex:
    """The vectors of one namespace of a store. Thread-safe.

    Args:
        store: where the vectors are; not owned.
        namespace: whose they are.
    """

    def __init__(self, store: Store, namespace: str = "") -> None:
        self._store = store
        self._namespace = namespace
        # A namespace that is not Unicode is the store's to refuse.
        name = blake2b(namespace.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        self.path = store.directory / "vectors" / f"{name}.faiss"
        self._lock = threading.Lock()  # FAISS allows no search while vectors are added
        self._index: Any = None  # faiss.IndexIDMap2 over IndexFlatIP once there is a vector
        self._generation: int | None = None
        self._saved_generation: int | None = None

    def __len__(self) -> int:
        return 0 if self._index is None else int(self._index.ntotal)

    def refresh(self) -> None:
        """Hold what the store holds now. Cheap if nothing has changed.

        Raises:
            StoreError: the store cannot be read, or holds vectors of different lengths.
        """
        with self._lock:
            # Read before the keys: whatever is written in between is looked at again next time.
            generation = self._store.generation(self._namespace)
            if generation == self._generation:
                return
            if self._generation is not None or not self._load(generation):
                self._follow()
            self._generation = generation

    def search(self, vector: NDArray[np.float32], k: int) -> list[tuple[ChunkId, float]]:
        """The k nearest chunks, as of the last `refresh`, nearest first; fewer if there are fewer.

        Args:
            vector: [dim], L2 norm 1.
            k: how many.

        Returns:
            chunk id and inner product.

        Raises:
            StoreError: the vector has another length than the stored ones.
        """
        with self._lock:
            k = min(k, len(self))
            if k <= 0:
                return []
            self._check(len(vector))
            scores, keys = self._index.search(np.ascontiguousarray(vector, np.float32)[None], k)
        ids = self._store.ids_of(keys[0], self._namespace)
        # A chunk that another process has deleted since then has no id any more.
        return [(ids[key], float(score)) for key, score in zip(keys[0].tolist(), scores[0], strict=True) if key in ids]

    def save(self) -> None:
        """Write the cache file, if it is not up to date, in one step: a reader finds the old file or the new one.

        Raises:
            StoreError: it cannot be written.
        """
        with self._lock:
            if self._index is None or self._generation == self._saved_generation:
                return
            body = faiss.serialize_index(self._index).tobytes()
            head = {**self._identity(), "generation": self._generation, "checksum": _checksum(body)}
            try:
                _write(self.path, json.dumps(head).encode() + b"\n" + body)
            except OSError as error:
                raise StoreError(
                    f"The vector file {self.path} cannot be written: {error.strerror}.",
                    why="Nothing is lost: it is made again from the store, but searches start slower without it.",
                ) from error
            self._saved_generation = self._generation

    def _load(self, generation: int) -> bool:
        """Read the cache file if it is whole and of this store at this generation; whether it is."""
        try:
            head, _, body = self.path.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return False
        except OSError as error:
            logger.warning("The vector file %s cannot be read (%s); it is made again.", self.path, error.strerror)
            return False
        known = _parse(head)
        is_ours = all(known.get(name) == value for name, value in self._identity().items())
        if is_ours and known.get("generation") != generation:
            return False
        if not is_ours or known.get("checksum") != _checksum(body):
            logger.warning("The vector file %s is damaged or of another store; it is made again.", self.path)
            return False
        self._index = faiss.deserialize_index(np.frombuffer(body, np.uint8))
        self._saved_generation = generation
        return True

    def _follow(self) -> None:
        """Remove what the store no longer holds, add what it holds now."""
        wanted = self._store.vector_keys(self._namespace)
        held = np.empty(0, np.int64) if self._index is None else faiss.vector_to_array(self._index.id_map)
        gone = np.setdiff1d(held, wanted)
        if len(gone):
            self._index.remove_ids(gone)
        new = np.setdiff1d(wanted, held)
        for start in range(0, len(new), _BATCH):
            keys, vectors = self._store.get_vectors(new[start : start + _BATCH].tolist())
            if not len(keys):
                continue  # deleted since
            if self._index is None:
                self._index = faiss.IndexIDMap2(faiss.IndexFlatIP(vectors.shape[1]))
            self._check(vectors.shape[1])
            self._index.add_with_ids(vectors, keys)

    def _check(self, dim: int) -> None:
        if dim != self._index.d:
            raise StoreError(
                f"A vector of {dim} numbers does not fit the index of {self._index.d}.",
                why="They come from different embedders.",
                fix="Use the embedder that the documents were ingested with.",
            )

    def _identity(self) -> dict[str, Any]:
        return {"format": FORMAT, "store": self._store.id, "namespace": self._namespace}


def is_whole(path: Path) -> bool:
    """Whether a cache file has the content that was written, whatever store and generation it stands for."""
    try:
        head, _, body = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return _parse(head).get("checksum") == _checksum(body)


def _checksum(body: bytes) -> str:
    return blake2b(body, digest_size=16).hexdigest()


def _parse(head: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(head)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _write(path: Path, content: bytes) -> None:
    """Replace a file so that a crash at any moment leaves the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}.*"):
        if left.stat().st_mtime < time.time() - 3600:  # of a process that was killed while it wrote
            left.unlink(missing_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
