"""What a tuned model's folder says of its training: the recipe, the documents it was trained on, what it brought.

The file is `tune.json`. Documents are named by the ids of their texts as chunks; no text is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lazyrag.errors import ConfigError
from lazyrag.types import ChunkId

FILE_NAME = "tune.json"


def write(
    folder: Path, values: Mapping[str, Any], *, trained_on: Iterable[ChunkId], held_out: Iterable[ChunkId]
) -> None:
    """Put a record into a model's folder."""
    record = {**values, "trained_on": sorted(set(trained_on)), "held_out": sorted(set(held_out))}
    (folder / FILE_NAME).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def trained_on(folder: Path) -> frozenset[ChunkId]:
    """The documents that a model was tuned on; empty for a model that `lazyrag tune` has not made.

    Raises:
        ConfigError: the record is damaged.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return frozenset()
    try:
        return frozenset(json.loads(path.read_text(encoding="utf-8"))["trained_on"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{path} cannot be read:",
            why="it is no record of a tuning.",
            fix="Remove it if you know which documents the model was trained on.",
        ) from None
