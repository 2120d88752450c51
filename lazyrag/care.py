"""What is kept on disk, put in order: KV of chunks that went is removed, what nobody needs is found, what is damaged.

    store.sqlite3    the truth: chunks, and those that went and whose KV is still to be removed (`Store.doomed`)
    kv/              one file a chunk, model and preamble; its name begins with the chunk's (`hashing.chunk_name`)
    vectors/, anchors/   caches, one a namespace

A chunk's KV is found by the chunk's tokens and namespace alone, in the folders of all models. A prompt may show the
head of a chunk only; an engine then keeps KV of that head, which goes with the chunk unless another chunk begins so.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeAlias, TypeVar

from lazyrag.anchors import AnchorIndex
from lazyrag.backend.hashing import NAME_DIGITS, chunk_name, head_names
from lazyrag.backend.tiers.disk import HEX, ChunkFile, chunk_files, flaw, leftovers, remove_files, space_of
from lazyrag.errors import StoreError
from lazyrag.retrievers.store import Store
from lazyrag.retrievers.vectors import is_whole
from lazyrag.tokens import Tokenizer
from lazyrag.types import ChunkId

T = TypeVar("T")

Forget: TypeAlias = Callable[[Iterable[Sequence[int]], str], None]

KV, VECTORS, ANCHORS = "kv", "vectors", "anchors"
UNUSED, OTHER_MODEL, LEFTOVER, CACHE = "unused KV", "another model's KV", "leftover", "cache of nothing"


@dataclass(frozen=True, slots=True)
class Deleted:
    """What `delete` has removed: counts."""

    documents: int = 0
    chunks: int = 0
    kv_files: int = 0


@dataclass(frozen=True, slots=True)
class Waste:
    """Something on disk that the store does not need.

    Attributes:
        kind: `UNUSED`, `OTHER_MODEL`, `LEFTOVER` or `CACHE`.
        path: a file, or the folder of an anchor index.
        num_bytes: that it takes.
    """

    kind: str
    path: Path
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Flaw:
    """Something on disk that is not as it should be.

    Attributes:
        where: a file, or what the store's check found it in.
        what: is wrong.
        mended: whether a repair has put it in order: the file is gone and is made again when it is needed.
        harmless: it costs a computation at most, and eviction causes it, too.
    """

    where: str
    what: str
    mended: bool = False
    harmless: bool = False


# ---------------------------------------------------------------- KV of chunks that went


def delete(store: Store, ids: Iterable[str], namespace: str = "", forget: Forget | None = None) -> Deleted:
    """Delete documents, the chunks that only they held, and the KV of these. Unknown ids change nothing.

    Raises:
        StoreError: see `remove_doomed_kv`; the documents are deleted then.
    """
    documents = chunks = 0
    known = {document.id for document in store.documents(namespace)}
    for id in dict.fromkeys(ids):
        chunks += len(store.delete_document(id, namespace).removed)
        documents += id in known
    return Deleted(documents, chunks, remove_doomed_kv(store, forget))


def remove_doomed_kv(store: Store, forget: Forget | None = None) -> int:
    """Remove the KV files of chunks that went, of all models and preambles; the number of files.

    What engines hold in memory goes with `forget`, and first: so what an engine is saving is found here. What has come
    back since, or begins a chunk that is there, stays. Other processes' engines are not reached: no plan names a chunk
    that its namespace's store does not hold, so nobody can ask for it, and they give its room to others. A request that
    was planned before the chunk went may still save its KV afterwards; `find_waste` finds that file.

    Args:
        store: whose chunks went.
        forget: has an engine forget chunks, given by their tokens and namespace.

    Raises:
        StoreError: a file cannot be removed. The next call tries again.
    """
    root = store.directory / KV
    count = 0
    while doomed := store.doomed():
        by_namespace = defaultdict(list)
        for _, namespace, tokens in doomed:
            by_namespace[namespace].append(tokens)
        try:
            for namespace, chunks in by_namespace.items():
                _forget(store, namespace, chunks, forget)
        finally:
            found = (_kv_of(store, root, namespace, chunks) for namespace, chunks in by_namespace.items())
            paths = [path for paths in found for path in paths]
            try:
                remove_files(paths)
            except OSError as error:
                raise StoreError(
                    f"KV of deleted chunks cannot be removed from {root}: {error.strerror}.",
                    why="The chunks are deleted, and nothing reads their KV any more.",
                    fix=f"Mend that and type: lazyrag gc --store {store.directory}",
                ) from error
        store.bury(number for number, _, _ in doomed)
        count += len(paths)
    return count


def _forget(store: Store, namespace: str, chunks: Iterable[tuple[int, ...]], forget: Forget | None) -> None:
    if forget is not None:
        chunks = list(chunks)
        used = store.beginning_with(chunks, namespace)
        if gone := [tokens for tokens in chunks if tokens not in used]:
            forget(gone, namespace)


def _kv_of(store: Store, root: Path, namespace: str, chunks: Iterable[tuple[int, ...]]) -> list[Path]:
    """The KV files of chunks that are gone, and of their heads, but for what chunks that are still there begin with."""
    files = kv_by_name(root, namespace)
    if not files:
        return []
    found: dict[tuple[int, ...], str] = {}
    for tokens in chunks:
        for length, name in enumerate(head_names(tokens, salt=namespace), 1):
            if name in files:
                found[tokens[:length]] = name
    used = store.beginning_with(found, namespace)
    return [file.path for head, name in found.items() if head not in used for file in files[name]]


def kv_by_name(root: Path, namespace: str) -> dict[str, list[ChunkFile]]:
    """A namespace's KV files by the names of their chunks."""
    files = defaultdict(list)
    for file in chunk_files(root, space_of(namespace)):
        files[file.key[:NAME_DIGITS]].append(file)
    return dict(files)


