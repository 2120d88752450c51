import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from lazyrag.errors import InputError, QuotaError, StoreError
from lazyrag.retrievers import migrations
from lazyrag.retrievers.migrations import MIGRATIONS, migrate
from lazyrag.retrievers.store import FILE_NAME, NO_QUOTA, Change, Store
from lazyrag.types import Chunk, Document, EncodedChunk, Quota, chunk_id


def document(id, *texts, **fields):
    """A document whose chunks are these texts, a blank line between them."""
    return Document(id, "\n\n".join(texts), fields.pop("source", f"{id}.md"), **fields)


def encoded(document):
    chunks, start = [], 0
    for text in document.text.split("\n\n"):
        ids = tuple(len(word) for word in text.split()) if "unstable" not in text else ()
        place = Chunk(
            chunk_id(text),
            text,
            len(text.split()),
            document.id,
            document.source,
            start,
            start + len(text),
            page=start + 1,
        )
        chunks.append(EncodedChunk(place, ids))
        start += len(text) + 2
    return chunks


def vectors(document):
    """A vector that tells the text: its first two characters."""
    return {e.chunk.id: np.array([ord(c) for c in e.chunk.text[:2]], np.float32) for e in encoded(document)}


def put(store, id, *texts, namespace="", quota=NO_QUOTA, **fields):
    doc = document(id, *texts, **fields)
    return store.put_document(
        doc, encoded(doc), vectors=vectors(doc), sha256=f"sha {texts}", namespace=namespace, quota=quota
    )


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "store", create=True) as store:
        yield store


@pytest.mark.parametrize("name", ["_content", "_document"])
def test_a_document_cannot_pass_for_a_frameworks_node(store, name):
    with pytest.raises(InputError, match=f"LazyRAG keeps the name {name}"):
        put(store, "a", "one", metadata={name: "{}", "year": 1901})
    assert list(store.documents()) == []
    doc = document("a", "one", metadata={"year": 1901})
    store.put_document(doc, encoded(doc), own={name: "its own"})
    assert store.document("a").metadata == {"year": 1901, name: "its own"}


def contents(store, namespace=""):
    """Everything a reader can see of a namespace, in a form that can be compared."""
    ids = set(store.chunk_ids(namespace))
    return {
        "documents": list(store.documents(namespace)),
        "chunks": list(store.chunks(namespace)),
        "texts": dict(store.texts(namespace)),
        "tokens": store.get_tokens(ids, namespace),
        "vectors": {id: vector.tolist() for id, vector in store.vectors_of(ids, namespace).items()},
    }


# ---------------------------------------------------------------- documents and chunks


def test_what_is_put_can_be_read_back(store):
    change = put(store, "a", "red fox", "blue whale", title="Animals", metadata={"year": 2020, "draft": False})
    fox, whale = chunk_id("red fox"), chunk_id("blue whale")
    assert change == Change(added=(fox, whale))
    (stored,) = store.documents()
    assert (stored.id, stored.source, stored.title) == ("a", "a.md", "Animals")
    assert stored.metadata == {"year": 2020, "draft": False}
    assert set(store.chunk_ids()) == {fox, whale}
    assert store.get_texts([whale, "unknown"]) == {whale: "blue whale"}
    assert store.get_tokens([fox, whale]) == {fox: (3, 3), whale: (4, 5)}
    assert list(store.texts()) == [(fox, "red fox"), (whale, "blue whale")]
    place = store.spans_of([whale])[whale]
    assert place == [Chunk(whale, "blue whale", 2, "a", "a.md", 9, 19, 10, "Animals", stored.metadata)]
    assert [chunk.text for chunk in store.chunks()] == ["red fox", "blue whale"]
    assert store.vectors_of([fox])[fox].tolist() == [ord("r"), ord("e")]


def test_token_ids_keep_all_their_32_bits(store):
    doc = document("a", "text")
    chunk = encoded(doc)[0].chunk
    store.put_document(doc, [EncodedChunk(chunk, (0, 1, 2**32 - 1))])
    assert store.get_tokens([chunk.id]) == {chunk.id: (0, 1, 2**32 - 1)}


