"""Which registered chunks may occur in a text: an index of hashes; a millisecond for 100k characters.

Texts are looked at as UTF-8, so that a chunk is the same bytes in whatever it stands; a window is `WINDOW` bytes.

1.  Sampling: of every `REACH` windows in a row, the one with the smallest key is kept (a minimizer; if several are
    equal, all of them). The key of the window at i is one byte, of which a processor compares dozens at once:

        key(i) = b[i] * c0 + b[i + 1] * c1 + b[i + 2] * c2  mod 2^8

    Which windows of a chunk are kept does not depend on what stands around it, a text of `MIN_CHARS` or more keeps at
    least one, and from the first to the last of them no byte is left out.
2.  Only kept windows, a twelfth of all, are hashed, to 32 bits. What keys and hashes multiply with is drawn from a
    secret, so that nobody knows which texts have small or equal ones.
3.  Each chunk is filed under one kept window, its anchor: the first among its rarest ones. Rarest, so that a header
    that every chunk shares is nobody's anchor; first, so that a chunk cut at its end is found, too.
4.  A kept window of the prompt that is an anchor proposes the chunk if the chunk's first window stands where it has to:
    as a whole if the last one does, too, else as possibly cut.

Proposals are not proofs: the segmenter verifies them. At a million chunks about two windows of 100k characters equal an
anchor's hash by chance, which then fails at the chunk's first window. Chunks below `MIN_CHARS` are not indexed.

Chunks lie in a few immutable runs, each in one piece of memory, which is a mapped file once it was saved: processes
share it, and a later save writes only what is new. With 1,000,000 chunks all of it takes 46 MB.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import combinations, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from lazyrag.errors import InputError, StoreError
from lazyrag.types import ChunkId, canonical

WINDOW = 24
"""Bytes; a multiple of 8."""
REACH = 24
MIN_CHARS = WINDOW + REACH - 1
KEY_BYTES = 3
"""Bytes of a window that its key is made of."""

FORMAT_VERSION = 3
BATCH_CHARS = 1 << 20
PART = 1 << 16
"""Ids that are compared at once."""
COUNT_BITS = 22
"""Windows are counted in this many buckets (as a power of two): enough to tell boilerplate from text."""
MAX_MEAN = 32
"""Counts are halved when a bucket holds more than this on average: 255 fit, and only what sticks out matters."""
GROWTH = 8
"""Searching takes time in proportion to the runs, merging to how often a chunk moves into a larger one. A run has at
least so many times the chunks of the next one while chunks are added,"""
SETTLED = 32
"""and so many when they have been: of a million, two or three runs are left."""
MANIFEST = "manifest.json"
LOCK = "lock"
"""Held by whoever saves into the folder."""
FEW = 1024
"""So many proposals are made without a look at what they cost."""
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
MAX_BYTES = 1 << 23
"""Bytes of all proposed chunks together, which the caller is going to compare."""

U64: TypeAlias = npt.NDArray[np.uint64]
U32: TypeAlias = npt.NDArray[np.uint32]
U8: TypeAlias = npt.NDArray[np.uint8]
I64: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
T = TypeVar("T", bound=np.generic)

EDGES, OFFSET, LENGTH = range(3)
"""Columns of an entry, which is a chunk: hashes of its first and last window (`_Hashes.edges`), the anchor's place in
it, its length; both in bytes."""
FIRST = np.uint32(0xFFFF)
"""The bits of `EDGES` that are the first window's."""


class Candidates(NamedTuple):
    """Proposals of `AnchorIndex.candidates`, one a row.

    Attributes:
        start: where the chunk would start, in characters.
        end: where it would end; for a chunk that is cut, where it would end if it were not, or the text's end.
        whole: whether its last window agreed; if not, only the anchor and its first one did.
        chunk_ids: the chunk.
        unproposed: what else may be a chunk's text, where there was too much to look at: ranges, disjoint, ascending.
        utf_8: the text.
        first, last: `start` and `end` in it, in bytes.
    """

    start: I64
    end: I64
    whole: Bools
    chunk_ids: list[ChunkId]
    unproposed: list[tuple[int, int]]
    utf_8: bytes
    first: I64
    last: I64


