"""What LazyRAG's own clients ask for (backend/remote.py): deltas as the engine gives them, and the tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from lazyrag.backend.engine import Delta, Sampling
from lazyrag.backend.server.problems import body_of, problem_of
from lazyrag.backend.server.schemas import GenerateRequest, OwnPrompt, OwnSampling
from lazyrag.backend.server.service import Call, Caller, Service, ServiceOf, Stream, begun, lines, merged, unless_gone
from lazyrag.chat import Message, TextPiece
from lazyrag.errors import InputError, LazyRAGError
from lazyrag.types import Chunk, Citation

if TYPE_CHECKING:
    from lazyrag.client import LazyRAG, Prompt

router = APIRouter(prefix="/v1")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@router.post("/generate")
async def generate(body: GenerateRequest, request: Request, rag: Caller, service: ServiceOf) -> Response:
    """Answer prompts together: a JSON line for each delta, `{"index", "delta"}`, or error, `{"index", "error"}`."""
    sampling = sampling_of(body.sampling, rag)
    prompts = [to_prompt(prompt) for prompt in body.prompts]
    calls = [Call(rag, prompt, sampling, body.hints, body.tools, body.special, body.mode) for prompt in prompts]
    items = await unless_gone(request, begun(_items(service, calls)))
    return Stream(lines(items), "application/x-ndjson")


@router.get("/tokenizer")
async def tokenizer(rag: Caller) -> dict[str, str]:
    """The texts of the model's tokenizer files, by name."""
    return await asyncio.to_thread(_texts, rag.model)


def _texts(folder: Path) -> dict[str, str]:
    paths = [folder / name for name in TOKENIZER_FILES]
    return {path.name: path.read_text(encoding="utf-8") for path in paths if path.exists()}


def to_prompt(given: OwnPrompt) -> Prompt:
    """The client's prompt.

    Raises:
        InputError: it is none, or several at once.
    """
    forms = [form for form in (given.text, given.messages, given.pieces) if form is not None]
    if len(forms) != 1:
        raise InputError("A prompt is one of text, messages and pieces.")
    if given.messages is not None:
        return [
            Message(m.role, m.content, tool_calls=m.tool_calls, tool_call_id=m.tool_call_id, name=m.name)
            for m in given.messages
        ]
    if given.pieces is not None:
        return [TextPiece(piece.text, piece.kind) for piece in given.pieces]
    return given.text or ""


def sampling_of(given: OwnSampling, rag: LazyRAG) -> Sampling:
    """The settings of a request."""
    values = dict(given) | {"stop": tuple(given.stop), "allowed_token_ids": tuple(given.allowed_token_ids)}
    for name in ("max_tokens", "temperature"):
        if values[name] is None:
            values[name] = getattr(rag.config, name)
    return Sampling(**values)


async def _items(service: Service, calls: list[Call]) -> AsyncGenerator[dict[str, Any], None]:
    with service.queue.places(len(calls)):
        async with aclosing(merged([service.deltas(call) for call in calls])) as items:
            async for index, item in items:
                if isinstance(item, Delta):
                    yield {"index": index, "delta": delta_values(item)}
                elif isinstance(item, LazyRAGError):
                    yield {"index": index, **body_of(problem_of(item))}
                else:
                    raise item


def delta_values(delta: Delta) -> dict[str, Any]:
    """A delta; what is not set is not there."""
    out: dict[str, Any] = {"text": delta.text, "token_ids": delta.token_ids}
    if delta.logprobs:
        out["logprobs"] = [list(known.items()) for known in delta.logprobs]
    if delta.finish_reason is not None:
        out["finish_reason"] = delta.finish_reason
    if delta.reuse is not None:
        reuse = delta.reuse
        out["reuse"] = [reuse.prompt_tokens, reuse.reused_tokens, reuse.sources]
    if delta.ttft_s is not None:
        out["ttft_s"] = delta.ttft_s
    if delta.citations:
        out["citations"] = [_citation_values(citation) for citation in delta.citations]
    if delta.mode is not None:
        out["mode"] = {"mode": delta.mode.mode, "why": delta.mode.why}
    return out


def place_values(chunk: Chunk) -> dict[str, Any]:
    """Where a chunk stands."""
    names = ("id", "document_id", "source", "title", "page", "start", "end", "num_tokens")
    return {name: getattr(chunk, name) for name in names} | {"metadata": dict(chunk.metadata)}


def _citation_values(citation: Citation) -> dict[str, Any]:
    places = citation.places
    return {
        "chunk_id": citation.chunk_id,
        "kv": citation.kv,
        "text": places[0].text if places else "",
        "places": [place_values(place) for place in places],
    }
