"""LlamaIndex's stores and pipelines over a LazyRAG store: as its own ones, and what they hold is reused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionCache, IngestionPipeline
from llama_index.core.node_parser import HierarchicalNodeParser, SentenceWindowNodeParser, TokenTextSplitter
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import (
    BaseNode,
    Document,
    MetadataMode,
    NodeRelationship,
    NodeWithScore,
    QueryBundle,
    RelatedNodeInfo,
    TextNode,
    TransformComponent,
)
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)

from lazyrag import Document as OwnDocument
from lazyrag import errors
from lazyrag.backend.fake import FakeEngine
from lazyrag.chat import Message
from lazyrag.client import LazyRAG
from lazyrag.integrations.llama_index import (
    LazyRAGEmbedding,
    LazyRAGLLM,
    LazyRAGRegister,
    LazyRAGRetriever,
    LazyRAGVectorStore,
    configure,
)
from lazyrag.retrievers.embed import HashEmbedder
from lazyrag.types import chunk_id

pytestmark = pytest.mark.usefixtures("llama_index_settings")

Connect = Callable[..., Any]
EMBEDDER = HashEmbedder()


@pytest.fixture
def client(connect: Connect, tmp_path: Path) -> LazyRAG:
    """A client whose store nobody has filled yet."""
    client: LazyRAG = connect(config={"store": tmp_path / "store", "embedder": "hash"})[0]
    return client


def again(client: LazyRAG) -> LazyRAG:
    """A client of the same store and engine that knows nothing else, as in another process."""
    return LazyRAG(client.config, engine=client.engine)


def node_of(text: str, number: int, **metadata: Any) -> TextNode:
    """A node with its vector, of one of three documents."""
    source = RelatedNodeInfo(node_id=f"doc{number % 3}")
    node = TextNode(id_=f"node{number}", text=text, metadata=metadata, relationships={NodeRelationship.SOURCE: source})
    node.embedding = embedded(node.get_content(MetadataMode.EMBED))
    return node


def embedded(text: str) -> list[float]:
    return [float(number) for number in EMBEDDER.embed_query(text)]


def nodes_of(passages: Sequence[str]) -> list[TextNode]:
    kinds = ["river", "town", None]
    return [
        node_of(text, n, n=n, half=n / 2, name=f"Text {n}", tags=["a", "b"][: n % 3], kind=kinds[n % 3])
        for n, text in enumerate(passages)
    ]


def ids(nodes: Sequence[BaseNode]) -> list[str]:
    return [node.node_id for node in nodes]


def segments(client: LazyRAG) -> list[str]:
    """The chunks of the last request, whole or not."""
    engine = client.engine
    assert isinstance(engine, FakeEngine)
    return [segment.chunk_id for segment in engine.requests[-1].segments]


# ---------------------------------------------------------------- the vector store, against LlamaIndex's own


def where(key: str, operator: FilterOperator, value: Any) -> MetadataFilters:
    return MetadataFilters(filters=[MetadataFilter(key=key, operator=operator, value=value)])


def several(condition: FilterCondition) -> MetadataFilters:
    two = [*where("n", FilterOperator.GT, 2).filters, *where("kind", FilterOperator.EQ, "town").filters]
    return MetadataFilters(filters=two, condition=condition)


FILTERS = [
    None,
    MetadataFilters(filters=[]),
    where("kind", FilterOperator.EQ, "river"),
    where("kind", FilterOperator.NE, "river"),
    where("half", FilterOperator.GTE, 2.5),
    where("n", FilterOperator.LT, 4),
    where("n", FilterOperator.IN, [1, 5]),
    where("n", FilterOperator.NIN, [1, 5]),
    where("name", FilterOperator.TEXT_MATCH, "Text 1"),
    where("name", FilterOperator.TEXT_MATCH_INSENSITIVE, "text 1"),
    where("tags", FilterOperator.CONTAINS, "b"),
    where("tags", FilterOperator.ANY, ["b"]),
    where("tags", FilterOperator.ALL, ["a", "b"]),
    where("kind", FilterOperator.IS_EMPTY, None),
    where("unknown", FilterOperator.EQ, 1),
    *map(several, FilterCondition),
]


@pytest.fixture(scope="module")
def twins(
    model_folder: Path, passages: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[LazyRAGVectorStore, SimpleVectorStore]:
    """Our store and LlamaIndex's own with the same nodes."""
    settings = {"store": tmp_path_factory.mktemp("twins"), "embedder": "hash"}
    ours = LazyRAGVectorStore(lazyrag=LazyRAG(model=str(model_folder), **settings))
    theirs = SimpleVectorStore()
    nodes = nodes_of(passages)
    assert ours.add(nodes) == theirs.add(nodes) == ids(nodes)
    return ours, theirs


