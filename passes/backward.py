"""Which nodes of a joint graph compute gradients."""

from __future__ import annotations

from torch import fx


def backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on a tangent; empty for an inference graph."""
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if "tangents" in str(node.target):
                backward.add(node)
        elif any(source in backward for source in node.all_input_nodes):
            backward.add(node)
    return backward
