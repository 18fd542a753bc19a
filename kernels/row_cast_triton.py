"""Row amax, scale and cast in one read: the Triton kernel. Imports Triton: only through :mod:`kernels.launch`."""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics_triton import magnitude_bits, scale_of_amax, to_float8


@triton.jit
def row_cast_kernel(
    x,
    out,
    scale,
    M,
    N,
    stride_m,
    stride_n,
    out_rows,
    out_columns,
    LIMIT: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    PADDED: tl.constexpr,
    CLAMP: tl.constexpr,
    LOOP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``scale[m] = LIMIT / amax(x[m])`` and ``out[m, n] = float8(x[m, n] * scale[m])``.

    A program takes ``ROWS`` rows. Rows of up to ``BLOCK`` elements stay in registers between amax and
    cast; with ``LOOP``, longer ones are walked through twice, the second time out of the cache.

    Args:
        x: [M, N] of any strides.
        out: [out_rows, out_columns], contiguous, zeros beyond [M, N].
        scale: float32 [M], multiplies on the way in.
    """
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK)
    source = x + m.to(tl.int64)[:, None] * stride_m
    target = out + m.to(tl.int64)[:, None] * out_columns
    dtype: tl.constexpr = out.dtype.element_ty
    if LOOP:
        bits = tl.zeros([ROWS, BLOCK], tl.int32)
        for start in range(0, N, BLOCK):
            column = (start + n)[None, :]
            part = tl.load(source + column.to(tl.int64) * stride_n, (m[:, None] < M) & (column < N), 0.0)
            bits = tl.maximum(bits, magnitude_bits(part))
        amax = tl.max(bits, 1).to(tl.float32, bitcast=True)
        factor = scale_of_amax(amax, LIMIT, EPS, POWER_OF_2)
        for start in range(0, out_columns, BLOCK):
            column = (start + n)[None, :]
            inside = (m[:, None] < M) & (column < N)
            part = tl.load(source + column.to(tl.int64) * stride_n, inside, 0.0)
            value = to_float8(part, factor[:, None], inside, dtype, LIMIT, PADDED, CLAMP)
            tl.store(target + column, value, (m[:, None] < out_rows) & (column < out_columns))
    else:
        column = n[None, :]
        inside = (m[:, None] < M) & (column < N)
        row = tl.load(source + column.to(tl.int64) * stride_n, inside, 0.0)
        amax = tl.max(magnitude_bits(row), 1).to(tl.float32, bitcast=True)
        factor = scale_of_amax(amax, LIMIT, EPS, POWER_OF_2)
        value = to_float8(row, factor[:, None], inside, dtype, LIMIT, PADDED, CLAMP)
        tl.store(target + column, value, (m[:, None] < out_rows) & (column < out_columns))
    tl.store(scale + m, factor, m < M)