@pytest.mark.parametrize("mode", [VectorStoreQueryMode.DEFAULT, VectorStoreQueryMode.MMR])
@pytest.mark.parametrize("filters", FILTERS, ids=lambda value: str(FILTERS.index(value)))
async def test_a_query_finds_what_llama_indexs_own_store_finds(
    twins: tuple[LazyRAGVectorStore, SimpleVectorStore], filters: MetadataFilters | None, mode: VectorStoreQueryMode
) -> None:
    ours, theirs = twins
    for k in (1, 4, 20):
        query = VectorStoreQuery(embedded("river bridge keeper seven"), k, filters=filters, mode=mode)
        expected = theirs.query(query)
        found = ours.query(query)
        assert found.ids == expected.ids == ids(found.nodes or [])
        assert (await ours.aquery(query)).ids == found.ids
        if mode is VectorStoreQueryMode.DEFAULT:
            assert found.similarities == pytest.approx(expected.similarities, abs=1e-5)


@pytest.mark.parametrize("name", ["_content", "_document"])
def test_metadata_of_lazyrags_own_names_is_refused(client: LazyRAG, passages: list[str], name: str) -> None:
    with pytest.raises(errors.InputError, match=f"LazyRAG keeps the name {name}"):
        LazyRAGVectorStore(lazyrag=client).add([node_of(passages[0], 0, **{name: "doc1"})])
    assert list(client.records.all()) == []


def test_a_query_can_be_limited_to_nodes_and_to_documents(
    twins: tuple[LazyRAGVectorStore, SimpleVectorStore],
) -> None:
    ours, theirs = twins
    vector = embedded("river bridge")
    query = VectorStoreQuery(vector, 5, node_ids=["node3", "node8", "unknown"])
    assert ours.query(query).ids == theirs.query(query).ids
    of_one = ours.query(VectorStoreQuery(vector, 9, doc_ids=["doc1"])).nodes
    assert sorted(ids(of_one or [])) == ["node1", "node10", "node4", "node7"]


def test_mmr_follows_its_threshold(twins: tuple[LazyRAGVectorStore, SimpleVectorStore]) -> None:
    ours, theirs = twins
    query = VectorStoreQuery(embedded("river bridge"), 6, mode=VectorStoreQueryMode.MMR)
    orders = {threshold: ours.query(query, mmr_threshold=threshold).ids for threshold in (0.1, 0.5, 1.0)}
    assert orders == {t: theirs.query(query, mmr_threshold=t).ids for t in orders}
    assert len(set(map(tuple, filter(None, orders.values())))) > 1


def test_filters_may_hold_filters(twins: tuple[LazyRAGVectorStore, SimpleVectorStore]) -> None:
    either = several(FilterCondition.OR)
    nested = MetadataFilters(filters=[either, *where("n", FilterOperator.LT, 6).filters])
    assert ids(twins[0].get_nodes(filters=nested)) == ["node1", "node3", "node4", "node5"]