class AnchorIndex:
    """The index. Any number of threads may read (`candidates`) while one changes it.

    Args:
        secret: keys the hashes; a saved index can only be loaded with the same one. None draws one.
    """

    def __init__(self, *, secret: bytes | None = None) -> None:
        self._secret = secret if secret is not None else secrets.token_bytes(32)
        self._hashes = _Hashes(self._secret)
        self._counts = np.zeros(1 << COUNT_BITS, np.uint8)
        self._num_counted = 0
        self._runs: tuple[_Run, ...] = ()
        self._filter = _Filter(0)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(run.num_living for run in self._runs)

    @property
    def num_bytes(self) -> int:
        """What all of it takes, mapped files included."""
        runs = sum(run.num_bytes for run in self._runs)
        return runs + self._counts.nbytes + self._filter.num_bytes

    def compare(self, chunk_ids: Iterable[ChunkId]) -> tuple[list[ChunkId], list[ChunkId]]:
        """Which of these chunks are not indexed, and which others are. The ids are read once, a part at a time."""
        runs, lacking = self._runs, []
        parts = [np.zeros((2, 0), np.uint64)]
        ids = iter(chunk_ids)
        while part := list(islice(ids, PART)):
            some = _halves(part)
            indexed = np.any([run.find(some) >= 0 for run in runs], axis=0) if runs else np.zeros(len(part), bool)
            lacking += [part[i] for i in np.flatnonzero(~indexed)]
            parts.append(some)
        given = np.concatenate(parts, axis=1)
        given = given[:, np.argsort(given[0])]
        others = []
        for run in runs:
            others += _ids(run.halves[:, run.alive & (_places(given, run.halves) < 0)])
        return lacking, others

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
                ids = list(texts)
                halves = _halves(ids)
                for run in self._runs:
                    for found in np.flatnonzero(run.find(halves) >= 0):
                        texts.pop(ids[found], None)
                if texts:
                    self._append(self._run_of(texts))
            self._runs = tuple(_stacked(self._runs, SETTLED))
        return unindexable

    def remove(self, chunk_ids: Iterable[ChunkId]) -> None:
        """Forget chunks; unknown ids are passed over."""
        halves = _halves(chunk_ids)
        with self._lock:
            for run in self._runs:
                rows = run.find(halves)
                run.alive[rows[rows >= 0]] = False
            if any(2 * run.num_living < len(run.alive) for run in self._runs):
                self._runs = tuple(_stacked((run.living() for run in self._runs if run.num_living), SETTLED))

    def _run_of(self, texts: Mapping[ChunkId, str]) -> _Run:
        encoded = [_utf_8(text) for text in texts.values()]
        lengths = np.array([len(text) for text in encoded], np.int64)
        ends = np.cumsum(lengths)
        starts = ends - lengths
        data = np.frombuffer(b"".join(encoded), np.uint8)
        at = _minimizers(self._hashes.keys(data), borders=ends[:-1])
        owner = np.searchsorted(ends, at, side="right")
        inside = at + WINDOW <= ends[owner]
        at, owner = at[inside], owner[inside]
        hashes = self._hashes.windows(data, at)

        rarity = self._count(hashes >> np.uint32(32 - COUNT_BITS))
        order = np.lexsort((at, rarity, owner))
        chosen = order[np.searchsorted(owner[order], np.arange(len(texts)))]

        entries = np.empty((len(texts), 3), np.uint32)
        entries[:, EDGES] = self._hashes.edges(data, starts, ends)
        entries[:, OFFSET] = at[chosen] - starts
        entries[:, LENGTH] = lengths
        return _Run.of(_halves(texts), entries, hashes[chosen], np.arange(len(texts)))

    def _count(self, buckets: U32) -> npt.NDArray[np.int32]:
        """Count windows; for each, how common windows of its bucket are.

        0 stands for no more than what any window shares its bucket with; from there on, classes are powers of two.
        """
        counts = self._counts
        if self._num_counted > MAX_MEAN * len(counts):
            counts //= 2
            self._num_counted //= 2
        self._num_counted += len(buckets)
        distinct, number = np.unique(buckets, return_counts=True)
        counts[distinct] = np.minimum(counts[distinct] + number, 255)
        above = counts[buckets] - 1 - 2 * (self._num_counted / len(counts))
        exponents: npt.NDArray[np.int32] = np.frexp(np.maximum(above, 0))[1]
        return exponents

    def _append(self, run: _Run) -> None:
        runs = _stacked([*self._runs, run], GROWTH)
        total = sum(len(run.alive) for run in runs)
        if total > self._filter.capacity:
            grown = _Filter(total)
            for old in runs:
                grown.add(old.anchors)
            self._filter = grown
        else:
            self._filter.add(run.anchors)
        self._runs = tuple(runs)

    # ---------------------------------------------------------------- finding

    def candidates(self, text: str) -> Candidates:
        """What may occur in a text, in the order of the starts.

        Time is linear in the text's length. Of a chunk that matches at very many places, for the text repeats itself,
        those are proposed that are disjoint.
        """
        runs, filter = self._runs, self._filter
        if not runs or len(text) < MIN_CHARS:
            return _NOTHING
        utf_8 = _utf_8(text)
        data = np.frombuffer(utf_8, np.uint8)
        at = _minimizers(self._hashes.keys(data))
        hashes = self._hashes.windows(data, at)
        passed = np.flatnonzero(filter.may_hold(hashes))
        passed = passed[np.argsort(hashes[passed])]  # neighbours in memory are searched one after the other
        hits = _hits(runs, hashes[passed], at[passed], len(data))
        start = hits.place - hits.entries[:, OFFSET]
        end = start + hits.entries[:, LENGTH]
        differs = self._hashes.edges(data, np.maximum(start, 0), np.minimum(end, len(data))) ^ hits.entries[:, EDGES]
        begins = (start >= 0) & (differs & FIRST == 0)
        whole = begins & (differs == 0) & (end <= len(data))
        proposed = np.flatnonzero(begins & (whole | ~hits.crowded))
        proposed = proposed[np.argsort(start[proposed], kind="stable")]
        start, end, whole, halves = start[proposed], end[proposed], whole[proposed], hits.halves[:, proposed]
        unproposed = hits.left_out
        if len(start) > min(MAX_CUT, MAX_WHOLE) or int((end - start).sum()) > MAX_BYTES:
            order = np.lexsort((start - end, ~whole, hits.cost[proposed]))  # of equal cost, the longest first
            kept = sorted(_chosen(start, end, whole, halves[0], order, num_bytes=len(data)))
            passed_over = np.ones(len(start), bool)
            passed_over[kept] = False
            unproposed.append((start[passed_over], end[passed_over]))
            start, end, whole, halves = start[kept], end[kept], whole[kept], halves[:, kept]
        end = np.minimum(end, len(data))
        ranges = _union([_in_characters(text, data, *some) for some in unproposed])
        return Candidates(*_in_characters(text, data, start, end), whole, _ids(halves), ranges, utf_8, start, end)

    # ---------------------------------------------------------------- files

    def save(self, folder: str | Path) -> None:
        """Write the index into a folder. At any moment the folder holds the old index or the new one, whole.

        Of several that are saved into one folder at once, by any processes, each waits for the one before; the last
        one stays.

        Raises:
            OSError: the folder cannot be written. It holds what it did.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with _alone_in(folder):
            for path in folder.glob("*.tmp"):  # of a save that died
                path.unlink(missing_ok=True)
            with self._lock:
                for run in self._runs:
                    if not run.name or not (folder / run.name).exists():
                        run.name = _save(folder, "run", run.data)
                alive = np.concatenate([run.alive for run in self._runs] or [np.zeros(0, bool)])
                files = {
                    "runs": [run.name for run in self._runs],
                    "alive": _save(folder, "alive", np.packbits(alive)),
                    "counts": _save(folder, "counts", self._counts),
                }
                self._runs = tuple(run.mapped(folder) for run in self._runs)
            _write(folder / MANIFEST, json.dumps({**self._format(), "files": files}, indent=1).encode())
            kept = {*files["runs"], files["alive"], files["counts"]}
            for path in folder.glob("*.bin"):
                if path.name not in kept:
                    path.unlink(missing_ok=True)

    @classmethod
    def load(cls, folder: str | Path, *, secret: bytes) -> AnchorIndex:
        """Read what `save` wrote, also while another one is saved.

        Raises:
            StoreError: there is none, or it is damaged, of another version or made with another secret. It can always
                be made again from the chunks' texts.
        """
        folder = Path(folder)
        index = cls(secret=secret)
        try:
            manifest = (folder / MANIFEST).read_bytes()
            while True:
                try:
                    index._read(folder, manifest)
                    return index
                except FileNotFoundError:
                    before, manifest = manifest, (folder / MANIFEST).read_bytes()
                    if manifest == before:
                        raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(f"The chunk index in {folder} cannot be used:", why=f"{error}.") from error

    def _read(self, folder: Path, manifest: bytes) -> None:
        content = json.loads(manifest)
        files = content.pop("files")
        if content != self._format():
            raise ValueError("it has another format version or another secret")
        data = [_map(folder / name) for name in files["runs"]]
        alive, counts = (_map(folder / files[name]) for name in ("alive", "counts"))
        sizes = [len(array) // _Run.BYTES for array in data]
        if len(counts) != len(self._counts) or len(alive) != (sum(sizes) + 7) // 8:
            raise ValueError("its arrays have another shape")
        self._counts = counts.copy()
        self._num_counted = int(counts.sum(dtype=np.int64))
        living = np.split(np.unpackbits(alive).astype(bool)[: sum(sizes)], np.cumsum(sizes)[:-1])
        self._runs = tuple(map(_Run, data, living, files["runs"]))
        self._filter = _Filter(sum(sizes))
        for run in self._runs:
            self._filter.add(run.anchors)

    def _format(self) -> dict[str, Any]:
        secret = blake2b(self._secret, digest_size=16, person=b"lazyrag-anchors").hexdigest()
        return {"version": FORMAT_VERSION, "window": WINDOW, "reach": REACH, "secret": secret}


class _Run:
    """Chunks, by their ids and by their anchors, in one piece of memory. Only `alive` changes, from True to False.

    `halves` are the ids' first and last 8 bytes, [2, n], in the order of the first; `entries` and `alive` are what
    belongs to each. `anchors` are the hashes of the anchors, ascending, `rows` the entries that they belong to.

    Args:
        data: [n * BYTES], the arrays one after the other.
        alive: [n].
        name: of the file that holds `data`; empty if none does.
    """

    BYTES = 16 + 12 + 4 + 4

    def __init__(self, data: U8, alive: Bools, name: str = "") -> None:
        n = len(alive)
        self.data, self.alive, self.name = data, alive, name
        halves, entries, anchors, rows = np.split(data, np.cumsum([16 * n, 12 * n, 4 * n]))
        self.halves: U64 = halves.view("<u8").reshape(2, n)
        self.entries: U32 = entries.view("<u4").reshape(n, 3)
        self.anchors: U32 = anchors.view("<u4")
        self.rows: U32 = rows.view("<u4")

    @classmethod
    def of(cls, halves: U64, entries: U32, anchors: U32, owners: I64) -> _Run:
        """Of chunks in any order, and their anchors in any order.

        Args:
            halves: of each chunk.
            entries: of each chunk.
            anchors: one of each chunk.
            owners: whose each of `anchors` is, as an index into `entries`.
        """
        # Stable sorts merge what consists of sorted pieces, in a twentieth of the time.
        by_id, by_anchor = np.argsort(halves[0], kind="stable"), np.argsort(anchors, kind="stable")
        rows = np.empty(len(by_id), "<u4")
        rows[by_id] = np.arange(len(by_id))
        columns = (halves[:, by_id], entries[by_id], anchors[by_anchor], rows[owners[by_anchor]])
        return cls(np.concatenate([column.ravel().view(np.uint8) for column in columns]), np.ones(len(rows), bool))

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + self.alive.nbytes

    @property
    def num_living(self) -> int:
        return int(np.count_nonzero(self.alive))

    def living(self, more: Sequence[_Run] = ()) -> _Run:
        """What lives of it and of others."""
        columns, before = [], 0
        for run in (self, *more):
            lives = run.alive[run.rows]
            number = np.cumsum(run.alive) - 1 + before
            owners = number[run.rows[lives]]
            columns.append((run.halves[:, run.alive].T, run.entries[run.alive], run.anchors[lives], owners))
            before += len(owners)
        halves, entries, anchors, owners = map(_joined, zip(*columns, strict=True))
        return _Run.of(halves.T, entries, anchors, owners)

    def mapped(self, folder: Path) -> _Run:
        """The same, read from the file that it was saved in."""
        return _Run(np.memmap(folder / self.name, np.uint8, "r").view(np.ndarray), self.alive, self.name)

    def find(self, ids: U64) -> I64:
        """For each id (`_halves`) its living entry's row, or -1."""
        row = _places(self.halves, ids)
        return np.where(self.alive[row], row, -1)

    def find_anchors(self, hashes: U32) -> tuple[I64, I64, I64]:
        """Which of the hashes are anchors: indices into `hashes`; the first place in `rows`, and how many, of each."""
        first = np.searchsorted(self.anchors, hashes)
        found = np.flatnonzero(self.anchors.take(first, mode="clip") == hashes)
        first = first[found]
        return found, first, np.searchsorted(self.anchors, hashes[found], side="right") - first


