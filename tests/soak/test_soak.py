"""Many clients, documents that come, change and go under way, a pool and tiers that are too small for all of it.

Each answer is compared with Hugging Face's, in fp32, for the chunks that the answer says the prompt held; and those are
compared with the documents that the server had acknowledged. SOAK_REQUESTS is their number (`make soak`: 2000).
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from oracle import Oracle, Prompt, Use
from prometheus_client.parser import text_string_to_metric_families
from texts import WORDS, text_of

from lazyrag.backend.fake import FakeEngine
from lazyrag.care import UNUSED, find_waste, verify
from lazyrag.client import LazyRAG
from lazyrag.retrievers.store import Store
from lazyrag.types import COMPUTED, DISK, HBM, HOST, chunk_id

pytestmark = [
    pytest.mark.engine,
    pytest.mark.alone,
    pytest.mark.filterwarnings("ignore:`torch"),
    pytest.mark.timeout(3600),
]

NUM_REQUESTS = int(os.environ.get("SOAK_REQUESTS", "64"))
NUM_CLIENTS = 16
NUM_STABLE = 24
"""Documents of each tenant that stay."""
NUM_TOKENS = 6
MAX_DEVIATION = 2e-4
PATIENCE_S = 300
BLOCK_SIZE = 16
TENANTS = ("a", "b")

# ---------------------------------------------------------------- the server


SETTINGS = """\
model = "{model}"
embedder = "hash"
mode = "lazy"
dtype = "float32"
block_size = {block_size}
max_model_len = 1024
max_tokens = 6
kv_cache_bytes = "64MiB"
kv_host_bytes = "1MiB"
kv_disk_bytes = "2MiB"