def test_a_chunk_that_does_not_round_trip_has_text_but_no_tokens(store):
    put(store, "a", "unstable text")
    id = chunk_id("unstable text")
    assert store.get_texts([id]) == {id: "unstable text"}
    assert store.get_tokens([id]) == {}
    assert list(store.unwarmed("f")) == []
    assert store.stats()["reusable"] == 0


def test_one_text_in_many_places_is_one_chunk_that_lives_as_long_as_one_of_them(store):
    put(store, "a", "shared", "own of a", "shared")
    assert put(store, "b", "shared").added == ()
    id = chunk_id("shared")
    assert [(place.document_id, place.start) for place in store.spans_of([id])[id]] == [("a", 0), ("a", 18), ("b", 0)]
    assert store.delete_document("a") == Change(removed=(chunk_id("own of a"),))
    assert [place.document_id for place in store.spans_of([id])[id]] == ["b"]
    assert store.delete_document("b") == Change(removed=(id,))
    assert store.stats() | {"bytes": 0} == dict.fromkeys(
        ("documents", "chunks", "tokens", "reusable", "spans", "vectors", "bytes"), 0
    )


def test_a_changed_document_replaces_its_old_version_and_keeps_what_stays(store):
    put(store, "a", "stays", "goes")
    key = store.vector_keys()[0]
    store.mark_warm([chunk_id("stays")], "engine")
    change = put(store, "a", "comes", "stays", title="New")
    assert change == Change(added=(chunk_id("comes"),), removed=(chunk_id("goes"),))
    assert [(chunk.text, chunk.title) for chunk in store.chunks()] == [("comes", "New"), ("stays", "New")]
    assert store.ids_of([key]) == {key: chunk_id("stays")}
    assert [id for id, _ in store.unwarmed("engine")] == [chunk_id("comes")]
    assert store.check() == []


def test_deleting_an_unknown_document_changes_nothing(store):
    put(store, "a", "text")
    before = store.generation()
    assert store.delete_document("b") == Change()
    assert store.generation() == before


def test_a_write_that_fails_leaves_the_old_version(store):
    put(store, "a", "old text")
    before, generation = contents(store), store.generation()
    with pytest.raises(InputError, match="lone surrogate") as error:
        put(store, "a", "new text", "half \ud800 a pair")
    assert "pair" not in str(error.value)
    assert error.value.__context__.object == ""
    assert contents(store) == before
    assert store.generation() == generation
    assert store.check() == []


def test_the_keys_of_deleted_chunks_are_never_given_again(store):
    put(store, "a", "one", "two")
    old = set(store.vector_keys().tolist())
    store.delete_document("a")
    put(store, "a", "one", "two")
    assert old.isdisjoint(store.vector_keys().tolist())


def test_namespaces_know_nothing_of_each_other(store):
    put(store, "a", "secret text", namespace="tenant")
    put(store, "a", "secret text", "more")
    id = chunk_id("secret text")
    other = contents(store)
    store.mark_warm([id], "engine", "tenant")
    assert [i for i, _ in store.unwarmed("engine")] == [id, chunk_id("more")]
    store.delete_document("a", "tenant")
    assert contents(store) == other
    assert contents(store, "tenant") == contents(store, "stranger")
    assert store.get_texts([id], "tenant") == store.spans_of([id], "tenant") == store.vectors_of([id], "tenant") == {}
    assert store.ids_of(store.vector_keys(), "tenant") == {}


def test_a_namespace_that_is_not_unicode_is_refused_by_reads_and_writes(store):
    for use in (
        store.generation,
        store.stats,
        lambda name: set(store.chunk_ids(name)),
        lambda name: put(store, "a", "text", namespace=name),
    ):
        with pytest.raises(InputError, match="the namespace holds a lone surrogate"):
            use("\ud800")


