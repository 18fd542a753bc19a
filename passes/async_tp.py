"""Shapes that Inductor's async tensor parallelism (``micro_pipeline_tp``) matches.

A gemm in front of a reduce-scatter is cut into pieces that are sent while the next one is computed. For an
activation ``[batch, sequence, features]`` the matcher wants ::

    _scaled_mm(reshape(a, [rows, k]), ...) -> reshape(.., [batch, sequence, n]) -> reduce_scatter

with a view on *both* sides of the gemm. Float8 operands are cast as matrices, so the first one is missing.
:func:`expose_gemms` puts it there: a view to three dimensions and back, which costs nothing.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from f8fx.torch_private import c10d

from .operand import SAME_ORDER, shape_of
from .rewrite import Inserter, Provenance

aten = torch.ops.aten

_VIEWS = SAME_ORDER


def expose_gemms(graph: fx.Graph) -> None:
    """Gives float8 gemms in front of reduce-scatters the shape that the matcher knows, in place."""
    for node in graph.nodes:
        if node.target is c10d.reduce_scatter_tensor.default:
            view = _unscattered(node.args[0])
            gemm = view.args[0] if view.target in _VIEWS else None
            if isinstance(gemm, fx.Node) and gemm.target is aten._scaled_mm.default:
                _expose(graph, gemm, view)


def _unscattered(node: Any) -> fx.Node:
    """What is sent, before it was cut along another dimension than the first and stacked."""
    if node.target is not aten.cat.default:
        return node
    pieces = {piece.args[0] for piece in node.args[0]}
    source = pieces.pop() if len(pieces) == 1 else node
    if node.args[0][0].target is operator.getitem and source.target is aten.split.Tensor:
        return source.args[0]
    return source if node.args[0][0].target is aten.slice.Tensor else node


def _expose(graph: fx.Graph, gemm: fx.Node, view: fx.Node) -> None:
    left: Any = gemm.args[0]
    shape = shape_of(view)
    sizes = [*shape[:-1], shape_of(left)[-1]]
    if left.target in _VIEWS or len(shape) < 3 or not all(isinstance(size, int) for size in sizes):
        return
    provenance: Provenance | None = gemm.meta.get("f8fx")
    if provenance is None:
        return  # the model's own
    insert = Inserter(graph, gemm, provenance)
    apart = insert(aten.reshape.default, left, sizes)
    gemm.replace_input_with(left, insert(aten.reshape.default, apart, [-1, sizes[-1]]))
