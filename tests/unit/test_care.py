"""Delete means delete, and what is damaged or needless is found: read from the tier's own folder."""

from __future__ import annotations

import json
import os
import random
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lazyrag import care
from lazyrag.backend.engine import Cancel, Deliver, Engine, Request, Sampling
from lazyrag.backend.tiers.disk import chunk_files
from lazyrag.care import CACHE, LEFTOVER, OTHER_MODEL, UNUSED, collect, find_waste, remove_doomed_kv, verify
from lazyrag.client import KVState, LazyRAG
from lazyrag.errors import InputError, StoreError
from lazyrag.records import Record
from lazyrag.retrievers.store import FILE_NAME, Store
from lazyrag.types import HBM, Document, chunk_id

A = "The quick brown fox jumps over the lazy dog, and the dog sleeps on until the evening comes again."
B = "In 1901 the first Nobel Prize in Physics was awarded to Wilhelm Conrad Röntgen, of Germany, for his rays."
C = "Context information is below. Given the context and no prior knowledge, answer the question in one line."
MODEL, OTHER = "0123456789abcdef" * 4, "fedcba9876543210" * 4


Connect = Callable[..., LazyRAG]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kb"


@pytest.fixture
def connect(model_folder: Callable[..., Path], folder: Path, saving_engine: Callable[..., Engine]) -> Iterator[Connect]:
    """A client of the store with an engine of its own."""
    model = model_folder("byte-level")
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    engines = []

    def make(fingerprint: str = MODEL, **settings: Any) -> LazyRAG:
        engines.append(saving_engine(model, folder / "kv", fingerprint, mode=settings.get("mode", "lazy")))
        return LazyRAG(engine=engines[-1], model=str(model), store=folder, embedder="hash", **settings)

    yield make
    for engine in engines:
        engine.close()


def put(rag: LazyRAG, **texts: str) -> None:
    """Ingest documents by id, their KV computed."""
    for _ in rag.ingest(documents=[Document(id, text, f"{id}.txt") for id, text in texts.items()]):
        pass


def prompt_of(*texts: str) -> str:
    return "Use these:\n\n" + "\n\n".join(texts) + "\n\nQuestion: Which?\nAnswer:"


def kv(folder: Path) -> set[Path]:
    return {file.path for file in chunk_files(folder / "kv")}


# ---------------------------------------------------------------- delete


def test_a_deleted_document_leaves_no_kv_of_any_model_or_preamble(connect: Connect, folder: Path) -> None:
    for settings in (
        {},
        {"fingerprint": OTHER},
        {"mode": "prefix", "preamble": "Be brief. "},
        {"mode": "prefix", "preamble": "Be kind. "},
    ):
        rag = connect(**settings)
        put(rag, a=A)
        assert rag.store is not None
        assert len(list(rag.warm(rag.store.chunk_ids()))) == 1
    of_a = kv(folder)
    assert len(of_a) == 4
    rag = connect()
    put(rag, b=B)
    of_b = kv(folder) - of_a
    assert of_b
    assert rag.delete(["a"]) == care.Deleted(documents=1, chunks=1, kv_files=4)
    assert kv(folder) == of_b


def test_a_head_of_a_chunk_that_a_prompt_has_shown_goes_with_the_chunk(connect: Connect, folder: Path) -> None:
    rag = connect()
    put(rag, a=A)
    whole = kv(folder)
    # Its last tokens are computed: a head of it is kept. By another engine, for this one has it in memory.
    connect().generate([f"Go on:\n\n{A}"], Sampling(max_tokens=1))
    assert kv(folder) > whole
    rag.delete(["a"])
    assert kv(folder) == set()


def test_kv_that_another_chunk_begins_with_stays(connect: Connect, folder: Path) -> None:
    rag = connect(chunk_size=512)
    put(rag, a=A)
    (of_a,) = kv(folder)
    with Store.open(folder) as store:
        ((_, tokens),) = store.reusable()
        longer = rag.tokenizer.decode([*tokens, *tokens])
    put(rag, longer=longer)
    with Store.open(folder) as store:
        assert store.beginning_with([tokens, tokens[:3], tokens[1:]]) == {tokens, tokens[:3]}
    rag.delete(["a"])
    assert of_a in kv(folder)
    rag.delete(["longer"])
    assert kv(folder) == set()


