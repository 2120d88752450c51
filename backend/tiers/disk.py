"""Chunk KV on disk: one file a chunk, whole or absent, and never trusted unread.

    root / fingerprint[:16] / hash of the namespace / key[:2] / key[.rank"of"ranks].safetensors

A file is an ordinary safetensors file with one tensor [tokens, heads, row] a layer, in the order of the layers. Its
metadata name the format, the fingerprint, the key and a checksum. A reader rebuilds the header from what it read and
expects the same bytes, so each bit of a file is either compared or under the checksum.

The checksum is a CRC-32 of the header (with the checksum field empty) and the tensors. It finds every burst of up to 32
bits and misses other damage once in 2^32; it costs a quarter of BLAKE2b's time, and against somebody who can write to
the store no unkeyed digest helps.

A file appears by rename and is never changed, so any number of processes may share a root. Whatever is found damaged is
reported, removed, and from then on missing: the engine computes the chunk again.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lazyrag.backend.hashing import NAME_DIGITS
from lazyrag.errors import ConfigError, StoreError

logger = logging.getLogger(__name__)

FORMAT = "lazyrag-kv-1"
"""Version of the file's layout. What the numbers in it mean is the fingerprint's business."""

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1}
"""Bytes an element, by safetensors' name of the dtype."""

MAX_HEADER_BYTES = 1 << 20
READ_BYTES = 1 << 20
STALE_S = 24 * 3600
HEX = "[0-9a-f]"
FOLDERS = f"{HEX * 16}/{HEX * 16}/{HEX * 2}"
"""Only folders of these names are listed, so that a root that holds other files never loses one to an eviction."""
LOOK_SHARE = 20
"""So many times as long as it took to look at a namespace's files, they are not looked at again."""
LOW_WATER = 0.9
"""Eviction goes on until this share of the budget is used, so that a full store is not listed at every save."""

Bytes = npt.NDArray[np.uint8]


class DamagedFileError(StoreError):
    """A chunk's file is not what was saved. It is gone when this is raised."""


@dataclass(frozen=True, slots=True)
class Form:
    """What the tensors of one chunk look like, the same in every layer.

    Attributes:
        layers: names of the layers, in the order of their data.
        dtype: a key of `ITEM_BYTES`.
        shape: [tokens, heads, row]; a row is one token's K and V of one head.
    """

    layers: tuple[str, ...]
    dtype: str
    shape: tuple[int, int, int]

    @property
    def layer_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return self.layer_bytes * len(self.layers)


@dataclass(frozen=True, slots=True)
class Usage:
    """What lies under a root, all fingerprints and namespaces together."""

    num_files: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """A file under a root, by its name alone; nothing says that it is whole.

    Attributes:
        model: the first 16 digits of the fingerprint.
        space: see `space_of`.
        key: of the chunk.
    """

    path: Path
    model: str
    space: str
    key: str


@dataclass(slots=True)
class _Space:
    """What a process knows of a namespace's files.

    Attributes:
        num_bytes: of all of them, at the last look and what this process has added since.
        next_look_s: when it may look again, by `time.monotonic`.
        is_known_full: that the quota is reached was said.
    """

    num_bytes: int
    next_look_s: float
    is_known_full: bool


