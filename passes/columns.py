"""Sums of a tensor's columns, and what the tensor is computed from: whether a kernel can take both in one read."""

from __future__ import annotations

from collections.abc import Hashable
from typing import cast

import torch
from torch import fx

from f8fx import ops

from .elements import CASTS, SAME_ORDER, base_of, flat_base, is_pointwise, readers
from .in_memory import is_in_memory, part_in_memory
from .sizes import is_same, shape_of

aten = torch.ops.aten

#: One number, in a tensor of any size.
_CONSTANTS = frozenset((aten.full.default, aten.scalar_tensor.default))
_SUMS = (aten.sum.dim_IntList, ops.column_sums)


def side_by_side(source: fx.Node) -> list[fx.Node]:
    """The tensors whose columns, one after the other, are those of ``source``: itself, where it is no such ``concat``."""
    if source.target is ops.concat and source.args[1] == 1:
        return cast("list[fx.Node]", source.args[0])
    return [source]


def column_sums(tensor: fx.Node) -> list[fx.Node]:
    """What adds up a tensor, in whatever shape, cast or not, to one number a column."""
    return [
        user
        for user in readers(flat_base(tensor), SAME_ORDER | CASTS)
        if user.target in _SUMS and is_same(user.meta["val"].numel(), shape_of(tensor)[1])
    ]


def is_over_rows(node: fx.Node) -> bool:
    """Whether a sum is over all dimensions but the last."""
    rank = len(shape_of(cast("fx.Node", node.args[0])))
    dims = cast("list[int] | None", node.args[1]) or range(rank)  # over all of them
    return {dim % rank for dim in dims} == {*range(rank - 1)}


def inputs_of(source: fx.Node) -> set[Hashable] | None:
    """The tensors in memory, or parts of them, that a value is computed from element by element; ``None`` if it is not."""
    rows, columns = shape_of(source)
    seen: set[fx.Node] = set()
    found: set[Hashable] = set()
    todo = [source]
    while todo:
        node = todo.pop()
        value = node.meta.get("val")
        if node in seen or not isinstance(value, torch.Tensor):
            continue
        seen.add(node)
        count = value.numel()
        of_scales = is_same(count, rows) or is_same(count, columns)
        if "f8fx" in node.meta and of_scales and not is_same(count, rows * columns):
            found.add(node)  # scales of a gemm, which are written
            continue
        if not is_same(count, 1) and not is_same(value.shape[-1], columns):
            return None  # a number a row: the mean of a norm
        if node.target in _CONSTANTS:
            continue
        if is_in_memory(node):
            found.add(base_of(node))
        elif (part := part_in_memory(node)) is not None:
            found.add(part)
        elif node.target in SAME_ORDER | CASTS or is_pointwise(node):
            todo.extend(node.all_input_nodes)
        else:
            return None
    return found
