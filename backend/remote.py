"""A LazyRAG that runs elsewhere: the interface of `lazyrag.LazyRAG`, as far as chains need it, over HTTP.

Texts go over the network, not tokens: the server finds the chunks, for it alone knows them all. Answers come back as
the engine gave them, delta by delta (`backend/server/native.py`).
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias
from urllib.parse import quote

import httpx

from lazyrag import errors
from lazyrag.backend.engine import Delta, Sampling, joined
from lazyrag.chat import Message, TextPiece
from lazyrag.config import Config
from lazyrag.errors import EngineDeadError, EngineError, InputError, LazyRAGError, RequestError
from lazyrag.modes import ReuseMode
from lazyrag.tokens import Tokenizer
from lazyrag.types import Answer, Choice, Chunk, Citation, Document, Hit, Piece, PromptPlan, Reuse

if TYPE_CHECKING:
    from lazyrag.loaders import Source

Prompt: TypeAlias = str | Sequence[Message] | Sequence[TextPiece]
Values: TypeAlias = Mapping[str, Any]

PATIENCE_S = 300.0
"""How long a write waits for a server that is busy, or whose engine is being started."""
PAGE = 10_000

TIMEOUT = httpx.Timeout(None, connect=10.0)  # an answer may take long; `Sampling.timeout_s` limits it, at the server


class RemoteRAG:
    """Answers by a LazyRAG server. Thread-safe; constructing it connects to nothing.

    The server decides model, store and namespace, and the mode of requests that ask for no other; `config` shows them.

    Args:
        base_url: of the server, with or without "/v1": "http://127.0.0.1:8000".
        api_key: names the namespace; a server without keys asks for none.

    Every method raises `EngineDeadError` if the server cannot be reached, and otherwise what the server's own client
    raised.
    """

    _shared: ClassVar[dict[tuple[str, str], RemoteRAG]] = {}
    _shared_lock: ClassVar = threading.Lock()

    def __init__(self, base_url: str, api_key: str = "") -> None:
        self._url = base_url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._arguments: dict[str, Any] = {
            "base_url": self._url,
            "headers": headers,
            "timeout": TIMEOUT,
            "limits": httpx.Limits(max_connections=None),
        }
        self._http: httpx.Client | None = None
        self._verify: ssl.SSLContext | None = None
        self._facts: dict[str, Any] | None = None
        self._tokenizer: Tokenizer | None = None
        self._lock = threading.RLock()

    @classmethod
    def shared(cls, base_url: str, api_key: str = "") -> RemoteRAG:
        """The process's client of this server; the same object for the same address and key."""
        with cls._shared_lock:
            return cls._shared.setdefault((base_url, api_key), cls(base_url, api_key))

    def close(self) -> None:
        """Close the connections. A later call opens new ones."""
        with self._lock:
            if self._http is not None:
                self._http.close()
                self._http = None

    # ------------------------------------------------------------ what the server is

    @property
    def config(self) -> Config:
        """The server's settings, as far as they concern its clients."""
        facts = self._server()
        own = {name: value for name, value in facts["lazyrag"].items() if name != "fingerprint"}
        return Config(facts["id"], **own, origins=dict.fromkeys(("model", *own), self._url))

    @property
    def choice(self) -> Choice:
        """The mode of the server."""
        return Choice(self.config.mode, "the server's")

    @property
    def model(self) -> str:
        """The model's name at the server."""
        return str(self._server()["id"])

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together."""
        return int(self._server()["max_model_len"])

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, fetched once."""
        with self._lock:
            if self._tokenizer is None:
                texts = self._call("GET", "/v1/tokenizer")
                with TemporaryDirectory(prefix="lazyrag-") as folder:
                    for name, text in texts.items():
                        (Path(folder) / Path(name).name).write_text(text, encoding="utf-8")
                    self._tokenizer = Tokenizer.from_folder(folder)
            return self._tokenizer

    def _server(self) -> dict[str, Any]:
        with self._lock:
            if self._facts is None:
                self._facts = self._call("GET", "/v1/models")["data"][0]
            return self._facts

    # ------------------------------------------------------------ prompts

    def plan(
        self,
        prompt: Prompt,
        *,
        hints: Sequence[str] = (),
        tools: Sequence[Any] | None = None,
        special: str = "allow",
        mode: str | ReuseMode | None = None,
    ) -> PromptPlan:
        """How the server reads a prompt; see `LazyRAG.plan`. For looking at: what is sent is always the prompt."""
        body = {"prompt": _prompt_values(prompt), **_planning(hints, tools, special, mode)}
        plan = self._call("POST", "/v1/segment", body)
        pieces = (
            Piece(
                p["text"],
                tuple(p["token_ids"]),
                p["chunk_id"],
                p["reuse"],
                p["why_not"] or "",
                tuple((start, end) for start, end in p["computed"]),
            )
            for p in plan["pieces"]
        )
        return PromptPlan(tuple(pieces), plan["prefix_len"], tuple(plan["sink"]), plan["mode"])

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | None = None,
        *,
        hints: Sequence[str] = (),
        tools: Sequence[Any] | None = None,
        special: str = "allow",
        mode: str | ReuseMode | None = None,
    ) -> list[Answer]:
        """Answer prompts together, in order; see `LazyRAG.generate`."""
        body = _body(prompts, sampling, hints, tools, special, mode)
        if not body["prompts"]:
            return []
        answers = _Answers(len(body["prompts"]))
        for index, item in self._items(body):
            answers.add(index, item)
        return answers.all()

    async def agenerate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | None = None,
        *,
        hints: Sequence[str] = (),
        tools: Sequence[Any] | None = None,
        special: str = "allow",
        mode: str | ReuseMode | None = None,
    ) -> list[Answer]:
        """As `generate`, without blocking the caller's event loop."""
        body = _body(prompts, sampling, hints, tools, special, mode)
        if not body["prompts"]:
            return []
        answers = _Answers(len(body["prompts"]))
        async with aclosing(self._aitems(body)) as items:
            async for index, item in items:
                answers.add(index, item)
        return answers.all()

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        hints: Sequence[str] = (),
        tools: Sequence[Any] | None = None,
        special: str = "allow",
        mode: str | ReuseMode | None = None,
    ) -> Iterator[Delta]:
        """Yield the answer as it is generated; the last delta has `reuse` and `ttft_s`. Closing it cancels."""
        done = False
        for _, item in self._items(_body([prompt], sampling, hints, tools, special, mode)):
            if isinstance(item, Exception):
                raise item
            done = item.finish_reason is not None
            yield item
        if not done:
            raise _broken()

    async def astream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        hints: Sequence[str] = (),
        tools: Sequence[Any] | None = None,
        special: str = "allow",
        mode: str | ReuseMode | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """As `stream`, without blocking the caller's event loop."""
        done = False
        async with aclosing(self._aitems(_body([prompt], sampling, hints, tools, special, mode))) as items:
            async for _, item in items:
                if isinstance(item, Exception):
                    raise item
                done = item.finish_reason is not None
                yield item
        if not done:
            raise _broken()

    # ------------------------------------------------------------ documents

    def search(self, query: str, k: int = 4) -> list[Hit]:
        """The k stored chunks nearest to a query; see `LazyRAG.search`."""
        return [_hit(values) for values in self._call("POST", "/v1/search", {"query": query, "k": k})["data"]]

    async def asearch(self, query: str, k: int = 4) -> list[Hit]:
        """As `search`, without blocking the caller's event loop."""
        return await asyncio.to_thread(self.search, query, k)

    def needed(self, digests: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """Of documents, given by id with the SHA-256 of what they are made from, those that are new or changed."""
        documents = [{"id": id, "sha256": sha256} for id, sha256 in digests.items()]
        answer = self._write("POST", "/v1/documents/needed", {"documents": documents})
        return answer["added"], answer["changed"]

    def document_ids(self) -> Iterator[str]:
        """The ids of all documents, in order."""
        after = ""
        while page := self._call("GET", f"/v1/documents?limit={PAGE}&after={quote(after, safe='')}")["data"]:
            yield from (row["id"] for row in page)
            after = page[-1]["id"]

    def add_documents(self, documents: Sequence[tuple[Document, Source]], *, warm: bool) -> Mapping[str, Any]:
        """Add documents or take up what changed in them; counts, and `failed`. A busy server is waited for."""
        values = [
            {
                "id": document.id,
                "text": document.text,
                "source": document.source,
                "title": document.title,
                "metadata": dict(document.metadata),
                "pages": document.pages,
                "sha256": source.sha256,
                "mtime": source.mtime,
            }
            for document, source in documents
        ]
        answer: Mapping[str, Any] = self._write("POST", "/v1/documents", {"documents": values, "warm": warm})
        return answer

    def delete_document(self, id: str) -> Mapping[str, Any]:
        """Delete a document; counts. One that is gone already is no error."""
        try:
            answer: Mapping[str, Any] = self._write("DELETE", f"/v1/documents/{quote(id, safe='')}")
        except InputError:
            return {"chunks_removed": 0, "kv_files_removed": 0}
        return answer

    def kv(self) -> Mapping[str, Any]:
        """How much of the chunks' KV the server keeps on disk, and whether it is computing some in the background."""
        answer: Mapping[str, Any] = self._write("GET", "/v1/kv")
        return answer

    def rebuild_kv(self) -> None:
        """Have the server compute, in the background, the KV of the chunks that have none on disk."""
        self._write("POST", "/v1/kv/rebuild")

    # ------------------------------------------------------------ HTTP

    def _write(self, method: str, path: str, body: Values | None = None) -> Any:
        """As `_call`; while the server is busy, or its engine is being started, it is asked again."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with self._translated():
                response = self._client().request(method, path, json=body)
                wait_s = response.headers.get("Retry-After", "")
                if response.is_error and wait_s.isdigit() and time.monotonic() + int(wait_s) < deadline:
                    time.sleep(int(wait_s))
                    continue
                if response.is_error:
                    raise _error_of(response)
                return response.json()

    def _client(self) -> httpx.Client:
        with self._lock:
            if self._http is None:
                self._http = httpx.Client(verify=self._context(), **self._arguments)
            return self._http

    def _context(self) -> ssl.SSLContext:
        """Made once: it reads all certificates, which takes longer than a short request."""
        with self._lock:
            if self._verify is None:
                self._verify = httpx.create_ssl_context()
            return self._verify

    def _call(self, method: str, path: str, body: Values | None = None) -> Any:
        with self._translated():
            response = self._client().request(method, path, json=body)
            if response.is_error:
                raise _error_of(response)
            return response.json()

    def _items(self, body: Values) -> Iterator[tuple[int, Delta | LazyRAGError]]:
        with self._translated(), self._client().stream("POST", "/v1/generate", json=body) as response:
            if response.is_error:
                response.read()
                raise _error_of(response)
            for line in response.iter_lines():
                yield _item(line)

    async def _aitems(self, body: Values) -> AsyncGenerator[tuple[int, Delta | LazyRAGError], None]:
        # A client of its own: one belongs to an event loop, and callers come with new ones.
        async with httpx.AsyncClient(verify=self._context(), **self._arguments) as client:
            with self._translated():
                async with client.stream("POST", "/v1/generate", json=body) as response:
                    if response.is_error:
                        await response.aread()
                        raise _error_of(response)
                    async for line in response.aiter_lines():
                        yield _item(line)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError:
            raise EngineDeadError(
                f"There is no LazyRAG server at {self._url}.", fix="Start one: lazyrag serve --store DIR"
            ) from None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol):
            raise errors.ConfigError(
                f"{self._url!r} is no address of a server.", fix='It looks like "http://127.0.0.1:8000".'
            ) from None
        except httpx.HTTPError as error:
            raise EngineDeadError(
                f"The connection to the server at {self._url} broke.", why=f"{type(error).__name__}."
            ) from error
        except LazyRAGError:
            raise
        except (UnicodeError, TypeError, ValueError, KeyError) as error:
            raise RequestError(
                "The request cannot be sent, or its answer not be read:", why=f"{type(error).__name__}."
            ) from None


class _Answers:
    """Collects the deltas of several prompts."""

    def __init__(self, count: int) -> None:
        self._deltas: list[list[Delta]] = [[] for _ in range(count)]
        self._errors: dict[int, LazyRAGError] = {}

    def add(self, index: int, item: Delta | LazyRAGError) -> None:
        if isinstance(item, Delta):
            self._deltas[index].append(item)
        else:
            self._errors[index] = item

    def all(self) -> list[Answer]:
        """The answers in order.

        Raises:
            LazyRAGError: the first of the prompts' errors.
        """
        if self._errors:
            raise self._errors[min(self._errors)]
        answers = []
        for deltas in self._deltas:
            whole = joined(deltas) if deltas else Delta()
            if whole.finish_reason is None:
                raise _broken()
            reuse = whole.reuse or Reuse(0, 0)
            answers.append(
                Answer(
                    whole.text,
                    whole.token_ids,
                    whole.finish_reason,
                    reuse,
                    ttft_s=whole.ttft_s,
                    citations=whole.citations,
                    mode=whole.mode,
                )
            )
        return answers


# ---------------------------------------------------------------- what is sent


def _body(
    prompts: Sequence[Prompt],
    sampling: Sampling | None,
    hints: Sequence[str],
    tools: Sequence[Any] | None,
    special: str,
    mode: str | ReuseMode | None,
) -> dict[str, Any]:
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
        raise InputError("prompts is one prompt where a list is meant.", fix="Pass a list: [prompt].")
    body: dict[str, Any] = {"prompts": [_prompt_values(prompt) for prompt in prompts]}
    if sampling is not None:
        stop: Any = sampling.stop  # which may be one text, though its type says otherwise
        body["sampling"] = {**asdict(sampling), "stop": [stop] if isinstance(stop, str) else list(stop)}
    return {**body, **_planning(hints, tools, special, mode)}


def _planning(
    hints: Sequence[str], tools: Sequence[Any] | None, special: str, mode: str | ReuseMode | None
) -> dict[str, Any]:
    asked = str(ReuseMode.parse(mode)) if mode is not None else None
    return {"hints": list(hints), "tools": tools and list(tools), "special": special, "mode": asked}


def _prompt_values(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    parts: list[Any] = list(prompt) if isinstance(prompt, Sequence) else [prompt]
    if parts and all(isinstance(part, TextPiece) for part in parts):
        return {"pieces": [{"text": part.text, "kind": part.kind} for part in parts]}
    if isinstance(prompt, Sequence) and all(isinstance(part, Message) for part in parts):
        return {"messages": [part.to_dict() for part in parts]}
    raise InputError(
        f"A {type(prompt).__name__} is no prompt.",
        fix="A prompt is a string, or a list of lazyrag.Message whose contents are strings.",
    )


# ---------------------------------------------------------------- what comes back


def _item(line: str) -> tuple[int, Delta | LazyRAGError]:
    values = json.loads(line)
    if "error" in values:
        return values["index"], _error(values["error"])
    delta = values["delta"]
    reuse = delta.get("reuse")
    return values["index"], Delta(
        text=delta["text"],
        token_ids=tuple(delta["token_ids"]),
        logprobs=tuple(dict(known) for known in delta.get("logprobs", ())),
        finish_reason=delta.get("finish_reason"),
        reuse=Reuse(reuse[0], reuse[1], tuple(reuse[2])) if reuse is not None else None,
        ttft_s=delta.get("ttft_s"),
        citations=tuple(map(_citation, delta.get("citations", ()))),
        mode=Choice(**delta["mode"]) if "mode" in delta else None,
    )


def _citation(values: Values) -> Citation:
    places = (_chunk(place, values["text"]) for place in values["places"])
    return Citation(values["chunk_id"], values["kv"], tuple(places))


def _error_of(response: httpx.Response) -> LazyRAGError:
    with suppress(ValueError, KeyError, TypeError):
        return _error(response.json()["error"])
    return EngineError(f"The server answered with status {response.status_code}.")


def _error(values: Values) -> LazyRAGError:
    """The error that the server raised, as one of the same class."""
    own = values["lazyrag"]
    kind = getattr(errors, own["class"], None)
    if not (isinstance(kind, type) and issubclass(kind, LazyRAGError)):
        kind = EngineError
    return kind(own["what"], why=own["why"], fix=own["fix"])


def _broken() -> EngineDeadError:
    return EngineDeadError("The server ended its answer too early.")


def _hit(values: Values) -> Hit:
    also = tuple(_chunk(place, values["text"]) for place in values["also"])
    return Hit(_chunk(values, values["text"]), values["score"], also)


def _chunk(values: Values, text: str) -> Chunk:
    names = ("id", "num_tokens", "document_id", "source", "start", "end", "page", "title", "metadata")
    return Chunk(text=text, **{name: values[name] for name in names})
