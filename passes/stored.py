"""Tensors that a model keeps in float8 and casts up to compute with, read as they are.

A checkpoint in float8 is used so: ``w8.to(bfloat16)``, or ``(w8.to(float32) * scale).to(bfloat16)`` where its numbers
were scaled; so are activations that a model quantizes itself. What a matmul reads is then an operand of a float8 gemm
already, with the scale it was stored with. To quantize it again would cost an amax and a cast, and round it a second
time. *share* replaces these, as it does those of what was gathered in float8 (:mod:`passes.marked`).

The gemm computes with the numbers as they are stored, where the model multiplies their scale in and rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from f8fx import ops
from f8fx.hardware import ALIGNMENT
from f8fx.torch_private import as_strided_keeps_offsets, overwritten_inputs

from .elements import CASTS, SAME_ORDER, stays_on_device
from .experts import stacked
from .gemm import Operand
from .marked import below_each_other, relaid, where_it_is_read
from .rewrite import Inserter, erase_unused
from .sizes import is_same, is_same_shape, shape_of
from .written import keeps_its_values

aten = torch.ops.aten

#: dtypes to which every float8 number can be cast without a rounding.
_WIDER = (torch.bfloat16, torch.float16, torch.float32)
_SCALED = (aten.mul.Tensor, aten.div.Tensor)


@dataclass(frozen=True)
class Stored:
    """A matrix, or one for each expert, that is float8 times a scale.

    Attributes:
        matrix: the product, in high precision.
        data: the float8 tensor it is made from.
        views: what gives it the shape of the matrix, keeping the order of the elements; first to last.
        scale: what its numbers are multiplied by; ``None``: they were not scaled.
        divides: they are divided by it instead.
    """

    matrix: fx.Node
    data: fx.Node
    views: tuple[fx.Node, ...] = ()
    scale: fx.Node | float | None = None
    divides: bool = False

    def serves(self, dtype: torch.dtype, dim: int | None) -> bool:
        """Whether it is an operand of float8 gemms as it is.

        Args:
            dtype: what they read.
            dim: the dimension of the matrix, from its end (-1 or -2), that has one scale; ``None``: there is one for all.
        """
        if self.data.meta["val"].dtype != dtype:
            return False
        if not isinstance(self.scale, fx.Node) or _is_one(shape_of(self.scale)):
            return True
        sizes = self._scale_sizes()
        if dim is None or not is_same(shape_of(self.data)[-1], shape_of(self.matrix)[-1]):
            return False
        if dim == -1 or self._has_the_dimensions():
            return is_same(sizes[dim], 1)
        # the dimensions in front are one of the matrix
        return len(shape_of(self.matrix)) == 2 and _is_one(sizes[:-1])

    def inverse(self, insert: Inserter, dim: int | None) -> fx.Node:
        """What a gemm multiplies by, float32: one number, or one for each row or column of the matrix or matrices.

        Args:
            dim: as in :meth:`serves`, which is true.
        """
        count = [] if dim is None else [self._count(insert, dim)]
        if not isinstance(self.scale, fx.Node):
            number = 1.0 if self.scale is None else float(self.scale)
            device = self.matrix.meta["val"].device
            value = 1 / number if self.divides else number
            return insert(
                aten.full.default, count, value, dtype=torch.float32, device=device, pin_memory=False
            )
        scale = self.scale
        if dim is None or _is_one(shape_of(scale)):
            scale = insert(aten.view.default, scale, [])
            if count:
                scale = insert.contiguous(insert(aten.expand.default, scale, count))
        else:
            sizes = [insert.size(self.data, i) for i in range(len(shape_of(self.data)))]
            sizes[dim] = 1
            if dim == -2 and not self._has_the_dimensions():
                sizes[:-1] = [1] * (len(sizes) - 1)
            if not is_same_shape(shape_of(scale), [_value(size) for size in sizes]):
                scale = insert(aten.expand.default, scale, sizes)
            if not scale.meta["val"].is_contiguous():
                scale = insert.contiguous(scale)
            scale = insert(aten.view.default, scale, count)
        if scale.meta["val"].dtype != torch.float32:
            scale = insert(torch.ops.prims.convert_element_type.default, scale, torch.float32)
        if self.divides:
            return insert(aten.reciprocal.default, scale)
        if count and not _begins_where_gemms_read(scale.meta["val"]):
            scale = insert(ops.materialize, scale, whole=True)
        return scale

    def _has_the_dimensions(self) -> bool:
        """Whether those of the data, whose last one is the matrix's, are those of the matrix, or of the matrices of experts."""
        sizes, own = shape_of(self.data), shape_of(self.matrix)
        return len(sizes) == len(own) and (len(own) == 2 or is_same_shape(sizes, own))

    def _scale_sizes(self) -> tuple:
        """The sizes of the scale, as many as the data has."""
        assert isinstance(self.scale, fx.Node)
        sizes = shape_of(self.scale)
        return (1,) * (len(shape_of(self.data)) - len(sizes)) + sizes

    def _count(self, insert: Inserter, dim: int) -> int | fx.Node:
        """How many rows or columns the matrix has, or all matrices below each other."""
        other = insert.size(self.matrix, len(shape_of(self.matrix)) + (-3 - dim))
        if len(shape_of(self.matrix)) == 2:
            return other
        return shape_of(self.matrix)[0] * other  # of experts all sizes are numbers


