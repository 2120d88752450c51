"""RAG without the waiting: every chunk's KV is computed once and reused at any place of any prompt.

The public names are loaded when they are first used, so `import lazyrag` costs nothing: vLLM imports this package in
every one of its processes to find the plugin.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lazyrag._version import __version__

if TYPE_CHECKING:
    from lazyrag.backend.engine import Sampling
    from lazyrag.chat import Message
    from lazyrag.client import LazyRAG
    from lazyrag.config import Config
    from lazyrag.errors import LazyRAGError
    from lazyrag.types import Answer, Chunk, Document, Hit, PromptPlan, Reuse

__all__ = [
    "Answer",
    "Chunk",
    "Config",
    "Document",
    "Hit",
    "LazyRAG",
    "LazyRAGError",
    "Message",
    "PromptPlan",
    "Reuse",
    "Sampling",
    "__version__",
]

_HOME = {
    "Answer": "lazyrag.types",
    "Chunk": "lazyrag.types",
    "Config": "lazyrag.config",
    "Document": "lazyrag.types",
    "Hit": "lazyrag.types",
    "LazyRAG": "lazyrag.client",
    "LazyRAGError": "lazyrag.errors",
    "Message": "lazyrag.chat",
    "PromptPlan": "lazyrag.types",
    "Reuse": "lazyrag.types",
    "Sampling": "lazyrag.backend.engine",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
