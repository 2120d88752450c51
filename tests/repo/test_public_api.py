"""The names that a user imports: few, sorted, the same for the interpreter and for type checkers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lazyrag
from lazyrag.errors import ConfigError

PUBLIC = [
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


def test_the_public_names_are_these_and_sorted() -> None:
    assert lazyrag.__all__ == PUBLIC == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_can_be_had(name: str) -> None:
    namespace: dict[str, object] = {}
    exec(f"from lazyrag import {name}", namespace)
    assert namespace[name] is getattr(lazyrag, name)
    assert name in dir(lazyrag)


def test_type_checkers_see_the_same_names_at_the_same_place(syntax: dict[str, ast.Module]) -> None:
    homes = {
        alias.name: node.module
        for block in syntax["lazyrag"].body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert homes == lazyrag._HOME
    assert {*homes, "__version__"} == set(lazyrag.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LazyRag'"):
        lazyrag.LazyRag  # noqa: B018


def test_a_misspelt_setting_is_refused_by_the_facade() -> None:
    with pytest.raises(ConfigError, match="Did you mean embedder"):
        lazyrag.LazyRAG(model="m", embeder="minilm")


def test_every_framework_names_what_it_exports(syntax: dict[str, ast.Module], modules: dict[str, Path]) -> None:
    """`__all__` of an integration is a sorted literal, so that tools can read it without the framework."""
    for name, tree in syntax.items():
        if name.count(".") == 2 and name.startswith("lazyrag.integrations.") and modules[name].name == "__init__.py":
            (exported,) = (
                ast.literal_eval(node.value)
                for node in tree.body
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            )
            assert exported == sorted(exported), name