@pytest.mark.parametrize("mode", ["hybrid", "sparse", "svm", "text_search"])
def test_a_query_of_another_mode_is_refused(twins: tuple[LazyRAGVectorStore, SimpleVectorStore], mode: str) -> None:
    with pytest.raises(errors.InputError, match=mode):
        twins[0].query(VectorStoreQuery([1.0], mode=VectorStoreQueryMode(mode)))


def test_a_query_without_a_vector_is_refused(twins: tuple[LazyRAGVectorStore, SimpleVectorStore]) -> None:
    with pytest.raises(errors.InputError, match="no vector"):
        twins[0].query(VectorStoreQuery(query_str="river"))


# ---------------------------------------------------------------- nodes in, nodes out


def test_a_node_comes_back_as_it_was(client: LazyRAG, passages: list[str]) -> None:
    node = node_of(f"\n {passages[0]}  ", 1, page_label="7", nested={"a": [1, None]}, tags=["x"])
    node.excluded_llm_metadata_keys = ["nested"]
    node.start_char_idx, node.end_char_idx = 100, 100 + len(node.text)
    LazyRAGVectorStore(lazyrag=client).add([node])
    (found,) = LazyRAGVectorStore(lazyrag=again(client)).get_nodes([node.node_id])
    node.embedding = None
    assert found == node
    assert found.hash == node.hash
    (place,) = client.records.get([node.node_id])
    assert (place.page, place.start, place.end) == (7, 102, 102 + len(passages[0]))


def test_a_node_of_the_same_id_takes_the_old_ones_place(client: LazyRAG, passages: list[str]) -> None:
    store = LazyRAGVectorStore(lazyrag=client)
    store.add([node_of(passages[0], 1)])
    store.add([node_of(passages[1], 1)])
    (node,) = store.get_nodes()
    assert node.get_content() == passages[1]
    assert client.plan(f"{passages[0]}\n\n{passages[1]}\n\nWhy?").chunk_ids == (chunk_id(passages[1]),)
    assert store.query(VectorStoreQuery(embedded(passages[1]), 1)).similarities == pytest.approx([1.0])


async def test_deleting_takes_documents_nodes_or_what_passes_a_filter(client: LazyRAG, passages: list[str]) -> None:
    store = LazyRAGVectorStore(lazyrag=client)
    await store.async_add(nodes_of(passages[:9]))
    store.delete("doc1")
    assert ids(store.get_nodes()) == ["node0", "node2", "node3", "node5", "node6", "node8"]
    store.delete_nodes(["node0", "unknown"])
    store.delete_nodes(filters=where("n", FilterOperator.GT, 6))
    assert ids(await store.aget_nodes()) == ["node2", "node3", "node5", "node6"]
    await store.adelete_nodes(["node2"])
    await store.adelete("doc0")
    await store.adelete("unknown")
    assert ids(store.get_nodes()) == ["node5"]
    assert client.plan(f"{passages[0]}\n\n{passages[5]}\n\nWhy?").chunk_ids == (chunk_id(passages[5]),)
    await store.aclear()
    assert store.get_nodes() == []
    assert store.query(VectorStoreQuery(embedded("river"), 3)).ids == []


def test_equal_texts_are_nodes_of_their_own_with_one_kv(client: LazyRAG, passages: list[str]) -> None:
    store = LazyRAGVectorStore(lazyrag=client)
    store.add([node_of(passages[0], 0), node_of(passages[0], 1), node_of(passages[1], 2)])
    assert sorted(store.query(VectorStoreQuery(embedded(passages[0]), 2)).ids or []) == ["node0", "node1"]
    store.delete("doc0")
    assert store.query(VectorStoreQuery(embedded(passages[0]), 1)).ids == ["node1"]
    assert client.stats()["store"]["chunks"] == 2


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_node_without_text_is_refused(client: LazyRAG, text: str) -> None:
    with pytest.raises(errors.InputError, match="empty"):
        LazyRAGVectorStore(lazyrag=client, embedding="x").add([TextNode(text=text, embedding=[1.0])])


