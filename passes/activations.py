"""Which matmuls are products of activations, and no layer.

Attention's scores, a contrastive loss's similarities and an optimizer's products have no weight among their operands:
nothing in them stays from step to step, and what is computed from them often subtracts what nearly cancels. With
dimensions for batch and heads such a product is a ``bmm``; without, it looks like ``x @ w``.

What cannot be told apart from a weight is no activation, so that no layer is lost: inputs of the graph and parts of
them, what is computed from parameters and buffers alone (``w * mask``), or from data too but without contracting any
(a custom operator that dequantizes), what has as many elements as the parameter that it is computed from one by
one (``w / sigma``, ``w - lr * grad``), and parts of that.

Distances from products and squared norms are left whatever their operands: what is large in both cancels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .backward import is_tangent
from .elements import COPIES, KEEP_VALUES, VIEWS, flat_base, is_pointwise
from .left import ACTIVATIONS, DISTANCES, HELD
from .parameters import OfParameters, contracts

aten = torch.ops.aten

_ADDITIONS = frozenset((aten.add.Tensor, aten.sub.Tensor))
#: What leaves a tensor the same but for a factor, and the order of its elements.
_FACTORS = frozenset((aten.mul.Tensor, aten.div.Tensor, aten.neg.default))
_SAME = VIEWS | COPIES | {aten.expand.default}
#: What gives parts of tensors, or puts them together.
_PARTS = KEEP_VALUES | {aten.cat.default}


class Activations:
    """The activations of a graph; none where nobody told which of its inputs are parameters."""

    def __init__(self, graph: fx.Graph, parameters: OfParameters) -> None:
        self.parameters = parameters
        self.found = _found(graph, parameters) if parameters.are_known else set()

    def reason(self, left: fx.Node, right: fx.Node) -> str:
        """Why a matmul is no layer; "" if it may be one."""
        if _holds_norms(left) and _holds_norms(right):
            return DISTANCES
        if not self.parameters.are_known:
            return ""
        held = self.parameters.held
        if left in held and right in held:  # in a layer they would meet data
            return HELD
        both = left in self.found and right in self.found
        with_itself = left is right and left not in self.parameters.all
        return ACTIVATIONS if both or with_itself else ""


def _holds_norms(operand: fx.Node) -> bool:
    """Whether sums stand in an operand beside what it holds: PyTorch computes ``cdist`` as one matmul, of squared norms, too.

    They are large, and what is left of them after the subtraction is small.
    """
    if operand.target is not aten.cat.default:
        return False
    parts: list[fx.Node] = operand.args[0]  # type: ignore[assignment]
    return any(flat_base(part).target is aten.sum.dim_IntList for part in parts)


def is_added_to_norms(product: fx.Node, left: fx.Node, right: fx.Node) -> bool:
    """Whether squared norms of an operand are added to a matmul: ``x.x - 2 x.e + e.e``, as vector quantizers write it."""
    bases = {_without_factors(left), _without_factors(right)}
    if product.target is aten.addmm.default and _are_norms(product.args[0], bases):
        return True
    todo = [(product, 2)]  # there are three terms: two additions
    while todo:
        node, additions = todo.pop()
        for user in node.users:
            if user.target in _ADDITIONS and additions:
                if any(_are_norms(arg, bases) for arg in user.args[:2] if arg is not node):
                    return True
                todo.append((user, additions - 1))
            elif _is_same_but_for_a_factor(user):
                todo.append((user, additions))
    return False


def _are_norms(node: Any, bases: set[fx.Node]) -> bool:
    """Whether a tensor is sums of squares of one of the others, or a sum of such."""
    if not isinstance(node, fx.Node):
        return False
    node = _without_factors(node)
    if node.target in _ADDITIONS:
        terms = [_without_factors(arg) for arg in node.args[:2] if isinstance(arg, fx.Node)]
        return any(_are_squares_of(term, bases) for term in terms)
    return _are_squares_of(node, bases)


def _are_squares_of(node: fx.Node, bases: set[fx.Node]) -> bool:
    if node.target is not aten.sum.dim_IntList:
        return False
    square = _without_factors(node.args[0])  # type: ignore[arg-type]
    if square.target is aten.pow.Tensor_Scalar:
        is_square = isinstance(square.args[1], (int, float)) and square.args[1] == 2
    else:
        is_square = square.target is aten.mul.Tensor and square.args[0] is square.args[1]
    return is_square and _without_factors(square.args[0]) in bases  # type: ignore[arg-type]


def _is_same_but_for_a_factor(node: fx.Node) -> bool:
    return node.target in _SAME or (
        node.target in _FACTORS and not any(isinstance(arg, fx.Node) for arg in node.args[1:])
    )


def _without_factors(node: fx.Node) -> fx.Node:
    """What a tensor is a multiple of, at most moved or cast."""
    while _is_same_but_for_a_factor(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _found(graph: fx.Graph, parameters: OfParameters) -> set[fx.Node]:
    found: set[fx.Node] = set()
    likenesses = set(parameters.all)  # of parameters: as many elements
    has_weights = bool(parameters.all or parameters.held)
    trains = any(is_tangent(node) for node in graph.nodes)
    for node in graph.nodes:
        if node.op != "call_function" or node in parameters.all or node in parameters.held:
            continue
        sources = node.all_input_nodes
        is_changed = _is_elementwise(node) and any(s in likenesses and _is_as_large(s, node) for s in sources)
        is_part = node.target in _PARTS and sources and all(source in likenesses for source in sources)
        if is_changed or is_part:
            likenesses.add(node)
        elif contracts(node.target, custom=False) or any(_has_values(s) and s in found for s in sources):
            found.add(node)
        elif sources and not has_weights and not trains and node.target not in KEEP_VALUES:
            found.add(node)  # there is nothing that it could be a weight from
    return found


def _has_values(node: fx.Node) -> bool:
    """Whether a tensor's values go into what is computed from it: not those of an index or a mask, which choose."""
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()


def _is_elementwise(node: fx.Node) -> bool:
    return is_pointwise(node) or node.target in KEEP_VALUES


def _is_as_large(a: fx.Node, b: fx.Node) -> bool:
    sizes = [value.numel() for n in (a, b) if isinstance(value := n.meta.get("val"), torch.Tensor)]
    return len(sizes) == 2 and all(isinstance(size, int) for size in sizes) and sizes[0] == sizes[1]