class DiskTier:
    """The chunk files of one model under `root`. For several threads; any number of processes may share a root.

    Args:
        root: folder of the store; made if missing.
        fingerprint: `lazyrag.backend.fingerprint.model_fingerprint` of the running model; hex.
        budget_bytes: limit for everything under `root`; the files used longest ago go first. None for no limit.
        rank: which of `ranks` this process is, if the KV heads of a chunk are spread over several processes.
        ranks: files that make up a chunk.

    Attributes:
        counters: loaded, loaded_bytes, saved, saved_bytes, damaged, evicted, over_quota; whoever reads them may clear
            them.
        pinned: names of chunks (`hashing.chunk_name`) that this process does not evict.

    Raises:
        ConfigError: the folder cannot be made, the budget is not positive, or the fingerprint is none.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        fingerprint: str,
        budget_bytes: int | None = None,
        *,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        if budget_bytes is not None and budget_bytes <= 0:
            raise ConfigError(f"A disk budget of {budget_bytes} bytes holds no chunk.", fix="Give more, or None.")
        if not re.fullmatch(f"{HEX}{{16,}}", fingerprint):
            raise ConfigError(f"{fingerprint!r} is not a fingerprint.", fix="Pass what model_fingerprint returns.")
        self.root = Path(root)
        self.budget_bytes = budget_bytes
        self.counters: Counter[str] = Counter()
        self.pinned: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        """Of the books; no file is read or written under it."""
        self._fingerprint, self._rank, self._ranks = fingerprint, rank, ranks
        self._num_bytes: int | None = None  # under root, as far as this process knows; None: never looked
        self._reported: set[Path] = set()
        self._save_fails = False
        self._spaces: dict[str, _Space] = {}
        """Namespaces that have a quota."""
        try:
            _make_folder(self.root)
        except OSError as error:
            raise ConfigError(
                f"The folder for chunk KV, {root}, cannot be made: {error.strerror}.",
                fix="Name a folder on a disk that this user can write to.",
            ) from error

    # ------------------------------------------------------------ reading

    def contains(self, key: str, *, namespace: str = "") -> bool:
        """Whether every rank's file of the chunk is there, with a header that fits and the size that it promises.

        Cheap: the tensors are not read, so `load` may still find them damaged. A file that is refused is removed.
        """
        return all(self._has(self._path(key, namespace, rank), key) for rank in range(self._ranks))

    def load(self, key: str, form: Form, *, namespace: str = "", out: Bytes | None = None) -> Bytes:
        """This rank's tensors, every byte verified.

        Args:
            key: of the chunk.
            form: what the tensors must look like.
            namespace: of the chunk.
            out: where to put them, [form.num_bytes]; holds anything if this raises. None: a new array.

        Returns:
            [form.num_bytes], the layers one after the other.

        Raises:
            DamagedFileError: the file is damaged, foreign or cannot be read; it has been reported and removed.
            StoreError: there is no file.
        """
        path = self._path(key, namespace)
        try:
            with path.open("rb", buffering=0) as file:
                found, checksum = self._read_header(file, key)
                if found != form:
                    raise ValueError(f"it holds {_words(found)}, this engine has {_words(form)}")
                data = np.empty(form.num_bytes, np.uint8) if out is None else out
                _read_exactly(file, data.data)
            if checksum != self._checksum(key, form, data):
                raise ValueError("its checksum does not match its content")
        except FileNotFoundError as error:
            raise StoreError(f"The KV of chunk {key} is not on disk any more.") from error
        except (OSError, ValueError) as error:
            raise self._give_up(path, error) from error
        with suppress(OSError):  # a store may be mounted read-only; it is then in order of writing
            os.utime(path)
        self._count(loaded=1, loaded_bytes=form.num_bytes)
        return data

    def take_counters(self) -> dict[str, int]:
        """The counters since the last call."""
        with self._lock:
            counters = dict(self.counters)
            self.counters.clear()
        return counters

    def _count(self, **counts: int) -> None:
        with self._lock:
            self.counters.update(counts)

    def _has(self, path: Path, key: str) -> bool:
        try:
            with path.open("rb", buffering=0) as file:
                self._read_header(file, key)
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as error:
            self._give_up(path, error)
            return False
        return True

    def _read_header(self, file: FileIO, key: str) -> tuple[Form, str]:
        """Form and checksum of an open file, whose position is then the first tensor's.

        Raises:
            ValueError: says what is wrong.
        """
        fingerprint, form, checksum = _read_header(file, key)
        if fingerprint != self._fingerprint:
            raise ValueError("it was made by another model or another setting (its fingerprint differs)")
        return form, checksum

    def _give_up(self, path: Path, error: Exception) -> DamagedFileError:
        """Report a file once and remove it."""
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        with self._lock:
            is_new = path not in self._reported
            self._reported.add(path)
        if is_new:
            self._count(damaged=1)
            logger.warning("Chunk KV in %s is not used: %s. The chunk is computed again.", path, reason)
        with suppress(OSError):
            path.unlink()
        return DamagedFileError(f"The chunk file {path} cannot be used: {reason}.")

    # ------------------------------------------------------------ writing

    def save(self, key: str, form: Form, data: Bytes, *, namespace: str = "", quota: int | None = None) -> bool:
        """Save this rank's tensors; they are durable when this returns True.

        A disk that is full or failing is reported once and costs the chunk its file, nothing else.

        Args:
            key: of the chunk.
            form: what the tensors look like.
            data: [form.num_bytes], the layers one after the other.
            namespace: of the chunk.
            quota: bytes that the namespace's files may have, those of all models together; None for no limit.

        Returns:
            whether a file was written; False if there is one already, if it exceeds budget or quota, or if writing
            failed.
        """
        assert data.nbytes == form.num_bytes
        path = self._path(key, namespace)
        if self._has(path, key):
            return False
        header = _header(self._fingerprint, key, form, self._checksum(key, form, data))
        num_bytes = len(header) + data.nbytes
        if self.budget_bytes is not None and num_bytes > self.budget_bytes:
            return False
        if quota is not None and not self._fits(num_bytes, quota, namespace):
            return False
        try:
            self._make_room(num_bytes)
            _write(path, header, data)
        except OSError as error:
            if not self._save_fails:
                self._save_fails = True
                logger.warning("Chunk KV cannot be saved under %s: %s. Chunks go unsaved.", self.root, error.strerror)
            return False
        if self._save_fails:
            self._save_fails = False
            logger.warning("Chunk KV can be saved under %s again.", self.root)
        with self._lock:
            if self._num_bytes is not None:
                self._num_bytes += num_bytes
            self._reported.discard(path)
            if namespace in self._spaces:
                self._spaces[namespace].num_bytes += num_bytes
        self._count(saved=1, saved_bytes=data.nbytes)
        return True

    def delete(self, key: str, *, namespace: str = "") -> set[Path]:
        """Remove every rank's file of a chunk; none there is no error. Returns and raises as `forget`."""
        return unlink_files(self._path(key, namespace, rank) for rank in range(self._ranks))

    def forget(self, names: Set[str], *, namespace: str = "") -> set[Path]:
        """Remove this model's files of chunks with these names (`hashing.chunk_name`).

        Reads those folders only that such files lie in: names begin with a folder's.

        Returns:
            the folders that must be synced (`sync_folders`), or a power cut may bring a file back.

        Raises:
            OSError: one cannot be removed.
        """
        space = self.root / self._fingerprint[:16] / space_of(namespace)
        folders = {space / name[:2] for name in names}
        return unlink_files(
            path for folder in folders for path in folder.glob("*.safetensors") if path.name[:NAME_DIGITS] in names
        )

    # ------------------------------------------------------------ the whole store

    def usage(self) -> Usage:
        """Count and size of the chunk files under the root."""
        sizes = [stat.st_size for _, stat in self._files()]
        return Usage(len(sizes), sum(sizes))

    def sweep(self) -> None:
        """Remove what interrupted writers left, and bring the store under its budget. For the start of an engine."""
        for path in leftovers(self.root):
            with suppress(OSError):
                path.unlink()
        self._make_room(0)

    def _make_room(self, num_bytes: int) -> None:
        """Evict the files used longest ago if `num_bytes` more would exceed the budget.

        Other processes write to the same root; what they added is seen whenever this process believes it is full.
        """
        budget = self.budget_bytes
        if budget is None or (self._num_bytes is not None and self._num_bytes + num_bytes <= budget):
            return
        files = sorted(self._files(), key=lambda file: file[1].st_mtime_ns)
        used = sum(stat.st_size for _, stat in files)
        if used + num_bytes > budget:
            for path, stat in files:
                if used + num_bytes <= LOW_WATER * budget:
                    break
                if path.name[:NAME_DIGITS] in self.pinned:
                    continue
                with suppress(OSError):
                    path.unlink(missing_ok=True)
                    used -= stat.st_size
                    self._count(evicted=1)
        with self._lock:
            self._num_bytes = used

    def _fits(self, num_bytes: int, quota: int, namespace: str) -> bool:
        """Whether a namespace may have so much more, this rank its share of it.

        Each rank counts its own files only, as if there were no others: so all come to the same end. Others write and
        delete, too: a namespace that is believed to be full is looked at again, but not all the time.
        """
        now, quota = time.monotonic(), quota // self._ranks
        space = self._spaces.get(namespace)
        if space is None or (space.num_bytes + num_bytes > quota and now >= space.next_look_s):
            used = sum(stat.st_size for path, stat in self._files(space_of(namespace)) if self._is_own(path))
            took_s = time.monotonic() - now
            is_known_full = space is not None and space.is_known_full
            space = _Space(used, now + took_s * (1 + LOOK_SHARE), is_known_full)
            with self._lock:
                self._spaces[namespace] = space
        fits = space.num_bytes + num_bytes <= quota
        if not fits:
            self._count(over_quota=1)
            if not space.is_known_full:
                logger.warning("KV of a namespace has reached its quota; more goes unsaved.")
        space.is_known_full = not fits
        return fits

    def _files(self, space: str | None = None) -> Iterator[tuple[Path, os.stat_result]]:
        for file in chunk_files(self.root, space):
            with suppress(FileNotFoundError):
                yield file.path, file.path.stat()

    # ------------------------------------------------------------ names and bytes

    def _is_own(self, path: Path) -> bool:
        """Whether it is no other rank's file."""
        others = f"of{self._ranks}.safetensors"
        return self._ranks == 1 or not path.name.endswith(others) or path.name.endswith(f".{self._rank}{others}")

    def _path(self, key: str, namespace: str, rank: int | None = None) -> Path:
        assert key.isalnum(), "keys are hex digits"
        shard = f".{self._rank if rank is None else rank}of{self._ranks}" if self._ranks > 1 else ""
        return self.root / self._fingerprint[:16] / space_of(namespace) / key[:2] / f"{key}{shard}.safetensors"

    def _checksum(self, key: str, form: Form, data: Bytes) -> str:
        return f"{zlib.crc32(data.data, zlib.crc32(_header(self._fingerprint, key, form, ''))):08x}"


