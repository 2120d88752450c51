"""LangChain's interfaces for what holds documents, over a LazyRAG store."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.indexing import DeleteResponse, UpsertResponse
from langchain_core.indexing.base import DocumentIndex
from langchain_core.vectorstores import VectorStore
from langchain_core.vectorstores.utils import maximal_marginal_relevance
from pydantic import ConfigDict, Field, PrivateAttr

from lazyrag.integrations.common import Connection, warm
from lazyrag.integrations.langchain.convert import is_record, place_to_document, to_record
from lazyrag.retrievers.embed import Embedder
from lazyrag.types import Chunk

Filter: TypeAlias = Mapping[str, Any] | Callable[[Document], bool]
"""Which documents a search may find: a function, or metadata that they have; of a list, one of its values."""


class LazyRAGEmbeddings(Embeddings):
    """The settings' embedder, the one that `lazyrag ingest` uses. Constructing it loads nothing.

    Args:
        **settings: those of `lazyrag.integrations.common.Connection`; `lazyrag=` shares a client.
    """

    def __init__(self, **settings: Any) -> None:
        self._connection = Connection(**settings)

    @property
    def embedder(self) -> Embedder:
        """What computes the vectors."""
        return self._connection.embedded.embedder

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Vectors of what is searched."""
        return [vector.tolist() for vector in self.embedder.embed_documents(texts)]

    def embed_query(self, text: str) -> list[float]:
        """The vector of what is asked."""
        vector: list[float] = self.embedder.embed_query(text).tolist()
        return vector


class FaissVectorStore(VectorStore):
    """Keeps documents in a LazyRAG store: their texts are chunks from now on, whose KV any prompt reuses.

    A document of the same id takes the old one's place; what is deleted takes its KV on disk along. What
    `lazyrag ingest` put into the store is found, too, if the vectors are of the same model. Vectors are compared by
    cosine, exactly, in a FAISS index that follows the store; documents are kept at once, as JSON in SQLite.
    Constructing it opens nothing.

    Args:
        embedding: makes the vectors. None: the settings' embedder, as `lazyrag ingest`.
        embedding_name: names `embedding`; a store refuses vectors of another name. None: its class and model.
        warm: compute the KV of what is added at once; else the first prompt that holds it does.
        **settings: those of `lazyrag.integrations.common.Connection`; `lazyrag=` shares a client.

    Example:
        FaissVectorStore(store="kb").add_documents(documents)
    """

    def __init__(
        self,
        embedding: Embeddings | None = None,
        *,
        embedding_name: str | None = None,
        warm: bool = False,
        **settings: Any,
    ) -> None:
        self._connection = Connection(**settings)
        self._embedding = embedding or LazyRAGEmbeddings(**settings)
        self._embedding_name = embedding_name
        self._warm = warm

    @property
    def embeddings(self) -> Embeddings:
        """What makes the vectors."""
        return self._embedding

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> FaissVectorStore:
        """A vector store that holds these texts; `kwargs` are those of the constructor."""
        store = cls(embedding, **kwargs)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    # ------------------------------------------------------------ writing

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: Sequence[str | None] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Write texts, each with its metadata (JSON values), under its id or a new one. Returns the ids.

        Raises:
            InputError: a text that is empty or not Unicode, or metadata that JSON cannot hold.
            StoreError: the store holds vectors of another model.
        """
        texts = list(texts)
        given = [id or str(uuid.uuid4()) for id in ids or [None] * len(texts)]
        vectors = self._embedding.embed_documents(texts)
        records = [
            to_record(Document(page_content=text, metadata=metadata, id=id), vector)
            for text, metadata, id, vector in zip(texts, metadatas or [{}] * len(texts), given, vectors, strict=True)
        ]
        if records:
            chunks = self._connection.embedded.records.put(records, self._name)
            if self._warm:
                warm(self._connection.embedded, chunks)
        return given

    @property
    def _name(self) -> str:
        """Names the model that makes the vectors."""
        if self._embedding_name is not None:
            return self._embedding_name
        if isinstance(self._embedding, LazyRAGEmbeddings):
            return self._embedding.embedder.name
        model = next(filter(None, (getattr(self._embedding, name, None) for name in ("model", "model_name"))), "")
        return f"{type(self._embedding).__qualname__} {model}".strip()

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Delete documents by id, unknown ones being no error; None: all that were added through LangChain."""
        records = self._connection.embedded.records
        records.delete([place.document_id for place in records.all() if is_record(place)] if ids is None else ids)
        return True

    def save(self) -> None:
        """Keep the search index, so that the next process need not make it again. Documents are kept without this."""
        self._connection.embedded.records.save()

    # ------------------------------------------------------------ reading

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Those of the documents that exist."""
        return [place_to_document(place) for place in self._connection.embedded.records.get(ids)]

    def similarity_search(
        self, query: str, k: int = 4, *, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """The documents nearest to a text."""
        return [document for document, _ in self.similarity_search_with_score(query, k, filter=filter)]

    def similarity_search_with_score(
        self, query: str, k: int = 4, *, filter: Filter | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """The documents nearest to a text, and their cosine similarity."""
        return self._nearest(self._embedding.embed_query(query), k, filter)

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, *, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """The documents nearest to a vector."""
        return [document for document, _ in self._nearest(embedding, k, filter)]

    def max_marginal_relevance_search(
        self,
        query: str,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        *,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Documents near to a text, and unlike each other; arguments as in LangChain's base class."""
        vector = self._embedding.embed_query(query)
        return self.max_marginal_relevance_search_by_vector(vector, k, fetch_k, lambda_mult, filter=filter)

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        *,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Documents near to a vector, and unlike each other; arguments as in LangChain's base class."""
        records = self._connection.embedded.records
        found = [place for place, _ in records.search(embedding, fetch_k, _accepting(filter))]
        vectors = records.vectors(place.id for place in found)
        rows = [vectors[place.id].tolist() for place in found]
        chosen = maximal_marginal_relevance(np.asarray(embedding), rows, lambda_mult, k) if rows else []
        self._connection.embedded.prefetch(found[n].id for n in chosen)
        return [place_to_document(found[n]) for n in chosen]

    def _nearest(self, vector: list[float], k: int, filter: Filter | None) -> list[tuple[Document, float]]:
        hits = self._connection.embedded.records.search(vector, k, _accepting(filter))
        self._connection.embedded.prefetch(place.id for place, _ in hits)
        return [(place_to_document(place), score) for place, score in hits]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return lambda similarity: min(1.0, max(0.0, similarity))


