"""From high precision to float8 and back: the definitions, in plain PyTorch.

These functions *are* what the ``f8fx`` operators mean (:mod:`f8fx.ops`): eager graphs run them, and
every faster implementation is compared with them bit by bit. They follow torchao's eager code
(torchao 0.18, ``float8/float8_utils.py``) operation by operation, float64 division included, so
that a rewritten graph and ``Float8Linear`` give the same bits.

Conventions:

* tensors to quantize are 2-D, ``[rows, columns]``, of any strides;
* ``dim`` is the dimension an amax runs over: ``None`` gives one value for the tensor, ``1`` one per
  row, ``0`` one per column;
* scales are float32 and multiply on the way in: ``float8 = saturate(x * scale)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from f8fx.recipe import EPS


def amax(x: Tensor, dim: int | None) -> Tensor:
    """Largest magnitude of ``x``, exact, in float32: shape ``[]``, ``[rows]`` or ``[columns]``.

    NaN wins over every number. An empty reduction gives 0. Of a tensor of other rank than two, ``dim`` is gone as well.
    """
    if x.numel() == 0:
        shape = [] if dim is None else [*x.shape[:dim], *x.shape[dim + 1 :]]
        return torch.zeros(shape, dtype=torch.float32, device=x.device)
    magnitude = x.abs()
    reduced = magnitude.amax() if dim is None else magnitude.amax(dim)
    return reduced.to(torch.float32)


def scale(amax: Tensor, dtype: torch.dtype, power_of_2: bool) -> Tensor:
    """``finfo(dtype).max / max(amax, EPS)`` as float32, of the shape of ``amax``.

    The division is done in float64, as in torchao, so that compiled and eager code agree to the
    bit. With ``power_of_2`` the result is rounded down to a power of two.
    """
    limit = torch.finfo(dtype).max
    result = (limit / amax.to(torch.float64).clamp(min=EPS)).to(torch.float32)
    if power_of_2:
        result = torch.exp2(torch.floor(torch.log2(result)))
    return result


def quantize(
    x: Tensor, scale: Tensor, dtype: torch.dtype, dim: int | None, transpose: bool, align: list[int]
) -> Tensor:
    """``x * scale``, saturated and rounded to ``dtype``; contiguous.

    Args:
        x: ``[rows, columns]``.
        scale: ``[]``, ``[rows]`` for ``dim=1`` or ``[columns]`` for ``dim=0``.
        transpose: give ``[columns, rows]``, itself contiguous, instead of ``[rows, columns]``.
        align: the result's two sizes are rounded up to multiples of these (:func:`padding`), the rest being zeros.
    """
    limit = torch.finfo(dtype).max
    scaled = x.to(torch.float32) * broadcast(scale, dim)
    result = scaled.clamp(min=-limit, max=limit).to(dtype)
    return relayout(result, transpose, align)


def relayout(data: Tensor, transpose: bool, align: list[int]) -> Tensor:
    """The bytes of a float8 tensor, transposed and zero-padded as :func:`quantize` would; contiguous."""
    # of bytes: not every device can pad or copy float8, and a zero byte is +0 in every format
    bits = data.view(torch.uint8)
    if transpose:
        bits = bits.t()
    pad_rows, pad_columns = padding(bits.shape[0], align[0]), padding(bits.shape[1], align[1])
    if pad_rows or pad_columns:
        bits = torch.nn.functional.pad(bits, (0, pad_columns, 0, pad_rows))
    # a fresh tensor of canonical strides, also where a size-1 dimension would allow others
    fresh = torch.empty(bits.shape, dtype=torch.uint8, device=data.device)
    return fresh.copy_(bits).view(data.dtype)


def dequantize(data: Tensor, scale: Tensor, dtype: torch.dtype, dim: int | None) -> Tensor:
    """``data / scale`` in ``dtype``: what a float8 tensor stands for."""
    return (data.to(torch.float32) / broadcast(scale, dim)).to(dtype)


def broadcast(scale: Tensor, dim: int | None) -> Tensor:
    """``scale`` shaped so that it multiplies a ``[rows, columns]`` tensor."""
    return scale if dim is None else scale.unsqueeze(dim)


def padding(size: int, multiple: int) -> int:
    """How many elements take ``size`` up to a multiple of ``multiple``: to the first one if there is nothing to pad.

    So the strides of a padded matrix of no columns are those of a matrix, which gemms ask for, and a compiler that does not
    know its size knows that.
    """
    if multiple == 1:
        return 0
    return (-size) % multiple if size else multiple
