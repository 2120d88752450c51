import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lazyrag.errors import CapacityError, ConfigError, EngineDeadError, InputError, QuotaError, StoreError
from lazyrag.ingest import DELETE, EMBED, INDEX, PARSE, SPLIT, STAGES, STORE, WARM, Progress, Summary, plan, run
from lazyrag.quota import KVQuota
from lazyrag.retrievers.embed import HashEmbedder
from lazyrag.retrievers.search import Searcher
from lazyrag.retrievers.store import FILE_NAME, Store
from lazyrag.retrievers.vectors import VectorIndex
from lazyrag.splitter import Splitter
from lazyrag.types import COMPUTED, DISK, HBM, Document, Quota, Reuse, chunk_id


class CharacterTokenizer:
    """A token is a character."""

    fingerprint = "characters"

    def encode_plain_with_offsets(self, text):
        return [ord(c) for c in text], [(i, i + 1) for i in range(len(text))]

    def decode(self, ids):
        return "".join(map(chr, ids))


class CountingEmbedder(HashEmbedder):
    def __init__(self):
        self.seen = []

    def embed_documents(self, texts):
        self.seen += texts
        return super().embed_documents(texts)


class Engine:
    """Warms chunks, or fails to as it is told: {chunk text: error}."""

    def __init__(self, errors=None, stop_after=None):
        self.warmed = []
        self.errors = errors or {}
        self.stop_after = stop_after

    def warm(self, chunks):
        for id, ids in chunks:
            text = "".join(map(chr, ids))
            assert chunk_id(text) == id
            if len(self.warmed) == self.stop_after:
                raise KeyboardInterrupt
            if text in self.errors:
                yield id, self.errors[text]
                if not isinstance(self.errors[text], CapacityError):
                    return  # nothing is computed after that
            else:
                self.warmed.append(text)
                yield id, Reuse(len(ids), 0, (COMPUTED,))


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "store", create=True) as store:
        yield store


@pytest.fixture
def docs(tmp_path):
    """Writes files into a folder: docs(a="text") makes a.md, a None removes it."""
    folder = tmp_path / "docs"
    folder.mkdir()

    def write(**texts):
        for name, text in texts.items():
            path = folder / f"{name}.md"
            if text is None:
                path.unlink()
            else:
                path.write_text(text)
        return folder

    write.folder = folder
    return write


SPLITTER = Splitter(CharacterTokenizer(), chunk_size=64)


def make_plan(store, *paths, **settings):
    return plan(store, paths, **{"splitter": SPLITTER, "embedder": HashEmbedder(), **settings})


def ingest(store, *paths, sync=False, warm=None, fingerprint=None, **settings):
    """Plan and run; the events and the summary."""
    *events, summary = run(make_plan(store, *paths, **settings), sync=sync, warm=warm, fingerprint=fingerprint)
    assert isinstance(summary, Summary)
    assert all(isinstance(event, Progress) for event in events)
    return events, summary


def summary_of(*arguments, **settings):
    return ingest(*arguments, **settings)[1]


def names(items):
    return sorted(os.path.basename(getattr(item, "id", item)) for item in items)


# ---------------------------------------------------------------- the plan


def test_the_plan_says_what_is_new_changed_unchanged_missing_and_unreadable(store, docs):
    docs(stays="stays", changes="before", goes="goes")
    first = make_plan(store, docs.folder)
    assert names(first.added) == ["changes.md", "goes.md", "stays.md"]
    assert first.num_bytes == len("staysbeforegoes")
    assert summary_of(store, docs.folder).added == 3

    docs(changes="after", goes=None, comes="comes")
    (docs.folder / "broken.md").write_bytes(b"\0")
    (docs.folder / "image.png").write_bytes(b"png")
    second = make_plan(store, docs.folder)
    assert names(second.added) == ["broken.md", "comes.md"]
    assert names(second.changed) == ["changes.md"]
    assert names(second.unchanged) == ["stays.md"]
    assert names(second.missing) == ["goes.md"]
    assert names(second.skipped) == ["image.png"]
    assert summary_of(store, docs.folder, docs.folder / "nothing").failed[0].source.endswith("nothing")


def test_planning_changes_nothing(store, docs):
    make_plan(store, docs(a="text"))
    assert store.settings() == {}
    assert store.generation() == 0
    assert store.last_run() is None


