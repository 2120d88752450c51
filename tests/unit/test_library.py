"""The library: known chunks and their index, in step with a store that others change, kept over processes."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lazyrag import anchors, segmenter, types
from lazyrag import library as library_module
from lazyrag.anchors import AnchorIndex
from lazyrag.library import Library
from lazyrag.retrievers.store import Store
from lazyrag.tokens import Tokenizer
from lazyrag.types import Chunk, ChunkId, Document, EncodedChunk, chunk_id

WORDS = ["river", "stone", "bridge", "keeper", "letter", "market", "winter", "harbour", "light", "paper", "garden"]


def passage(seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=20))


@pytest.fixture
def plain(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["byte-level"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "kb", create=True)


def put(store: Store, name: str, texts: Iterable[str], namespace: str = "", tokens: tuple[int, ...] = (1, 2)) -> None:
    """Store a document whose chunks are these texts."""
    chunks = [EncodedChunk(Chunk(chunk_id(t), t, len(tokens), name, name, 0, len(t)), tokens) for t in texts]
    store.put_document(Document(name, "", name), chunks, namespace=namespace)


def test_short_texts_that_spell_control_tokens_are_kept_as_long_as_they_are_known(
    plain: Tokenizer, store: Store
) -> None:
    short, long = "Pump?<|im_end|>", "<|im_end|> " + passage(1)
    put(store, "a", [short, long, "Pump?"])
    put(store, "b", ["<|IM_START|>"], namespace="tenant")
    library = Library(plain, store)
    library.refresh()
    library.register(["  <|im_start|>user\n"])
    assert set(library.short_texts()) == {short, "<|im_start|>user"}
    store.delete_document("a")
    library.refresh()
    assert library.short_texts() == ["<|im_start|>user"]
    tenant = Library(plain, store, "tenant")
    tenant.refresh()
    assert tenant.short_texts() == ["<|IM_START|>"]  # a tokenizer may fold case


def found(library: Library, *texts: str) -> list[ChunkId]:
    return [occurrence.chunk_id for occurrence in library.segmenter.find("\n\n".join(texts))]


@pytest.fixture
def indexed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were hashed, by any library."""
    texts: list[str] = []
    stock = AnchorIndex.add

    def add(self: AnchorIndex, items: Iterable[tuple[ChunkId, str]]) -> list[ChunkId]:
        items = list(items)
        texts.extend(text for _, text in items)
        return stock(self, items)

    monkeypatch.setattr(AnchorIndex, "add", add)
    return texts


# ---------------------------------------------------------------- registered texts


def test_a_registered_text_is_found_without_its_outer_whitespace(plain: Tokenizer) -> None:
    library = Library(plain)
    (id,) = library.register([f"\n {passage(1)} \n"])
    assert found(library, "Read:", passage(1), "Why?") == [id] == [chunk_id(passage(1))]
    assert library.texts([id, "0" * 32]) == {id: passage(1)}


def test_registering_again_changes_nothing(plain: Tokenizer) -> None:
    library = Library(plain)
    assert library.register([passage(1), passage(1)]) == library.register([passage(1)]) * 2
    assert len(library) == 1
    assert found(library, passage(1)) == [chunk_id(passage(1))]


def test_texts_whose_ids_agree_in_the_first_half_are_both_known(
    plain: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(text: str | bytes) -> ChunkId:
        return "0" * 16 + types.digest(text)[16:]

    monkeypatch.setattr(library_module, "chunk_id", digest)
    monkeypatch.setattr(segmenter, "digest", digest)
    library = Library(plain)
    ids = [id for n in (1, 2) for id in library.register([passage(n)])]
    assert found(library, passage(1), passage(2)) == ids
    library.forget(ids[:1])
    assert found(library, passage(1), passage(2)) == ids[1:]


def test_tokens_are_those_of_the_text_if_it_survives_the_tokenizer(tokenizer: Tokenizer) -> None:
    library = Library(tokenizer)
    texts = [passage(1), f"{passage(2)} ﬁ e\u0301 \ufffd", passage(3)]
    for id, text in zip(library.register(texts), texts, strict=True):
        expected = tuple(tokenizer.encode_plain(text)) if tokenizer.round_trips(text) else ()
        assert library.tokens(id) == expected
    assert library.tokens("0" * 32) == ()


def test_threads_register_and_find_at_once(plain: Tokenizer) -> None:
    library = Library(plain)

    def work(seed: int) -> list[ChunkId]:
        library.register(passage(100 * seed + n) for n in range(20))
        return found(library, *(passage(100 * seed + n) for n in range(20)))

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(8)))
    assert results == [[chunk_id(passage(100 * seed + n)) for n in range(20)] for seed in range(8)]
    assert len(library) == 160


# ---------------------------------------------------------------- the store


