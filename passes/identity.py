"""Which nodes of a graph hold the same tensor."""

from __future__ import annotations

from collections.abc import Hashable

from torch import fx

from f8fx import ops

from .elements import CASTS, PERMUTES, flat_base
from .operand import keeps_order
from .rewrite import MARKS


def identity(node: fx.Node) -> Hashable:
    """Equal for nodes with the same elements in the same order.

    A tensor that is float8 already has a marker for each use. Autocast casts a tensor once for each layer that reads
    it, and every ``einsum`` permutes dimensions of size 1 for itself.
    """
    node = flat_base(node)
    while node.target in PERMUTES and keeps_order(node):
        node = flat_base(node.args[0])  # type: ignore[arg-type]
    kwargs = tuple(sorted(node.kwargs.items(), key=lambda item: item[0]))
    if node.target in ops.MARKERS:
        return (node.target, node.args, kwargs)
    if node.target in CASTS and isinstance(node.args[0], fx.Node):
        marks = (node.meta.get(mark) for mark in MARKS)
        return (node.target, identity(node.args[0]), *node.args[1:], kwargs, *marks)
    return node