def test_the_same_content_with_another_time_is_unchanged(store, docs):
    ingest(store, docs(a="text"))
    os.utime(docs.folder / "a.md", (1, 1))
    assert names(make_plan(store, docs.folder).unchanged) == ["a.md"]
    # And new content with the old time and size is not.
    status = (docs.folder / "a.md").stat()
    docs(a="TEXT")
    os.utime(docs.folder / "a.md", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert names(make_plan(store, docs.folder).changed) == ["a.md"]


def test_another_way_of_splitting_or_embedding_is_a_change(store, docs):
    ingest(store, docs(a="text"), embedder=None)
    assert names(make_plan(store, docs.folder, embedder=None).unchanged) == ["a.md"]
    assert names(make_plan(store, docs.folder).changed) == ["a.md"]
    other = Splitter(CharacterTokenizer(), chunk_size=32)
    assert names(make_plan(store, docs.folder, embedder=None, splitter=other).changed) == ["a.md"]


def test_documents_that_are_no_files_are_compared_by_all_they_say(store):
    def document(**changes):
        return Document(**{"id": "pypi:a", "text": "text", "source": "a", "metadata": {"v": 1}, **changes})

    assert summary_of(store, documents=[document()]).added == 1
    assert make_plan(store, documents=iter([document()])).unchanged == ("pypi:a",)
    for change in ({"text": "new"}, {"title": "t"}, {"metadata": {"v": 2}}, {"source": "b"}, {"pages": (0,)}):
        assert names(make_plan(store, documents=[document(**change)]).changed) == ["pypi:a"]
    assert make_plan(store, documents=[]).missing == ()


def test_the_second_document_of_one_id_is_left_out_and_listed(store):
    summary = summary_of(store, documents=[Document("a", "first", "s"), Document("a", "second", "s")])
    assert summary.added == 1
    assert "Two documents have the id a" in str(summary.failed[0].error)
    assert [chunk.text for chunk in store.chunks()] == ["first"]


def test_a_store_made_with_another_tokenizer_or_embedder_is_refused_before_anything_is_done(store, docs):
    ingest(store, docs(a="text"))
    other = CharacterTokenizer()
    other.fingerprint = "others"
    with pytest.raises(StoreError, match="made with tokenizer characters, not others"):
        make_plan(store, docs.folder, splitter=Splitter(other))
    embedder = HashEmbedder()
    embedder.name = "better"
    with pytest.raises(StoreError, match="made with embedding hash, not better"):
        make_plan(store, docs.folder, embedder=embedder)


# ---------------------------------------------------------------- the run


def test_what_was_ingested_can_be_found_and_cited(store, docs):
    text = "Foxes are red.\n\n" + "Whales are blue and live in the sea, mostly, not always."
    ingest(store, docs(a=text))
    (hit,) = Searcher(store, HashEmbedder()).search("where do whales live", 1)
    assert hit.chunk.source == str(docs.folder / "a.md")
    assert text[hit.chunk.start : hit.chunk.end] == hit.chunk.text
    assert store.stats()["vectors"] == store.stats()["chunks"] == 2
    (stored,) = store.documents()
    assert stored.mtime == (docs.folder / "a.md").stat().st_mtime


def test_a_second_run_does_nothing(store, docs):
    engine, embedder = Engine(), CountingEmbedder()
    again = Engine()
    docs(a="text a", b="text b")
    ingest(store, docs.folder, embedder=embedder, warm=engine.warm, fingerprint="f")
    generation = store.generation()
    events, summary = ingest(store, docs.folder, embedder=embedder, warm=again.warm, fingerprint="f")
    assert [event.stage for event in events] == [INDEX]
    assert summary == Summary(unchanged=2)
    assert sorted(embedder.seen) == sorted(engine.warmed) == ["text a", "text b"]
    assert again.warmed == []
    assert store.generation() == generation


def test_a_changed_file_costs_only_its_changed_chunks(store, docs):
    stays, goes, comes = "A" * 40, "B" * 40, "C" * 40
    ingest(store, docs(a=f"{stays}\n\n{goes}"), warm=Engine().warm, fingerprint="f")
    engine, embedder = Engine(), CountingEmbedder()
    docs(a=f"{comes}\n\n{stays}")
    _, summary = ingest(store, docs.folder, embedder=embedder, warm=engine.warm, fingerprint="f")
    assert engine.warmed == embedder.seen == [comes]
    assert summary == Summary(changed=1, chunks_added=1, chunks_removed=1, embedded=1, warmed=1)
    assert [chunk.text for chunk in store.chunks()] == [comes, stays]


def test_equal_chunks_of_new_documents_are_embedded_and_warmed_once(store, docs):
    engine, embedder = Engine(), CountingEmbedder()
    docs(a="same", b="same", c="same")
    _, summary = ingest(store, docs.folder, embedder=embedder, warm=engine.warm)
    assert embedder.seen == engine.warmed == ["same"]
    assert (summary.added, summary.chunks_added) == (3, 1)


def test_missing_documents_are_kept_unless_a_sync_is_asked_for(store, docs, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "b.md").write_text("text of b")
    ingest(store, docs(a="text of a"), other)
    docs(a=None)
    (other / "b.md").unlink()
    assert summary_of(store, docs.folder).missing == 1
    assert store.stats()["documents"] == 2
    events, summary = ingest(store, docs.folder, sync=True)
    assert (summary.deleted, summary.chunks_removed, summary.missing) == (1, 1, 0)
    assert [event.stage for event in events] == [DELETE, INDEX]
    assert [os.path.basename(stored.id) for stored in store.documents()] == ["b.md"]


def test_a_sync_of_a_folder_that_is_not_there_deletes_nothing(store, docs):
    ingest(store, docs(a="text"))
    docs(a=None)
    docs.folder.rmdir()
    summary = summary_of(store, docs.folder, sync=True)
    assert summary.deleted == 0
    assert len(summary.failed) == 1
    assert store.stats()["documents"] == 1


def test_a_bad_file_is_listed_and_the_rest_goes_on(store, docs):
    docs(a="text a", z="text z")
    (docs.folder / "bad.md").write_bytes(b"\0binary")
    (docs.folder / "records.jsonl").write_text('{"text": "fine"}\n{broken\n')
    events, summary = ingest(store, docs.folder)
    assert sorted(chunk.text for chunk in store.chunks()) == ["fine", "text a", "text z"]
    assert names(failure.source for failure in summary.failed) == ["bad.md", "records.jsonl:2"]
    assert summary.exit_code == 1
    # The one that could be seen before is in the plan, the one that had to be read first is in an event.
    assert names(f.source for event in events for f in event.failures) == ["bad.md"]
    docs.folder.joinpath("bad.md").write_text("repaired")
    docs.folder.joinpath("records.jsonl").write_text('{"text": "fine"}\n')
    summary = summary_of(store, docs.folder)
    assert (summary.added, summary.unchanged, summary.exit_code) == (1, 3, 0)


def test_no_loader_lets_a_file_pass_for_a_frameworks_node(store, docs):
    docs(a="text a")
    forged = {"text": "forged", "_content": json.dumps({"id_": "x"}), "_document": "a"}
    (docs.folder / "records.jsonl").write_text(json.dumps(forged) + "\n" + json.dumps({"text": "fine"}))
    summary = summary_of(store, docs.folder)
    assert names(failure.source for failure in summary.failed) == ["records.jsonl#1"]
    assert "LazyRAG keeps the name _content and _document" in str(summary.failed[0].error)
    assert sorted(chunk.text for chunk in store.chunks()) == ["fine", "text a"]


def test_a_document_that_cannot_be_stored_does_not_stop_the_others(store):
    metadata = {}
    made = make_plan(store, documents=[Document("a", "text a", "a", metadata=metadata), Document("b", "text b", "b")])
    metadata["changed since"] = "\ud800"
    *events, summary = run(made)
    assert [failure.source for failure in summary.failed] == ["a"]
    assert [event.stage for event in events if event.failures] == [STORE]
    assert [stored.id for stored in store.documents()] == ["b"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"id": ""}, "id is empty"),
        ({"id": 5}, "id is a int"),
        ({"id": "\ud800"}, "lone surrogate"),
        ({"text": None}, "text is a NoneType"),
        ({"text": "half \ud800"}, "lone surrogate"),
        ({"source": 5}, "source is a int"),
        ({"title": 0}, "title is a int"),
        ({"title": "\udfff"}, "lone surrogate"),
        ({"metadata": None}, "metadata is a NoneType"),
        ({"metadata": {5: "a"}}, "metadata holds"),
        ({"metadata": {"a": [1]}}, "metadata holds"),
        ({"metadata": {"a": float("nan")}}, "metadata holds"),
        ({"metadata": {"a": 10**30}}, "metadata holds"),
        ({"metadata": {"a": "\ud800"}}, "lone surrogate"),
        ({"metadata": {"\ud800": "a"}}, "lone surrogate"),
        ({"pages": None}, "pages are"),
        ({"pages": (3, 5)}, "pages are"),
        ({"pages": (0, 5, 4)}, "pages are"),
        ({"pages": (0, 1.5)}, "pages are"),
        ({"pages": "01"}, "pages are"),
    ],
    ids=ascii,
)
def test_a_document_with_fields_that_cannot_be_is_listed_and_the_rest_goes_on(store, changes, why):
    bad = Document(**{"id": "bad", "text": "SECRET text", "source": "s", **changes})
    summary = summary_of(store, documents=[bad, Document("good", "text", "s")])
    (failure,) = summary.failed
    assert failure.source == ("document 1" if "id" in changes else "bad")
    assert why in str(failure.error)
    assert "SECRET" not in str(failure.error)
    assert [stored.id for stored in store.documents()] == ["good"]
    assert store.last_run().summary["failed"] == [failure.source]
    assert summary_of(store, documents=[Document("good", "text", "s")]).unchanged == 1


