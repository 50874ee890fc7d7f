"""Imports have no cycle, not even one that hides inside functions, and nothing leans on rivals."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = SOURCE / "osciformer"
# May know the baselines and the benchmarks; everything else works without them.
LEAVES = ("osciformer.baselines", "osciformer.bench", "osciformer.cli")


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}


def imports_of(path: Path) -> set[str]:
    """Return the modules of the package that a file imports at run time, wherever it does so."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else str(node.module))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found & MODULES.keys()


GRAPH = {name: imports_of(path) - {name} for name, path in MODULES.items()}


def test_the_graph_is_not_empty() -> None:
    assert sum(map(len, GRAPH.values())) > len(GRAPH) > 50


def test_no_import_cycle() -> None:
    try:
        tuple(graphlib.TopologicalSorter(GRAPH).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


@pytest.mark.parametrize("name", sorted(MODULES))
def test_the_core_does_not_import_baselines_or_benchmarks(name: str) -> None:
    if not name.startswith(LEAVES):
        wrong = [
            i for i in GRAPH[name] if i.startswith(("osciformer.baselines", "osciformer.bench"))
        ]
        assert not wrong
