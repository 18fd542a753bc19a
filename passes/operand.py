"""Tracing a matmul's operand back to the tensor it came from.

Between a tensor and the gemms that read it stand movement operators: ``view`` to two dimensions,
``permute``, and, for ``einsum``, ``unsqueeze`` and permutes of size-1 dimensions. Forward and
backward use different ones, so that one tensor looks like several. :func:`trace` peels them and
returns a 2-D node plus one bit, *transposed*.

Every peeled operator either keeps the order of the elements (a view) or swaps two groups of
dimensions (a transpose); anything else ends the walk. What is left is exact: the operand equals
``node`` or ``node.T``, element for element.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from .elements import PERMUTES, SAME_ORDER
from .sizes import is_same, is_same_shape, shape_of

aten = torch.ops.aten


def permutation(node: fx.Node) -> list[int]:
    """For each dimension of a permute's result, the dimension of its input."""
    rank = len(shape_of(node))
    if node.target is aten.t.default:
        return list(range(rank))[::-1]
    if node.target is aten.transpose.int:
        order = list(range(rank))
        i, j = cast("tuple[int, int]", node.args[1:3])
        order[i], order[j] = order[j], order[i]
        return order
    return [d % rank for d in cast("list[int]", node.args[1])]


def _product(sizes: list) -> int | torch.SymInt:
    result: int | torch.SymInt = 1
    for size in sizes:
        result = result * size
    return result


def keeps_order(node: fx.Node) -> bool:
    """Whether a permute moves dimensions of size 1 only."""
    order = _moved(node)
    return order == sorted(order)


def _moved(node: fx.Node) -> list[int]:
    """The permutation without dimensions of size 1."""
    source = shape_of(node.args[0])  # type: ignore[arg-type]
    return [d for d in permutation(node) if not is_same(source[d], 1)]


def _is_swap(node: fx.Node, rows: int | torch.SymInt) -> bool | None:
    """How a permute acts on its input seen as a matrix: transposes it, leaves it, or neither (None).

    The *output* is seen as ``[rows, columns]`` with ``rows`` given.
    """
    source, order = shape_of(node.args[0]), _moved(node)  # type: ignore[arg-type]
    if order == sorted(order):
        return False
    for split in range(1, len(order)):
        swapped = order[split:] + order[:split]
        if swapped == sorted(order) and is_same(_product([source[d] for d in order[:split]]), rows):
            return True
    return None


def trace(node: fx.Node) -> tuple[fx.Node, bool]:
    """The 2-D node an operand comes from, and whether the operand is its transpose.

    Args:
        node: operand of a matmul, ``[rows, columns]`` or ``[1, rows, columns]``.

    Returns:
        The earliest node of that shape, up to leading dimensions of size 1, that has the operand's
        elements or those of its transpose.
    """
    rows, columns = shape_of(node)[-2:]
    transposed = False
    best, best_transposed = node, False
    current = node
    while True:
        if current.op != "call_function" or not current.args:
            break
        if current.target in SAME_ORDER:
            current = current.args[0]  # type: ignore[assignment]
        elif current.target in PERMUTES:
            # `current` holds a [rows, columns] matrix, or its transpose, in row-major order
            swap = _is_swap(current, columns if transposed else rows)
            if swap is None:
                break
            transposed ^= swap
            current = current.args[0]  # type: ignore[assignment]
        else:
            break
        shape = shape_of(current)
        expected = (columns, rows) if transposed else (rows, columns)
        units = (1,) * (len(shape) - 2)
        if is_same_shape(shape, units + expected):
            best, best_transposed = current, transposed
        elif is_same_shape(shape, units + expected[::-1]) and (is_same(rows, 1) or is_same(columns, 1)):
            # [n, 1] and [1, n] hold the same elements in the same order: either is the other's transpose
            best, best_transposed = current, not transposed
    return best, best_transposed


def repeated_matrix(expanded: fx.Node) -> tuple[fx.Node, bool] | None:
    """The 2-D node that is repeated over the batch of ``[b, rows, columns]``, and whether each is its transpose.

    ``None`` where there is no one matrix.
    """
    sizes = shape_of(expanded)[-2:]
    node, transposed, is_expanded = expanded, False, False
    while node.op == "call_function":
        source = node.args[0]
        if not isinstance(source, fx.Node):
            return None
        if node.target in PERMUTES:
            order, rank = permutation(node), len(shape_of(node))
            if order != [*range(rank - 2), rank - 1, rank - 2]:
                return None
            transposed, sizes = not transposed, sizes[::-1]
        elif node.target is aten.expand.default:
            is_expanded = True
        elif node.target not in SAME_ORDER and node.target is not aten.clone.default:
            return None
        node = source
        shape = shape_of(node)
        if not is_same_shape(shape[-2:], sizes):
            return None
        if len(shape) == 2:
            return (node, transposed) if is_expanded else None
    return None
