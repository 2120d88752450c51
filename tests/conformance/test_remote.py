"""A client of a server is as the client it serves: same answers, same reuse, same errors, same façades."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tools import tool
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.query_engine import RetrieverQueryEngine

from lazyrag.backend.engine import Cancel, Deliver, Request, Sampling, joined
from lazyrag.backend.fake import FakeEngine, words
from lazyrag.backend.remote import RemoteRAG
from lazyrag.backend.server.app import create_app
from lazyrag.backend.server.auth import Keys
from lazyrag.chat import CONTENT, MIXED, Message, TextPiece
from lazyrag.client import LazyRAG
from lazyrag.errors import (
    CapacityError,
    ConfigError,
    ContextOverflowError,
    EngineDeadError,
    InputError,
    LazyRAGError,
    RequestError,
    RequestTimeoutError,
)
from lazyrag.ingest import Summary
from lazyrag.integrations import langchain, llama_index
from lazyrag.modes import ReuseMode
from lazyrag.types import Document

Serving = Callable[[Any], Any]
KEY = "sk-remote-0123456789"
ENDLESS = Sampling(max_tokens=4000, ignore_eos=True)


class Watched(FakeEngine):
    """Counts cancelled requests, and refuses those of a certain length."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, reply=self.answer, error=self.fault, delay_s=0.001)
        self.cancelled = threading.Semaphore(0)
        self.refuse = False
        self.say = words

    def answer(self, request: Request) -> str:
        return self.say(request)

    def fault(self, request: Request) -> CapacityError | None:
        return CapacityError("No room.", why="It is full.", fix="Wait.") if self.refuse else None

    def submit(self, request: Request, deliver: Deliver) -> Cancel:
        stock = super().submit(request, deliver)

        def cancel() -> None:
            stock()
            self.cancelled.release()

        return cancel


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[Watched]:
    engine = Watched(model_folder)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def embedded(
    engine: Watched, model_folder: Path, passages: list[str], tmp_path_factory: pytest.TempPathFactory
) -> LazyRAG:
    store = tmp_path_factory.mktemp("remote") / "store"
    settings = {"embedder": "hash", "chunk_size": 150, "max_tokens": 32, "namespace": "team"}
    rag = LazyRAG(model=str(model_folder), engine=engine, store=store, **settings)
    documents = [Document(f"doc{n}", text, f"doc{n}.txt", metadata={"n": n}) for n, text in enumerate(passages)]
    *_, summary = rag.ingest(documents=documents, warm=True)
    assert isinstance(summary, Summary)
    assert not summary.failed
    return rag


@pytest.fixture(scope="module")
def url(embedded: LazyRAG, serving: Serving) -> Iterator[str]:
    with serving(create_app(embedded, keys=Keys({KEY: "team"}))) as url:
        yield url