def test_a_tenants_delete_leaves_the_others_kv_alone(connect: Connect, folder: Path) -> None:
    one, two = connect(namespace="one"), connect(namespace="two")
    put(one, a=A)
    of_one = kv(folder)
    put(two, a=A)
    of_two = kv(folder) - of_one
    assert len(of_one) == len(of_two) == 1
    assert one.delete(["a"]).kv_files == 1
    assert kv(folder) == of_two
    assert two.generate([prompt_of(A)])[0].reuse.sources == ("hbm",)


def test_a_chunk_of_two_documents_keeps_its_kv_until_both_are_gone(connect: Connect, folder: Path) -> None:
    rag = connect()
    put(rag, a=A, same=A)
    before = kv(folder)
    assert rag.delete(["a"]) == care.Deleted(documents=1)
    assert kv(folder) == before
    assert rag.delete(["same"]) == care.Deleted(documents=1, chunks=1, kv_files=1)
    assert kv(folder) == set()


def test_a_changed_document_leaves_no_kv_of_what_it_said_before(connect: Connect, folder: Path) -> None:
    rag = connect()
    put(rag, a=A)
    before = kv(folder)
    put(rag, a=B)
    assert kv(folder)
    assert not kv(folder) & before


def test_a_sync_removes_the_kv_of_documents_that_are_gone(connect: Connect, folder: Path, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "a.txt").write_text(A)
    (docs / "b.txt").write_text(B)
    rag = connect()
    list(rag.ingest([docs]))
    before = kv(folder)
    (docs / "a.txt").unlink()
    list(rag.ingest([docs]))
    assert kv(folder) == before
    list(rag.ingest([docs], sync=True))
    assert len(before - kv(folder)) == 1


def test_a_deleted_chunk_cannot_be_asked_for_any_more(connect: Connect) -> None:
    rag = connect()
    put(rag, a=A, b=B)
    assert rag.generate([prompt_of(A, B)])[0].reuse.sources == ("hbm", "hbm")
    rag.delete(["a"])
    (answer,) = rag.generate([prompt_of(A, B)])
    assert answer.reuse.sources == ("hbm",)
    assert len(answer.plan.chunk_ids) == 1


def test_an_unknown_document_deletes_nothing_and_one_id_is_no_list(connect: Connect, folder: Path) -> None:
    rag = connect()
    put(rag, a=A)
    before = kv(folder)
    assert rag.delete(["b"]) == care.Deleted()
    with pytest.raises(InputError):
        rag.delete("a")
    assert kv(folder) == before


def test_kv_of_what_was_deleted_just_before_a_kill_goes_with_the_next_ingest(connect: Connect, folder: Path) -> None:
    rag = connect()
    put(rag, a=A)
    with Store.open(folder) as store:
        store.delete_document("a")  # and the process is gone
    assert len(kv(folder)) == 1
    put(rag, b=B)
    assert len(kv(folder)) == 1
    with Store.open(folder) as store:
        assert store.doomed() == []


def test_a_document_that_is_deleted_while_its_kv_is_computed_leaves_none(connect: Connect, folder: Path) -> None:
    rag = connect()
    with Store.open(folder, create=True) as store:
        for event in rag.ingest(documents=[Document("a", A, "a.txt"), Document("b", B, "b.txt")]):
            if getattr(event, "stage", "") == "store":
                store.delete_document("a")
    (of_b,) = kv(folder)
    rag.delete(["b"])
    assert not of_b.exists()


def test_kv_that_is_saved_after_a_deletion_has_found_none_goes_with_the_run(connect: Connect, folder: Path) -> None:
    rag = connect()
    submit = rag.engine.submit

    def submit_late(request: Request, deliver: Deliver) -> Cancel:
        with Store.open(folder) as store:
            care.delete(store, ["a"])
        return submit(request, deliver)

    rag.engine.submit = submit_late  # type: ignore[method-assign]
    put(rag, a=A)
    assert kv(folder) == set()


