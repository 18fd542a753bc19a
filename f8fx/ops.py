"""The intermediate representation: seventeen functional operators in the ``f8fx`` namespace.

=====================  ====================================================================
``amax``               largest magnitude, over the tensor, its rows or its columns
``amax_both``          those of the rows and of the columns, those of the columns of other tensors, and sums of columns, from
                       one read of what they are computed from
``column_sums``        those of a gradient, which are the gradient of a bias
``scale``              float32 factor that takes such an amax to the largest float8 number
``quantize``           float8 copy of a tensor, row-major or transposed, padded if asked
``quantize_both``      both copies at once, with one read of the source
``quantize_rowwise``   for each group of tensors that stand one below the other the row-major copy, the reciprocals of
                       its rows' scales, and the amaxes of its columns: one read. One tensor may be many ``matrices``,
                       the weights of experts, with amaxes for the columns of each
``dequantize``         marks a tensor that already is float8; ``quantize`` of it folds away
``dequantize_both``    the same for a tensor of which float8 copies in two formats exist
``relayout``           bit-exact copy of a float8 tensor, transposed and padded if asked
``concat``             tensors side by side, as one operand of a merged gemm; never written to memory:
                       ``amax``, ``column_sums`` and ``quantize`` of it read the parts where they lie
``materialize``        the same tensor, in memory: not to be computed again by every kernel that reads it. If ``whole``, in
                       memory that begins with it; else it may lie in that of another, and of a ``concat`` the parts may be
                       read where they lie
``rounded``            the same tensor, with no more digits than its dtype has: a kernel that makes and reads it keeps
                       the float32 it computed with otherwise
``amax_groups``        largest magnitudes of the columns of each group of rows, of the rows of each expert
``quantize_groups``    transposed float8 copy of such groups, zeros behind each, so that a gemm can sum over its rows
``padded_ends``        where the groups end there
``grouped_mm``         float8 matmul of rows by the matrices of their experts, or the sums over the rows of each that are the
                       gradients of these, on devices for which PyTorch has none
=====================  ====================================================================

Graphs rewritten by the passes hold these, ``aten._scaled_mm`` and movement operators, so they are
short enough to read and to keep as expected text in a test. Every operator has a schema, a fake
implementation and a definition in plain PyTorch (:mod:`kernels.cast`) that runs on any device;
:mod:`f8fx.lowerings` turns them into Inductor code.

``dim`` is the reduced dimension of a 2-D tensor: ``None`` (whole tensor), 1 (one value per row) or 0
(one per column). Scales multiply on the way in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import SymInt, Tensor

from f8fx.kernels import cast, cast_transpose, grouped, groups, row_cast_columns
from f8fx.torch_private import statically_true

_LIB = torch.library.Library("f8fx", "DEF")

_SCHEMAS = (
    "amax(Tensor x, int? dim=None) -> Tensor",
    "amax_both(Tensor x, Tensor[] others, Tensor[] summed) -> Tensor[]",
    "column_sums(Tensor x) -> Tensor",
    "scale(Tensor amax, *, ScalarType dtype, bool power_of_2=False) -> Tensor",
    "quantize(Tensor x, Tensor scale, *, ScalarType dtype, int? dim=None, bool transpose=False, "
    "int[2] align=[1, 1]) -> Tensor",
    "quantize_both(Tensor x, Tensor scale, Tensor scale_t, *, ScalarType dtype, int? dim=None, "
    "int? dim_t=None, int[2] align=[1, 1], int[2] align_t=[1, 1]) -> (Tensor, Tensor)",
    "quantize_rowwise(Tensor[] tensors, int[] groups, *, ScalarType dtype, bool power_of_2=False, int matrices=1) -> Tensor[]",
    "dequantize(Tensor data, Tensor scale, *, ScalarType dtype, int? dim=None, bool power_of_2=False) -> Tensor",
    "dequantize_both(Tensor data, Tensor scale, Tensor other, Tensor scale_other, *, ScalarType dtype, "
    "int? dim=None, int? dim_other=None, bool power_of_2=False, bool power_of_2_other=False, "
    "bool alternate=False) -> Tensor",
    "relayout(Tensor data, *, bool transpose=False, int[2] align=[1, 1]) -> Tensor",
    "concat(Tensor[] tensors, int dim) -> Tensor",
    "materialize(Tensor x, *, bool whole=False) -> Tensor",
    "rounded(Tensor x) -> Tensor",
    "amax_groups(Tensor x, Tensor offsets) -> Tensor",
    "quantize_groups(Tensor x, Tensor scale, Tensor offsets, Tensor ends, *, ScalarType dtype) -> Tensor",
    "padded_ends(Tensor offsets) -> Tensor",
    "grouped_mm(Tensor left, Tensor right, Tensor left_scale, Tensor right_scale, Tensor offsets, *, "
    "ScalarType dtype) -> Tensor",
)
_TAGS = {"rounded": (torch.Tag.pointwise,)}
for _schema in _SCHEMAS:
    _LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag, *_TAGS.get(_schema.partition("(")[0], ())))


def _amax(x: Tensor, dim: int | None = None) -> Tensor:
    return cast.amax(x, dim)


def _amax_both(x: Tensor, others: Sequence[Tensor], summed: Sequence[Tensor]) -> list[Tensor]:
    amaxes = [cast.amax(x, 1), *(cast.amax(tensor, 0) for tensor in (x, *others))]
    return [*amaxes, *(tensor.sum(0) for tensor in summed)]


def _column_sums(x: Tensor) -> Tensor:
    return x.sum(0)


def _scale(amax: Tensor, *, dtype: torch.dtype, power_of_2: bool = False) -> Tensor:
    return cast.scale(amax, dtype, power_of_2)


def _quantize(
    x: Tensor,
    scale: Tensor,
    *,
    dtype: torch.dtype,
    dim: int | None = None,
    transpose: bool = False,
    align: Sequence[int] = (1, 1),
) -> Tensor:
    return cast.quantize(x, scale, dtype, dim, transpose, list(align))


def _quantize_rowwise(
    tensors: Sequence[Tensor],
    groups: Sequence[int],
    *,
    dtype: torch.dtype,
    power_of_2: bool = False,
    matrices: int = 1,
) -> list[Tensor]:
    results = []
    for group in in_groups(tensors, groups):
        data, inverse, amaxes = row_cast_columns.reference(
            group, dtype=dtype, power_of_2=power_of_2, matrices=matrices
        )
        results += [data, inverse, amaxes.flatten()]
    return results


def in_groups(values: Sequence[Any], groups: Sequence[int]) -> list[list[Any]]:
    """The values in groups of the given sizes."""
    rest = iter(values)
    return [[next(rest) for _ in range(size)] for size in groups]


def _dequantize(
    data: Tensor, scale: Tensor, *, dtype: torch.dtype, dim: int | None = None, power_of_2: bool = False
) -> Tensor:
    return cast.dequantize(data, scale, dtype, dim)


def _dequantize_both(
    data: Tensor,
    scale: Tensor,
    other: Tensor,
    scale_other: Tensor,
    *,
    dtype: torch.dtype,
    dim: int | None = None,
    dim_other: int | None = None,
    power_of_2: bool = False,
    power_of_2_other: bool = False,
    alternate: bool = False,
) -> Tensor:
    return cast.dequantize(data, scale, dtype, dim)


def _relayout(data: Tensor, *, transpose: bool = False, align: Sequence[int] = (1, 1)) -> Tensor:
    return cast.relayout(data, transpose, list(align))


def _concat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(tensors), dim)


def _materialize(x: Tensor, *, whole: bool = False) -> Tensor:
    return x.clone()


def _copy(x: Tensor) -> Tensor:
    return x.clone()


def _quantize_groups(
    x: Tensor, scale: Tensor, offsets: Tensor, ends: Tensor, *, dtype: torch.dtype
) -> Tensor:
    return groups.quantize(x, scale, offsets, ends, dtype)


def _grouped_mm(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    offsets: Tensor,
    *,
    dtype: torch.dtype,
) -> Tensor:
    return grouped.grouped_mm(left, right, left_scale, right_scale, offsets, dtype)


for _name, _implementation in (
    ("amax", _amax),
    ("amax_both", _amax_both),
    ("column_sums", _column_sums),
    ("scale", _scale),
    ("quantize", _quantize),
    ("quantize_both", cast_transpose.reference),
    ("quantize_rowwise", _quantize_rowwise),
    ("dequantize", _dequantize),
    ("dequantize_both", _dequantize_both),
    ("relayout", _relayout),
    ("concat", _concat),
    ("materialize", _materialize),
    ("rounded", _copy),
    ("amax_groups", groups.amax),
    ("quantize_groups", _quantize_groups),
    ("padded_ends", groups.padded_ends),
    ("grouped_mm", _grouped_mm),
):
    _LIB.impl(_name, _implementation, "CompositeExplicitAutograd")


def _round_up(size: int | SymInt, multiple: int) -> int | SymInt:
    """As :func:`f8fx.kernels.cast.padding` has it."""
    if multiple == 1:
        return size
    count = (size + multiple - 1) // multiple
    return (count if statically_true(size >= 1) else torch.sym_max(count, 1)) * multiple


def _check_2d(operator: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dim() != 2:
            raise RuntimeError(f"f8fx.{operator} takes 2-D tensors, got shape {tuple(tensor.shape)}")


def _fake_float8(x: Tensor, dtype: torch.dtype, transpose: bool, align: Sequence[int]) -> Tensor:
    _check_2d("quantize", x)
    rows, columns = (x.shape[1], x.shape[0]) if transpose else (x.shape[0], x.shape[1])
    return x.new_empty((_round_up(rows, align[0]), _round_up(columns, align[1])), dtype=dtype)


@torch.library.register_fake("f8fx::amax", lib=_LIB)
def _(x, dim=None):
    _check_2d("amax", x)
    return x.new_empty(() if dim is None else (x.shape[1 - dim],), dtype=torch.float32)


@torch.library.register_fake("f8fx::amax_both", lib=_LIB)
def _(x, others, summed):
    _check_2d("amax_both", x, *others, *summed)
    sizes = [*x.shape, *(other.shape[1] for other in others)]
    amaxes = [x.new_empty((size,), dtype=torch.float32) for size in sizes]
    return [*amaxes, *(tensor.new_empty((tensor.shape[1],)) for tensor in summed)]


@torch.library.register_fake("f8fx::column_sums", lib=_LIB)
def _(x):
    _check_2d("column_sums", x)
    return x.new_empty((x.shape[1],))


@torch.library.register_fake("f8fx::scale", lib=_LIB)
def _(amax, *, dtype, power_of_2=False):
    return amax.new_empty(amax.shape, dtype=torch.float32)


@torch.library.register_fake("f8fx::quantize", lib=_LIB)
def _(x, scale, *, dtype, dim=None, transpose=False, align=(1, 1)):
    return _fake_float8(x, dtype, transpose, align)


@torch.library.register_fake("f8fx::quantize_both", lib=_LIB)
def _(x, scale, scale_t, *, dtype, dim=None, dim_t=None, align=(1, 1), align_t=(1, 1)):
    return _fake_float8(x, dtype, False, align), _fake_float8(x, dtype, True, align_t)


@torch.library.register_fake("f8fx::quantize_rowwise", lib=_LIB)
def _(tensors, groups, *, dtype, power_of_2=False, matrices=1):
    results = []
    for group in in_groups(tensors, groups):
        rows, columns = sum(x.shape[0] for x in group), group[0].shape[1]
        shapes = ((rows, columns), dtype), ((rows,), torch.float32), ((matrices * columns,), torch.float32)
        results += [group[0].new_empty(shape, dtype=kind) for shape, kind in shapes]
    return results


@torch.library.register_fake("f8fx::dequantize", lib=_LIB)
def _(data, scale, *, dtype, dim=None, power_of_2=False):
    return data.new_empty(data.shape, dtype=dtype)


@torch.library.register_fake("f8fx::dequantize_both", lib=_LIB)
def _(
    data,
    scale,
    other,
    scale_other,
    *,
    dtype,
    dim=None,
    dim_other=None,
    power_of_2=False,
    power_of_2_other=False,
    alternate=False,
):
    return data.new_empty(data.shape, dtype=dtype)


@torch.library.register_fake("f8fx::relayout", lib=_LIB)
def _(data, *, transpose=False, align=(1, 1)):
    return _fake_float8(data, data.dtype, transpose, align)


@torch.library.register_fake("f8fx::materialize", lib=_LIB)
def _(x, *, whole=False):
    return torch.empty_like(x)


@torch.library.register_fake("f8fx::rounded", lib=_LIB)
def _(x):
    return torch.empty_like(x)


@torch.library.register_fake("f8fx::amax_groups", lib=_LIB)
def _(x, offsets):
    _check_2d("amax_groups", x)
    return x.new_empty((offsets.shape[0], x.shape[1]), dtype=torch.float32)


@torch.library.register_fake("f8fx::quantize_groups", lib=_LIB)
def _(x, scale, offsets, ends, *, dtype):
    _check_2d("quantize_groups", x)
    return x.new_empty((x.shape[1], groups.width(x.shape[0], offsets.shape[0])), dtype=dtype)


@torch.library.register_fake("f8fx::padded_ends", lib=_LIB)
def _(offsets):
    return torch.empty_like(offsets)


@torch.library.register_fake("f8fx::grouped_mm", lib=_LIB)
def _(left, right, left_scale, right_scale, offsets, *, dtype):
    experts = offsets.shape if right.dim() == 2 else ()
    return left.new_empty((*experts, left.shape[0], right.shape[-1]), dtype=dtype)


@torch.library.register_fake("f8fx::concat", lib=_LIB)
def _(tensors, dim):
    first = tensors[0]
    _check_2d("concat", first)
    sizes = list(first.shape)
    for tensor in tensors[1:]:
        sizes[dim] = sizes[dim] + tensor.shape[dim]
    return first.new_empty(sizes)


amax = torch.ops.f8fx.amax.default
amax_both = torch.ops.f8fx.amax_both.default
column_sums = torch.ops.f8fx.column_sums.default
scale = torch.ops.f8fx.scale.default
quantize = torch.ops.f8fx.quantize.default
quantize_both = torch.ops.f8fx.quantize_both.default
quantize_rowwise = torch.ops.f8fx.quantize_rowwise.default
dequantize = torch.ops.f8fx.dequantize.default
dequantize_both = torch.ops.f8fx.dequantize_both.default
relayout = torch.ops.f8fx.relayout.default
concat = torch.ops.f8fx.concat.default
materialize = torch.ops.f8fx.materialize.default
rounded = torch.ops.f8fx.rounded.default
amax_groups = torch.ops.f8fx.amax_groups.default
quantize_groups = torch.ops.f8fx.quantize_groups.default
padded_ends = torch.ops.f8fx.padded_ends.default
grouped_mm = torch.ops.f8fx.grouped_mm.default

#: Those that read a tensor to make float8 numbers of it.
CASTING = frozenset((amax, quantize, quantize_both))
#: Those that mark a tensor as float8 already. ``power_of_2`` says how the scale was made: it belongs to the
#: format, and a ``quantize`` folds into a marker of its own format only. ``alternate``: the first copy
#: may be in memory in the forward only, the second in the backward only.
MARKERS = frozenset((dequantize, dequantize_both))