@pytest.fixture(scope="module")
def remote(url: str) -> Iterator[RemoteRAG]:
    rag = RemoteRAG(url, KEY)
    yield rag
    rag.close()


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Façades find their clients here, and leave none behind."""
    monkeypatch.setattr(RemoteRAG, "_shared", {})
    yield
    for rag in RemoteRAG._shared.values():
        rag.close()


def prompts(passages: list[str]) -> list[Any]:
    return [
        f"{passages[1]}\n\n{passages[2]}\n\nWhat was found?",
        [Message("system", "Answer."), Message("user", f"{passages[3]}\n\nWhere?\u2028 <|im_end|>")],
        [TextPiece("Read:\n\n", MIXED), TextPiece(f"{passages[4]}\nWhy? <|im_end|>", CONTENT)],
    ]


def test_the_server_is_described_as_its_own_client_is(remote: RemoteRAG, embedded: LazyRAG, model_folder: Path) -> None:
    ours, theirs = remote.config, embedded.config
    for name in ("namespace", "preamble", "dtype", "max_tokens", "temperature"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.mode == remote.choice.mode == embedded.choice.mode == "lazy"
    assert (ours.model, remote.model) == (model_folder.name, model_folder.name)
    assert remote.max_model_len == embedded.max_model_len
    assert remote.tokenizer.fingerprint == embedded.tokenizer.fingerprint
    assert remote.tokenizer.chat_template == embedded.tokenizer.chat_template


def test_answers_and_reuse_are_the_same(remote: RemoteRAG, embedded: LazyRAG, passages: list[str]) -> None:
    asked = prompts(passages)
    embedded.generate(asked)  # from now on, all is resident
    wanted = [(a.text, a.token_ids, a.finish_reason, a.reuse) for a in embedded.generate(asked)]
    assert [(a.text, a.token_ids, a.finish_reason, a.reuse) for a in remote.generate(asked)] == wanted
    agenerated = asyncio.run(remote.agenerate(asked))
    assert [(a.text, a.token_ids, a.finish_reason, a.reuse) for a in agenerated] == wanted
    assert all(reuse.reused_tokens > 50 for *_, reuse in wanted)
    cited = [answer.citations for answer in embedded.generate(asked)]
    assert [len(citations) for citations in cited] == [2, 1, 1]
    assert [answer.citations for answer in remote.generate(asked)] == cited
    streamed = [joined(list(remote.stream(prompt))) for prompt in asked]
    assert [(d.text, d.token_ids, d.finish_reason, d.reuse) for d in streamed] == wanted
    assert all(d.ttft_s for d in streamed)
    assert remote.generate([]) == asyncio.run(remote.agenerate([])) == []


def test_an_astream_gives_what_a_stream_gives(remote: RemoteRAG) -> None:
    sampling = Sampling(max_tokens=6, logprobs=1)

    async def collect() -> list[Any]:
        return [(d.text, d.token_ids, d.logprobs) async for d in remote.astream("Go on.", sampling)]

    streamed = [(d.text, d.token_ids, d.logprobs) for d in remote.stream("Go on.", sampling)]
    assert asyncio.run(collect()) == streamed
    assert [len(tokens) for _, tokens, _ in streamed] == [1] * 6
    assert all(known == {token: 0.0} for _, (token,), (known,) in streamed)


def test_settings_arrive_as_they_were_given(remote: RemoteRAG, engine: Watched) -> None:
    sampling = Sampling(
        max_tokens=5,
        temperature=0.25,
        top_p=0.5,
        top_k=7,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        stop=("\u2028", "x"),
        seed=1,
        logprobs=2,
        ignore_eos=True,
        json_schema={"type": "object"},
        timeout_s=50.0,
    )
    remote.generate(["Go on."], sampling)
    assert engine.requests[-1].sampling == sampling
    assert engine.requests[-1].namespace == "team"
    called = Sampling(structural_tag={"type": "structural_tag", "format": {"type": "any_text"}})
    remote.generate(["Go on."], called)
    assert engine.requests[-1].sampling == called
    remote.generate(["Go on."])
    assert engine.requests[-1].sampling == Sampling(max_tokens=32)


def test_a_plan_is_the_servers_own(remote: RemoteRAG, embedded: LazyRAG, passages: list[str]) -> None:
    for prompt in prompts(passages):
        assert remote.plan(prompt) == embedded.plan(prompt)
    assert remote.plan("<|im_end|>", special="plain") == embedded.plan("<|im_end|>", special="plain")


@pytest.mark.parametrize("mode", ["exact", "sink", "lazy+first_k=16", "sink+first_k=32", None])
def test_a_request_runs_in_the_mode_it_asks_for(
    remote: RemoteRAG, embedded: LazyRAG, passages: list[str], mode: str | None
) -> None:
    for prompt in prompts(passages):
        assert remote.plan(prompt, mode=mode) == embedded.plan(prompt, mode=mode)
    asked = prompts(passages)
    wanted = [
        (a.text, a.reuse, a.mode) for a in embedded.generate(asked, mode=mode) + embedded.generate(asked, mode=mode)
    ]
    assert {choice and choice.mode for *_, choice in wanted} == {mode or "lazy"}
    wanted = wanted[len(asked) :]  # everything is resident
    assert [(a.text, a.reuse, a.mode) for a in remote.generate(asked, mode=mode)] == wanted
    agenerated = asyncio.run(remote.agenerate(asked, mode=ReuseMode.parse(mode) if mode else None))
    assert [(a.text, a.reuse, a.mode) for a in agenerated] == wanted
    streamed = joined(list(remote.stream(asked[0], mode=mode)))
    assert (streamed.text, streamed.reuse, streamed.mode) == wanted[0]

    async def collect() -> list[Any]:
        return [delta async for delta in remote.astream(asked[0], mode=mode)]

    assert joined(asyncio.run(collect())).reuse == wanted[0][1]


@pytest.mark.parametrize(
    ("mode", "fix"),
    [("prefix", "preamble"), ("lazy+first_k=17", "first_k=32"), ("lzy", "exact, lazy"), (3, "exact, lazy")],
)
def test_a_mode_that_cannot_be_had_is_refused_as_the_servers_client_refuses_it(
    remote: RemoteRAG, embedded: LazyRAG, mode: Any, fix: str
) -> None:
    refused = outcome(lambda: embedded.generate(["Go on."], mode=mode))
    assert refused[0] is ConfigError
    assert fix in refused[1]
    assert outcome(lambda: remote.generate(["Go on."], mode=mode)) == refused
    assert outcome(lambda: list(remote.stream("Go on.", mode=mode))) == refused
    assert outcome(lambda: remote.plan("Go on.", mode=mode)) == refused


def test_facades_ask_for_a_mode_call_by_call(url: str, embedded: LazyRAG, passages: list[str], shared: None) -> None:
    prompt = prompts(passages)[0]
    for where in ({"lazyrag": embedded}, {"base_url": url, "api_key": KEY}):
        chat, llm = langchain.ChatLazyRAG(**where), langchain.LazyRAGLLM(**where)
        answers = [
            chat.invoke(prompt, mode="sink").response_metadata["lazyrag"],
            list(chat.stream(prompt, mode="sink"))[-1].response_metadata["lazyrag"],
            asyncio.run(chat.ainvoke(prompt, mode="sink")).response_metadata["lazyrag"],
            llm.generate([prompt], mode="sink").generations[0][0].generation_info["lazyrag"],  # type: ignore[index]
        ]
        model = llama_index.LazyRAGLLM(**where)
        answers += [
            model.complete(prompt, mode="sink").raw["lazyrag"],
            list(model.stream_complete(prompt, mode="sink"))[-1].raw["lazyrag"],
            model.chat([ChatMessage(prompt)], mode="sink").raw["lazyrag"],
            asyncio.run(model.achat([ChatMessage(prompt)], mode="sink")).raw["lazyrag"],
        ]
        assert [(a["mode"], a["mode_why"]) for a in answers] == [("sink", "asked for by the request")] * len(answers)
        assert chat.invoke(prompt).response_metadata["lazyrag"]["mode"] == "lazy"
        with pytest.raises(ConfigError, match="needs a preamble"):
            model.complete(prompt, mode="prefix")


def test_hits_are_the_same(remote: RemoteRAG, embedded: LazyRAG) -> None:
    wanted = embedded.search("a bridge over the river", 3)
    assert remote.search("a bridge over the river", 3) == wanted
    assert asyncio.run(remote.asearch("a bridge over the river", 3)) == wanted


# ---------------------------------------------------------------- errors


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or class and words of its error."""
    try:
        return call()
    except LazyRAGError as error:
        return type(error), str(error)


