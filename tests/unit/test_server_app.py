"""What a server refuses, cancels, counts and keeps to itself. OpenAI's client is in tests/conformance."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from lazyrag.backend.engine import Cancel, Deliver, Request
from lazyrag.backend.fake import FakeEngine
from lazyrag.backend.server import service as service_module
from lazyrag.backend.server.app import create_app
from lazyrag.backend.server.auth import Keys
from lazyrag.backend.server.service import Limits
from lazyrag.backend.server.supervisor import SupervisedEngine
from lazyrag.client import LazyRAG
from lazyrag.config import Config
from lazyrag.errors import CapacityError, EngineDeadError, EngineError
from lazyrag.types import COMPUTED, HBM, Document

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PASSAGE = "The keeper of the northern light wrote a letter to the harbour every winter, and nobody answered it. " * 3
SECRET = "xyzzy-plugh"


class Watched(FakeEngine):
    """Remembers which requests were cancelled."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cancelled = threading.Semaphore(0)

    def submit(self, request: Request, deliver: Deliver) -> Cancel:
        stock = super().submit(request, deliver)

        def cancel() -> None:
            stock()
            self.cancelled.release()

        return cancel


@pytest.fixture
def folder(model_folder: Callable[..., Path]) -> Path:
    folder = model_folder("byte-level", chat_template=CHATML)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    return folder


Made = tuple[TestClient, LazyRAG, Watched]


@pytest.fixture
def make(folder: Path, tmp_path: Path) -> Iterator[Callable[..., Made]]:
    engines = []

    def make(*, limits: Limits | None = None, keys: Keys | None = None, **engine: Any) -> Made:
        engines.append(Watched(folder, **engine))
        rag = LazyRAG(model=str(folder), engine=engines[-1], store=tmp_path / "store", embedder="hash")
        return local(create_app(rag, keys=keys, limits=limits)), rag, engines[-1]

    yield make
    for engine in engines:
        engine.close()


def local(app: FastAPI, **arguments: Any) -> TestClient:
    return TestClient(app, **{"base_url": "http://127.0.0.1", "client": ("127.0.0.1", 50000), **arguments})


def completion(client: TestClient, prompt: Any = "Hello", **fields: Any) -> Any:
    model = client.get("/v1/models").json()["data"][0]["id"]
    return client.post("/v1/completions", json={"model": model, "prompt": prompt, **fields})


# ---------------------------------------------------------------- who is served


def test_without_keys_only_this_machine_is_served(make: Callable[..., Made]) -> None:
    client, rag, _ = make()
    assert client.get("/v1/models").status_code == 200
    for far in (
        local(create_app(rag), client=("10.0.0.9", 50000)),
        local(create_app(rag), base_url="http://rebound.example"),
    ):
        refused = far.get("/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_local")
        assert "--api-keys" in refused.json()["error"]["message"]
        assert far.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/x"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/generate"),
        ("GET", "/v1/tokenizer"),
        ("GET", "/v1/documents"),
        ("POST", "/v1/documents"),
        ("DELETE", "/v1/documents/x"),
        ("POST", "/v1/documents/needed"),
        ("POST", "/v1/pins"),
        ("GET", "/v1/kv"),
        ("POST", "/v1/kv/rebuild"),
        ("GET", "/v1/chunks"),
        ("GET", "/v1/chunks/x"),
        ("POST", "/v1/search"),
        ("POST", "/v1/segment"),
        ("POST", "/v1/query"),
        ("GET", "/metrics"),
    ],
)
def test_every_route_but_the_probes_wants_a_key(make: Callable[..., Made], method: str, path: str) -> None:
    client, _, engine = make(keys=Keys({"sk-good": "a"}))
    for header in ({}, {"Authorization": "Bearer sk-bad"}, {"Authorization": "Basic sk-good"}):
        refused = client.request(method, path, headers=header, json={})
        assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert client.request(method, path, headers={"Authorization": "Bearer sk-good"}, json={}).status_code != 401
    assert engine.requests == []


def test_every_route_is_in_the_test_above(make: Callable[..., Made]) -> None:
    client, _, _ = make()
    routes = {(m.upper(), p) for p, methods in client.get("/openapi.json").json()["paths"].items() for m in methods}
    assert len(routes - {("GET", "/health"), ("GET", "/ready")}) == 19


