"""LangChain's interface for retrieval."""

from __future__ import annotations

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, Field

from lazyrag.integrations.common import Connection
from lazyrag.integrations.langchain.convert import to_document


class LazyRAGRetriever(Connection, BaseRetriever):
    """Finds the stored chunks that are nearest to a query. Constructing it opens nothing.

    A document's metadata says where its text stands: `source`, `page` (from 1, None without pages), `start` and `end`
    (characters of the source's text), `score` (cosine similarity) and `lazyrag_chunk_id`.
    """

    model_config = ConfigDict(extra="forbid")

    k: int = Field(default=4, ge=1, description="How many documents to return, at most.")

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        return [to_document(hit) for hit in self.client.search(query, self.k if k is None else k)]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        return [to_document(hit) for hit in await self.client.asearch(query, self.k if k is None else k)]
