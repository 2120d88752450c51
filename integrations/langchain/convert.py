"""LangChain's types to ours and back. No policy."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from langchain_core import exceptions
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk

from lazyrag import errors
from lazyrag.chat import Message
from lazyrag.integrations.common import report
from lazyrag.records import Record
from lazyrag.tools import CallDelta, ToolCall
from lazyrag.types import CONTENT, DOCUMENT, Answer, Chunk, Hit

# ---------------------------------------------------------------- messages in


def to_messages(messages: Sequence[BaseMessage]) -> list[Message]:
    """Our messages from LangChain's.

    Raises:
        InputError: content that is not text, or a message of an unknown kind.
    """
    return [_to_message(message) for message in messages]


def _to_message(message: BaseMessage) -> Message:
    content = _text(message)
    if isinstance(message, ToolMessage):
        return Message("tool", content, tool_call_id=message.tool_call_id, name=message.name)
    if isinstance(message, AIMessage):
        calls = tuple(
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["args"]}}
            for call in message.tool_calls
        )
        return Message("assistant", content, tool_calls=calls, name=message.name)
    return Message(_role(message), content, name=message.name)


def _role(message: BaseMessage) -> str:
    if isinstance(message, HumanMessage):
        return "user"
    if isinstance(message, SystemMessage):
        return "system"
    if isinstance(message, ChatMessage):
        return message.role
    raise errors.InputError(
        f"A {type(message).__name__} cannot be sent to a chat model.",
        fix="Use SystemMessage, HumanMessage, AIMessage, ToolMessage or ChatMessage.",
    )


def _text(message: BaseMessage) -> str:
    """The message's text blocks as one string; what an assistant's other blocks say, its attributes say, too."""
    if isinstance(message.content, str):
        return message.content
    parts = []
    for block in message.content:
        if isinstance(block, str):
            parts.append(block)
        elif block.get("type") == "text" and isinstance(block.get("text"), str):
            parts.append(block["text"])
        elif not isinstance(message, AIMessage):
            raise errors.InputError(
                f"A message holds a block of type {block.get('type')!r} that has no text.",
                why="LazyRAG sends text to the model only.",
            )
    return "".join(parts)


# ---------------------------------------------------------------- answers out


def to_usage(answer: Answer) -> UsageMetadata:
    """Token counts; tokens whose KV was reused are `cache_read`."""
    prompt, completion = answer.reuse.prompt_tokens, len(answer.token_ids)
    return UsageMetadata(
        input_tokens=prompt,
        output_tokens=completion,
        total_tokens=prompt + completion,
        input_token_details={"cache_read": answer.reuse.reused_tokens},
    )


def to_metadata(answer: Answer, model: str, calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
    """What `response_metadata` holds."""
    reason = "tool_calls" if calls and answer.finish_reason == "stop" else answer.finish_reason
    return {"model_name": model, "finish_reason": reason, "lazyrag": report(answer)}


def to_message(answer: Answer, model: str, content: str, calls: Sequence[ToolCall]) -> AIMessage:
    """The whole answer as a message."""
    return AIMessage(
        content=content,
        tool_calls=[
            tool_call(name=call.name, args=dict(call.arguments), id=call.id)
            for call in calls
            if not isinstance(call.arguments, str)
        ],
        invalid_tool_calls=[
            invalid_tool_call(name=call.name, args=call.arguments, id=call.id, error="It is no complete JSON object.")
            for call in calls
            if isinstance(call.arguments, str)
        ],
        usage_metadata=to_usage(answer),
        response_metadata=to_metadata(answer, model, calls),
    )


def to_chunk(part: str | CallDelta) -> AIMessageChunk:
    """A piece of a streamed answer."""
    if isinstance(part, str):
        return AIMessageChunk(content=part)
    piece = tool_call_chunk(name=part.name, args=part.arguments, id=part.id, index=part.index)
    return AIMessageChunk(content="", tool_call_chunks=[piece])


def to_last_chunk(answer: Answer, model: str, calls: Sequence[ToolCall]) -> AIMessageChunk:
    """What ends a streamed answer and says how it came about."""
    return AIMessageChunk(
        content="",
        usage_metadata=to_usage(answer),
        response_metadata=to_metadata(answer, model, calls),
        chunk_position="last",
    )


def to_document(hit: Hit) -> Document:
    """A hit as a document whose text is the chunk's, character by character."""
    document = place_to_document(hit.chunk)
    return Document(
        page_content=document.page_content,
        id=document.id,
        metadata={**document.metadata, "lazyrag_chunk_id": hit.chunk.id, "score": hit.score},
    )