def test_long_lists_are_read_a_page_at_a_time(store, monkeypatch):
    monkeypatch.setattr("lazyrag.retrievers.store._PAGE", 3)
    names = [f"{i:02}" for i in range(10)]
    for name in names:
        put(store, name, f"text {name}", "shared")
    assert [stored.id for stored in store.documents()] == names
    assert len(list(store.texts())) == 11
    # What is written between two pages does no harm.
    seen = []
    for id, _ in store.unwarmed("engine"):
        store.mark_warm([id], "engine")
        seen.append(id)
    assert len(seen) == len(set(seen)) == 11


def test_the_generation_is_another_after_every_change_of_the_namespace_and_only_then(store):
    generations = [store.generation()]
    put(store, "a", "one")
    generations.append(store.generation())
    put(store, "a", "two")
    generations.append(store.generation())
    store.delete_document("a")
    generations.append(store.generation())
    store.put_vectors({chunk_id("two"): np.ones(2, np.float32)})
    generations.append(store.generation())
    assert len(generations) == len(set(generations))
    put(store, "a", "elsewhere", namespace="tenant")
    store.mark_warm([chunk_id("elsewhere")], "engine", "tenant")
    assert store.generation() == generations[-1]


def test_a_store_that_repeats_its_history_from_a_backup_repeats_no_generation(tmp_path):
    seen = []
    with Store.open(tmp_path / "a", create=True) as store:
        put(store, "a", "one")
        seen.append(store.generation())
    backup = (tmp_path / "a" / FILE_NAME).read_bytes()
    for text in ("two", "three"):
        (tmp_path / "a" / FILE_NAME).write_bytes(backup)
        with Store.open(tmp_path / "a") as store:
            put(store, "b", text)
            seen.append(store.generation())
    assert len(set(seen)) == 3


def test_chunks_without_a_vector_are_listed_until_they_get_one_which_they_keep(store):
    doc = document("a", "one", "two", "three")
    one, two, three = (chunk_id(text) for text in ("one", "two", "three"))
    store.put_document(doc, encoded(doc), vectors={one: np.ones(2, np.float32)})
    put(store, "b", "one", namespace="tenant")
    assert store.without_vector() == [two, three]
    store.put_vectors({two: np.ones(2, np.float32), one: np.zeros(2, np.float32), "unknown": np.ones(2, np.float32)})
    assert store.without_vector() == [three]
    assert store.vectors_of([one])[one].tolist() == [1, 1]
    store.put_document(doc, encoded(doc), vectors={three: np.ones(2, np.float32)})
    assert store.without_vector() == store.without_vector("tenant") == store.check() == []


def test_the_check_counts_chunks_without_a_vector_if_the_store_has_an_embedder(store):
    doc = document("a", "one", "two")
    store.put_document(doc, encoded(doc), namespace="tenant")
    store.require(tokenizer="t1")
    assert store.check() == []
    store.require(embedding="hash")
    (problem,) = store.check()
    assert "2 chunks of namespace 'tenant' have no vector" in problem
    store.put_vectors(vectors(doc), "tenant")
    assert store.check() == []


# ---------------------------------------------------------------- settings and journal


def test_the_store_keeps_its_identity_and_secret(tmp_path):
    with Store.open(tmp_path / "a", create=True) as store, Store.open(tmp_path / "b", create=True) as other:
        id, secret = store.id, store.secret
        assert id != other.id
        assert secret != other.secret
        assert len(secret) == 32
    with Store.open(tmp_path / "a") as store:
        assert (store.id, store.secret) == (id, secret)
        assert store.settings() == {}


def test_a_store_is_tied_to_its_settings(store):
    store.require(tokenizer="t1", embedder="minilm")
    store.require(tokenizer="t1")
    with pytest.raises(StoreError, match=r"made with embedder minilm, not hash\..*--store"):
        store.require(tokenizer="t1", embedder="hash", more="x")
    assert store.settings() == {"tokenizer": "t1", "embedder": "minilm"}
    store.remember(model="a")
    store.remember(model="b")
    assert store.settings()["model"] == "b"


