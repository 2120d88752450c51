"""`lazyrag ingest --server`: files into a running server, as `lazyrag ingest` takes them into a store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lazyrag.backend import remote
from lazyrag.backend.remote import RemoteRAG
from lazyrag.backend.server.app import create_app
from lazyrag.backend.server.auth import Keys
from lazyrag.backend.server.feed import compare, feed
from lazyrag.cli import app
from lazyrag.client import LazyRAG
from lazyrag.errors import EngineDeadError, StoreError

KEYS = Keys({"sk-a": "a", "sk-b": "b"}, quotas={"b": {"documents": 2}})


@pytest.fixture
def rag(connect: Callable[..., tuple[LazyRAG, Any]], tmp_path: Path) -> LazyRAG:
    client, _ = connect(config={"store": tmp_path / "store", "embedder": "hash", "chunk_size": 100})
    return client


@pytest.fixture
def url(rag: LazyRAG, serving: Callable[[Any], Any]) -> Iterator[str]:
    with serving(create_app(rag, keys=KEYS)) as url:
        yield url


@pytest.fixture
def docs(tmp_path: Path, passages: list[str]) -> Path:
    folder = tmp_path / "docs"
    (folder / "below").mkdir(parents=True)
    for n, text in enumerate(passages[:5]):
        (folder / ("below" if n == 4 else "") / f"{n}.txt").write_text(text)
    return folder


@pytest.fixture
def run(url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run an ingest into the server; its JSON is in `values`."""
    monkeypatch.setenv("LAZYRAG_API_KEY", "sk-a")

    def invoke(*arguments: object) -> Any:
        result = CliRunner().invoke(app, ["ingest", "--server", url, "--json", *map(str, arguments)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        result.values = json.loads(result.stdout) if result.stdout else None  # type: ignore[attr-defined]
        return result

    return invoke


def test_a_server_takes_what_a_store_takes(
    run: Callable[..., Any], rag: LazyRAG, docs: Path, passages: list[str], tmp_path: Path
) -> None:
    fed = run(docs)
    assert (fed.exit_code, fed.values["added"], fed.values["warmed"]) == (0, 5, fed.values["chunks_added"])
    other = LazyRAG(model=rag.config.model, store=tmp_path / "other", embedder="hash", chunk_size=100, namespace="a")
    for _ in other.ingest([docs], warm=False):
        pass
    assert rag.store is not None
    assert other.store is not None
    assert list(rag.store.documents("a")) == list(other.store.documents("a"))
    assert list(rag.store.chunks("a")) == list(other.store.chunks("a"))


def test_only_what_changed_is_sent_again(run: Callable[..., Any], docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(docs)
    sent: list[str] = []
    stock = RemoteRAG.add_documents

    def watched(self: RemoteRAG, documents: Any, *, warm: bool) -> Any:
        sent.extend(document.id for document, _ in documents)
        return stock(self, documents, warm=warm)

    monkeypatch.setattr(RemoteRAG, "add_documents", watched)
    assert run(docs).values["unchanged"] == 5
    assert sent == []
    (docs / "1.txt").write_text("Another text than before, and quite as long as it has to be.")
    (docs / "new.txt").write_text("A new text.")
    again = run(docs).values
    assert (again["added"], again["changed"], again["unchanged"]) == (1, 1, 4)
    assert sorted(sent) == [str(docs / "1.txt"), str(docs / "new.txt")]


def test_deletions_need_a_sync_and_reach_only_below_what_was_named(
    run: Callable[..., Any], docs: Path, rag: LazyRAG
) -> None:
    run(docs)
    (docs / "0.txt").unlink()
    (docs / "below" / "4.txt").unlink()
    kept = run(docs / "below").values
    assert (kept["deleted"], kept["missing"]) == (0, 1)
    assert run(docs / "below", "--sync").values["deleted"] == 1
    assert rag.store is not None
    assert [Path(d.id).name for d in rag.store.documents("a")] == ["0.txt", "1.txt", "2.txt", "3.txt"]
    dry = run(docs, "--sync", "--dry-run").values
    assert dry["missing"] == [str(docs / "0.txt")]
    assert run(docs, "--sync").values["deleted"] == 1


def test_what_is_refused_is_listed_and_the_rest_is_taken(
    run: Callable[..., Any], docs: Path, rag: LazyRAG, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAZYRAG_API_KEY", "sk-b")
    full = run(docs)
    assert (full.exit_code, full.values["added"], len(full.values["failed"])) == (1, 2, 3)
    assert "may hold 2 documents" in full.values["failed"][0]["error"]
    (docs / "0.txt").write_bytes(b"\xff\xfe\x00")
    (docs / "large.txt").write_text("word " * 4_000_000)
    monkeypatch.setenv("LAZYRAG_API_KEY", "sk-a")
    mixed = run(docs)
    assert (mixed.exit_code, mixed.values["added"]) == (1, 4)
    assert any("too large" in failed["error"] for failed in mixed.values["failed"])


def test_a_run_that_was_stopped_goes_on_where_it_stopped(url: str, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyrag.backend.server.feed.MOST_SENT", 1)
    server = RemoteRAG(url, "sk-a")
    stored = 0
    for event in feed(server, compare(server, [docs])):
        stored += getattr(event, "stage", "") == "store"
        if stored == 2:
            break
    left = compare(server, [docs])
    assert (len(left.unchanged), len(left.added)) == (2, 3)
    *_, summary = feed(server, left)
    assert (summary.added, len(compare(server, [docs]).unchanged)) == (3, 5)  # type: ignore[union-attr]
    server.close()


def test_a_busy_server_is_waited_for_and_one_that_is_gone_is_not(
    url: str, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = RemoteRAG(url, "sk-a")
    waits: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", waits.append)
    stock, answers = server._client().request, [429, 503]

    def busy(*arguments: Any, **fields: Any) -> Any:
        if answers:
            return remote.httpx.Response(answers.pop(), headers={"Retry-After": "7"})
        return stock(*arguments, **fields)

    monkeypatch.setattr(server._client(), "request", busy)
    assert len(compare(server, [docs]).added) == 5
    assert waits == [7, 7]
    server.close()
    with pytest.raises(EngineDeadError, match="There is no LazyRAG server"):
        compare(RemoteRAG("http://127.0.0.1:9"), [docs])


def test_chunks_that_are_stored_and_cold_are_warmed_too(
    run: Callable[..., Any], url: str, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lazyrag.backend.server.feed.LOOK_S", 0.01)
    # The engine has no disk, so whether notes are believed is not the files' matter here.
    monkeypatch.setattr(LazyRAG, "_is_kv_kept", lambda self, store, fingerprint: True)
    cold = run(docs, "--kv", "none").values
    assert (cold["added"], cold["warmed"]) == (5, 0)
    with closing(RemoteRAG(url, "sk-a")) as server:
        assert server.kv()["kept"] == 0
        again = run(docs).values
        assert (again["unchanged"], again["warmed"]) == (5, cold["chunks_added"])
        assert server.kv()["kept"] == server.kv()["chunks"] == cold["chunks_added"]
        assert run(docs).values["warmed"] == 0


def test_kv_that_the_server_cannot_compute_is_a_failure_of_the_run(
    run: Callable[..., Any], docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rebuild(self: LazyRAG, batch: int) -> Any:
        raise StoreError("The disk is full.")
        yield

    monkeypatch.setattr(LazyRAG, "rebuild_kv", rebuild)
    run(docs, "--kv", "none")
    failed = run(docs)
    assert failed.exit_code == 1
    assert "The disk is full" in failed.values["failed"][0]["error"]


def test_what_the_server_decides_cannot_be_set_beside_it(run: Callable[..., Any], docs: Path) -> None:
    refused = run(docs, "--namespace", "b", "--chunk-size", "50")
    assert refused.exit_code == 2
    assert "With --server, chunk_size and namespace cannot be set" in refused.stderr
