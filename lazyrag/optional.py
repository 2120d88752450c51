"""Optional packages: the module, or the sentence that says which extra brings it."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from lazyrag.errors import MissingExtraError


def need(module: str, *, extra: str) -> ModuleType:
    """Import a package that LazyRAG does not depend on.

    Args:
        module: its import name, possibly dotted.
        extra: the extra of LazyRAG that installs it.

    Raises:
        MissingExtraError: it is not installed. A package that is there but fails to import keeps its own error.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise MissingExtraError(f"{package} is not installed.", fix=f"pip install 'lazyrag[{extra}]'") from error