def test_a_chunk_that_has_come_back_keeps_its_kv(connect: Connect, folder: Path) -> None:
    rag = connect()
    put(rag, a=A)
    before = kv(folder)
    with Store.open(folder) as store:
        store.delete_document("a")
    put(rag, again=A)
    assert kv(folder) == before


def test_kv_that_cannot_be_removed_is_said_and_tried_again(
    connect: Connect, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rag = connect()
    put(rag, a=A)
    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", lambda self, missing_ok=False: (_ for _ in ()).throw(OSError(5, "I/O error")))
        with pytest.raises(StoreError, match="lazyrag gc"):
            rag.delete(["a"])
    assert len(kv(folder)) == 1
    with Store.open(folder) as store:
        assert store.stats()["documents"] == 0
        assert remove_doomed_kv(store) == 1
    assert kv(folder) == set()


# ---------------------------------------------------------------- what a running engine holds


def resident(rag: LazyRAG, text: str) -> bool:
    """Whether the engine has the KV of a text in memory."""
    rag.register([text])
    return rag.generate([prompt_of(text)], Sampling(max_tokens=1))[0].reuse.sources == (HBM,)


def test_an_edit_that_is_taken_back_is_kept_on_disk_again(connect: Connect, folder: Path) -> None:
    """The engine is told what went: else it would find the old version in memory, and save nothing."""
    rag = connect()
    put(rag, a=A)
    before = kv(folder)
    put(rag, a=B)
    put(rag, a=A)
    assert kv(folder) == before


def test_kv_that_is_resident_already_is_noted_as_kv_that_is_computed(connect: Connect) -> None:
    """It came into the pool by a prompt, which left it on disk."""
    rag = connect()
    for _ in rag.ingest(documents=[Document("a", A, "a.txt")], warm=False):
        pass
    rag.generate([prompt_of(A)], Sampling(max_tokens=1))
    assert rag.kv_state().kept == 0
    put(rag, a=A)
    assert rag.kv_state().kept == 1
    assert not rag.needs_warming(rag.plan_ingest())


def test_what_an_engine_holds_whose_file_another_process_has_removed_is_not_noted_as_kept(
    connect: Connect, folder: Path
) -> None:
    rag = connect()
    put(rag, a=A, b=B)
    before = kv(folder)
    with Store.open(folder) as store:
        care.delete(store, ["a"])  # by a process whose engine is another one
    put(rag, a=A)
    assert rag.kv_state().kept == 1
    put(connect(), a=A)
    assert kv(folder) == before
    assert rag.kv_state().kept == 2


def test_what_a_sync_deletes_is_forgotten(connect: Connect, folder: Path, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "a.txt").write_text(A)
    rag = connect()
    for _ in rag.ingest([docs]):
        pass
    (docs / "a.txt").unlink()
    for _ in rag.ingest([docs], sync=True):
        pass
    assert not resident(rag, A)


def test_records_that_are_replaced_or_deleted_are_forgotten(connect: Connect, folder: Path) -> None:
    rag = connect()

    def write(text: str) -> None:
        (id,) = rag.records.put([Record("r", text, "r", "")], "none")
        list(rag.warm([id]))

    write(A)
    before = kv(folder)
    write(B)
    write(A)
    assert kv(folder) == before
    rag.records.delete(["r"])
    assert kv(folder) == set()
    assert not resident(rag, A)


def test_a_chunk_that_stands_elsewhere_by_now_is_not_forgotten(connect: Connect, folder: Path) -> None:
    """Nor is one that a longer chunk begins with."""
    rag = connect()
    put(rag, a=A)
    with Store.open(folder) as store:
        store.delete_document("a")
    put(rag, b=A, c=B)
    assert resident(rag, A)
    put(rag, d=f"{B} And so on.")
    rag.delete(["c"])
    assert resident(rag, B)


def test_rebuilding_everything_leaves_files_of_what_the_engine_holds(connect: Connect, folder: Path) -> None:
    rag = connect()
    put(rag, a=A, b=B)
    before = kv(folder)
    for _ in rag.rebuild_kv(everything=True):
        pass
    assert kv(folder) == before


def test_pins_follow_the_versions_of_a_document(connect: Connect) -> None:
    rag = connect()
    engine = rag.engine
    put(rag, a=A)
    rag.pin(["a"])
    put(rag, a=B)
    assert engine.pinned == {("", tuple(rag.library.tokens(chunk_id(B))))}
    rag.records.put([Record("a", C, "a", "")], "none")
    assert engine.pinned == {("", tuple(rag.library.tokens(chunk_id(C))))}
    rag.delete(["a"])
    assert engine.pinned == set()


@pytest.mark.parametrize("everything", [False, True])
def test_rebuilding_keeps_the_pins(connect: Connect, folder: Path, everything: bool) -> None:
    rag = connect()
    put(rag, a=A, b=B)
    rag.pin(["a"])
    before = kv(folder)
    for file in before:
        file.unlink()
    for _ in rag.rebuild_kv(everything=everything):
        pass
    assert kv(folder) == before
    assert rag.engine.pinned == {("", tuple(rag.library.tokens(chunk_id(A))))}
    rag.delete(["a"])
    assert rag.engine.pinned == set()


# ---------------------------------------------------------------- waste


def test_everything_that_is_needed_is_no_waste(connect: Connect, folder: Path) -> None:
    for namespace in ("", "tenant"):
        rag = connect(namespace=namespace)
        put(rag, a=A, b=B)
        rag.generate([f"Go on:\n\n{A}"], Sampling(max_tokens=1))
    with Store.open(folder) as store:
        assert find_waste(store) == []


def test_waste_is_found_by_kind_and_only_waste_is_removed(connect: Connect, folder: Path) -> None:
    rag = connect()
    put(rag, a=A)
    needed = kv(folder)
    rag.register([C])
    rag.generate([prompt_of(C)], Sampling(max_tokens=1))  # KV of what no document holds
    stranger = connect(namespace="stranger")
    stranger.register([A])
    stranger.generate([prompt_of(A)], Sampling(max_tokens=1))
    gone = connect(namespace="gone")
    put(gone, a=A)
    gone.delete(["a"])
    leftover = next(iter(needed)).parent / ".00000000-1-00.tmp"
    leftover.write_bytes(b"half")
    os.utime(leftover, (0, 0))
    (folder / "anchors" / ("0" * 16)).mkdir(parents=True)
    (folder / "notes.txt").write_text("somebody's")
    with Store.open(folder) as store:
        waste = find_waste(store)
        assert sorted(item.kind for item in waste) == sorted([UNUSED, UNUSED, LEFTOVER, CACHE, CACHE])
        assert sum(item.num_bytes for item in waste) > 0
        assert kv(folder) > needed
        collect(store, waste)
        assert find_waste(store) == []
    assert kv(folder) == needed
    assert not leftover.exists()
    assert (folder / "notes.txt").exists()


def test_kv_of_another_model_is_waste_only_if_it_is_said(connect: Connect, folder: Path) -> None:
    put(connect(OTHER), a=A)
    of_other = kv(folder)
    with Store.open(folder) as store:
        store.remember(kv=f"{MODEL}-0")
        assert find_waste(store) == []
        waste = find_waste(store, other_models=True)
    assert {item.path for item in waste} == of_other
    assert {item.kind for item in waste} == {OTHER_MODEL}


# ---------------------------------------------------------------- verify


def flaws(folder: Path, *, harmless: bool = False, **settings: bool) -> list[tuple[str, bool]]:
    with Store.open(folder) as store:
        return [(flaw.what, flaw.mended) for flaw in verify(store, **settings) if flaw.harmless == harmless]


def test_a_whole_store_has_no_flaws(connect: Connect, folder: Path) -> None:
    put(connect(), a=A, b=B)
    put(connect(namespace="tenant"), a=A)
    assert flaws(folder) == []
    assert flaws(folder, repair=True) == []


def test_a_flipped_bit_in_any_kv_file_is_found_and_mended(connect: Connect, folder: Path) -> None:
    put(connect(), a=A, b=B)
    moments = random.Random(0)
    path = sorted(kv(folder))[0]
    whole = path.read_bytes()
    for _ in range(40):
        at = moments.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << moments.randrange(8)]) + whole[at + 1 :])
        assert [mended for _, mended in flaws(folder)] == [False]
        assert path.exists(), "without repair nothing is changed"
    assert all(mended for _, mended in flaws(folder, repair=True))
    assert not path.exists()
    assert flaws(folder) == []