def test_vectors_of_another_model_are_refused_unless_it_is_named(client: LazyRAG, passages: list[str]) -> None:
    node = node_of(passages[0], 0)
    node.embedding = (node.embedding or [])[::-1]
    with pytest.raises(errors.ConfigError, match=r"'hash'.*LazyRAGEmbedding.*embedding="):
        LazyRAGVectorStore(lazyrag=client).add([node])
    named = LazyRAGVectorStore(lazyrag=client, embedding="text-embedding-9")
    named.add([node])
    assert named.query(VectorStoreQuery(node.embedding, 1)).ids == ["node0"]
    with pytest.raises(errors.StoreError, match="text-embedding-9"):
        LazyRAGVectorStore(lazyrag=client).add([node_of(passages[1], 1)])
    with pytest.raises(errors.ConfigError, match="text-embedding-9"):
        client.search("river")


def test_what_is_added_is_warmed_if_that_is_wanted(client: LazyRAG, passages: list[str]) -> None:
    LazyRAGVectorStore(lazyrag=client, warm=True).add([node_of(passages[0], 0)])
    (answer,) = client.generate([f"{passages[0]}\n\nWhy?"])
    assert answer.reuse.sources == ("hbm",)


def test_a_quota_holds_for_nodes_as_for_documents(connect: Connect, tmp_path: Path, passages: list[str]) -> None:
    client, _ = connect(config={"store": tmp_path / "store", "embedder": "hash", "quota_chunks": 2})
    store = LazyRAGVectorStore(lazyrag=client)
    with pytest.raises(errors.QuotaError):
        store.add(nodes_of(passages[:3]))
    assert ids(store.get_nodes()) == ["node0", "node1"]


def test_a_servers_address_is_no_place_for_nodes(passages: list[str]) -> None:
    store = LazyRAGVectorStore(base_url="http://127.0.0.1:1")
    with pytest.raises(errors.ConfigError, match="/v1/documents"):
        store.add([node_of(passages[0], 0)])


# ---------------------------------------------------------------- with what lazyrag ingests


def test_nodes_and_ingested_documents_are_found_together(shelved: LazyRAG, passages: list[str]) -> None:
    store = LazyRAGVectorStore(lazyrag=shelved)
    extra = node_of("A lighthouse keeper counts the ships.", 1, source="extra.txt")
    store.add([extra])
    hits = LazyRAGRetriever(lazyrag=shelved, similarity_top_k=1).retrieve("lighthouse ships")
    extra.embedding = None
    assert hits[0].node == extra
    index = VectorStoreIndex.from_vector_store(store, embed_model=LazyRAGEmbedding(lazyrag=shelved))
    found = index.as_retriever(similarity_top_k=3).retrieve("river bridge keeper")
    hits = LazyRAGRetriever(lazyrag=shelved, similarity_top_k=3).retrieve("river bridge keeper")
    assert [(hit.node, pytest.approx(hit.score)) for hit in hits] == [(hit.node, hit.score) for hit in found]


def test_a_chunk_of_an_ingested_document_is_not_deleted_alone(shelved: LazyRAG) -> None:
    store = LazyRAGVectorStore(lazyrag=shelved)
    (node,) = store.get_nodes([shelved.search("river")[0].chunk.id])
    with pytest.raises(errors.InputError, match="as a whole"):
        store.delete_nodes([node.node_id])
    assert node.ref_doc_id is not None
    store.delete(node.ref_doc_id)
    assert store.get_nodes([node.node_id]) == []


# ---------------------------------------------------------------- indexes and engines


