import json
import logging

import numpy as np
import pytest

from lazyrag.errors import StoreError
from lazyrag.retrievers.store import FILE_NAME, Store
from lazyrag.retrievers.vectors import VectorIndex
from lazyrag.types import Chunk, Document, EncodedChunk, chunk_id

DIM = 16


def vector(name):
    """A fixed direction for each name."""
    numbers = np.random.default_rng(list(name.encode())).standard_normal(DIM).astype(np.float32)
    return numbers / np.linalg.norm(numbers)


def put(store, id, *texts, namespace=""):
    chunks = [EncodedChunk(Chunk(chunk_id(text), text, 1, id, id, 0, len(text)), (1,)) for text in texts]
    vectors = {e.chunk.id: vector(e.chunk.text) for e in chunks}
    store.put_document(Document(id, "", id), chunks, vectors=vectors, namespace=namespace)


def nearest(index, text, k=10):
    return [id for id, _ in index.search(vector(text), k)]


def fresh(store, namespace=""):
    index = VectorIndex(store, namespace)
    index.refresh()
    return index


def rebuilt(store):
    """The index as it is without a file."""
    path = VectorIndex(store).path
    kept = path.rename(path.with_suffix(".kept"))
    index = fresh(store)
    kept.rename(path)
    return index


def same(index, other):
    return sorted(index.search(vector("probe"), 100)) == sorted(other.search(vector("probe"), 100))


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path, create=True) as store:
        yield store


@pytest.fixture
def loads(monkeypatch):
    """Counts the vectors that are read from the store: none if the file was good."""
    read = []
    get_vectors = Store.get_vectors

    def counting(self, keys):
        read.extend(keys)
        return get_vectors(self, keys)

    monkeypatch.setattr(Store, "get_vectors", counting)
    return read


def test_the_nearest_chunks_come_first_with_their_inner_products(store):
    names = [f"chunk {i}" for i in range(50)]
    put(store, "a", *names)
    products = np.array([vector(name) for name in names]) @ vector("query")
    found = fresh(store).search(vector("query"), 5)
    assert [id for id, _ in found] == [chunk_id(names[i]) for i in np.argsort(-products)[:5]]
    assert [score for _, score in found] == pytest.approx(sorted(products, reverse=True)[:5], abs=1e-6)


def test_an_empty_namespace_and_a_k_beyond_the_end_are_no_errors(store):
    index = fresh(store)
    assert index.search(vector("query"), 3) == []
    put(store, "a", "one")
    index.refresh()
    assert nearest(index, "one", 0) == []
    assert nearest(index, "one", 99) == [chunk_id("one")]
    assert fresh(store, "tenant").search(vector("one"), 3) == []


def test_refresh_follows_what_is_added_changed_and_deleted(store):
    index = fresh(store)
    put(store, "a", "one", "two")
    put(store, "b", "three")
    assert len(index) == 0
    index.refresh()
    assert len(index) == 3
    put(store, "a", "two", "four")
    store.delete_document("b")
    index.refresh()
    assert sorted(nearest(index, "one")) == sorted([chunk_id("two"), chunk_id("four")])
    assert same(index, fresh(store))


def test_a_chunk_deleted_since_the_last_refresh_is_not_found(store):
    put(store, "a", "one", "two")
    index = fresh(store)
    put(store, "a", "two")
    assert nearest(index, "one") == [chunk_id("two")]


def test_a_saved_index_is_read_instead_of_made_again(store, loads):
    put(store, "a", "one", "two")
    fresh(store).save()
    loads.clear()
    again = fresh(store)
    assert nearest(again, "one")[0] == chunk_id("one")
    assert loads == []


def test_an_index_in_memory_reads_only_what_is_new(store, loads):
    put(store, "a", "one", "two")
    index = fresh(store)
    put(store, "a", "two", "three")
    loads.clear()
    index.refresh()
    assert len(loads) == 1
    assert sorted(nearest(index, "one")) == sorted([chunk_id("two"), chunk_id("three")])