def stored(matrix: fx.Node, overwritten: Collection[fx.Node]) -> Stored | None:
    """What a matrix in high precision is made from, if that is float8.

    Args:
        overwritten: inputs of the graph that get new values: the cast is what keeps those they have now.
    """
    views: list[fx.Node] = []
    node = matrix
    while node.op == "call_function" and node.target in SAME_ORDER:
        views.insert(0, node)
        node = node.args[0]  # type: ignore[assignment]
    product = _uncast(node)
    scale: fx.Node | float | None = None
    data = product
    if product.target in _SCALED:
        first, second = product.args[:2]
        if product.target is aten.mul.Tensor and not _is_float8(_uncast(first)):
            first, second = second, first
        data, scale = _uncast(first), second  # the scale as the model rounds it
    if _is_float8(matrix) or not _is_float8(data) or not is_same_shape(shape_of(data), shape_of(product)):
        return None
    if views and not data.meta["val"].is_contiguous():
        return None
    if scale is not None and not _is_scale(scale, data):
        return None
    tensors = (data, scale) if isinstance(scale, fx.Node) else (data,)
    if not all(keeps_its_values(tensor, overwritten) for tensor in tensors):
        return None
    return Stored(matrix, data, tuple(views), scale, product.target is aten.div.Tensor)


def contracted(operand: Operand, is_left: bool) -> int:
    """The dimension that a gemm sums over, from the end of the tensor that its operand is or is the transpose of."""
    return -2 if operand.transposed == is_left else -1


def read_stored(graph: fx.Graph) -> None:
    """Replaces every ``quantize`` of what is float8 already, and its scale, in place."""
    overwritten = frozenset(overwritten_inputs(graph))
    for node in list(graph.nodes):
        if node.op != "call_function" or "f8fx" not in node.meta or node.target is not ops.quantize:
            continue
        source, scale = node.args[:2]
        assert isinstance(source, fx.Node) and isinstance(scale, fx.Node)
        stack = stacked(source)
        found = stored(stack[0] if stack else source, overwritten)
        dim: int | None = None
        if node.kwargs["dim"] is not None:
            dim = (stack[1] - 3) if stack else node.kwargs["dim"] - 2  # type: ignore[operator]
        if found is None or not found.serves(node.kwargs["dtype"], dim):  # type: ignore[arg-type]
            continue
        _replace(graph, node, scale, found, dim, stack)


def _replace(
    graph: fx.Graph,
    node: fx.Node,
    scale: fx.Node,
    found: Stored,
    dim: int | None,
    stack: tuple[fx.Node, int] | None,
) -> None:
    inverse = found.inverse(Inserter(graph, scale, scale.meta["f8fx"]), dim)
    insert = Inserter(graph, node, node.meta["f8fx"])
    data = found.data
    for view in found.views:
        data = insert(view.target, data, *view.args[1:], **view.kwargs)  # type: ignore[arg-type]
    data = below_each_other(graph, node, data, stack[1] == 1) if stack else _laid_out(insert, node, data)
    node.replace_all_uses_with(data)
    for user in [user for user in scale.users if user is not node]:
        assert user.target is aten.reciprocal.default  # `quantize` inserts no other
        user.replace_all_uses_with(inverse)
        graph.erase_node(user)
    erase_unused(graph, node)


def _laid_out(insert: Inserter, node: fx.Node, data: fx.Node) -> fx.Node:
    """Float8 data as a ``quantize`` gives it: itself, if it lies in memory so, or else a copy."""
    value: torch.Tensor = data.meta["val"]
    if not any(size > 1 for size in node.kwargs["align"]) and _is_aligned(value):  # type: ignore[union-attr, operator]
        if not node.kwargs["transpose"] and _is_row_major(value):
            return data
        if node.kwargs["transpose"] and _is_row_major(value.t()):
            return where_it_is_read(insert(aten.permute.default, data, [1, 0]))
    return relaid(insert.graph, node, data)


def _is_row_major(value: torch.Tensor) -> bool:
    """Whether a matrix has the very strides that float8 gemms ask for."""
    return is_same(value.stride(1), 1) and is_same(value.stride(0), value.shape[1])


def _is_aligned(value: torch.Tensor) -> bool:
    """Whether float8 data begin where gemms can read them, as far as is known."""
    offset = value.storage_offset()
    return isinstance(offset, int) and offset % ALIGNMENT == 0


def _begins_where_gemms_read(scale: torch.Tensor) -> bool:
    """Whether gemms can read a vector of scales where it lies, which may be inside of others, as far as is known."""
    offset = scale.storage_offset()
    if not isinstance(offset, int) or offset * scale.itemsize % ALIGNMENT:
        return False
    return offset == 0 or as_strided_keeps_offsets()  # by which it becomes a row or column


def _uncast(node: Any) -> Any:
    """What a tensor is a cast of, without a rounding if that is float8; other arguments as they are."""
    while (
        isinstance(node, fx.Node)
        and node.target in CASTS
        and node.meta["val"].dtype in _WIDER
        and stays_on_device(node)
    ):
        node = node.args[0]
    return node


def _is_float8(value: object) -> bool:
    return (
        isinstance(value, fx.Node)
        and isinstance(tensor := value.meta.get("val"), torch.Tensor)
        and (tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1)
    )


def _is_scale(scale: Any, data: fx.Node) -> bool:
    """Whether a factor can be multiplied in by a gemm: a number, or a tensor of floats beside the data."""
    if not isinstance(scale, fx.Node):
        return isinstance(scale, (int, float))
    value = scale.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in _WIDER
        and value.device == data.meta["val"].device
        and len(value.shape) <= len(shape_of(data))
    )


def _value(size: int | fx.Node) -> int | torch.SymInt:
    return size.meta["val"] if isinstance(size, fx.Node) else size


def _is_one(sizes: Sequence) -> bool:
    return all(is_same(size, 1) for size in sizes)