def test_warm_chunks_are_noted_for_each_engine(store):
    put(store, "a", "one", "two")
    one, two = chunk_id("one"), chunk_id("two")
    store.mark_warm([one, "unknown"], "engine")
    assert list(store.unwarmed("engine")) == [(two, (3,))]
    assert store.num_unwarmed("engine") == 1
    assert store.num_unwarmed("another") == 2
    put(store, "a", "one", namespace="tenant")
    store.mark_warm([one], "engine", "tenant")
    assert (store.num_warm("engine"), store.num_warm("another")) == (2, 0)
    store.forget_warm("engine")
    assert store.num_unwarmed("engine") == 2


def test_a_run_that_never_ended_can_be_seen(store):
    assert store.last_run() is None
    run = store.start_run()
    assert store.last_run().finished_at is None
    store.finish_run(run, {"added": 3})
    assert store.last_run().finished_at >= store.last_run().started_at
    assert store.last_run().summary == {"added": 3}
    assert store.last_run("tenant") is None


# ---------------------------------------------------------------- opening, schemas, damage


def test_there_must_be_a_store_unless_one_is_to_be_made(tmp_path):
    with pytest.raises(StoreError, match=r"no store in .*lazyrag ingest PATH --store"):
        Store.open(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_an_empty_path_is_not_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="empty path"):
        Store.open("", create=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", "an empty database"], ids=str)
def test_an_empty_file_is_damaged_and_never_taken_for_a_new_store(tmp_path, monkeypatch, content):
    path = tmp_path / FILE_NAME
    path.write_bytes(b"")
    if content:
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.close()
        assert path.stat().st_size
    before = path.read_bytes()
    monkeypatch.setattr("lazyrag.retrievers.store._BEING_MADE_S", 0.05)
    with pytest.raises(StoreError, match=r"damaged or no store: it is empty\..*restore a backup"):
        Store.open(tmp_path)
    assert path.read_bytes() == before
    Store.open(tmp_path, create=True).close()  # what is left of a process that was killed while it made the store
    Store.open(tmp_path).close()


def test_a_store_that_another_process_is_making_is_waited_for(tmp_path, monkeypatch):
    (tmp_path / FILE_NAME).write_bytes(b"")
    monkeypatch.setattr("time.sleep", lambda seconds: Store.open(tmp_path, create=True).close())
    with Store.open(tmp_path) as store:
        assert store.id


def test_a_file_of_version_1_is_brought_up_to_date_with_its_contents(tmp_path, monkeypatch):
    path = tmp_path / FILE_NAME
    connection = sqlite3.connect(path, isolation_level=None)
    migrate(connection, MIGRATIONS[:1])
    connection.execute("INSERT INTO meta VALUES ('embedder', 'hash')")
    connection.close()
    added = ("ALTER TABLE documents ADD COLUMN language TEXT", "UPDATE meta SET value = value || '-2'")
    monkeypatch.setattr(migrations, "MIGRATIONS", (*MIGRATIONS, added))
    for _ in range(2):  # the second time there is nothing to do
        connection = sqlite3.connect(path, isolation_level=None)
        migrate(connection, migrations.MIGRATIONS)
        assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS) + 1,)
        connection.execute("SELECT language FROM documents")
        assert connection.execute("SELECT value FROM meta WHERE name = 'embedder'").fetchone() == ("hash-2",)
        connection.close()


def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path):
    connection = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
    migrate(connection)
    with pytest.raises(sqlite3.OperationalError):
        migrate(connection, (*MIGRATIONS, ("CREATE TABLE more (x)", "NO SQL")))
    assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
    assert not connection.execute("SELECT * FROM sqlite_master WHERE name = 'more'").fetchall()
    connection.close()


def test_a_newer_schema_is_refused(tmp_path):
    Store.open(tmp_path, create=True).close()
    connection = sqlite3.connect(tmp_path / FILE_NAME)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreError, match=r"schema 99.*newer LazyRAG made it\. pip install -U lazyrag"):
        Store.open(tmp_path)


