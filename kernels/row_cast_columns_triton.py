"""Row cast and column amaxes in one read: the Triton kernel. Imports Triton: only through :mod:`kernels.launch`."""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics_triton import magnitude_bits, scale_of_amax, to_float8


@triton.jit
def row_cast_columns_kernel(
    x,
    x1,
    x2,
    out,
    scale,
    partial,
    M,
    M1,
    M2,
    N,
    stride_m,
    LIMIT: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``scale[m] = LIMIT / amax(x[m])``, ``out[m] = float8(x[m] * scale[m])``, ``partial[p] = amax(x[rows of p], 0)``.

    ``x`` [M, N], ``x1`` [M1, N] and ``x2`` [M2, N] stand one below the other; M1 and M2 may be 0. A program takes
    ``ROWS`` rows of one of them, one after the other. A row stays in registers between amax and cast, and
    so do the amaxes of the columns from row to row.

    Args:
        stride_m: from row to row of each source; elements of a row lie side by side.
        out: [M + M1 + M2, N], contiguous.
        scale: float32 [M + M1 + M2], multiplies on the way in.
        partial: float32 [programs, N], contiguous.
        BLOCK: not less than N.
    """
    program = tl.program_id(0)
    n = tl.arange(0, BLOCK)[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    # which source, its rows, and where they begin
    second = tl.cdiv(M, ROWS)
    third = second + tl.cdiv(M1, ROWS)
    source = tl.where(program < second, x, tl.where(program < third, x1, x2))
    rows = tl.where(program < second, M, tl.where(program < third, M1, M2))
    start = tl.where(program < second, 0, tl.where(program < third, M, M + M1))
    local = program - tl.where(program < second, 0, tl.where(program < third, second, third))
    columns = tl.zeros([1, BLOCK], tl.int32)
    for step in tl.range(0, ROWS, num_stages=2):
        m = local * ROWS + step + tl.arange(0, 1)
        inside = (m[:, None] < rows) & (n < N)
        row = tl.load(source + m.to(tl.int64)[:, None] * stride_m + n, inside, 0.0)
        bits = magnitude_bits(row)
        columns = tl.maximum(columns, bits)
        factor = scale_of_amax(tl.max(bits, 1).to(tl.float32, bitcast=True), LIMIT, EPS, POWER_OF_2)
        value = to_float8(row, factor[:, None], inside, dtype, LIMIT, False, True)
        target = start + m
        tl.store(out + target.to(tl.int64)[:, None] * N + n, value, inside)
        tl.store(scale + target, factor, m < rows)
    tl.store(partial + program.to(tl.int64) * N + n, columns.to(tl.float32, bitcast=True), n < N)
