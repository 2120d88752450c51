"""Disks that fail and processes that are killed: nothing acknowledged is lost, and no wrong byte is ever served.

A fault is injected into one operation after the other, so that each path is taken once with each fault.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyrag.backend.hashing import chunk_key
from lazyrag.backend.tiers.disk import Bytes, DiskTier, Form, chunk_files, flaw, leftovers
from lazyrag.care import UNUSED, collect, delete, find_waste, missing_kv, remove_doomed_kv, verify
from lazyrag.errors import LazyRAGError, StoreError
from lazyrag.retrievers.store import Store
from lazyrag.transfer import export_store, import_store
from lazyrag.types import Chunk, Document, EncodedChunk, chunk_id

MODEL = "0123456789abcdef" * 4
FORM = Form(("a", "b"), "BF16", (9, 2, 8))


def tensors(key: str) -> Bytes:
    """The only right content of a chunk."""
    return np.random.default_rng(int(key[:8], 16)).integers(0, 256, FORM.num_bytes, dtype=np.uint8)


def key(number: int) -> str:
    return f"{number:08x}" * 12


# ---------------------------------------------------------------- a disk that fails


@dataclass
class Disk:
    """Counts the operations on files, and lets one of them fail.

    Attributes:
        fail_at: number of the operation that fails; None: none does.
        fault: an errno, or "short" (half of a read or write), "end" (a read finds nothing) or "flip" (a bit is wrong).
        lasting: all later operations fail, too.
        count: operations so far.
        fired: whether one has failed.
    """

    fault: int | str
    fail_at: int | None = None
    lasting: bool = False
    count: int = 0
    fired: bool = False

    def fails(self, *, kinds: tuple[type, ...] = (int,)) -> bool:
        number, self.count = self.count, self.count + 1
        if self.fail_at is None or number < self.fail_at or (number > self.fail_at and not self.lasting):
            return False
        fires = isinstance(self.fault, kinds)
        self.fired |= fires
        return fires

    def check(self) -> None:
        if self.fails():
            assert isinstance(self.fault, int)
            raise OSError(self.fault, os.strerror(self.fault))


class File:
    """A file on such a disk."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def __enter__(self) -> File:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int = -1) -> bytes:
        self._disk.check()
        data: bytes = self._file.read(size)
        return data

    def readinto(self, buffer: memoryview) -> int:
        disk = self._disk
        if not disk.fails(kinds=(int, str)):
            count: int = self._file.readinto(buffer)
            return count
        if isinstance(disk.fault, int):
            raise OSError(disk.fault, os.strerror(disk.fault))
        if disk.fault == "end":
            return 0
        if disk.fault == "short":
            return int(self._file.readinto(buffer[: max(1, len(buffer) // 2)]))
        count = self._file.readinto(buffer)
        buffer[disk.count * 7919 % len(buffer)] ^= 1 << disk.count % 8
        return count

    def write(self, data: memoryview) -> int:
        if not self._disk.fails(kinds=(int, str)):
            return int(self._file.write(data))
        if isinstance(self._disk.fault, int):
            self._file.write(data[: len(data) // 2])
            raise OSError(self._disk.fault, os.strerror(self._disk.fault))
        return int(self._file.write(data[: max(1, len(data) // 2)]))


@contextmanager
def failing(disk: Disk) -> Iterator[Disk]:
    """Let every operation of this process on files be one of the disk's."""

    def checked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            disk.check()
            return function(*args, **kwargs)

        return call

    def opened(path: Path, mode: str = "r", buffering: int = -1, **kwargs: Any) -> File:
        disk.check()
        return File(open(path, mode, buffering, **kwargs), disk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", opened)
        for owner, name in [
            *((Path, name) for name in ("unlink", "replace", "mkdir")),
            *((os, name) for name in ("fsync", "replace", "utime", "fstat")),
        ]:
            patch.setattr(owner, name, checked(getattr(owner, name)))
        yield disk


def every_fault(fault: int | str, *, lasting: bool = False, most: int = 400) -> Iterator[Disk]:
    """Disks that fail at the first operation, the second, ..., until one has no such operation any more."""
    for fail_at in range(most):
        disk = Disk(fault, fail_at, lasting)
        yield disk
        if fail_at >= disk.count:
            return
    raise AssertionError("the operations never end")


FAULTS = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EMFILE, "short", "end", "flip"]


def is_right(tier: DiskTier, name: str) -> bool:
    """Whether a chunk can be loaded; if so, with the right content."""
    try:
        data = tier.load(name, FORM)
    except StoreError:
        return False
    assert data.tobytes() == tensors(name).tobytes(), "wrong bytes were served"
    return True


def check_root(root: Path) -> None:
    """Every file is whole, and no interrupted write of this process is left."""
    assert [flaw(file) for file in chunk_files(root) if flaw(file)] == []
    assert list(root.rglob(".*.tmp")) == leftovers(root) == []


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_is_acknowledged_only_if_it_can_be_loaded(tmp_path: Path, fault: int | str, lasting: bool) -> None:
    fired = 0
    for number, disk in enumerate(every_fault(fault, lasting=lasting)):
        tier = DiskTier(tmp_path / str(number), MODEL)
        with failing(disk):
            saved = tier.save(key(number), FORM, tensors(key(number)))
        fired += disk.fired
        assert is_right(tier, key(number)) or not saved
        if not lasting:
            check_root(tier.root)
        # Whatever is left, the next save of the chunk, or the one after a damaged file is found, succeeds.
        assert is_right(tier, key(number)) or tier.save(key(number), FORM, tensors(key(number)))
        assert is_right(tier, key(number))
    assert fired or fault in ("end", "flip")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_load_gives_the_right_bytes_or_an_error(tmp_path: Path, fault: int | str) -> None:
    served = refused = 0
    for number, disk in enumerate(every_fault(fault)):
        tier = DiskTier(tmp_path, MODEL)
        tier.save(key(number), FORM, tensors(key(number)))
        with failing(disk):
            if is_right(tier, key(number)):
                served += 1
            else:
                refused += 1
        check_root(tmp_path)
    assert served, "the last disk did not fail"
    assert bool(refused) == (fault != "short")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_look_up_never_raises_and_promises_only_what_is_there(tmp_path: Path, fault: int | str) -> None:
    for number, disk in enumerate(every_fault(fault)):
        tier = DiskTier(tmp_path, MODEL)
        tier.save(key(number), FORM, tensors(key(number)))
        with failing(disk):
            found = tier.contains(key(number))
        assert is_right(tier, key(number)) or not found


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO])
def test_an_eviction_that_fails_loses_at_most_what_was_to_go(tmp_path: Path, fault: int) -> None:
    for number, disk in enumerate(every_fault(fault)):
        root = tmp_path / str(number)
        for n in range(4):
            DiskTier(root, MODEL).save(key(n), FORM, tensors(key(n)))
        size = DiskTier(root, MODEL).usage().num_bytes
        tier = DiskTier(root, MODEL, budget_bytes=size)
        with failing(disk):
            saved = tier.save(key(9), FORM, tensors(key(9)))
        assert is_right(tier, key(9)) or not saved
        assert is_right(tier, key(3))
        check_root(root)


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO, "short", "end", "flip"])
def test_a_check_finds_a_flaw_or_none_and_changes_nothing(tmp_path: Path, fault: int | str) -> None:
    DiskTier(tmp_path, MODEL).save(key(1), FORM, tensors(key(1)))
    (file,) = chunk_files(tmp_path)
    content = file.path.read_bytes()
    found = 0
    for disk in every_fault(fault):
        with failing(disk):
            found += bool(flaw(file))
        assert file.path.read_bytes() == content
    assert bool(found) == (fault != "short")


# ---------------------------------------------------------------- a store on such a disk


def document(id: str, *texts: str) -> tuple[Document, list[EncodedChunk]]:
    chunks = [
        EncodedChunk(Chunk(chunk_id(text), text, len(text), id, id, 0, len(text)), tuple(map(ord, text)))
        for text in texts
    ]
    return Document(id, "", id), chunks


def with_kv(store: Store, id: str, *texts: str) -> None:
    store.put_document(*document(id, *texts))
    tier = DiskTier(store.directory / "kv", MODEL)
    for text in texts:
        name = chunk_key(tuple(map(ord, text)))
        tier.save(name, FORM, tensors(name))


def names(store: Store) -> set[str]:
    return {file.key for file in chunk_files(store.directory / "kv")}


@pytest.mark.parametrize("fault", [errno.EIO, errno.EROFS])
def test_a_delete_that_fails_anywhere_is_finished_by_the_next_one(tmp_path: Path, fault: int) -> None:
    for number, disk in enumerate(every_fault(fault)):
        with Store.open(tmp_path / str(number), create=True) as store:
            with_kv(store, "a", "one", "two")
            with_kv(store, "b", "two", "three")
            kept = {chunk_key(tuple(map(ord, text))) for text in ("two", "three")}
            with failing(disk), suppress(StoreError):
                delete(store, ["a"])
            assert [d.id for d in store.documents()] == ["b"]
            assert names(store) >= kept
            remove_doomed_kv(store)
            assert names(store) == kept
            assert list(verify(store)) == find_waste(store) == store.doomed() == []


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO])
def test_tidying_that_fails_anywhere_takes_only_waste(tmp_path: Path, fault: int) -> None:
    for number, disk in enumerate(every_fault(fault)):
        with Store.open(tmp_path / str(number), create=True) as store:
            with_kv(store, "a", "one")
            kept = names(store)
            DiskTier(store.directory / "kv", MODEL).save(key(7), FORM, tensors(key(7)))
            waste = find_waste(store)
            with failing(disk), suppress(StoreError):
                collect(store, waste)
            assert names(store) >= kept
            collect(store, find_waste(store))
            assert names(store) == kept


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO])
def test_an_export_or_import_that_fails_anywhere_leaves_all_or_nothing(tmp_path: Path, fault: int) -> None:
    with Store.open(tmp_path / "kb", create=True) as store:
        with_kv(store, "a", "one", "two")
        for number, disk in enumerate(every_fault(fault)):
            target = tmp_path / "out" / str(number)
            target.parent.mkdir(exist_ok=True)
            with failing(disk), suppress(LazyRAGError):
                export_store(store, target)
            if target.exists():
                with failing(Disk(fault, disk.fail_at)), suppress(LazyRAGError):
                    import_store(target, tmp_path / "in" / str(number))
            for folder in (target, tmp_path / "in" / str(number)):
                if folder.exists():
                    with Store.open(folder) as copy:
                        assert list(verify(copy)) == []
                        assert len(set(copy.chunk_ids())) == 2
                    # A damaged or unreadable file of KV may be left out of an import.
                    assert folder != target or len(list(chunk_files(folder / "kv"))) == 2
        assert list(verify(store)) == []
    assert [path.name for path in tmp_path.rglob(".*") if path.is_dir()] == []


def test_a_disk_that_is_full_after_any_number_of_bytes_leaves_the_old_version_or_the_new(tmp_path: Path) -> None:
    """SQLite's files live on the real disk: the limit is the kernel's, on the size of a file."""
    script = textwrap.dedent(
        """
        import resource, signal, sys
        from lazyrag.errors import StoreError
        from lazyrag.retrievers.store import Store
        from lazyrag.types import Chunk, Document, EncodedChunk, chunk_id

        def put(store, version):
            texts = [f"version {version} part {part} " + "x" * 300 for part in range(30)]
            chunks = [EncodedChunk(Chunk(chunk_id(t), t, 3, "a", "a", 0, len(t)), (1, 2, version)) for t in texts]
            store.put_document(Document("a", "", "a"), chunks)

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        outcomes = []
        last = 0
        for version, limit in enumerate(range(0, 150_000, 3_000), 1):
            with Store.open(sys.argv[1], create=True) as store:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
                try:
                    put(store, version)
                    done = True
                except StoreError:
                    done = False
                finally:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
                seen = {int(chunk.text.split()[1]) for chunk in store.chunks()}
                assert seen == ({version} if done else {last} if last else set()), (seen, version, done)
                assert store.check() == []
                last = version if done else last
                outcomes.append(done)
        assert set(outcomes) == {True, False}, outcomes
        print("ok")
        """
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "kb"], capture_output=True, text=True, timeout=120)
    assert done.stdout == "ok\n", done.stderr


# ---------------------------------------------------------------- processes that are killed

NURSERY = textwrap.dedent(
    """
    # Reads "folder namespace version log" and lets a child of this process ingest until it is killed.
    import itertools, os, sys
    import numpy as np
    from lazyrag.backend.hashing import chunk_key
    from lazyrag.backend.tiers.disk import DiskTier, Form
    from lazyrag.care import delete
    from lazyrag.ingest import STORE, Summary, plan, run
    from lazyrag.retrievers.embed import HashEmbedder
    from lazyrag.retrievers.store import Store
    from lazyrag.splitter import Splitter
    from lazyrag.types import COMPUTED, Document, Reuse

    MODEL, FORM = "0123456789abcdef" * 4, Form(("a", "b"), "BF16", (9, 2, 8))

    class Characters:
        fingerprint = "characters"
        def encode_plain_with_offsets(self, text):
            return [ord(c) for c in text], [(i, i + 1) for i in range(len(text))]
        def decode(self, ids):
            return "".join(map(chr, ids))

    def work(folder, namespace, version, log):
        log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        def acknowledge(*words):
            os.write(log, (" ".join(map(str, words)) + "\\n").encode())
        store = Store.open(folder, create=True)
        tier = DiskTier(store.directory / "kv", MODEL)
        splitter, embedder = Splitter(Characters(), 64, 0), HashEmbedder()
        def warm(chunks):
            for id, ids in chunks:
                name = chunk_key(ids, salt=namespace)
                data = np.random.default_rng(int(name[:8], 16)).integers(0, 256, FORM.num_bytes, dtype=np.uint8)
                tier.save(name, FORM, data, namespace=namespace)
                yield id, Reuse(len(ids), 0, (COMPUTED,))
        for version in itertools.count(version):
            documents = [
                Document(f"d{i}", "\\n\\n".join(f"document {i} version {version * (part % 2)} part {part} {'x' * 20}"
                                              for part in range(6)), f"d{i}")
                for i in range(5)
            ]
            made = plan(store, documents=documents, splitter=splitter, embedder=embedder, namespace=namespace)
            for event in run(made, warm=warm, fingerprint=f"{MODEL}-0"):
                if not isinstance(event, Summary) and event.stage == STORE:
                    acknowledge("stored", version, event.done)
            if version % 2:
                delete(store, ["d4"], namespace)
            acknowledge("done", version, 0)

    for line in sys.stdin:
        folder, namespace, version, log = line.split()
        child = os.fork()
        if not child:
            work(folder, namespace, int(version), log)
        print(child, flush=True)
        os.waitpid(child, 0)
        print("gone", flush=True)
    """
)


class Nursery:
    """Starts processes that ingest, quickly: they are forked from one that has imported everything."""

    def __init__(self, script: Path) -> None:
        script.write_text(NURSERY)
        self._process = subprocess.Popen(
            [sys.executable, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def start(self, *arguments: object) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, arguments)) + "\n")
        self._process.stdin.flush()
        return int(self._line())

    def kill(self, child: int) -> None:
        os.kill(child, signal.SIGKILL)  # it never ends by itself, and its parent waits for it
        assert self._line() == "gone\n"

    def close(self) -> None:
        self._process.communicate(timeout=60)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path / "nursery.py")
    yield nursery
    nursery.close()


