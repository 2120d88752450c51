"""`lazyrag serve` as a process of its own, with the fake engine in vLLM's place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from lazyrag.retrievers.store import Store

SCRIPT = """
import sys
from lazyrag import client
from lazyrag.backend.fake import FakeEngine

class Closing(FakeEngine):
    def close(self):
        super().close()
        print("closed", file=sys.stderr)

if sys.argv[1] == "impatient":
    from lazyrag.backend.server import app
    app.GRACE_S = 1
    del sys.argv[1]

delay_s = 0.002
if sys.argv[1] == "slow":
    delay_s = 1.0
    del sys.argv[1]

client.start_engine = lambda config, model: Closing(model, mode=config.mode, delay_s=delay_s)
from lazyrag.cli import main
main()
"""
TEXT = "The keeper of the northern light wrote a letter to the harbour every winter, and nobody answered it. " * 3


@pytest.fixture
def folder(model_folder: Callable[..., Path]) -> Path:
    folder = model_folder("byte-level")
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    return folder


ENDLESS = {"prompt": "Go on", "max_tokens": 4000, "ignore_eos": True}


def start(folder: Path, *arguments: str, first: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LAZYRAG_")}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *first, "serve", "--model", str(folder), "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**environment, "LAZYRAG_EMBEDDER": "hash"},
    )


@contextmanager
def serving(folder: Path, *arguments: str, first: tuple[str, ...] = ()) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = start(folder, "--json", *arguments, first=first)
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        yield process, json.loads("".join(lines))["url"]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_ends_its_requests_and_closes_the_engine(folder: Path, number: signal.Signals) -> None:
    with serving(folder) as (process, url), httpx.Client(timeout=60) as client:
        body = {"prompts": [{"text": "Go on"}], "sampling": {"max_tokens": 300, "ignore_eos": True}}
        with client.stream("POST", f"{url}/v1/generate", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(number)
            last = json.loads([*lines][-1])
        assert last["delta"]["finish_reason"] == "length"
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert errors.splitlines()[-1] == "closed"


def test_when_its_patience_ends_it_cuts_requests_off_and_stops(folder: Path) -> None:
    with (
        serving(folder, first=("impatient",)) as (process, url),
        httpx.Client(timeout=60) as client,
        ThreadPoolExecutor() as pool,
    ):
        body = {"prompts": [{"text": "Go on"}], "sampling": {"max_tokens": 4000, "ignore_eos": True}}
        whole = pool.submit(client.post, f"{url}/v1/completions", json={**ENDLESS, "model": folder.name})
        with client.stream("POST", f"{url}/v1/generate", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            while "lazyrag_places_taken 2" not in client.get(f"{url}/metrics").text:
                assert not whole.done()
            process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        assert whole.result().status_code == 503
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
        assert errors.splitlines()[-1] == "closed"


def test_told_to_stop_while_documents_come_in_it_stops_and_keeps_what_is_stored(folder: Path) -> None:
    """Their KV would take the engine a minute."""
    store = folder / "store"
    text = "\n\n".join(f"{n}: {TEXT}" for n in range(800))
    with (
        serving(folder, "--store", str(store), "--mode", "lazy", first=("slow",)) as (process, url),
        httpx.Client(timeout=120) as client,
        ThreadPoolExecutor() as pool,
    ):
        small = client.post(f"{url}/v1/documents", json={"documents": [{"id": "small", "text": TEXT}]})
        assert small.json()["warmed"] >= 1
        asked = pool.submit(client.post, f"{url}/v1/documents", json={"documents": [{"id": "large", "text": text}]})
        while len(client.get(f"{url}/v1/documents").json()["data"]) < 2:
            assert not asked.done()
        process.send_signal(signal.SIGTERM)
        answer = asked.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
        assert errors.splitlines()[-1] == "closed"
    with Store.open(store) as opened:
        assert opened.check() == []
        assert {document.id for document in opened.documents()} == {"small", "large"}


def test_killed_while_documents_come_in_it_loses_none_that_it_acknowledged(folder: Path) -> None:
    store = folder / "store"
    acknowledged: list[str] = []
    with serving(folder, "--store", str(store)) as (process, url), httpx.Client(timeout=60) as client:

        def add(number: int) -> None:
            body = {"documents": [{"id": f"d{number}", "text": f"{number}: {TEXT}"}], "warm": False}
            if client.post(f"{url}/v1/documents", json=body).status_code == 200:
                acknowledged.append(f"d{number}")
            if len(acknowledged) == 12:
                process.kill()

        with ThreadPoolExecutor(4) as pool:
            done = [pool.submit(add, number) for number in range(40)]
        assert any(isinstance(one.exception(), httpx.HTTPError) for one in done)
    with Store.open(store) as opened:
        assert opened.check() == []
        assert {document.id for document in opened.documents()} >= {*acknowledged}
    with serving(folder, "--store", str(store)) as (_, url):
        assert len(httpx.get(f"{url}/v1/documents").json()["data"]) >= len(acknowledged) >= 12


def test_a_server_that_would_be_open_to_everybody_does_not_start(folder: Path) -> None:
    process = start(folder, "--host", "0.0.0.0")
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert "--api-keys" in errors
    assert "Starting the engine" not in errors
