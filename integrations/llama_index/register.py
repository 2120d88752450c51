"""LlamaIndex's interface for what is done to nodes at ingest."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent
from pydantic import Field

from lazyrag.errors import ConfigError, InputError
from lazyrag.integrations.common import Connection, warm
from lazyrag.integrations.llama_index.convert import page_of, source_of
from lazyrag.types import Document

PROCESS = secrets.token_hex(8)
METADATA = "metadata:"


class LazyRAGRegister(Connection, TransformComponent):
    """Makes nodes' texts known, so that prompts which hold them reuse their KV, whatever vector store they go to.

    The last step of an `IngestionPipeline`; it hands the nodes on unchanged. With a store, the texts are kept in it, a
    document at a time, in the place of the document's old version; a pipeline whose cache knows the step may skip it.
    Without one they are known to this process only, and a cache of another process does not skip it.

    Example:
        IngestionPipeline(transformations=[SentenceSplitter(), LazyRAGRegister(store="kb")])
    """

    shown: str = Field(
        default="text",
        description='What prompts will show of a node: "text"; "llm", its text behind its metadata, as LlamaIndex puts '
        'them together; or "metadata:NAME", the metadata that a postprocessor puts in the text\'s place (of '
        'SentenceWindowNodeParser: "metadata:window").',
    )
    warm: bool = Field(default=False, description="Compute the KV at once; else the first prompt that holds it does.")

    @classmethod
    def class_name(cls) -> str:
        """The name in LlamaIndex's serialised settings."""
        return "LazyRAGRegister"

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Register the nodes' texts; returns the nodes.

        Raises:
            InputError: `shown` names metadata that a node does not have.
        """
        client = self.embedded
        if client.config.store is None:
            ids = client.register([self._shown(node) for node in nodes])
        else:
            ids = [id for group in _by_document(nodes) for id in self._keep(*group)]
        if self.warm:
            warm(client, ids)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """As `__call__`, without blocking the event loop."""
        return await asyncio.to_thread(self.__call__, nodes, **kwargs)

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """The settings; and where the texts are kept, so that a pipeline's cache skips this only if they are there."""
        client = self.embedded
        place = PROCESS if client.config.store is None else client.records.store_id
        return {**super().to_dict(**kwargs), "kept_in": place}

    def __getstate__(self) -> dict[Any, Any]:
        """For a pipeline's worker processes: the settings, not the client.

        Raises:
            ConfigError: the texts would be known to a worker only.
        """
        if self.lazyrag is not None or self.embedded.config.store is None:
            raise ConfigError(
                "Texts cannot be registered by other processes (num_workers) without a store.",
                why="they would be known to those processes only.",
                fix='Name one: LazyRAGRegister(store="kb").',
            )
        state: dict[Any, Any] = super().__getstate__()
        return {**state, "__pydantic_private__": {**state["__pydantic_private__"], "_client": None}}

    def _keep(self, document: str, nodes: Sequence[BaseNode]) -> list[str]:
        from lazyrag.records import Passage

        passages = []
        for node in nodes:
            is_text = self.shown == "text"
            start = getattr(node, "start_char_idx", None) if is_text else None
            passages.append(Passage(self._shown(node), start or 0, page_of(node)))
        source = Document(document, "", source_of(nodes[0]))
        return self.embedded.records.put_document(source, passages)

    def _shown(self, node: BaseNode) -> str:
        name = self.shown.removeprefix(METADATA)
        if self.shown in ("text", "llm"):
            text: Any = node.get_content(MetadataMode.NONE if self.shown == "text" else MetadataMode.LLM)
            return str(text)
        text = node.metadata.get(name)
        if name == self.shown or not isinstance(text, str):
            raise InputError(
                f"shown={self.shown!r} names no text of a node.", fix='Use "text", "llm" or "metadata:NAME".'
            )
        return text


def _by_document(nodes: Sequence[BaseNode]) -> Iterator[tuple[str, list[BaseNode]]]:
    """The nodes of each document, with its id; one of no document is its own."""
    groups: dict[str, list[BaseNode]] = {}
    for node in nodes:
        groups.setdefault(node.ref_doc_id or node.node_id, []).append(node)
    yield from groups.items()