# ---------------------------------------------------------------- a root, whoever made its files


def space_of(namespace: str) -> str:
    """The name of a namespace's folder."""
    return blake2b(namespace.encode(), digest_size=8).hexdigest()


def chunk_files(root: Path, space: str | None = None, model: str | None = None) -> Iterator[ChunkFile]:
    """Every chunk file under a root, of one namespace's folder or all, of one model's or all; without a root, none."""
    folders = f"{model or HEX * 16}/{space or HEX * 16}/{HEX * 2}"
    for path in root.glob(f"{folders}/*.safetensors"):
        model, owner = path.parts[-4:-2]
        yield ChunkFile(path, model, owner, path.name.partition(".")[0])


def leftovers(root: Path) -> list[Path]:
    """What interrupted writers left under a root and nobody writes to any more."""
    found = []
    for path in root.glob(f"{FOLDERS}/.*.tmp"):
        with suppress(FileNotFoundError):
            if _is_abandoned(path.name, path.stat().st_mtime):
                found.append(path)
    return found


def flaw(file: ChunkFile) -> str:
    """What is wrong with a file, after reading all of it; empty if nothing is, or if it is gone. Changes nothing."""
    try:
        with file.path.open("rb", buffering=0) as opened:
            fingerprint, form, checksum = _read_header(opened, file.key)
            if not fingerprint.startswith(file.model):
                return "it lies in another model's folder"
            found = zlib.crc32(_header(fingerprint, file.key, form, ""))
            piece = memoryview(bytearray(min(READ_BYTES, form.num_bytes)))
            left = form.num_bytes
            while left:
                _read_exactly(opened, piece[:left])
                found = zlib.crc32(piece[:left], found)
                left -= min(left, len(piece))
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        return error.strerror or str(error) if isinstance(error, OSError) else str(error)
    return "" if f"{found:08x}" == checksum else "its checksum does not match its content"