[engine_args]
num_gpu_blocks_override = 96
max_num_seqs = 8
max_num_batched_tokens = 128
"""
KEYS = '[keys]\n"sk-a" = "a"\n"sk-b" = "b"\n"sk-operator" = "operator"\n'


@dataclass
class Server:
    """A running server; `kill` ends it and its engine at once."""

    process: subprocess.Popen[str]
    url: str

    def client(self, key: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer sk-{key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S)

    @property
    def processes(self) -> list[int]:
        return [self.process.pid, *descendants(self.process.pid)]

    def kill(self) -> None:
        below = descendants(self.process.pid)
        self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + PATIENCE_S
        while any(is_alive(pid) for pid in below):
            assert time.monotonic() < deadline, "the engine outlives its server"
            time.sleep(0.1)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def descendants(pid: int) -> list[int]:
    with suppress(psutil.NoSuchProcess):
        return [below.pid for below in psutil.Process(pid).children(recursive=True)]
    return []


@contextmanager
def serving(folder: Path, model: Path) -> Iterator[Server]:
    (folder / "lazyrag.toml").write_text(SETTINGS.format(model=model, block_size=BLOCK_SIZE))
    (folder / "keys.toml").write_text(f'operators = ["operator"]\n{KEYS}')
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LAZYRAG_", "VLLM_"))}
    script = str(Path(__file__).with_name("server.py"))
    with (folder / "errors").open("a") as errors:
        process = subprocess.Popen(
            [sys.executable, script, "serve", "--store", "kb", "--port", "0", "--api-keys", "keys.toml", "--json"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=folder,
            env=environment | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        )
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(3)]
            assert lines[-1], (folder / "errors").read_text()
            yield Server(process, json.loads("".join(lines))["url"])
        finally:
            left = descendants(process.pid)
            process.kill()
            process.communicate()
            for pid in left:
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)


def metrics(server: Server) -> dict[tuple[str, str], float]:
    """Each sample by name and first label."""
    with server.client("operator") as http:
        text = http.get("/metrics").raise_for_status().text
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# ---------------------------------------------------------------- the clients


@dataclass
class Asked:
    """A prompt, the answer, and what may be said of the texts in it.

    Attributes:
        known: texts of documents that the server had acknowledged, and whose deletion nobody had asked for.
        unknown: texts that the tenant's documents did not hold at any time of the request.
    """

    tenant: str
    parts: list[str]
    known: set[str]
    unknown: set[str]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    cited: dict[str, str] = field(default_factory=dict)
    reuse: list[Any] = field(default_factory=list)


class Client(threading.Thread):
    """One of the clients: it asks, and adds, changes and deletes documents of its own."""

    def __init__(self, number: int, server: Server, num_requests: int, others: list[Client]) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self.tenant = TENANTS[number % len(TENANTS)]
        self.number, self.num_requests, self.others = number, num_requests, others
        self.draw = random.Random(number)
        self.http = server.client(self.tenant)
        self.own: dict[str, str] = {}
        self.gone: list[str] = []
        self.counter = 0
        self.asked: list[Asked] = []
        self.done = Counter[str]()
        self.error: BaseException | None = None
        self.may_die = False

    def run(self) -> None:
        try:
            for _ in range(self.num_requests):
                self.step()
        except httpx.HTTPError as error:
            if not self.may_die:
                self.error = error
        except BaseException as error:
            self.error = error
        finally:
            self.http.close()

    def step(self) -> None:
        kinds = {"ask": 70, "leave": 5, "add": 10, "change": 5, "delete": 5, "pin": 2, "search": 3}
        kind = self.draw.choices(list(kinds), list(kinds.values()))[0]
        if not self.own and kind in ("change", "delete", "pin"):
            kind = "add"
        getattr(self, kind)()
        self.done[kind] += 1

    def call(self, method: str, path: str, **body: Any) -> Any:
        response = self.http.request(method, path, json=body or None)
        assert response.status_code == 200, response.text
        return response.json()

    def new_text(self) -> str:
        self.counter += 1
        return text_of(f"{self.number}.{self.counter}")

    def put(self, id: str) -> None:
        text = self.new_text()
        old = self.own.pop(id, None)
        document = {"id": id, "text": text}
        got = self.call("POST", "/v1/documents", documents=[document], warm=self.draw.random() < 0.5)
        assert (got["failed"], got["added"] + got["changed"]) == ([], 1)
        self.own[id] = text
        if old is not None:
            self.gone.append(old)

    def add(self) -> None:
        self.put(f"{self.number}/{self.counter}")

    def change(self) -> None:
        self.put(self.draw.choice(list(self.own)))

    def delete(self) -> None:
        id = self.draw.choice(list(self.own))
        self.gone.append(self.own.pop(id))
        self.call("DELETE", f"/v1/documents/{id}")

    def pin(self) -> None:
        self.call("POST", "/v1/pins", ids=[self.draw.choice(list(self.own))], pinned=self.draw.random() < 0.5)

    def search(self) -> None:
        assert self.call("POST", "/v1/search", query=self.draw.choice(WORDS), k=3)["data"]

    def prompt(self) -> Asked:
        """Up to five texts: the tenant's, its own, another client's, deleted ones, another tenant's."""
        draw, other = self.draw, next(tenant for tenant in TENANTS if tenant != self.tenant)
        stable = [text_of(f"{self.tenant} {n}") for n in range(NUM_STABLE)]
        foreign = [text_of(f"{other} {n}") for n in range(NUM_STABLE)]
        neighbour = draw.choice([client for client in self.others if client.tenant == self.tenant])
        sources = [stable, stable, list(self.own.values()), list(neighbour.own.values()), self.gone, foreign]
        pool = [source for source in sources if source]
        texts = list(dict.fromkeys(draw.choice(draw.choice(pool)) for _ in range(draw.randint(0, 5))))
        parts = [f"Request {draw.random()}\n\n"]
        for text in texts:
            parts += [text, draw.choice(["\n\n", "\nand then\n", " "])]
        parts.append(f"Question: {' '.join(draw.choices(WORDS, k=8))}?\nAnswer:")
        known = {text for text in texts if text in stable or text in self.own.values()}
        return Asked(self.tenant, parts, known, {text for text in texts if text in self.gone or text in foreign})

    def body(self, asked: Asked, **sampling: Any) -> dict[str, Any]:
        prompt = {"text": "".join(asked.parts)}
        return {"prompts": [prompt], "sampling": {"max_tokens": NUM_TOKENS, "ignore_eos": True, **sampling}}

    def ask(self) -> None:
        asked = self.prompt()
        with self.http.stream("POST", "/v1/generate", json=self.body(asked, logprobs=2)) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                delta = json.loads(line)["delta"]
                asked.token_ids += delta["token_ids"]
                asked.logprobs += [{int(token): value for token, value in known} for known in delta["logprobs"]]
        asked.cited = {citation["chunk_id"]: citation["kv"] for citation in delta.get("citations", ())}
        asked.reuse = delta["reuse"]
        assert delta["finish_reason"] == "length"
        self.asked.append(asked)

    def leave(self) -> None:
        """Go after the first token."""
        body = self.body(self.prompt(), max_tokens=200)
        with self.http.stream("POST", "/v1/generate", json=body) as response:
            assert response.status_code == 200
            next(response.iter_lines())