def test_another_programs_database_is_refused_and_left_alone(tmp_path):
    connection = sqlite3.connect(tmp_path / FILE_NAME)
    connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    with pytest.raises(StoreError, match="database of another program"):
        Store.open(tmp_path)
    connection = sqlite3.connect(tmp_path / FILE_NAME)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]
    connection.close()


def filled(folder):
    with Store.open(folder, create=True) as store:
        for i in range(40):
            put(store, f"d{i:02}", *(f"text {i} {j} " + "x" * 300 for j in range(8)))
    with sqlite3.connect(folder / FILE_NAME) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return folder / FILE_NAME


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(b"no database at all " * 100)
    with pytest.raises(StoreError, match="damaged or no store"):
        Store.open(tmp_path)


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.95])
def test_a_truncated_file_is_reported_never_read_as_if_it_were_whole(tmp_path, keep):
    path = filled(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])

    def read():
        with Store.open(tmp_path) as store:
            contents(store)

    with pytest.raises(StoreError, match="damaged"):
        read()


def test_pages_full_of_noise_are_reported_or_found_by_the_check(tmp_path):
    path = filled(tmp_path)
    whole = path.read_bytes()
    noise = random.Random(0)
    for page in range(1, len(whole) // 4096, 7):
        path.write_bytes(whole[: page * 4096] + noise.randbytes(4096) + whole[(page + 1) * 4096 :])
        try:
            with Store.open(tmp_path) as store:
                problems = store.check()
        except StoreError as error:
            problems = [str(error)]
        assert problems


def test_a_text_that_rotted_on_disk_is_found_by_the_check(tmp_path):
    path = filled(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"text 20 3 ", b"text 20 4 "))
    with Store.open(tmp_path) as store:
        assert any("not the one it was stored with" in problem for problem in store.check())


def test_a_locked_store_says_so(tmp_path):
    with Store.open(tmp_path, create=True) as store:
        other = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with Store.open(tmp_path, timeout_s=0.01) as impatient:
            with pytest.raises(StoreError, match=r"is locked\. Another process"):
                put(impatient, "a", "text")
            assert contents(impatient) == contents(store)  # readers do not mind
        other.execute("ROLLBACK")
        other.close()


def test_a_folder_that_cannot_be_made_is_a_store_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be opened"):
        Store.open(tmp_path / "file" / "store", create=True)


# ---------------------------------------------------------------- threads and processes


def test_threads_share_a_store(store):
    errors = []

    def work(number):
        try:
            for i in range(20):
                put(store, f"d{number}", f"text {number} {i}", "shared")
                texts = [chunk.text for chunk in store.chunks() if chunk.document_id == f"d{number}"]
                assert texts == [f"text {number} {i}", "shared"]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert store.stats()["chunks"] == 5
    assert store.check() == []


def _write_versions(folder, ready):
    with Store.open(folder) as store:
        for version in range(60):
            put(store, "a", *(f"version {version} part {part}" for part in range(5)))
            ready.set()


def test_a_reader_in_another_process_sees_whole_versions_while_one_writes(tmp_path):
    Store.open(tmp_path, create=True).close()
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    writer = context.Process(target=_write_versions, args=(tmp_path, ready))
    writer.start()
    seen = set()
    with Store.open(tmp_path) as store:
        assert ready.wait(60)
        while writer.is_alive():
            texts = [chunk.text for chunk in store.chunks()]
            versions = {text.split()[1] for text in texts}
            assert len(texts) == 5
            assert len(versions) == 1
            seen |= versions
        writer.join()
        assert [chunk.text for chunk in store.chunks()] == [f"version 59 part {part}" for part in range(5)]
    assert writer.exitcode == 0
    assert len(seen) > 1


def _create(folder, number):
    with Store.open(folder, create=True) as store:
        put(store, f"d{number}", f"text of {number}")