def test_what_is_no_document_is_listed_and_every_value_that_can_be_is_taken(store):
    metadata = {"": None, "b": True, "f": 1.5, "i": -(2**63), "s": "ü😀"}
    good = Document("ü", "", "", metadata=metadata, pages=[0, 0, 7])
    summary = summary_of(store, documents=["text", None, good])
    assert [failure.source for failure in summary.failed] == ["document 1", "document 2"]
    (stored,) = store.documents()
    assert stored.metadata == metadata


@pytest.mark.parametrize("documents", [Document("a", "text", "s"), "text", {"text": "a"}], ids=["one", "str", "dict"])
def test_one_document_where_a_list_is_meant_is_refused(store, documents):
    with pytest.raises(InputError, match=r"Pass a list: \[document\]"):
        make_plan(store, documents=documents)


def test_the_old_version_of_a_file_that_became_unreadable_stays(store, docs):
    ingest(store, docs(a="good text"))
    (docs.folder / "a.md").write_bytes(b"\0")
    assert len(summary_of(store, docs.folder, sync=True).failed) == 1
    assert [chunk.text for chunk in store.chunks()] == ["good text"]


def test_the_events_count_up_to_their_totals_stage_by_stage(store, docs):
    docs(**{f"d{i:03}": "\n\n".join(f"{i} {j} {'x' * 40}" for j in range(6)) for i in range(100)})
    events, summary = ingest(store, docs.folder, warm=Engine().warm)
    for stage, total in ((PARSE, 100), (SPLIT, 100), (EMBED, 600), (STORE, 100), (INDEX, 1), (WARM, 600)):
        of_stage = [event for event in events if event.stage == stage]
        done = [event.done for event in of_stage]
        assert done == sorted(set(done))
        assert (of_stage[-1].done, of_stage[-1].total) == (total, total)
    assert {event.stage for event in events} == set(STAGES) - {DELETE}
    num_bytes = [event.num_bytes for event in events]
    assert num_bytes == sorted(num_bytes)
    assert num_bytes[-1] == sum(path.stat().st_size for path in docs.folder.iterdir())
    # Memory is bounded: documents are stored while others are still to be read.
    stages = [event.stage for event in events]
    assert stages.index(STORE) < len(stages) - stages[::-1].index(PARSE)
    assert summary.chunks_added == summary.embedded == summary.warmed == 600


