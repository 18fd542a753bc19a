"""An attribute replaced for the length of a block, where torch has no interface for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute for the length of a block."""
    previous = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, previous)
