"""One process, one engine at a time: tests with the same configuration share it, and pytest runs them together."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_USE_V2_MODEL_RUNNER="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch

REPO = Path(__file__).parents[2]


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and "engine" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.engine)
            # vLLM's own, while it starts.
            item.add_marker(pytest.mark.filterwarnings("ignore:`torch:DeprecationWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore:`torch:FutureWarning"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A random Llama: fp32, 3 layers, 4 query and 2 key heads of size 32. So random that any error shows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        initializer_range=0.15,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_oracle(tiny_model):
    from oracle import Oracle

    return Oracle(tiny_model)


@pytest.fixture(scope="session")
def engine(request, tiny_model, tiny_oracle):
    """The engine for `request.param`, an `engines.Config`."""
    from engines import Engine

    engine = Engine(request.param, tiny_model, tiny_oracle)
    yield engine
    engine.close()