def models_of(store: Store, id: ChunkId, namespace: str = "") -> set[str]:
    """The models, each by the first digits of its fingerprint, that have left KV of a chunk on disk."""
    tokens = store.get_tokens([id], namespace).get(id)
    if tokens is None:
        return set()
    name = chunk_name(tokens, salt=namespace)
    pattern = f"{HEX * 16}/{space_of(namespace)}/{name[:2]}/{name}*.safetensors"
    return {path.parts[-4] for path in (store.directory / KV).glob(pattern)}


def kv_bytes(store: Store, namespace: str) -> int:
    """What a namespace's KV files take, of all models."""
    return sum(_size(file.path) for file in chunk_files(store.directory / KV, space_of(namespace)))


def drop_kv(store: Store, namespace: str = "") -> None:
    """Remove all KV files of a namespace, of all models.

    Raises:
        StoreError: one cannot be removed.
    """
    collect(store, (Waste(UNUSED, file.path, 0) for file in chunk_files(store.directory / KV, space_of(namespace))))


def change_tokenizer(store: Store, tokenizer: Tokenizer) -> None:
    """Take a store over for a model with another tokenizer: chunks keep their texts and get its tokens.

    KV of the old tokens is removed: nothing could find it any more. The next ingest splits the documents anew.
    """
    for namespace in store.namespaces():
        for page in _pages(store.texts(namespace)):
            tokens = {id: tokenizer.encode_chunk(text) for id, text in page}
            store.retokenize(tokens, namespace)
    store.remember(tokenizer=tokenizer.fingerprint)
    remove_doomed_kv(store)


def _pages(items: Iterator[T], size: int = 256) -> Iterator[list[T]]:
    while page := list(islice(items, size)):
        yield page


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of a chunk.

    Attributes:
        id: of the chunk.
        num_tokens: that it has.
        places: how often it stands in documents.
        kv_bytes: of its KV files, of all models and preambles.
        is_warm: whether one is of the model of the last ingest, or, if none has computed KV, of any.
    """

    id: ChunkId
    num_tokens: int
    places: int
    kv_bytes: int
    is_warm: bool


def what_is_kept(store: Store, ids: Iterable[ChunkId], namespace: str = "") -> list[Kept]:
    """What is kept of those chunks that exist, in the given order."""
    ids = list(dict.fromkeys(ids))
    model = store.settings().get("kv", "")[:16]
    files = kv_by_name(store.directory / KV, namespace)
    tokens, places = store.get_tokens(ids, namespace), store.spans_of(ids, namespace)
    kept = []
    for id in ids:
        if id in places:
            held = files.get(chunk_name(tokens[id], salt=namespace), ()) if id in tokens else ()
            is_warm = any(file.model == model or not model for file in held)
            num_bytes = sum(_size(file.path) for file in held)
            kept.append(Kept(id, places[id][0].num_tokens, len(places[id]), num_bytes, is_warm))
    return kept


# ---------------------------------------------------------------- what nobody needs


def find_waste(store: Store, *, other_models: bool = False) -> list[Waste]:
    """What could be removed from the store's folder without anybody missing it. Changes nothing.

    Args:
        store: whose folder.
        other_models: KV of models, or settings of one, other than those of the last ingest is waste, too.
    """
    root = store.directory / KV
    model = store.settings().get("kv", "")[:16] if other_models else ""
    # The files before the chunks: a file is written after its chunk.
    files = list(chunk_files(root))
    waste = [Waste(LEFTOVER, path, _size(path)) for path in leftovers(root)]
    by_space = defaultdict(list)
    for file in files:
        if model and file.model != model:
            waste.append(Waste(OTHER_MODEL, file.path, _size(file.path)))
        else:
            by_space[file.space].append(file)
    namespaces = {space_of(namespace): namespace for namespace in store.namespaces()}
    for space, owned in by_space.items():
        used = _used(store, namespaces.get(space), {file.key[:NAME_DIGITS] for file in owned})
        waste += [Waste(UNUSED, f.path, _size(f.path)) for f in owned if f.key[:NAME_DIGITS] not in used]
    living = {space for space, namespace in namespaces.items() if store.stats(namespace)["chunks"]}
    for path in sorted((store.directory / VECTORS).glob("*.faiss")):
        if path.stem not in living:
            waste.append(Waste(CACHE, path, _size(path)))
    for path in sorted((store.directory / ANCHORS).glob("*")):
        if path.name not in living:
            waste.append(Waste(CACHE, path, sum(map(_size, path.rglob("*")))))
    return waste


def _used(store: Store, namespace: str | None, names: set[str]) -> set[str]:
    """Those of the names that a namespace's chunks, or their heads, have."""
    if namespace is None:
        return set()
    used = names & {chunk_name(tokens, salt=namespace) for _, tokens in store.reusable(namespace)}
    if used == names:
        return used
    for _, tokens in store.reusable(namespace):
        used |= names.intersection(head_names(tokens, salt=namespace))
    return used