def test_a_note_of_kv_that_is_not_there_is_taken_back(connect: Connect, folder: Path) -> None:
    rag = connect()
    put(rag, a=A)
    with Store.open(folder) as store:
        ((fingerprint, id, _),) = store.warm()
        assert fingerprint.startswith(MODEL)
        assert care.missing_kv(store, "") == {}
    sorted(kv(folder))[0].unlink()
    assert flaws(folder) == []
    assert [mended for _, mended in flaws(folder, harmless=True)] == [False]
    assert [mended for _, mended in flaws(folder, harmless=True, repair=True)] == [True]
    assert flaws(folder, harmless=True) == []
    with Store.open(folder) as store:
        assert [unwarmed for unwarmed, _ in store.unwarmed(fingerprint)] == [id]


def test_damaged_caches_are_found_and_made_again(connect: Connect, folder: Path) -> None:
    rag = connect()
    put(rag, a=A)
    (vectors,) = (folder / "vectors").glob("*.faiss")
    content = vectors.read_bytes()
    vectors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    anchors = folder / "anchors" / ("0" * 16)
    anchors.mkdir(parents=True)
    (anchors / "manifest.json").write_text("{")
    assert len(flaws(folder)) == 2
    assert all(mended for _, mended in flaws(folder, repair=True))
    assert flaws(folder) == []
    assert [hit.chunk.text for hit in connect().search("fox", k=1)] == [A]


