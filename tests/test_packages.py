"""A new folder of f8fx is part of the wheel, and of the key under which graphs are cached."""

from pathlib import Path

import pytest

import f8fx
from f8fx import cache

ROOT = Path(f8fx.__file__).parent


def test_wheel_has_every_package() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    listed = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = [path.parent.name for path in ROOT.glob("*/__init__.py")]
    assert sorted(listed) == sorted(["f8fx", *(f"f8fx.{name}" for name in folders)])


@pytest.mark.parametrize("folder", ["", "torch_private", "passes", "kernels"])
def test_source_hash_changes_with_every_file(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache.source_hash.__wrapped__()
    changed = ROOT / folder / "__init__.py"
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"changed" if path == changed else read(path))
    assert cache.source_hash.__wrapped__() != before