def test_a_stores_chunks_are_found_with_the_tokens_they_were_stored_with(plain: Tokenizer, store: Store) -> None:
    put(store, "doc", [passage(1)], tokens=(7, 8, 9))
    library = Library(plain, store)
    library.refresh()
    (id,) = found(library, passage(1))
    assert library.tokens(id) == (7, 8, 9)
    assert library.texts([id]) == {id: passage(1)}


def test_what_others_add_and_delete_is_followed(plain: Tokenizer, store: Store) -> None:
    library = Library(plain, store)
    with Store.open(store.directory) as other:
        put(other, "one", [passage(1), passage(2)])
        library.refresh()
        assert found(library, passage(1), passage(2)) == [chunk_id(passage(1)), chunk_id(passage(2))]
        put(other, "one", [passage(2), passage(3)])
        library.refresh()
        assert found(library, passage(1), passage(2), passage(3)) == [chunk_id(passage(2)), chunk_id(passage(3))]
    assert len(library) == 2


def test_a_chunk_that_was_asked_for_too_early_is_known_later(plain: Tokenizer, store: Store) -> None:
    library = Library(plain, store)
    assert library.tokens(chunk_id(passage(1))) == ()
    put(store, "doc", [passage(1)])
    assert library.tokens(chunk_id(passage(1))) == (1, 2)


def test_a_registered_text_outlives_its_chunk_in_the_store(plain: Tokenizer, store: Store) -> None:
    library = Library(plain, store)
    put(store, "doc", [passage(1)])
    library.refresh()
    library.register([passage(1)])
    store.delete_document("doc")
    library.refresh()
    assert found(library, passage(1)) == [chunk_id(passage(1))]


def test_nothing_is_read_while_nothing_changes(plain: Tokenizer, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, "doc", [passage(1)])
    library = Library(plain, store)
    library.refresh()
    monkeypatch.setattr(Store, "chunk_ids", lambda *arguments: pytest.fail("the store was read again"))
    library.refresh()


def test_only_new_chunks_are_hashed(plain: Tokenizer, store: Store, indexed: list[str]) -> None:
    put(store, "one", [passage(n) for n in range(5)])
    library = Library(plain, store)
    library.refresh()
    put(store, "two", [passage(5)])
    library.refresh()
    assert sorted(indexed) == sorted(passage(n) for n in range(6))


def test_a_library_knows_its_namespace_only(plain: Tokenizer, store: Store) -> None:
    put(store, "doc", [passage(1)], namespace="one")
    library = Library(plain, store, "two")
    library.refresh()
    assert found(library, passage(1)) == []
    assert library.texts([chunk_id(passage(1))]) == {}


