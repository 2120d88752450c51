"""The command line over several processes: what one has computed, the next one loads, also after a kill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest

from lazyrag.retrievers.store import Store

pytestmark = [pytest.mark.engine, pytest.mark.alone]

MODEL = Path(os.environ.get("LAZYRAG_TEST_MODEL", Path(__file__).parents[2] / ".models" / "smollm2-135m-fp32"))
COMMAND = Path(sys.executable).with_name("lazyrag")
LIMIT_S = 240
PACKAGES = ["numpy", "jinja2", "pydantic", "typer", "rich", "httpx", "tokenizers", "hypothesis", "pytest", "ruff"]
"""Their descriptions are real text that every test environment holds."""


def environment() -> dict[str, str]:
    """As a user has it: nothing that other tests have set for the engines of their own process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LAZYRAG_", "VLLM_"))}
    return {
        **kept,
        "LAZYRAG_EMBEDDER": "hash",
        "LAZYRAG_MODE": "lazy",
        "LAZYRAG_MAX_MODEL_LEN": "1024",
        "LAZYRAG_CHUNK_SIZE": "128",
    }


def lazyrag(*arguments: object) -> Any:
    """Run a command to its end; its answer."""
    command = [str(COMMAND), *map(str, arguments), "--json"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    for name in PACKAGES:
        text = str(metadata(name).json["description"])
        (folder / f"{name}.md").write_text(text[:2000], encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def store(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose ingest was killed while it computed KV, and then run again."""
    if not (MODEL / "config.json").is_file():
        pytest.skip(
            "no real model: set LAZYRAG_TEST_MODEL, or make one with `make .models/smollm2-135m-fp32/config.json`"
        )
    folder = tmp_path_factory.mktemp("stores") / "kb"
    ingest = ["ingest", str(documents), "--store", str(folder), "--model", str(MODEL)]
    killed = subprocess.Popen(
        [COMMAND, *ingest],
        env=environment(),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not num_kept(folder) and killed.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert killed.poll() is None, "it was meant to be killed in the middle"
        killed.kill()  # the main process alone
        killed.wait()
        # Its engine must not stay behind.
        while members(killed.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not members(killed.pid)
    finally:
        for pid in members(killed.pid):
            os.kill(pid, signal.SIGKILL)
    with Store.open(folder) as opened:
        num_chunks = opened.stats()["chunks"]
    assert 0 < num_kept(folder) < num_chunks

    summary = lazyrag(*ingest)
    assert (summary["unchanged"], summary["failed"], summary["warmed"]) == (len(PACKAGES), [], num_chunks)
    return folder


def members(session: int) -> list[int]:
    """The processes of a session that have not ended, whatever their process groups."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, _, _, its_session = entry.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found.append(int(entry.parent.name))
    return found


def num_kept(store: Path) -> int:
    return sum(1 for _ in (store / "kv").rglob("*.safetensors"))


def test_the_second_process_loads_every_chunk_that_it_retrieves(store: Path) -> None:
    answer = lazyrag("query", "How is the package installed?", "--store", store, "--k", 4, "--max-tokens", 8)
    assert len(answer["sources"]) == 4
    assert {source["kv"] for source in answer["sources"]} == {"disk"}
    assert answer["reused_tokens"] == sum(source["num_tokens"] for source in answer["sources"])
    assert answer["computed_tokens"] == answer["prompt_tokens"] - answer["reused_tokens"]
    assert answer["answer"]


def test_explain_shows_where_each_chunk_of_a_prompt_comes_from(store: Path, tmp_path: Path) -> None:
    with Store.open(store) as opened:
        chunks = list(opened.texts())[:2]
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Read this.\n\n" + "\n\n".join(text for _, text in chunks) + "\n\nWhat is it about?")
    rows = lazyrag("explain", prompt, "--store", store, "--run")
    assert [(row["chunk_id"], row["kv"]) for row in rows if row["kind"] == "chunk"] == [
        (id, "disk") for id, _ in chunks
    ]
    assert rows[-1]["end"] == len(prompt.read_text())


def test_every_chunk_is_kept_once(store: Path) -> None:
    stats = lazyrag("stats", "--store", store)
    assert stats["kv"]["chunks"] == stats["store"]["chunks"] == stats["store"]["reusable"]
    assert stats["store"]["documents"] == len(PACKAGES)


def test_doctor_finds_the_machine_and_the_store_fit(store: Path) -> None:
    rows = lazyrag("doctor", "--store", store, "--model", MODEL)
    assert {row["status"] for row in rows} <= {"ok", "warn"}


def test_an_ingest_of_what_is_on_disk_starts_no_engine_and_one_of_what_is_lost_computes_it(
    store: Path, documents: Path
) -> None:
    ingest = ["ingest", documents, "--store", store, "--model", MODEL]
    files = list((store / "kv").rglob("*.safetensors"))
    # An engine that started would sweep this away.
    left_over = files[0].parent / f".{'0' * 8}-1-{'0' * 16}.tmp"
    left_over.touch()
    os.utime(left_over, (0, 0))
    assert lazyrag(*ingest)["warmed"] == 0
    assert left_over.exists()
    for file in files[: len(files) // 2 + 1]:
        file.unlink()
    assert lazyrag(*ingest)["warmed"] == len(files)
    assert not left_over.exists()
    assert num_kept(store) == len(files)
    assert lazyrag(*ingest)["warmed"] == 0
