"""Room for KV: several ingests share it, and one that was killed leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from lazyrag.backend.tiers.disk import space_of
from lazyrag.errors import StoreError
from lazyrag.quota import FOLDER, KVQuota
from lazyrag.retrievers.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", create=True) as store:
        yield store


def keep(store: Store, num_bytes: int, namespace: str = "") -> None:
    """A KV file of this size."""
    folder = store.directory / "kv" / ("0" * 16) / space_of(namespace) / "ab"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"ab{num_bytes}.safetensors").write_bytes(bytes(num_bytes))


def test_what_fits_is_reserved_in_order(store: Store) -> None:
    with KVQuota(store, "", 100) as quota:
        assert quota.reserve([60, 50, 40, 1]) == [True, False, True, False]
        quota.give_back(40)
        assert quota.reserve([41, 40]) == [False, True]


def test_what_is_on_disk_counts_for_the_first_and_what_all_have_reserved_for_the_next(store: Store) -> None:
    keep(store, 30)
    with KVQuota(store, "", 100) as first, Store.open(store.directory) as again:
        assert first.reserve([50]) == [True]
        keep(store, 50)
        with KVQuota(again, "", 100) as second:
            assert second.reserve([21]) == [False]
            assert second.reserve([15]) == [True]
        assert first.reserve([6]) == [False], "what an ingest has reserved is on disk when it has ended"
    with KVQuota(store, "", 100) as alone:
        assert alone.reserve([21, 20]) == [False, True], "80 bytes are there"


def test_namespaces_have_quotas_of_their_own(store: Store) -> None:
    keep(store, 90, "a")
    with KVQuota(store, "a", 100) as a, KVQuota(store, "b", 100) as b:
        assert (a.reserve([20]), b.reserve([90])) == ([False], [True])


def test_two_that_begin_at_once_are_not_both_the_first(store: Store) -> None:
    keep(store, 50)

    def one(number: int) -> int:
        with Store.open(store.directory) as own:
            quota = KVQuota(own, "", 100)
            fits = quota.reserve([10] * 5).count(True)
            ended.wait()
            quota.close()
            return fits

    ended = Barrier(8)
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(one, range(8))) == 5


def test_one_that_was_killed_keeps_no_room(store: Store) -> None:
    script = f"""
import os, signal
from lazyrag.quota import KVQuota
from lazyrag.retrievers.store import Store
assert KVQuota(Store.open({str(store.directory)!r}), "", 100).reserve([100]) == [True]
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    with KVQuota(store, "", 100) as quota:
        assert quota.reserve([100]) == [True]


def test_a_store_that_cannot_be_written_is_an_error_that_says_so(store: Store) -> None:
    (store.directory / FOLDER).write_text("in the way")
    with pytest.raises(StoreError, match="cannot be written"):
        KVQuota(store, "", 100)