def test_namespaces_are_ingested_apart(store, docs):
    ingest(store, docs(a="text"), namespace="tenant")
    assert store.stats()["documents"] == 0
    assert names(make_plan(store, docs.folder).added) == ["a.md"]
    docs(a=None)
    assert summary_of(store, docs.folder, sync=True).deleted == 0
    assert summary_of(store, docs.folder, sync=True, namespace="tenant").deleted == 1


def test_without_an_embedder_nothing_is_embedded_or_indexed(store, docs):
    events, _ = ingest(store, docs(a="text"), embedder=None)
    assert {event.stage for event in events} == {PARSE, SPLIT, STORE}
    assert store.stats()["vectors"] == 0
    with pytest.raises(ConfigError, match="never embedded"):
        Searcher(store, HashEmbedder())
    summary = summary_of(store, docs.folder)
    assert (summary.changed, summary.embedded, summary.chunks_added) == (1, 1, 0)
    assert len(Searcher(store, HashEmbedder()).search("text")) == 1


def test_the_vector_file_is_up_to_date_after_a_run(store, docs):
    ingest(store, docs(a="one", b="two"))
    head = VectorIndex(store).path.read_bytes().partition(b"\n")[0]
    assert json.loads(head)["generation"] == store.generation()


def test_a_vector_file_that_cannot_be_written_is_listed_and_searches_still_work(store, docs):
    VectorIndex(store).path.parent.write_text("in the way")
    events, summary = ingest(store, docs(a="text"))
    assert [event.stage for event in events if event.failures] == [INDEX]
    assert summary.exit_code == 1
    assert len(Searcher(store, HashEmbedder()).search("text")) == 1


