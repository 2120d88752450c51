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
COST_S = 0.005

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
    def embed_documents(self, texts):
        made = super().embed_documents(texts)
        time.sleep(max(0, cost_s * len(texts)))
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
            most = max(most, resident() if not indexed else 0)
            indexed = indexed or (resident() if event.stage == "index" else 0)
        else:
            chunks = event.warmed
    took_s = time.monotonic() - begun
    print(json.dumps({
        "chunks": chunks, "took_s": took_s, "cpu_s": time.process_time() - cpu, "alone_s": chunks * cost_s,
        "share": chunks * cost_s / took_s, "after_a_tenth": early, "most": most, "with_the_index": indexed,
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
    assert said["most"] - said["after_a_tenth"] < 8 << 20, "memory grows"