def test_a_text_that_rotted_is_deleted_and_comes_back_with_the_next_ingest(connect: Connect, folder: Path) -> None:
    rag = connect()
    put(rag, a=A, b=B)
    database = sqlite3.connect(folder / FILE_NAME)
    database.execute("UPDATE chunks SET text = 'rot' WHERE text = ?", (A,))
    database.commit()
    database.close()
    assert [mended for _, mended in flaws(folder)] == [False]
    assert all(mended for _, mended in flaws(folder, repair=True))
    assert flaws(folder) == []
    put(rag, a=A, b=B)
    with Store.open(folder) as store:
        assert sorted(text for _, text in store.texts()) == sorted([A, B])


# ---------------------------------------------------------------- another model


def test_kv_of_another_model_is_said_to_be_of_no_use_and_is_rebuilt(
    connect: Connect, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(connect(), a=A, b=B)
    other = connect("2" * 64)
    assert other.kv_state() == KVState(2, 0, True)
    for _ in range(2):
        other.generate([prompt_of(A)])
    (said,) = [record.getMessage() for record in caplog.records if "another model" in record.getMessage()]
    assert said.startswith("The KV on disk of 2 of 2 chunks is of another model")
    assert f"lazyrag kv rebuild --store {folder}" in said
    for _ in other.rebuild_kv(batch=1):
        pass
    assert other.kv_state() == KVState(2, 2, False)
    assert {file.parts[-4] for file in kv(folder)} == {MODEL[:16], "2" * 16}


def test_a_store_of_another_tokenizer_is_refused_until_it_is_taken_over(
    connect: Connect, folder: Path, model_folder: Callable[..., Path], saving_engine: Callable[..., Engine]
) -> None:
    first = connect()
    put(first, a=A, b=B)
    first.pin(["a"])
    model = model_folder("metaspace")
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    engine = saving_engine(model, folder / "kv", "3" * 64)
    rag = LazyRAG(engine=engine, model=str(model), store=folder, embedder="hash")
    with pytest.raises(StoreError, match="lazyrag kv rebuild --store"):
        rag.generate([prompt_of(A)])
    for _ in rag.rebuild_kv():
        pass
    assert {file.parts[-4] for file in kv(folder)} == {"3" * 16}, "nothing could find the KV of the old tokens any more"
    assert engine.pinned == {("", tuple(rag.library.tokens(chunk_id(A))))}
    (answer,) = rag.generate([prompt_of(A)])
    assert answer.reuse.sources == (HBM,)
    rag.delete(["a", "b"])
    assert kv(folder) == set()
    engine.close()
