"""Whether an ingest is as fast as the slower of embedding and prefill alone, in flat memory: `lazyrag bench ingest`.

Documents are read, split, embedded, stored and computed as always. Of embedder and engine one is real (or none), and a
stand-in for the other takes as long for a chunk, asleep. That is the hardest case, for neither has time to spare, and
the fair one where both would share the cores, as they do on a machine without a GPU.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lazyrag import ingest
from lazyrag.backend import engine as engines
from lazyrag.backend.engine import Cancel, Deliver, Delta, Engine, Request
from lazyrag.bench import report
from lazyrag.bench.texts import Corpus
from lazyrag.client import LazyRAG, model_folder
from lazyrag.errors import InputError
from lazyrag.ingest import EMBED_BATCH, INDEX, STORE, Progress, Summary
from lazyrag.retrievers.embed import Embedder
from lazyrag.retrievers.store import Store
from lazyrag.splitter import Splitter
from lazyrag.types import COMPUTED, ChunkId, Reuse

STAND_INS, EMBEDDING, PREFILL = CASES = ("stand-ins", "embedding", "prefill")
"""What is real: nothing, the embedder, the engine."""
COST_S = 0.02
"""What each of two stand-ins takes for a chunk."""
FULL, QUICK = 10_000, 400
"""Chunks, about."""
CHARS = 400
"""Of each. Such words take many tokens."""


@dataclass(frozen=True, slots=True)
class Row:
    """A case. Seconds are of all chunks.

    Attributes:
        reading_s: reading, splitting and storing alone.
        slower_s: embedding, or prefill, alone; the other one is as slow.
        ingest_s: all of it together.
        share: `slower_s` over `ingest_s`.
        early_bytes, most_bytes: resident memory when a tenth was stored, and at most until the search index is made,
            which holds all vectors. 0 where the system does not tell.
    """

    case: str
    chunks: int
    reading_s: float
    slower_s: float
    ingest_s: float
    share: float
    early_bytes: int
    most_bytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """All figures, and whose they are."""

    machine: dict[str, Any]
    command: str
    rows: list[Row] = field(default_factory=list)


def bench(
    cases: Sequence[str], chunks: int, tell: Callable[[str], None], *, model: str, out: Path | None, command: str
) -> Result:
    """Measure case by case.

    Args:
        cases: of `CASES`.
        chunks: about so many in each.
        tell: takes a line about what is going on.
        model: whose tokenizer, and in case `PREFILL` whose engine.
        out: file for the JSON.
        command: noted in the result.

    Raises:
        InputError: an unknown case.
        ConfigError: no model is named.
        EngineError: the engine cannot start, or a chunk could not be computed.
    """
    if unknown := [case for case in cases if case not in CASES]:
        raise InputError(f"There is no case {unknown[0]!r}.", fix=f"Known: {', '.join(CASES)}.")
    model_folder(model)
    result = Result(report.machine(), command)
    for case in cases:
        with TemporaryDirectory(prefix="lazyrag-") as folder:
            result.rows.append(_measured(case, chunks, Path(folder), model, tell))
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    return result


def tables(result: Result) -> list[str]:
    """Everything as lines of Markdown."""
    head = ("real", "chunks", "reading s", "slower one s", "ingest s", "share", "MB at a tenth", "at most")
    body = [
        (
            row.case,
            str(row.chunks),
            *(f"{seconds:.1f}" for seconds in (row.reading_s, row.slower_s, row.ingest_s)),
            f"{row.share:.3f}",
            *(f"{num_bytes / 1e6:.1f}" for num_bytes in (row.early_bytes, row.most_bytes)),
        )
        for row in result.rows
    ]
    return [*report.facts_of(result.machine), "", *report.table(body, head)]


def _measured(case: str, chunks: int, folder: Path, model: str, tell: Callable[[str], None]) -> Row:
    rag = LazyRAG(model=model, mode="lazy", store=folder / "kb")
    splitter = Splitter(rag.tokenizer, rag.config.chunk_size)
    docs = folder / "docs"
    tell(f"{case}: reading {chunks} chunks alone")
    _write(docs, chunks)
    with Store.open(folder / "alone", create=True) as alone:
        reading_s = _timed(ingest.run(ingest.plan(alone, [docs], splitter=splitter)))
        count = alone.stats()["chunks"]
        tell(f"{case}: the slower one alone")
        if case == EMBEDDING:
            slower_s = _timed(_embeddings(rag.embedder, alone))
        elif case == PREFILL:
            rag.engine  # noqa: B018  (it starts before the clock does)
            slower_s = _timed(_warmed(rag.engine, "alone", alone.reusable()))
        else:
            slower_s = COST_S * count
    embedder = rag.embedder if case == EMBEDDING else _IdleEmbedder(slower_s / count)
    engine: Any = rag.engine if case == PREFILL else _IdleEngine(slower_s / count)
    tell(f"{case}: all together")
    with Store.open(folder / "kb", create=True) as store:
        memory = _Memory()
        plan = ingest.plan(store, [docs], splitter=splitter, embedder=embedder)
        events = ingest.run(plan, warm=partial(_warmed, engine, ""), fingerprint="bench")
        ingest_s = _timed(map(memory.look, events))
    share = slower_s / ingest_s
    return Row(case, count, reading_s, slower_s, ingest_s, share, memory.early_bytes, memory.most_bytes)


def _write(folder: Path, chunks: int) -> None:
    folder.mkdir()
    corpus = Corpus(chunks, chunk=CHARS)
    texts = corpus.chunks(seed=0)
    for number in range(-(-chunks // corpus.per_document)):
        (folder / f"{number:06}.txt").write_text("\n\n".join(islice(texts, corpus.per_document)), encoding="utf-8")


def _timed(work: Iterable[object]) -> float:
    """Seconds until it has come to its end."""
    begun = time.monotonic()
    for _ in work:
        pass
    return time.monotonic() - begun


class _Memory:
    """Resident memory in the course of an ingest; see `Row`."""

    def __init__(self) -> None:
        self.early_bytes = self.most_bytes = 0
        self._is_over = False

    def look(self, event: Progress | Summary) -> None:
        """Called with each event."""
        if isinstance(event, Summary):
            return
        self._is_over |= event.stage == INDEX
        if event.stage == STORE and event.done == -(-event.total // 10):
            self.early_bytes = _resident_bytes()
        if self.early_bytes and not self._is_over:
            self.most_bytes = max(self.most_bytes, _resident_bytes())


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


# ---------------------------------------------------------------- one of the two, alone or as a stand-in


def _embeddings(embedder: Embedder, store: Store) -> Iterator[NDArray[np.float32]]:
    texts = (text for _, text in store.texts())
    while batch := list(islice(texts, EMBED_BATCH)):
        yield embedder.embed_documents(batch)


def _warmed(
    engine: Engine, namespace: str, chunks: Iterable[tuple[ChunkId, Sequence[int]]]
) -> Iterator[tuple[ChunkId, Reuse | Exception]]:
    for id, result in engines.warm(engine, chunks, namespace=namespace):
        if isinstance(result, Exception):
            raise result
        yield id, result


class _IdleEmbedder:
    """Takes `cost_s` for each text."""

    name, dim = "idle", 384

    def __init__(self, cost_s: float) -> None:
        self._cost_s = cost_s

    def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        time.sleep(self._cost_s * len(texts))
        return np.eye(1, self.dim, dtype=np.float32).repeat(len(texts), axis=0)

    def embed_query(self, text: str) -> NDArray[np.float32]:
        vector: NDArray[np.float32] = self.embed_documents([text])[0]
        return vector


class _IdleEngine:
    """Takes `cost_s` for each request, one after the other, as an engine that computes nothing but prefill."""

    def __init__(self, cost_s: float) -> None:
        self._cost_s = cost_s
        self._requests: queue.SimpleQueue[tuple[Request, Deliver, float]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="lazyrag-idle-engine", daemon=True).start()

    def submit(self, request: Request, deliver: Deliver) -> Cancel:
        self._requests.put((request, deliver, time.monotonic()))
        return lambda: None

    def _run(self) -> None:
        end = 0.0
        while True:
            request, deliver, begun = self._requests.get()
            end = max(end, begun) + self._cost_s  # by the clock, however late it was woken
            time.sleep(max(0.0, end - time.monotonic()))
            deliver(Delta(finish_reason="length", reuse=Reuse(len(request.token_ids), 0, (COMPUTED,))))