def test_processes_that_create_one_store_at_once_agree_on_it(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_create, args=(tmp_path / "s", n)) for n in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    with Store.open(tmp_path / "s") as store:
        assert store.stats()["documents"] == 3
        assert store.check() == []


def test_a_writer_that_is_killed_leaves_only_whole_documents(tmp_path):
    script = textwrap.dedent(
        """
        import sys
        from lazyrag.retrievers.store import Store
        from lazyrag.types import Chunk, Document, EncodedChunk, chunk_id
        store = Store.open(sys.argv[1], create=True)
        print("ready", flush=True)
        for version in range(10**9):
            chunks = []
            for part in range(50):
                text = f"version {version} part {part}"
                chunks.append(EncodedChunk(Chunk(chunk_id(text), text, 4, "a", "a", 0, len(text)), (1, 2, 3, 4)))
            store.put_document(Document("a", "", "a"), chunks)
        """
    )
    moments = random.Random(1)
    for _ in range(8):
        writer = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(moments.uniform(0.0, 0.15))
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        with Store.open(tmp_path) as store:
            chunks = list(store.chunks())
            assert len(chunks) in (0, 50)
            assert len({chunk.text.split()[1] for chunk in chunks}) <= 1
            assert store.check() == []


# ---------------------------------------------------------------- quotas and pins


@pytest.mark.parametrize(
    ("quota", "refused", "why"),
    [
        (Quota(documents=2), ("c", "one more"), "may hold 2 documents: it holds 2, and would hold 3"),
        (Quota(chunks=3), ("b", *"bcde"), "may hold 3 chunks: it holds 3, and would hold 5"),
    ],
)
def test_what_exceeds_a_quota_leaves_everything_as_it_was(store, quota, refused, why):
    put(store, "a", "alpha", quota=quota)
    put(store, "b", "beta", "gamma", quota=quota)
    before = list(store.documents()), store.generation(), set(store.chunk_ids())
    with pytest.raises(QuotaError, match=why):
        put(store, *refused, quota=quota)
    assert (list(store.documents()), store.generation(), set(store.chunk_ids())) == before
    put(store, "b", "beta", "delta", quota=quota)
    put(store, "c", "one more", namespace="another", quota=quota)


def test_a_namespace_that_holds_too_much_already_may_shrink_but_not_grow(store):
    quota = Quota(documents=1, chunks=1)
    for id in "abc":
        put(store, id, f"{id} one", f"{id} two")
    put(store, "a", "a one", quota=quota)
    with pytest.raises(QuotaError, match="may hold 1 chunks"):
        put(store, "a", "a one", "a two", quota=quota)
    with pytest.raises(QuotaError, match="may hold 1 documents"):
        put(store, "d", "a one", quota=quota)


def test_a_pin_covers_all_chunks_of_a_document_and_of_its_later_versions(store):
    put(store, "a", "one", "two")
    put(store, "b", "two", "three", "unstable four")
    put(store, "b", "one", namespace="another")
    assert [dict(store.pinned()), store.pin(["b", "none"]), store.pin(["b"])] == [{}, 1, 0]
    assert {document.id: document.pinned for document in store.documents()} == {"a": False, "b": True}
    assert dict(store.pinned()) == {chunk_id("two"): (3,), chunk_id("three"): (5,)}
    put(store, "b", "five")
    assert dict(store.pinned()) == {chunk_id("five"): (4,)}
    assert dict(store.pinned("another")) == {}
    with Store.open(store.directory) as again:
        assert again.document("b").pinned
        assert again.pin(["b"], pinned=False) == 1
    assert dict(store.pinned()) == {}
    assert store.document("none") is None


def test_pinning_changes_the_generation_so_that_others_see_it(store):
    put(store, "a", "one")
    before = store.generation()
    store.pin(["a"])
    assert store.generation() != before


def test_documents_are_listed_after_an_id(store):
    for id in "abc":
        put(store, id, "one")
    assert [document.id for document in store.documents(after="a")] == ["b", "c"]
