"""What was ingested: documents, chunks, the places of chunks in documents, vectors. One SQLite file, the truth.

    document --< span >-- chunk --- vector
                            |
                            +----< warmed (fingerprint of the engine whose KV tier holds the chunk)
    doomed (tokens of chunks that went, until somebody has removed their KV files)

A chunk row is a text; a span is a place where it stands. A chunk lives as long as a span points to it. Everything
belongs to a namespace; the same text in two namespaces is two chunks that know nothing of each other.

Whatever else is kept on disk (the vector file, the anchor file, chunk KV) is a cache that can be made again from here.
`generation` says whether such a cache stands for what is here now.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lazyrag.errors import InputError, MissingStoreError, QuotaError, StoreError
from lazyrag.retrievers.migrations import is_empty, migrate
from lazyrag.types import (
    CONTENT,
    DOCUMENT,
    EMPTY,
    Chunk,
    ChunkId,
    Document,
    EncodedChunk,
    Metadata,
    Quota,
    chunk_id,
)

FILE_NAME = "store.sqlite3"
_BEING_MADE_S = 1.0  # how long a file may be empty while another process makes a store of it
_PAGE = 1024  # rows read at once by an iterator; no lock is held between two pages
NO_QUOTA = Quota()


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document as the store knows it, without its text.

    Attributes:
        sha256: of what it was made from, as given to `put_document`; with `recipe` it says whether work is to be done.
        recipe: how it was split and embedded.
        mtime: of its file at that time, seconds since the epoch.
        pinned: whether the KV of its chunks is to stay in every tier (`Store.pin`).
    """

    id: str
    source: str
    title: str | None
    metadata: Metadata
    sha256: str
    recipe: str
    mtime: float | None
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """Chunks that the store did not hold before a write, and those that it no longer holds after it."""

    added: tuple[ChunkId, ...] = ()
    removed: tuple[ChunkId, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """One ingest run. `finished_at` is None while it runs, and for ever if it was killed; times as `time.time()`."""

    key: int
    started_at: float
    finished_at: float | None
    summary: Mapping[str, Any]


class Store:
    """A store's folder, opened. Thread-safe; any number of processes may read while one writes.

    Every method may raise StoreError: the file is locked for longer than the timeout, damaged, or the disk is full.
    """

    def __init__(self, directory: Path, connection: sqlite3.Connection) -> None:
        self.directory = directory
        self._db = connection
        # One connection for all threads: SQLite would serialise the writers anyway, and reads are short.
        self._lock = threading.RLock()

    @classmethod
    def open(cls, directory: str | Path, *, create: bool = False, timeout_s: float = 10.0) -> Store:
        """Open the store in a folder, bringing its schema up to date.

        Args:
            directory: the store's folder.
            create: make folder and store if there is none.
            timeout_s: how long to wait for another process that writes.

        Raises:
            InputError: an empty path.
            StoreError: no store there, or it is locked, damaged, newer than this LazyRAG, or another program's.
        """
        if not directory:
            raise InputError("The store's folder is an empty path.", fix="For the current folder, type a dot.")
        directory = Path(directory)
        path = directory / FILE_NAME
        if not create and not path.is_file():
            raise MissingStoreError(
                f"There is no store in {directory}.", fix=f"Make one: lazyrag ingest PATH --store {directory}"
            )
        with _translated(path):
            directory.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(path, timeout=timeout_s, isolation_level=None, check_same_thread=False)
            try:
                if not create:
                    _expect_contents(connection, path)
                connection.execute("PRAGMA foreign_keys = ON")
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")  # a committed document survives a power cut
                migrate(connection)
                if not connection.execute("SELECT 1 FROM meta WHERE name = 'secret'").fetchone():
                    # Two processes may create one store: whoever comes first names it.
                    connection.executemany(
                        "INSERT OR IGNORE INTO meta VALUES (?, ?)",
                        [("id", secrets.token_hex(16)), ("secret", secrets.token_hex(32))],
                    )
            except BaseException:
                connection.close()
                raise
        return cls(directory, connection)

    def close(self) -> None:
        """Close the file. Idempotent; every other method fails afterwards."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------ identity and settings

    @property
    def id(self) -> str:
        """Made with the store; a cache file of another store has another one. 32 hex digits."""
        return self._meta()["id"]

    @property
    def secret(self) -> bytes:
        """32 random bytes made with the store, for hashes whose collisions an author of documents must not know."""
        return bytes.fromhex(self._meta()["secret"])

    def settings(self) -> dict[str, str]:
        """What `require` and `remember` have written."""
        return {name: value for name, value in self._meta().items() if name not in ("id", "secret")}

    def expect(self, **settings: str) -> None:
        """Compare settings with those that the store is tied to (`require`).

        Raises:
            StoreError: the store was made with another value.
        """
        known = self._meta()
        for name, value in settings.items():
            if known.get(name, value) != value:
                raise StoreError(
                    f"The store in {self.directory} was made with {name} {known[name]}, not {value}.",
                    why="Its contents would not fit together.",
                    fix=f"Use the same {name}, or ingest into another folder with --store."
                    + (f" Or take it over: lazyrag kv rebuild --store {self.directory}" if name == "tokenizer" else ""),
                )

    def require(self, **settings: str) -> None:
        """Tie the store to settings that its contents depend on. The first call writes a value, later ones compare.

        Raises:
            StoreError: the store was made with another value.
        """
        with self._writing() as db:
            self.expect(**settings)
            db.executemany("INSERT OR IGNORE INTO meta VALUES (?, ?)", settings.items())

    def remember(self, **settings: str) -> None:
        """Note settings that may change, such as the model of the last ingest. Their names are none of `require`'s."""
        with self._writing() as db:
            db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", settings.items())

    def generation(self, namespace: str = "") -> int:
        """Another random number after every change of the namespace's documents, chunks or vectors; 0 before the first.

        So what was made from the store at one generation fits it at that generation and at no other, also when the
        store was restored from a backup, after which counters and row keys repeat.
        """
        with self._reading() as db:
            row = db.execute("SELECT generation FROM generations WHERE namespace = ?", (namespace,)).fetchone()
        return int(row[0]) if row else 0

    def _meta(self) -> dict[str, str]:
        with self._reading() as db:
            return dict(db.execute("SELECT name, value FROM meta"))

    # ------------------------------------------------------------ documents

    def put_document(
        self,
        document: Document,
        chunks: Sequence[EncodedChunk],
        *,
        vectors: Mapping[ChunkId, NDArray[np.float32]] | None = None,
        sha256: str = "",
        recipe: str = "",
        mtime: float | None = None,
        namespace: str = "",
        quota: Quota = NO_QUOTA,
        own: Metadata = EMPTY,
    ) -> Change:
        """Write a document in the place of its old version, in one transaction.

        Readers see the old version or the new one, never a mixture or neither. A chunk that stays keeps its vector and
        what is known of its KV.

        Args:
            document: its text is not stored, its chunks are.
            chunks: in the order of the document.
            vectors: [dim] float32 for the chunks; one that has a vector keeps it, one that gets none is listed by
                `without_vector`. An id that is not in `chunks` is ignored.
            sha256: see `StoredDocument`.
            recipe: see `StoredDocument`.
            mtime: see `StoredDocument`.
            namespace: whose document it is.
            quota: what the namespace may hold.
            own: metadata of LazyRAG's, whose names a document must not use: `CONTENT`, `DOCUMENT`.

        Raises:
            InputError: text that is not valid Unicode, or metadata of a name that is LazyRAG's.
            QuotaError: the namespace would hold more than it may, and than before.
        """
        if taken := sorted(document.metadata.keys() & {CONTENT, DOCUMENT}):
            raise InputError(
                "A document cannot be stored:",
                why=f"LazyRAG keeps the name {' and '.join(taken)} in its metadata for itself.",
                fix="Give that field another name.",
            )
        metadata = json.dumps({**document.metadata, **own}, ensure_ascii=False)
        head = (document.source, document.title, metadata, sha256, recipe, mtime)
        added: list[ChunkId] = []
        with self._writing() as db:
            before = _counts(db, namespace, quota)
            (document_key,) = db.execute(
                """INSERT INTO documents (namespace, id, source, title, metadata, sha256, recipe, mtime)
                VALUES (?, ?, ?, ?, ?, ?, ?, ?)
                ON CONFLICT (namespace, id) DO UPDATE SET source = excluded.source, title = excluded.title,
                metadata = excluded.metadata, sha256 = excluded.sha256, recipe = excluded.recipe, mtime = excluded.mtime
                RETURNING key""",
                (namespace, document.id, *head),
            ).fetchone()
            old = _take_spans(db, document_key)
            for ordinal, encoded in enumerate(chunks):
                chunk = encoded.chunk
                key, is_new = _put_chunk(db, namespace, encoded)
                if is_new:
                    added.append(chunk.id)
                db.execute(
                    "INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?)",
                    (document_key, ordinal, key, chunk.start, chunk.end, chunk.page),
                )
                if vectors is not None and chunk.id in vectors:
                    db.execute("INSERT OR IGNORE INTO vectors VALUES (?, ?)", (key, _floats(vectors[chunk.id])))
            removed = _drop_unused(db, old, namespace)
            _check_quota(before, _counts(db, namespace, quota), quota)
            _change(db, namespace)
        return Change(tuple(added), removed)

    def delete_document(self, id: str, namespace: str = "") -> Change:
        """Forget a document and the chunks that only it held. An unknown id changes nothing."""
        with self._writing() as db:
            row = db.execute("SELECT key FROM documents WHERE namespace = ? AND id = ?", (namespace, id)).fetchone()
            if row is None:
                return Change()
            old = _take_spans(db, row[0])
            db.execute("DELETE FROM documents WHERE key = ?", row)
            removed = _drop_unused(db, old, namespace)
            _change(db, namespace)
        return Change(removed=removed)

    def documents(self, namespace: str = "", *, after: str = "") -> Iterator[StoredDocument]:
        """Every document whose id comes after `after`, by id."""
        for row in self._pages(
            f"{_DOCUMENTS} WHERE namespace = ? AND id > ? ORDER BY id LIMIT ?",
            namespace,
            after,
        ):
            yield _document(row)

    def document(self, id: str, namespace: str = "") -> StoredDocument | None:
        """The document with this id."""
        with self._reading() as db:
            row = db.execute(f"{_DOCUMENTS} WHERE namespace = ? AND id = ?", (namespace, id)).fetchone()
        return None if row is None else _document(row)

    def pin(self, ids: Iterable[str], namespace: str = "", *, pinned: bool = True) -> int:
        """Note that the KV of documents' chunks, those of later versions included, is to stay in every tier.

        Args:
            ids: of documents; unknown ones are ignored.
            namespace: whose they are.
            pinned: False takes the note back.

        Returns:
            how many documents this has changed.
        """
        with self._writing() as db:
            cursor = db.execute(
                "UPDATE documents SET pinned = ? WHERE namespace = ? AND pinned != ? "
                "AND id IN (SELECT value FROM json_each(?))",
                (pinned, namespace, pinned, _json(ids)),
            )
            if cursor.rowcount:
                _change(db, namespace)
            return cursor.rowcount

    def pinned(self, namespace: str = "") -> Iterator[tuple[ChunkId, tuple[int, ...]]]:
        """Id and tokens of every reusable chunk that a pinned document holds, oldest first."""
        for _, id, blob in self._pages(
            "SELECT key, id, tokens FROM chunks WHERE tokens IS NOT NULL AND key IN "
            "(SELECT chunk FROM spans JOIN documents d ON document = d.key WHERE d.pinned AND d.namespace = ?) "
            "AND key > ? ORDER BY key LIMIT ?",
            namespace,
            0,
        ):
            yield id, _tokens(blob)

    def namespaces(self) -> list[str]:
        """Every namespace that has, or had, documents."""
        with self._reading() as db:
            rows = db.execute(
                "SELECT namespace FROM generations UNION SELECT namespace FROM documents "
                "UNION SELECT namespace FROM chunks ORDER BY 1"
            )
            return [namespace for (namespace,) in rows]

    # ------------------------------------------------------------ chunks

    def chunks_of(self, document: str, namespace: str = "") -> list[Chunk]:
        """The chunks of a document in its order; none if it is unknown."""
        with self._reading() as db:
            rows = db.execute(
                f"{_PLACES} WHERE d.namespace = ? AND d.id = ? ORDER BY s.ordinal", (namespace, document)
            ).fetchall()
        return [_chunk(row) for row in rows]

    def chunk_ids(self, namespace: str = "") -> Iterator[ChunkId]:
        """The ids of all chunks, ascending; compare with what an index holds to bring it up to date."""
        sql = "SELECT id FROM chunks WHERE namespace = ? AND id > ? ORDER BY id LIMIT ?"
        return (id for (id,) in self._pages(sql, namespace, ""))

    def texts(self, namespace: str = "") -> Iterator[tuple[ChunkId, str]]:
        """Id and canonical text of every chunk, oldest first."""
        for _, id, text in self._pages(
            "SELECT key, id, text FROM chunks WHERE namespace = ? AND key > ? ORDER BY key LIMIT ?", namespace, 0
        ):
            yield id, text

    def is_any_in(self, text: str, namespace: str = "", *, lengths: range) -> bool:
        """Whether a text holds a chunk of one of these lengths, in characters. Looks at every chunk."""
        with self._reading() as db:
            row = db.execute(
                "SELECT 1 FROM chunks WHERE namespace = ? AND length(text) BETWEEN ? AND ? AND instr(?, text) LIMIT 1",
                (namespace, lengths.start, lengths.stop - 1, text),
            ).fetchone()
        return row is not None

    def chunks(self, namespace: str = "") -> Iterator[Chunk]:
        """Every place of every chunk, in the order of the documents."""
        for document in self.documents(namespace):
            yield from self.chunks_of(document.id, namespace)

    def get_texts(self, ids: Iterable[ChunkId], namespace: str = "") -> dict[ChunkId, str]:
        """The canonical texts of those chunks that exist."""
        return dict(self._select("SELECT id, text FROM chunks c", ids, namespace))

    def get_tokens(self, ids: Iterable[ChunkId], namespace: str = "") -> dict[ChunkId, tuple[int, ...]]:
        """The token ids of those chunks that exist and may be reused."""
        rows = self._select("SELECT id, tokens FROM chunks c", ids, namespace)
        return {id: _tokens(blob) for id, blob in rows if blob is not None}

    def reusable(self, namespace: str = "") -> Iterator[tuple[ChunkId, tuple[int, ...]]]:
        """Id and tokens of every chunk that may be reused, oldest first."""
        for _, id, blob in self._pages(
            "SELECT key, id, tokens FROM chunks WHERE tokens IS NOT NULL AND namespace = ? AND key > ? "
            "ORDER BY key LIMIT ?",
            namespace,
            0,
        ):
            yield id, _tokens(blob)

    def retokenize(self, tokens: Mapping[ChunkId, Sequence[int]], namespace: str = "") -> None:
        """Give chunks other tokens; none: they must not be reused. The KV of the old ones is doomed, its notes go."""
        with self._writing() as db:
            for key, id, old in db.execute(
                f"SELECT key, id, tokens FROM chunks c WHERE namespace = ? AND {_AMONG}", (namespace, _json(tokens))
            ).fetchall():
                new = _packed(tokens[id]) or None
                if new == old:
                    continue
                if old is not None:
                    db.execute("INSERT INTO doomed (namespace, tokens) VALUES (?, ?)", (namespace, old))
                count = len(tokens[id])
                db.execute(
                    "UPDATE chunks SET tokens = ?, num_tokens = coalesce(nullif(?, 0), num_tokens) WHERE key = ?",
                    (new, count, key),
                )
                db.execute("DELETE FROM warmed WHERE chunk = ?", (key,))
            _change(db, namespace)

    def beginning_with(self, heads: Iterable[Sequence[int]], namespace: str = "") -> set[tuple[int, ...]]:
        """Those runs of tokens, none of them empty, that a chunk begins with or is."""
        runs = {_packed(head): tuple(head) for head in heads}
        if not runs:
            return set()
        length = min(map(len, runs))  # by which the file is searched; what is found is compared whole
        with self._reading() as db:
            rows = db.execute(
                "SELECT tokens FROM chunks WHERE namespace = ? "
                "AND hex(substr(tokens, 1, ?)) IN (SELECT value FROM json_each(?))",
                (namespace, length, _json({run[:length].hex().upper() for run in runs})),
            ).fetchall()
        blobs = sorted(blob for (blob,) in rows)
        found = set()
        for run, head in runs.items():
            at = bisect_left(blobs, run)
            if at < len(blobs) and blobs[at].startswith(run):
                found.add(head)
        return found

    def spans_of(self, ids: Iterable[ChunkId], namespace: str = "") -> dict[ChunkId, list[Chunk]]:
        """For each chunk that exists, the places where it stands, oldest document first: what an answer cites."""
        with self._reading() as db:
            rows = db.execute(
                f"{_PLACES} WHERE c.namespace = ? AND {_AMONG} ORDER BY d.key, s.ordinal", (namespace, _json(ids))
            ).fetchall()
        places: dict[ChunkId, list[Chunk]] = {}
        for chunk in map(_chunk, rows):
            places.setdefault(chunk.id, []).append(chunk)
        return places

    # ------------------------------------------------------------ vectors

    def without_vector(self, namespace: str = "") -> list[ChunkId]:
        """The ids of all chunks that have no vector, oldest first."""
        with self._reading() as db:
            rows = db.execute(f"SELECT id FROM chunks WHERE namespace = ? AND {_NO_VECTOR} ORDER BY key", (namespace,))
            return [id for (id,) in rows]

    def put_vectors(self, vectors: Mapping[ChunkId, NDArray[np.float32]], namespace: str = "") -> None:
        """Give chunks that have no vector one, [dim] float32. Unknown ids are ignored."""
        with self._writing() as db:
            db.executemany(
                "INSERT OR IGNORE INTO vectors SELECT key, ? FROM chunks WHERE namespace = ? AND id = ?",
                ((_floats(vector), namespace, id) for id, vector in vectors.items()),
            )
            _change(db, namespace)

    def vector_keys(self, namespace: str = "") -> NDArray[np.int64]:
        """The keys of all chunks that have a vector, ascending, [n]. A key is never given twice."""
        with self._reading() as db:
            rows = db.execute(
                "SELECT key FROM chunks JOIN vectors ON vectors.chunk = chunks.key WHERE namespace = ? ORDER BY key",
                (namespace,),
            ).fetchall()
        return np.array([key for (key,) in rows], dtype=np.int64)

    def get_vectors(self, keys: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The vectors of those keys that exist: keys [n] and vectors [n, dim]."""
        with self._reading() as db:
            rows = db.execute(
                "SELECT chunk, vector FROM vectors WHERE chunk IN (SELECT value FROM json_each(?))",
                (_json(map(int, keys)),),
            ).fetchall()
        if len({len(blob) for _, blob in rows}) > 1:
            raise _damaged(self.directory / FILE_NAME, "it holds vectors of different lengths.")
        vectors = np.frombuffer(b"".join(blob for _, blob in rows), dtype="<f4").astype(np.float32)
        return np.array([key for key, _ in rows], dtype=np.int64), vectors.reshape(len(rows), -1 if rows else 0)

    def vectors_of(self, ids: Iterable[ChunkId], namespace: str = "") -> dict[ChunkId, NDArray[np.float32]]:
        """The vectors, [dim] each, of those chunks that have one."""
        rows = self._select("SELECT id, vector FROM vectors v JOIN chunks c ON v.chunk = c.key", ids, namespace)
        return {id: np.frombuffer(blob, dtype="<f4").astype(np.float32) for id, blob in rows}

    def put_scores(self, id: ChunkId, scores: Sequence[float], model: str, namespace: str = "") -> None:
        """Keep how much a chunk's reused KV differs, a number a token. An unknown id is ignored.

        Args:
            id: the chunk's.
            scores: see `lazyrag.deviation`.
            model: names the model and what the chunk's KV is computed behind.
            namespace: whose chunk.
        """
        with self._writing() as db:
            db.execute(
                "INSERT OR IGNORE INTO scores SELECT key, ?, ? FROM chunks WHERE namespace = ? AND id = ?",
                (model, np.array(scores, dtype="<f4").tobytes(), namespace, id),
            )

    def get_scores(self, id: ChunkId, model: str, namespace: str = "") -> list[float] | None:
        """What was kept for a chunk under this name."""
        with self._reading() as db:
            row = db.execute(
                "SELECT scores FROM scores s JOIN chunks c ON s.chunk = c.key "
                "WHERE s.model = ? AND c.namespace = ? AND c.id = ?",
                (model, namespace, id),
            ).fetchone()
        return np.frombuffer(row[0], dtype="<f4").tolist() if row is not None else None

    def ids_of(self, keys: Sequence[int], namespace: str = "") -> dict[int, ChunkId]:
        """The chunk ids of those keys that exist."""
        with self._reading() as db:
            rows = db.execute(
                "SELECT key, id FROM chunks WHERE namespace = ? AND key IN (SELECT value FROM json_each(?))",
                (namespace, _json(map(int, keys))),
            )
            return dict(rows)

    # ------------------------------------------------------------ journal

    def start_run(self, namespace: str = "") -> int:
        """Note that an ingest run begins; the number that `finish_run` wants."""
        with self._writing() as db:
            row = db.execute(
                "INSERT INTO runs (namespace, started_at) VALUES (?, ?) RETURNING key", (namespace, time.time())
            ).fetchone()
        return int(row[0])

    def finish_run(self, run: int, summary: Mapping[str, Any]) -> None:
        """Note that a run came to its end, and what it did."""
        with self._writing() as db:
            db.execute(
                "UPDATE runs SET finished_at = ?, summary = ? WHERE key = ?",
                (time.time(), json.dumps(dict(summary)), run),
            )

    def last_run(self, namespace: str = "") -> Run | None:
        """The newest run."""
        with self._reading() as db:
            row = db.execute(
                "SELECT key, started_at, finished_at, summary FROM runs WHERE namespace = ? ORDER BY key DESC LIMIT 1",
                (namespace,),
            ).fetchone()
        return None if row is None else Run(row[0], row[1], row[2], json.loads(row[3] or "{}"))

    def num_unwarmed(self, fingerprint: str, namespace: str = "") -> int:
        """How many chunks `unwarmed` would give."""
        with self._reading() as db:
            row = db.execute(f"SELECT count(*) FROM chunks {_UNWARMED}", (fingerprint, namespace, 0)).fetchone()
        return int(row[0])

    def unwarmed(
        self, fingerprint: str, namespace: str = "", *, of: Iterable[str] | None = None
    ) -> Iterator[tuple[ChunkId, tuple[int, ...]]]:
        """Id and tokens of each reusable chunk whose KV no engine with this fingerprint is known to have kept.

        Args:
            fingerprint: see `mark_warm`.
            namespace: whose chunks.
            of: only those that stand in these documents, given by id.
        """
        where = _UNWARMED if of is None else f"WHERE {_STANDS_IN} AND {_UNWARMED.removeprefix('WHERE ')}"
        documents = () if of is None else (namespace, _json(of))
        sql = f"SELECT key, id, tokens FROM chunks {where} ORDER BY key LIMIT ?"
        for _, id, blob in self._pages(sql, *documents, fingerprint, namespace, 0):
            yield id, _tokens(blob)

    def mark_warm(self, ids: Iterable[ChunkId], fingerprint: str, namespace: str = "") -> None:
        """Note that the chunks' KV was left on disk for engines with this fingerprint. Unknown ids are ignored.

        A note is no promise: files may be evicted or deleted, a save may have failed, and a chunk that was resident may
        have had no file any more. Then the next prompt that holds the chunk computes it again. Fewer files than
        `num_warm` show that notes are wrong (`forget_warm`).
        """
        with self._writing() as db:
            db.execute(
                f"INSERT OR IGNORE INTO warmed SELECT key, ? FROM chunks c WHERE namespace = ? AND {_AMONG}",
                (fingerprint, namespace, _json(ids)),
            )

    def num_warm(self, fingerprint: str) -> int:
        """How many chunks are noted by `mark_warm`, in all namespaces."""
        with self._reading() as db:
            row = db.execute("SELECT count(*) FROM warmed WHERE fingerprint = ?", (fingerprint,)).fetchone()
        return int(row[0])

    def warm_for(self, id: ChunkId, namespace: str = "") -> set[str]:
        """The fingerprints under which a chunk is noted by `mark_warm`."""
        with self._reading() as db:
            rows = db.execute(
                "SELECT fingerprint FROM warmed JOIN chunks c ON chunk = key WHERE namespace = ? AND id = ?",
                (namespace, id),
            )
            return {fingerprint for (fingerprint,) in rows}

    def forget_warm(self, fingerprint: str) -> None:
        """Take back every `mark_warm` of a fingerprint, in all namespaces: its KV was deleted."""
        with self._writing() as db:
            db.execute("DELETE FROM warmed WHERE fingerprint = ?", (fingerprint,))

    def forget_warm_chunks(self, ids: Iterable[ChunkId], fingerprint: str, namespace: str = "") -> None:
        """Take back `mark_warm` of some chunks."""
        with self._writing() as db:
            db.execute(
                "DELETE FROM warmed WHERE fingerprint = ? AND chunk IN "
                f"(SELECT key FROM chunks c WHERE namespace = ? AND {_AMONG})",
                (fingerprint, namespace, _json(ids)),
            )

    def warm(self, namespace: str = "") -> Iterator[tuple[str, ChunkId, tuple[int, ...]]]:
        """Fingerprint, id and tokens of every chunk that is noted by `mark_warm`."""
        with self._reading() as db:
            fingerprints = db.execute("SELECT DISTINCT fingerprint FROM warmed ORDER BY 1").fetchall()
        for (fingerprint,) in fingerprints:
            for _, id, blob in self._pages(
                "SELECT key, id, tokens FROM chunks JOIN warmed ON chunk = key "
                "WHERE fingerprint = ? AND namespace = ? AND key > ? ORDER BY key LIMIT ?",
                fingerprint,
                namespace,
                0,
            ):
                yield fingerprint, id, _tokens(blob)

    # ------------------------------------------------------------ room for KV

    def begin_kv(self, namespace: str, count: Callable[[], int | None]) -> None:
        """Note how many bytes of KV a namespace keeps, unless `count`, called in the transaction, gives None."""
        with self._writing() as db:
            if (num_bytes := count()) is not None:
                db.execute("INSERT OR REPLACE INTO kv_reserved VALUES (?, ?)", (namespace, num_bytes))

    def reserve_kv(self, sizes: Sequence[int], most_bytes: int, namespace: str = "") -> list[bool]:
        """Add sizes to what `begin_kv` noted, in order, each unless the sum would exceed a limit; whether it was."""
        fits = []
        with self._writing() as db:
            row = db.execute("SELECT num_bytes FROM kv_reserved WHERE namespace = ?", (namespace,)).fetchone()
            (num_bytes,) = row or (0,)
            for size in sizes:
                fits.append(size <= 0 or num_bytes + size <= most_bytes)
                num_bytes += size if fits[-1] else 0
            db.execute("INSERT OR REPLACE INTO kv_reserved VALUES (?, ?)", (namespace, num_bytes))
        return fits

    # ------------------------------------------------------------ what went

    def doomed(self) -> list[tuple[int, str, tuple[int, ...]]]:
        """Chunks that went, of all namespaces: number, namespace and tokens, oldest first, so many at a time.

        They were noted in the transaction in which they went, and stay until `bury`, so that no kill in between leaves
        KV of a chunk that nobody knows any more.
        """
        with self._reading() as db:
            rows = db.execute("SELECT key, namespace, tokens FROM doomed ORDER BY key LIMIT ?", (_PAGE,)).fetchall()
        return [(key, namespace, _tokens(blob)) for key, namespace, blob in rows]

    def doom(self, chunks: Mapping[ChunkId, Sequence[int]], namespace: str = "") -> None:
        """Note as doomed those chunks, given with their tokens, that are not there any more.

        For whoever has just saved KV of them: it may have come after the removal of what a deletion had found.
        """
        with self._writing() as db:
            rows = db.execute(f"SELECT id FROM chunks c WHERE namespace = ? AND {_AMONG}", (namespace, _json(chunks)))
            gone = chunks.keys() - {id for (id,) in rows}
            blobs = [(namespace, _packed(chunks[id])) for id in gone]
            db.executemany("INSERT INTO doomed (namespace, tokens) VALUES (?, ?)", blobs)

    def bury(self, numbers: Iterable[int]) -> None:
        """Forget those of `doomed`: their KV files are gone."""
        with self._writing() as db:
            db.execute("DELETE FROM doomed WHERE key IN (SELECT value FROM json_each(?))", (_json(numbers),))

    # ------------------------------------------------------------ care

    def stats(self, namespace: str = "") -> dict[str, int]:
        """Counts of the namespace, and `bytes` on disk of the whole file."""
        with self._reading() as db:
            names = ("documents", "chunks", "tokens", "reusable", "spans", "vectors")
            row = db.execute(
                """SELECT (SELECT count(*) FROM documents WHERE namespace = :n), count(*), coalesce(sum(num_tokens), 0),
                count(tokens), (SELECT count(*) FROM spans JOIN documents ON document = key WHERE namespace = :n),
                (SELECT count(*) FROM vectors JOIN chunks ON chunk = key WHERE namespace = :n)
                FROM chunks WHERE namespace = :n""",
                {"n": namespace},
            ).fetchone()
        files = self.directory.glob(f"{FILE_NAME}*")
        return {**dict(zip(names, row, strict=True)), "bytes": sum(path.stat().st_size for path in files)}

    def check(self) -> list[str]:
        """Read everything once and say what is wrong; empty if nothing is. Takes as long as reading the file."""
        with self._reading() as db:
            problems = [row[0] for row in db.execute("PRAGMA integrity_check") if row[0] != "ok"]
            problems += [f"a row of {row[0]} points to nothing" for row in db.execute("PRAGMA foreign_key_check")]
            for key, id, text in db.execute("SELECT key, id, text FROM chunks"):
                if chunk_id(text) != id:
                    problems.append(f"the text of chunk {key} is not the one it was stored with")
            unused = "SELECT count(*) FROM chunks WHERE key NOT IN (SELECT chunk FROM spans)"
            problems += [f"{n} chunks stand in no document" for (n,) in db.execute(unused) if n]
            if db.execute("SELECT 1 FROM meta WHERE name = 'embedding'").fetchone():
                bare = f"SELECT namespace, count(*) FROM chunks WHERE {_NO_VECTOR} GROUP BY namespace"
                for namespace, n in db.execute(bare):
                    problems.append(f"{n} chunks of namespace {namespace!r} have no vector: the next ingest makes them")
        return problems

    def copy_to(self, path: Path) -> None:
        """Write the store as it is at this moment, without remains of what was deleted, to a file that is not there."""
        with self._reading() as db:
            db.execute("VACUUM INTO ?", (str(path),))

    def mend(self) -> list[str]:
        """Delete chunks whose text is not the one they were stored with or that stand in no document; what is left.

        The documents that such a text stood in lack it, and the next ingest takes them for changed.
        """
        with self._writing() as db:
            chunks = db.execute("SELECT key, id, namespace, text FROM chunks")
            rotten = [(key, namespace) for key, id, namespace, text in chunks if chunk_id(text) != id]
            for key, namespace in rotten:
                db.execute(
                    "UPDATE documents SET sha256 = '' WHERE key IN (SELECT document FROM spans WHERE chunk = ?)", (key,)
                )
                db.execute("DELETE FROM spans WHERE chunk = ?", (key,))
                _change(db, namespace)
            unused = "SELECT key, namespace FROM chunks WHERE key NOT IN (SELECT chunk FROM spans)"
            for key, namespace in db.execute(unused).fetchall():
                _drop_unused(db, [key], namespace)
                _change(db, namespace)
        return self.check()

    # ------------------------------------------------------------ access to the file

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _translated(self.directory / FILE_NAME):
            yield self._db

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all of it or nothing."""
        with self._reading() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:  # SQLite has rolled back by itself if, say, the disk is full
                    db.execute("ROLLBACK")
                raise

    def _pages(self, sql: str, *arguments: str | int) -> Iterator[tuple[Any, ...]]:
        """Rows in the order of their first column. The last argument is a value before the first row's."""
        *fixed, last = arguments
        while True:
            with self._reading() as db:
                rows = db.execute(sql, (*fixed, last, _PAGE)).fetchall()
            yield from rows
            if len(rows) < _PAGE:
                return
            last = rows[-1][0]

    def _select(self, sql: str, ids: Iterable[ChunkId], namespace: str) -> list[tuple[Any, ...]]:
        with self._reading() as db:
            return db.execute(
                f"{sql} WHERE namespace = ? AND id IN (SELECT value FROM json_each(?))",
                (namespace, json.dumps(list(ids))),
            ).fetchall()


_AMONG = "c.id IN (SELECT value FROM json_each(?))"

_DOCUMENTS = "SELECT id, source, title, metadata, sha256, recipe, mtime, pinned FROM documents"

_PLACES = """SELECT c.id, c.text, c.num_tokens, d.id, d.source, s.start, s.end, s.page, d.title, d.metadata
    FROM documents d JOIN spans s ON s.document = d.key JOIN chunks c ON c.key = s.chunk"""

_STANDS_IN = """key IN (SELECT chunk FROM spans JOIN documents d ON document = d.key
    WHERE d.namespace = ? AND d.id IN (SELECT value FROM json_each(?)))"""

_NO_VECTOR = "NOT EXISTS (SELECT 1 FROM vectors WHERE chunk = key)"

_UNWARMED = """WHERE tokens IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM warmed WHERE chunk = key AND fingerprint = ?) AND namespace = ? AND key > ?"""


def _packed(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()


def _json(values: Iterable[str | int]) -> str:
    return json.dumps(list(values))


def _chunk(row: tuple[Any, ...]) -> Chunk:
    id, text, num_tokens, document_id, source, start, end, page, title, metadata = row
    return Chunk(id, text, num_tokens, document_id, source, start, end, page, title, json.loads(metadata))


def _document(row: tuple[Any, ...]) -> StoredDocument:
    id, source, title, metadata, sha256, recipe, mtime, pinned = row
    return StoredDocument(id, source, title, json.loads(metadata), sha256, recipe, mtime, bool(pinned))


def _counts(db: sqlite3.Connection, namespace: str, quota: Quota) -> dict[str, int]:
    """Of what is limited, how much there is."""
    return {
        name: db.execute(f"SELECT count(*) FROM {name} WHERE namespace = ?", (namespace,)).fetchone()[0]
        for name in ("documents", "chunks")
        if getattr(quota, name) is not None
    }


def _check_quota(before: Mapping[str, int], after: Mapping[str, int], quota: Quota) -> None:
    for name, count in after.items():
        most = getattr(quota, name)
        if count > max(most, before[name]):
            raise QuotaError(
                f"The namespace may hold {most} {name}:",
                why=f"it holds {before[name]}, and would hold {count}.",
                fix="Delete documents, or have the quota raised.",
            )


def _tokens(blob: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(blob, dtype="<u4").tolist())


def _floats(vector: NDArray[np.float32]) -> bytes:
    return np.ascontiguousarray(vector, dtype="<f4").tobytes()


def _put_chunk(db: sqlite3.Connection, namespace: str, encoded: EncodedChunk) -> tuple[int, bool]:
    """The chunk's key, and whether the row is new."""
    chunk = encoded.chunk
    blob = _packed(encoded.token_ids) or None
    row = db.execute(
        "INSERT INTO chunks (namespace, id, num_tokens, text, tokens) VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT DO NOTHING RETURNING key",
        (namespace, chunk.id, chunk.num_tokens, chunk.text, blob),
    ).fetchone()
    if row is not None:
        return row[0], True
    row = db.execute("SELECT key FROM chunks WHERE namespace = ? AND id = ?", (namespace, chunk.id)).fetchone()
    return row[0], False


def _take_spans(db: sqlite3.Connection, document: int) -> set[int]:
    """Remove a document's spans; the keys of the chunks that they pointed to."""
    keys = {key for (key,) in db.execute("SELECT chunk FROM spans WHERE document = ?", (document,))}
    db.execute("DELETE FROM spans WHERE document = ?", (document,))
    return keys


def _change(db: sqlite3.Connection, namespace: str) -> None:
    """Start another generation of the namespace's contents."""
    db.execute("INSERT OR REPLACE INTO generations VALUES (?, ?)", (namespace, secrets.randbits(63)))


def _drop_unused(db: sqlite3.Connection, keys: Iterable[int], namespace: str) -> tuple[ChunkId, ...]:
    """Delete those chunks of a namespace that no span points to, and note their tokens as doomed; their ids."""
    rows = db.execute(
        "DELETE FROM chunks WHERE key IN (SELECT value FROM json_each(?)) "
        "AND NOT EXISTS (SELECT 1 FROM spans WHERE chunk = key) RETURNING id, tokens",
        (_json(keys),),
    ).fetchall()
    db.executemany(
        "INSERT INTO doomed (namespace, tokens) VALUES (?, ?)", [(namespace, blob) for _, blob in rows if blob]
    )
    return tuple(id for id, _ in rows)


def _expect_contents(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse an empty file that stays empty."""
    deadline = time.monotonic() + _BEING_MADE_S
    while is_empty(connection):
        if time.monotonic() > deadline:
            raise _damaged(path, "it is empty.")
        time.sleep(0.01)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Say in the user's terms what SQLite says in its own."""
    try:
        yield
    except UnicodeEncodeError as error:
        error.object = ""  # it stays the new error's context, and shall not carry the text there
        raise InputError(
            "The store cannot take a text:",
            why="a document, an id or the namespace holds a lone surrogate, which is not Unicode.",
        ) from None
    except sqlite3.ProgrammingError:
        raise  # a mistake in the calling code, such as a store that is used after close
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise StoreError(
                f"The store {path} is locked.",
                why="Another process has been writing to it for longer than the timeout.",
                fix="Wait for it, or stop it, and run the command again.",
            ) from error
        raise StoreError(
            f"The store {path} cannot be used: {error}.",
            fix="Check the disk's free space and the folder's permissions.",
        ) from error
    except sqlite3.DatabaseError as error:
        raise _damaged(path, f"{error}.") from error
    except OSError as error:
        raise StoreError(f"The store {path} cannot be opened: {error.strerror or error}.") from error


def _damaged(path: Path, why: str) -> StoreError:
    return StoreError(
        f"The store {path} is damaged or no store:",
        why=why,
        fix="Move the folder aside and ingest the documents again, or restore a backup of it.",
    )
