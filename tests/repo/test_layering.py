"""Imports go one way: from a higher rank to a lower one, or within a rank without a cycle.

Imports inside functions count; imports under `if TYPE_CHECKING:` do not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import lazyrag

RANKS = (
    # 0: what everything may use
    {
        "lazyrag",
        "lazyrag._version",
        "lazyrag.types",
        "lazyrag.errors",
        "lazyrag.modes",
        "lazyrag.optional",
        "lazyrag.plots",
        "lazyrag.registry",
        "lazyrag.backend",
        "lazyrag.integrations",
        "lazyrag.retrievers",
    },
    # 1: text, integers and contracts
    {
        "lazyrag.config",
        "lazyrag.tokens",
        "lazyrag.anchors",
        "lazyrag.backend.wire",
        "lazyrag.backend.contents",
        "lazyrag.backend.control",
        "lazyrag.backend.layout",
        "lazyrag.backend.hashing",
        "lazyrag.backend.engine",
        "lazyrag.backend.fingerprint",
        "lazyrag.backend.guided",
        "lazyrag.backend.spawned",
        "lazyrag.kernels.checks",
        "lazyrag.kernels.reference",
    },
    # 2: parts that know nothing of each other's rank mates' callers
    {
        "lazyrag.kernels.*",
        "lazyrag.retrievers.*",
        "lazyrag.segmenter",
        "lazyrag.plan",
        "lazyrag.chat",
        "lazyrag.tools",
        "lazyrag.loaders",
        "lazyrag.splitter",
        "lazyrag.backend.local",
        "lazyrag.backend.remote",
        "lazyrag.backend.fake",
        "lazyrag.backend.tiers",
        "lazyrag.backend.tiers.*",
    },
    # 3: inside vLLM, and what combines parts
    {
        "lazyrag.backend.plugin",
        "lazyrag.backend.plugin.*",
        "lazyrag.calibration",
        "lazyrag.care",
        "lazyrag.deviation",
        "lazyrag.explain",
        "lazyrag.ingest",
        "lazyrag.library",
        "lazyrag.quota",
        "lazyrag.records",
        "lazyrag.recurring",
        "lazyrag.transfer",
    },
    # 4: the one facade
    {"lazyrag.client", "lazyrag.backend.server", "lazyrag.backend.server.*"},
    # 5: ways to reach it
    {
        "lazyrag.integrations.*",
        "lazyrag.cli",
        "lazyrag.doctor",
        "lazyrag.bench",
        "lazyrag.bench.*",
        "lazyrag.quality",
        "lazyrag.quality.*",
        "lazyrag.tune",
        "lazyrag.tune.*",
    },
)
"""A name with `.*` stands for everything below it that has no entry of its own."""

ONLY_IMPORTED_BY = {
    # The benchmark's child is an engine in its own process, with and without the plugin.
    "vllm": (
        "lazyrag.backend.plugin",
        "lazyrag.backend.local",
        "lazyrag.backend.tiers.connector",
        "lazyrag.backend.tiers.transfers",
        "lazyrag.bench.child",
        # An arm of the benchmark with a scheduler of its own.
        "lazyrag.bench.materialize",
    ),
    "torch": (
        "lazyrag.backend.plugin",
        "lazyrag.backend.tiers.connector",
        "lazyrag.backend.tiers.host",
        "lazyrag.backend.tiers.mover",
        "lazyrag.kernels",
        "lazyrag.retrievers.embed",
        "lazyrag.deviation",
        # The gate's model and reference are small Hugging Face models; the child names torch's version.
        "lazyrag.bench",
        "lazyrag.tune",
    ),
    "triton": ("lazyrag.kernels",),
    "faiss": ("lazyrag.retrievers.vectors",),
    "sentence_transformers": ("lazyrag.retrievers.embed",),
    "langchain_core": ("lazyrag.integrations.langchain",),
    "llama_index": ("lazyrag.integrations.llama_index",),
    "typer": ("lazyrag.cli",),
    "rich": ("lazyrag.cli",),
    "matplotlib": ("lazyrag.plots",),
    "fastapi": ("lazyrag.backend.server",),
    "uvicorn": ("lazyrag.backend.server",),
    "httpx": ("lazyrag.backend.remote",),
}
"""Packages that only these modules (and what is below them) may import."""

INSIDE_A_FUNCTION = {
    ("lazyrag.deviation", "torch"),
    ("lazyrag.retrievers.embed", "torch"),
    ("lazyrag.retrievers.embed", "sentence_transformers"),
}
"""Importer and package, where the import must not run before somebody asks for it."""


def rank(module: str) -> int | None:
    pattern = module
    while True:
        for number, names in enumerate(RANKS):
            if pattern in names:
                return number
        stem = pattern.removesuffix(".*").rpartition(".")[0]
        if not stem:
            return None
        pattern = f"{stem}.*"


def below(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def imports(node: ast.AST, inside_function: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import that can run, and whether it stands inside a function."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield node, inside_function
        return
    inside_function |= isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    type_only = isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    for child in node.orelse if isinstance(node, ast.If) and type_only else ast.iter_child_nodes(node):
        yield from imports(child, inside_function)


def targets(node: ast.Import | ast.ImportFrom, modules: dict[str, Path]) -> set[str]:
    """The modules that an import statement names; a public name of `lazyrag` stands for the module it lives in."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    source = node.module or ""
    found = set()
    for alias in node.names:
        home = lazyrag._HOME.get(alias.name) if source == "lazyrag" else None
        submodule = f"{source}.{alias.name}"
        found.add(home or (submodule if submodule in modules else source))
    return found