def _accepting(filter: Filter | None) -> Callable[[Chunk], bool]:
    def accept(place: Chunk) -> bool:
        if filter is None:
            return True
        document = place_to_document(place)
        if callable(filter):
            return filter(document)
        return all(
            document.metadata.get(name) in wanted if isinstance(wanted, list) else document.metadata.get(name) == wanted
            for name, wanted in filter.items()
        )

    return accept


class LazyRAGDocumentIndex(Connection, DocumentIndex):
    """A LazyRAG store as LangChain's document index: documents are written by id, got by id, and found by a query.

    What is said of `FaissVectorStore` holds for it, with the settings' embedder.
    """

    model_config = ConfigDict(extra="forbid")

    k: int = Field(default=4, ge=1, description="How many documents a query finds, at most.")

    _documents: FaissVectorStore | None = PrivateAttr(default=None)

    @property
    def documents(self) -> FaissVectorStore:
        """The same documents as a vector store."""
        if self._documents is None:
            self._documents = FaissVectorStore(lazyrag=self.client)
        return self._documents

    def upsert(self, items: Sequence[Document], /, **kwargs: Any) -> UpsertResponse:
        """Write documents, each in the place of the one that has its id."""
        return UpsertResponse(succeeded=self.documents.add_documents(list(items)), failed=[])

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> DeleteResponse:
        """Delete documents by id, unknown ones being no error.

        Raises:
            ValueError: no ids are given.
        """
        if ids is None:
            raise ValueError("The ids of the documents to delete are missing.")
        held = [str(document.id) for document in self.get(ids)]
        self.documents.delete(held)
        return DeleteResponse(succeeded=held, failed=[], num_deleted=len(held), num_failed=0)

    def get(self, ids: Sequence[str], /, **kwargs: Any) -> list[Document]:
        """Those of the documents that exist."""
        return self.documents.get_by_ids(ids)

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return self.documents.similarity_search(query, self.k)
