"""The commands that take care of a store: what they print, change and end with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lazyrag import client
from lazyrag.backend.engine import Engine
from lazyrag.backend.tiers.disk import chunk_files
from lazyrag.cli import app
from lazyrag.config import Config

A = "The quick brown fox jumps over the lazy dog, and the dog sleeps on until the evening comes again."
B = "In 1901 the first Nobel Prize in Physics was awarded to Wilhelm Conrad Röntgen, of Germany, for his rays."

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of the developer's, and a working folder without any."""
    for variable in [name for name in os.environ if name.startswith("LAZYRAG_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("LAZYRAG_EMBEDDER", "hash")
    monkeypatch.setenv("LAZYRAG_MODE", "lazy")
    monkeypatch.setenv("LAZYRAG_STORE", "kb")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, saving_engine: Callable[..., Engine]) -> Iterator[Run]:
    """Run a command; with `--json`, its answer is in `values`. Every command has a new engine."""

    def start(config: Config, model: Path) -> Engine:
        assert config.kv_dir is not None
        return saving_engine(model, config.kv_dir, mode=config.mode)

    def invoke(*arguments: object) -> Any:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        client.close_engines()
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        result.values = json.loads(result.stdout) if "--json" in arguments and result.stdout else None  # type: ignore[attr-defined]
        return result

    monkeypatch.setattr(client, "start_engine", start)
    yield invoke
    client.close_engines()


@pytest.fixture
def docs(run: Run, model_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """A folder whose files are in the store `kb`, their KV computed; two of them say the same."""
    model = model_folder("byte-level")
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, text in {"a": A, "b": B, "same": A}.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    assert run("ingest", folder, "--model", model).exit_code == 0
    return folder


def kv() -> set[Path]:
    return {file.path for file in chunk_files(Path("kb/kv"))}


# ---------------------------------------------------------------- rm and show


def test_rm_deletes_by_path_and_keeps_what_another_document_shares(run: Run, docs: Path) -> None:
    assert len(kv()) == 2
    assert run("rm", "docs/a.txt", "--json").values == {"documents": 1, "chunks": 0, "kv_files": 0}
    assert run("rm", docs / "same.txt").stdout == "deleted 1 documents, 1 chunks, 1 KV files\n"
    assert len(kv()) == 1
    assert [document["id"] for document in run("ls", "--json").values] == [str(docs / "b.txt")]


def test_rm_of_a_folder_must_be_said(run: Run, docs: Path) -> None:
    refused = run("rm", "docs")
    assert refused.exit_code == 2
    assert "--recursive" in refused.stderr
    assert run("rm", "docs", "-r", "--json").values == {"documents": 3, "chunks": 2, "kv_files": 2}
    assert kv() == set()


def test_rm_of_something_unknown_deletes_nothing_of_the_rest(run: Run, docs: Path) -> None:
    refused = run("rm", docs / "a.txt", "nothing")
    assert refused.exit_code == 2
    assert "There is no document nothing" in refused.stderr
    assert len(run("ls", "--json").values) == 3


def test_rm_is_the_tenants_own(run: Run, docs: Path) -> None:
    assert run("rm", docs / "a.txt", "--namespace", "other").exit_code == 2
    assert run("ingest", docs, "--namespace", "other").exit_code == 0
    before = kv()
    assert run("rm", "docs", "-r", "--namespace", "other", "--json").values["kv_files"] == 2
    assert len(before - kv()) == 2
    assert len(run("ls", "--json").values) == 3
    assert run("verify").exit_code == 0


def test_show_of_a_document_lists_its_chunks_with_their_kv(run: Run, docs: Path) -> None:
    values = run("show", "docs/a.txt", "--json").values
    assert values["id"] == str(docs / "a.txt")
    (chunk,) = values["chunks"]
    assert (chunk["places"], chunk["warm"], chunk["kv_bytes"] > 0) == (2, True, True)
    assert values["kv_bytes"] == chunk["kv_bytes"]
    table = run("show", "docs/a.txt").stdout
    assert chunk["id"] in table
    assert " yes" in table
    assert "fox" not in table


def test_show_of_a_chunk_lists_its_places(run: Run, docs: Path) -> None:
    id = run("show", docs / "a.txt", "--json").values["chunks"][0]["id"]
    places = run("show", id, "--json").values["chunks"]
    assert [Path(place["document_id"]).name for place in places] == ["a.txt", "same.txt"]
    for path in kv():
        path.unlink()
    assert not run("show", id, "--json").values["chunks"][0]["warm"]
    assert run("show", "nothing").exit_code == 2


# ---------------------------------------------------------------- gc, verify, kv rebuild


def test_gc_removes_what_it_says_and_says_only_with_dry_run(run: Run, docs: Path) -> None:
    needed = kv()
    old = next(iter(needed))
    unused = old.with_name("ab" * 48 + ".safetensors")
    unused.write_bytes(b"12345")
    assert run("gc", "--dry-run").stdout.splitlines() == ["unused KV: 1", "would remove 1 (5 bytes)"]
    assert unused.exists()
    assert run("gc", "--json").values == [{"kind": "unused KV", "path": str(unused), "bytes": 5}]
    assert kv() == needed
    assert run("gc").stdout == "removed 0 (0 bytes)\n"


def test_verify_ends_with_failure_until_all_is_mended(run: Run, docs: Path) -> None:
    assert run("verify").stdout == "nothing is wrong\n"
    damaged = sorted(kv())[0]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    found = run("verify")
    assert found.exit_code == 1
    assert "--repair" in found.stderr
    assert run("verify", "--repair").exit_code == 0
    assert run("verify", "--json").values == []
    assert len(kv()) == 1


def test_kv_rebuild_computes_what_is_missing_or_all_of_it(run: Run, docs: Path) -> None:
    before = kv()
    sorted(before)[0].unlink()
    assert run("kv", "rebuild", "--json").values == {"warmed": 1, "failed": []}
    assert kv() == before
    assert run("kv", "rebuild").stdout == "computed the KV of 0 chunks\n"
    assert run("kv", "rebuild", "--all", "--json").values["warmed"] == 2
    assert kv() == before
    assert run("kv", "rebuild", "--mode", "exact").exit_code == 2


# ---------------------------------------------------------------- export and import


@pytest.mark.parametrize("options", [(), ("--no-kv",)], ids=["with KV", "without"])
def test_an_imported_store_holds_what_was_exported(run: Run, docs: Path, options: tuple[str, ...]) -> None:
    exported = run("export", "copy.tar", *options, "--json").values
    assert exported["documents"] == 3
    assert exported["kv_files"] == (0 if options else 2)
    assert run("import", "copy.tar", "--store", "new", "--json").values == exported
    assert len(run("ls", "--store", "new", "--json").values) == 3
    assert run("verify", "--store", "new").stdout == "nothing is wrong\n"
    assert run("kv", "rebuild", "--store", "new", "--json").values["warmed"] == (2 if options else 0)
    assert run("export", "copy.tar").exit_code == 2


@pytest.mark.parametrize(
    "command", [("rm", "x"), ("show", "x"), ("gc",), ("verify",), ("kv", "rebuild"), ("export", "x")]
)
def test_a_store_that_is_not_there_is_said(run: Run, command: tuple[str, ...]) -> None:
    result = run(*command, "--store", "nowhere")
    assert result.exit_code in (1, 2)
    assert "There is no store in nowhere" in result.stderr
    assert not Path("nowhere").exists()


def test_pinned_documents_are_listed_and_stay_pinned_when_they_change(run: Run, docs: Path) -> None:
    assert run("pin", docs / "a.txt", docs / "b.txt", "--json").values == {"changed": 2}
    assert run("unpin", docs / "b.txt", "--json").values == {"changed": 1}
    (docs / "a.txt").write_text(f"{A} {B}", encoding="utf-8")
    assert run("ingest", docs).exit_code == 0
    pinned = {Path(row["id"]).name: row["pinned"] for row in run("ls", "--json").values}
    assert pinned == {"a.txt": True, "b.txt": False, "same.txt": False}
    assert "pinned" in next(line for line in run("ls").stdout.splitlines() if "a.txt" in line)
    assert run("pin", docs, "--recursive", "--json").values == {"changed": 2}
    unknown = run("pin", docs / "none")
    assert unknown.exit_code == 2
    assert "lazyrag ls shows what there is" in unknown.stderr


def test_an_ingest_stops_at_the_namespaces_quota(run: Run, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYRAG_QUOTA_DOCUMENTS", "4")
    for name in ("c", "d"):
        (docs / f"{name}.txt").write_text(f"{name}: {A}", encoding="utf-8")
    result = run("ingest", docs, "--json")
    assert (result.exit_code, result.values["added"]) == (1, 1)
    assert "may hold 4 documents: it holds 4, and would hold 5" in result.values["failed"][0]["error"]
