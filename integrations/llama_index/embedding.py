"""LlamaIndex's interface for embedding models."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding, Embedding
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.constants import DEFAULT_EMBED_BATCH_SIZE
from pydantic import PrivateAttr

from lazyrag.integrations.common import Connection


class LazyRAGEmbedding(BaseEmbedding):
    """The settings' embedder, so that an index and `lazyrag ingest` can share a store. Constructing it loads nothing.

    Args:
        embed_batch_size: texts that are embedded at once.
        callback_manager: LlamaIndex's.
        **settings: those of `lazyrag.integrations.common.Connection`; `lazyrag=` shares a client.
    """

    _connection: Connection = PrivateAttr()

    def __init__(
        self,
        *,
        embed_batch_size: int = DEFAULT_EMBED_BATCH_SIZE,
        callback_manager: CallbackManager | None = None,
        **settings: Any,
    ) -> None:
        connection = Connection(**settings)
        super().__init__(
            model_name=connection.embedder or "lazyrag",
            embed_batch_size=embed_batch_size,
            callback_manager=callback_manager or CallbackManager([]),
        )
        self._connection = connection

    @classmethod
    def class_name(cls) -> str:
        """The name in LlamaIndex's serialised settings."""
        return "LazyRAGEmbedding"

    def _get_query_embedding(self, query: str) -> Embedding:
        return list(map(float, self._connection.embedded.embedder.embed_query(query)))

    async def _aget_query_embedding(self, query: str) -> Embedding:
        return await asyncio.to_thread(self._get_query_embedding, query)

    def _get_text_embedding(self, text: str) -> Embedding:
        return self._get_text_embeddings([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        return [list(map(float, vector)) for vector in self._connection.embedded.embedder.embed_documents(texts)]

    async def _aget_text_embedding(self, text: str) -> Embedding:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)