# ---------------------------------------------------------------- every chunk has a vector


@pytest.mark.parametrize("orders", [("ab", "ab"), ("ab", "ba"), ("ba", "ab")], ids=str)
def test_a_text_that_moves_between_documents_keeps_its_vector(store, orders):
    before, after = ({"a": "moves", "b": "goes"}, {"a": "comes", "b": "moves"})
    for order, texts in zip(orders, (before, after), strict=True):
        events = []
        for event in run(make_plan(store, documents=[Document(id, texts[id], id) for id in order])):
            events.append(event)
            assert store.check() == []  # also if it ended here
    assert events[-1].embedded == 1
    assert Searcher(store, HashEmbedder()).search("moves", 1)[0].chunk.document_id == "b"


def test_two_ingests_at_once_leave_no_chunk_without_a_vector(docs, tmp_path):
    """One adds a text that the other deletes, at each moment that there is between two steps."""
    documents = [Document("new", "text", "s"), Document("other", "other text", "s")]
    moment, is_over = 0, False
    while not is_over:
        docs(old="text")
        with Store.open(tmp_path / f"store{moment}", create=True) as store:
            ingest(store, docs.folder)
            events = run(make_plan(store, documents=documents))
            is_over = any(isinstance(event, Summary) for _, event in zip(range(moment), events, strict=False))
            docs(old=None)
            with Store.open(store.directory) as again:
                assert summary_of(again, docs.folder, sync=True).deleted == 1
            list(events)
            assert store.check() == []
            assert len(set(store.chunk_ids())) == 2
            assert len(Searcher(store, HashEmbedder()).search("text")) == 2
        moment += 1
    assert moment > 6


def test_an_ingest_of_unchanged_documents_makes_the_vectors_that_are_missing(store, docs):
    ingest(store, docs(a="one", b="two"))
    with sqlite3.connect(store.directory / FILE_NAME) as db:
        db.execute("DELETE FROM vectors WHERE chunk = (SELECT key FROM chunks WHERE id = ?)", (chunk_id("two"),))
    db.close()
    assert len(store.check()) == 1
    events, summary = ingest(store, docs.folder / "a.md")
    assert summary == Summary(unchanged=1, embedded=1)
    assert [event.stage for event in events] == [EMBED, INDEX]
    assert store.check() == []
    assert len(Searcher(store, HashEmbedder()).search("two")) == 2


# ---------------------------------------------------------------- warming


def test_a_chunk_that_cannot_be_warmed_is_listed_and_tried_again_next_time(store, docs):
    docs(a="good", b="bad")
    _, summary = ingest(store, docs.folder, warm=Engine({"bad": CapacityError("Too long.")}).warm, fingerprint="f")
    assert (summary.warmed, summary.exit_code) == (1, 1)
    assert [failure.source for failure in summary.failed] == [chunk_id("bad")]
    engine = Engine()
    assert summary_of(store, docs.folder, warm=engine.warm, fingerprint="f").exit_code == 0
    assert engine.warmed == ["bad"]


@pytest.mark.parametrize("error", [EngineDeadError("The engine stopped."), RuntimeError("a bug")], ids=str)
def test_a_dead_engine_stops_the_run_but_nothing_done_is_lost(store, docs, error):
    docs(a="good", b="bad", c="late")
    with pytest.raises(type(error)):
        ingest(store, docs.folder, warm=Engine({"bad": error}).warm, fingerprint="f")
    engine = Engine()
    assert summary_of(store, docs.folder, warm=engine.warm, fingerprint="f").unchanged == 3
    assert sorted(engine.warmed) == ["bad", "late"]


def test_the_engine_works_while_documents_are_embedded(store, docs):
    begun = threading.Event()

    class Waiting(HashEmbedder):
        def embed_documents(self, texts):
            if any("last" in text for text in texts):
                assert begun.wait(60), "nothing was computed before all was embedded"
            return super().embed_documents(texts)

    def warm(chunks):
        for id, ids in chunks:
            begun.set()
            yield id, Reuse(len(ids), 0, (COMPUTED,))

    docs(**{f"d{i}": "\n\n".join(f"{i} {j} {'x' * 40}" for j in range(100)) for i in range(4)}, last="the last one")
    assert summary_of(store, docs.folder, warm=warm, fingerprint="f", embedder=Waiting()).warmed == 401