@dataclass
class Acknowledged:
    """What a process said is done: the last whole version, and how many documents of the next one were stored."""

    version: int = 0
    stored: int = 0

    @classmethod
    def read(cls, log: Path) -> Acknowledged:
        rows = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        done = max((int(version) for what, version, _ in rows if what == "done"), default=0)
        stored = [int(count) for what, version, count in rows if what == "stored" and int(version) == done + 1]
        return cls(done, max(stored, default=0))


def versions(store: Store, namespace: str) -> dict[str, int]:
    """The version of each document; every one is whole."""
    found = {}
    for stored in store.documents(namespace):
        texts = [chunk.text for chunk in store.chunks_of(stored.id, namespace)]
        (version,) = {int(text.split()[3]) for text in texts} - {0}
        expected = [f"version {version * (part % 2)} part {part}" for part in range(6)]
        assert [part for part in expected if not any(part in text for text in texts)] == []
        found[stored.id] = version
    return found


def check_store(folder: Path, namespace: str, said: Acknowledged, *, alone: bool = True) -> None:
    """Verify passes, what was acknowledged is there, and all KV that is there is right."""
    tier = DiskTier(folder / "kv", MODEL)
    with Store.open(folder) as store:
        assert [found for found in verify(store) if not found.harmless] == []
        found = versions(store, namespace)
        if alone:
            assert missing_kv(store, namespace) == {}
            assert set(found.values()) <= {said.version, said.version + 1}
            expected = {f"d{i}" for i in range(5 if said.version % 2 == 0 else 4)} if said.version else set()
            if (said.version + 1) % 2:  # which may have deleted it again
                expected.discard("d4")
            assert found.keys() >= expected
            assert sum(version > said.version for version in found.values()) >= said.stored - 1
        for file in chunk_files(folder / "kv"):
            data = tier.load(file.key, FORM, namespace=namespace) if alone else None
            assert data is None or data.tobytes() == tensors(file.key).tobytes()


