"""Which registered chunks may occur in a text: a rolling-hash index that answers in about 2 ms for 100k characters.

1.  h(i) is a 64-bit polynomial hash of the `WINDOW` characters at i, from one prefix-sum array:

        P[i] = sum_{j<i} v(text[j]) * B^j  mod 2^64        h(i) = (P[i + WINDOW] - P[i]) * B^-i

    with v and the odd base B drawn from a secret, so that nobody can prepare texts that collide.
2.  Sampling: of every `REACH` windows in a row, the one with the smallest h is kept (a minimizer). Which windows of a
    chunk are kept does not depend on what stands around it, and a text of `MIN_CHARS` or more keeps at least one.
3.  Each chunk is filed under one kept window, its anchor: the first among its rarest ones. Rarest, so that a header
    that every chunk shares is nobody's anchor; first, so that a chunk cut at its end is found, too.
4.  A kept window of the prompt that is an anchor proposes the chunk. If the hash of the whole length agrees (from the
    same prefix sums), the chunk is proposed as a whole, else as possibly cut.

Proposals are not proofs: the segmenter compares the text. Chunks below `MIN_CHARS` are not indexed.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from lazyrag.errors import InputError, StoreError
from lazyrag.types import ChunkId, canonical

WINDOW = 32
REACH = 16
MIN_CHARS = WINDOW + REACH - 1

FORMAT_VERSION = 1
BATCH_CHARS = 1 << 20
COUNT_BITS = 20
"""Windows are counted in this many buckets (as a power of two): enough to tell boilerplate from text."""
MAX_SHARED = 64
"""An anchor that more chunks than this share does not say which of them was cut."""
MAX_PROPOSALS = 1 << 17
"""Bounds the work for a text made to match everywhere; what lies beyond stays literal (`Candidates.known`)."""
MAX_WHOLE = 4096
"""Proposals of whole chunks; in a text of many windows, as many more as there is room for."""
MAX_CUT = 1024
"""Proposals of cut chunks."""
MAX_PLACES = 32
"""Places of one chunk at which it is proposed although they overlap, where there are more than `MAX_WHOLE` in all."""
MAX_CHARS = 1 << 23
"""Characters of all proposed chunks together, which the caller is going to compare."""

U64: TypeAlias = npt.NDArray[np.uint64]
I64: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Entries: TypeAlias = npt.NDArray[Any]

ENTRY = np.dtype([("anchor", "<u8"), ("whole", "<u8"), ("offset", "<u4"), ("length", "<u4"), ("id", "u1", 16)])
"""One chunk: hash of its anchor, hash of its whole text, the anchor's place in it, its length in characters, its id."""


class Candidates(NamedTuple):
    """Proposals of `AnchorIndex.candidates`, one a row.

    Attributes:
        start: where the chunk would start, in characters.
        end: where it would end; for a chunk that is cut, where it would end if it were not.
        whole: whether the hash of the whole text agreed; if not, only the anchor did.
        chunk_ids: the chunk.
        known: where the text is that of a chunk, disjoint and ascending: every place whose whole hash agrees, proposed
            or not, and all that may be a chunk where there was too much to look at.
    """

    start: I64
    end: I64
    whole: Bools
    chunk_ids: list[ChunkId]
    known: list[tuple[int, int]]