@pytest.fixture(scope="module")
def edges(modules: dict[str, Path], syntax: dict[str, ast.Module]) -> set[tuple[str, str, bool]]:
    """(importer, imported, inside a function), own modules and packages alike."""
    return {
        (importer, target, local)
        for importer, tree in syntax.items()
        for node, local in imports(tree)
        for target in targets(node, modules)
    }


def test_every_module_has_a_rank(modules: dict[str, Path]) -> None:
    assert [name for name in modules if rank(name) is None] == [], "name them in RANKS"


def test_imports_are_absolute_and_by_the_packages_own_name(syntax: dict[str, ast.Module]) -> None:
    folders = {"backend", "kernels", "retrievers", "integrations"}
    wrong = [
        f"{importer}:{node.lineno}: {ast.unparse(node)}"
        for importer, tree in syntax.items()
        for node, _ in imports(tree)
        if (isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] in folders))
        or (isinstance(node, ast.Import) and any(alias.name.split(".")[0] in folders for alias in node.names))
    ]
    assert wrong == []


def test_every_imported_module_of_ours_exists(edges: set[tuple[str, str, bool]], modules: dict[str, Path]) -> None:
    # A folder without __init__.py is a package, too.
    packages = {name.rpartition(".")[0] for name in modules}
    missing = [
        (importer, target)
        for importer, target, _ in edges
        if below(target, "lazyrag") and target not in modules and target not in packages
    ]
    assert missing == []


def test_no_module_imports_from_a_higher_rank(edges: set[tuple[str, str, bool]]) -> None:
    upward = sorted(
        f"{importer} (rank {rank(importer)}) imports {target} (rank {rank(target)})"
        for importer, target, _ in edges
        if below(target, "lazyrag") and (rank(target) or 0) > (rank(importer) or 0)
    )
    assert upward == []


def test_no_import_cycle(edges: set[tuple[str, str, bool]]) -> None:
    graph: dict[str, set[str]] = {}
    for importer, target, _ in edges:
        if below(target, "lazyrag") and target != importer:
            graph.setdefault(importer, set()).add(target)
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")
    assert order


def test_the_plugin_sees_only_contracts_and_kernels(edges: set[tuple[str, str, bool]]) -> None:
    plugin = "lazyrag.backend.plugin"
    beyond = sorted(
        f"{importer} imports {target}"
        for importer, target, _ in edges
        if below(importer, plugin)
        and below(target, "lazyrag")
        and not (below(target, plugin) or below(target, "lazyrag.kernels") or (rank(target) or 0) <= 1)
    )
    assert beyond == []


def test_integrations_see_neither_plugin_nor_kernels_nor_vllm_nor_torch(edges: set[tuple[str, str, bool]]) -> None:
    walls = ("lazyrag.backend.plugin", "lazyrag.kernels", "vllm", "torch")
    beyond = sorted(
        f"{importer} imports {target}"
        for importer, target, _ in edges
        if below(importer, "lazyrag.integrations") and any(below(target, wall) for wall in walls)
    )
    assert beyond == []


@pytest.mark.parametrize("package", ONLY_IMPORTED_BY)
def test_a_heavy_package_is_imported_only_where_it_belongs(package: str, edges: set[tuple[str, str, bool]]) -> None:
    elsewhere = sorted(
        f"{importer} imports {target}"
        for importer, target, local in edges
        if below(target, package)
        and (
            not any(below(importer, allowed) for allowed in ONLY_IMPORTED_BY[package])
            or ((importer, package) in INSIDE_A_FUNCTION and not local)
        )
    )
    assert elsewhere == []


def test_these_checks_see_what_they_forbid(modules: dict[str, Path]) -> None:
    """The reader of imports itself: local imports count, type-only ones do not, public names lead home."""
    tree = ast.parse(
        "from lazyrag import LazyRAG\n"
        "if TYPE_CHECKING:\n    import torch\nelse:\n    import json\n"
        "def f():\n    from lazyrag.backend import layout\n"
    )
    seen = [(targets(node, modules), local) for node, local in imports(tree)]
    assert seen == [({"lazyrag.client"}, False), ({"json"}, False), ({"lazyrag.backend.layout"}, True)]
    assert rank("lazyrag.client") == 4
    assert rank("lazyrag.kernels.sdpa") == 2
    assert rank("lazyrag.kernels.reference") == 1
    assert rank("lazyrag.something_new") is None
