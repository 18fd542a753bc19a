"""Which inputs of a graph are parameters, and what is computed from parameters alone.

A graph does not tell parameters from other inputs; the caller can, who has Dynamo's inputs. Where nobody did, nothing
is known to be a parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx, nn

from f8fx.torch_private import input_position

#: Key in the metadata of placeholders that are known to be parameters, not only inputs.
_PARAMETER = "f8fx_parameter"

_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv")
)


def parameter_positions(example_inputs: Sequence[Any]) -> frozenset[int]:
    """Which inputs of a Dynamo graph are parameters."""
    return frozenset(i for i, value in enumerate(example_inputs) if isinstance(value, nn.Parameter))


def mark_parameters(graph: fx.Graph, positions: Collection[int]) -> None:
    """Notes on the placeholders which are parameters.

    Args:
        positions: those of parameters among the inputs of the Dynamo graph that the graph was made of.
    """
    for node in graph.nodes:
        if node.op == "placeholder" and input_position(node) in positions:
            node.meta[_PARAMETER] = True


def is_marked(node: fx.Node) -> bool:
    """Whether a placeholder is known to be a parameter."""
    return _PARAMETER in node.meta


def of_parameters(graph: fx.Graph) -> set[fx.Node]:
    """Parameters, and what is computed from nothing else but by matmuls: ``w * 0.5``, ``w[:48]``.

    The product of two parameters can be a weight, or the queries of learned tokens.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if is_marked(node):
                found.add(node)
        elif node.op == "call_function" and node.target not in _PRODUCTS:
            sources = node.all_input_nodes
            if sources and all(source in found for source in sources):
                found.add(node)
    return found
