"""What a model's answers depend on."""

from __future__ import annotations

from pathlib import Path

from lazyrag.backend.fingerprint import model_fingerprint
from lazyrag.config import Config


def model_key(config: Config, folder: Path) -> str:
    """Names what a model's answers depend on besides the mode. Reads all of the weights; needs no engine."""
    return model_fingerprint(folder, dtype=f"set to {config.dtype}", engine_args=config.engine_args)