# ---------------------------------------------------------------- what must be


class Judge:
    """Says what the answers must have been."""

    def __init__(self, model: Path) -> None:
        self.oracle = Oracle(model)
        self._engine = FakeEngine(model, block_size=BLOCK_SIZE)
        self._model = model

    def check(self, asked: Asked) -> str:
        """Compare an answer; which kind it was."""
        texts = [part for part in asked.parts if chunk_id(part) in asked.cited]
        cited = {chunk_id(text) for text in texts}
        assert cited == asked.cited.keys()
        assert {chunk_id(text) for text in asked.known} <= cited, "a document that is there was not found"
        assert not {chunk_id(text) for text in asked.unknown} & cited, "a text that is nobody's document was found"
        rag = LazyRAG(model=str(self._model), engine=self._engine, mode="lazy", block_size=BLOCK_SIZE)
        rag.register(texts)
        plan = rag.plan("".join(asked.parts))
        parts = [Use(list(p.token_ids)) if p.reuse else list(p.token_ids) for p in plan.pieces]
        assert asked.reuse[0] == len(plan.token_ids)
        assert len(asked.reuse[2]) == len(plan.segments)
        expected = self.oracle.logprobs(Prompt(parts), asked.token_ids)
        assert len(asked.token_ids) == len(asked.logprobs) == NUM_TOKENS
        for step, (token, known) in enumerate(zip(asked.token_ids, asked.logprobs, strict=True)):
            assert expected[step, token] >= expected[step].max() - MAX_DEVIATION, "not the likeliest token"
            for other, value in known.items():
                assert abs(expected[step, other].item() - value) <= MAX_DEVIATION
        return "lazy" if plan.segments else "literal"

    def close(self) -> None:
        self._engine.close()


@dataclass
class Held:
    """What a server's processes hold."""

    num_files: int
    num_bytes: int

    @classmethod
    def by(cls, server: Server) -> Held:
        files, pages = 0, 0
        for pid in server.processes:
            files += len(list(Path(f"/proc/{pid}/fd").iterdir()))
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return cls(files, pages * resource.getpagesize())


def run_all(clients: list[Client]) -> None:
    for client in clients:
        client.start()
    deadline = time.monotonic() + PATIENCE_S + 2 * NUM_REQUESTS
    for client in clients:
        client.join(max(0.0, deadline - time.monotonic()))
        assert not client.is_alive(), f"{client.name} hangs"
        if client.error is not None:
            raise client.error