def test_tenants_share_neither_documents_nor_kv(make: Callable[..., Made]) -> None:
    client, _, engine = make(keys=Keys({"sk-a": "a", "sk-b": "b"}))
    a, b = {"Authorization": "Bearer sk-a"}, {"Authorization": "Bearer sk-b"}
    document = {"documents": [{"id": "d", "text": PASSAGE}], "warm": False}
    assert client.post("/v1/documents", json=document, headers=a).json()["added"] == 1
    assert client.get("/v1/documents", headers=b).json() == {"data": []}
    assert client.get("/v1/chunks", headers=b).json() == {"data": []}
    assert client.delete("/v1/documents/d", headers=b).status_code == 404
    (chunk, *_) = client.get("/v1/chunks", headers=a).json()["data"]
    assert client.get(f"/v1/chunks/{chunk['id']}", headers=b).status_code == 404
    client.post("/v1/documents", json=document, headers=b)
    sources = []
    for headers in (a, a, b):
        body = {"prompt": {"text": f"{PASSAGE}\nWhat was written?"}, "run": True}
        pieces = client.post("/v1/segment", json=body, headers=headers).json()["pieces"]
        sources.append({piece["kv"] for piece in pieces if piece["kind"] == "chunk"})
    assert sources == [{COMPUTED}, {HBM}, {COMPUTED}]
    assert {request.namespace for request in engine.requests} == {"a", "b"}


def test_no_tenant_waits_for_anothers_documents(make: Callable[..., Made]) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def hold(request: Request) -> EngineError | None:
        reached.set()
        assert go_on.wait(60)
        return None

    client, _, _ = make(keys=Keys({"sk-a": "a", "sk-b": "b"}), error=hold)

    def add(key: str, warm: bool) -> Any:
        body = {"documents": [{"id": "d", "text": PASSAGE}], "warm": warm}
        return client.post("/v1/documents", json=body, headers={"Authorization": f"Bearer sk-{key}"}).json()

    with ThreadPoolExecutor() as pool:
        slow = pool.submit(add, "a", True)
        assert reached.wait(60)
        again = pool.submit(add, "a", False)
        assert add("b", False)["added"] == 1
        assert not slow.done()
        go_on.set()
        assert slow.result()["warmed"] >= 1
        assert again.result()["unchanged"] == 1, "a tenant's own writes come one after the other"


# ---------------------------------------------------------------- limits


def test_a_body_that_is_too_large_is_refused_declared_or_not(make: Callable[..., Made]) -> None:
    client, _, engine = make(limits=Limits(body_bytes=1000))
    declared = client.post("/v1/completions", content=b"x" * 1001)
    assert (declared.status_code, declared.json()["error"]["code"]) == (413, "http_413")
    undeclared = client.post(
        "/v1/completions", content=(b"x" * 400 for _ in range(3)), headers={"Content-Type": "application/json"}
    )
    assert undeclared.status_code == 413
    assert completion(client).status_code == 200
    assert len(engine.requests) == 1


def test_a_full_queue_says_when_to_come_again(make: Callable[..., Made]) -> None:
    client, _, engine = make(limits=Limits(places=2))
    queue = client.app.state.service.queue  # type: ignore[attr-defined]
    wanted = client.get("/v1/models").json()["data"][0]["id"]
    with queue.places(2):
        for path, body in (
            ("completions", {"model": wanted, "prompt": "Hello"}),
            ("completions", {"model": wanted, "prompt": "Hello", "stream": True}),
            ("generate", {"prompts": [{"text": "Hello"}]}),
            ("segment", {"prompt": {"text": "Hello"}}),
            ("search", {"query": "Hello"}),
            ("query", {"question": "Hello?"}),
        ):
            full = client.post(f"/v1/{path}", json=body)
            assert (full.status_code, full.headers["Retry-After"]) == (429, "1")
            assert full.json()["error"]["type"] == "rate_limit_error"
    assert engine.requests == []
    assert completion(client, ["a", "b"]).status_code == 200
    assert completion(client, ["a", "b"], stream=True).status_code == 200
    assert queue.used == 0


