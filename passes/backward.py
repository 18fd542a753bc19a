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


def has_backward(graph: fx.Graph) -> bool:
    """Whether any node computes gradients."""
    return bool(_tangents(graph)) or any(node.meta.get("autograd_backward") for node in graph.nodes)


def depending_on_tangents(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on a tangent; none in an inference graph, or one that holds the loss."""
    todo = _tangents(graph)
    backward = set(todo)
    while todo:
        found = [user for user in todo.pop().users if user not in backward]
        backward.update(found)
        todo += found
    return backward


def _tangents(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.find_nodes(op="placeholder") if is_tangent(node)]