class AnchorIndex:
    """The index. Any number of threads may read (`candidates`) while one changes it.

    Args:
        secret: keys the hashes; a saved index can only be loaded with the same one. None draws one.
    """

    def __init__(self, *, secret: bytes | None = None) -> None:
        self._secret = secret if secret is not None else secrets.token_bytes(32)
        self._hashes = _Hashes(self._secret)
        self._counts = np.zeros(1 << COUNT_BITS, np.uint32)
        # Each run has at least twice the entries of the next one, so there are few.
        self._runs: tuple[_Run, ...] = ()
        self._filter = _Filter(0)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(int(run.alive.sum()) for run in self._runs)

    def chunk_ids(self) -> set[ChunkId]:
        """The chunks that are indexed."""
        digits = "".join(run.living()["id"].tobytes().hex() for run in self._runs)
        return {digits[start : start + 32] for start in range(0, len(digits), 32)}

    # ---------------------------------------------------------------- changing

    def add(self, items: Iterable[tuple[ChunkId, str]]) -> list[ChunkId]:
        """Index chunks, given as (id, text); those already indexed are passed over.

        Returns:
            the ids of chunks that cannot be indexed: their canonical text has fewer than `MIN_CHARS` characters.
        """
        unindexable: list[ChunkId] = []
        with self._lock:
            for batch in _batches(items):
                texts: dict[ChunkId, str] = {}
                for chunk_id, text in batch:
                    text = canonical(text)
                    if len(text) < MIN_CHARS:
                        unindexable.append(chunk_id)
                    else:
                        texts[chunk_id] = text
                for run in self._runs:
                    ids = list(texts)
                    for found in np.flatnonzero(run.find(_to_bytes(ids)) >= 0):
                        del texts[ids[found]]
                if texts:
                    self._append(_Run.of(self._entries(_to_bytes(texts), list(texts.values()))))
        return unindexable

    def remove(self, chunk_ids: Iterable[ChunkId]) -> None:
        """Forget chunks; unknown ids are passed over."""
        ids = _to_bytes(chunk_ids)
        with self._lock:
            for run in self._runs:
                rows = run.find(ids)
                run.alive[rows[rows >= 0]] = False

    def _entries(self, ids: npt.NDArray[np.uint8], texts: Sequence[str]) -> Entries:
        lengths = np.array([len(text) for text in texts], np.int64)
        ends = np.cumsum(lengths)
        starts = ends - lengths
        sums = self._hashes.prefix_sums("".join(texts))
        windows = self._hashes.windows(sums)
        at = _minimizers(windows, owner=np.repeat(np.arange(len(texts), dtype=np.int32), lengths))
        hashes = windows[at]
        owner = np.searchsorted(ends, at, side="right")

        buckets = _top_bits(hashes, COUNT_BITS)
        np.add.at(self._counts, buckets, np.uint32(1))
        # The first of a chunk's windows in its rarest class. Classes are powers of two: counts are estimates.
        rarity = np.frexp(self._counts[buckets])[1]
        order = np.lexsort((at, rarity, owner))
        chosen = at[order[np.searchsorted(owner[order], np.arange(len(texts)))]]

        entries = np.zeros(len(texts), ENTRY)
        entries["anchor"] = windows[chosen]
        entries["whole"] = self._hashes.spans(sums, starts, ends)
        entries["offset"] = chosen - starts
        entries["length"] = lengths
        entries["id"] = ids
        return entries

    def _append(self, run: _Run) -> None:
        runs = list(self._runs)
        while runs and len(runs[-1].entries) < 2 * len(run.entries):
            run = _Run.of(np.concatenate([runs.pop().living(), run.living()]))
        runs.append(run)
        total = sum(len(run.entries) for run in runs)
        if total > self._filter.capacity:
            grown = _Filter(2 * total)
            for old in runs:
                grown.add(old.anchors)
            self._filter = grown
        else:
            self._filter.add(run.anchors)
        self._runs = tuple(runs)

    # ---------------------------------------------------------------- finding

    def candidates(self, text: str) -> Candidates:
        """What may occur in a text, in no particular order.

        Time is linear in the text's length. Of a chunk that matches at very many places, for the text repeats itself,
        those are proposed that are disjoint.
        """
        runs, filter = self._runs, self._filter
        if not runs or len(text) < MIN_CHARS:
            return Candidates(*_NO_RANGES, np.zeros(0, bool), [], [])
        sums = self._hashes.prefix_sums(text)
        windows = self._hashes.windows(sums)
        at = _minimizers(windows)
        hashes = windows[at]
        passed = filter.may_hold(hashes)
        at, hashes = at[passed], hashes[passed]
        known = [_NO_RANGES]
        found = []
        for run, hits in zip(runs, _hits(runs, hashes, at), strict=True):
            entries = run.entries[hits.row]
            start = at[hits.hit] - entries["offset"]
            end = start + entries["length"]
            inside = (start >= 0) & (end <= len(text))
            whole = inside.copy()
            whole[inside] = self._hashes.spans(sums, start[inside], end[inside]) == entries["whole"][inside]
            keep = (start >= 0) & (whole | ~hits.crowded)
            found.append((start[keep], end[keep], whole[keep], entries["id"][keep], hits.cost[keep]))
            known.append((start[whole], end[whole]))
            if len(hits.left_out):
                place, longest = at[hits.left_out], int(run.entries["length"].max())
                known.append((np.maximum(place - longest, 0), np.minimum(place + longest, len(text))))
        starts, ends, wholes, ids, cost = (np.concatenate(column) for column in zip(*found, strict=True))
        kept = _chosen(starts, ends, wholes, ids, np.argsort(cost, kind="stable"), num_chars=len(text))
        passed_over = ~wholes
        passed_over[kept] = False
        known.append((starts[passed_over], np.minimum(ends[passed_over], len(text))))
        return Candidates(
            starts[kept],
            ends[kept],
            wholes[kept],
            [row.tobytes().hex() for row in ids[kept]],
            _union(*(np.concatenate(column) for column in zip(*known, strict=True))),
        )

    # ---------------------------------------------------------------- files

    def save(self, folder: str | Path) -> None:
        """Write the index into a folder. At any moment the folder holds the old index or the new one, whole."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with self._lock:
            living = [run.living() for run in self._runs]
            arrays = {"entries": np.concatenate(living or [np.zeros(0, ENTRY)]), "counts": self._counts.copy()}
        files = {}
        for name, array in arrays.items():
            buffer = BytesIO()
            np.save(buffer, array, allow_pickle=False)
            # Named by content: the manifest below switches all files at once, and names each one's checksum.
            files[name] = f"{name}-{blake2b(buffer.getbuffer(), digest_size=16).hexdigest()}.npy"
            _write(folder / files[name], buffer.getvalue())
        _write(folder / "manifest.json", json.dumps({**self._format(), "files": files}, indent=1).encode())
        for path in folder.glob("*.npy"):
            if path.name not in files.values():
                path.unlink(missing_ok=True)

    @classmethod
    def load(cls, folder: str | Path, *, secret: bytes) -> AnchorIndex:
        """Read what `save` wrote.

        Raises:
            StoreError: there is none, or it is damaged, of another version or made with another secret. It can always
                be made again from the chunks' texts.
        """
        folder = Path(folder)
        index = cls(secret=secret)
        try:
            manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            files = manifest.pop("files")
            if manifest != index._format():
                raise ValueError("it has another format version or another secret")
            entries, counts = (_read(folder / files[name]) for name in ("entries", "counts"))
            if entries.dtype != ENTRY or counts.dtype != index._counts.dtype or counts.shape != index._counts.shape:
                raise ValueError("its arrays have another shape")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"The chunk index in {folder} cannot be used:", why=f"{error}.") from error
        index._counts = counts
        if len(entries):
            index._append(_Run.of(entries))
        return index

    def _format(self) -> dict[str, Any]:
        secret = blake2b(self._secret, digest_size=16, person=b"lazyrag-anchors").hexdigest()
        return {"version": FORMAT_VERSION, "window": WINDOW, "reach": REACH, "secret": secret}


@dataclass(frozen=True, slots=True)
class _Run:
    """Entries sorted by anchor. Only `alive` ever changes, from True to False.

    `keys` are the ids' first 8 bytes, sorted, `rows` the entries that they belong to. Chunks that agree in 64 bits of
    BLAKE2b count as one: the second is not indexed, which costs its reuse and nothing else.
    """

    entries: Entries
    anchors: U64
    keys: U64
    rows: I64
    alive: Bools

    @classmethod
    def of(cls, entries: Entries) -> _Run:
        entries = entries[np.argsort(entries["anchor"], kind="stable")]
        keys = _first_half(entries["id"])
        rows = np.argsort(keys)
        return cls(entries, np.ascontiguousarray(entries["anchor"]), keys[rows], rows, np.ones(len(entries), bool))

    def living(self) -> Entries:
        return self.entries[self.alive]

    def find(self, ids: npt.NDArray[np.uint8]) -> I64:
        """For each id its living entry's row, or -1."""
        keys = _first_half(ids)
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        rows = self.rows[place]
        return np.where((self.keys[place] == keys) & self.alive[rows], rows, -1)


