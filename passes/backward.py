"""Which nodes of a joint graph compute gradients."""

from __future__ import annotations

from torch import fx


def is_tangent(node: fx.Node) -> bool:
    """Whether a node is the gradient of an output, as AOTAutograd names those among the inputs."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on a tangent; empty for an inference graph."""
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or any(source in backward for source in node.all_input_nodes):
            backward.add(node)
    return backward
