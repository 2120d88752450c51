"""LlamaIndex's interface for retrieval."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.schema import NodeWithScore, QueryBundle

from lazyrag.integrations.common import Connection
from lazyrag.integrations.llama_index.convert import to_scored_node


class LazyRAGRetriever(BaseRetriever):
    """Finds the stored chunks that are nearest to a query. Constructing it opens nothing.

    A node's id is its chunk's, its text is exactly the chunk's, and its metadata (`source`, `page`, ...) is for citing:
    the model is not shown it unless `excluded_llm_metadata_keys` is cleared.

    Args:
        similarity_top_k: how many nodes to return, at most.
        callback_manager: LlamaIndex's.
        **settings: those of `lazyrag.integrations.common.Connection`; `lazyrag=` shares a client.
    """

    def __init__(
        self, *, similarity_top_k: int = 4, callback_manager: CallbackManager | None = None, **settings: Any
    ) -> None:
        self._connection = Connection(**settings)
        self.similarity_top_k = similarity_top_k
        super().__init__(callback_manager=callback_manager)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        hits = self._connection.client.search(query_bundle.query_str, self.similarity_top_k)
        return [to_scored_node(hit) for hit in hits]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        hits = await self._connection.client.asearch(query_bundle.query_str, self.similarity_top_k)
        return [to_scored_node(hit) for hit in hits]