def test_an_ingest_that_is_killed_at_any_of_50_moments_loses_nothing_it_acknowledged(
    tmp_path: Path, nursery: Nursery
) -> None:
    folder, log = tmp_path / "kb", tmp_path / "log"
    moments = random.Random(0)
    in_between, latest_s = 0, 0.2
    for number in range(50):
        before = Acknowledged.read(log)
        child = nursery.start(folder, "tenant", before.version + 1, log)
        time.sleep(moments.uniform(0, latest_s))
        nursery.kill(child)
        said = Acknowledged.read(log)
        # On a machine that is slow, or busy, it takes longer to get anywhere.
        latest_s = 0.2 if said.version > before.version else 1.1 * latest_s
        if not (folder / "store.sqlite3").exists():
            continue
        assert said.version >= before.version
        with suppress(StoreError):  # killed while it made the store
            Store.open(folder).close()
        check_store(folder, "tenant", said)
        in_between += said.stored > 0
        if number % 3 == 0:  # else the next ingest removes what went
            with Store.open(folder) as store:
                remove_doomed_kv(store)
                assert [waste for waste in find_waste(store) if waste.kind == UNUSED] == []
    assert in_between, "no process was killed between two documents"
    assert Acknowledged.read(log).version >= 2


def test_two_processes_with_a_namespace_each_lose_nothing_to_each_other(tmp_path: Path) -> None:
    folder = tmp_path / "kb"
    Store.open(folder, create=True).close()
    moments = random.Random(1)
    nurseries = {name: Nursery(tmp_path / f"{name}.py") for name in ("one", "two")}
    logs = {name: tmp_path / f"{name}.log" for name in nurseries}
    for _ in range(8):
        children = {
            name: nursery.start(folder, name, Acknowledged.read(logs[name]).version + 1, logs[name])
            for name, nursery in nurseries.items()
        }
        time.sleep(moments.uniform(0.1, 0.6))
        for name, nursery in nurseries.items():
            nursery.kill(children[name])
        for name in nurseries:
            said = Acknowledged.read(logs[name])
            with Store.open(folder) as store:
                assert [found for found in verify(store) if not found.harmless] == []
                assert missing_kv(store, name) == {}
                assert set(versions(store, name).values()) <= {said.version, said.version + 1}
    for nursery in nurseries.values():
        nursery.close()
    assert all(Acknowledged.read(log).version for log in logs.values())


def test_two_processes_that_write_the_same_documents_leave_whole_ones(tmp_path: Path) -> None:
    folder = tmp_path / "kb"
    Store.open(folder, create=True).close()
    moments = random.Random(2)
    nurseries = [Nursery(tmp_path / f"{number}.py") for number in range(2)]
    for round in range(6):
        children = [
            nursery.start(folder, "tenant", 1000 * number + 10 * round + 1, tmp_path / f"{number}.log")
            for number, nursery in enumerate(nurseries)
        ]
        time.sleep(moments.uniform(0.1, 0.6))
        for child, nursery in zip(children, nurseries, strict=True):
            nursery.kill(child)
        check_store(folder, "tenant", Acknowledged(), alone=False)
    for nursery in nurseries:
        nursery.close()
    with Store.open(folder) as store:
        assert versions(store, "tenant")
        remove_doomed_kv(store)
        # A kill may have hit one that had saved KV of what the other deleted meanwhile, before it could look.
        waste = [waste for waste in find_waste(store) if waste.kind == UNUSED]
        assert len(waste) <= 6 * 2 * 32
        collect(store, waste)
        assert [waste for waste in find_waste(store) if waste.kind == UNUSED] == []
    check_store(folder, "tenant", Acknowledged(), alone=False)
