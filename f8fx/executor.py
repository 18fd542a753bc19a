"""``executor="eager"``: the same passes and partitioner as Inductor, without code generation.

AOTAutograd traces the joint graph with Inductor's decompositions, the passes rewrite it, Inductor's
min-cut partitioner splits it, and the two halves are run node by node. The operators of
:mod:`f8fx.ops` run by their definitions, so this is the float8 arithmetic to the bit. Compiles in a
fraction of a second: for debugging and for tests.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from .partition import Partitioner
from .torch_private import aot_backend, boxed

GraphTransform = Callable[[fx.Graph], None]


def compile_eager(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    transform: GraphTransform | None,
    partitioner: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Compiles a Dynamo graph to eager execution of its (transformed) AOTAutograd graphs.

    Args:
        transform: applied to the joint graph, or to the inference graph.
        partitioner: splits the joint graph; by default a :class:`~f8fx.partition.Partitioner`.
    """
    split = partitioner or Partitioner("lean")

    def apply(graph: fx.GraphModule) -> None:
        if transform is not None:
            _apply(transform, graph)

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        apply(joint)
        return split(joint, inputs, **kwargs)

    def run(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        return boxed(graph.forward)

    def infer(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        apply(graph)
        return run(graph, inputs)

    return aot_backend(run, infer, partition)(gm, example_inputs)


class _Traced(BaseException):
    """Ends a trace that is not to be compiled."""


def trace(gm: fx.GraphModule, example_inputs: Sequence[Any], look: GraphTransform) -> None:
    """Shows ``look`` the joint or inference graph of a Dynamo graph, and compiles nothing.

    Args:
        look: may change the graph, which is thrown away.
    """

    def stop(graph: fx.GraphModule, *_: Any, **__: Any) -> Any:
        _apply(look, graph)
        raise _Traced

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        if inputs:
            stop(joint)
        # a body, given without inputs: AOTAutograd splits those of nested regions before the graph that they are in
        _apply(look, joint)
        return Partitioner("lean")(joint, inputs, **kwargs)

    backend = aot_backend(stop, stop, partition)
    with contextlib.suppress(_Traced):
        backend(fx.GraphModule(gm, copy.deepcopy(gm.graph)), example_inputs)


def _apply(transform: GraphTransform, graph: fx.GraphModule) -> None:
    """To the graph and, as Inductor does, to the bodies of its higher-order operators."""
    for module in with_bodies(graph):
        transform(module.graph)
        module.recompile()


def with_bodies(graph: fx.GraphModule) -> list[fx.GraphModule]:
    """A graph and the bodies of its higher-order operators; its module may have others, which nothing calls any longer."""
    found = {graph: None}
    modules = dict(graph.named_modules(remove_duplicate=False))
    for node in graph.graph.find_nodes(op="get_attr"):
        body = modules.get(node.target)
        if isinstance(body, fx.GraphModule):
            found.update(dict.fromkeys(with_bodies(body)))
    return list(found)
