"""LlamaIndex's types to ours and back. No policy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ContentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.schema import (
    BaseNode,
    MetadataMode,
    NodeRelationship,
    NodeWithScore,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict

from lazyrag.backend.engine import Delta
from lazyrag.chat import Message
from lazyrag.errors import InputError
from lazyrag.integrations.common import report, usage
from lazyrag.tools import ToolCall
from lazyrag.types import CONTENT, Answer, Chunk, Hit

if TYPE_CHECKING:
    from lazyrag.records import Record

_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}
"""Roles that chat templates call by another name."""


def to_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Our messages from LlamaIndex's.

    Raises:
        InputError: content that is not text.
    """
    return [_to_message(message) for message in messages]


def _to_message(message: ChatMessage) -> Message:
    calls = []
    for block in message.blocks:
        if isinstance(block, ToolCallBlock):
            function = {"name": block.tool_name, "arguments": block.tool_kwargs}
            calls.append({"id": block.tool_call_id, "type": "function", "function": function})
        elif not isinstance(block, TextBlock | ThinkingBlock | CachePoint):
            raise InputError(
                f"A message holds a block of type {block.block_type!r}.", why="LazyRAG sends text to the model only."
            )
    return Message(
        _ROLES.get(message.role, message.role.value),
        message.content or "",
        tool_calls=tuple(calls),
        tool_call_id=message.additional_kwargs.get("tool_call_id"),
        name=message.additional_kwargs.get("name"),
    )


def to_chat_response(
    answer: Answer, model: str, content: str, calls: Sequence[ToolCall] = (), delta: str | None = None
) -> ChatResponse:
    """The whole answer: its words and its calls."""
    blocks: list[ContentBlock] = [TextBlock(text=content)]
    blocks += [ToolCallBlock(tool_call_id=c.id, tool_name=c.name, tool_kwargs=c.arguments) for c in calls]
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks), delta=delta, **_details(answer, model)
    )


def to_chat_delta(delta: Delta, text: str) -> ChatResponse:
    """A piece of a streamed answer; `text` is all of it so far."""
    return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=delta.text)


def to_completion(answer: Answer, model: str, delta: str | None = None) -> CompletionResponse:
    """The whole answer."""
    return CompletionResponse(text=answer.text, delta=delta, **_details(answer, model))


def _details(answer: Answer, model: str) -> dict[str, Any]:
    counts, reuse = usage([answer]), report(answer)
    raw = {"model": model, "finish_reason": answer.finish_reason, "usage": counts, "lazyrag": reuse}
    # LlamaIndex's token counters read the counts from here.
    return {"raw": raw, "additional_kwargs": {**counts, "lazyrag": reuse}}


def to_scored_node(hit: Hit) -> NodeWithScore:
    """A hit as a node."""
    return NodeWithScore(node=to_node(hit.chunk), score=hit.score)


def to_node(chunk: Chunk) -> BaseNode:
    """The node that was stored; else one whose text is the chunk's, character by character.

    The metadata of the latter is for the application's citations; the model and the embedder are not shown it.
    """
    if isinstance(content := chunk.metadata.get(CONTENT), str):
        return metadata_dict_to_node(json.loads(content))
    metadata = {**chunk.metadata, "source": chunk.source, "page": chunk.page}
    if chunk.title is not None:
        metadata["title"] = chunk.title
    return TextNode(
        id_=chunk.id,
        text=chunk.text,
        metadata=metadata,
        excluded_llm_metadata_keys=list(metadata),
        excluded_embed_metadata_keys=list(metadata),
        start_char_idx=chunk.start,
        end_char_idx=chunk.end,
        relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=chunk.document_id)},
    )


def to_record(node: BaseNode) -> Record:
    """The node, with its vector, for a store; what is no text, number or truth value of its metadata is kept unseen."""
    from lazyrag.records import Record

    start = getattr(node, "start_char_idx", None)
    return Record(
        node.node_id,
        node.get_content(metadata_mode=MetadataMode.NONE),
        source_of(node),
        json.dumps(node_to_metadata_dict(node)),
        document=node.ref_doc_id,
        vector=node.embedding,
        metadata={
            name: value for name, value in node.metadata.items() if isinstance(value, str | int | float | NoneType)
        },
        start=start or 0,
        page=page_of(node),
    )


def source_of(node: BaseNode) -> str:
    """What a citation of the node shows: where its reader says that it is from."""
    named = (node.metadata.get(name) for name in ("source", "file_path", "url", "file_name"))
    return next((name for name in named if isinstance(name, str) and name), node.ref_doc_id or node.node_id)


def page_of(node: BaseNode) -> int | None:
    """The page that the node stands on, if its reader says so; LlamaIndex's write numbers as text."""
    page = node.metadata.get("page_label", node.metadata.get("page"))
    return int(page) if str(page).isdecimal() else None