class _Hits(NamedTuple):
    """Where the anchors of a run agree with a text's hashes.

    Attributes:
        hit, row: index into the hashes, and row of the run, of each pair.
        crowded: whether too many chunks share that anchor.
        cost: how many pairs there are with that anchor; where a repetition begins or ends, how many such pairs.
        left_out: indices into the hashes whose pairs were too many.
    """

    hit: I64
    row: I64
    crowded: Bools
    cost: I64
    left_out: I64


def _hits(runs: Sequence[_Run], hashes: U64, positions: I64) -> Iterator[_Hits]:
    """The hits of each run, at most `MAX_PROPOSALS` of all; those that cost most are left out.

    Args:
        runs: where to look.
        hashes: of the text's kept windows.
        positions: their places in the text.
    """
    first = [np.searchsorted(run.anchors, hashes, side="left") for run in runs]
    number = [np.searchsorted(run.anchors, hashes, side="right") - left for run, left in zip(runs, first, strict=True)]
    places = [np.flatnonzero(n) for n in number]
    pairs = np.concatenate([n[at] for n, at in zip(number, places, strict=True)])
    _, anchor, repeats = np.unique(
        np.concatenate([hashes[at] for at in places]), return_inverse=True, return_counts=True
    )
    # A chunk of dashes stands where a line of dashes begins, rather than anywhere in it: places that are as far from
    # the one before with the same anchor as from the next one come last.
    place = np.concatenate([positions[at] for at in places])
    by_anchor = np.argsort(anchor, kind="stable")
    distance = np.diff(place[by_anchor])
    distance[np.diff(anchor[by_anchor]) != 0] = 0
    begins = np.zeros(len(place), bool)
    begins[by_anchor] = np.append(0, distance) != np.append(distance, 0)
    costs = pairs * np.where(begins, np.bincount(anchor[begins], minlength=len(repeats))[anchor], repeats[anchor])
    cheapest = np.argsort(costs, kind="stable")
    fits = np.zeros(len(pairs), bool)
    fits[cheapest] = np.cumsum(pairs[cheapest]) <= MAX_PROPOSALS
    done = 0
    for run, left, n, at in zip(runs, first, number, places, strict=True):
        fit, cost = fits[done : done + len(at)], costs[done : done + len(at)]
        done += len(at)
        kept = at[fit]
        hit = np.repeat(kept, n[kept])
        # Counts up inside each group of equal `hit`.
        within = np.arange(len(hit)) - np.repeat(np.cumsum(n[kept]) - n[kept], n[kept])
        row = left[hit] + within
        living = run.alive[row]
        yield _Hits(
            hit[living],
            row[living],
            n[hit][living] > MAX_SHARED,
            np.repeat(cost[fit], n[kept])[living],
            at[~fit],
        )