def test_an_index_over_the_store_answers_from_whole_chunks_and_cites_them(client: LazyRAG, passages: list[str]) -> None:
    llm = configure(LazyRAGLLM(lazyrag=client))
    documents = [
        Document(text=f"{one}\n\n\n{two}", id_=f"doc{n}", metadata={"file_path": f"doc{n}.txt", "page_label": str(n)})
        for n, (one, two) in enumerate(zip(passages[::2], passages[1::2], strict=True))
    ]
    index = VectorStoreIndex(
        TokenTextSplitter(chunk_size=150, chunk_overlap=0)(documents),
        storage_context=_context(LazyRAGVectorStore(lazyrag=client)),
    )
    response = index.as_query_engine(similarity_top_k=3).query("river bridge keeper")
    nodes = [hit.node for hit in response.source_nodes]
    assert segments(client) == [chunk_id(node.get_content()) for node in nodes]
    texts = {document.id_: document.text for document in documents}
    cited = llm.complete("\n\n".join(node.get_content() for node in nodes) + "\n\nWhy?").raw["lazyrag"]["citations"]
    for citation, node in zip(cited, nodes, strict=True):
        shown = texts[citation["document_id"]][citation["start"] : citation["end"]]
        assert shown == node.get_content()
        assert citation["source"] == f"{node.ref_doc_id}.txt"
        assert citation["page"] == int(node.metadata["page_label"])
        assert citation["kv"] == "hbm"
    other = again(client)
    reopened = VectorStoreIndex.from_vector_store(
        LazyRAGVectorStore(lazyrag=other), embed_model=LazyRAGEmbedding(lazyrag=other)
    )
    found = reopened.as_retriever(similarity_top_k=3).retrieve("river bridge keeper")
    assert [hit.node_id for hit in found] == [node.node_id for node in nodes]
    index.delete_ref_doc(str(nodes[0].ref_doc_id))
    assert chunk_id(nodes[0].get_content()) not in other.plan(nodes[0].get_content() + "\n\nWhy?").chunk_ids


def _context(vector_store: Any) -> Any:
    from llama_index.core import StorageContext

    return StorageContext.from_defaults(vector_store=vector_store)


async def test_the_embedding_is_the_settings_embedder(client: LazyRAG) -> None:
    model = LazyRAGEmbedding(lazyrag=client)
    expected = pytest.approx(embedded("river bridge"))
    assert model.get_query_embedding("river bridge") == expected
    assert await model.aget_query_embedding("river bridge") == expected
    assert model.get_text_embedding("river bridge") == expected
    assert await model.aget_text_embedding("river bridge") == expected
    assert model.get_text_embedding_batch(["river bridge", "x"])[0] == expected
    assert (await model.aget_text_embedding_batch(["x", "river bridge"]))[1] == expected


def test_configure_sets_the_embedder_unless_one_is_chosen(client: LazyRAG) -> None:
    configure(LazyRAGLLM(lazyrag=client))
    chosen = Settings.embed_model
    assert isinstance(chosen, LazyRAGEmbedding)
    assert chosen.get_query_embedding("river") == pytest.approx(embedded("river"))
    configure(LazyRAGLLM(lazyrag=again(client)))
    assert Settings.embed_model is chosen


# ---------------------------------------------------------------- pipelines


