"""Shapes that Inductor's async tensor parallelism (``micro_pipeline_tp``) matches, and those that it must not.

A gemm in front of a reduce-scatter is cut into pieces that are sent while the next one is computed. For an
activation ``[batch, sequence, features]`` the matcher wants ::

    _scaled_mm(reshape(a, [rows, k]), ...) -> reshape(.., [batch, sequence, n]) -> reduce_scatter

with a view on *both* sides of the gemm. Float8 operands are cast as matrices, so the first one is missing.
:func:`expose_gemms` puts it there: a view to three dimensions and back, which costs nothing.

Only where pieces of what is sent are pieces of the gemm's rows: where the first dimension is scattered, or the second and
the first is 1. Of ``[batch, sequence, features]`` with more than one sequence the rows of a piece do not lie together, unless
they are put into the order in which they are sent (:mod:`passes.by_rank`). The fused operator of torch 2.11 to 2.15 cuts a
float8 gemm into rows that do, whatever it is told (``_fused_scaled_matmul_reduce_scatter_impl``), and gives wrong numbers. So a
gemm whose rows cannot be put into another order is hidden from the matcher: views in front of it become another operator
that does the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from f8fx.torch_private import c10d

from .by_rank import reorder, sent_by
from .elements import SAME_ORDER, flat_base
from .rewrite import Inserter, Provenance
from .sizes import is_same, is_same_shape, shape_of

aten = torch.ops.aten

#: What the matcher knows as a view: Inductor makes the second of the first.
_VIEWS = (aten.view.default, aten.reshape.default)


def expose_gemms(graph: fx.Graph) -> None:
    """Gives float8 gemms in front of reduce-scatters the shape that the matcher knows, or one that it does not, in place.

    To be called when no view is put in front of a gemm any more.
    """
    for node in graph.find_nodes(op="call_function", target=c10d.reduce_scatter_tensor.default):
        sent = sent_by(node)
        gemm = flat_base(sent.value)
        if gemm.target is not aten._scaled_mm.default or "f8fx" not in gemm.meta:
            continue
        is_known = node.args[1] in ("sum", "avg")
        if is_known and _are_rows(gemm, sent.value, sent.dim):
            if not _expose(graph, gemm, sent.value):
                _hide(graph, gemm)
        elif not (is_known and reorder(graph, node, gemm, sent)):
            _hide(graph, gemm)


def _are_rows(gemm: fx.Node, sent: fx.Node, dim: int) -> bool:
    """Whether pieces along a dimension of what is sent are pieces of the gemm's rows, one after the other."""
    shape = shape_of(sent)
    has_rows = len(shape) > 1 and is_same(shape[-1], shape_of(gemm)[-1])
    return has_rows and (dim == 0 or (dim == 1 and len(shape) > 2 and is_same(shape[0], 1)))


def _expose(graph: fx.Graph, gemm: fx.Node, sent: fx.Node) -> bool:
    """Whether the gemm has a form in which it may be matched now, or is in none."""
    left: Any = gemm.args[0]
    sizes = [*shape_of(sent)[:-1], shape_of(left)[-1]]
    if len(sizes) == 2:
        return flat_base(left) is left
    if flat_base(left) is not left:
        return left.target in _VIEWS and is_same_shape(shape_of(left.args[0]), sizes)
    if all(isinstance(size, int) for size in sizes):
        provenance: Provenance = gemm.meta["f8fx"]
        insert = Inserter(graph, gemm, provenance)
        apart = insert(aten.reshape.default, left, sizes)
        gemm.replace_input_with(left, insert(aten.reshape.default, apart, [-1, sizes[-1]]))
    return True


def _hide(graph: fx.Graph, gemm: fx.Node) -> None:
    for view in _views_of(gemm.args[0]):
        source: Any = view.args[0]
        if not source.meta["val"].is_contiguous():
            insert = Inserter(graph, view, gemm.meta["f8fx"])
            source = insert.contiguous(source)
        view.target, view.args = aten._unsafe_view.default, (source, *view.args[1:])


def _views_of(node: Any) -> Iterator[fx.Node]:
    """Views that lead to a value; others between them may be dropped before the matcher looks."""
    while node.target in SAME_ORDER:
        if node.target in _VIEWS:
            yield node
        node = node.args[0]
