"""Column amaxes and their scales in two stages: Triton kernels. Imports Triton: only through :mod:`kernels.launch`."""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics_triton import magnitude_bits, scale_of_amax


@triton.jit
def column_amax_kernel(
    x, partial, M, N, stride_m, stride_n, rows_per_program, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """``partial[p, n] = amax(x[p * rows_per_program :][:rows_per_program, n])``: [P, N], contiguous.

    Program (i, p) of the grid takes the columns of block i. ``rows_per_program`` is a multiple of ``BLOCK_M``.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * rows_per_program
    source = x + n.to(tl.int64)[None, :] * stride_n
    bits = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for start in range(first, tl.minimum(first + rows_per_program, M), BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        part = tl.load(source + m.to(tl.int64)[:, None] * stride_m, (m[:, None] < M) & (n[None, :] < N), 0.0)
        bits = tl.maximum(bits, magnitude_bits(part))
    amax = tl.max(bits, 0).to(tl.float32, bitcast=True)
    tl.store(partial + tl.program_id(1).to(tl.int64) * N + n, amax, n < N)


@triton.jit
def scale_of_partials_kernel(
    partial,
    scale,
    P,
    N,
    LIMIT: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """``scale[n] = LIMIT / max(partial[:, n])`` of float32 partial amaxes [P, N], contiguous."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    bits = tl.zeros([BLOCK_P, BLOCK_N], tl.int32)
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        inside = (p[:, None] < P) & (n[None, :] < N)
        part = tl.load(partial + p.to(tl.int64)[:, None] * N + n[None, :], inside, 0.0)
        bits = tl.maximum(bits, magnitude_bits(part))
    amax = tl.max(bits, 0).to(tl.float32, bitcast=True)
    tl.store(scale + n, scale_of_amax(amax, LIMIT, EPS, POWER_OF_2), n < N)
