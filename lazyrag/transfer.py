"""A store as one file or folder, to be carried to another machine: an export, and a store made from it.

    store.sqlite3    a copy of one moment, without what was deleted
    kv/...           the chunks' KV, if it is wanted; only engines with the same model and settings can use it

A folder or a tar file with these names. Vectors and anchors are caches that the new store makes again. Both directions
appear whole or not at all.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO

from lazyrag.backend.tiers.disk import chunk_files, flaw, sync
from lazyrag.care import KV, find_waste, forget_missing_kv, remove_doomed_kv
from lazyrag.errors import InputError, StoreError
from lazyrag.retrievers.store import FILE_NAME, Store

MEMBER = re.compile(r"kv/[0-9a-f]{16}/[0-9a-f]{16}/[0-9a-f]{2}/[0-9a-f]+(\.[0-9]+of[0-9]+)?\.safetensors")


@dataclass(frozen=True, slots=True)
class Moved:
    """What an export or import has written.

    Attributes:
        documents, chunks: of all namespaces.
        kv_files, num_bytes: files of KV, and bytes of all files.
        damaged: KV files that an import left out.
    """

    documents: int
    chunks: int
    kv_files: int
    num_bytes: int
    damaged: int = 0


def export_store(store: Store, target: Path, *, kv: bool = True) -> Moved:
    """Write a store to a folder or, if its name ends in .tar, a tar file. Others may use the store meanwhile.

    Args:
        store: all its namespaces, and the secret of its hashes.
        target: must not exist yet; a folder may be empty.
        kv: with the KV of chunks.

    Raises:
        InputError: there is something at `target`.
        StoreError: it cannot be written.
    """
    as_tar = target.suffix == ".tar"
    _expect_nothing(target, folder=not as_tar)
    remove_doomed_kv(store)
    with _translated(target), _staged(target) as folder:
        copied = folder / FILE_NAME
        store.copy_to(copied)
        needless = {item.path for item in find_waste(store)}
        files = [f.path for f in chunk_files(store.directory / KV) if f.path not in needless] if kv else []
        num_bytes = copied.stat().st_size
        num_files = 0
        tar = tarfile.open(folder / "export.tar", "w") if as_tar else None  # noqa: SIM115
        try:
            if tar is not None:
                tar.add(copied, FILE_NAME)
            for path in files:
                name = path.relative_to(store.directory)
                with suppress(FileNotFoundError):  # evicted since
                    num_bytes += _put(path, tar, folder, name)
                    num_files += 1
        finally:
            if tar is not None:
                tar.close()
        _publish(folder / "export.tar" if as_tar else folder, target)
        return Moved(*_counts(store), num_files, num_bytes)


def import_store(source: Path, directory: Path) -> Moved:
    """Make a store from what `export_store` wrote. KV files that are damaged are left out.

    Args:
        source: a folder or a tar file.
        directory: of the new store; must not exist yet, or be empty.

    Raises:
        InputError: `source` is no export, or there is something in `directory`.
        StoreError: the exported store is damaged, or cannot be written.
    """
    _expect_nothing(directory, folder=True)
    with _translated(directory), _staged(directory) as folder:
        for name, stream in _members(source):
            with stream:
                _write(stream, folder / name)
        if not (folder / FILE_NAME).is_file():
            raise InputError(f"{source} is no exported store:", why=f"it holds no {FILE_NAME}.")
        with Store.open(folder) as store:
            if problems := store.check():
                raise StoreError(f"The store in {source} is damaged:", why=f"{problems[0]}.", fix="Export it again.")
            counts = _counts(store)
        files = list(chunk_files(folder / KV))
        damaged = [file for file in files if flaw(file)]
        for file in damaged:
            file.path.unlink()
        with Store.open(folder) as store:
            for namespace in store.namespaces():
                forget_missing_kv(store, namespace)
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        _publish(folder, directory)
    return Moved(*counts, len(files) - len(damaged), num_bytes, len(damaged))


def _expect_nothing(target: Path, *, folder: bool) -> None:
    is_empty_folder = folder and target.is_dir() and not any(target.iterdir())
    if os.path.lexists(target) and not is_empty_folder:
        raise InputError(f"There is something in {target} already:", why="nothing is overwritten.", fix="Name another.")


@contextmanager
def _translated(target: Path) -> Iterator[None]:
    try:
        yield
    except tarfile.TarError as error:
        raise InputError("The file is no tar file, or a damaged one:", why=f"{error}.") from error
    except OSError as error:
        raise StoreError(f"{target} cannot be written: {error.strerror or error}.") from error


@contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """A folder beside the target, gone afterwards if it was not published."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.parent / f".{target.name}.{secrets.token_hex(8)}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _put(path: Path, tar: tarfile.TarFile | None, folder: Path, name: Path) -> int:
    """Add a file to an export; its size."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if tar is not None:
            tar.addfile(tar.gettarinfo(arcname=str(name), fileobj=file), file)
        else:
            _write(file, folder / name)
    return size


def _write(stream: IO[bytes], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        shutil.copyfileobj(stream, file)
        file.flush()
        os.fsync(file.fileno())


def _publish(made: Path, target: Path) -> None:
    """Let what was made appear under its name, durably."""
    for path in (made, *(folder for folder in made.rglob("*") if folder.is_dir())):
        sync(path)
    os.replace(made, target)
    sync(target.parent)


def _members(source: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Names and contents of an export's files; what is none of a store's is refused."""
    if source.is_dir():
        yield FILE_NAME, _opened(source / FILE_NAME, source)
        for file in chunk_files(source / KV):
            yield str(file.path.relative_to(source)), file.path.open("rb")
        return
    with _opened(source, source) as opened, tarfile.open(fileobj=opened) as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.isfile() else None
            if stream is None or (member.name != FILE_NAME and not MEMBER.fullmatch(member.name)):
                raise InputError(f"{source} is no exported store:", why="it holds files that are none of a store's.")
            yield member.name, stream


def _opened(path: Path, source: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise InputError(f"{source} is no exported store:", why=f"{path}: {error.strerror}.") from error


def _counts(store: Store) -> tuple[int, int]:
    stats = [store.stats(namespace) for namespace in store.namespaces()]
    return sum(counts["documents"] for counts in stats), sum(counts["chunks"] for counts in stats)