def _stacked(runs: Iterable[_Run], growth: int) -> list[_Run]:
    """The same chunks in few runs: each has at least `growth` times the entries of the next one."""
    stack: list[_Run] = []
    for run in runs:
        smaller = []
        size = len(run.alive)
        while stack and len(stack[-1].alive) < growth * size:
            smaller.append(stack.pop())
            size += len(smaller[-1].alive)
        stack.append(run.living(smaller) if smaller else run)
    return stack


class _Hits(NamedTuple):
    """Where the anchors of runs agree with a text's hashes.

    Attributes:
        place: of the anchor in the text.
        halves, entries: the chunk's.
        crowded: whether too many living chunks of its run share that anchor.
        cost: how many pairs there are with that anchor; where a repetition begins or ends, how many such pairs. All 0
            if there are few in all.
        left_out: starts and ends of ranges of the text that may be chunks, whose pairs were too many.
    """

    place: I64
    halves: U64
    entries: U32
    crowded: Bools
    cost: I64
    left_out: list[tuple[I64, I64]]


def _hits(runs: Sequence[_Run], hashes: U32, positions: I64, num_bytes: int) -> _Hits:
    """The hits of all runs, at most `MAX_PROPOSALS`; those that cost most are left out.

    Args:
        runs: where to look.
        hashes: of the text's kept windows.
        positions: their places in the text.
        num_bytes: the text's length.
    """
    groups = [(run, *run.find_anchors(hashes)) for run in runs]
    groups = [group for group in groups if len(group[1])] or groups[:1]
    found, first, number = map(_joined, list(zip(*groups, strict=True))[1:])
    costs, left_out = np.zeros(len(found), np.int64), []
    if int(number.sum()) > min(FEW, MAX_PROPOSALS):
        costs = _costs(number, hashes[found], positions[found])
        cheapest = np.argsort(costs, kind="stable")
        fits = np.zeros(len(found), bool)
        fits[cheapest] = np.cumsum(number[cheapest]) <= MAX_PROPOSALS
        longest = max(int(run.entries[:, LENGTH].max()) for run in runs)
        place = positions[found[~fits]]
        left_out = [(np.maximum(place - longest, 0), np.minimum(place + longest, num_bytes))]
        number = np.where(fits, number, 0)
    pair = np.repeat(np.arange(len(found)), number)
    # Counts up inside each group of equal `pair`.
    place = np.arange(len(pair)) + (first + number - np.cumsum(number))[pair]
    columns, searched, begin = [], 0, 0
    for run, found_in_it, *_ in groups:
        its = number[searched : searched + len(found_in_it)]
        row = run.rows[place[begin : begin + int(its.sum())]]
        columns.append((run.alive[row], run.halves.take(row, axis=1).T, run.entries.take(row, axis=0)))
        searched, begin = searched + len(its), begin + len(row)
    living, halves, entries = map(_joined, zip(*columns, strict=True))
    if not living.all():
        pair, halves, entries = pair[living], halves[living], entries[living]
        number = np.bincount(pair, minlength=len(number))
    return _Hits(positions[found[pair]], halves.T, entries, number[pair] > MAX_SHARED, costs[pair], left_out)


