"""Row cast and column amaxes in one read: the Triton kernel. Imports Triton: only through :mod:`kernels.launch`."""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics_triton import magnitude_bits, scale_of_amax, to_float8


@triton.jit
def row_cast_columns_kernel(
    x0,
    x1,
    x2,
    x3,
    x4,
    x5,
    x6,
    x7,
    out,
    inverse,
    amaxes,
    M0,
    M1,
    M2,
    M3,
    M4,
    M5,
    M6,
    M7,
    G0,
    G1,
    G2,
    G3,
    G4,
    G5,
    G6,
    G7,
    N,
    stride_m,
    LIMIT: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``scale = LIMIT / amax(x[m])``, ``out[m] = float8(x[m] * scale)``, ``inverse[m] = 1 / scale``, and for each group
    ``amaxes[g] = amax(x[rows of g], 0)``.

    ``x``: ``x0`` [M0, N] to ``x7`` [M7, N] one below the other; heights may be 0. A program takes
    ``ROWS`` rows of one of them, one after the other. A row stays in registers between amax and cast, and
    so do the amaxes of the columns from row to row; the next row is on its way to shared memory meanwhile.

    Args:
        G0 to G7: the group of each tensor, a row of ``amaxes``.
        stride_m: from row to row of each source; elements of a row lie side by side.
        out: [M0 + ... + M7, N], contiguous.
        inverse: float32 [M0 + ... + M7], multiplies on the way out.
        amaxes: int32 [groups, N], contiguous, zeros: the bits of float32, which order as the numbers do, as no sign
            is set, with NaN above all. A maximum is the same in any order.
        EACH: if not 0, ``x0`` is all there is, and its next ``EACH`` rows are the next group.
        BLOCK: not less than N.
    """
    program = tl.program_id(0)
    n = tl.arange(0, BLOCK)[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    # which source, its rows, where they begin, and which of its programs this is; spelled out, since torch reads
    # from the compiled code what is written to, and takes what a function is given for written
    sources = (x0, x1, x2, x3, x4, x5, x6, x7)
    heights = (M0, M1, M2, M3, M4, M5, M6, M7)
    groups = (G0, G1, G2, G3, G4, G5, G6, G7)
    source, rows, group, start, local = x0, M0, G0, 0, program
    if EACH:
        programs = tl.cdiv(EACH, ROWS)
        group, local = program // programs, program % programs
        start = group * EACH
        source, rows = x0 + start.to(tl.int64) * stride_m, EACH
    else:
        for index in tl.static_range(1, 8):
            programs = tl.cdiv(rows, ROWS)
            beyond = local >= programs
            local = tl.where(beyond, local - programs, local)
            start = tl.where(beyond, start + rows, start)
            source = tl.where(beyond, sources[index], source)
            group = tl.where(beyond, groups[index], group)
            rows = tl.where(beyond, heights[index], rows)
    columns = tl.zeros([1, BLOCK], tl.int32)
    # three stages are two buffers: a row comes while the one before it is worked on. Two stages are one buffer, which
    # is filled when the row in it is done with, and waited for at once
    for step in tl.range(0, ROWS, num_stages=3):
        m = local * ROWS + step + tl.arange(0, 1)
        inside = (m[:, None] < rows) & (n < N)
        row = tl.load(source + m.to(tl.int64)[:, None] * stride_m + n, inside, 0.0)
        bits = magnitude_bits(row)
        columns = tl.maximum(columns, bits)
        factor = scale_of_amax(tl.max(bits, 1).to(tl.float32, bitcast=True), LIMIT, EPS, POWER_OF_2)
        # no clamp: scaled by its own row's amax, nothing is further beyond LIMIT than by a rounding, which to float8 is LIMIT
        value = to_float8(row, factor[:, None], inside, dtype, LIMIT, False, False)
        target = start + m
        tl.store(out + target.to(tl.int64)[:, None] * N + n, value, inside)
        tl.store(inverse + target, tl.div_rn(tl.full(factor.shape, 1.0, tl.float32), factor), m < rows)
    tl.atomic_max(amaxes + group * N + n, columns, n < N, sem="relaxed")
