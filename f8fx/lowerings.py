"""The operators of :mod:`f8fx.ops` in Inductor's terms.

Each lowering composes lowerings that Inductor has, so that amax, scaling and cast fuse with the
kernels around them as if they had been written out as primitives, while graphs stay short.

Three things are pinned by hand:

* float8 copies get the strides the gemm needs (``[rows, k]``, k innermost): Inductor would be free to
  choose others, and ``_scaled_mm`` rejects them;
* scales are realized, so that their float64 arithmetic is done once, not once per element;
* saturation is written as two ``where``, not as ``minimum``/``maximum``: next to a transposed 1-byte
  store, the latter's NaN-propagating form is miscompiled by Triton
  (https://github.com/triton-lang/triton/issues/11111). ``where`` lets NaN through as well. For the amax
  beside it, and for a model's own min and max, Inductor's code is changed to the same form.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from . import ops
from .recipe import EPS
from .torch_private import Lowering, express_min_max_as_where, inductor_lowering

aten = torch.ops.aten


@cache
def register() -> None:
    """Registers the lowerings with Inductor, once; the backend calls it before the first compile."""
    express_min_max_as_where()
    table = inductor_lowering()
    table.register(ops.amax, lambda x, dim=None: _amax(table, x, dim))
    table.register(ops.scale, lambda amax, **kwargs: _scale(table, amax, **kwargs))
    table.register(ops.quantize, lambda x, scale, **kwargs: _quantize(table, x, scale, **kwargs))
    table.register(ops.quantize_both, lambda *args, **kwargs: _quantize_both(table, *args, **kwargs))
    table.register(ops.dequantize, lambda *args, **kwargs: _dequantize(table, *args, **kwargs))
    table.register(ops.dequantize_both, lambda *args, **kwargs: _dequantize_both(table, *args, **kwargs))
    table.register(ops.relayout, lambda data, **kwargs: _relayout(table, data, **kwargs))


def _amax(table: Lowering, x: Any, dim: int | None) -> Any:
    # in float32, which is exact for a maximum: Inductor's C++ code for two equal bfloat16 reductions in one
    # kernel does not compile (torch 2.13)
    magnitude = table.to_dtype(table(aten.abs, x), torch.float32)
    return table(aten.amax, magnitude, [0, 1] if dim is None else [dim], False)


def _scale(table: Lowering, amax: Any, *, dtype: torch.dtype, power_of_2: bool = False) -> Any:
    floor = table(aten.clamp_min, table.to_dtype(amax, torch.float64), EPS)
    limit = table.constant_like(torch.finfo(dtype).max, floor)
    result = table.to_dtype(table(aten.div, limit, floor), torch.float32)
    if power_of_2:
        result = table(aten.exp2, table(aten.floor, table(aten.log2, result)))
    return table.realized(result)


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
    value = table(aten.mul, table.to_dtype(x, torch.float32), _broadcast(table, scale, dim))
    limit = torch.finfo(dtype).max
    for bound, beyond in ((limit, aten.gt), (-limit, aten.lt)):
        value = table(aten.where, table(beyond, value, bound), table.constant_like(bound, value), value)
    return table.row_major(table.to_dtype(_laid_out(table, value, transpose, align), dtype))


def _laid_out(table: Lowering, value: Any, transpose: bool, align: Sequence[int]) -> Any:
    if transpose:
        value = table(aten.permute, value, [1, 0])
    rows, columns = value.get_size()
    missing = [table.missing(size, multiple) for size, multiple in ((columns, align[1]), (rows, align[0]))]
    if any(missing):
        value = table(aten.constant_pad_nd, value, [0, missing[0], 0, missing[1]], 0)
    return value


def _relayout(table: Lowering, data: Any, *, transpose: bool = False, align: Sequence[int] = (1, 1)) -> Any:
    # bytes, so that no conversion on the way can touch a NaN's bits
    bits = _laid_out(table, table(aten.view.dtype, data, torch.uint8), transpose, align)
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
    return (
        _quantize(table, x, scale, dtype=dtype, dim=dim, align=align),
        _quantize(table, x, scale_t, dtype=dtype, dim=dim_t, transpose=True, align=align_t),
    )


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