def _joined(parts: Sequence[npt.NDArray[T]]) -> npt.NDArray[T]:
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _costs(pairs: I64, anchors: U32, positions: I64) -> I64:
    """See `_Hits.cost`; of each place where `pairs` chunks have that anchor."""
    _, anchor, repeats = np.unique(anchors, return_inverse=True, return_counts=True)
    # A chunk of dashes stands where a line of dashes begins, rather than anywhere in it: places that are as far from
    # the one before with the same anchor as from the next one come last.
    by_anchor = np.argsort(anchor, kind="stable")
    distance = np.diff(positions[by_anchor])
    distance[np.diff(anchor[by_anchor]) != 0] = 0
    begins = np.zeros(len(positions), bool)
    begins[by_anchor] = np.append(0, distance) != np.append(distance, 0)
    costs: I64 = pairs * np.where(begins, np.bincount(anchor[begins], minlength=len(repeats))[anchor], repeats[anchor])
    return costs


def _chosen(starts: I64, ends: I64, wholes: Bools, heads: U64, order: I64, *, num_bytes: int) -> list[int]:
    """Which proposals to make, within the limits of this module; `order` is by worth, and by place for each chunk."""
    bytes_left, cut_left = MAX_BYTES, MAX_CUT
    whole_left = MAX_WHOLE + num_bytes // WINDOW
    max_places = MAX_PLACES if len(order) > MAX_WHOLE else len(order)
    places: dict[tuple[int, bool], tuple[int, int]] = {}
    kept: list[int] = []
    columns = (starts, ends, wholes, heads)
    for i, start, end, whole, chunk in zip(order.tolist(), *(c[order].tolist() for c in columns), strict=True):
        number, free_from = places.get((chunk, whole), (0, 0))
        if (number >= max_places and start < free_from) or end - start > bytes_left:
            continue
        if whole_left == 0 if whole else cut_left == 0:
            continue
        places[chunk, whole] = number + 1, end
        whole_left -= whole
        cut_left -= not whole
        bytes_left -= end - start
        kept.append(i)
    return kept


