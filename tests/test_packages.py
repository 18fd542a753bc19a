"""What holds for every file: it is part of the wheel and of the key under which graphs are cached, and what it takes of
torch is public, but for one package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import f8fx
from f8fx import sources

ROOT = Path(f8fx.__file__).parent


def test_wheel_has_every_package() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    listed = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = [path.parent.name for path in ROOT.glob("*/__init__.py")]
    assert sorted(listed) == sorted(["f8fx", *(f"f8fx.{name}" for name in folders)])


@pytest.mark.parametrize("folder", ["", "torch_private", "passes", "kernels"])
def test_source_hash_changes_with_every_file(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sources.source_hash.__wrapped__()
    changed = ROOT / folder / "__init__.py"
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"changed" if path == changed else read(path))
    assert sources.source_hash.__wrapped__() != before


class Private(ast.NodeVisitor):
    """What a file uses of torch that is private; operators of a public namespace (``aten._scaled_mm``) are not."""

    def __init__(self, source: str) -> None:
        tree = ast.parse(source)
        self.found: list[str] = []
        self.torch: dict[str, str] = {}  # local names for what is torch's
        self.own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        self.visit(tree)

    def take(self, node: ast.AST, path: str) -> None:
        parts = path.split(".")
        names = parts[2:3] if parts[:2] == ["torch", "ops"] else parts
        if any(re.match("_(?!_)", name) for name in names):
            self.found.append(f"{node.lineno}: {path}")

    def visit_Import(self, node: ast.Import) -> None:
        for name, alias in ((found.name, found.asname) for found in node.names):
            if name.split(".")[0] == "torch":
                self.torch[alias or "torch"] = name if alias else "torch"
                self.take(node, name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = "" if node.level else str(node.module)
        for found in node.names if module.split(".")[0] == "torch" else ():
            self.torch[found.asname or found.name] = f"{module}.{found.name}"
            self.take(node, f"{module}.{found.name}")

    def visit_Assign(self, node: ast.Assign) -> None:
        path = self.path(node.value)
        if path is not None:
            self.torch.update((target.id, path) for target in node.targets if isinstance(target, ast.Name))
        self.generic_visit(node)

    def path(self, node: ast.AST) -> str | None:
        """The full name of an expression that is a part of torch."""
        if isinstance(node, ast.Name):
            return self.torch.get(node.id)
        base = self.path(node.value) if isinstance(node, ast.Attribute) else None
        return None if base is None else f"{base}.{node.attr}"

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self.path(node)
        if path is not None:
            self.take(node, path)
            return
        is_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if not is_self and node.attr not in self.own:
            self.take(node, node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr"):
            name = node.args[1]
            self.take(node, str(name.value) if isinstance(name, ast.Constant) else "")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring may speak of anything
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        text = node.value if isinstance(node.value, str) else ""
        imported = re.findall(r"^\s*(?:from|import) (torch[\w.]*)", text, re.M)
        for path in imported or re.findall(r"^(?:torch\.[\w.]+|_c10d\w*)$", text):
            self.take(node, path)


@pytest.mark.parametrize("folder", ["f8fx", "passes", "kernels", "benchmarks"])
def test_private_interfaces_of_torch_stand_in_one_package(folder: str) -> None:
    for_measuring = (ROOT.parent / "benchmarks" / name for name in ("codegen.py", "stand_in.py"))
    allowed = {*for_measuring, *(ROOT / "torch_private").iterdir()}
    files = set((ROOT.parent / folder).rglob("*.py")) - allowed
    assert files
    found = [f"{path}:{use}" for path in sorted(files) for use in Private(path.read_text("utf-8")).found]
    assert not found, "\n".join(["these belong in f8fx/torch_private:", *found])


@pytest.mark.parametrize(
    "source, uses",
    [
        ("import torch._inductor.config", ["1: torch._inductor.config"]),
        ("import torch.utils._pytree as tree", ["1: torch.utils._pytree"]),
        ("from torch._guards import tracing", ["1: torch._guards.tracing"]),
        ("from torch.utils import _pytree", ["1: torch.utils._pytree"]),
        ("import torch\ntorch._check(True)", ["2: torch._check"]),
        (
            "from torch import amp\namp.autocast_mode._enter_autocast",
            ["2: torch.amp.autocast_mode._enter_autocast"],
        ),
        ("import torch\ntorch.ops._c10d_functional.all_reduce", ["2: torch.ops._c10d_functional.all_reduce"]),
        ("import torch\nops = torch.ops\nops._c10d_functional", ["3: torch.ops._c10d_functional"]),
        ("node.target.namespace == '_c10d_functional'", ["1: _c10d_functional"]),
        ("module._forward_pre_hooks", ["1: _forward_pre_hooks"]),
        ("getattr(target, '_schema', None)", ["1: _schema"]),
        (
            "TEXT = 'import triton\\nfrom torch._inductor.runtime import hints'",
            ["1: torch._inductor.runtime"],
        ),
        ("import torch\naten = torch.ops.aten\naten._scaled_mm.default", []),
        ("import torch\ntorch.__version__\nself._own", []),
        ("raise ValueError('torch._scaled_mm takes no such thing')", []),
    ],
)
def test_what_is_private(source: str, uses: list[str]) -> None:
    assert Private(source).found == uses
