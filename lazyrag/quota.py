"""Disk space for a namespace's KV, which several ingests may fill at the same time.

    ingest      reserves what it is about to compute; what comes from elsewhere, or fails, it gives back
    the store   holds the sum: what was on disk when the first of the present ingests began, and what all have reserved
    a file      locked by each of them while it lives, also if it is killed: who finds it free is the first, and counts

KV that goes meanwhile makes room when the last of them has ended.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress

from lazyrag.backend.tiers.disk import space_of
from lazyrag.care import kv_bytes
from lazyrag.errors import StoreError
from lazyrag.retrievers.store import Store

FOLDER = "locks"


class KVQuota:
    """One ingest's part in a quota. Thread-safe.

    Args:
        store: whose KV.
        namespace: whose quota.
        most_bytes: that it may keep.

    Raises:
        StoreError: the store cannot be written.
    """

    def __init__(self, store: Store, namespace: str, most_bytes: int) -> None:
        self._store, self._namespace, self._most_bytes = store, namespace, most_bytes
        path = store.directory / FOLDER / space_of(namespace)
        try:
            path.parent.mkdir(exist_ok=True)
            self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error.strerror}.") from error
        try:
            store.begin_kv(namespace, self._counted)
        except BaseException:
            self.close()
            raise

    def _counted(self) -> int | None:
        """What is on disk, if no other ingest lives. Called in a transaction, so by one at a time."""
        assert self._file is not None
        found = None
        with suppress(BlockingIOError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = kv_bytes(self._store, self._namespace)
        fcntl.flock(self._file, fcntl.LOCK_SH)
        return found

    def reserve(self, sizes: Sequence[int]) -> list[bool]:
        """For each of these, in order, whether there was room, which is reserved now; bytes."""
        return self._store.reserve_kv(sizes, self._most_bytes, self._namespace)

    def give_back(self, num_bytes: int) -> None:
        """Reserve so much less."""
        self._store.reserve_kv([-num_bytes], self._most_bytes, self._namespace)

    def __enter__(self) -> KVQuota:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End this one's part. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
