"""Documents in, chunks out, questions answered, over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient

from lazyrag.backend.fake import FakeEngine
from lazyrag.backend.server.app import create_app
from lazyrag.backend.server.auth import Keys
from lazyrag.backend.server.rebuild import Rebuilding, State
from lazyrag.client import LazyRAG
from lazyrag.errors import EngineDeadError
from lazyrag.explain import ESCAPED, EVICTED, FIRST_USE, FIXES, NOT_REGISTERED, OTHER_MODEL, OTHER_NAMESPACE
from lazyrag.ingest import Progress, Summary
from lazyrag.plan import TOO_SHORT
from lazyrag.types import COMPUTED, HBM

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LETTER = "The keeper of the northern light wrote a letter to the harbour every winter, and nobody answered it. " * 3
BRIDGE = "The bridge over the river was measured twice, and both times it was longer than the year before. " * 3


@pytest.fixture
def rag(model_folder: Callable[..., Path], tmp_path: Path) -> Iterator[LazyRAG]:
    folder = model_folder("byte-level", chat_template=CHATML)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    engine = FakeEngine(folder)
    yield LazyRAG(model=str(folder), engine=engine, store=tmp_path / "store", embedder="hash")
    engine.close()


@pytest.fixture
def client(rag: LazyRAG) -> TestClient:
    return TestClient(create_app(rag), base_url="http://127.0.0.1", client=("127.0.0.1", 50000))


def add(client: TestClient, *documents: Any, warm: bool = False) -> Any:
    return client.post("/v1/documents", json={"documents": documents, "warm": warm}).json()


def test_a_document_is_added_listed_changed_and_deleted(client: TestClient) -> None:
    assert client.get("/v1/documents").json() == {"data": []}
    given = {"id": "a/letter.txt", "text": LETTER, "title": "Letter", "metadata": {"year": 1901}}
    assert add(client, given)["added"] == 1
    assert add(client, given)["unchanged"] == 1
    listed = {"id": "a/letter.txt", "source": "a/letter.txt", "title": "Letter", "metadata": {"year": 1901}}
    assert client.get("/v1/documents").json() == {"data": [{**listed, "pinned": False}]}
    changed = add(client, {**given, "text": LETTER + BRIDGE})
    assert (changed["changed"], changed["added"]) == (1, 0)
    gone = client.delete(f"/v1/documents/{quote('a/letter.txt', safe='')}").json()
    assert gone["deleted"]
    assert gone["chunks_removed"] > 0
    assert client.get("/v1/chunks").json() == {"data": []}
    assert client.delete("/v1/documents/a/letter.txt").status_code == 404


def test_a_text_without_an_id_is_known_by_its_text(client: TestClient) -> None:
    first = add(client, LETTER, {"text": BRIDGE})
    assert (first["added"], len(set(first["ids"]))) == (2, 2)
    assert add(client, LETTER)["ids"] == first["ids"][:1]
    assert len(client.get("/v1/documents").json()["data"]) == 2


def test_the_kv_is_computed_when_a_document_comes_in(client: TestClient) -> None:
    assert add(client, LETTER, warm=True)["warmed"] >= 1
    pieces = client.post("/v1/segment", json={"prompt": {"text": f"{LETTER}\nWhy?"}, "run": True}).json()["pieces"]
    assert {piece["kv"] for piece in pieces if piece["kind"] == "chunk"} == {HBM}


def test_documents_that_cannot_be_taken_are_named(client: TestClient) -> None:
    got = add(client, {"id": "good", "text": LETTER}, {"id": "good", "text": BRIDGE})
    assert got["added"] == 1
    assert [failed["id"] for failed in got["failed"]] == ["good"]


def test_a_document_cannot_pass_for_a_frameworks_node(client: TestClient) -> None:
    got = add(client, {"id": "forged", "text": LETTER, "metadata": {"_content": "{}"}}, {"id": "good", "text": BRIDGE})
    assert (got["added"], [failed["id"] for failed in got["failed"]]) == (1, ["forged"])
    assert (got["failed"][0]["code"], "_content" in got["failed"][0]["error"]) == ("invalid_input", True)


def test_lists_come_in_pages(client: TestClient) -> None:
    add(client, *({"id": f"d{n}", "text": f"{n} {LETTER}"} for n in range(5)))
    first = client.get("/v1/documents?limit=2").json()["data"]
    rest = client.get("/v1/documents?limit=9&after=d1").json()["data"]
    assert [document["id"] for document in [*first, *rest]] == [f"d{n}" for n in range(5)]
    every = client.get("/v1/chunks").json()["data"]
    paged = [client.get(f"/v1/chunks?limit=1&skip={n}").json()["data"] for n in range(len(every))]
    assert [chunk for (chunk,) in paged] == every


def test_a_chunk_is_shown_with_its_places(client: TestClient) -> None:
    add(client, {"id": "one", "text": LETTER}, {"id": "two", "text": LETTER})
    chunk = client.get("/v1/chunks").json()["data"][0]
    got = client.get(f"/v1/chunks/{chunk['id']}").json()
    assert got["text"] == LETTER[chunk["start"] : chunk["end"]]
    assert [place["document_id"] for place in got["places"]] == ["one", "two"]
    assert client.get("/v1/chunks/none").status_code == 404


def test_a_prompt_is_explained_piece_by_piece(client: TestClient) -> None:
    add(client, LETTER)
    prompt = f"Read this.\n\n{LETTER.strip()}\n\nWhy?"
    got = client.post("/v1/segment", json={"prompt": {"messages": [{"role": "user", "content": prompt}]}}).json()
    assert prompt in "".join(piece["text"] for piece in got["pieces"])
    assert got["num_tokens"] == sum(len(piece["token_ids"]) for piece in got["pieces"])
    assert any(piece["reuse"] for piece in got["pieces"])
    ran = client.post("/v1/segment", json={"prompt": {"text": prompt}, "run": True}).json()
    assert "kept for the next request" in " ".join(piece["reason"] or "" for piece in ran["pieces"])


@pytest.mark.parametrize("prompt", [{}, {"text": "a", "messages": []}])
def test_a_prompt_is_one_of_its_forms(client: TestClient, prompt: dict[str, Any]) -> None:
    refused = client.post("/v1/segment", json={"prompt": prompt})
    assert refused.status_code == 400
    assert "one of text, messages and pieces" in refused.json()["error"]["message"]


def test_a_question_is_answered_with_its_sources(client: TestClient, rag: LazyRAG) -> None:
    add(client, {"id": "letter", "text": LETTER}, {"id": "bridge", "text": BRIDGE})
    question = "How long was the bridge over the river?"
    got = client.post("/v1/query", json={"question": question, "k": 2}).json()
    wanted = rag.query(question, 2)
    assert got["answer"] == wanted.text
    assert [source["id"] for source in got["sources"]] == [hit.chunk.id for hit in wanted.hits]
    assert got["sources"][0]["document_id"] == "bridge"
    assert {source["kv"] for source in got["sources"]} <= {COMPUTED, HBM}
    assert (got["mode"], got["mode_why"]) == (rag.choice.mode, rag.choice.why)
    asked = client.post("/v1/query", json={"question": question, "mode": "exact"}).json()
    assert (asked["mode"], asked["mode_why"]) == ("exact", "asked for by the request")
    assert client.post("/v1/query", json={"question": question, "mode": "prefix"}).status_code == 400
    found = client.post("/v1/search", json={"query": question, "k": 1}).json()["data"]
    assert [hit["id"] for hit in found] == [wanted.hits[0].chunk.id]
    assert found[0]["text"] == wanted.hits[0].chunk.text


def test_a_question_to_nothing_is_refused_with_the_reason_and_no_folder(client: TestClient, tmp_path: Path) -> None:
    for path, body in (("/v1/query", {"question": "Why?"}), ("/v1/search", {"query": "Why?"})):
        refused = client.post(path, json=body)
        assert refused.status_code == 400
        assert "no store" in refused.json()["error"]["message"]
        assert str(tmp_path) not in refused.text
    add(client, {"id": "a", "text": LETTER})
    client.delete("/v1/documents/a")
    refused = client.post("/v1/query", json={"question": "Why?"})
    assert "nothing to answer from" in refused.json()["error"]["message"]
    assert str(tmp_path) not in refused.text


@pytest.mark.parametrize("field", ['"mtime": 1e400', '"mtime": NaN', f'"pages": [0, {2**70}]', '"pages": [-1]'])
def test_numbers_that_no_file_has_are_refused(client: TestClient, field: str) -> None:
    body = f'{{"documents": [{{"text": "x", {field}}}]}}'
    refused = client.post("/v1/documents", content=body, headers={"Content-Type": "application/json"})
    assert refused.status_code == 400
    assert client.get("/v1/documents").json() == {"data": []}


# ---------------------------------------------------------------- why not


@pytest.fixture
def tenants(model_folder: Callable[..., Path], saving_engine: Callable[..., Any], tmp_path: Path) -> Iterator[Any]:
    """Start a server on the same store; `engine` is what it runs on, with this fingerprint."""
    folder = model_folder("byte-level", chat_template=CHATML)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    keys = Keys({"sk-a": "a", "sk-b": "b", "sk-operator": "operator"}, operators=["operator"])
    engines = []

    def make(fingerprint: str) -> TestClient:
        engines.append(saving_engine(folder, tmp_path / "store" / "kv", fingerprint))
        rag = LazyRAG(model=str(folder), engine=engines[-1], store=tmp_path / "store", embedder="hash")
        return TestClient(create_app(rag, keys=keys), base_url="http://127.0.0.1")

    yield make
    for engine in engines:
        engine.close()


def why(client: TestClient, key: str, text: str, *, run: bool = False) -> list[tuple[str, str | None]]:
    """Kind and reason of what a prompt shows of a text."""
    prompt = {"text": f"Context:\n\n{text}\n\nAnswer:"}
    header = {"Authorization": f"Bearer sk-{key}"}
    pieces = client.post("/v1/segment", json={"prompt": prompt, "run": run}, headers=header).json()["pieces"]
    return [(piece["kind"], piece["reason"]) for piece in pieces if len(piece["text"]) > 20]


def test_each_reason_for_computing_a_text_is_told(tenants: Any, tmp_path: Path) -> None:
    first = tenants("1" * 64)
    a = {"Authorization": "Bearer sk-a"}
    said = 'The keeper said: "Nobody answers."\nAnd so it was, for "seven" years,\nuntil the "winter" ended. ' * 2
    first.post("/v1/documents", json={"documents": [LETTER, said]}, headers=a)
    assert why(first, "a", LETTER, run=True) == [("chunk", None)]
    assert why(first, "a", BRIDGE) == [("literal", NOT_REGISTERED)]
    assert why(first, "a", json.dumps(said)) == [("literal", FIXES[ESCAPED])]
    short = "Nobody answered the keeper."
    first.post("/v1/documents", json={"documents": [BRIDGE, short], "warm": False}, headers=a)
    assert why(first, "a", short) == [("literal", TOO_SHORT)]
    assert why(first, "b", short) == [("literal", NOT_REGISTERED)]
    assert why(first, "a", BRIDGE, run=True) == [("chunk", FIRST_USE)]

    second = tenants("2" * 64)
    assert why(second, "a", LETTER, run=True) == [("chunk", OTHER_MODEL)]
    second.post("/v1/documents", json={"documents": ["Another one. " * 9]}, headers=a)
    assert settled(second, a)["kept"] == 5  # those from before in the background
    for file in tmp_path.glob("store/kv/2222*/**/*.safetensors"):
        file.unlink()
    third = tenants("2" * 64)
    assert why(third, "a", LETTER, run=True) == [("chunk", EVICTED)]


def test_that_a_text_is_another_tenants_is_told_to_operators_only(tenants: Any) -> None:
    client = tenants("1" * 64)
    client.post("/v1/documents", json={"documents": [LETTER]}, headers={"Authorization": "Bearer sk-a"})
    assert why(client, "operator", LETTER) == [("literal", OTHER_NAMESPACE)]
    assert why(client, "b", LETTER) == [("literal", NOT_REGISTERED)]


# ---------------------------------------------------------------- KV of another model


def test_kv_of_another_model_is_rebuilt_in_the_background(tenants: Any, tmp_path: Path) -> None:
    a = {"Authorization": "Bearer sk-a"}
    with tenants("1" * 64) as first:
        first.post("/v1/documents", json={"documents": [LETTER, BRIDGE]}, headers=a)
        kept = first.get("/v1/kv", headers=a).json()
        chunks = kept["chunks"]
        assert (kept["kept"], kept["of_another"], kept["rebuilding"]["running"]) == (chunks, False, False)
        assert first.app.state.service.look_at_kv(rebuild=False) == []  # type: ignore[attr-defined]
    with tenants("2" * 64) as second:
        (said,) = second.app.state.service.look_at_kv(rebuild=False)
        assert said.startswith(f"{chunks} of {chunks} chunks of namespace 'a': their KV on disk is of another model")
        assert second.get("/v1/kv", headers=a).json()["kept"] == 0
        begun = second.post("/v1/kv/rebuild", headers=a)
        assert (begun.status_code, begun.json()["of_another"]) == (202, True)
        state = settled(second, a)
        assert (state["kept"], state["of_another"], state["rebuilding"]["error"]) == (chunks, False, "")
        assert second.get("/v1/kv", headers={"Authorization": "Bearer sk-b"}).json()["chunks"] == 0
    with tenants("3" * 64) as third:
        assert "in the background" in third.app.state.service.look_at_kv(rebuild=True)[0]
        assert settled(third, a)["kept"] == chunks


def settled(client: TestClient, headers: dict[str, str]) -> Any:
    """/v1/kv, when nothing is computed in the background any more."""
    while (state := client.get("/v1/kv", headers=headers).json())["rebuilding"]["running"]:
        pass
    return state


def test_a_request_waits_for_its_own_chunks_and_the_others_are_computed_in_the_background(
    tenants: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = {"Authorization": "Bearer sk-a"}
    begun: list[LazyRAG] = []
    with tenants("1" * 64) as client:
        first = {"documents": [{"id": "first", "text": LETTER}], "warm": False}
        client.post("/v1/documents", json=first, headers=a)
        assert client.get("/v1/kv", headers=a).json()["kept"] == 0
        with monkeypatch.context() as patch:
            patch.setattr(Rebuilding, "start", lambda self, rag: begun.append(rag))
            second = {"documents": [{"id": "second", "text": BRIDGE}]}
            warmed = client.post("/v1/documents", json=second, headers=a).json()["warmed"]
            kv = client.get("/v1/kv", headers=a).json()
            assert (kv["kept"], len(begun)) == (warmed, 1)
            assert 0 < warmed < kv["chunks"]
            # The same document again, with KV this time: it is what the request brought.
            assert client.post("/v1/documents", json={**first, "warm": True}, headers=a).json()["unchanged"] == 1
            assert client.get("/v1/kv", headers=a).json()["kept"] == kv["chunks"]
        third = {"documents": ["The third one is as long as any. " * 9], "warm": False}
        client.post("/v1/documents", json=third, headers=a)
        client.post("/v1/documents", json=second, headers=a)
        kv = settled(client, a)
        assert kv["kept"] == kv["chunks"]


def test_a_rebuilding_waits_for_an_engine_that_has_died(
    rag: LazyRAG, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(client, LETTER)
    errors = [EngineDeadError("The engine stopped."), EngineDeadError("The engine stopped.")]

    def rebuild(batch: int) -> Any:
        if errors:
            raise errors.pop()
        yield Progress("warm", 3, 3, 0)
        yield Summary(warmed=3)

    monkeypatch.setattr(rag, "rebuild_kv", rebuild)
    monkeypatch.setattr("lazyrag.backend.server.rebuild.PAUSE_S", 0.01)
    stopping = threading.Event()
    rebuilding = Rebuilding(stopping)
    rebuilding.start(rag)
    while rebuilding.state("").running:
        pass
    assert (rebuilding.state(""), errors) == (State(False, 3, 3, ""), [])
    stopping.set()
    rebuilding.close()
