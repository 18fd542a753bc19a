"""Imports run one way: a file that is imported knows nothing of the one that imports it, and lower floors nothing of higher."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import f8fx

ROOT = Path(f8fx.__file__).parent

#: What of f8fx each of the lower floors may know, besides itself.
FLOORS = {
    "kernels": {"recipe"},
    "passes": {
        *(
            "calibration",
            "cost",
            "hardware",
            "lacks",
            "parts",
            "plan",
            "recipe",
            "report",
        ),  # plain data and predictions
        *("kernels", "ops", "torch_private"),
    },
    "torch_private": set(),
    "recipe": {"nearest"},
    "hardware": {"accelerator", "hardware_table", "nearest", "recipe"},
    "ops": {"kernels", "recipe", "torch_private"},
}


@cache
def modules() -> dict[str, str]:
    """Each module's source, by its name without ``f8fx``; of packages that of ``__init__``."""
    found = {}
    for folder in (ROOT, *(path.parent for path in ROOT.glob("*/__init__.py"))):
        for path in folder.glob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text("utf-8")
    return found


def statements(nodes: Iterable[ast.AST]) -> Iterator[ast.ImportFrom]:
    """Imports that run, at once or in a function: what only a type checker reads does not count."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield node
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from statements(ast.iter_child_nodes(node))


def imported(name: str, sources: Mapping[str, str]) -> set[str]:
    """Which of the modules a module imports."""
    is_package = any(other.startswith(f"{name}.") for other in sources) or name == ""
    found = set()
    for node in statements(ast.parse(sources[name]).body):
        path = ["f8fx", *name.split(".")] if name else ["f8fx"]
        path = path[: len(path) + is_package - node.level] if node.level else []
        path += node.module.split(".") if node.module else []
        if path[0] == "f8fx":
            base = ".".join(path[1:])
            full = [f"{base}.{alias.name}".lstrip(".") for alias in node.names]
            found.update(each if each in sources else base for each in full)
    return found - {name}


def cycle(sources: Mapping[str, str]) -> list[str]:
    """Modules of which each imports the next, the last the first; none, if imports run one way."""
    try:
        TopologicalSorter({name: imported(name, sources) for name in sources}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_is_imported_by_what_it_imports() -> None:
    sources = modules()
    assert len(sources) > 100 and "passes.find" in sources
    assert cycle(sources) == []


@pytest.mark.parametrize("floor", FLOORS)
def test_lower_floors_know_nothing_of_higher(floor: str) -> None:
    sources = modules()
    rooms = [name for name in sources if name.split(".")[0] == floor]
    known = {other.split(".")[0] for name in rooms for other in imported(name, sources)}
    assert rooms and known - {floor} <= FLOORS[floor]


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        ({"a": "from .b import x", "b": "from . import c", "c": "x = 1"}, False),
        ({"a": "from .b import x", "b": "from . import a"}, True),
        ({"a": "from f8fx.b import x", "b": "def f():\n    from .a import y"}, True),
        ({"a": "from .b import x", "b": "if TYPE_CHECKING:\n    from .a import y"}, False),
        (
            {"p": "from .q import x", "p.q": "from .r import x", "p.r": "from ..a import y", "a": "x = 1"},
            False,
        ),
        ({"p": "from .q import x", "p.q": "from ..a import y", "a": "from .p import q"}, True),
        (
            {"p": "", "p.q": "from .. import a", "a": "try:\n    from f8fx.p import q\nfinally:\n    pass"},
            True,
        ),
    ],
)
def test_cycles_are_found(sources: dict[str, str], found: bool) -> None:
    assert bool(cycle(sources)) == found