_NO_PLACES = np.zeros(0, np.int64)
_NOTHING = Candidates(_NO_PLACES, _NO_PLACES, np.zeros(0, bool), [], [], b"", _NO_PLACES, _NO_PLACES)


def _union(ranges: Sequence[tuple[I64, I64]]) -> list[tuple[int, int]]:
    """The union of ranges, given as starts and ends, as disjoint ones, ascending."""
    if not ranges:
        return []
    start, end = (np.concatenate(column) for column in zip(*ranges, strict=True))
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    apart = np.flatnonzero(start[1:] > end[:-1])
    first, last = np.append(0, apart + 1)[: len(start)], np.append(apart, len(end) - 1)[: len(end)]
    return list(zip(start[first].tolist(), end[last].tolist(), strict=True))


class _Filter:
    """Says of nearly all hashes that no anchor equals them, at one look into memory each.

    Three bits of one word stand for an anchor (a blocked Bloom filter); at least a word for each of them.
    """

    _BITS: U32 = np.array([1 << i | 1 << j | 1 << k for i, j, k in combinations(range(32), 3)], np.uint32)[:4096]

    def __init__(self, capacity: int) -> None:
        self._bits = max(5, (capacity - 1).bit_length())
        self._words = np.zeros(1 << self._bits, np.uint32)

    @property
    def capacity(self) -> int:
        return len(self._words)

    @property
    def num_bytes(self) -> int:
        return self._words.nbytes

    def add(self, hashes: U32) -> None:
        word, bits = self._places(hashes)
        np.bitwise_or.at(self._words, word, bits)

    def may_hold(self, hashes: U32) -> Bools:
        word, bits = self._places(hashes)
        held: U32 = self._words.take(word, mode="clip")  # no bounds are exceeded, and to clip is quicker than to check
        held &= bits
        return np.equal(held, bits)

    def _places(self, hashes: U32) -> tuple[U32, U32]:
        return hashes >> np.uint32(32 - self._bits), self._BITS.take(hashes & 4095, mode="clip")


