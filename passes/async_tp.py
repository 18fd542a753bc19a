"""Shapes that Inductor's async tensor parallelism (``micro_pipeline_tp``) matches.

A gemm in front of a reduce-scatter is cut into pieces that are sent while the next one is computed. For an
activation ``[batch, sequence, features]`` the matcher wants ::

    _scaled_mm(reshape(a, [rows, k]), ...) -> reshape(.., [batch, sequence, n]) -> reduce_scatter

with a view on *both* sides of the gemm. Float8 operands are cast as matrices, so the first one is missing.
:func:`expose_gemms` puts it there: a view to three dimensions and back, which costs nothing.

Only where pieces of what is sent are pieces of the gemm's rows: where the first dimension is scattered, or the second and
the first is 1. Of ``[batch, sequence, features]`` with more than one sequence the rows of a piece do not lie together. The
fused operator of torch 2.11 to 2.15 cuts a float8 gemm into rows that do, whatever it is told
(``_fused_scaled_matmul_reduce_scatter_impl``), and gives wrong numbers; so such a gemm must not be matched.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from f8fx.torch_private import c10d

from .operand import SAME_ORDER, is_same, shape_of
from .rewrite import Inserter, Provenance

aten = torch.ops.aten

_VIEWS = SAME_ORDER


def expose_gemms(graph: fx.Graph) -> None:
    """Gives float8 gemms in front of reduce-scatters the shape that the matcher knows, in place."""
    for node in graph.nodes:
        if node.target is c10d.reduce_scatter_tensor.default:
            view, dim = _unscattered(node.args[0])
            gemm = view.args[0] if view.target in _VIEWS else None
            if not isinstance(gemm, fx.Node) or gemm.target is not aten._scaled_mm.default:
                continue
            if dim == 0 or (dim == 1 and is_same(shape_of(view)[0], 1)):
                _expose(graph, gemm, view)
            else:
                _hide(graph, gemm)


def _unscattered(node: Any) -> tuple[fx.Node, int]:
    """What is sent, before it was cut along another dimension than the first and stacked; and that dimension."""
    if node.target is not aten.cat.default:
        return node, 0
    first, *_ = node.args[0]
    pieces = {piece.args[0] for piece in node.args[0]}
    source = pieces.pop() if len(pieces) == 1 else node
    if first.target is operator.getitem and source.target is aten.split.Tensor:
        return source.args[0], _dim(source, 2)
    return (source, _dim(first, 1)) if first.target is aten.slice.Tensor else (node, 0)


def _dim(node: fx.Node, index: int) -> int:
    dim: Any = node.args[index] if len(node.args) > index else node.kwargs.get("dim", 0)
    return dim % len(shape_of(node.all_input_nodes[0]))


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


def _hide(graph: fx.Graph, gemm: fx.Node) -> None:
    """Keeps a gemm from being matched whose left operand was viewed before: the matcher knows one operator for that."""
    left: Any = gemm.args[0]
    if "f8fx" not in gemm.meta or left.target not in (aten.view.default, aten.reshape.default):
        return
    source = left.args[0]
    if not source.meta["val"].is_contiguous():
        insert = Inserter(graph, left, gemm.meta["f8fx"])
        source = insert(aten.clone.default, source, memory_format=torch.contiguous_format)
    left.target, left.args = aten._unsafe_view.default, (source, *left.args[1:])
