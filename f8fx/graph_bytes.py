"""Bytes that a traced graph keeps for its backward, and sends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, fx

from .torch_private import is_collective, size_hint, storage_key, tree_leaves


def saved_bytes(forward: fx.Graph, outputs: int, is_there: Callable[[fx.Node], bool]) -> int:
    """Bytes a forward graph keeps for its backward: inputs and intermediates, nothing twice, and nothing that is there anyway.

    Args:
        outputs: how many of its outputs are the user's, which are there anyway; what follows is for the backward.
        is_there: whether an input is there anyway: parameters are, activations that another graph has made are kept.
    """
    results = cast("Sequence[Any]", forward.output_node().args[0])
    anyway = [n for n in forward.nodes if n.op == "get_attr" or (n.op == "placeholder" and is_there(n))]
    free = {storage_key(value) for node in (*anyway, *results[:outputs]) for value in _values(node)}
    kept: dict[int, int] = {}
    for node in results[outputs:]:
        for value in _values(node):
            if storage_key(value) not in free:
                kept[storage_key(value)] = size_hint(value.untyped_storage().nbytes()) or 0
    return sum(kept.values())


def communicated_bytes(graph: fx.Graph) -> int:
    """Bytes in a graph's collectives: of each, its input or its output, whichever is larger."""
    total = 0
    for node in graph.nodes:
        if not is_collective(node) or "wait" in str(node.target):
            continue
        sent = sum(nbytes(value) for source in node.all_input_nodes for value in _values(source))
        total += max(sent, sum(map(nbytes, _values(node))))
    return total


def _values(node: Any) -> list[Tensor]:
    """The tensors of a node; of what is no node, none."""
    values = tree_leaves(node.meta.get("val")) if isinstance(node, fx.Node) else ()
    return [value for value in values if isinstance(value, Tensor)]


def nbytes(value: Tensor) -> int:
    """Of a tensor as it was traced; a size that is known only at run time counts as 0."""
    return math.prod(size_hint(size) or 0 for size in value.shape) * value.dtype.itemsize