def test_a_file_of_another_generation_is_not_used(store, caplog):
    put(store, "a", "one", "two")
    fresh(store).save()
    put(store, "a", "two", "three")
    assert same(fresh(store), rebuilt(store))
    assert caplog.text == ""  # nothing is wrong with it


def test_a_store_restored_from_a_backup_never_meets_the_vectors_of_what_came_after_it(tmp_path):
    with Store.open(tmp_path, create=True) as store:
        put(store, "a", "one")
    backup = (tmp_path / FILE_NAME).read_bytes()
    for version in ("two", "three"):
        # The keys and the number of writes are the same each time, and the vector file is that of the time before.
        (tmp_path / FILE_NAME).write_bytes(backup)
        with Store.open(tmp_path) as store:
            assert nearest(fresh(store), version) == [chunk_id("one")]
            put(store, "b", version)
            index = fresh(store)
            index.save()
            assert same(index, rebuilt(store))
            assert nearest(index, version, 1) == [chunk_id(version)]


def test_an_index_that_is_up_to_date_is_not_written_again(store):
    put(store, "a", "one")
    index = fresh(store)
    index.save()
    before = index.path.stat().st_mtime_ns
    index.save()
    fresh(store).save()
    assert index.path.stat().st_mtime_ns == before
    assert [path.name for path in index.path.parent.iterdir()] == [index.path.name]


def test_every_damage_is_noticed_and_the_index_is_made_again(store, caplog):
    put(store, "a", *(f"chunk {i}" for i in range(5)))
    index = fresh(store)
    index.save()
    whole = index.path.read_bytes()
    body = whole.index(b"\n") + 1
    damaged = [whole[:n] for n in (0, 1, body - 1, body, body + 1, len(whole) - 1)] + [whole + b"x", b"[]\n", b"\n\n"]
    for place in (0, whole.index(store.id.encode()), whole.index(b'"checksum"'), body, body + 20, len(whole) - 1):
        damaged.append(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    for content in damaged:
        index.path.write_bytes(content)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert same(fresh(store), index)
        assert "made again" in caplog.text
    fresh(store).save()
    caplog.clear()
    assert same(fresh(store), index)
    assert caplog.text == ""


def test_a_file_of_another_store_or_namespace_is_not_used(store, tmp_path, caplog):
    put(store, "a", "one")
    index = fresh(store)
    index.save()
    with Store.open(tmp_path / "other", create=True) as other:
        put(other, "a", "two")
        path = VectorIndex(other).path
        path.parent.mkdir()
        path.write_bytes(index.path.read_bytes())
        assert nearest(fresh(other), "one") == [chunk_id("two")]
    assert "of another store" in caplog.text
    put(store, "a", "three", namespace="tenant")
    VectorIndex(store, "tenant").path.write_bytes(index.path.read_bytes())
    assert nearest(fresh(store, "tenant"), "one") == [chunk_id("three")]


def test_the_file_holds_no_pickle_and_says_what_it_is(store):
    put(store, "a", "one")
    index = fresh(store)
    index.save()
    head = json.loads(index.path.read_bytes().partition(b"\n")[0])
    assert head["format"] == 2
    assert head["store"] == store.id
    assert head["generation"] == store.generation()


def test_a_save_that_fails_leaves_the_old_file(store, monkeypatch):
    put(store, "a", "one")
    fresh(store).save()
    put(store, "a", "two")
    index = fresh(store)
    before = index.path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StoreError, match=r"No space left on device\. Nothing is lost"):
        index.save()
    assert index.path.read_bytes() == before
    assert len(list(index.path.parent.iterdir())) == 1


def test_a_vector_of_another_length_is_refused(store):
    put(store, "a", "one")
    with pytest.raises(StoreError, match="different embedders"):
        fresh(store).search(np.ones(3, np.float32), 1)


def test_vectors_of_different_lengths_in_one_store_are_refused(store):
    put(store, "a", "one")
    chunk = Chunk(chunk_id("two"), "two", 1, "b", "b", 0, 3)
    store.put_document(Document("b", "", "b"), [EncodedChunk(chunk, (1,))], vectors={chunk.id: np.ones(3, np.float32)})
    with pytest.raises(StoreError, match="different lengths"):
        fresh(store)
