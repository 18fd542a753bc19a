"""Matmuls of one row or one column that PyTorch has turned into products and sums.

Under ``coordinate_descent_tuning``, which both ``max-autotune`` modes set, Inductor's decomposition of ``aten.mm``
(``torch._inductor.decomposition.mm``, torch 2.11 to 2.15; on GPUs alone) makes a reduction of a decoder's step for one token::

    mm(a, b)   ->   sum(unsqueeze(a, 2) * unsqueeze(b, 0), 1), computed in float32

The nodes still say that they were ``aten.mm`` (``meta["original_aten"]``), so nothing that a model multiplies and sums itself
is taken for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from .elements import CASTS
from .sizes import is_same, shape_of

aten = torch.ops.aten


class Product(NamedTuple):
    """A matmul in parts.

    Attributes:
        left, right: what it multiplied.
        parts: the nodes it consists of, the result first; each is read by one before it, the last ones perhaps by others.
    """

    left: fx.Node
    right: fx.Node
    parts: tuple[fx.Node, ...]

    @property
    def result(self) -> fx.Node:
        """What has the matmul's result."""
        return self.parts[0]


def products(graph: fx.Graph) -> Iterator[Product]:
    """The matmuls of a graph that are in parts, in graph order; each as it is when it is asked for."""
    for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        if (found := _product(node)) is not None:
            yield found


def _product(total: fx.Node) -> Product | None:
    if not _is_of_mm(total) or list(total.args[1:]) != [[1]]:
        return None
    product: Any = total.args[0]
    if product.target is not aten.mul.Tensor or len(product.users) > 1:
        return None
    parts: list[fx.Node] = [total, product]
    operands: list[fx.Node] = []
    for side, dim in zip(product.args, (2, 0), strict=True):
        if not isinstance(side, fx.Node) or side.target is not aten.unsqueeze.default or side.args[1] != dim:
            return None
        operand: Any = side.args[0]
        parts.append(side)
        if operand.target in CASTS and _is_of_mm(operand):
            parts.append(operand)
            operand = operand.args[0]
        operands.append(operand)
    left, right = operands
    dtype = left.meta["val"].dtype
    if total.meta["val"].dtype != dtype:  # it is summed in float32 and rounded
        rounded = next(iter(total.users), None)
        if rounded is None or len(total.users) > 1 or rounded.target not in CASTS:
            return None
        parts.insert(0, rounded)
    if {right.meta["val"].dtype, parts[0].meta["val"].dtype} != {dtype}:
        return None
    is_one = is_same(shape_of(left)[0], 1) or is_same(shape_of(right)[1], 1)
    return Product(left, right, tuple(parts)) if is_one else None


def _is_of_mm(node: fx.Node) -> bool:
    # by name: copies of graphs copy operators, too
    return str(node.meta.get("original_aten")) == str(aten.mm.default)
