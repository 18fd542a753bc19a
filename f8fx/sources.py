"""What code of f8fx's this is, for keys of whatever is kept across processes."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path


@cache
def source_hash() -> str:
    """Hash of f8fx's own code: another version must never be served this one's graphs."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()
