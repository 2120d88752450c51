"""Ingest of many chunks: memory stays flat, and embedding and the engine work at the same time (`make soak` only).

Embedder and engine are stand-ins that cost time and no memory, `COST_S` a chunk each. The files are read, split,
stored and indexed as always, in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NUM_CHUNKS = 10_000
COST_S = 0.02

SCRIPT = """
import json, sys, time
from pathlib import Path
import numpy as np
from lazyrag.ingest import Progress, plan, run
from lazyrag.retrievers.embed import HashEmbedder
from lazyrag.retrievers.store import Store
from lazyrag.splitter import Splitter
from lazyrag.tokens import Tokenizer
from lazyrag.types import COMPUTED, Reuse

store, docs, model, cost_s = sys.argv[1:4] + [float(sys.argv[4])]

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

class Embedder(HashEmbedder):
    took_s = 0.0

    def embed_documents(self, texts):
        begun = time.monotonic()
        made = super().embed_documents(texts)
        time.sleep(cost_s * len(texts))
        Embedder.took_s += time.monotonic() - begun
        return made

def warm(chunks):
    for id, tokens in chunks:
        time.sleep(cost_s)
        yield id, Reuse(len(tokens), 0, (COMPUTED,))

with Store.open(store, create=True) as opened:
    made = plan(opened, [docs], splitter=Splitter(Tokenizer.from_folder(model), 64), embedder=Embedder())
    begun, cpu, early, most, indexed = time.monotonic(), time.process_time(), 0, 0, 0
    for event in run(made, warm=warm, fingerprint="f"):
        if isinstance(event, Progress):
            if event.stage == "store" and 10 * event.done == event.total:
                early = resident()
            if event.stage == "index":
                indexed = resident()  # it holds all vectors
            elif not indexed:
                most = max(most, resident())
        else:
            chunks = event.warmed
    took_s, cpu_s, begun = time.monotonic() - begun, time.process_time() - cpu, time.monotonic()
    for _ in warm(opened.reusable()):
        pass
    warm_s = time.monotonic() - begun
    print(json.dumps({
        "chunks": chunks, "took_s": took_s, "cpu_s": cpu_s, "embedding_alone_s": Embedder.took_s,
        "engine_alone_s": warm_s, "share": max(Embedder.took_s, warm_s) / took_s,
        "resident_after_a_tenth": early, "most_resident": most, "with_the_index": indexed,
    }))
"""


@pytest.mark.timeout(3600)
def test_memory_stays_flat_and_nobody_waits_for_the_other(tmp_path: Path, model: Path) -> None:
    if "SOAK_REQUESTS" not in os.environ:
        pytest.skip("takes a minute, and measures: make soak")
    docs = tmp_path / "docs"
    docs.mkdir()
    for n in range(NUM_CHUNKS // 10):
        parts = (
            f"Part {n}.{part}: " + " ".join(f"word{n % 97}x{part}x{i % 13}" for i in range(5)) for part in range(10)
        )
        (docs / f"{n:05}.txt").write_text("\n\n".join(parts))
    arguments = [sys.executable, "-c", SCRIPT, tmp_path / "kb", docs, model, str(COST_S)]
    said = json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)
    print(said)
    assert said["chunks"] >= NUM_CHUNKS
    assert said["most_resident"] - said["resident_after_a_tenth"] < 8 << 20, "memory grows"
