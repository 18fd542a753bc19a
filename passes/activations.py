"""Which tensors of a graph are activations: computed from data, and no weight in another guise.

Attention's scores, a contrastive loss's similarities and an optimizer's products multiply two of them. That is no
layer: nothing in it stays from step to step, and what is computed from it often subtracts what nearly cancels. With
dimensions for batch and heads it is a ``bmm``; without, it looks like ``x @ w``.

What cannot be told apart from a weight is none of these, so that no layer is lost: inputs of the graph and parts of
them, what is computed from parameters without contracting data (``w * mask``, a custom operator that
dequantizes), and what has as many elements as a parameter it is computed from one by one (``w / sigma(w)``,
``w - lr * grad``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .operand import KEEP_VALUES
from .parameters import OfParameters, contracts


def activations(graph: fx.Graph, parameters: OfParameters) -> set[fx.Node]:
    """The activations of a graph; none where nobody told which of its inputs are parameters."""
    found: set[fx.Node] = set()
    if not parameters.are_known:
        return found
    likenesses = set(parameters.all)  # of parameters: as many elements
    for node in graph.nodes:
        if node.op != "call_function" or node in parameters.all:
            continue
        sources = node.all_input_nodes
        if not sources:
            continue
        if _is_elementwise(node) and any(s in likenesses and _is_as_large(s, node) for s in sources):
            likenesses.add(node)
        elif contracts(node.target, custom=False) or any(source in found for source in sources):
            found.add(node)
        elif not parameters.all and node.target not in KEEP_VALUES:
            found.add(node)  # there is no parameter that it could be a likeness of
    return found


def _is_elementwise(node: fx.Node) -> bool:
    target: Any = node.target
    return torch.Tag.pointwise in getattr(target, "tags", ()) or target in KEEP_VALUES


def _is_as_large(a: fx.Node, b: fx.Node) -> bool:
    sizes = [value.numel() for n in (a, b) if isinstance(value := n.meta.get("val"), torch.Tensor)]
    return len(sizes) == 2 and all(isinstance(size, int) for size in sizes) and sizes[0] == sizes[1]