def remove_files(paths: Iterable[Path]) -> None:
    """Remove files for good: a power cut does not bring them back. Those that are gone already count as removed.

    Raises:
        OSError: one cannot be removed.
    """
    sync_folders(unlink_files(paths))


def unlink_files(paths: Iterable[Path]) -> set[Path]:
    """As `remove_files`, but for `sync_folders` of what this returns."""
    folders = set()
    for path in paths:
        path.unlink(missing_ok=True)
        folders.add(path.parent)
    return folders


def sync_folders(folders: Iterable[Path]) -> None:
    """Make the names in folders durable; those that are gone are no error."""
    for folder in folders:
        with suppress(FileNotFoundError):
            sync(folder)


def most_header_bytes(layers: int) -> int:
    """What a file takes beside its tensors, at most, if the layers' names have no more than 64 characters."""
    names = tuple(f"{layer:0>64}" for layer in range(layers))
    form = Form(names, max(ITEM_BYTES, key=len), (1 << 20, 1 << 10, 1 << 12))
    return len(_header("f" * 64, "f" * 96, form, "f" * 8))


def _header(fingerprint: str, key: str, form: Form, checksum: str) -> bytes:
    """Length and JSON of a safetensors header. The same arguments give the same bytes."""
    entries: dict[str, Any] = {
        "__metadata__": {"format": FORMAT, "fingerprint": fingerprint, "key": key, "checksum": checksum}
    }
    size = form.layer_bytes
    for i, layer in enumerate(form.layers):
        entries[layer] = {
            "dtype": form.dtype,
            "shape": list(form.shape),
            "data_offsets": [i * size, (i + 1) * size],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_header(file: FileIO, key: str) -> tuple[str, Form, str]:
    """Fingerprint, form and checksum of an open file, whose position is then the first tensor's.

    Raises:
        ValueError: says what is wrong.
    """
    size = os.fstat(file.fileno()).st_size
    prefix = bytearray(8)
    _read_exactly(file, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError("its header is too long")
    raw = bytearray(length)
    _read_exactly(file, memoryview(raw))
    (kind, fingerprint, owner, checksum), form = _parse(raw)
    if kind != FORMAT:
        raise ValueError(f"it is of another format than {FORMAT}")
    if owner != key:
        raise ValueError("it is another chunk's")
    if bytes(prefix + raw) != _header(fingerprint, key, form, checksum):
        raise ValueError("its header is damaged")
    if size != 8 + length + form.num_bytes:
        raise ValueError(f"it has {size} bytes instead of {8 + length + form.num_bytes}")
    return fingerprint, form, checksum


def _parse(raw: bytes | bytearray) -> tuple[tuple[str, ...], Form]:
    """Metadata (format, fingerprint, key, checksum) and form of a header.

    Raises:
        ValueError: it is not one that `_header` writes.
    """
    with suppress(ValueError, LookupError, TypeError, AttributeError, StopIteration, RecursionError):
        entries = json.loads(raw)
        metadata = entries.pop("__metadata__")
        first = next(iter(entries.values()))
        tags = tuple(metadata[name] for name in ("format", "fingerprint", "key", "checksum"))
        tokens, heads, row = first["shape"]
        form = Form(tuple(entries), first["dtype"], (tokens, heads, row))
        if all(type(tag) is str for tag in tags) and all(type(n) is int for n in form.shape) and form.num_bytes > 0:
            return tags, form
    raise ValueError("its header is damaged")


def _words(form: Form) -> str:
    return f"{len(form.layers)} layers of {form.dtype}{list(form.shape)}"


def _read_exactly(file: FileIO, buffer: memoryview) -> None:
    while buffer:
        count = file.readinto(buffer)
        if not count:
            raise ValueError("it ends too early")
        buffer = buffer[count:]


def _write(path: Path, header: bytes, data: Bytes) -> None:
    """Make `path` appear whole and durable, or not at all."""
    _make_folder(path.parent)
    temporary = path.parent / f".{_host()}-{os.getpid()}-{secrets.token_hex(8)}.tmp"
    try:
        with temporary.open("xb", buffering=0) as file:
            for part in (memoryview(header), data.data):
                while part:
                    part = part[file.write(part) :]
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync(path.parent)


def _make_folder(folder: Path) -> None:
    """As `mkdir -p`, durable: each new entry is synced in the folder that holds it."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


def sync(path: Path) -> None:
    """Make a file's content, or a folder's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _host() -> str:
    return blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()


def _is_abandoned(name: str, mtime: float) -> bool:
    """Whether nobody writes to the temporary file any more: its process on this host is gone, or a day has passed."""
    if time.time() - mtime > STALE_S:
        return True
    host, _, rest = name.removeprefix(".").partition("-")
    pid = rest.partition("-")[0]
    if host != _host() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
