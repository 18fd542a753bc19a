"""Bytes that a traced graph keeps for its backward, and sends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, fx

from .torch_private import is_collective, size_hint, storage_key, tree_leaves


def saved_bytes(forward: fx.Graph, outputs: int) -> int:
    """Bytes a forward graph keeps for its backward, beside its inputs.

    Args:
        outputs: how many of its outputs are the user's; what follows is for the backward.
    """
    free = {
        storage_key(value)
        for node in forward.nodes
        if node.op in ("placeholder", "get_attr")
        for value in _values(node)
    }
    kept: dict[int, int] = {}
    for node in cast("Sequence[Any]", forward.output_node().args[0])[outputs:]:
        for value in _values(node) if isinstance(node, fx.Node) else ():
            if storage_key(value) not in free:
                kept[storage_key(value)] = size_hint(value.untyped_storage().nbytes()) or 0
    return sum(kept.values())


def communicated_bytes(graph: fx.Graph) -> int:
    """Bytes in a graph's collectives: of each, its input or its output, whichever is larger."""
    total = 0
    for node in graph.nodes:
        if not is_collective(node) or "wait" in str(node.target):
            continue
        sent = sum(_nbytes(value) for source in node.all_input_nodes for value in _values(source))
        total += max(sent, sum(map(_nbytes, _values(node))))
    return total


def _values(node: fx.Node) -> list[Tensor]:
    return [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]


def _nbytes(value: Tensor) -> int:
    return math.prod(size_hint(size) or 0 for size in value.shape) * value.dtype.itemsize
