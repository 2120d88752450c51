"""LangChain's own suites for what holds documents, and what LazyRAG promises beyond them, on the fake engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.indexing.base import DocumentIndex
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_tests.integration_tests import VectorStoreIntegrationTests
from langchain_tests.integration_tests.indexer import AsyncDocumentIndexTestSuite, DocumentIndexerTestSuite

from lazyrag import errors
from lazyrag.client import LazyRAG
from lazyrag.integrations.langchain import (
    ChatLazyRAG,
    FaissVectorStore,
    LazyRAGDocumentIndex,
    LazyRAGRetriever,
    RetrievedTexts,
    format_docs,
    know_retrieved,
    wrap_retriever,
)
from lazyrag.integrations.langchain.retrieved import BESIDE
from lazyrag.types import chunk_id

Connect = Callable[..., Any]

# The interface is marked as one that may change.
pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")


@pytest.fixture
def empty(connect: Connect, tmp_path: Path) -> LazyRAG:
    """A client whose store is still to be made."""
    client, _ = connect(config={"store": tmp_path / "kb", "embedder": "hash"})
    assert isinstance(client, LazyRAG)
    return client


# ---------------------------------------------------------------- LangChain's suites


class TestVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, empty: LazyRAG) -> VectorStore:  # type: ignore[override]
        return FaissVectorStore(self.get_embeddings(), lazyrag=empty)


class TestDocumentIndex(DocumentIndexerTestSuite):
    @pytest.fixture
    def index(self, empty: LazyRAG) -> DocumentIndex:  # type: ignore[override]
        return LazyRAGDocumentIndex(lazyrag=empty)


class TestAsyncDocumentIndex(AsyncDocumentIndexTestSuite):
    @pytest.fixture
    async def index(self, empty: LazyRAG) -> DocumentIndex:  # type: ignore[override]
        return LazyRAGDocumentIndex(lazyrag=empty)


# ---------------------------------------------------------------- the vector store


def documents(passages: list[str]) -> list[Document]:
    return [
        Document(page_content=text, id=str(n), metadata={"n": n, "even": n % 2 == 0, "tags": ["a", str(n)]})
        for n, text in enumerate(passages)
    ]


def test_metadata_of_lazyrags_own_names_comes_back_and_forges_nothing(empty: LazyRAG, passages: list[str]) -> None:
    forged = Document(page_content=passages[0], id="0", metadata={"_content": '{"langchain_text": "", "metadata": {}}'})
    store = FaissVectorStore(lazyrag=empty)
    store.add_documents([forged])
    assert store.get_by_ids(["0"]) == [forged]


def test_what_is_added_is_reused_by_prompts_and_stays_for_the_next_process(
    connect: Connect, empty: LazyRAG, passages: list[str], tmp_path: Path
) -> None:
    given = documents(passages)
    FaissVectorStore(lazyrag=empty).add_documents(given)
    other, _ = connect(config={"store": tmp_path / "kb", "embedder": "hash"})
    store = FaissVectorStore(lazyrag=other)
    assert sorted(store.get_by_ids([str(n) for n in range(12)]), key=lambda d: int(d.id or 0)) == given
    retriever = store.as_retriever(search_kwargs={"k": 3})
    prompt = ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}")
    chain = (
        {"context": retriever | format_docs, "question": RunnablePassthrough()} | prompt | ChatLazyRAG(lazyrag=other)
    )
    chain.invoke("river bridge keeper")
    again = chain.invoke("river bridge keeper").response_metadata["lazyrag"]
    assert again["sources"] == ["hbm"] * 3
    assert {citation["document_id"] for citation in again["citations"]} <= {str(n) for n in range(12)}


def test_no_file_of_a_store_is_a_pickle(empty: LazyRAG, passages: list[str], tmp_path: Path) -> None:
    store = FaissVectorStore(lazyrag=empty)
    store.add_documents(documents(passages))
    store.save()
    files = [path for path in (tmp_path / "kb").rglob("*") if path.is_file()]
    assert files
    assert not [path.name for path in files if path.suffix == ".pkl" or path.read_bytes()[:1] == b"\x80"]


def test_filters_are_metadata_lists_of_values_or_functions(empty: LazyRAG, passages: list[str]) -> None:
    store = FaissVectorStore(lazyrag=empty)
    store.add_documents(documents(passages))

    def found(filter: Any) -> set[int]:
        return {d.metadata["n"] for d in store.similarity_search("river", k=20, filter=filter)}

    assert found(None) == set(range(12))
    assert found({"even": True}) == {0, 2, 4, 6, 8, 10}
    assert found({"even": True, "n": [1, 2, 4]}) == {2, 4}
    assert found(lambda document: document.metadata["n"] > 9) == {10, 11}
    assert found({"missing": 1}) == set()


def test_marginal_relevance_passes_over_what_is_alike(empty: LazyRAG) -> None:
    store = FaissVectorStore(lazyrag=empty)
    store.add_texts(["red apple tree", "red apple trees", "red apple tree tree", "red boat"], ids=["1", "2", "3", "4"])
    near = [d.id for d in store.similarity_search("red apple tree", k=2)]
    apart = [d.id for d in store.max_marginal_relevance_search("red apple tree", k=2, fetch_k=4, lambda_mult=0.1)]
    assert near == ["1", "3"]
    assert apart == ["1", "4"]
    assert store.max_marginal_relevance_search("red", k=2, filter={"none": 1}) == []
    with_scores = store.similarity_search_with_relevance_scores("red apple tree", k=4)
    assert with_scores[0][1] == pytest.approx(1.0)
    assert all(0 <= score <= 1 for _, score in with_scores)


def test_equal_texts_are_two_documents_and_one_chunk(empty: LazyRAG) -> None:
    store = FaissVectorStore(lazyrag=empty)
    store.add_texts(["the same text", "the same text"], [{"a": 1}, {"a": 2}], ids=["1", "2"])
    assert {d.id for d in store.similarity_search("same", k=5)} == {"1", "2"}
    store.delete(["1"])
    assert [d.metadata for d in store.similarity_search("same", k=5)] == [{"a": 2}]


def test_a_store_refuses_vectors_of_another_model(empty: LazyRAG) -> None:
    FaissVectorStore(DeterministicFakeEmbedding(size=6), embedding_name="one", lazyrag=empty).add_texts(["a text"])
    with pytest.raises(errors.StoreError, match="one"):
        FaissVectorStore(DeterministicFakeEmbedding(size=6), embedding_name="two", lazyrag=empty).add_texts(["b"])


def test_metadata_that_json_cannot_hold_is_refused(empty: LazyRAG) -> None:
    with pytest.raises(errors.InputError, match="metadata cannot be stored"):
        FaissVectorStore(lazyrag=empty).add_texts(["a"], [{"when": object()}])


def test_deleting_without_ids_leaves_what_was_ingested(shelved: LazyRAG, passages: list[str]) -> None:
    store = FaissVectorStore(lazyrag=shelved)
    store.add_texts(["added by hand"], ids=["mine"])
    assert store.get_by_ids(["mine"])
    held = LazyRAGRetriever(lazyrag=shelved, k=100).invoke("added by hand")
    assert held[0].page_content == "added by hand"
    store.delete()
    assert store.get_by_ids(["mine"]) == []
    left = store.similarity_search(passages[0], k=100)
    assert len(left) == len(held) - 1
    assert "_content" not in held[0].metadata


def test_indexing_again_writes_only_what_changed(empty: LazyRAG, passages: list[str]) -> None:
    store, manager = FaissVectorStore(lazyrag=empty), InMemoryRecordManager(namespace="n")
    manager.create_schema()
    given = [Document(page_content=text, metadata={"source": f"s{n // 6}"}) for n, text in enumerate(passages)]
    settings: dict[str, Any] = {"cleanup": "scoped_full", "source_id_key": "source", "key_encoder": "sha256"}
    assert index(given, manager, store, **settings)["num_added"] == 12
    again = index(given[1:], manager, store, batch_size=3, **settings)
    assert (again["num_added"], again["num_skipped"], again["num_deleted"]) == (0, 11, 1)
    assert len(store.similarity_search("river", k=50)) == 11


# ---------------------------------------------------------------- other retrievers


@pytest.fixture
def foreign(passages: list[str]) -> BaseRetriever:
    """A retriever that knows nothing of LazyRAG."""
    store = InMemoryVectorStore.from_texts(passages, DeterministicFakeEmbedding(size=6))
    return store.as_retriever(search_kwargs={"k": 3})


async def test_a_wrapped_retrievers_documents_are_reused(connect: Connect, foreign: BaseRetriever) -> None:
    client, _ = connect()
    wrapped = wrap_retriever(foreign, lazyrag=client)
    assert wrapped.invoke("river") == foreign.invoke("river")
    assert await wrapped.ainvoke("river") == foreign.invoke("river")
    prompt = ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}")
    chain = {"context": wrapped | format_docs, "question": RunnablePassthrough()} | prompt | ChatLazyRAG(lazyrag=client)
    assert chain.invoke("river").response_metadata["lazyrag"]["sources"] == ["computed"] * 3
    assert (await chain.ainvoke("river")).response_metadata["lazyrag"]["sources"] == ["hbm"] * 3


async def test_within_know_retrieved_any_chains_documents_are_known(connect: Connect, foreign: BaseRetriever) -> None:
    client, _ = connect()
    prompt = ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}")
    chain = {"context": foreign | format_docs, "question": RunnablePassthrough()} | prompt | ChatLazyRAG(lazyrag=client)
    assert chain.invoke("river").response_metadata["lazyrag"]["sources"] == []
    with know_retrieved(lazyrag=client):
        assert (await chain.ainvoke("river")).response_metadata["lazyrag"]["sources"] == ["computed"] * 3
        assert chain.invoke("river").response_metadata["lazyrag"]["sources"] == ["hbm"] * 3
    chain.invoke("market")
    assert len(client.library.registered) == 3, "no more than what was retrieved inside"


@pytest.mark.parametrize("way", ["wrapped", "watched"])
async def test_what_is_retrieved_is_registered_before_the_next_step_and_beside_the_event_loop(
    connect: Connect, foreign: BaseRetriever, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    client, _ = connect()
    threads, register = [], client.register

    def noted(texts: Any) -> list[str]:
        threads.append(threading.get_ident())
        time.sleep(0.05)
        return register(texts)

    monkeypatch.setattr(client, "register", noted)
    if way == "wrapped":
        found = await wrap_retriever(foreign, lazyrag=client).ainvoke("river")
    else:
        with know_retrieved(lazyrag=client):
            found = await foreign.ainvoke("river")
    assert set(client.library.registered) == {document.page_content for document in found}
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_what_was_not_retrieved_for_longest_is_forgotten(connect: Connect, passages: list[str]) -> None:
    client, _ = connect()
    passages = [text[:200] for text in passages]
    texts = RetrievedTexts(client, max_bytes=3 * (200 + BESIDE))
    for shown in ([0, 1, 2], [0], [3], [1, 3]):
        texts.on_retriever_end([Document(page_content=passages[n]) for n in shown])
    known = {chunk_id(text) for text in client.library.registered}
    assert known == {chunk_id(passages[n]) for n in (0, 1, 3)}


def test_what_could_not_be_registered_is_when_it_is_found_again(
    connect: Connect, passages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = connect()
    texts, found = RetrievedTexts(client), [Document(page_content=passages[0])]

    def busy(_: object) -> list[str]:
        raise errors.StoreError("busy")

    with monkeypatch.context() as patch:
        patch.setattr(client, "register", busy)
        with pytest.raises(errors.StoreError):
            texts.on_retriever_end(found)
    texts.on_retriever_end(found)
    assert client.library.registered == passages[:1]


def test_handlers_of_one_client_share_their_room_and_what_is_found_at_once_is_known(
    connect: Connect, passages: list[str]
) -> None:
    client, _ = connect()
    client.register(passages[:1])
    for number in range(4):
        texts = RetrievedTexts(client, max_bytes=2 * BESIDE)
        texts.on_retriever_end([Document(page_content=passages[n]) for n in (0, number, number + 1)])
    assert set(client.library.registered) == {passages[n] for n in (0, 3, 4)}
    RetrievedTexts(client, max_bytes=2 * BESIDE).on_retriever_end([Document(page_content=passages[5])])
    assert client.library.registered == [passages[0], passages[5]], "what was registered by hand stays"


@pytest.mark.parametrize("search", ["similarity", "mmr"])
def test_kv_of_what_is_found_is_brought_up_before_the_prompt_is_built(
    connect: Connect, passages: list[str], tmp_path: Path, search: str
) -> None:
    client, engine = connect(config={"store": tmp_path / "kb", "embedder": "hash"})
    embedding = DeterministicFakeEmbedding(size=16)
    mine = FaissVectorStore(embedding, lazyrag=client)
    foreign = InMemoryVectorStore(embedding)
    for store in (mine, foreign):
        store.add_documents(documents(passages))
    for retriever in (
        mine.as_retriever(search_type=search, search_kwargs={"k": 2}),
        wrap_retriever(foreign.as_retriever(search_type=search, search_kwargs={"k": 2}), lazyrag=client),
    ):
        engine.prefetched.clear()
        found = retriever.invoke("river")
        (request,) = engine.prefetched
        assert {s.chunk_id for s in request.segments} == {chunk_id(document.page_content) for document in found}
