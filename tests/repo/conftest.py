"""The source as data: every module of the package on disk, by its import name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("backend", "kernels", "retrievers", "integrations")


def _module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] in FOLDERS:
        parts.insert(0, "lazyrag")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def modules() -> dict[str, Path]:
    """Import name -> file, for every module that the wheel must hold."""
    paths = list((ROOT / "lazyrag").glob("*.py"))
    own = [path for path in (ROOT / "lazyrag").iterdir() if path.is_dir() and not path.is_symlink()]
    for folder in [*own, *(ROOT / folder for folder in FOLDERS)]:
        paths += folder.rglob("*.py")
    return {_module_name(path): path for path in sorted(paths)}


@pytest.fixture(scope="session")
def syntax(modules: dict[str, Path]) -> dict[str, ast.Module]:
    """Import name -> syntax tree."""
    return {name: ast.parse(path.read_text(encoding="utf-8"), str(path)) for name, path in modules.items()}
