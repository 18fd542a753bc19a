"""Which matmuls are products of activations, and no layer.

Attention's scores, a contrastive loss's similarities and an optimizer's products have no weight among their operands:
nothing in them stays from step to step, and what is computed from them often subtracts what nearly cancels. With
dimensions for batch and heads such a product is a ``bmm``; without, it looks like ``x @ w``.

What cannot be told apart from a weight is no activation, so that no layer is lost: inputs of the graph and parts of
them, what is computed from parameters and buffers alone (``w * mask``), or from data too but without contracting any
(a custom operator that dequantizes), what has as many elements as the parameter that it is computed from one by
one (``w / sigma``, ``w - lr * grad``), and parts of that.
"""

from __future__ import annotations

import torch
from torch import fx

from .backward import is_tangent
from .left import ACTIVATIONS, DISTANCES, HELD
from .operand import KEEP_VALUES, flat_base, is_pointwise
from .parameters import OfParameters, contracts

#: What gives parts of tensors, or puts them together.
_PARTS = KEEP_VALUES | {torch.ops.aten.cat.default}


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
    if operand.target is not torch.ops.aten.cat.default:
        return False
    parts: list[fx.Node] = operand.args[0]  # type: ignore[assignment]
    return any(flat_base(part).target is torch.ops.aten.sum.dim_IntList for part in parts)


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
