"""A store is carried elsewhere whole, or not at all."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from lazyrag import transfer
from lazyrag.backend.hashing import chunk_key
from lazyrag.backend.tiers.disk import DiskTier, Form, chunk_files
from lazyrag.care import verify
from lazyrag.errors import InputError, StoreError
from lazyrag.retrievers.store import FILE_NAME, Store
from lazyrag.transfer import Moved, export_store, import_store
from lazyrag.types import Chunk, Document, EncodedChunk, chunk_id

MODEL = "0123456789abcdef" * 4
FORM = Form(("a",), "BF16", (4, 1, 2))


def put(store: Store, id: str, *texts: str, namespace: str = "") -> None:
    """A document of chunks, with their KV on disk."""
    chunks = []
    for text in texts:
        tokens = tuple(map(ord, text))
        chunks.append(EncodedChunk(Chunk(chunk_id(text), text, len(tokens), id, id, 0, len(text)), tokens))
        key = chunk_key(tokens, salt=namespace)
        tier = DiskTier(store.directory / "kv", MODEL)
        tier.save(key, FORM, np.zeros(FORM.num_bytes, np.uint8), namespace=namespace)
    store.put_document(Document(id, "", id), chunks, namespace=namespace)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with three documents in two namespaces, one of them deleted."""
    folder = tmp_path / "kb"
    with Store.open(folder, create=True) as store:
        put(store, "a", "one", "two")
        put(store, "b", "one", namespace="tenant")
        put(store, "gone", "wombat")
        store.delete_document("gone")
    return folder


def contents(folder: Path) -> object:
    with Store.open(folder) as store:
        assert list(verify(store)) == []
        chunks = {namespace: list(store.chunks(namespace)) for namespace in store.namespaces()}
    return chunks, {file.path.relative_to(folder): file.path.read_bytes() for file in chunk_files(folder / "kv")}


@pytest.mark.parametrize("name", ["copy", "copy.tar"])
def test_what_is_exported_and_imported_is_the_same_store(folder: Path, tmp_path: Path, name: str) -> None:
    with Store.open(folder) as store:
        exported = export_store(store, tmp_path / name)
    imported = import_store(tmp_path / name, tmp_path / "new" / "kb")
    assert exported == imported
    assert (exported.documents, exported.chunks, exported.kv_files) == (2, 3, 3)
    assert contents(tmp_path / "new" / "kb") == contents(folder)


@pytest.mark.parametrize("name", ["copy", "copy.tar"])
def test_kv_can_be_left_out_and_what_was_deleted_always_is(folder: Path, tmp_path: Path, name: str) -> None:
    with Store.open(folder) as store:
        assert export_store(store, tmp_path / name, kv=False).kv_files == 0
    everything = b"".join(path.read_bytes() for path in [*tmp_path.glob("copy.tar"), *tmp_path.glob("copy/*")])
    assert b"two" in everything
    assert b"wombat" not in everything
    assert import_store(tmp_path / name, tmp_path / "new").kv_files == 0


def test_nothing_is_overwritten(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "x.tar").touch()
    with Store.open(folder) as store:
        for target in ("full", "x.tar", "kb"):
            with pytest.raises(InputError):
                export_store(store, tmp_path / target)
        export_store(store, tmp_path / "copy.tar")
    with pytest.raises(InputError):
        import_store(tmp_path / "copy.tar", folder)


def test_a_damaged_kv_file_is_left_out(folder: Path, tmp_path: Path) -> None:
    with Store.open(folder) as store:
        export_store(store, tmp_path / "copy")
    path = next(chunk_files(tmp_path / "copy" / "kv")).path
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    moved = import_store(tmp_path / "copy", tmp_path / "new")
    assert (moved.kv_files, moved.damaged) == (2, 1)


def test_a_damaged_store_is_refused_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    with Store.open(folder) as store:
        export_store(store, tmp_path / "copy.tar")
    whole = (tmp_path / "copy.tar").read_bytes()
    (tmp_path / "copy.tar").write_bytes(whole[:5000])
    with pytest.raises((InputError, StoreError)):
        import_store(tmp_path / "copy.tar", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.tar", "kb"]


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "kv/../../evil", "lazyrag.toml", f"sub/{FILE_NAME}"])
def test_what_is_no_part_of_a_store_is_refused(tmp_path: Path, name: str) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        info = tarfile.TarInfo(name)
        info.size = 4
        tar.addfile(info, io.BytesIO(b"evil"))
    with pytest.raises(InputError, match="no exported store"):
        import_store(tmp_path / "x.tar", tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["x.tar"]


@pytest.mark.parametrize("kind", ["missing", "empty folder", "no tar", "empty tar"])
def test_what_is_no_export_is_refused(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "x"
    if kind == "empty folder":
        source.mkdir()
    elif kind == "no tar":
        source.write_bytes(b"x" * 3000)
    elif kind == "empty tar":
        tarfile.open(source, "w").close()
    with pytest.raises(InputError):
        import_store(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_full_disk_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(stream: object, path: Path) -> Moved:
        raise OSError(28, "No space left on device")

    with Store.open(folder) as store, monkeypatch.context() as broken:
        broken.setattr(transfer, "_write", full)
        with pytest.raises(StoreError, match="No space left"):
            export_store(store, tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir()] == ["kb"]
