"""LlamaIndex's interface for vector stores, over a LazyRAG store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_index.core.base.embeddings.base import similarity
from llama_index.core.indices.query.embedding_utils import get_top_k_mmr_embeddings
from llama_index.core.schema import BaseNode, MetadataMode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    FilterCondition,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)
from llama_index.core.vector_stores.utils import build_metadata_filter_fn
from pydantic import Field, PrivateAttr

from lazyrag.errors import ConfigError, InputError
from lazyrag.integrations.common import Connection, warm
from lazyrag.integrations.llama_index.convert import to_node, to_record
from lazyrag.types import CONTENT, Chunk

SAME = 0.98
"""Cosine from which on two vectors of a text are of one model; number types and batches make small differences."""

MMR_FACTOR = 4
"""For maximal marginal relevance, so many times the nodes asked for are looked at."""


class LazyRAGVectorStore(Connection, BasePydanticVectorStore):
    """Keeps nodes in a LazyRAG store: their texts are chunks from now on, whose KV any prompt reuses.

    A node of the same id takes the old one's place; what is deleted takes its KV on disk along. What `lazyrag ingest`
    put into the store is found as well, if the vectors are of the same model. Nodes are kept at once; `persist` only
    saves the next process some work. Vectors are compared by cosine. Equal texts share one vector.

    Example:
        store = LazyRAGVectorStore(store="kb")
        index = VectorStoreIndex.from_vector_store(store, embed_model=LazyRAGEmbedding(store="kb"))
    """

    embedding: str | None = Field(
        default=None,
        description="Name of the model that makes the nodes' vectors; those of another one are refused. None: the "
        "settings' embedder, as `LazyRAGEmbedding` runs it.",
    )
    warm: bool = Field(
        default=False, description="Compute the KV of what is added at once; else the first prompt that holds it does."
    )
    stores_text: bool = True

    _is_ours: bool = PrivateAttr(default=False)

    @classmethod
    def class_name(cls) -> str:
        """The name in LlamaIndex's serialised settings."""
        return "LazyRAGVectorStore"

    # ------------------------------------------------------------ writing

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Add nodes with their vectors; their ids.

        Raises:
            ConfigError: the vectors are not of the model that `embedding` says.
            InputError: a node without text.
        """
        nodes = list(nodes)
        if nodes:
            ids = self.embedded.records.put([to_record(node) for node in nodes], self._embedding(nodes[0]))
            if self.warm:
                warm(self.embedded, ids)
        return [node.node_id for node in nodes]

    def _embedding(self, sample: BaseNode) -> str:
        """The name of the model that makes the nodes' vectors; by default ours, if this node's vector is."""
        if self.embedding is not None:
            return self.embedding
        embedder = self.embedded.embedder
        if not self._is_ours:
            given = sample.get_embedding()
            (ours,) = embedder.embed_documents([sample.get_content(metadata_mode=MetadataMode.EMBED)])
            if len(given) != len(ours) or (np.any(ours) and similarity(given, ours) < SAME):
                raise ConfigError(
                    f"The nodes' vectors are not those of the embedder {embedder.name!r}.",
                    why="A search that compares vectors of two models finds anything.",
                    fix="Embed with LazyRAGEmbedding (configure() sets it), or name your model here: embedding=...",
                )
            self._is_ours = True
        return embedder.name

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete a document's nodes, and what `lazyrag ingest` stored under this id."""
        self.embedded.records.delete_document(ref_doc_id)

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Delete the nodes that have one of the ids and pass the filters. None: any do.

        Raises:
            InputError: a chunk of an ingested document: only the whole document can be deleted.
        """
        places = self._places(node_ids, filters)
        if chunks := [place for place in places if CONTENT not in place.metadata]:
            raise InputError(
                f"{len(chunks)} of the nodes are chunks of documents that `lazyrag ingest` stored.",
                why="A document is deleted as a whole.",
                fix="Delete the document: delete(node.ref_doc_id).",
            )
        self.embedded.records.delete([place.document_id for place in places])

    def clear(self) -> None:
        """Delete everything in the store's namespace, what `lazyrag ingest` put there, too."""
        records = self.embedded.records
        records.delete([place.document_id for place in records.all()])

    def persist(self, persist_path: str = "", fs: Any = None) -> None:
        """Keep the search index beside the nodes, in the store; the arguments are not used."""
        self.embedded.records.save()

    # ------------------------------------------------------------ reading

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """The nodes that have one of the ids and pass the filters. None: any do."""
        return [to_node(place) for place in self._places(node_ids, filters)]

    def _places(self, node_ids: list[str] | None, filters: MetadataFilters | None) -> list[Chunk]:
        records = self.embedded.records
        places = records.all() if node_ids is None else records.get(node_ids)
        return [place for place in places if passes(filters, to_node(place))]

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The nodes nearest to a vector.

        Args:
            query: of mode DEFAULT or MMR.
            **kwargs: `mmr_threshold`, as LlamaIndex's own store has it.

        Raises:
            InputError: a query of another mode, or without a vector.
        """
        if query.mode not in (VectorStoreQueryMode.DEFAULT, VectorStoreQueryMode.MMR):
            raise InputError(f"Queries of mode {query.mode.value!r} cannot be answered.", fix='Use "default" or "mmr".')
        if query.query_embedding is None:
            raise InputError("The query has no vector.", fix="Query through an index, which embeds it.")
        is_mmr = query.mode is VectorStoreQueryMode.MMR

        def accept(place: Chunk) -> bool:
            node = to_node(place)
            # An index over a store that keeps texts lists no nodes, and means any.
            return (
                (not query.node_ids or node.node_id in query.node_ids)
                and (not query.doc_ids or node.ref_doc_id in query.doc_ids)
                and passes(query.filters, node)
            )

        k = query.similarity_top_k
        found = self.embedded.records.search(query.query_embedding, k * (MMR_FACTOR if is_mmr else 1), accept)
        if is_mmr and found:
            vectors = self.embedded.records.vectors(place.id for place, _ in found)
            threshold = query.mmr_threshold if query.mmr_threshold is not None else kwargs.get("mmr_threshold")
            _, chosen = get_top_k_mmr_embeddings(
                query.query_embedding,
                [vectors[place.id].tolist() for place, _ in found],
                similarity_top_k=k,
                mmr_threshold=threshold,
            )
            found = [found[n] for n in chosen]
        self.embedded.prefetch(place.id for place, _ in found)
        nodes = [to_node(place) for place, _ in found]
        return VectorStoreQueryResult(
            nodes=nodes, similarities=[score for _, score in found], ids=[node.node_id for node in nodes]
        )

    # ------------------------------------------------------------ without blocking the event loop

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """As `add`."""
        return await asyncio.to_thread(self.add, nodes, **kwargs)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """As `delete`."""
        await asyncio.to_thread(self.delete, ref_doc_id)

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """As `delete_nodes`."""
        await asyncio.to_thread(self.delete_nodes, node_ids, filters)

    async def aclear(self) -> None:
        """As `clear`."""
        await asyncio.to_thread(self.clear)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """As `get_nodes`."""
        return await asyncio.to_thread(self.get_nodes, node_ids, filters)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """As `query`."""
        return await asyncio.to_thread(self.query, query, **kwargs)


def passes(filters: MetadataFilters | None, node: BaseNode) -> bool:
    """Whether a node's metadata passes filters, which may hold others."""
    if filters is None or not filters.filters:
        return True

    def passed(one: Any) -> bool:
        if isinstance(one, MetadataFilters):
            return passes(one, node)
        return bool(build_metadata_filter_fn(lambda _: node.metadata, MetadataFilters(filters=[one]))(""))

    results = map(passed, filters.filters)
    if filters.condition is FilterCondition.OR:
        return any(results)
    return not any(results) if filters.condition is FilterCondition.NOT else all(results)
