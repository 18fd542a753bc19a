"""Where the elements of a value come from: whether all-gathers of the graph gave them."""

from __future__ import annotations

from typing import Any

from torch import fx

from .elements import MOVEMENTS
from .gather import all_gather, copy, is_movement, wait_tensor


def is_gathered(node: fx.Node) -> bool:
    """Whether all elements of a value, but for padding, came out of all-gathers, and were at most moved and cast since."""
    return all(map(_gathers, _origins(node)))


def is_of_gather(node: fx.Node) -> bool:
    """Whether elements of a value came out of an all-gather, and were at most moved and cast since."""
    return any(map(_gathers, _origins(node)))


def _gathers(node: fx.Node) -> bool:
    return node.target is wait_tensor and node.args[0].target is all_gather  # type: ignore[union-attr]


def _origins(node: fx.Node) -> set[fx.Node]:
    """The values whose elements a value holds: where movements, copies and casts lead back to."""
    found: set[fx.Node] = set()
    seen, todo = {node}, [node]
    while todo:
        current = todo.pop()
        source: Any = current.args[1 if current.target is copy else 0] if current.args else None
        if not (is_movement(current) or current.target in MOVEMENTS or current.target is copy):
            found.add(current)
            continue
        sources = set(source if isinstance(source, (list, tuple)) else [source]) - seen
        seen |= sources
        todo += sources
    return found