class _Hashes:
    """What windows are kept by, and what they are told apart by (module docstring)."""

    _WINDOW = np.dtype(f"V{WINDOW}")

    def __init__(self, secret: bytes) -> None:
        drawn = blake2b(secret, digest_size=8 + KEY_BYTES).digest()
        self._factor = np.uint64(int.from_bytes(drawn[:8], "little") | 1)
        self._key_factors = np.frombuffer(drawn[8:], np.uint8) | 1

    def keys(self, data: U8) -> U8:
        """Of each window, [len(data) - WINDOW + 1]."""
        num_windows = len(data) - WINDOW + 1
        keys: U8 = data[:num_windows] * self._key_factors[0]
        for i in range(1, KEY_BYTES):
            keys += data[i : i + num_windows] * self._key_factors[i]
        return keys

    def windows(self, data: U8, at: I64) -> U32:
        """The hashes of the windows at these places."""
        everywhere = np.ndarray(len(data) - WINDOW + 1, self._WINDOW, data, strides=(1,))
        words = everywhere[at].view("<u8").reshape(-1, WINDOW // 8)
        mixed = words[:, 0] * self._factor
        for i in range(1, WINDOW // 8):
            mixed ^= mixed >> 32
            mixed += words[:, i]
            mixed *= self._factor
        return (mixed >> 32).astype(np.uint32)

    def edges(self, data: U8, start: I64, end: I64) -> U32:
        """Of each data[start:end] half of the hash of its first window (`FIRST`) and half of the last one's."""
        first, last = self.windows(data, np.concatenate([start, end - WINDOW])).reshape(2, -1)
        return (last & ~FIRST) | (first & FIRST)


def _minimizers(keys: U8, borders: I64 | None = None) -> I64:
    """The kept windows' positions, ascending.

    Args:
        keys: of all windows, at least `REACH`.
        borders: where the texts of a batch meet; no window is kept for a run of windows that crosses one.
    """
    # The smallest of the `REACH` keys from each one on; then, for each window, the largest of those smallest ones that
    # it takes part in: if that is the window's own, it is somewhere the smallest.
    smallest = _over_reach(np.minimum, keys)
    if borders is not None:
        smallest[(borders[:, None] - np.arange(1, MIN_CHARS)).ravel()] = 0
    around = np.zeros(len(smallest) + 2 * (REACH - 1), np.uint8)
    around[REACH - 1 : len(around) - REACH + 1] = smallest
    # Where less than a tenth is True, numpy looks for one after the other, which takes twice as long as to go through
    # all: so some are put behind.
    more = len(keys) // REACH
    kept = np.empty(len(keys) + more, bool)
    kept[len(keys) :] = True
    np.equal(_over_reach(np.maximum, around), keys, out=kept[: len(keys)])
    places = np.flatnonzero(kept)
    return places[: len(places) - more]


def _over_reach(of: np.ufunc, values: U8) -> U8:
    """The smallest or largest of `REACH` values in a row, from each one on."""
    values, reached = of(values[:-1], values[1:]), 2
    spare = np.empty_like(values)
    while reached < REACH:
        step = min(reached, REACH - reached)
        values, spare = of(values[:-step], values[step:], out=spare[: len(values) - step]), values
        reached += step
    return values


def _utf_8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _in_characters(text: str, data: U8, start: I64, end: I64) -> tuple[I64, I64]:
    """Ranges of a text's UTF-8, which may go beyond its end, as ranges of its characters."""
    if len(text) == len(data):
        return start, np.minimum(end, len(data))
    begins = np.flatnonzero(data & 0xC0 != 0x80)  # of characters: all other bytes are 10xxxxxx
    return np.searchsorted(begins, start), np.searchsorted(begins, end)


def _halves(chunk_ids: Iterable[ChunkId]) -> U64:
    """Ids as numbers, [2, N]."""
    try:
        return np.frombuffer(b"".join(map(bytes.fromhex, chunk_ids)), "<u8").reshape(-1, 2).T
    except ValueError as error:
        raise InputError("A chunk id is not 32 hexadecimal digits.", fix="Use lazyrag.types.chunk_id.") from error


def _places(halves: U64, ids: U64) -> I64:
    """For each of `ids` its place in `halves`, which ascend in the first half, or -1; both as `_halves` has them."""
    place = np.searchsorted(halves[0], ids[0])
    found = np.full(len(place), -1)
    asked = np.arange(len(place))
    while True:
        asked = asked[place[asked] < halves.shape[1]]
        asked = asked[halves[0, place[asked]] == ids[0, asked]]
        if not len(asked):
            return found
        agree = halves[1, place[asked]] == ids[1, asked]
        found[asked[agree]] = place[asked[agree]]
        # Ids that agree in the first half stand side by side. There are two if somebody has made them, hardly more.
        asked = asked[~agree]
        place[asked] += 1


def _ids(halves: U64) -> list[ChunkId]:
    """The reverse of `_halves`."""
    digits = halves.T.tobytes().hex()
    return [digits[start : start + 32] for start in range(0, len(digits), 32)]


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


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until nobody else saves into a folder, and keep it so."""
    with (folder / LOCK).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough where a child process has inherited the file


def _save(folder: Path, kind: str, content: U8) -> str:
    """Write a file that is named by its content, so that the manifest switches all at once; its name."""
    name = f"{kind}-{_digest(content)}.bin"
    _write(folder / name, content.data)
    return name


def _write(path: Path, content: bytes | memoryview) -> None:
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    with temporary.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _map(path: Path) -> U8:
    """A file that `_save` wrote."""
    content = np.memmap(path, np.uint8, "r").view(np.ndarray) if path.stat().st_size else np.zeros(0, np.uint8)
    if _digest(content) != path.stem.rpartition("-")[2]:
        raise ValueError(f"{path.name} is damaged")
    return content


def _digest(content: U8) -> str:
    return blake2b(content.data, digest_size=16).hexdigest()