def test_documents_are_read_split_and_stored_while_others_are_embedded(store, docs):
    """Each embedding of a group but the last waits until the next one was read, and the one before was stored."""
    parsed, stored = threading.Semaphore(0), threading.Semaphore(0)
    waited = []

    class Waiting(HashEmbedder):
        def embed_documents(self, texts):
            group = texts[0].partition(" ")[0]
            if group not in waited:
                waited.append(group)
                assert group == "3" or parsed.acquire(timeout=60), "the next group is read after this one was embedded"
                assert group == "0" or stored.acquire(timeout=60), "the one before is stored after this one"
            return super().embed_documents(texts)

    docs(**{f"d{i}": "\n\n".join(f"{i} {j} {'x' * 40}" for j in range(200)) for i in range(4)})
    parsed_or_stored = {PARSE: parsed, STORE: stored}
    for event in run(make_plan(store, docs.folder, embedder=Waiting())):
        if getattr(event, "stage", "") in parsed_or_stored and (event.stage, event.done) != (PARSE, 1):
            parsed_or_stored[event.stage].release()
    assert waited == ["0", "1", "2", "3"]
    assert store.check() == []


def test_a_text_of_several_groups_is_embedded_once(store, docs):
    embedder = CountingEmbedder()
    shared = "\n\n".join(f"shared {j} {'x' * 40}" for j in range(100))
    docs(**{f"d{i}": shared + "\n\n" + "\n\n".join(f"{i} {j} {'x' * 40}" for j in range(100)) for i in range(4)})
    summary = summary_of(store, docs.folder, embedder=embedder)
    assert len(embedder.seen) == len(set(embedder.seen)) == summary.embedded == 500
    assert store.check() == []


def test_an_embedder_that_fails_ends_the_run_and_what_was_stored_stays(store, docs):
    class Failing(HashEmbedder):
        def embed_documents(self, texts):
            if texts[0].startswith("2 "):
                raise MemoryError
            return super().embed_documents(texts)

    docs(**{f"d{i}": "\n\n".join(f"{i} {j} {'x' * 40}" for j in range(200)) for i in range(4)})
    with pytest.raises(MemoryError):
        summary_of(store, docs.folder, embedder=Failing())
    assert store.check() == []
    assert store.stats()["documents"] == 2
    assert summary_of(store, docs.folder).added == 2


def test_an_engine_that_is_slow_is_not_given_more_than_waits_for_it(store, docs):
    """And closing the run in between loses nothing that was computed."""
    ahead, most = 0, 0

    def warm(chunks):
        nonlocal ahead, most
        for id, ids in chunks:
            ahead = store.stats()["chunks"] - len(list(store.warm()))
            most = max(most, ahead)
            yield id, Reuse(len(ids), 0, (COMPUTED,))

    docs(**{f"d{i}": "\n\n".join(f"{i} {j} {'x' * 40}" for j in range(300)) for i in range(6)})
    events = run(make_plan(store, docs.folder), warm=warm, fingerprint="f")
    for event in events:
        if event.stage == WARM and event.done == 700:
            break
    events.close()
    assert most <= 512 + 600 + 32, "the queue, what is being stored, and what is not yet noted"
    assert 700 <= len(list(store.warm())) < 1800
    engine = Engine()
    assert summary_of(store, docs.folder, warm=engine.warm, fingerprint="f").exit_code == 0
    assert store.num_unwarmed("f") == 0


def test_each_engine_has_its_own_warm_chunks_and_an_unnamed_one_has_none(store, docs):
    docs(a="text")
    for fingerprint, count in (("f", 1), ("f", 0), ("g", 1), (None, 1), (None, 1)):
        engine = Engine()
        ingest(store, docs.folder, warm=engine.warm, fingerprint=fingerprint)
        assert len(engine.warmed) == count


@pytest.mark.parametrize(("sources", "again"), [((COMPUTED,), 0), ((DISK,), 0), ((HBM,), 1), ((), 1)], ids=str)
def test_what_is_kept_is_noted_and_what_is_in_memory_alone_or_ordinary_text_is_not(store, docs, sources, again):
    def warm(chunks):
        for id, ids in chunks:
            yield id, Reuse(len(ids), 0, sources)

    docs(a="text")
    counts = [summary_of(store, docs.folder, warm=warm, fingerprint="f").warmed for _ in range(2)]
    assert counts == [1, again]


def test_chunks_that_were_stored_without_warming_are_warmed_when_it_is_asked_for(store, docs):
    ingest(store, docs(a="one", b="two"))
    engine = Engine()
    assert summary_of(store, docs.folder / "a.md", warm=engine.warm, fingerprint="f").unchanged == 1
    assert sorted(engine.warmed) == ["one", "two"]


# ---------------------------------------------------------------- interruptions