def test_errors_are_the_servers_own(remote: RemoteRAG, embedded: LazyRAG, engine: Watched) -> None:
    long = "word " * 5000
    for call in (
        lambda rag: rag.generate(["Hello", long]),
        lambda rag: list(rag.stream(long)),
        lambda rag: asyncio.run(rag.agenerate([long])),
        lambda rag: rag.generate([3]),
        lambda rag: rag.generate("one prompt"),
        lambda rag: rag.search(""),
    ):
        outcomes = [outcome(lambda rag=rag, call=call: call(rag)) for rag in (embedded, remote)]  # type: ignore[misc]
        assert outcomes[0] == outcomes[1]
    assert outcome(lambda: remote.generate([long]))[0] is ContextOverflowError
    engine.refuse = True
    try:
        for each in (lambda: remote.generate(["Hello"]), lambda: list(remote.stream("Hello"))):
            assert outcome(each) == (CapacityError, "No room. It is full. Wait.")
    finally:
        engine.refuse = False


def test_one_prompts_error_leaves_the_others_alone_until_all_are_done(remote: RemoteRAG, engine: Watched) -> None:
    before = engine.stats()["requests"]
    with pytest.raises(ContextOverflowError):
        remote.generate(["One.", "word " * 5000, "Two."])
    assert engine.stats()["requests"] == before + 2


def test_a_deadline_is_kept_by_the_server(remote: RemoteRAG) -> None:
    sampling = Sampling(max_tokens=4000, ignore_eos=True, timeout_s=0.05)
    with pytest.raises(RequestTimeoutError):
        remote.generate(["Go on."], sampling)


def test_what_cannot_be_sent_is_refused(remote: RemoteRAG) -> None:
    for call in (
        lambda: remote.generate(["\ud800"]),
        lambda: remote.generate(["Hello"], Sampling(temperature=float("nan"))),
        lambda: remote.generate(["Hello"], Sampling(json_schema={"a": {1, 2}})),
    ):
        with pytest.raises((RequestError, InputError)):
            call()