def make_clients(server: Server, num_requests: int, first: int = 0) -> list[Client]:
    clients: list[Client] = []
    share = -(-num_requests // NUM_CLIENTS)
    clients += [Client(first + number, server, share, clients) for number in range(NUM_CLIENTS)]
    return clients


def test_no_answer_is_wrong_and_nothing_leaks_or_hangs(tmp_path: Path, model: Path) -> None:
    torch.set_num_threads(1)
    kb = tmp_path / "kb"
    with serving(tmp_path, model) as server:
        for tenant in TENANTS:
            documents = [{"id": f"stable/{n}", "text": text_of(f"{tenant} {n}")} for n in range(NUM_STABLE)]
            with server.client(tenant) as http:
                added = http.post("/v1/documents", json={"documents": documents, "warm": False}).json()
                assert added["added"] == added["chunks_added"] == NUM_STABLE
        first = make_clients(server, NUM_REQUESTS // 2)
        run_all(first)
        before = Held.by(server)
        second = make_clients(server, NUM_REQUESTS // 2, first=NUM_CLIENTS)
        run_all(second)
        held = metrics(server)
        after = Held.by(server)
        assert held["lazyrag_places_taken", ""] == 0
        assert held["lazyrag_engine_restarts", ""] == 0
        assert after.num_files <= before.num_files + NUM_CLIENTS // 2, "files are left open"
        if NUM_REQUESTS >= 1000:
            assert after.num_bytes <= 1.1 * before.num_bytes, "memory grows"

        clients = [*first, *second]
        files = list(kb.glob("kv/**/*.safetensors"))
        assert sum(file.stat().st_size for file in files) <= 2 << 20, "more KV on disk than may be"
        for tenant in TENANTS:
            with server.client(tenant) as http:
                listed = {row["id"] for row in http.get("/v1/documents").json()["data"]}
            own = {id for client in clients if client.tenant == tenant for id in client.own}
            assert listed == own | {f"stable/{n}" for n in range(NUM_STABLE)}

        # Killed in the middle of it all: nothing that was acknowledged is lost.
        third = make_clients(server, 10 * NUM_REQUESTS, first=2 * NUM_CLIENTS)
        for client in third:
            client.may_die = True
            client.start()
        while sum(len(client.asked) for client in third) < NUM_CLIENTS:
            assert all(client.error is None for client in third)
            time.sleep(0.01)
        server.kill()
        for client in third:
            client.join(PATIENCE_S)
            assert not client.is_alive()
            assert client.error is None
    with Store.open(kb) as store:
        assert [flaw for flaw in verify(store) if not flaw.harmless] == []
    with serving(tmp_path, model) as server:
        fourth = make_clients(server, 3 * NUM_CLIENTS, first=3 * NUM_CLIENTS)
        for client, before_kill in zip(fourth, third, strict=True):
            assert client.tenant == before_kill.tenant
            # What a client had begun to delete or to change when the server died may be there or not.
            client.own = dict(before_kill.own)
            with server.client(client.tenant) as http:
                assert {row["id"] for row in http.get("/v1/documents").json()["data"]} >= client.own.keys()
        run_all(fourth)
        for tenant in TENANTS:
            with server.client(tenant) as http:
                for row in http.get("/v1/documents").json()["data"]:
                    assert http.delete(f"/v1/documents/{row['id']}").status_code == 200
    assert list(kb.glob("kv/**/*.safetensors")) == [], "KV of deleted documents is left"
    with Store.open(kb) as store:
        assert list(verify(store)) == []
        assert [waste for waste in find_waste(store) if waste.kind == UNUSED] == []

    judge = Judge(model)
    kinds = Counter(judge.check(asked) for client in (*clients, *third, *fourth) for asked in client.asked)
    judge.close()
    assert kinds["lazy"] > kinds["literal"] > 0
    sources = Counter(source for client in clients for asked in client.asked for source in asked.reuse[2])
    expected = (HBM, HOST, DISK, COMPUTED) if NUM_REQUESTS >= 500 else (HBM, COMPUTED)
    assert all(sources[source] for source in expected), "pool and tiers were meant to be too small"
    assert sources[HOST] + sources[DISK], "some were meant to come back"
    done = sum((client.done for client in clients), Counter[str]())
    print(json.dumps({"done": done, "answers": kinds, "sources": sources, "held": [vars(before), vars(after)]}))
