"""Ingest of many chunks: memory stays flat, and embedding and the engine work at the same time (`make soak` only)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(3600)
def test_memory_stays_flat_and_nobody_waits_for_the_other(model: Path) -> None:
    if "SOAK_REQUESTS" not in os.environ:
        pytest.skip("takes minutes, and measures: make soak")
    main = "from lazyrag.cli import main; main()"
    command = [sys.executable, "-c", main, "bench", "ingest", "--metrics", "stand-ins", "--model", model, "--json"]
    said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(said)
    (row,) = said["rows"]
    assert row["chunks"] > 9_500
    assert row["most_bytes"] - row["early_bytes"] < 8 << 20, "memory grows"