def test_a_pipeline_registers_what_goes_to_another_vector_store(client: LazyRAG, passages: list[str]) -> None:
    llm = configure(LazyRAGLLM(lazyrag=client))
    theirs = SimpleVectorStore()
    splitter = TokenTextSplitter(chunk_size=150, chunk_overlap=0)
    steps = [splitter, LazyRAGEmbedding(lazyrag=client), LazyRAGRegister(lazyrag=client)]
    pipeline = IngestionPipeline(transformations=steps, vector_store=theirs, docstore=SimpleDocumentStore())
    texts = ["\n\n".join(passages[n : n + 2]) for n in (0, 2)]
    nodes = pipeline.run(documents=[Document(text=text, id_=f"doc{n}") for n, text in enumerate(texts)])
    prompt = "\n\n".join(node.get_content() for node in nodes)
    llm.complete(f"{prompt}\n\nWhy?")
    plan = again(client).plan([Message("user", f"{prompt}\n\nWhy?")])
    assert plan.chunk_ids == tuple(chunk_id(node.get_content()) for node in nodes), "another process knows them, too"
    assert segments(client) == [segment.chunk_id for segment in plan.segments]
    assert len(segments(client)) > 1
    (place, *_) = (client.store.spans_of([plan.chunk_ids[-1]]) if client.store else {}).values()
    assert texts[1][place[0].start : place[0].end] == nodes[-1].get_content()

    changed = f"{passages[8]}\n\n{passages[1]}"
    pipeline.run(documents=[Document(text=changed, id_="doc0"), Document(text=texts[1], id_="doc1")])
    assert client.store is not None
    kept = set(client.store.get_texts(set(client.store.chunk_ids())).values())
    assert passages[0] not in "\n".join(kept), "the changed document's old chunks are gone"
    assert passages[8] in "\n".join(kept)


@pytest.mark.parametrize("strategy", list(DocstoreStrategy))
async def test_a_pipeline_keeps_the_store_in_step_with_its_documents(
    client: LazyRAG, passages: list[str], strategy: DocstoreStrategy
) -> None:
    store = LazyRAGVectorStore(lazyrag=client)
    splitter = TokenTextSplitter(chunk_size=400, chunk_overlap=0)
    pipeline = IngestionPipeline(
        transformations=[splitter, LazyRAGEmbedding(lazyrag=client)],
        vector_store=store,
        docstore=SimpleDocumentStore(),
        docstore_strategy=strategy,
    )
    first = [Document(text=passages[n], id_=f"doc{n}") for n in range(3)]
    pipeline.run(documents=first)
    await pipeline.arun(documents=first[:2])
    pipeline.run(documents=[Document(text=passages[5], id_="doc0"), Document(text=passages[1], id_="doc1")])
    texts = {node.get_content() for node in store.get_nodes()}
    if strategy is DocstoreStrategy.UPSERTS:
        assert texts == {passages[1], passages[2], passages[5]}
    elif strategy is DocstoreStrategy.UPSERTS_AND_DELETE:
        assert texts == {passages[1], passages[5]}
    else:
        assert texts == {passages[0], passages[1], passages[2], passages[5]}
    long = Document(text="\n\n".join(passages[6:]), id_="doc1")
    written = pipeline.run(documents=[long])
    assert len(written) > 1
    assert {node.node_id for node in written} <= {node.node_id for node in store.get_nodes()}, "all, not the last one"


def test_a_step_that_fails_leaves_the_old_version_known(client: LazyRAG, passages: list[str]) -> None:
    class Fails(TransformComponent):
        def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
            raise OSError("no connection")

    step = LazyRAGRegister(lazyrag=client)
    docstore, theirs = SimpleDocumentStore(), SimpleVectorStore()
    pipeline = IngestionPipeline(transformations=[step], docstore=docstore, vector_store=theirs)
    pipeline.run(documents=[Document(text=passages[0], id_="doc")])
    broken = IngestionPipeline(transformations=[Fails(), step], docstore=docstore, vector_store=theirs)
    with pytest.raises(OSError, match="no connection"):
        broken.run(documents=[Document(text=passages[1], id_="doc")])
    assert client.plan(f"{passages[0]}\n\nWhy?").chunk_ids == (chunk_id(passages[0]),)


def test_nodes_that_lost_ids_and_metadata_are_cited_all_the_same(shelved: LazyRAG) -> None:
    """As after rerankers and compressors that make new ones of the texts."""
    hits = shelved.search("river bridge keeper", 3)
    llm = configure(LazyRAGLLM(lazyrag=shelved))
    engine = RetrieverQueryEngine.from_args(_Fixed([TextNode(text=hit.chunk.text) for hit in hits]))
    engine.query("Which way?")
    answer = llm.complete("\n\n".join(hit.chunk.text for hit in hits) + "\n\nWhy?")
    assert segments(shelved) == [hit.chunk.id for hit in hits]
    cited = [(c["document_id"], c["page"], c["start"], c["end"]) for c in answer.raw["lazyrag"]["citations"]]
    assert cited == [(hit.chunk.document_id, hit.chunk.page, hit.chunk.start, hit.chunk.end) for hit in hits]


def test_a_cache_that_skips_the_step_loses_nothing(connect: Connect, tmp_path: Path, passages: list[str]) -> None:
    cache = IngestionCache()
    document = Document(text=passages[0], id_="doc")

    def run(client: LazyRAG) -> tuple[str, ...]:
        IngestionPipeline(transformations=[LazyRAGRegister(lazyrag=client)], cache=cache).run(documents=[document])
        return client.plan(f"{passages[0]}\n\nWhy?").chunk_ids

    first, second = (connect(config={"store": tmp_path / "kb"})[0] for _ in range(2))
    assert run(first) == run(second) == (chunk_id(passages[0]),)
    assert len(cache.cache.get_all(cache.collection)) == 1, "the second run was skipped"
    elsewhere, _ = connect(config={"store": tmp_path / "other"})
    elsewhere.records  # noqa: B018  (makes its store)
    assert run(elsewhere) == (chunk_id(passages[0]),)


def test_without_a_store_a_cache_of_another_process_skips_nothing(
    connect: Connect, passages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lazyrag.integrations.llama_index import register

    cache = IngestionCache()
    for process in "ab":
        monkeypatch.setattr(register, "PROCESS", process)
        client, _ = connect()
        step = LazyRAGRegister(lazyrag=client)
        IngestionPipeline(transformations=[step], cache=cache).run(documents=[Document(text=passages[0], id_="d")])
        assert client.plan(f"{passages[0]}\n\nWhy?").chunk_ids == (chunk_id(passages[0]),)


def test_a_step_with_a_store_goes_to_worker_processes_and_one_without_is_refused(
    client: LazyRAG, model_folder: Path, passages: list[str]
) -> None:
    step = LazyRAGRegister(model=str(model_folder), store=client.config.store, embedder="hash")
    step.to_dict()
    pickle.loads(pickle.dumps(step))([TextNode(text=passages[0])])
    assert client.plan(f"{passages[0]}\n\nWhy?").chunk_ids == (chunk_id(passages[0]),)
    with pytest.raises(errors.ConfigError, match="num_workers"):
        pickle.dumps(LazyRAGRegister(model=str(model_folder)))


async def test_registering_may_warm_and_need_not_block(client: LazyRAG, passages: list[str]) -> None:
    nodes = [TextNode(text=text) for text in passages[:2]]
    assert await LazyRAGRegister(lazyrag=client, warm=True).acall(nodes) == nodes
    (answer,) = client.generate(["\n\n".join(passages[1::-1]) + "\n\nWhy?"])
    assert answer.reuse.sources == ("hbm", "hbm")


# ---------------------------------------------------------------- texts other than the nodes'


def sentences(text: str) -> list[str]:
    """LlamaIndex's own splitter reads files of nltk's, which refuses them where an installer has made hard links."""
    return [f"{sentence.rstrip('.')}. " for sentence in text.split(". ")]


def test_the_window_that_is_shown_in_a_sentences_place_is_registered(client: LazyRAG, passages: list[str]) -> None:
    parser = SentenceWindowNodeParser.from_defaults(sentence_splitter=sentences, window_size=2)
    nodes = parser.get_nodes_from_documents([Document(text=" ".join(passages[:2]))])
    LazyRAGRegister(lazyrag=client, shown="metadata:window")(nodes)
    shown = MetadataReplacementPostProcessor(target_metadata_key="window").postprocess_nodes(
        [NodeWithScore(node=nodes[5])], QueryBundle("river")
    )
    (text,) = (hit.node.get_content() for hit in shown)
    assert client.plan(f"{text}\n\nWhy?").chunk_ids == (chunk_id(text),)
    with pytest.raises(errors.InputError, match="metadata:windo"):
        LazyRAGRegister(lazyrag=client, shown="metadata:windo")(nodes)


def test_the_metadata_that_is_always_shown_can_be_part_of_the_chunk(client: LazyRAG, passages: list[str]) -> None:
    node = TextNode(text=passages[0], metadata={"author": "A. Keeper", "year": 1901})
    LazyRAGRegister(lazyrag=client, shown="llm")([node])
    configure(LazyRAGLLM(lazyrag=client))
    engine = RetrieverQueryEngine.from_args(_Fixed([node]))
    engine.query("Who?")
    assert segments(client) == [chunk_id(node.get_content(MetadataMode.LLM))]


def test_a_parent_is_reused_whole_where_it_is_shown(client: LazyRAG, passages: list[str]) -> None:
    sizes = {str(size): TokenTextSplitter(chunk_size=size, chunk_overlap=0) for size in (400, 100)}
    parser = HierarchicalNodeParser.from_defaults(node_parser_ids=list(sizes), node_parser_map=sizes)
    nodes = parser.get_nodes_from_documents([Document(text="\n\n".join(passages[:4]))])
    LazyRAGRegister(lazyrag=client)(nodes)
    parent = next(node for node in nodes if node.child_nodes)
    children = [node for node in nodes if node.parent_node and node.parent_node.node_id == parent.node_id]
    assert len(children) > 1
    assert client.plan(f"{parent.get_content()}\n\nWhy?").chunk_ids == (chunk_id(parent.get_content()),)
    assert client.plan(f"{children[1].get_content()}\n\nWhy?").chunk_ids == (chunk_id(children[1].get_content()),)


class _Fixed(LazyRAGRetriever):
    """Always finds these nodes."""

    def __init__(self, nodes: Sequence[BaseNode]) -> None:
        super().__init__()
        self._nodes = nodes

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=node) for node in self._nodes]


