"""Differences between versions of vLLM and torch live in one file."""

from __future__ import annotations

import ast

COMPAT = "lazyrag.backend.plugin.compat"


def is_version_of_a_package(node: ast.AST) -> bool:
    """`package.__version__`, `version("package")` or `Version(...)`."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        named = bool(node.args) and isinstance(node.args[0], ast.Constant)
        return name == "Version" or (name == "version" and named)
    return isinstance(node, ast.Attribute) and node.attr == "__version__"


def version_branches(tree: ast.Module) -> list[int]:
    """Lines that compare a package's version, or import what is needed for it."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            lines += [node.lineno] if any(is_version_of_a_package(inner) for inner in ast.walk(node)) else []
        elif isinstance(node, ast.Import):
            lines += [node.lineno for alias in node.names if alias.name.split(".")[0] == "packaging"]
        elif isinstance(node, ast.ImportFrom):
            lines += [node.lineno] if (node.module or "").split(".")[0] == "packaging" else []
    return lines


def test_only_compat_compares_versions(syntax: dict[str, ast.Module]) -> None:
    found = {name: version_branches(tree) for name, tree in syntax.items() if name != COMPAT}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_the_check_sees_a_version_branch() -> None:
    assert version_branches(ast.parse("if vllm.__version__ >= '0.30': pass")) == [1]
    assert version_branches(ast.parse("if metadata.version('torch') == '2.13': pass")) == [1]
    assert version_branches(ast.parse("x = Version(v) < Version('1')")) == [1]
    assert version_branches(ast.parse("from packaging.version import Version")) == [1]
    assert version_branches(ast.parse("print(lazyrag.__version__)")) == []
    assert version_branches(ast.parse("if version(connection) == 3: pass")) == []