def _chosen(
    starts: I64, ends: I64, wholes: Bools, ids: npt.NDArray[np.uint8], order: I64, *, num_chars: int
) -> list[int]:
    """Which proposals to make, within the limits of this module; `order` is by worth, and by place for each chunk."""
    chars_left, cut_left = MAX_CHARS, MAX_CUT
    whole_left = MAX_WHOLE + num_chars // WINDOW
    max_places = MAX_PLACES if len(order) > MAX_WHOLE else len(order)
    places: dict[tuple[int, bool], tuple[int, int]] = {}
    kept: list[int] = []
    columns = (starts, ends, wholes, _first_half(ids))
    for i, start, end, whole, chunk in zip(order.tolist(), *(c[order].tolist() for c in columns), strict=True):
        number, free_from = places.get((chunk, whole), (0, 0))
        if (number >= max_places and start < free_from) or end - start > chars_left:
            continue
        if whole_left == 0 if whole else cut_left == 0:
            continue
        places[chunk, whole] = number + 1, end
        whole_left -= whole
        cut_left -= not whole
        chars_left -= end - start
        kept.append(i)
    return kept


_NO_RANGES = np.zeros(0, np.int64), np.zeros(0, np.int64)


def _union(start: I64, end: I64) -> list[tuple[int, int]]:
    """The union of ranges, as disjoint ones, ascending."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    apart = np.flatnonzero(start[1:] > end[:-1])
    first, last = np.append(0, apart + 1)[: len(start)], np.append(apart, len(end) - 1)[: len(end)]
    return list(zip(start[first].tolist(), end[last].tolist(), strict=True))


class _Filter:
    """Says of most hashes that no anchor equals them, at one look into memory each."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._bits = max(10, (16 * capacity).bit_length())
        self._slots = np.zeros(1 << self._bits, bool)

    def add(self, hashes: U64) -> None:
        self._slots[_top_bits(hashes, self._bits)] = True

    def may_hold(self, hashes: U64) -> Bools:
        return self._slots[_top_bits(hashes, self._bits)]