def test_a_run_that_is_closed_goes_on_where_it_stopped(store, docs):
    docs(**{f"d{i}": f"text {i} " + "x" * 4000 for i in range(20)})
    events = run(make_plan(store, docs.folder))
    while next(events).stage != STORE:
        pass
    events.close()
    stored = store.stats()["documents"]
    assert 0 < stored < 20
    second = make_plan(store, docs.folder)
    assert second.interrupted
    assert len(second.unchanged) == stored
    summary = summary_of(store, docs.folder)
    assert summary.added == 20 - stored
    assert not make_plan(store, docs.folder).interrupted


def test_ctrl_c_while_warming_keeps_what_is_warm(store, docs):
    docs(**{f"d{i}": f"text {i}" for i in range(10)})
    with pytest.raises(KeyboardInterrupt):
        ingest(store, docs.folder, warm=Engine(stop_after=4).warm, fingerprint="f")
    engine = Engine()
    ingest(store, docs.folder, warm=engine.warm, fingerprint="f")
    assert len(engine.warmed) == 6


def test_the_journal_says_what_a_run_did(store, docs):
    docs(a="text")
    (docs.folder / "bad.md").write_bytes(b"\0")
    ingest(store, docs.folder)
    summary = store.last_run().summary
    assert (summary["added"], summary["chunks_added"]) == (1, 1)
    assert summary["failed"] == [str(docs.folder / "bad.md")]


KILLED = textwrap.dedent(
    """
    import sys
    sys.path.insert(0, {tests!r})
    from test_ingest import HashEmbedder, Reuse, SPLITTER, Store, plan, run

    def warm(chunks):
        for id, ids in chunks:
            with open(sys.argv[3], "a") as log:
                log.write(id + "\\n")
            yield id, Reuse(len(ids), 0, ("computed",))

    store = Store.open(sys.argv[1], create=True)
    made = plan(store, [sys.argv[2]], splitter=SPLITTER, embedder=HashEmbedder())
    for event in run(made, sync=True, warm=warm, fingerprint="f"):
        print(getattr(event, "stage", "end"), flush=True)
    print(event.added, event.changed, event.unchanged, flush=True)
    """
).format(tests=os.path.dirname(__file__))


def contents(folder):
    with Store.open(folder) as store:
        assert store.check() == []
        ids = set(store.chunk_ids())
        index = VectorIndex(store)
        index.refresh()
        return {
            "documents": list(store.documents()),
            "chunks": list(store.chunks()),
            "tokens": store.get_tokens(ids),
            "vectors": {id: vector.tobytes() for id, vector in store.vectors_of(ids).items()},
            "indexed": sorted(id for id, _ in index.search(np.ones(1024, np.float32), 10**6)),
            "unwarmed": list(store.unwarmed("f")),
        }


def test_a_run_that_is_killed_at_any_moment_ends_as_a_clean_one_does(tmp_path):
    folder, log = tmp_path / "docs", tmp_path / "log"
    folder.mkdir()

    def write(version):
        for i in range(30):
            (folder / f"d{i:02}.md").write_text(
                "\n\n".join(f"{i} {j} {version * (j % 2)} {'x' * 40}" for j in range(40))
            )

    def start(store):
        script = [sys.executable, "-c", KILLED, store, folder, log]
        return subprocess.Popen(script, stdout=subprocess.PIPE, text=True)

    moments = random.Random(0)
    for version in (1, 2):
        write(version)
        log.write_text("")
        progress = []
        for _ in range(5):
            process = start(tmp_path / "killed")
            for _ in range(moments.randrange(1, 80)):
                process.stdout.readline()
            # The process runs on while its lines are read, so this may hit it anywhere.
            os.kill(process.pid, signal.SIGKILL)
            process.communicate(timeout=60)
            with Store.open(tmp_path / "killed") as store:
                assert store.check() == []
                assert all(count == 40 for count in chunks_by_document(store).values())
                progress.append(len(chunks_by_document(store)))
        assert progress == sorted(progress)
        process = start(tmp_path / "killed")
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert sum(map(int, out.splitlines()[-1].split())) == 30
        # A kill costs at most what was warmed since the journal was last written.
        warmed = log.read_text().split()
        assert len(warmed) - len(set(warmed)) <= 5 * 32
    process = start(tmp_path / "clean")
    process.communicate(timeout=120)
    killed, clean = contents(tmp_path / "killed"), contents(tmp_path / "clean")
    assert killed == clean
    assert len(clean["documents"]) == 30
    assert clean["unwarmed"] == []


def chunks_by_document(store):
    counts = {}
    for chunk in store.chunks():
        counts[chunk.document_id] = counts.get(chunk.document_id, 0) + 1
    return counts


