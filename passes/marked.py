"""Tensors that are float8 already, and what reads them.

A weight that was gathered in float8 is an input of the graph as data and scales, which ``f8fx::dequantize`` (or
``dequantize_both``, where there are two copies) marks as the weight they stand for. *share* begins with folding: a
``quantize`` of a mark, in one of its formats, is the float8 tensor that was marked, or, transposed or padded, a
copy of its bytes (``relayout``). The matrices of experts are quantized below each other; so are those there.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

import torch
from torch import fx

from f8fx import ops

from . import fqn
from .experts import stacked
from .rewrite import Inserter, erase_unused
from .sizes import shape_of

aten = torch.ops.aten

_PLAIN = (1, 1)
#: As ``partitioner_tag``: not to be computed in the forward and saved.
IN_BACKWARD = "must_be_in_backward"


def fold(graph: fx.Graph) -> None:
    """Folds every ``quantize`` of a marked tensor in one of its formats, in place."""
    for node in list(graph.nodes):
        if node.op != "call_function" or "f8fx" not in node.meta or node.target is not ops.quantize:
            continue
        source, own_scale = node.args[:2]
        assert isinstance(source, fx.Node) and isinstance(own_scale, fx.Node)
        # the matrices of experts have the dimension that is contracted there, whatever it is of the stack
        marker, contracted = stacked(source) or (source, node.kwargs.get("dim"))
        dim = None if node.kwargs.get("dim") is None else contracted
        power_of_2 = bool(own_scale.kwargs.get("power_of_2"))
        marked = _marked(marker).get((node.kwargs["dtype"], dim, power_of_2))
        if marked is None:
            continue
        data, scale = marked
        if marker is source:
            data = _laid_out(graph, node, data)
        else:
            data, scale = (
                below_each_other(graph, node, data, contracted == 1),
                _flat(graph, own_scale, scale),
            )
        node.replace_all_uses_with(data)
        own_scale.replace_all_uses_with(scale)
        erase_unused(graph, node)


def _laid_out(graph: fx.Graph, node: fx.Node, data: fx.Node) -> fx.Node:
    """Marked data in the layout of a ``quantize``."""
    if not node.kwargs["transpose"] and tuple(node.kwargs["align"]) == _PLAIN:  # type: ignore[arg-type]
        return data
    return relaid(graph, node, data)


def relaid(graph: fx.Graph, node: fx.Node, data: fx.Node) -> fx.Node:
    """A copy of float8 data in the layout of a ``quantize``."""
    with graph.inserting_before(node):
        layout = {"transpose": node.kwargs["transpose"], "align": node.kwargs["align"]}
        copy = graph.create_node("call_function", ops.relayout, (data,), layout, "relayout")
    copy.meta.update(node.meta)  # shape, strides and dtype are the same too
    return where_it_is_read(copy)


def below_each_other(graph: fx.Graph, node: fx.Node, data: fx.Node, transposed: bool) -> fx.Node:
    """Marked data of experts as the ``quantize`` of the stack gives them."""
    insert = Inserter(graph, node, node.meta["f8fx"])
    if transposed:
        data = where_it_is_read(insert(aten.permute.default, data, [0, 2, 1]))
        data = where_it_is_read(insert.contiguous(data))
    return where_it_is_read(insert(aten.view.default, data, list(shape_of(node))))


def _flat(graph: fx.Graph, own_scale: fx.Node, scale: fx.Node) -> fx.Node:
    """The scales of experts as those of the stack."""
    insert = Inserter(graph, own_scale, own_scale.meta["f8fx"])
    return insert(aten.view.default, scale, list(shape_of(own_scale)))


def where_it_is_read(copy: fx.Node) -> fx.Node:
    """A copy or view of a mark's data, made in the half that reads it.

    A copy made in the forward would be kept until the backward: an unsharded copy of every weight. What is marked is there
    in the backward too. It need not be there in the forward, so that not even a view can be made.
    """
    if copy.meta["f8fx"].role != "output":
        copy.meta["partitioner_tag"] = IN_BACKWARD
    return copy


def _marked(marker: fx.Node) -> dict[Hashable, tuple[fx.Node, fx.Node]]:
    """The float8 copies that exist of a marked tensor: format -> (data, scale). Empty without a marker."""
    if marker.target not in ops.MARKERS:
        return {}
    tensors: Any = marker.args
    names = (("dim", "power_of_2"), ("dim_other", "power_of_2_other"))
    copies: dict[Hashable, tuple[fx.Node, fx.Node]] = {}
    for data, scale, (dim, power_of_2) in zip(tensors[::2], tensors[1::2], names, strict=False):
        form = data.meta["val"].dtype, marker.kwargs.get(dim), bool(marker.kwargs.get(power_of_2))
        copies.setdefault(form, (data, scale))
    return copies


def unfolded(graph: fx.Graph, empty: Collection[fx.Node] = ()) -> list[str]:
    """Names of the modules that read a marked tensor in high precision, one for each tensor read so.

    What they get is the float8 rounding of the tensor, since nothing else of it exists.

    Args:
        empty: matmuls of no rows, which read nothing.
    """
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in live or node.is_impure():
            live.add(node)
            if node not in empty:
                live.update(node.all_input_nodes)
    names = []
    for node in graph.nodes:
        if node in live and node.target in ops.MARKERS:
            readers = {fqn.of_node(user) for user in node.users if user in live}
            names.append(", ".join(sorted(readers)))
    return names
