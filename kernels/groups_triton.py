"""Amaxes and casts of the columns of groups of rows: Triton kernels. Imports Triton: only through :mod:`kernels.launch`."""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics_triton import magnitude_bits, to_float8


@triton.jit
def amax_groups_kernel(x, offsets, amaxes, M, N, stride_m, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """``amaxes[g] = amax(abs(x[offsets[g - 1] : offsets[g]]), 0)``: float32 [G, N], contiguous.

    Args:
        x: [M, N]; elements of a row lie side by side.
        offsets: int32 [G]: where the rows of each group end. A program takes one block of the columns of one.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    group = pid // tiles_n
    n = (pid % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.load(offsets + group - 1, group > 0, 0)
    last = tl.minimum(tl.load(offsets + group), M)
    bits = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        inside = (m[:, None] < last) & (n[None, :] < N)
        part = tl.load(x + m.to(tl.int64)[:, None] * stride_m + n[None, :], inside, 0.0)
        bits = tl.maximum(bits, magnitude_bits(part))
    amax = tl.max(bits, 0).to(tl.float32, bitcast=True)
    tl.store(amaxes + group.to(tl.int64) * N + n, amax, n < N)


@triton.jit
def quantize_groups_kernel(
    x,
    scale,
    offsets,
    ends,
    out,
    M,
    N,
    WIDTH,
    G,
    stride_m,
    LIMIT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """``out[n, ends[g - 1] + i] = float8(x[offsets[g - 1] + i, n] * scale[g, n])``, rows of zeros behind those of the group.

    Args:
        x: [M, N]; elements of a row lie side by side.
        scale: float32 [G, N], contiguous.
        offsets, ends: int32 [G]: where the rows of each group end in ``x``, and where its columns do in ``out``.
        out: [N, WIDTH], contiguous. What is behind the last group is one more, without rows.
        SPLITS: programs that take turns at the blocks of rows of one group.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    split = pid % SPLITS
    group = pid // SPLITS // tiles_n
    n = (pid // SPLITS % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_group = group < G
    first = tl.load(offsets + group - 1, group > 0, 0)
    last = tl.minimum(tl.load(offsets + group, is_group, 0), M)
    first_out = tl.multiple_of(tl.load(ends + group - 1, group > 0, 0), 16)
    last_out = tl.multiple_of(tl.minimum(tl.load(ends + group, is_group, WIDTH), WIDTH), 16)
    factor = tl.load(scale + tl.minimum(group, G - 1).to(tl.int64) * N + n, n < N, 1.0)
    factor = tl.where(group < G, factor, 1.0)
    target = out + n.to(tl.int64)[:, None] * WIDTH
    # no clamp: scaled by its own amax, nothing is further beyond LIMIT than by a rounding, which to float8 is LIMIT
    for start in range(split * BLOCK_M, last_out - first_out, SPLITS * BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        source = first + m
        inside = (source[:, None] < last) & (n[None, :] < N)
        tile = tl.load(x + source.to(tl.int64)[:, None] * stride_m + n[None, :], inside, 0.0)
        value = to_float8(tl.trans(tile), factor[:, None], None, out.dtype.element_ty, LIMIT, False, False)
        place = first_out + m
        tl.store(target + place[None, :], value, (n[:, None] < N) & (place[None, :] < last_out))
