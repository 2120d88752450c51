from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_V2_MODEL_RUNNER="1", HF_HUB_OFFLINE="1")
for folder in ("kernels", "engine"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of the shape that the Hopper kernel serves: heads of 128, four queries to a key."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=16384,
        rope_theta=10000.0,
        initializer_range=0.06,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("models") / "llama"
    LlamaForCausalLM(config).half().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def oracle(model: Path):
    """In fp32, with the same weights."""
    import torch
    from oracle import Oracle

    torch.backends.cuda.matmul.allow_tf32 = False
    return Oracle(model, "cuda")