def collect(store: Store, waste: Iterable[Waste]) -> None:
    """Remove what `find_waste` found.

    Raises:
        StoreError: something cannot be removed.
    """
    found = list(waste)
    try:
        for item in found:
            if item.path.is_dir():
                shutil.rmtree(item.path)
        remove_files(item.path for item in found)
    except OSError as error:
        raise StoreError(
            f"{store.directory} cannot be tidied: {error.strerror}.", fix="Check its permissions."
        ) from error


# ---------------------------------------------------------------- what is damaged


def verify(store: Store, *, repair: bool = False) -> Iterator[Flaw]:
    """Read everything once and say what is wrong with it.

    Args:
        store: all its namespaces.
        repair: remove damaged files, which are made again when they are needed; delete chunks that are damaged or stand
            nowhere, and have the next ingest read their documents again; take back notes of KV that is not there.

    Raises:
        StoreError: the store's file cannot be read at all, or a repair cannot be written.
    """
    before = store.check()
    after = set(store.mend()) if repair and before else set(before)
    if repair:
        remove_doomed_kv(store)
    yield from (Flaw("store", problem, mended=problem not in after) for problem in before)
    damaged = [(file.path, what) for file in chunk_files(store.directory / KV) if (what := flaw(file))]
    damaged += [(path, "it is damaged") for path in _damaged_caches(store)]
    if repair:
        collect(store, (Waste(UNUSED, path, 0) for path, _ in damaged))
    yield from (Flaw(str(path), what, mended=repair) for path, what in damaged)
    for namespace in store.namespaces():
        if count := sum(map(len, missing_kv(store, namespace).values())):
            where = f"namespace {namespace!r}" if namespace else "store"
            yield Flaw(where, f"KV of {count} chunks is noted and not there", mended=repair, harmless=True)
        if repair:
            forget_missing_kv(store, namespace)


def forget_missing_kv(store: Store, namespace: str, forget: Forget | None = None) -> None:
    """Take back the notes of KV that is not there.

    Args:
        store: with the notes.
        namespace: whose chunks.
        forget: has an engine forget them, too: it would find nothing to compute, and to save, while they are in memory.
    """
    for fingerprint, ids in missing_kv(store, namespace).items():
        store.forget_warm_chunks(ids, fingerprint, namespace)
        if forget is not None:
            forget(store.get_tokens(ids, namespace).values(), namespace)


def missing_kv(store: Store, namespace: str) -> dict[str, list[ChunkId]]:
    """By fingerprint, the chunks whose KV is noted as kept (`Store.mark_warm`) and is not on disk."""
    files = kv_by_name(store.directory / KV, namespace)
    missing = defaultdict(list)
    for fingerprint, id, tokens in store.warm(namespace):
        held = files.get(chunk_name(tokens, salt=namespace), ())
        if not any(fingerprint.startswith(file.model) for file in held):
            missing[fingerprint].append(id)
    return dict(missing)


def _damaged_caches(store: Store) -> Iterator[Path]:
    for path in sorted((store.directory / VECTORS).glob("*.faiss")):
        if not is_whole(path):
            yield path
    for path in sorted((store.directory / ANCHORS).glob("*")):
        try:
            AnchorIndex.load(path, secret=store.secret)
        except StoreError:
            yield path


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
