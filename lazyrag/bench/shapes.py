"""The model that is measured: a folder of the user's, or a shape without trained weights.

Speed depends on a model's shape, not on what its weights say, so `llama-8b` is only Llama-3.1-8B's config.json, and
vLLM makes weights up. `tiny` has random weights on disk: it is the gate's model (gate.py), and small enough for a CPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazyrag.errors import ConfigError

SHAPES = ("llama-8b", "tiny")

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
}
LLAMA_8B_KV_BYTES = 2 * 32 * 8 * 128 * 2
"""A token: K and V of 32 layers, 8 heads of 128 numbers of 16 bits."""
TINY = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
"""So random that any error shows in the answers."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model on disk.

    Attributes:
        folder: with its config.json.
        dummy: it has no weights; the engine makes some up.
        vocabulary: [low, high) of the token ids that prompts are made of: no special tokens.
        max_len: of prompt and answer.
    """

    folder: Path
    dummy: bool
    vocabulary: tuple[int, int]
    max_len: int


def make_model(shape: str, folder: Path) -> Model:
    """Write a model of a shape into `folder`.

    Raises:
        ConfigError: there is no such shape.
    """
    if shape == "llama-8b":
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    elif shape == "tiny":
        _save_tiny(folder)
    else:
        raise ConfigError(f"There is no shape {shape!r}.", fix=f"Known: {', '.join(SHAPES)}; or name a --model folder.")
    return read_model(folder, dummy=shape != "tiny")


def read_model(folder: Path, *, dummy: bool) -> Model:
    """What must be known of the model in `folder`.

    Raises:
        ConfigError: there is none.
    """
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{folder} holds no model:", why=str(error), fix="Name a folder with a config.json."
        ) from None
    vocabulary = config["vocab_size"]
    return Model(
        folder,
        dummy,
        (min(1000, vocabulary // 8), vocabulary * 3 // 4),
        config["max_position_embeddings"],
    )


def kv_bytes_per_token(folder: Path, item_bytes: int) -> int:
    """Of a model whose config.json is one that `make_model` writes."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads: int = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return 2 * heads * item_bytes


def _save_tiny(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # of this process, from here on
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY)).float().save_pretrained(folder)