def test_writes_that_wait_take_no_prompts_place_and_no_other_tenants(make: Callable[..., Made]) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def hold(request: Request) -> EngineError | None:
        if request.namespace == "a":
            reached.set()
            assert go_on.wait(60)
        return None

    limits = Limits(places=1, writes=2)
    client, _, _ = make(keys=Keys({"sk-a": "a", "sk-b": "b"}), limits=limits, error=hold)
    writers = client.app.state.service._writers  # type: ignore[attr-defined]

    def add(key: str, warm: bool) -> Any:
        body = {"documents": [PASSAGE], "warm": warm}
        return client.post("/v1/documents", json=body, headers={"Authorization": f"Bearer sk-{key}"})

    with ThreadPoolExecutor() as pool:
        slow = pool.submit(add, "a", True)
        assert reached.wait(60)
        waits = pool.submit(add, "a", False)
        while writers["a"][0].used < 2:
            time.sleep(0.01)
        try:
            full = add("a", False)
            assert (full.status_code, full.headers["Retry-After"]) == (429, "1")
            assert add("b", False).status_code == 200
            asked = client.post("/v1/search", json={"query": "Who?"}, headers={"Authorization": "Bearer sk-b"})
            assert asked.status_code == 200, "places are for prompts and searches"
        finally:
            go_on.set()
        assert (slow.result().status_code, waits.result().status_code) == (200, 200)


def test_more_prompts_than_there_are_places_are_never_taken(make: Callable[..., Made]) -> None:
    client, _, _ = make(limits=Limits(places=2))
    refused = completion(client, ["a", "b", "c"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "too_many_prompts")
    assert "Retry-After" not in refused.headers


def test_places_in_the_queue_come_back_whatever_happened(make: Callable[..., Made]) -> None:
    client, _, _ = make(limits=Limits(places=1), error=lambda request: CapacityError("No room."))
    for stream in (False, True) * 3:
        assert completion(client, stream=stream).status_code == 400
    assert client.app.state.service.queue.used == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", ["NaN", "1e400", "-Infinity", '"5"', "true", "[]", "{}", "1.5", str(10**40)])
@pytest.mark.parametrize("name", ["max_tokens", "seed", "top_k", "logprobs"])
def test_what_is_no_whole_number_is_refused_as_one(make: Callable[..., Made], name: str, value: str) -> None:
    client, _, engine = make()
    model = client.get("/v1/models").json()["data"][0]["id"]
    body = f'{{"model": {json.dumps(model)}, "prompt": "Hello", "{name}": {value}}}'
    refused = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", "yes"),
        ("ignore_eos", 1),
        ("temperature", "1"),
        ("stop", 5),
        ("n", True),
        ("n", 1.0),
        ("best_of", True),
    ],
)
def test_what_is_of_another_type_is_refused(make: Callable[..., Made], name: str, value: Any) -> None:
    client, _, engine = make()
    assert completion(client, **{name: value}).status_code == 400
    assert completion(client, temperature=1).status_code == 200, "a whole number is a number"
    assert len(engine.requests) == 1


# ---------------------------------------------------------------- callers who leave


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/generate"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_who_leaves_cancels_the_request(make: Callable[..., Made], path: str, stream: bool) -> None:
    client, _, engine = make(delay_s=0.01)
    model = client.get("/v1/models").json()["data"][0]["id"]
    endless = {"max_tokens": 3000, "ignore_eos": True}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"model": model, "prompt": ["Go on"] * 2, "stream": stream, **endless},
        "/v1/generate": {"prompts": [{"text": "Go on"}] * 2, "sampling": endless},
    }
    body = json.dumps(bodies[path]).encode()
    started = asyncio.Event()
    sent = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if sent:
            return sent.pop()
        while not (started.is_set() if stream else engine.requests):
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message.get("body"):
            started.set()

    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 80), "scheme": "http", "root_path": "",
        "http_version": "1.1", "asgi": {"version": "3.0", "spec_version": "2.3"},
    }  # fmt: skip
    await asyncio.wait_for(client.app(scope, receive, send), 30)  # type: ignore[arg-type]
    for _ in engine.requests:
        assert await asyncio.to_thread(engine.cancelled.acquire, timeout=30)
    assert client.app.state.service.queue.used == 0  # type: ignore[attr-defined]


# ---------------------------------------------------------------- errors and logs