def test_no_more_kv_is_kept_than_the_namespace_may(store, docs):
    engine, made = Engine(), make_plan(store, docs(a="a" * 40, b="b" * 30, c="c" * 20, d="d"), quota=Quota(kv_bytes=65))
    *_, summary = run(made, warm=engine.warm, fingerprint="f", bytes_per_token=1)
    assert engine.warmed == ["a" * 40, "c" * 20, "d"], "what comes after a chunk that is too large may still fit"
    assert (summary.warmed, store.num_unwarmed("f")) == (3, 1)
    (failure,) = summary.failed
    assert isinstance(failure.error, QuotaError)
    assert "KV of 1 chunks is not kept: the namespace may keep 65 bytes" in str(failure.error)


def test_what_files_take_besides_counts_and_comes_back(store, docs):
    """Of two ingests, each of ten chunks of 30 tokens in files of 40, the second one's engine fails."""
    documents = [Document(str(i), f"{i} ".ljust(30, "x"), "s") for i in range(10)]
    sizes = {"bytes_per_token": 1, "bytes_per_chunk": 10}
    with KVQuota(store, "", 320) as other:  # it lives, so what is reserved is not counted anew
        made = make_plan(store, documents=documents, quota=Quota(kv_bytes=320))
        *_, summary = run(made, warm=Engine().warm, fingerprint="f", **sizes)
        assert summary.warmed == 8
        assert other.reserve([1]) == [False]
        failing = Engine({f"{i} ".ljust(30, "x"): CapacityError("Too long.") for i in range(10)})
        made = make_plan(store, documents=documents, quota=Quota(kv_bytes=400))
        list(run(made, warm=failing.warm, fingerprint="f", **sizes))
        other.give_back(320)
        assert other.reserve([320]) == [True]


def test_a_resumed_ingest_warms_each_chunk_once_and_fills_its_quota(store, docs):
    """What was stored before stands in the same page of the store as what this run warms while it is read."""
    first = [Document(f"a{i}", f"a{i} ".ljust(30, "x"), "s") for i in range(900)]
    second = [Document(f"b{i}", f"b{i} ".ljust(30, "x"), "s") for i in range(1300)]
    list(run(make_plan(store, documents=first)))
    engine, gate = Engine(), threading.Event()

    def warm(chunks):
        for chunk in chunks:
            yield from engine.warm([chunk])
            gate.wait(0.0005)  # so that the rest begins while chunks of this run wait

    made = make_plan(store, documents=[*first, *second], quota=Quota(kv_bytes=2200 * 30))
    *_, summary = run(made, warm=warm, fingerprint="f", bytes_per_token=1)
    assert (len(engine.warmed), len(set(engine.warmed))) == (2200, 2200)
    assert summary.failed == ()
    assert store.num_unwarmed("f") == 0


def test_ingests_at_the_same_time_keep_no_more_kv_than_the_namespace_may_together(store, docs):
    """Of both, half of the chunks fit; the engines begin when both have counted what is on disk."""
    both, quota = threading.Barrier(2), Quota(kv_bytes=20 * 30)
    engines = [Engine(), Engine()]

    def ingest_half(n, engine):
        def warm(chunks):
            both.wait(60)
            yield from engine.warm(chunks)

        documents = [Document(f"{n} {i}", f"{n} {i} ".ljust(30, "x"), "s") for i in range(10, 30)]
        with Store.open(store.directory) as own:
            made = make_plan(own, documents=documents, quota=quota)
            return [*run(made, warm=warm, rest=False, fingerprint="f", bytes_per_token=1)][-1]

    with ThreadPoolExecutor() as pool:
        summaries = list(pool.map(ingest_half, range(2), engines))
    assert sum(summary.warmed for summary in summaries) == 20
    assert store.num_unwarmed("f") == 20
    assert any(summary.failed for summary in summaries)


@pytest.mark.parametrize("sources", [(HBM,), (DISK,), ()], ids=str)
def test_kv_that_is_not_computed_takes_nothing_of_the_quota(store, docs, sources):
    def warm(chunks):
        for id, ids in chunks:
            yield id, Reuse(len(ids), 0, sources)

    documents = [Document(str(i), f"{i} ".ljust(30, "x"), "s") for i in range(100)]
    made = make_plan(store, documents=documents, quota=Quota(kv_bytes=64 * 30))
    with KVQuota(store, "", 64 * 30) as other:
        *_, summary = run(made, warm=warm, fingerprint="f", bytes_per_token=1)
        assert summary.warmed >= 64
        assert other.reserve([64 * 30]) == [True], "all of it was given back"
