"""Pass 3a, *concatenations*: a tensor that is put together for float8 matmuls alone is never written.

A weight for several layers at once (``q, k, v = qkv(x).split(...)``, ``gate, up = gate_up(x).chunk(2, -1)``) has a
gradient that is put together from its parts by ``cat``, in memory, for three reads: two casts and an amax. Here
the matmuls read ``f8fx.concat`` of the parts instead, as those that `merge` has merged do: kernels that quantize
the parts write into one buffer, and the amax rides where each part is made. The same holds for a layer that reads
``cat([a, b], -1)``, or whose weight is ``cat([w_1, w_2])``. Elements, and so bits, are those there were.

Of merged layers one may have such a gradient (parallel attention and MLP): the others' stand beside its parts.

Where there is a bias, its gradient reads the tensor too: the sums of the columns, which are taken part by part.

It stays as it is where anything else reads the tensor, which is in memory then anyway, where parts are not of a size
that casts can write side by side, where there are many (each is a kernel), and where the columns of all parts are in
memory themselves and nothing is summed: there it moves no fewer bytes. It does where a gradient, or an input whose parts are
of one width, is scaled by rows for one matmul and by columns for another.
Parts that were gathered are left to `collectives`: gathers in float8 save more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import fx

from f8fx import ops
from f8fx.hardware import ALIGNMENT
from f8fx.torch_private import overwritten_inputs

from .choice import Convert
from .columns import is_over_rows
from .elements import VIEWS, argument, base_of, flat_base, is_part_of, readers
from .in_memory import is_in_memory, part_in_memory
from .origins import is_gathered
from .rewrite import Inserter, Provenance
from .sizes import is_same, shape_of

aten = torch.ops.aten

_MOST_PARTS = 4


class Concatenations:
    """Lets float8 matmuls read the parts of a ``cat``, in place."""

    def __call__(self, graph: fx.Graph, conversions: Sequence[Convert]) -> list[Convert]:
        """The conversions, with the operands they read now."""
        reading: dict[tuple[fx.Node, int], list[Convert]] = {}
        merged: dict[fx.Node, list[Convert]] = {}
        others: set[fx.Node] = set()
        overwritten = overwritten_inputs(graph)
        for conversion in conversions:
            for operand in (conversion.gemm.left, conversion.gemm.right):
                base = flat_base(operand.node)
                gemm = conversion.gemm
                is_one_matrix = not gemm.experts or (operand.kind != "weight" and not gemm.sums_groups)
                can_part = base.target is aten.cat.default and is_one_matrix
                side = _side(base, operand.node, overwritten) if can_part else None
                if side is not None:
                    reading.setdefault((base, side), []).append(conversion)
                    continue
                others.add(base)
                if base.target is ops.concat and is_one_matrix:
                    merged.setdefault(base, []).append(conversion)
        for concat, matmuls in merged.items():
            _flatten(graph, concat, matmuls, others, overwritten)
        whole: dict[fx.Node, fx.Node] = {}
        for (cat, side), matmuls in reading.items():
            sums = _sums_if_parted(cat, side, {c.gemm.node for c in matmuls}, cat, matmuls)
            if cat in others or sums is None:
                continue
            whole[cat] = _concat(graph, cat, cat, matmuls[0], side)
            for node in sums:
                _sum(graph, node, whole[cat])
        return [_reading(conversion, whole) for conversion in conversions] if whole else list(conversions)


def _sums_if_parted(
    cat: fx.Node, side: int, reading: Collection[fx.Node], operand: fx.Node, matmuls: Sequence[Convert]
) -> list[fx.Node] | None:
    """If the parts of a ``cat`` are to be read instead: the sums of its columns, which read it beside ``reading``.

    Args:
        operand: what the matmuls read: the ``cat``, or what it is a part of.
    """
    rest = sorted(readers(cat, VIEWS) - set(reading))
    sums = [node for node in rest if side == 1 and _is_column_sums(node, cat)]
    in_memory = _columns_in_memory(cat, side) and not sums and not _is_scaled_both_ways(cat, operand, matmuls)
    return None if in_memory or len(sums) < len(rest) else sums


def _flatten(
    graph: fx.Graph,
    concat: fx.Node,
    matmuls: Sequence[Convert],
    others: Collection[fx.Node],
    overwritten: Collection[fx.Node],
) -> None:
    """Lets merged matmuls read the parts of those of their parts that are put together themselves."""
    dim = cast("int", concat.args[1])
    parts: list[fx.Node] = []
    for part in _tensors(concat):
        cat = flat_base(part)
        can_part = cat.target is aten.cat.default and cat not in others
        side = _side(cat, part, overwritten) if can_part else None
        is_along = side is not None and side == dim
        sums = _sums_if_parted(cat, dim, {concat}, concat, matmuls) if is_along else None
        if sums is None:
            parts.append(part)
            continue
        for node in sums:
            _sum(graph, node, _concat(graph, cat, node, matmuls[0], dim))
        insert = _inserter(graph, concat, matmuls[0])
        parts += [_matrix(insert, each) for each in _tensors(cat)]
    concat.args = (parts, dim)


def _tensors(cat: fx.Node) -> list[fx.Node]:
    return cast("list[fx.Node]", cat.args[0])


def _side(cat: fx.Node, matrix: fx.Node, overwritten: Collection[fx.Node]) -> int | None:
    """The dimension in which the parts of a ``cat`` stand side by side in a matrix, if casts can write them so."""
    tensors = _tensors(cat)
    rank = len(shape_of(cat))
    dim = argument(cat, 1, "dim", 0)
    if rank < 2 or not 1 < len(tensors) <= _MOST_PARTS:
        return None
    if not is_same(shape_of(matrix)[-1], shape_of(cat)[-1]):
        return None
    side = 1 if dim % rank == rank - 1 else 0
    if side == 0 and (rank > 2 or dim % rank):
        return None
    fits = all(
        len(shape_of(part)) == rank
        and part.meta["val"].dtype == cat.meta["val"].dtype
        and isinstance(shape_of(part)[dim], int)
        and shape_of(part)[dim] % ALIGNMENT == 0
        and not is_gathered(part)
        and not is_part_of(part, overwritten)  # the copy is what keeps its values for the backward
        for part in tensors
    )
    return side if fits else None


def _columns_in_memory(cat: fx.Node, side: int) -> bool:
    """Whether parts that stand side by side all are in memory."""
    return side == 1 and all(
        is_in_memory(part) or part_in_memory(base_of(part)) is not None for part in _tensors(cat)
    )


def _is_scaled_both_ways(cat: fx.Node, operand: fx.Node, matmuls: Sequence[Convert]) -> bool:
    """Whether amaxes of rows and of columns are wanted of a gradient, or of an input whose parts are of one width."""
    reads = [
        (conversion, each)
        for conversion in matmuls
        for each in (conversion.gemm.left, conversion.gemm.right)
        if flat_base(each.node) is operand
    ]
    if len(matmuls) < 2 or any(c.quant_spec(each).granularity != "rowwise" for c, each in reads):
        return False
    kinds = {each.kind for _, each in reads}
    widths = {shape_of(part)[-1] for part in _tensors(cat)}
    return kinds == {"grad_output"} or (kinds == {"input"} and len(widths) == 1)


def _is_column_sums(node: fx.Node, cat: fx.Node) -> bool:
    """Whether a reader sums a tensor, not its transpose, over all dimensions but the last."""
    if node.target is not aten.sum.dim_IntList or node.kwargs:
        return False
    source = cast("fx.Node", node.args[0])
    if flat_base(source) is not cat:
        return False
    return is_same(shape_of(source)[-1], shape_of(cat)[-1]) and is_over_rows(node)


def _sum(graph: fx.Graph, node: fx.Node, whole: fx.Node) -> None:
    """Puts the sums of the columns of the parts in the place of those of the tensor."""
    value = node.meta["val"]
    with graph.inserting_before(node):
        sums = graph.call_function(ops.column_sums, (whole,))
        sums.meta.update({**node.meta, "val": value.new_empty(value.shape[-1:]), "f8fx": whole.meta["f8fx"]})
        shaped = graph.call_function(aten.view.default, (sums, list(value.shape)))
        shaped.meta.update(node.meta)
    node.replace_all_uses_with(shaped)
    graph.erase_node(node)


def _inserter(graph: fx.Graph, before: fx.Node, conversion: Convert) -> Inserter:
    gemm = conversion.gemm
    return Inserter(graph, before, Provenance(gemm.node.name, gemm.fqn, gemm.role, "concatenations"))


def _concat(graph: fx.Graph, cat: fx.Node, before: fx.Node, conversion: Convert, side: int) -> fx.Node:
    """The parts as matrices, side by side: what `cat` holds, in two dimensions."""
    insert = _inserter(graph, before, conversion)
    return insert(ops.concat, [_matrix(insert, part) for part in _tensors(cat)], side)


def _matrix(insert: Inserter, part: fx.Node) -> fx.Node:
    """``[..., k]`` -> ``[rows, k]``"""
    shape = shape_of(part)
    if len(shape) == 2:
        return part
    if not part.meta["val"].is_contiguous():
        part = insert.contiguous(part)
    return insert(aten.view.default, part, [-1, shape[-1]])


def _reading(conversion: Convert, whole: dict[fx.Node, fx.Node]) -> Convert:
    gemm = conversion.gemm
    left, right = (
        replace(operand, node=whole.get(flat_base(operand.node), operand.node))
        for operand in (gemm.left, gemm.right)
    )
    return replace(conversion, gemm=replace(gemm, left=left, right=right))
