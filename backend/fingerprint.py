"""Whose KV is this? One string for everything that a chunk's keys and values depend on besides its tokens.

KV computed under one fingerprint means nothing under another. It covers
  - every byte of the weight files (SHA-256, one thread a file: 16 GB take about ten seconds on two cores, and the model
    loader that follows finds the files in the page cache). Samples would be quicker, and miss a tuning of a few rows;
  - `config.json`, so the architecture, RoPE with its scaling, and quantisation, but not the keys that only say where
    the checkpoint came from;
  - the tokenizer's vocabulary and merges (not its chat template, which reaches the KV through the token ids only);
  - the dtypes of model and KV cache;
  - every engine setting that is not known to leave K and V alone (`NEUTRAL`): an override of the model's configuration,
    another way to load or quantise the weights, whatever a later vLLM adds. Too much costs a computation, too little a
    wrong answer;
  - `KV_FORMAT`: how this package stores KV.
It does not cover block size or device: KV is stored by token.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lazyrag.errors import ConfigError

KV_FORMAT = 1
"""Version of the meaning of stored KV; raise it when K or V of the same model would be stored differently."""

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
"""Only the files of the first suffix that occurs are weights; a loader takes one kind."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
PROVENANCE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})
NEUTRAL = frozenset(
    {
        "additional_config",
        "async_scheduling",
        "block_size",
        "compilation_config",
        "cudagraph_capture_sizes",
        "disable_log_stats",
        "distributed_executor_backend",
        "download_dir",
        "enable_chunked_prefill",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "max_cudagraph_capture_size",
        "max_logprobs",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_partial_prefills",
        "max_num_seqs",
        "num_gpu_blocks_override",
        "optimization_level",
        "scheduler_cls",
        "served_model_name",
        "structured_outputs_config",
        "tensor_parallel_size",
        "use_tqdm_on_load",
    }
)
"""Settings of vLLM that say how much runs, when and where; none of them changes a token's key or value."""

READ_BYTES = 1 << 20


def model_fingerprint(
    model_path: str | os.PathLike[str],
    *,
    dtype: str,
    kv_cache_dtype: str = "auto",
    engine_args: Mapping[str, object] | None = None,
) -> str:
    """The fingerprint of a model as an engine runs it, 64 hex digits. The same in every process and on every machine.

    Args:
        model_path: folder of a Hugging Face checkpoint.
        dtype: what the model runs in, resolved ("bfloat16", not "auto").
        kv_cache_dtype: as vLLM's; "auto" is `dtype`.
        engine_args: the user's further settings of the engine, by vLLM's names.

    Raises:
        ConfigError: the folder, its weights or its configuration are missing or cannot be read, or `dtype` is "auto".
    """
    if dtype == "auto":
        raise ConfigError(
            'A fingerprint needs the dtype that the model runs in, not "auto".',
            fix='Pass for example dtype="bfloat16".',
        )
    folder = Path(model_path)
    try:
        parts = {
            "kv_format": KV_FORMAT,
            "dtype": dtype,
            "kv_cache_dtype": dtype if kv_cache_dtype == "auto" else kv_cache_dtype,
            "engine": {name: value for name, value in (engine_args or {}).items() if name not in NEUTRAL},
            "config": _config(folder / "config.json"),
            "tokenizer": _digests(path for name in TOKENIZER_FILES if (path := folder / name).is_file()),
            "weights": _digests(_weight_files(folder)),
        }
    except OSError as error:
        raise ConfigError(
            f"The model in {folder} cannot be read: {error.strerror or error}.",
            fix="Name the folder of a complete Hugging Face checkpoint.",
        ) from error
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


def _config(path: Path) -> dict[str, object]:
    try:
        config = json.loads(path.read_bytes())
        return {key: value for key, value in config.items() if key not in PROVENANCE}
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is not a model configuration.", why=str(error), fix="Download it again.") from error


def _weight_files(folder: Path) -> list[Path]:
    for suffix in WEIGHT_SUFFIXES:
        if found := sorted(path for path in folder.iterdir() if path.suffix == suffix):
            return found
    raise ConfigError(
        f"There are no weights in {folder}.",
        why=f"No file there ends in {', '.join(WEIGHT_SUFFIXES)}.",
        fix="Name the folder of a complete Hugging Face checkpoint.",
    )


def _digests(paths: Iterable[Path]) -> dict[str, str]:
    """SHA-256 by file name. Files are hashed side by side: hashing and reading leave the interpreter free."""
    files = list(paths)
    with ThreadPoolExecutor(max_workers=8) as pool:
        return dict(zip((path.name for path in files), pool.map(_digest, files), strict=True))


def _digest(path: Path) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