def test_stored_metadata_is_plain(client: LazyRAG, passages: list[str]) -> None:
    """What the server and the command line show of it are texts, numbers and truth values."""
    LazyRAGVectorStore(lazyrag=client).add([node_of(passages[0], 0, tags=["a"], n=1, ok=True)])
    (place,) = client.records.get(["node0"])
    assert {name: place.metadata[name] for name in ("n", "ok")} == {"n": 1, "ok": True}
    assert "tags" not in place.metadata
    assert json.loads(str(place.metadata["_content"]))["tags"] == ["a"]


def test_a_document_that_lazyrag_ingests_after_nodes_takes_nothing_from_them(
    client: LazyRAG, passages: list[str]
) -> None:
    store = LazyRAGVectorStore(lazyrag=client)
    store.add([node_of(passages[0], 0)])
    list(client.ingest(documents=[OwnDocument("own", passages[0], "own.txt")], warm=False))
    client.delete(["own"])
    assert ids(store.get_nodes()) == ["node0"]
    assert store.query(VectorStoreQuery(embedded(passages[0]), 1)).ids == ["node0"]


@pytest.mark.parametrize("mode", [VectorStoreQueryMode.DEFAULT, VectorStoreQueryMode.MMR])
def test_kv_of_what_is_found_is_brought_up_before_the_prompt_is_built(
    client: LazyRAG, passages: list[str], mode: VectorStoreQueryMode
) -> None:
    store = LazyRAGVectorStore(lazyrag=client)
    store.add(nodes_of(passages))
    found = store.query(VectorStoreQuery(query_embedding=embedded("river"), similarity_top_k=2, mode=mode))
    engine = client.engine
    assert isinstance(engine, FakeEngine)
    (request,) = engine.prefetched
    assert [s.chunk_id for s in request.segments] == [chunk_id(node.get_content()) for node in found.nodes]
