"""Pass 5, *share*: one amax, one scale and one cast for each (tensor, granularity, layout).

`quantize` gives every matmul nodes of its own. Here

1. equal inserted nodes become one (inference graphs have no partitioner, hence no CSE, of their own;
   in training this also joins forward and backward);
2. ``quantize`` of a tensor that is float8 already folds to that (:mod:`passes.marked`, :mod:`passes.stored`);
3. the row-major and the transposed copy of one tensor become one two-output operator, which reads
   its source once, where both are made in the same half of the graph. A forward and a backward copy
   stay apart: joined, they would be made in the forward and the second one kept until the backward. For
   weights that have one scale it can be asked for (``save="fast"``): it spares a read of them in the backward.

Only inserted nodes are touched, so a graph in which nothing was converted stays as it was.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable
from typing import Any

from torch import fx

from f8fx import ops

from .backward import backward_nodes
from .elements import base_of, is_given
from .marked import fold
from .matmuls import FLOAT8_MATMULS
from .rewrite import hoist
from .stored import read_stored


class Share:
    """Joins equal nodes among those that passes inserted, in place.

    Args:
        weights_at_once: make both layouts of a weight in the forward.
    """

    def __init__(self, weights_at_once: bool = False) -> None:
        self.weights_at_once = weights_at_once

    def __call__(self, graph: fx.Graph) -> None:
        fold(graph)
        read_stored(graph)
        _join_equal(graph)
        _join_layouts(graph, self.weights_at_once)


def _inserted(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and "f8fx" in node.meta]


def _hashable(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(item) for item in value)
    # 1, 1.0 and True are equal but not the same argument
    return value if isinstance(value, fx.Node) else (type(value).__name__, value)


def _join_equal(graph: fx.Graph) -> None:
    seen: dict[Hashable, fx.Node] = {}
    for node in _inserted(graph):
        if node.target in FLOAT8_MATMULS:
            continue  # two equal matmuls are the user's
        kwargs = tuple((name, _hashable(value)) for name, value in sorted(node.kwargs.items()))
        key = (node.target, _hashable(node.args), kwargs)
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _join_layouts(graph: fx.Graph, weights_at_once: bool) -> None:
    backward = backward_nodes(graph)
    groups: dict[tuple[Any, Any], dict[bool, fx.Node]] = defaultdict(dict)
    for node in _inserted(graph):
        # copies of a gradient are both made in the backward; without a backward there is one half
        if node.target is not ops.quantize:
            continue
        source = node.args[0]
        at_once = source in backward or (weights_at_once and _is_weight(source))
        if at_once or not backward:
            key = (node.args[0], node.kwargs["dtype"])
            groups[key].setdefault(bool(node.kwargs["transpose"]), node)
    for (source, _), pair in groups.items():
        if len(pair) < 2:
            continue
        # a weight with two scales is read once more for the second, in the forward or the backward
        if not backward or source in backward or pair[False].args[1] is pair[True].args[1]:
            _join_pair(graph, pair[False], pair[True])


def _is_weight(node: Any) -> bool:
    """Whether a tensor is an input of the graph, or several side by side."""
    if node.target is ops.concat:
        return all(map(_is_weight, node.args[0]))
    return is_given(base_of(node))


def _join_pair(graph: fx.Graph, plain: fx.Node, transposed: fx.Node) -> None:
    """Replaces two ``quantize`` of one tensor by one ``quantize_both``, where the first one stood."""
    first = min(plain, transposed)
    for node in (*plain.all_input_nodes, *transposed.all_input_nodes):
        hoist(node, first)
    with graph.inserting_before(first):
        both = graph.create_node(
            "call_function",
            ops.quantize_both,
            (plain.args[0], plain.args[1], transposed.args[1]),
            {
                "dtype": plain.kwargs["dtype"],
                "dim": plain.kwargs["dim"],
                "dim_t": transposed.kwargs["dim"],
                "align": plain.kwargs["align"],
                "align_t": transposed.kwargs["align"],
            },
            "quantize_both",
        )
        outputs = [graph.call_function(operator.getitem, (both, index)) for index in (0, 1)]
    values = (plain.meta["val"], transposed.meta["val"])
    for node, value in ((both, values), *zip(outputs, values, strict=True)):
        node.meta.update(first.meta)
        node.meta["val"] = value
    for old, new in zip((plain, transposed), outputs, strict=True):
        old.replace_all_uses_with(new)
        graph.erase_node(old)
