"""Gemms whose rows are computed in the order of the ranks that a reduce-scatter sends them to.

Of an activation ``[batch, sequence, features]`` each rank is to get a piece of every sequence, and a collective sends
what lies together. So the result is cut along the sequence and stacked, which copies all of it in high precision ::

    y = view(_scaled_mm(left, ...), [batch, sequence, n])
    out = wait_tensor(reduce_scatter_tensor(cat(split(y, sequence / ranks, 1)), ...))

Rows of a gemm may stand in any order. :func:`reorder` puts those of the float8 operand, and their scales, into the
order in which they are sent ::

    rows = clone(permute(view(left, [batch, ranks, sequence / ranks, k]), [1, 0, 2, 3]))
    y = _scaled_mm(view(rows, [-1, k]), ...)
    out = view(wait_tensor(reduce_scatter_tensor(y, ...)), [batch, sequence / ranks, n])

What is copied then is the operand, in float8 and of this rank's features alone. And in this form Inductor's async tensor
parallelism overlaps the scatter with the gemm (:mod:`passes.async_tp`).
"""

from __future__ import annotations

import operator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx

from f8fx import ops
from f8fx.torch_private import c10d

from .elements import argument
from .fake import set_value
from .rewrite import Inserter
from .sizes import is_same, shape_of

aten = torch.ops.aten


class Sent(NamedTuple):
    """What a reduce-scatter sends, before it was cut.

    Attributes:
        value: the tensor.
        dim: the dimension that is scattered.
        cut: what cuts it into pieces of known, equal lengths and stacks them in order; nothing if that is not what is done.
    """

    value: fx.Node
    dim: int = 0
    cut: tuple[fx.Node, ...] = ()


def sent_by(scatter: fx.Node) -> Sent:
    """What a reduce-scatter sends, before it was cut along another dimension than the first."""
    cat: Any = scatter.args[0]
    if cat.target is not aten.cat.default or argument(cat, 1, "dim", 0) != 0:
        return Sent(cat)
    pieces: list[fx.Node] = cat.args[0]
    first = pieces[0]
    if not first.args or any((p.target, p.args[:1]) != (first.target, first.args[:1]) for p in pieces):
        return Sent(cat)
    source: Any = first.args[0]
    if first.target is operator.getitem and source.target is aten.split.Tensor:
        value, dim = source.args[0], argument(source, 2, "dim", 0)
        wanted: list[Any] = [(source, i) for i in range(len(pieces))]
        step, cut = source.args[1], (source, *pieces, cat)
    elif first.target is aten.slice.Tensor:
        value, dim = source, argument(first, 1, "dim", 0)
        step, cut = first.args[3] if len(first.args) > 3 else None, (*pieces, cat)
        wanted = (
            [(source, dim, i * step, (i + 1) * step) for i in range(len(pieces))] if type(step) is int else []
        )
    else:
        return Sent(cat)
    equal = type(step) is int and is_same(shape_of(value)[dim], step * len(pieces))
    in_order = [piece.args for piece in pieces] == wanted
    return Sent(value, dim % len(shape_of(value)), cut if equal and in_order else ())


def reorder(graph: fx.Graph, scatter: fx.Node, gemm: fx.Node, sent: Sent) -> bool:
    """Whether a gemm computes its rows as they are sent, from now on.

    Not where something else reads the result, where the operand is no cast (a gathered one is in memory as it is),
    or where a row of it has more bytes than one of the result.
    """
    shape: list[Any] = [*shape_of(sent.value)]
    ranks: Any = scatter.args[2]
    left, scale = gemm.args[0], gemm.args[2]
    assert isinstance(left, fx.Node) and isinstance(scale, fx.Node)
    rows, k = shape_of(left)
    n = shape_of(gemm)[1]
    if (
        not sent.cut
        or len(sent.cut[-1].args[0]) != ranks  # type: ignore[arg-type]
        or not all(type(size) is int for size in (*shape, k))
        or sent.dim == len(shape) - 1
        or (prod(shape[:-1]), shape[-1]) != (rows, n)
        or not _is_cast(left)
        or k * left.meta["val"].itemsize > n * gemm.meta["val"].itemsize
    ):
        return False
    chain = _only_for(gemm, sent, scatter)
    if chain is None or any(user.target is not c10d.wait_tensor.default for user in scatter.users):
        return False
    insert = Inserter(graph, gemm, left.meta["f8fx"], marked=False)
    apart = [prod(shape[: sent.dim]), ranks, rows // ranks // prod(shape[: sent.dim])]
    gemm.update_arg(0, _turned(insert, left, apart))
    if scale.meta["val"].numel() > 1:
        gemm.update_arg(2, _turned(insert, scale, apart, strides=[1, 1]))
    scatter.replace_input_with(scatter.args[0], gemm)  # type: ignore[arg-type]
    set_value(scatter)
    scattered = [*shape]
    scattered[sent.dim] //= ranks
    for wait in scatter.users:
        set_value(wait)
        with graph.inserting_after(wait):
            out = graph.call_function(aten.view.default, (wait, scattered))
        out.meta = dict(wait.meta)
        set_value(out)
        wait.replace_all_uses_with(out)
        out.update_arg(0, wait)
    for node in reversed(chain):
        graph.erase_node(node)
    return True


def _is_cast(node: fx.Node) -> bool:
    """Whether a float8 operand was cast here, and lies as a gemm reads it."""
    cast = node.args[0] if node.target is operator.getitem else node
    is_cast = isinstance(cast, fx.Node) and cast.target in (ops.quantize, ops.quantize_both)
    return is_cast and "f8fx" in node.meta and node.meta["val"].is_contiguous()


def _only_for(gemm: fx.Node, sent: Sent, scatter: fx.Node) -> list[fx.Node] | None:
    """What stands between a gemm and its reduce-scatter, in graph order; ``None`` if anything else reads the result."""
    chain = [*sent.cut]
    node = sent.value
    while node is not gemm:
        chain.append(node)
        node = node.args[0]  # type: ignore[assignment]
    known = {*chain, scatter}
    return sorted(chain) if all(user in known for node in (gemm, *chain) for user in node.users) else None


def _turned(
    insert: Inserter,
    matrix: fx.Node,
    apart: list[int],
    strides: list[int] | None = None,
) -> fx.Node:
    """The rows of a matrix by rank, then by batch."""
    if apart[0] == 1:
        return matrix
    rows, columns = shape_of(matrix)
    node = insert(aten.view.default, matrix, [*apart, columns])
    node = insert(aten.permute.default, node, [1, 0, 2, 3])
    node = insert.contiguous(node)
    # Inductor's matcher looks through `view`, to the operand in its former order
    node = insert(aten._unsafe_view.default, node, [rows, columns])
    return node if strides is None else insert(aten.as_strided.default, node, [rows, columns], strides)
