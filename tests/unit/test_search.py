import pytest

from lazyrag.errors import ConfigError
from lazyrag.retrievers.embed import HashEmbedder
from lazyrag.retrievers.search import Searcher
from lazyrag.retrievers.store import Store
from lazyrag.types import Chunk, Document, EncodedChunk, chunk_id

EMBEDDER = HashEmbedder()


def put(store, id, *texts, namespace="", pages=None):
    chunks, start = [], 0
    for i, text in enumerate(texts):
        page = None if pages is None else pages[i]
        chunk = Chunk(chunk_id(text), text, 1, id, f"{id}.md", start, start + len(text), page)
        chunks.append(EncodedChunk(chunk, (1,)))
        start += len(text) + 1
    vectors = dict(zip([e.chunk.id for e in chunks], EMBEDDER.embed_documents(texts), strict=True))
    store.put_document(Document(id, "", f"{id}.md", "T", {"n": 1}), chunks, vectors=vectors, namespace=namespace)


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path, create=True) as store:
        store.require(embedding="hash")
        yield store


@pytest.fixture
def searcher(store):
    return Searcher(store, EMBEDDER)


def texts(hits):
    return [hit.chunk.text for hit in hits]


def test_hits_come_nearest_first_with_what_a_citation_needs(store, searcher):
    put(store, "zoo", "the red fox sleeps", "a blue whale swims", pages=[3, 4])
    hits = searcher.search("does a whale swim or does the whale sleep", 2)
    assert texts(hits)[0] == "a blue whale swims"
    chunk = hits[0].chunk
    assert (chunk.document_id, chunk.source, chunk.page, chunk.start, chunk.end) == ("zoo", "zoo.md", 4, 19, 37)
    assert (chunk.title, chunk.metadata) == ("T", {"n": 1})
    assert hits[0].score > hits[1].score


def test_equal_texts_are_one_hit_that_names_every_place(store, searcher):
    put(store, "a", "the red fox", "other words", "the red fox")
    put(store, "b", "the red fox")
    hits = searcher.search("red fox", 5)
    assert len(hits) == 2
    assert hits[0].chunk.document_id == "a"
    assert [(place.document_id, place.start) for place in hits[0].also] == [("a", 24), ("b", 0)]
    assert hits[1].also == ()


def test_a_search_sees_only_its_namespace(store, searcher):
    put(store, "a", "the red fox")
    put(store, "b", "the red panda", namespace="tenant")
    assert texts(searcher.search("red", 5)) == ["the red fox"]
    assert texts(searcher.search("red", 5, namespace="tenant")) == ["the red panda"]
    assert searcher.search("red", 5, namespace="stranger") == []


def test_a_search_follows_what_another_process_ingests(store, searcher):
    assert searcher.search("red fox") == []
    with Store.open(store.directory) as other:
        put(other, "a", "the red fox")
        assert texts(searcher.search("red fox")) == ["the red fox"]
        other.delete_document("a")
        assert searcher.search("red fox") == []


def test_diversity_prefers_a_new_thing_to_the_same_thing_again(store, searcher):
    fox = ["the red fox sleeps", "the red fox sleeps here", "the red fox sleeps here now"]
    put(store, "a", *fox, "the red panda climbs slowly up trees")
    plain = searcher.search("the red fox sleeps", 2)
    assert set(texts(plain)) <= set(fox)
    diverse = searcher.search("the red fox sleeps", 2, mmr=True, diversity=0.7)
    assert texts(diverse)[0] in fox
    assert texts(diverse)[1] == "the red panda climbs slowly up trees"
    same = searcher.search("the red fox sleeps", 2, mmr=True, diversity=0.0)
    assert texts(same) == texts(plain)


@pytest.mark.parametrize("mmr", [False, True])
def test_k_may_exceed_what_there_is(store, searcher, mmr):
    assert searcher.search("red", 3, mmr=mmr) == []
    put(store, "a", "the red fox", "blue")
    assert len(searcher.search("red", 99, mmr=mmr)) == 2


def test_the_embedder_must_be_the_one_that_the_documents_were_embedded_with(tmp_path):
    with Store.open(tmp_path, create=True) as store:
        with pytest.raises(ConfigError, match="never embedded"):
            Searcher(store, EMBEDDER)
        store.require(embedding="minilm")
        with pytest.raises(ConfigError, match="embedded with 'minilm'"):
            Searcher(store, EMBEDDER)
