"""The schema of the store, as the steps that lead to it.

Step n turns a file of version n - 1 into one of version n. A released step is never edited: a change of the schema is a
new step at the end.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import TypeAlias

from lazyrag.errors import StoreError

Migration: TypeAlias = Sequence[str]

APPLICATION_ID = 0x4C5A5247
"""Marks an SQLite file as a LazyRAG store ("LZRG")."""

# A `key` is a row number that is never given twice: it names a row in the vector index, and a span's row survives the
# change of a document. Chunks belong to one namespace: two tenants with the same text have two rows.
MIGRATIONS: Sequence[Migration] = (
    (
        "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
        "CREATE TABLE generations (namespace TEXT PRIMARY KEY, generation INTEGER NOT NULL) WITHOUT ROWID",
        """CREATE TABLE documents (
            key INTEGER PRIMARY KEY AUTOINCREMENT,
            namespace TEXT NOT NULL,
            id TEXT NOT NULL,
            source TEXT NOT NULL,
            title TEXT,
            metadata TEXT NOT NULL,  -- JSON object
            sha256 TEXT NOT NULL,    -- of what the document was made from
            recipe TEXT NOT NULL,    -- how it was split and embedded
            mtime REAL,              -- of its file, seconds since the epoch
            UNIQUE (namespace, id)
        )""",
        """CREATE TABLE chunks (
            key INTEGER PRIMARY KEY AUTOINCREMENT,
            namespace TEXT NOT NULL,
            id TEXT NOT NULL,
            num_tokens INTEGER NOT NULL,
            text TEXT NOT NULL,
            tokens BLOB,             -- uint32 little endian; NULL if the chunk must not be reused
            UNIQUE (namespace, id)
        )""",
        "CREATE INDEX chunks_by_namespace ON chunks (namespace)",
        """CREATE TABLE spans (
            document INTEGER NOT NULL REFERENCES documents (key) ON DELETE CASCADE,
            ordinal INTEGER NOT NULL,
            chunk INTEGER NOT NULL REFERENCES chunks (key),
            start INTEGER NOT NULL,
            end INTEGER NOT NULL,
            page INTEGER,
            PRIMARY KEY (document, ordinal)
        ) WITHOUT ROWID""",
        "CREATE INDEX spans_by_chunk ON spans (chunk)",
        """CREATE TABLE vectors (
            chunk INTEGER PRIMARY KEY REFERENCES chunks (key) ON DELETE CASCADE,
            vector BLOB NOT NULL     -- float32 little endian, L2 norm 1
        )""",
        """CREATE TABLE warmed (
            chunk INTEGER NOT NULL REFERENCES chunks (key) ON DELETE CASCADE,
            fingerprint TEXT NOT NULL,
            PRIMARY KEY (chunk, fingerprint)
        ) WITHOUT ROWID""",
        """CREATE TABLE runs (
            key INTEGER PRIMARY KEY AUTOINCREMENT,
            namespace TEXT NOT NULL,
            started_at REAL NOT NULL,
            finished_at REAL,        -- NULL: running, or it was killed
            summary TEXT             -- JSON object
        )""",
    ),
    (
        """CREATE TABLE doomed (         -- chunks that went, and whose KV files may still be there
            key INTEGER PRIMARY KEY AUTOINCREMENT,
            namespace TEXT NOT NULL,
            tokens BLOB NOT NULL
        )""",
    ),
    ("ALTER TABLE documents ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0",),
    (
        """CREATE TABLE scores (
            chunk INTEGER NOT NULL REFERENCES chunks (key) ON DELETE CASCADE,
            model TEXT NOT NULL,     -- and what the chunk's KV is computed behind
            scores BLOB NOT NULL,    -- float32 little endian, one a token
            PRIMARY KEY (chunk, model)
        ) WITHOUT ROWID""",
    ),
    (
        """CREATE TABLE kv_reserved (    -- see lazyrag/quota.py
            namespace TEXT PRIMARY KEY,
            num_bytes INTEGER NOT NULL
        ) WITHOUT ROWID""",
    ),
    ("CREATE INDEX documents_pinned ON documents (namespace) WHERE pinned",),
)


def migrate(connection: sqlite3.Connection, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Bring a file to the newest schema. A new file starts at version 0. Two processes may do so at once.

    Args:
        connection: in autocommit mode (`isolation_level=None`).
        migrations: the steps.

    Raises:
        StoreError: a newer LazyRAG made the file, or something else did.
    """
    if _version(connection, len(migrations)) == len(migrations):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Read again: another process may have migrated the file while this one waited for the lock.
        for step in migrations[_version(connection, len(migrations)) :]:
            for statement in step:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(migrations)}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def is_empty(connection: sqlite3.Connection) -> bool:
    """Whether the file holds nothing at all: it was never a store, or is none any more."""
    return not (
        connection.execute("PRAGMA user_version").fetchone()[0]
        or connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    )


def _version(connection: sqlite3.Connection, newest: int) -> int:
    """The schema version of a store, 0 for an empty file.

    Raises:
        StoreError: the file is not a store, or one of a newer LazyRAG.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application != APPLICATION_ID and (application or version or num_tables):
        raise StoreError("The file is an SQLite database of another program.", fix="Name another folder with --store.")
    if version > newest:
        raise StoreError(
            f"The store has schema {version}, this LazyRAG knows up to {newest}.",
            why="A newer LazyRAG made it.",
            fix="pip install -U lazyrag",
        )
    return int(version)
