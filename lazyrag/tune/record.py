"""What a tuned model's folder says of its training: the recipe, the documents it was trained on, what it brought.

The file is `tune.json`. Documents are named by the ids of their texts as chunks; no text is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lazyrag.errors import ConfigError, InputError
from lazyrag.quality.data import Question
from lazyrag.types import ChunkId, chunk_id

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


def unseen(asked: Sequence[Question], folder: Path) -> list[Question]:
    """The questions none of whose passages a model was tuned on: all, for a model that `lazyrag tune` has not made.

    Raises:
        InputError: there are none.
    """
    seen = trained_on(folder)
    left = [question for question in asked if not any(chunk_id(p.text) in seen for p in question.passages)]
    if asked and not left:
        raise InputError(
            f"There is nothing to measure {folder.name} with:",
            why="it was tuned on passages of all of these questions.",
            fix="Use other questions.",
        )
    return left
