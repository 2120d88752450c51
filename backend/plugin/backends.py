"""Attention backends of our own under a name of vLLM's.

A worker's platform, settings and checks all go by the names of vLLM's own backends. So ours take the place of one while
a worker of ours builds its model, and give it back: other engines of the process keep theirs. Afterwards every layer
carries its backend itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import register_backend


@contextmanager
def chosen(slot: Any, backend: type[Any]) -> Iterator[None]:
    """Attention layers that are built inside get `backend` where vLLM chooses `slot`.

    Args:
        slot: a member of vLLM's `AttentionBackendEnum`.
        backend: a class of a module.
    """
    before = slot.get_path() if slot.is_overridden() else None
    register_backend(slot, f"{backend.__module__}.{backend.__qualname__}")
    # vLLM remembers its choice by the settings of the layer alone.
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        if before is None:
            slot.clear_override()
        else:
            register_backend(slot, before)
        selector._cached_get_attn_backend.cache_clear()
