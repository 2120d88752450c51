"""/v1/models, /v1/completions and /v1/chat/completions, as OpenAI's clients know them."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from lazyrag.backend.engine import Delta, Sampling, joined
from lazyrag.backend.server.problems import Problem, body_of, not_found, problem_of
from lazyrag.backend.server.schemas import ChatMessage, ChatRequest, Chosen, CompletionRequest, Generation
from lazyrag.backend.server.service import Call, Caller, Service, ServiceOf, Stream, begun, merged, unless_gone
from lazyrag.chat import Message
from lazyrag.errors import InputError, LazyRAGError
from lazyrag.tools import CallDelta, Reader, offer
from lazyrag.types import Choice

if TYPE_CHECKING:
    from lazyrag.client import LazyRAG
    from lazyrag.tokens import Tokenizer

router = APIRouter(prefix="/v1")

LOWEST = -9999.0
"""Stands for the log-probability of what cannot be: JSON has no infinity."""


# ---------------------------------------------------------------- models


@router.get("/models")
async def list_models(rag: Caller, service: ServiceOf) -> dict[str, Any]:
    """The one model of this server."""
    return {"object": "list", "data": [model_values(rag, service)]}


@router.get("/models/{model:path}")
async def get_model(model: str, rag: Caller, service: ServiceOf) -> dict[str, Any]:
    """What is known of a model."""
    check_model(model, service)
    return model_values(rag, service)


def model_values(rag: LazyRAG, service: Service) -> dict[str, Any]:
    """A model as OpenAI describes one; `lazyrag` holds what clients of ours need to know."""
    config, info = rag.config, rag.info
    names = ("namespace", "preamble", "dtype", "max_tokens", "temperature")
    own = {name: getattr(config, name) for name in names} | {"mode": info.mode, "fingerprint": info.fingerprint}
    return {
        "id": service.model,
        "object": "model",
        "created": 0,
        "owned_by": "lazyrag",
        "max_model_len": info.max_model_len,
        "lazyrag": own,
    }


def check_model(name: str, service: Service) -> None:
    """Refuse a request for a model that does not run here."""
    if name != service.model:
        raise not_found("model_not_found", "There is no such model.", f"This server runs {service.model}.", "model")


# ---------------------------------------------------------------- completions


@router.post("/completions")
async def complete(body: CompletionRequest, request: Request, rag: Caller, service: ServiceOf) -> Response:
    """Continue one prompt or several."""
    check_model(body.model, service)
    sampling = sampling_of(body, rag, logprobs=body.logprobs)
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    calls = [Call(rag, prompt, sampling, special=body.special, mode=body.mode) for prompt in prompts]
    answers = [_Completion(index, rag.tokenizer, body.logprobs) for index in range(len(prompts))]
    return await _respond(_Head("cmpl", "text_completion", "text_completion", service), calls, answers, body, request)


@router.post("/chat/completions")
async def chat(body: ChatRequest, request: Request, rag: Caller, service: ServiceOf) -> Response:
    """Answer a conversation."""
    check_model(body.model, service)
    top = (body.top_logprobs or 0) if body.logprobs else None
    sampling = sampling_of(body, rag, logprobs=top)
    messages = [to_message(message) for message in body.messages]
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    choice = body.tool_choice.function.name if isinstance(body.tool_choice, Chosen) else body.tool_choice
    offered = await asyncio.to_thread(offer, rag.tokenizer, messages, tools, choice, sampling)
    call = Call(rag, offered.messages, offered.sampling, tools=offered.shown, mode=body.mode)
    head = _Head("chatcmpl", "chat.completion", "chat.completion.chunk", service)
    most = 1 if body.parallel_tool_calls is False else None
    return await _respond(head, [call], [_Chat(0, rag.tokenizer, top, offered.reader(), most)], body, request)


def sampling_of(body: Generation, rag: LazyRAG, *, logprobs: int | None) -> Sampling:
    """The settings of a request; what it does not say is as the server is configured."""
    limit, schema = body.max_tokens, None
    if isinstance(body, ChatRequest):
        limit = body.max_completion_tokens or limit
        schema = _schema(body)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return Sampling(
        max_tokens=limit or rag.config.max_tokens,
        temperature=rag.config.temperature if body.temperature is None else body.temperature,
        top_p=body.top_p or 1.0,
        top_k=body.top_k or 0,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        stop=tuple(stop),
        seed=body.seed,
        logprobs=logprobs,
        ignore_eos=body.ignore_eos,
        json_schema=schema,
    )


def _schema(body: ChatRequest) -> Mapping[str, Any] | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise Problem(
            400,
            "invalid_request",
            InputError("response_format of type json_schema holds no schema."),
            param="response_format",
        )
    return wanted.json_schema.schema_


def to_message(message: ChatMessage) -> Message:
    """Our message from OpenAI's.

    Raises:
        InputError: a call's arguments are no JSON object.
    """
    content = message.content or ""
    if not isinstance(content, str):
        content = "".join(part.text for part in content)
    calls = tuple(
        {"id": c.id, "type": c.type, "function": {"name": c.function.name, "arguments": _object(c.function.arguments)}}
        for c in message.tool_calls or ()
    )
    role = "system" if message.role == "developer" else message.role  # the name that models' templates know
    return Message(role, content, tool_calls=calls, tool_call_id=message.tool_call_id, name=message.name)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InputError("The arguments of a tool call are no JSON object.")
    return value


# ---------------------------------------------------------------- answers


@dataclass(slots=True)
class _Head:
    """What all parts of one answer begin with."""

    prefix: str
    kind: str
    chunk_kind: str
    service: Service
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def values(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": self.chunk_kind if chunk else self.kind,
            "created": self.created,
            "model": self.service.model,
            "choices": choices,
        }


@dataclass(slots=True)
class _Completion:
    """A choice of /v1/completions."""

    index: int
    tokenizer: Tokenizer
    top: int | None
    offset: int = 0

    def first(self) -> dict[str, Any] | None:
        return None

    def parts(self, delta: Delta) -> list[dict[str, Any]]:
        return [self.whole(delta)]

    def whole(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": self.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if self.top is None:
            return None
        out: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, value, best in _logprobs(delta, self.tokenizer, self.top):
            out["tokens"].append(token)
            out["token_logprobs"].append(value)
            out["top_logprobs"].append(dict(best))
            out["text_offset"].append(self.offset)
            self.offset += len(token)
        return out


@dataclass(slots=True)
class _Chat:
    """A choice of /v1/chat/completions."""

    index: int
    tokenizer: Tokenizer
    top: int | None
    reader: Reader
    most_calls: int | None

    def whole(self, delta: Delta) -> dict[str, Any]:
        for _ in self.reader.feed(delta.text, last=True):
            pass
        calls = self.reader.calls[: self.most_calls]
        message: dict[str, Any] = {"role": "assistant", "content": self.reader.content}
        if calls:
            message["content"] = self.reader.content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments
                        if isinstance(call.arguments, str)
                        else json.dumps(call.arguments, ensure_ascii=False),
                    },
                }
                for call in calls
            ]
        return self._choice("message", message, delta)

    def first(self) -> dict[str, Any] | None:
        return self._choice("delta", {"role": "assistant", "content": ""}, Delta())

    def parts(self, delta: Delta) -> list[dict[str, Any]]:
        """What a delta tells: words and pieces of calls, each in a chunk; the last one has the rest."""
        known = self.reader.feed(delta.text, last=delta.finish_reason is not None)
        pieces = [values for part in known if (values := self._piece(part))] or [{}]
        *others, last = pieces
        return [self._choice("delta", piece, Delta()) for piece in others] + [self._choice("delta", last, delta)]

    def _piece(self, part: str | CallDelta) -> dict[str, Any]:
        if isinstance(part, str):
            return {"content": part}
        if self.most_calls is not None and part.index >= self.most_calls:
            return {}
        function = {"name": part.name} if part.name is not None else {}
        head = {"id": part.id, "type": "function"} if part.id is not None else {}
        return {"tool_calls": [{"index": part.index, **head, "function": {**function, "arguments": part.arguments}}]}

    def _choice(self, name: str, message: dict[str, Any], delta: Delta) -> dict[str, Any]:
        content = None
        if self.top is not None and delta.token_ids:
            content = {
                "content": [
                    {**_token(token, value), "top_logprobs": [_token(*pair) for pair in best]}
                    for token, value, best in _logprobs(delta, self.tokenizer, self.top)
                ]
            }
        reason = "tool_calls" if delta.finish_reason == "stop" and self.reader.calls else delta.finish_reason
        return {"index": self.index, name: message, "logprobs": content, "finish_reason": reason}


def _token(token: str, value: float) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": list(token.encode("utf-8", "replace"))}


def _logprobs(delta: Delta, tokenizer: Tokenizer, top: int) -> Sequence[tuple[str, float, Sequence[tuple[str, float]]]]:
    """For each new token its text, its log-probability, and those of the likeliest ones."""
    out = []
    for token, known in zip(delta.token_ids, delta.logprobs, strict=False):
        best = sorted(known.items(), key=lambda pair: -pair[1])[:top]
        named = [(tokenizer.decode([id]), max(value, LOWEST)) for id, value in best]
        out.append((tokenizer.decode([token]), max(known.get(token, LOWEST), LOWEST), named))
    return out


@dataclass(slots=True)
class _Usage:
    """Tokens of all prompts of a request."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    sources: list[str] = field(default_factory=list)
    ttft_s: float | None = None
    mode: Choice | None = None

    def add(self, delta: Delta) -> None:
        self.completion += len(delta.token_ids)
        if delta.reuse is not None:
            self.prompt += delta.reuse.prompt_tokens
            self.cached += delta.reuse.reused_tokens
            self.sources += delta.reuse.sources
        self.ttft_s = self.ttft_s or delta.ttft_s
        self.mode = self.mode or delta.mode

    def values(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def report(self) -> dict[str, Any]:
        """What LazyRAG adds: where each chunk's KV came from, and which mode ran and why."""
        mode = {"mode": self.mode.mode, "mode_why": self.mode.why} if self.mode is not None else {}
        return {"segments": len(self.sources), "sources": self.sources, "ttft_s": self.ttft_s, **mode}


async def _respond(
    head: _Head,
    calls: list[Call],
    answers: Sequence[_Completion | _Chat],
    body: Generation,
    request: Request,
) -> Response:
    if not body.stream:
        return JSONResponse(await unless_gone(request, _whole(head, calls, answers)))
    usage = body.stream_options is not None and body.stream_options.include_usage
    # Until the first token, what goes wrong has a status of its own.
    parts = await unless_gone(request, begun(_parts(head, calls, answers, usage=usage)))
    return Stream(_events(parts), "text/event-stream")


async def _whole(head: _Head, calls: list[Call], answers: Sequence[_Completion | _Chat]) -> dict[str, Any]:
    usage = _Usage()
    deltas: list[list[Delta]] = [[] for _ in calls]
    with head.service.queue.places(len(calls)):
        async with aclosing(_each(head.service, calls)) as items:
            async for number, delta in items:
                deltas[number].append(delta)
                usage.add(delta)
    choices = [answer.whole(joined(parts)) for answer, parts in zip(answers, deltas, strict=True)]
    return head.values(choices, chunk=False) | {"usage": usage.values(), "lazyrag": usage.report()}


async def _parts(
    head: _Head, calls: list[Call], answers: Sequence[_Completion | _Chat], *, usage: bool
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a streamed answer."""
    counted = _Usage()
    with head.service.queue.places(len(calls)):
        async with aclosing(_each(head.service, calls)) as items:
            opened: set[int] = set()
            async for number, delta in items:
                counted.add(delta)
                first = answers[number].first() if number not in opened else None
                opened.add(number)
                for choice in (first, *answers[number].parts(delta)):
                    if choice is not None:
                        yield head.values([choice], chunk=True)
    if usage:
        yield head.values([], chunk=True) | {"usage": counted.values(), "lazyrag": counted.report()}


async def _each(service: Service, calls: list[Call]) -> AsyncGenerator[tuple[int, Delta], None]:
    """The deltas of several prompts as they come; the first error ends all."""
    async with aclosing(merged([service.deltas(call) for call in calls])) as items:
        async for number, item in items:
            if isinstance(item, Exception):
                raise item
            yield number, item


async def _events(parts: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[str, None]:
    """Server-sent events; an error that comes too late for a status is one of them."""
    async with aclosing(parts):
        try:
            async for part in parts:
                yield f"data: {json.dumps(part)}\n\n"
        except LazyRAGError as error:
            yield f"data: {json.dumps(body_of(problem_of(error)))}\n\n"
        yield "data: [DONE]\n\n"
