from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")  # test_engine.py runs with 0, too
for folder in ("kernels", "engine", "gpu"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of the shape that the Hopper kernel serves: heads of 128, four queries to a key."""
    from gpu_engines import make_model

    return make_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def oracle(model: Path):
    """In fp32, with the same weights."""
    import torch
    from oracle import Oracle

    torch.backends.cuda.matmul.allow_tf32 = False
    return Oracle(model, "cuda")
