"""Row cast and column amaxes in one read: the Triton kernel. Imports Triton: only through :mod:`kernels.launch`."""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics_triton import magnitude_bits, scale_of_amax, to_float8


@triton.jit
def row_cast_columns_kernel(
    x,
    out,
    scale,
    partial,
    M,
    N,
    stride_m,
    LIMIT: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``scale[m] = LIMIT / amax(x[m])``, ``out[m] = float8(x[m] * scale[m])``, ``partial[p] = amax(x[rows of p], 0)``.

    A program takes ``ROWS`` rows, one after the other. A row stays in registers between amax and cast, and so do
    the amaxes of the columns from row to row.

    Args:
        x: [M, N]; elements of a row lie side by side.
        out: [M, N], contiguous.
        scale: float32 [M], multiplies on the way in.
        partial: float32 [programs, N], contiguous.
        BLOCK: not less than N.
    """
    program = tl.program_id(0)
    n = tl.arange(0, BLOCK)[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    columns = tl.zeros([1, BLOCK], tl.int32)
    for step in tl.range(0, ROWS, num_stages=2):
        m = program * ROWS + step + tl.arange(0, 1)
        inside = (m[:, None] < M) & (n < N)
        row = tl.load(x + m.to(tl.int64)[:, None] * stride_m + n, inside, 0.0)
        bits = magnitude_bits(row)
        columns = tl.maximum(columns, bits)
        factor = scale_of_amax(tl.max(bits, 1).to(tl.float32, bitcast=True), LIMIT, EPS, POWER_OF_2)
        value = to_float8(row, factor[:, None], inside, dtype, LIMIT, False, True)
        tl.store(out + m.to(tl.int64)[:, None] * N + n, value, inside)
        tl.store(scale + m, factor, m < M)
    tl.store(partial + program.to(tl.int64) * N + n, columns.to(tl.float32, bitcast=True), n < N)