@pytest.mark.parametrize(
    ("error", "status"),
    [(EngineDeadError("Gone.", fix="Wait."), 503), (EngineError("Odd."), 500), (CapacityError("No room."), 400)],
)
def test_an_engines_error_has_its_status_and_all_its_words(
    make: Callable[..., Made], error: EngineError, status: int
) -> None:
    client, _, _ = make(error=lambda request: error)
    for stream in (False, True):
        got = completion(client, stream=stream)
        assert got.status_code == status
        assert got.json()["error"]["message"] == str(error)
        assert got.json()["error"]["lazyrag"]["class"] == type(error).__name__
        assert ("Retry-After" in got.headers) is (status == 503)


def test_an_error_behind_the_first_token_is_an_event_of_the_stream(make: Callable[..., Made]) -> None:
    client, _, engine = make(delay_s=0.005)
    model = client.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": "Go on", "stream": True, "max_tokens": 3000, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        threading.Timer(0.05, engine.close).start()
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "engine_unavailable"


def test_what_nobody_foresaw_is_an_error_in_the_same_shape(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client, rag, _ = make()

    def plan(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(SECRET)

    monkeypatch.setattr(rag, "plan", plan)
    with caplog.at_level(logging.DEBUG):
        got = completion(client)
    assert (got.status_code, got.json()["error"]["code"]) == (500, "server_error")
    assert "RuntimeError" in caplog.text
    assert "test_server_app.py" in caplog.text
    assert SECRET not in caplog.text + got.text


def test_no_text_of_a_request_is_logged_or_repeated_in_an_error(
    make: Callable[..., Made], caplog: pytest.LogCaptureFixture
) -> None:
    client, _, _ = make()
    model = client.get("/v1/models").json()["data"][0]["id"]
    with caplog.at_level(logging.DEBUG, "lazyrag"):
        completion(client, SECRET)
        client.post("/v1/documents", json={"documents": [{"id": SECRET, "text": SECRET}], "warm": False})
        wrong = [
            client.post("/v1/completions", json={"model": model, "prompt": {"text": SECRET}}),
            client.post("/v1/completions", json={"model": SECRET, "prompt": "?"}),
            client.post("/v1/chat/completions", json={"model": model, "messages": [{"role": SECRET, "content": ""}]}),
            client.post("/v1/completions", content=f'{{"model": "{SECRET}'),
            client.post("/v1/query", json={"question": SECRET, "k": 0}),
            completion(client, f"{SECRET} " * 9000),
        ]
    assert {response.status_code for response in wrong} == {400, 404}
    assert SECRET not in caplog.text + "".join(response.text for response in wrong)


def test_unknown_routes_and_methods_answer_in_the_same_shape(make: Callable[..., Made]) -> None:
    client, _, _ = make()
    for method, path, status in (("GET", "/v1/nothing", 404), ("PUT", "/v1/completions", 405)):
        got = client.request(method, path)
        assert (got.status_code, got.json()["error"]["code"]) == (status, f"http_{status}")


def test_tools_and_settings_that_are_not_served_are_refused(make: Callable[..., Made]) -> None:
    client, _, engine = make()
    model = client.get("/v1/models").json()["data"][0]["id"]
    chat = {"model": model, "messages": [{"role": "user", "content": "?"}]}
    for field in (
        {"tools": [{"type": "function"}]},
        {"n": 2},
        {"audio": {}},
        {"response_format": {"type": "json_schema"}},
    ):
        assert client.post("/v1/chat/completions", json={**chat, **field}).status_code == 400
    assert engine.requests == []


def test_a_mode_that_the_engine_cannot_run_is_refused_with_what_to_do(make: Callable[..., Made]) -> None:
    client, _, _ = make(mode="exact")
    assert completion(client, mode="exact").status_code == 200
    refused = completion(client, mode="lazy")
    assert refused.status_code == 400
    own = refused.json()["error"]["lazyrag"]
    assert own["what"] == "Mode lazy cannot be had:"
    assert "the engine runs in mode exact" in own["why"]
    assert "Start it in another mode" in own["fix"]


@pytest.mark.parametrize("path", ["completions", "chat/completions", "segment", "query"])
def test_a_client_may_have_layers_loaded_only_where_the_operator_says_so(
    path: str, make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    def status(made: Made, mode: str) -> int:
        client, rag, _ = made
        list(rag.ingest(documents=[Document("a", "The lamp is high.", "a.txt")], warm=False))
        model = client.get("/v1/models").json()["data"][0]["id"]
        bodies: dict[str, dict[str, Any]] = {
            "completions": {"model": model, "prompt": "Hello"},
            "chat/completions": {"model": model, "messages": [{"role": "user", "content": "Hello"}]},
            "segment": {"prompt": {"text": "Hello"}},
            "query": {"question": "How high is the lamp?"},
        }
        answer = client.post(f"/v1/{path}", json=bodies[path] | {"mode": mode})
        if answer.status_code != 200:
            assert "serve_recompute" in answer.json()["error"]["lazyrag"]["fix"]
        return int(answer.status_code)

    asked = "sink+recompute=0.2"
    assert status(make(), asked) == 400
    assert status(make(), "sink+first_k=32") == 200
    assert status(make(mode="lazy+recompute=0.1"), asked) == 200
    monkeypatch.setenv("LAZYRAG_SERVE_RECOMPUTE", "true")
    assert status(make(), asked) == 200


def test_why_a_mode_runs_is_told_without_the_servers_folders(make: Callable[..., Made], tmp_path: Path) -> None:
    _, rag, engine = make()
    settings = tmp_path / "lazyrag.toml"
    settings.write_text('mode = "lazy"')
    config = Config.load(settings, env={}, model=rag.config.model, store=tmp_path / "store")
    client = local(create_app(LazyRAG(config, engine=engine)))
    answer = completion(client).json()
    assert answer["lazyrag"]["mode_why"] == "set by lazyrag.toml"
    own = client.post("/v1/generate", json={"prompts": [{"text": "Hello"}]})
    assert "set by lazyrag.toml" in own.text
    assert str(tmp_path) not in own.text + json.dumps(answer)


def test_an_answer_of_openais_client_is_taken_back(make: Callable[..., Made]) -> None:
    message = pytest.importorskip("openai.types.chat").ChatCompletionMessage(role="assistant", content="Yes.")
    client, _, _ = make()
    model = client.get("/v1/models").json()["data"][0]["id"]
    messages = [{"role": "user", "content": "Hi"}, message.model_dump(), {"role": "user", "content": "Why?"}]
    for extra in ({}, {"annotations": []}):
        messages[1] |= extra
        answered = client.post("/v1/chat/completions", json={"model": model, "messages": messages, "max_tokens": 1})
        assert answered.status_code == 200, answered.text


def test_a_call_in_the_history_is_shown_to_the_template_as_an_object(make: Callable[..., Made]) -> None:
    client, _, _ = make()
    model = client.get("/v1/models").json()["data"][0]["id"]
    for arguments, status in (('{"a": 1}', 200), ("{", 400), ("[1]", 400)):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "42", "tool_call_id": "1"},
        ]
        got = client.post("/v1/chat/completions", json={"model": model, "messages": messages})
        assert got.status_code == status


# ---------------------------------------------------------------- probes and counters


def test_a_server_without_an_engine_is_healthy_and_not_ready(folder: Path) -> None:
    may_start = threading.Event()
    may_start.set()

    def start() -> FakeEngine:
        assert may_start.wait(30)
        return FakeEngine(folder)

    engine = SupervisedEngine(start)
    rag = LazyRAG(model=str(folder), engine=engine)
    client = local(create_app(rag, engine=engine))
    assert client.get("/ready").status_code == 200
    may_start.clear()
    assert engine._engine is not None
    engine._engine.close()
    assert completion(client).status_code == 503
    assert (client.get("/ready").status_code, client.get("/health").status_code) == (503, 200)
    assert "lazyrag_engine_up 0" in client.get("/metrics").text
    may_start.set()
    engine.close()


def test_metrics_count_what_was_reused_and_from_where(make: Callable[..., Made]) -> None:
    client, _, _ = make()
    client.post("/v1/documents", json={"documents": [PASSAGE], "warm": False})
    reused, prompt, tokens = 0, 0, 0
    for _ in range(3):
        usage = completion(client, f"{PASSAGE}\nWhat was written?").json()["usage"]
        reused += usage["prompt_tokens_details"]["cached_tokens"]
        prompt += usage["prompt_tokens"]
        tokens += usage["completion_tokens"]
    client.get("/v1/nothing")
    text = client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert all(family.documentation for family in families.values())
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    values = {name: float(value) for name, value in values.items()}
    assert reused > 0
    assert values["lazyrag_prompt_tokens_total"] == prompt
    assert values["lazyrag_reused_tokens_total"] == reused
    assert values["lazyrag_generated_tokens_total"] == tokens
    assert values['lazyrag_segment_tokens_total{source="hbm"}'] == reused
    assert values['lazyrag_segment_tokens_total{source="computed"}'] == reused / 2
    assert values['lazyrag_segments_total{source="hbm"}'] == 2 * values['lazyrag_segments_total{source="computed"}'] > 0
    assert values['lazyrag_reused_share_bucket{le="0.0"}'] == 1
    assert values["lazyrag_reused_share_sum"] == pytest.approx(reused / (prompt / 3))
    assert families["lazyrag_ttft_seconds"].type == families["lazyrag_reused_share"].type == "histogram"
    assert values['lazyrag_ttft_seconds_bucket{le="+Inf"}'] == values["lazyrag_ttft_seconds_count"] == 3
    assert values['lazyrag_responses_total{route="/v1/completions",status="200"}'] == 3
    assert values['lazyrag_responses_total{route="other",status="404"}'] == 1


def test_a_stream_that_nobody_reads_is_closed() -> None:
    """`begun` closes what it has begun if the first item is an error."""
    closed = []

    async def stream() -> Any:
        try:
            raise CapacityError("No room.")
            yield 1
        finally:
            closed.append(True)

    async def run() -> None:
        with pytest.raises(CapacityError):
            await service_module.begun(stream())

    asyncio.run(run())
    assert closed == [True]


# ---------------------------------------------------------------- quotas, operators, pins


def test_a_tenant_that_is_full_is_refused_and_nobody_else_is(make: Callable[..., Made]) -> None:
    keys = Keys({"sk-a": "a", "sk-b": "b"}, quotas={"a": {"documents": 1}})
    client, _, _ = make(keys=keys)
    a, b = {"Authorization": "Bearer sk-a"}, {"Authorization": "Bearer sk-b"}

    def add(header: Any, *ids: str) -> Any:
        documents = [{"id": id, "text": f"{id}. {PASSAGE}"} for id in ids]
        return client.post("/v1/documents", json={"documents": documents, "warm": False}, headers=header)

    some = add(a, "one", "two").json()
    assert (some["added"], [(f["id"], f["code"]) for f in some["failed"]]) == (1, [("two", "quota_exceeded")])
    refused = add(a, "three")
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["type"]) == (403, "quota_exceeded", "permission_error")
    assert "may hold 1 documents" in error["message"]
    assert error["lazyrag"]["class"] == "QuotaError"
    assert add(b, "one", "two").json()["added"] == 2
    client.delete("/v1/documents/one", headers=a)
    assert add(a, "three").json()["added"] == 1