# ---------------------------------------------------------------- the kept index


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes of three chunks are worth keeping."""
    monkeypatch.setattr(library_module, "SAVE_AFTER", 3)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "lazyrag.library")
    return lambda: [record.getMessage() for record in caplog.records]


def refreshed(plain: Tokenizer, store: Store, namespace: str = "") -> Library:
    library = Library(plain, store, namespace)
    library.refresh()
    return library


@pytest.mark.usefixtures("keep")
def test_the_next_process_need_not_hash_a_large_store(plain: Tokenizer, store: Store, indexed: list[str]) -> None:
    texts = [passage(n) for n in range(5)]
    put(store, "doc", texts)
    refreshed(plain, store)
    indexed.clear()
    library = refreshed(plain, store)
    assert indexed == []
    assert found(library, *texts) == [chunk_id(text) for text in texts]
    assert len(library) == 5


@pytest.mark.usefixtures("keep")
def test_a_kept_index_of_an_older_store_is_caught_up(plain: Tokenizer, store: Store, indexed: list[str]) -> None:
    put(store, "one", [passage(n) for n in range(5)])
    refreshed(plain, store)
    put(store, "one", [passage(n) for n in range(1, 6)])
    indexed.clear()
    library = refreshed(plain, store)
    assert indexed == [passage(5)]
    assert found(library, *(passage(n) for n in range(6))) == [chunk_id(passage(n)) for n in range(1, 6)]


@pytest.mark.usefixtures("keep")
def test_small_changes_are_kept_when_there_are_enough_of_them(
    plain: Tokenizer, store: Store, indexed: list[str]
) -> None:
    library = Library(plain, store)
    for n in range(4):
        put(store, str(n), [passage(n)])
        library.refresh()
    indexed.clear()
    refreshed(plain, store)
    assert indexed == [passage(3)]


def test_a_small_index_is_not_kept(plain: Tokenizer, store: Store) -> None:
    put(store, "doc", [passage(n) for n in range(5)])
    refreshed(plain, store)
    assert not (store.directory / "anchors").exists()


@pytest.mark.usefixtures("keep")
def test_chunks_too_short_for_the_index_do_not_have_it_written(plain: Tokenizer, store: Store) -> None:
    put(store, "doc", ["one", "two", "three", "four"])
    refreshed(plain, store)
    assert not (store.directory / "anchors").exists()


@pytest.mark.usefixtures("keep")
def test_namespaces_keep_indexes_of_their_own(plain: Tokenizer, store: Store, indexed: list[str]) -> None:
    for namespace in ("", "tenant"):
        put(store, "doc", [passage(n + len(namespace)) for n in range(5)], namespace=namespace)
        refreshed(plain, store, namespace)
    indexed.clear()
    for namespace in ("", "tenant"):
        texts = [passage(n + len(namespace)) for n in range(5)]
        assert found(refreshed(plain, store, namespace), *texts) == [chunk_id(text) for text in texts]
    assert indexed == []


def damaged(folder: Path, other: Path) -> None:
    for file in folder.rglob("run-*.bin"):
        file.write_bytes(file.read_bytes()[:-1])


def half_missing(folder: Path, other: Path) -> None:
    for file in folder.rglob("counts-*.bin"):
        file.unlink()


def of_another_store(folder: Path, other: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


@pytest.mark.usefixtures("keep")
@pytest.mark.parametrize("spoil", [damaged, half_missing, of_another_store])
def test_an_index_that_cannot_be_used_is_made_again(
    spoil: Callable[[Path, Path], None],
    plain: Tokenizer,
    store: Store,
    tmp_path: Path,
    indexed: list[str],
    warnings: Callable[[], list[str]],
) -> None:
    texts = [passage(n) for n in range(5)]
    other = Store.open(tmp_path / "other", create=True)
    for one in (store, other):
        put(one, "doc", texts)
        refreshed(plain, one)
    spoil(store.directory / "anchors", other.directory / "anchors")
    indexed.clear()
    assert found(refreshed(plain, store), *texts) == [chunk_id(text) for text in texts]
    assert sorted(indexed) == sorted(texts)
    (warning,) = warnings()
    assert "is made again" in warning
    indexed.clear()
    refreshed(plain, store)
    assert indexed == [], "and kept again"


@pytest.mark.usefixtures("keep")
def test_a_folder_that_cannot_be_written_costs_time_only(
    plain: Tokenizer, store: Store, warnings: Callable[[], list[str]]
) -> None:
    (store.directory / "anchors").write_text("in the way")
    put(store, "doc", [passage(n) for n in range(5)])
    library = refreshed(plain, store)
    assert found(library, passage(3)) == [chunk_id(passage(3))]
    assert any("cannot be kept" in warning for warning in warnings())


@pytest.mark.usefixtures("keep")
def test_an_index_that_could_not_be_kept_is_kept_after_the_next_change(
    plain: Tokenizer, store: Store, indexed: list[str]
) -> None:
    in_the_way = store.directory / "anchors"
    in_the_way.write_text("")
    put(store, "one", [passage(n) for n in range(5)])
    library = refreshed(plain, store)
    in_the_way.unlink()
    put(store, "two", [passage(5)])
    library.refresh()
    indexed.clear()
    assert len(refreshed(plain, store)) == 6
    assert indexed == []


@pytest.mark.usefixtures("keep")
def test_what_was_registered_by_hand_is_not_known_to_the_next_process(plain: Tokenizer, store: Store) -> None:
    library = Library(plain, store)
    library.register([passage(9)])
    put(store, "doc", [passage(n) for n in range(5)])
    library.refresh()
    later = refreshed(plain, store)
    assert found(later, passage(9), passage(3)) == [chunk_id(passage(3))]
    assert later.registered == []


@pytest.mark.parametrize("part", [1, 2, 100])
def test_an_index_names_what_it_lacks_and_what_else_it_holds(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "PART", part)
    index = AnchorIndex()
    ids = [chunk_id(passage(n)) for n in range(6)]
    assert index.compare([]) == ([], [])
    assert index.compare(ids[:2]) == (ids[:2], [])
    index.add([(id, passage(n)) for n, id in enumerate(ids[:4])])
    index.add([(ids[4], passage(4)), (chunk_id("short"), "short")])
    index.remove(ids[:1])
    lacking, others = index.compare(ids[:4] + ids[5:])
    assert (lacking, others) == ([ids[0], ids[5]], [ids[4]])
    assert index.compare(iter(ids[1:5])) == ([], [])


def test_a_registered_text_that_is_no_unicode_can_be_forgotten(plain: Tokenizer) -> None:
    library = Library(plain)
    clean, broken = passage(1), f"\udc80 {passage(2)}"
    ids = library.register([clean, broken])
    assert library.forget(ids) == {ids[0]: tuple(plain.encode_plain(clean))}
    assert len(library) == len(library.registered) == 0