class _Hashes:
    """The polynomial hash of the module docstring."""

    def __init__(self, secret: bytes) -> None:
        drawn = np.frombuffer(blake2b(secret, digest_size=32).digest(), "<u8")
        self._base, self._factor, self._again = (int(number) | 1 for number in drawn[:3])
        self._summand = drawn[3]
        self._powers = (np.ones(1, np.uint64), np.ones(1, np.uint64))

    def prefix_sums(self, text: str) -> U64:
        """P, [len(text) + 1]."""
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
        codes += self._summand
        codes *= np.uint64(self._factor)
        codes ^= codes >> np.uint64(29)
        codes *= np.uint64(self._again)
        powers, _ = self._powers_up_to(len(codes))
        codes *= powers[: len(codes)]
        sums = np.zeros(len(codes) + 1, np.uint64)
        np.cumsum(codes, out=sums[1:])
        return sums

    def windows(self, sums: U64) -> U64:
        """h(i) for each i, [len(text) - WINDOW + 1]."""
        _, inverse = self._powers_up_to(len(sums))
        hashes = sums[WINDOW:] - sums[:-WINDOW]
        hashes *= inverse[: len(hashes)]
        return hashes

    def spans(self, sums: U64, start: I64, end: I64) -> U64:
        """The hash of each text[start:end]."""
        _, inverse = self._powers_up_to(len(sums))
        hashes: U64 = (sums[end] - sums[start]) * inverse[start]
        return hashes

    def _powers_up_to(self, length: int) -> tuple[U64, U64]:
        """B^j and B^-j for j in [0, length); replaced whole when they grow, so threads need no lock."""
        powers = self._powers
        if len(powers[0]) < length:
            grown = 1 << length.bit_length()
            powers = (_geometric(self._base, grown), _geometric(pow(self._base, -1, 1 << 64), grown))
            self._powers = powers
        return powers


def _geometric(base: int, length: int) -> U64:
    out = np.full(length, base, np.uint64)
    out[0] = 1
    return np.cumprod(out)


def _minimizers(windows: U64, owner: npt.NDArray[np.int32] | None = None) -> I64:
    """The kept windows' positions, ascending; `owner` names the text that each character of a batch belongs to."""
    low = np.uint64((1 << 32) - 1)
    # Hash above, position below: the minimum of a group carries its place, the leftmost one of equal hashes.
    smallest = (windows & ~low) | np.arange(len(windows), dtype=np.uint64)
    step = 1
    while step < REACH:
        smallest = np.minimum(smallest[:-step], smallest[step:])
        step *= 2
    if owner is not None:
        smallest = smallest[owner[: len(smallest)] == owner[MIN_CHARS - 1 :]]
    at: I64 = (smallest & low).astype(np.int64)
    kept: I64 = at[np.diff(at, prepend=-1) != 0]
    return kept


def _top_bits(hashes: U64, bits: int) -> I64:
    """A number of `bits` bits, evenly spread although kept hashes are the small ones (Fibonacci hashing)."""
    return ((hashes * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - bits)).astype(np.int64)


def _first_half(ids: npt.NDArray[np.uint8]) -> U64:
    return np.ascontiguousarray(ids[:, :8]).view("<u8").reshape(-1)


def _to_bytes(chunk_ids: Iterable[ChunkId]) -> npt.NDArray[np.uint8]:
    """[N, 16]."""
    try:
        return np.frombuffer(b"".join(map(bytes.fromhex, chunk_ids)), np.uint8).reshape(-1, 16)
    except ValueError as error:
        raise InputError("A chunk id is not 32 hexadecimal digits.", fix="Use lazyrag.types.chunk_id.") from error


def _batches(items: Iterable[tuple[ChunkId, str]]) -> Iterator[list[tuple[ChunkId, str]]]:
    batch: list[tuple[ChunkId, str]] = []
    size = 0
    for item in items:
        batch.append(item)
        size += len(item[1])
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _read(path: Path) -> npt.NDArray[Any]:
    content = path.read_bytes()
    if blake2b(content, digest_size=16).hexdigest() != path.stem.rpartition("-")[2]:
        raise ValueError(f"{path.name} is damaged")
    array: npt.NDArray[Any] = np.load(BytesIO(content), allow_pickle=False)
    return array
