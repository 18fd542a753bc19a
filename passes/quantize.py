"""Pass 4, *quantize*: every chosen matmul becomes float8 operands and ``aten._scaled_mm``.

For ``[m, k] @ [k, n]`` the float8 gemm of Hopper takes both operands with ``k`` innermost ("NT").
So the left operand is stored as ``[m, k]`` and the right one as ``[n, k]``, each row-major, and the
gemm reads the second through a ``permute``. Whether that means a plain or a transposed copy follows
from how the operand was traced.

Emitted, tensorwise::

    amax_1  = f8fx.amax(x);                  amax_2  = f8fx.amax(w)
    scale_1 = f8fx.scale(amax_1, ...);       scale_2 = f8fx.scale(amax_2, ...)
    x_f8    = f8fx.quantize(x, scale_1, ...) w_f8    = f8fx.quantize(w, scale_2, ...)
    out     = aten._scaled_mm(x_f8, permute(w_f8), 1 / scale_1, 1 / scale_2, ...)

Every matmul gets nodes of its own here; the next pass, *share*, makes equal ones one.

The arithmetic is torchao's to the bit: rowwise results other than bfloat16 are computed in bfloat16 and
cast; a bias is added to the rounded result, unless :mod:`passes.bias` says otherwise. One thing depends on the device (:data:`RowwiseScales`):
torchao runs rowwise gemms without fast accumulation with unit scales and rescales their bfloat16 result,
since one gemm library was slow at it; where the gemm is fast, it scales its accumulator, which is the same
product rounded once instead of twice, and no kernel of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import fx

from f8fx import ops
from f8fx.hardware import ALIGNMENT
from f8fx.torch_private import size_hint

from .choice import Convert, reading
from .experts import offsets_of
from .gemm import Gemm, Operand
from .rewrite import Inserter, Provenance, take_over
from .rounding import as_written
from .sizes import shape_of

aten = torch.ops.aten
prims = torch.ops.prims


#: Where rowwise scales are applied. ``"in_gemm"``: by the gemm, to its accumulator; ``"torchao"``: the same
#: with fast accumulation, without it to the rounded result; ``"after"``: the device's gemm takes no scale
#: vectors, they are applied to a float32 result.
RowwiseScales = Literal["in_gemm", "torchao", "after"]
#: The same of a device; ``"by_size"``: of ``"in_gemm"`` and ``"torchao"`` what the cost model says is faster for a gemm.
DeviceScales = Literal["in_gemm", "torchao", "after", "by_size"]

_E5M2 = (torch.float8_e5m2, torch.float8_e5m2fnuz)


def is_scaled_after(conversion: Convert, where: RowwiseScales) -> bool:
    """Whether scales are applied to the result of a gemm, by a kernel of its own."""
    gemm, spec = conversion.gemm, conversion.spec
    return spec.is_rowwise and (
        where == "after"
        or (where == "torchao" and not spec.use_fast_accum)
        # torch's gemms that take scale vectors (RowwiseScaledMM.cu, on all but Hopper) have e4m3 on the right
        or conversion.right_dtype in _E5M2
        # of a vector of scales torch asks whether it has one element, and here that is not known (2.15)
        or None in map(size_hint, (gemm.m, gemm.n))
    )


class Quantize:
    """Rewrites the chosen matmuls, in place.

    Args:
        rowwise_scales: where the scale vectors of a gemm are applied.
    """

    def __init__(self, rowwise_scales: Callable[[Gemm], RowwiseScales]) -> None:
        self.rowwise_scales = rowwise_scales

    def __call__(self, graph: fx.Graph, conversions: Sequence[Convert]) -> None:
        results: dict[fx.Node, fx.Node] = {}
        for conversion in conversions:
            conversion = reading(conversion, results)
            gemm = conversion.gemm
            provenance = Provenance(gemm.node.name, gemm.fqn, gemm.role, "quantize")
            insert = Inserter(graph, gemm.node, provenance)
            scales = self.rowwise_scales(gemm)
            result = _GemmRewrite(conversion, scales, insert).run()
            result.meta["f8fx"] = replace(provenance, is_result=True)
            take_over(gemm.node, result)
            results[gemm.node] = result
            graph.erase_node(gemm.node)


class _GemmRewrite:
    """The nodes of one matmul."""

    def __init__(
        self,
        conversion: Convert,
        rowwise_scales: RowwiseScales,
        insert: Inserter,
    ) -> None:
        self.conversion = conversion
        self.gemm: Gemm = conversion.gemm
        self.spec = conversion.spec
        self.insert = insert
        self.is_scaled_after = is_scaled_after(conversion, rowwise_scales)

    def run(self) -> fx.Node:
        if self.gemm.sums_groups:
            return self._of_groups()
        if self.gemm.experts:
            return self._of_experts()
        gemm, conversion, insert = self.gemm, self.conversion, self.insert
        left, left_scale = self._operand(
            gemm.left, conversion.left_dtype, k_is_column=True, align=(1, _align(conversion.pad_k))
        )
        right, right_scale = self._operand(
            gemm.right,
            conversion.right_dtype,
            k_is_column=False,
            align=(_align(conversion.pad_n), _align(conversion.pad_k)),
        )
        product = self._scaled_mm(left, insert(aten.permute.default, right, [1, 0]), left_scale, right_scale)
        if gemm.node.target is aten.addmm.default and not self._adds_bias:
            product = as_written(insert, self._add_bias(product))
        if len(shape_of(gemm.node)) == 3:
            product = insert(aten.unsqueeze.default, product, 0)
        return product

    # -- operands

    def _operand(
        self, operand: Operand, dtype: torch.dtype, k_is_column: bool, align: tuple[int, int]
    ) -> tuple[fx.Node, fx.Node]:
        """The float8 copy with k innermost, and the reciprocal of its scale."""
        insert = self.insert
        spec = self.conversion.quant_spec(operand)
        source = operand.node
        rank = len(shape_of(source))
        # the stored copy is [rows, k]; the source is that, or its transpose
        transpose = operand.transposed == k_is_column
        if self.gemm.experts and operand.kind == "weight":
            source, transpose = self._below_each_other(operand), False
        elif rank > 2:
            source = insert(aten.squeeze.dims, source, list(range(rank - 2)))
        dim = None if spec.granularity == "tensorwise" else (0 if transpose else 1)
        amax = insert(ops.amax, source, dim)
        scale = insert(ops.scale, amax, dtype=dtype, power_of_2=spec.power_of_2_scale)
        data = insert(
            ops.quantize, source, scale, dtype=dtype, dim=dim, transpose=transpose, align=list(align)
        )
        return data, insert(aten.reciprocal.default, scale)

    # -- experts

    def _of_experts(self) -> fx.Node:
        """A grouped gemm. The matrices of all experts are quantized as one, of all their rows below each other."""
        gemm, conversion, insert = self.gemm, self.conversion, self.insert
        experts, n = gemm.experts, shape_of(gemm.node)[1]
        left, left_scale = self._operand(gemm.left, conversion.left_dtype, True, (1, 1))
        right, right_scale = self._operand(gemm.right, conversion.right_dtype, False, (1, 1))
        matrices = insert(aten.view.default, right, [experts, n, shape_of(right)[1]])
        if shape_of(right_scale):
            right_scale = insert(aten.view.default, right_scale, [experts, n])
        else:  # one for all
            expanded = insert(aten.expand.default, right_scale, [experts, n])
            right_scale = insert.contiguous(expanded)
        columns = insert(aten.permute.default, matrices, [0, 2, 1])
        return self._grouped_mm(left, columns, left_scale, right_scale, offsets_of(gemm.node))

    def _grouped_mm(self, *operands: fx.Node) -> fx.Node:
        gemm, insert = self.gemm, self.insert
        if gemm.device.type == "cpu":
            return insert(ops.grouped_mm, *operands, dtype=gemm.dtype)
        fast = self.spec.use_fast_accum
        return insert(aten._scaled_grouped_mm.default, *operands, None, None, gemm.dtype, fast)

    def _of_groups(self) -> fx.Node:
        """The sums over the rows of each expert, for which these are padded to multiples of 16."""
        gemm, conversion, insert = self.gemm, self.conversion, self.insert
        offsets = offsets_of(gemm.node)
        ends = insert(ops.padded_ends, offsets)
        left, left_scale = self._columns(gemm.left, conversion.left_dtype, True, offsets, ends)
        right, right_scale = self._columns(gemm.right, conversion.right_dtype, False, offsets, ends)
        return self._grouped_mm(
            left, insert(aten.permute.default, right, [1, 0]), left_scale, right_scale, ends
        )

    def _columns(
        self, operand: Operand, dtype: torch.dtype, k_is_column: bool, offsets: fx.Node, ends: fx.Node
    ) -> tuple[fx.Node, fx.Node]:
        """The float8 copy of an operand's columns, with rows innermost, and the reciprocals of their scales."""
        insert, source = self.insert, operand.node
        spec = self.conversion.quant_spec(operand)
        if (rank := len(shape_of(source))) > 2:
            source = insert(aten.squeeze.dims, source, list(range(rank - 2)))
        if operand.transposed != k_is_column:
            source = insert(aten.permute.default, source, [1, 0])
        amax = insert(ops.amax_groups, source, offsets)
        scale = insert(ops.scale, amax, dtype=dtype, power_of_2=spec.power_of_2_scale)
        data = insert(ops.quantize_groups, source, scale, offsets, ends, dtype=dtype)
        inverse = insert(aten.reciprocal.default, scale)
        return data, insert(aten.view.default, inverse, [-1])

    def _below_each_other(self, operand: Operand) -> fx.Node:
        """``[experts, n, k]`` or ``[experts, k, n]`` -> ``[experts * n, k]``"""
        insert, matrices = self.insert, operand.node
        if not operand.transposed:
            matrices = insert(aten.permute.default, matrices, [0, 2, 1])
        if not matrices.meta["val"].is_contiguous():
            matrices = insert.contiguous(matrices)
        experts, rows, columns = shape_of(matrices)
        return insert(aten.view.default, matrices, [experts * rows, columns])

    # -- the gemm

    @property
    def _adds_bias(self) -> bool:
        """Whether the gemm adds the bias: not before its scales, which a merged one may get where its parts would not."""
        return self.conversion.adds_bias and not self.is_scaled_after

    def _scaled_mm(self, left: fx.Node, right: fx.Node, left_scale: fx.Node, right_scale: fx.Node) -> fx.Node:
        """The product in the dtype of the matmul it replaces, padding sliced off."""
        insert, spec, wanted = self.insert, self.spec, self.gemm.dtype
        after = self.is_scaled_after
        bias = self.gemm.node.args[0] if self._adds_bias else None
        computed = wanted
        if spec.is_rowwise and wanted != torch.bfloat16:
            computed = torch.bfloat16
        if after and not spec.scales_after_gemm:
            computed = torch.float32  # the device applies no scale vectors: one rounding, at the end
        if after:
            one = insert(
                aten.full.default, [], 1.0, dtype=torch.float32, device=self.gemm.device, pin_memory=False
            )
            scales = (one, one)
        elif spec.is_rowwise:
            scales = (
                self._vector(left_scale, left, 0, 1),
                self._vector(right_scale, right, 1, ALIGNMENT if self.conversion.pad_n else 1),
            )
        else:
            scales = (left_scale, right_scale)
        product = insert(
            aten._scaled_mm.default, left, right, *scales, bias, None, computed, spec.use_fast_accum
        )
        if self.conversion.pad_n:
            product = self._slice_columns(product)
        if after:
            product = as_written(insert, self._rescale(product, left_scale, right_scale, computed))
        if product.meta["val"].dtype != wanted:
            product = as_written(insert, insert(prims.convert_element_type.default, product, wanted))
        return product

    def _vector(self, scale: fx.Node, data: fx.Node, dim: int, align: int) -> fx.Node:
        """A scale as ``_scaled_mm`` takes it beside a vector: ``[m, 1]`` or ``[1, n]``."""
        insert = self.insert
        if not shape_of(scale):
            scale = insert.contiguous(insert(aten.expand.default, scale, [insert.size(data, dim)]))
        elif align > 1:
            missing = _missing(insert, scale, align)
            scale = insert(aten.constant_pad_nd.default, scale, [0, missing], 1.0)
        # not `unsqueeze`: Inductor gives size-1 dimensions strides that `_scaled_mm` rejects
        size = insert.size(scale, 0)
        sizes, strides = ([size, 1], [1, 1]) if dim == 0 else ([1, size], [size, 1])
        return insert(aten.as_strided.default, scale, sizes, strides)

    def _rescale(self, product: fx.Node, left: fx.Node, right: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``product * (left outer right)``, multiplied in float32 and rounded once to `dtype`."""
        insert = self.insert
        if shape_of(left):
            left = insert(aten.unsqueeze.default, left, 1)
        if shape_of(right):
            right = insert(aten.unsqueeze.default, right, 0)
        factor = insert(aten.mul.Tensor, left, right)
        if product.meta["val"].dtype != torch.float32:
            product = insert(prims.convert_element_type.default, product, torch.float32)
        scaled = insert(aten.mul.Tensor, product, factor)
        return insert(prims.convert_element_type.default, scaled, dtype) if dtype != torch.float32 else scaled

    def _slice_columns(self, product: fx.Node) -> fx.Node:
        right = self.gemm.right
        columns = len(shape_of(right.node)) - (2 if right.transposed else 1)
        end = self.insert.size(right.node, columns)
        sliced = self.insert(aten.slice.Tensor, product, 1, 0, end)
        return self.insert.contiguous(sliced)

    # -- around it

    def _add_bias(self, product: fx.Node) -> fx.Node:
        """``beta * bias + alpha * product``, in the dtype of the matmul."""
        insert, node = self.insert, self.gemm.node
        bias, alpha, beta = node.args[0], node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
        if alpha != 1:
            product = insert(aten.mul.Tensor, product, alpha)
        if beta == 0:
            return product  # by definition the bias is not even read
        if beta != 1:
            bias = insert(aten.mul.Tensor, bias, beta)
        return insert(aten.add.Tensor, product, bias)


def _align(pad: bool) -> int:
    return ALIGNMENT if pad else 1


def _missing(insert: Inserter, vector: fx.Node, multiple: int):
    """How many elements a vector lacks to a multiple: a number, or a node where it is dynamic."""
    size = insert.size(vector, 0)
    if isinstance(size, int):
        return (-size) % multiple
    return insert(operator.mod, insert(operator.neg, size), multiple)