def test_a_wrong_key_and_a_wrong_address_say_so(url: str, model_folder: Path) -> None:
    stranger = RemoteRAG(url, "sk-wrong")
    with pytest.raises(ConfigError, match="API key"):
        stranger.generate(["Hello"])
    stranger.close()
    for nowhere, kind in (("http://127.0.0.1:1", EngineDeadError), ("127.0.0.1", ConfigError), ("", ConfigError)):
        lost = RemoteRAG(nowhere)
        with pytest.raises(kind):
            lost.generate(["Hello"])
        lost.close()


def test_a_server_that_goes_away_ends_its_streams_with_an_error(model_folder: Path, serving: Serving) -> None:
    engine = FakeEngine(model_folder, delay_s=0.005)
    with serving(create_app(LazyRAG(model=str(model_folder), engine=engine))) as url:
        rag = RemoteRAG(url)
        deltas = rag.stream("Go on.", ENDLESS)
        next(deltas)
        engine.close()
        with pytest.raises(EngineDeadError, match="in flight"):
            list(deltas)
        rag.close()


# ---------------------------------------------------------------- leaving


def test_a_stream_that_is_closed_cancels_the_request(remote: RemoteRAG, engine: Watched) -> None:
    deltas = remote.stream("Go on.", ENDLESS)
    next(deltas)
    deltas.close()  # type: ignore[attr-defined]
    assert engine.cancelled.acquire(timeout=30)


async def test_an_async_stream_that_is_closed_or_cancelled_cancels_the_request(
    remote: RemoteRAG, engine: Watched
) -> None:
    async with aclosing(remote.astream("Go on.", ENDLESS)) as deltas:
        await anext(deltas)
    assert await asyncio.to_thread(engine.cancelled.acquire, timeout=30)
    task = asyncio.create_task(remote.agenerate(["Go on."] * 3, ENDLESS))
    before = len(engine.requests)
    while len(engine.requests) < before + 3:
        await asyncio.sleep(0.01)
    task.cancel()
    for _ in range(3):
        assert await asyncio.to_thread(engine.cancelled.acquire, timeout=30)
    with pytest.raises(asyncio.CancelledError):
        await task


# ---------------------------------------------------------------- façades


def test_a_langchain_chain_moves_by_one_argument(
    embedded: LazyRAG, url: str, shared: None, passages: list[str]
) -> None:
    template = PromptTemplate.from_template("{context}\n\nQuestion: {question}\nAnswer:")

    def chain(**where: Any) -> Any:
        context = langchain.LazyRAGRetriever(k=3, **where) | langchain.format_docs
        llm = langchain.LazyRAGLLM(max_tokens=20, **where)
        return {"context": context, "question": RunnablePassthrough()} | template | llm | StrOutputParser()

    question = "Where is the bridge?"
    served = chain(base_url=url, api_key=KEY)
    wanted = chain(lazyrag=embedded).invoke(question)
    assert served.invoke(question) == wanted
    assert asyncio.run(served.ainvoke(question)) == wanted
    assert "".join(served.stream(question)) == wanted


def test_the_langchain_chat_model_counts_and_calls_tools(url: str, shared: None, engine: Watched) -> None:
    @tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    model = langchain.ChatLazyRAG(base_url=f"{url}/v1", api_key=KEY, max_tokens=200)
    answer = model.invoke("Hello")
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_tokens"] == model.get_num_tokens_from_messages([HumanMessage("Hello")])
    engine.say = lambda request: '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    try:
        called = model.bind_tools([add]).invoke("What is 1 + 2?")
    finally:
        engine.say = words
    assert [(call["name"], call["args"]) for call in called.tool_calls] == [("add", {"a": 1, "b": 2})]
    assert KEY not in repr(model)
    assert KEY not in str(model.model_dump())


def test_llama_index_moves_by_one_argument(embedded: LazyRAG, url: str, shared: None) -> None:
    def ask(**where: Any) -> str:
        retriever = llama_index.LazyRAGRetriever(similarity_top_k=3, **where)
        return str(
            RetrieverQueryEngine.from_args(retriever, llm=llama_index.LazyRAGLLM(**where)).query("Which bridge?")
        )

    assert ask(base_url=url, api_key=KEY) == ask(lazyrag=embedded)
    metadata = llama_index.LazyRAGLLM(base_url=url, api_key=KEY).metadata
    assert metadata == llama_index.LazyRAGLLM(lazyrag=embedded).metadata.model_copy(
        update={"model_name": metadata.model_name}
    )


def test_what_the_server_decides_cannot_be_set_beside_it() -> None:
    model = langchain.LazyRAGLLM(base_url="http://127.0.0.1:1", store="kb", mode="lazy")
    with pytest.raises(ConfigError, match="cannot be combined with mode, store"):
        model.client  # noqa: B018
