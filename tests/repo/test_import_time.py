"""What a command or an import costs before it is asked to do anything, counted in modules instead of seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    "torch",
    "vllm",
    "transformers",
    "tokenizers",
    "langchain_core",
    "llama_index",
    "faiss",
    "sentence_transformers",
    "pypdf",
    "httpx",
    "numpy",
)


def imported_by(code: str, cwd: Path) -> set[str]:
    """Names in `sys.modules` after a fresh interpreter has run `code`."""
    script = f"import atexit, json, sys\natexit.register(lambda: print('\\n' + json.dumps(list(sys.modules))))\n{code}"
    done = subprocess.run([sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_loads_nothing_of_it_but_the_version(tmp_path: Path) -> None:
    # vLLM imports the package in each of its processes: nothing but names may be loaded then.
    modules = imported_by("import lazyrag", tmp_path)
    assert {name for name in modules if name.startswith("lazyrag")} == {"lazyrag", "lazyrag._version"}
    assert modules.isdisjoint({*HEAVY, "asyncio"})


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["ingest", "--help"], ["query", "--help"], ["tune", "--help"]]
)
def test_help_and_version_load_no_engine_and_no_framework(arguments: list[str], tmp_path: Path) -> None:
    modules = imported_by(f"sys.argv = ['lazyrag', *{arguments!r}]\nfrom lazyrag.cli import main\nmain()", tmp_path)
    assert modules.isdisjoint(HEAVY)


@pytest.mark.parametrize("name", ["Config", "Document", "LazyRAGError", "Sampling"])
def test_the_nouns_load_without_any_dependency(name: str, tmp_path: Path) -> None:
    assert imported_by(f"from lazyrag import {name}", tmp_path).isdisjoint(HEAVY)


def test_the_client_loads_no_engine_and_no_framework(tmp_path: Path) -> None:
    modules = imported_by("from lazyrag import LazyRAG", tmp_path)
    assert modules.isdisjoint(
        {"torch", "vllm", "transformers", "langchain_core", "llama_index", "sentence_transformers"}
    )
