"""Documentation that is missing, or that names what does not exist, is a failure."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lazyrag
from lazyrag.config import OTHER_VARIABLES, Config


@pytest.fixture(scope="module")
def readme(root: Path) -> str:
    return (root / "README.md").read_text(encoding="utf-8")


def commands() -> Iterator[tuple[str, Any]]:
    """Every command of the command line with its full name, and how click sees it."""
    import typer.main

    from lazyrag.cli import app

    def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        children = getattr(command, "commands", {})
        if not children or command.invoke_without_command:
            yield name, command
        for child, inner in children.items():
            yield from walk(f"{name} {child}", inner)

    yield from walk("lazyrag", typer.main.get_command(app))


# ---------------------------------------------------------------- command line


def test_every_command_and_option_has_help() -> None:
    silent = []
    for name, command in commands():
        silent += [name] if not (command.help or "").strip() else []
        silent += [
            f"{name} {parameter.opts[0]}"
            for parameter in command.params
            if not (getattr(parameter, "help", None) or "").strip()
        ]
    assert silent == []


def test_every_command_is_in_the_readme(readme: str) -> None:
    assert [name for name, _ in commands() if name not in readme] == []


def test_every_command_in_the_readme_exists(readme: str) -> None:
    known = {name for name, _ in commands()}
    shown = set(re.findall(r"(?m)^\s*(?:\$ )?(lazyrag (?:[a-z]+)(?: [a-z]+)?)(?=\s|$)", readme))
    wrong = [line for line in shown if line not in known and line.rpartition(" ")[0] not in known]
    assert wrong == []


# ---------------------------------------------------------------- settings


def test_every_variable_is_in_the_readme(readme: str) -> None:
    rows = [(row.variable, row.help) for row in Config().rows()] + list(OTHER_VARIABLES.items())
    missing = [f"| `{variable}` | {text} |" for variable, text in rows if f"`{variable}`" not in readme]
    assert not missing, "add to README.md:\n" + "\n".join(missing)


def test_every_variable_that_the_code_reads_is_known(modules: dict[str, Path], root: Path) -> None:
    known = {row.variable for row in Config().rows()} | set(OTHER_VARIABLES)
    files = [*modules.values(), *(root / "tests").rglob("*.py"), *(root / "examples").rglob("*.py")]
    unknown = {
        f"{variable} in {path.relative_to(root)}"
        for path in files
        if path.name not in ("test_config.py", "test_cli.py")  # these try names that do not exist
        for variable in re.findall(r"[\"'](LAZYRAG_[A-Z_]*[A-Z])[\"'=]", path.read_text(encoding="utf-8"))
        if variable not in known
    }
    assert unknown == set(), "name them in config.OTHER_VARIABLES"


# ---------------------------------------------------------------- examples


def test_examples_are_short(root: Path) -> None:
    paths = {path for path in (root / "examples").glob("*.py") if path.name not in ("demo.py", "models.py")}
    assert {path.name for path in paths if len(path.read_text(encoding="utf-8").splitlines()) >= 60} == set()


# ---------------------------------------------------------------- tables of promises


@pytest.mark.parametrize(("table", "num_rows"), [("docs/complaints.md", 20), ("docs/paths.md", 25)])
def test_every_row_is_held_by_tests_that_exist(root: Path, table: str, num_rows: int) -> None:
    rows = re.findall(r"(?m)^\| (\d+) \|.*\| ([^|]*) \|$", (root / table).read_text(encoding="utf-8"))
    assert [int(number) for number, _ in rows] == list(range(1, num_rows + 1))
    missing = []
    for number, cell in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+)(?:\[([^\]]+)\])?)?`", cell)
        missing += [] if named else [number]
        for path, test, parameter in named:
            text = (root / path).read_text(encoding="utf-8") if (root / path).is_file() else ""
            wanted = [f"def {test}("] if test else []
            wanted += [f'    "{parameter}": ('] if parameter else []
            missing += [f"{path}: {part}" for part in wanted if part not in text] if text else [path]
    assert missing == []


# ---------------------------------------------------------------- code and prose


def test_every_public_name_says_what_it_is() -> None:
    silent = []
    for name in lazyrag.__all__:
        value = getattr(lazyrag, name)
        if not inspect.isclass(value):
            continue
        if not value.__doc__ or value.__doc__.startswith(f"{name}("):  # what a dataclass writes by itself
            silent.append(name)
        silent += [
            f"{name}.{member}"
            for member, function in vars(value).items()
            if not member.startswith("_") and inspect.isfunction(function) and not function.__doc__
        ]
    assert silent == []


def test_every_exported_class_of_an_integration_says_what_it_is(syntax: dict[str, ast.Module]) -> None:
    exported = {
        name
        for module, tree in syntax.items()
        if module.startswith("lazyrag.integrations.")
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.literal_eval(node.value)
    }
    silent = [
        f"{module}.{node.name}"
        for module, tree in syntax.items()
        if module.startswith("lazyrag.integrations.")
        for node in tree.body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name in exported and not ast.get_docstring(node)
    ]
    assert silent == []


def test_every_module_says_what_it_is(syntax: dict[str, ast.Module]) -> None:
    silent = [name for name, tree in syntax.items() if tree.body and not ast.get_docstring(tree)]
    assert [name for name in silent if name != "lazyrag._version"] == []


def test_python_in_the_readme_compiles_and_imports_what_exists(readme: str, modules: dict[str, Path]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    for block in blocks:
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "lazyrag":
                assert {alias.name for alias in node.names} <= set(lazyrag.__all__)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lazyrag."):
                assert node.module in modules
                text = modules[str(node.module)].read_text(encoding="utf-8")
                assert [alias.name for alias in node.names if alias.name not in text] == []
    assert blocks, "the README shows no Python"


def test_only_the_command_line_prints(syntax: dict[str, ast.Module]) -> None:
    printing = [
        f"{name}:{node.lineno}"
        for name, tree in syntax.items()
        if name != "lazyrag.cli"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert printing == []


def test_no_unfinished_mark_and_no_swallowed_error(syntax: dict[str, ast.Module], modules: dict[str, Path]) -> None:
    marks = [
        f"{name}: {mark}"
        for name, path in modules.items()
        for mark in re.findall(r"\b(?:TODO|FIXME|XXX|HACK)\b", path.read_text(encoding="utf-8"))
    ]
    swallowed = [
        f"{name}:{node.lineno}"
        for name, tree in syntax.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
        and all(isinstance(statement, ast.Pass) for statement in node.body)
    ]
    assert marks + swallowed == []