def place_to_document(chunk: Chunk) -> Document:
    """The document that was stored; of a chunk that came in another way, its text, and where it stands."""
    if is_record(chunk):
        stored = json.loads(str(chunk.metadata[CONTENT]))
        return Document(page_content=stored[_TEXT], metadata=stored["metadata"], id=chunk.document_id)
    metadata = {
        **{name: value for name, value in chunk.metadata.items() if name not in (CONTENT, DOCUMENT)},
        "lazyrag_chunk_id": chunk.id,
        "source": chunk.source,
        "page": chunk.page,
        "start": chunk.start,
        "end": chunk.end,
    }
    if chunk.title is not None:
        metadata["title"] = chunk.title
    return Document(page_content=chunk.text, id=chunk.id, metadata=metadata)


_TEXT = "langchain_text"


def is_record(chunk: Chunk) -> bool:
    """Whether `to_record` wrote it."""
    return str(chunk.metadata.get(CONTENT, "")).startswith(f'{{"{_TEXT}": ')


def to_record(document: Document, vector: Sequence[float]) -> Record:
    """The document, with its vector, for a store.

    Raises:
        InputError: metadata that JSON cannot hold.
    """
    try:
        content = json.dumps({_TEXT: document.page_content, "metadata": document.metadata}, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise errors.InputError(
            "A document's metadata cannot be stored:",
            why=f"{error}.",
            fix="Metadata is what JSON can hold: texts, numbers, lists, objects.",
        ) from None
    seen = {
        name: value
        for name, value in document.metadata.items()
        if isinstance(value, (str, int, float)) and name not in (CONTENT, DOCUMENT)
    }
    page = document.metadata.get("page")
    return Record(
        str(document.id),
        document.page_content,
        source=str(document.metadata.get("source", document.id)),
        content=content,
        vector=vector,
        metadata=seen,
        page=page if isinstance(page, int) else None,
    )


def format_docs(docs: Iterable[Document]) -> str:
    """The documents' texts with an empty line between them, for a prompt's `{context}`.

    A list of documents put into a template as it is becomes a Python repr, in which no chunk is found.
    """
    return "\n\n".join(doc.page_content for doc in docs)


# ---------------------------------------------------------------- errors


def _langchain_error(name: str) -> type[Exception]:
    """LangChain's exception of this name, or its base where the installed version has none."""
    found: type[Exception] = getattr(exceptions, name, exceptions.LangChainException)
    return found


class ContextOverflowError(errors.ContextOverflowError, _langchain_error("ContextOverflowError")):  # type: ignore[misc]
    """LazyRAG's and LangChain's error in one."""


class RequestTimeoutError(errors.RequestTimeoutError, _langchain_error("ModelTimeoutError")):  # type: ignore[misc]
    """LazyRAG's and LangChain's error in one."""


class RequestError(errors.RequestError, _langchain_error("ModelInvalidRequestError")):  # type: ignore[misc]
    """LazyRAG's and LangChain's error in one."""


class InputError(errors.InputError, _langchain_error("ModelInvalidRequestError")):  # type: ignore[misc]
    """LazyRAG's and LangChain's error in one."""


class EngineDeadError(errors.EngineDeadError, _langchain_error("ModelConnectionError")):  # type: ignore[misc]
    """LazyRAG's and LangChain's error in one."""


_BOTH = (ContextOverflowError, RequestTimeoutError, RequestError, InputError, EngineDeadError)


@contextmanager
def langchain_errors() -> Iterator[None]:
    """Raise LazyRAG's errors as LangChain's where it has one for them, so that code catching either goes on working."""
    try:
        yield
    except errors.LazyRAGError as error:
        for both in _BOTH:
            if isinstance(error, both.__bases__[0]):
                raise both(error.what, why=error.why, fix=error.fix) from error
        raise
