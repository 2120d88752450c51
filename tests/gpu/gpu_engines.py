"""Engines on a GPU with their oracle, and what they are asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from engines import PLUGIN, Config, Engine, Text
from oracle import Prompt, Use

MAX_RMS = 0.01
"""Of the difference of log-probabilities over an answer."""
LENGTHS = {"A": 37, "B": 64, "C": 5, "D": 50, "E": 90, "F": 16, "G": 1, "H": 512, "I": 700, "J": 1100, "K": 130}


@dataclass(frozen=True)
class GPUConfig(Config):
    """How an engine is started on a GPU."""

    budget: int = 4096
    num_blocks: int = 1500
    worker: str = f"{PLUGIN}.worker_cuda.LazyCUDAWorker"
    eager: bool = False
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)

    def __str__(self) -> str:
        return self.name


class GPUEngine(Engine):
    max_rms = MAX_RMS

    def device_arguments(self) -> dict[str, Any]:
        compilation = {} if self.config.eager else {"cudagraph_capture_sizes": list(self.config.sizes)}
        return {
            "dtype": "float16",
            "enforce_eager": self.config.eager,
            "max_model_len": 4096,
            "gpu_memory_utilization": 0.1,
            "attention_backend": "FLASH_ATTN",
            "compilation_config": compilation,
        }

    def deviation(self, prompt: Prompt, result: Any) -> tuple[float, float]:
        """Root mean square and maximum over the returned log-probabilities."""
        expected = self.oracle.logprobs(prompt, result.token_ids)
        errors = [
            logprob - expected[step, token].item()
            for step, logprobs in enumerate(result.logprobs)
            for token, logprob in logprobs.items()
        ]
        assert all(map(math.isfinite, errors))
        return math.sqrt(sum(e * e for e in errors) / len(errors)), max(map(abs, errors))

    def assert_agrees(self, prompt: Prompt, result: Any) -> None:
        assert result.error is None
        assert result.token_ids
        rms, most = self.deviation(prompt, result)
        print(f"deviation rms {rms:.5f} max {most:.5f}")
        assert rms <= self.max_rms
        assert most <= 10 * self.max_rms


class Corpus:
    def __init__(self, seed: int, prefix_len: int = 0, sink_len: int = 0) -> None:
        self.text = Text(seed)
        self.chunks = {name: Use(self.text(n)) for name, n in LENGTHS.items()}
        self.prefix, self.sink = self.text(prefix_len), self.text(sink_len)

    def __call__(self, *parts: Any) -> Prompt:
        """Chunks by name, literals by their number of tokens."""
        tokens = {str: self.chunks.__getitem__, int: self.text, list: lambda part: part}
        return self.prompt([tokens[type(part)](part) for part in parts])

    def prompt(self, parts: Sequence[Any]) -> Prompt:
        return Prompt(parts, self.prefix, sink=self.sink)


def make_model(folder: Path, dtype: torch.dtype = torch.float16, **changes: int) -> Path:
    """A random Llama whose weights are numbers of a dtype; `changes` to its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 512,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 16384,
    }
    config = LlamaConfig(**{**sizes, **changes}, rope_theta=10000.0, initializer_range=0.06, tie_word_embeddings=False)
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder
