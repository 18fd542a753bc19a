"""The operators of :mod:`f8fx.ops` in Inductor's terms.

Each lowering composes lowerings that Inductor has, so that amax, scaling and cast fuse with the
kernels around them as if they had been written out as primitives, while graphs stay short.

A ``concat`` is read part by part and never written: its amax is the largest, or the row, of its parts'
amaxes, and its casts are written by each part's kernel into one buffer.

Four things are pinned by hand:

* float8 copies get the strides the gemm needs (``[rows, k]``, k innermost): Inductor would be free to
  choose others, and ``_scaled_mm`` rejects them;
* scales are realized, so that their float64 arithmetic is done once, not once per element;
* transposed copies that a reduction over rows would store a byte at a time are cast in tiled kernels of their own, all
  that read the same in one; those of experts' matrices are transposed before they are cast, as far as the graph says;
* saturation is written as two ``where``, not as ``minimum``/``maximum``: next to a transposed 1-byte
  store, the latter's NaN-propagating form is miscompiled by Triton
  (https://github.com/triton-lang/triton/issues/11111). ``where`` lets NaN through as well. For the amax
  beside it, and for a model's own min and max, Inductor's code is changed to the same form.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, reduce
from typing import Any

import torch

from . import ops
from .group_lowerings import amax_groups, padded_ends, quantize_groups
from .kernel_forms import guarded
from .kernel_lowerings import amax_both, column_sums, is_tiled, quantize_rowwise, tiled
from .recipe import EPS
from .torch_private import (
    Lowering,
    Parts,
    express_min_max_as_where,
    tune_graphs_of,
)

aten = torch.ops.aten


@cache
def register() -> None:
    """Registers the lowerings with Inductor, once; the backend calls it before the first compile."""
    express_min_max_as_where()
    tune_graphs_of("f8fx")
    table = Lowering()

    def register_guarded(op: Any, fused: Callable[..., Any]) -> None:
        table.register(op, guarded(table, op, fused))

    register_guarded(ops.amax, lambda x, dim=None: _amax(table, x, dim))
    table.register(ops.scale, lambda amax, **kwargs: _scale(table, amax, **kwargs))
    register_guarded(ops.quantize, lambda x, scale, **kwargs: _quantize(table, x, scale, **kwargs))
    register_guarded(ops.quantize_both, lambda *args, **kwargs: _quantize_both(table, *args, **kwargs))
    table.register(ops.quantize_rowwise, lambda *args, **kwargs: quantize_rowwise(table, *args, **kwargs))
    table.register(ops.amax_groups, lambda x, offsets: amax_groups(table, x, offsets))
    table.register(ops.quantize_groups, lambda *args, **kwargs: quantize_groups(table, *args, **kwargs))
    table.register(ops.padded_ends, lambda offsets: padded_ends(table, offsets))
    table.register(ops.column_sums, lambda x: column_sums(table, x))
    table.register(ops.amax_both, lambda *tensors: amax_both(table, *tensors))
    table.register(ops.dequantize, lambda *args, **kwargs: _dequantize(table, *args, **kwargs))
    table.register(ops.materialize, lambda x, whole=False: _materialize(table, x, whole))
    table.register(ops.rounded, table.rounded)
    table.register(ops.concat, lambda tensors, dim: table.concatenation(tensors, dim))
    table.register(ops.dequantize_both, lambda *args, **kwargs: _dequantize_both(table, *args, **kwargs))
    table.register(ops.relayout, lambda data, **kwargs: _relayout(table, data, **kwargs))


def _amax(table: Lowering, x: Any, dim: int | None) -> Any:
    whole = table.parts(x)
    if dim is None and table.is_large(x):
        # rows first: they reduce in the kernel that computes them, and one small kernel does the rest
        if whole is None:
            rows = table.realized(_amax(table, x, 1))
        elif whole.dim == 1:
            rows = _amax(table, x, 1)
        else:
            # tensors in memory may be read in fewer, longer rows
            parts = [table.longer_rows(part, len(whole.values)) for part in whole.values]
            rows = table.concatenation([table.realized(_amax(table, part, 1)) for part in parts], 0)
        with table.in_one_stage():
            return table(aten.amax, rows, [0], False)
    if whole is not None:
        amaxes = [_amax(table, part, dim) for part in whole.values]
        if dim is not None and dim != whole.dim:
            return table.concatenation(amaxes, 0)
        largest = reduce(lambda a, b: table(aten.maximum, a, b), map(table.realized, amaxes))
        # parts of a row may be computed in several kernels: none has the row at hand to cast it
        return tiled(largest) if dim == 1 else largest
    # in float32, which is exact for a maximum: Inductor's C++ code for two equal bfloat16 reductions in one
    # kernel does not compile (torch 2.13)
    magnitude = table.to_dtype(table(aten.abs, x), torch.float32)
    if dim == 0 and table.is_normalized(ops.amax):
        # beside a norm's backward it would ride in the sum over rows that the weight's gradient is, and Inductor takes
        # that sum in the kernel that reduces rows only if nothing rides in it
        with table.fused_only_with("column amax", first=True):
            return table(aten.amax, magnitude, [0], False)
    # of one row: amaxes of rows or columns that were taken before, for which one small kernel is enough
    with table.in_one_stage() if dim is None and table.is_row(x) else nullcontext():
        return table(aten.amax, magnitude, [0, 1] if dim is None else [dim], False)


def _scale(table: Lowering, amax: Any, *, dtype: torch.dtype, power_of_2: bool = False) -> Any:
    whole = table.parts(amax)
    if whole is not None:
        scales = [_scale(table, part, dtype=dtype, power_of_2=power_of_2) for part in whole.values]
        return table.concatenation(scales, whole.dim)
    floor = table(aten.clamp_min, table.to_dtype(amax, torch.float64), EPS)
    limit = table.constant_like(torch.finfo(dtype).max, floor)
    result = table.to_dtype(table(aten.div, limit, floor), torch.float32)
    if power_of_2:
        result = table(aten.exp2, table(aten.floor, table(aten.log2, result)))
    result = table.realized(result)
    return tiled(result) if is_tiled(amax) else result


def _quantize(
    table: Lowering,
    x: Any,
    scale: Any,
    *,
    dtype: torch.dtype,
    dim: int | None = None,
    transpose: bool = False,
    align: Sequence[int] = (1, 1),
) -> Any:
    whole = table.parts(x) or Parts((x,), 1)
    casts = [
        _cast(table, part, own, dtype, dim, transpose)
        for part, own in zip(whole.values, _scales(table, scale, whole, dim), strict=True)
    ]
    if transpose:
        tiled = dim == 0 or (len(casts) == 1 and table.is_normalized(ops.quantize))
    else:
        tiled = dim == 1 and table.is_turned(ops.quantize)
    zeros = [
        table.missing(size, multiple) for size, multiple in zip(_sizes(x, transpose), align, strict=True)
    ]
    with table.fused_only_with("transposed") if tiled else nullcontext():
        if len(casts) == 1 and not any(zeros):
            return table.row_major(casts[0])
        # every part is cast into its place in one buffer
        return table.filled(casts, 1 - whole.dim if transpose else whole.dim, zeros)


def _sizes(x: Any, transpose: bool) -> Sequence[Any]:
    sizes = x.get_size()
    return sizes[::-1] if transpose else sizes


def _scales(table: Lowering, scale: Any, whole: Parts, dim: int | None) -> list[Any]:
    """The scale of every part; of one part, which may have been several that are in memory now, it is all there is."""
    if dim is None or dim == whole.dim or len(whole.values) == 1:
        return [scale] * len(whole.values)
    scales = table.parts(scale)
    if scales is not None:
        return list(scales.values)
    ends = list(itertools.accumulate(part.get_size()[whole.dim] for part in whole.values))
    return [table(aten.slice, scale, 0, start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _cast(
    table: Lowering,
    x: Any,
    scale: Any,
    dtype: torch.dtype,
    dim: int | None,
    transpose: bool,
) -> Any:
    """The cast as a value that is not in memory yet."""
    value = table(aten.mul, table.to_dtype(x, torch.float32), _broadcast(table, scale, dim))
    limit = torch.finfo(dtype).max
    for bound, beyond in ((limit, aten.gt), (-limit, aten.lt)):
        value = table(aten.where, table(beyond, value, bound), table.constant_like(bound, value), value)
    return table.to_dtype(table(aten.permute, value, [1, 0]) if transpose else value, dtype)


def _relayout(table: Lowering, data: Any, *, transpose: bool = False, align: Sequence[int] = (1, 1)) -> Any:
    # bytes, so that no conversion on the way can touch a NaN's bits
    bits = table(aten.view.dtype, data, torch.uint8)
    if transpose:
        bits = table(aten.permute, bits, [1, 0])
    rows, columns = bits.get_size()
    below, behind = table.missing(rows, align[0]), table.missing(columns, align[1])
    if below or behind:
        bits = table(aten.constant_pad_nd, bits, [0, behind, 0, below], 0)
    return table(aten.view.dtype, table.row_major(table.copied(bits)), data.get_dtype())


def _quantize_both(
    table: Lowering,
    x: Any,
    scale: Any,
    scale_t: Any,
    *,
    dtype: torch.dtype,
    dim: int | None = None,
    dim_t: int | None = None,
    align: Sequence[int] = (1, 1),
    align_t: Sequence[int] = (1, 1),
) -> tuple[Any, Any]:
    # with the rows' amaxes there already, no kernel has whole rows at hand: both copies are one tiled kernel's
    with table.fused_only_with("transposed") if is_tiled(scale) else nullcontext():
        return (
            _quantize(table, x, scale, dtype=dtype, dim=dim, align=align),
            _quantize(table, x, scale_t, dtype=dtype, dim=dim_t, transpose=True, align=align_t),
        )


def _materialize(table: Lowering, x: Any, whole: bool) -> Any:
    parts = table.parts(x)
    if parts is None:
        return table.in_own_memory(x) if whole else table.realized(x)
    # the kernels that compute the parts write them to their places
    written = table.filled(parts.values, parts.dim, are_ours=False)
    return written if whole else table.side_by_side(written, parts)


def _dequantize(
    table: Lowering,
    data: Any,
    scale: Any,
    *,
    dtype: torch.dtype,
    dim: int | None = None,
    power_of_2: bool = False,
) -> Any:
    value = table(aten.div, table.to_dtype(data, torch.float32), _broadcast(table, scale, dim))
    return table.to_dtype(value, dtype)


def _dequantize_both(
    table: Lowering, data: Any, scale: Any, other: Any, scale_other: Any, *, dtype: torch.dtype, **format: Any
) -> Any:
    return _dequantize(table, data, scale, dtype=dtype, dim=format.get("dim"))


def _broadcast(table: Lowering, scale: Any, dim: int | None) -> Any:
    return scale if dim is None else table(aten.unsqueeze, scale, dim)