def test_numbers_of_all_tenants_are_for_operators(make: Callable[..., Made]) -> None:
    client, _, _ = make(keys=Keys({"sk-a": "a", "sk-b": "b"}, operators=["b"]))
    refused = client.get("/metrics", headers={"Authorization": "Bearer sk-a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_an_operator")
    assert client.get("/metrics", headers={"Authorization": "Bearer sk-b"}).status_code == 200


def test_documents_are_pinned_and_unpinned_by_their_owner_only(make: Callable[..., Made]) -> None:
    client, _, _ = make(keys=Keys({"sk-a": "a", "sk-b": "b"}))
    a, b = {"Authorization": "Bearer sk-a"}, {"Authorization": "Bearer sk-b"}
    client.post("/v1/documents", json={"documents": [{"id": "d", "text": PASSAGE}], "warm": False}, headers=a)
    assert client.post("/v1/pins", json={"ids": ["d"]}, headers=b).status_code == 404
    assert client.post("/v1/pins", json={"ids": ["d"]}, headers=a).json() == {"changed": 1}
    assert client.get("/v1/documents", headers=a).json()["data"][0]["pinned"]
    assert client.post("/v1/pins", json={"ids": ["d", "e"]}, headers=a).status_code == 404
    assert client.post("/v1/pins", json={"ids": ["d"], "pinned": False}, headers=a).json() == {"changed": 1}
