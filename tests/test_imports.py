"""Who may import whom, as docs/architecture.md says: read from the sources, nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "harness", "workloads")


@cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imported(body: list[ast.stmt], inside_functions: bool) -> Iterator[str]:
    """Full names that statements import, those for a type checker alone left out."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        elif inside_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for name in ("body", "orelse", "finalbody"):
                yield from imported(getattr(node, name, []), inside_functions)
            for handler in getattr(node, "handlers", []):
                yield from imported(handler.body, inside_functions)


def graph() -> dict[str, set[str]]:
    """Module -> modules of these packages that its import imports."""
    known = modules()
    edges: dict[str, set[str]] = {}
    for module, tree in known.items():
        names = set(imported(tree.body, inside_functions=False))
        edges[module] = {n if n in known else n.rpartition(".")[0] for n in names} & known.keys() - {module}
    return edges


def test_no_module_imports_itself_by_way_of_others() -> None:
    edges = graph()
    assert sum(map(len, edges.values())) > 500, "the sources were not read"
    assert list(TopologicalSorter(edges).static_order())  # CycleError names the circle


def test_no_folder_imports_itself_by_way_of_others() -> None:
    """A folder inside a package counts as one, a module beside it by itself."""
    folders = {m for m in modules() if m.count(".") == 1 and any(n.startswith(f"{m}.") for n in modules())}

    def room(module: str) -> str:
        parts = module.split(".")
        return ".".join(parts[:2]) if ".".join(parts[:2]) in folders else module

    edges: dict[str, set[str]] = {}
    for module, targets in graph().items():
        edges.setdefault(room(module), set()).update(room(target) for target in targets)
    assert len(folders) > 15, "the folders were not found"
    assert list(TopologicalSorter({here: there - {here} for here, there in edges.items()}).static_order())


@pytest.mark.parametrize(
    "package, forbidden",
    [("engine", ("harness", "workloads", "sweeps")), ("workloads", ("harness", "sweeps", "engine"))],
)
def test_what_lies_below_knows_nothing_of_what_lies_above(package: str, forbidden: tuple[str, ...]) -> None:
    for module, tree in modules().items():
        if module.partition(".")[0] == package:
            tops = {name.partition(".")[0] for name in imported(tree.body, inside_functions=True)}
            assert not tops & set(forbidden), module


@pytest.mark.parametrize("start", ["harness.app", "harness.report.html", "harness.compare.app"])
def test_command_line_and_report_load_neither_engine_nor_torch(start: str) -> None:
    edges, seen, waiting = graph(), set(), [start]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += edges[module]
            if "." in module:  # importing it runs its package first
                waiting.append(module.rpartition(".")[0])
    assert len(seen) > 5
    for module in seen:
        tops = {name.partition(".")[0] for name in imported(modules()[module].body, inside_functions=False)}
        assert not tops & {"engine", "torch", "transformers"}, module
