"""Which nodes of a graph compute gradients."""

from __future__ import annotations

from torch import fx


def is_tangent(node: fx.Node) -> bool:
    """Whether a node is the gradient of an output, as AOTAutograd names those among the inputs."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that compute gradients; empty for an inference graph.

    A graph that was traced with its loss and the loss's gradients, as TorchTitan's graph_trainer does, has no tangents:
    there they are the nodes that autograd made.
    """
    found = depending_on_tangents(graph)
    return found or {node for node in graph.nodes if node.meta.get("autograd_backward")}


def depending_on_tangents(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on a tangent; none in an inference graph, or one that holds the loss."""
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or any(source in backward for source in node.all_input_nodes):
            backward.add(node)
    return backward
