"""One read, two layouts: the Triton kernel. Imports Triton: only to be imported through :mod:`kernels.launch`.

A program reads one tile in the source's own order and writes it twice. Between the two stand shared
memory and this choice: *the 16-bit source* is transposed, not its float8 copy, and each copy is cast
in the layout it is stored in. Transposing 16-bit words is what ``ldmatrix.trans`` does: 8 + 8 shared
memory instructions for 64 elements a thread and one barrier, on Triton 3.6 as on 3.9. Bytes would
have to be taken apart and put together one by one; Triton 3.9, told to transpose the float8 tile, does
just that (64 one-byte loads), and the saving of one cast does not pay for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics_triton import to_float8


@triton.jit
def scale_block(scale, m, n, M, N, DIM: tl.constexpr):
    """Scales of rows ``m`` (``DIM`` 1), of columns ``n`` (0) or of all (-1), to multiply an [m, n] block with."""
    if DIM == -1:
        factor = tl.load(scale)
    elif DIM == 1:
        factor = tl.load(scale + m, m < M, 1.0)[:, None]
    else:
        factor = tl.load(scale + n, n < N, 1.0)[None, :]
    return factor


@triton.jit
def cast_transpose_kernel(
    x,
    scale,
    scale_t,
    out,
    out_t,
    M,
    N,
    stride_m,
    stride_n,
    out_rows,
    out_columns,
    out_t_rows,
    out_t_columns,
    LIMIT: tl.constexpr,
    DIM: tl.constexpr,
    DIM_T: tl.constexpr,
    WRITE: tl.constexpr,
    WRITE_T: tl.constexpr,
    PADDED: tl.constexpr,
    CLAMP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """``out[m, n] = float8(x[m, n] * scale)`` and ``out_t[n, m] = float8(x[m, n] * scale_t)``.

    Args:
        x: [M, N] of any strides.
        scale, scale_t: float32; of 1, M or N elements for ``DIM`` -1, 1 and 0.
        out: [out_rows, out_columns], contiguous; ignored, like its sizes, if not ``WRITE``.
        out_t: [out_t_rows, out_t_columns], contiguous; ignored, like its sizes, if not ``WRITE_T``.
        PADDED: an output is larger than the source; what is beyond is filled with zeros.
    """
    # one program per tile of the larger of both outputs; a 1-D grid, since the others end at 65535
    columns = tl.maximum(out_columns, out_t_rows)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    pid = tl.program_id(0)
    m = (pid // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (pid % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m[:, None] < M) & (n[None, :] < N)
    # offsets in 64 bits: 2**31 elements are one activation of a long sequence
    m_wide, n_wide = m.to(tl.int64), n.to(tl.int64)
    tile = tl.load(x + m_wide[:, None] * stride_m + n_wide[None, :] * stride_n, inside, 0.0)
    if WRITE:
        factor = scale_block(scale, m, n, M, N, DIM)
        value = to_float8(tile, factor, inside, out.dtype.element_ty, LIMIT, PADDED, CLAMP)
        target = out + m_wide[:, None] * out_columns + n_wide[None, :]
        tl.store(target, value, (m[:, None] < out_rows) & (n[None, :] < out_columns))
    if WRITE_T:
        factor = scale_block(scale_t, n, m, N, M, 1 - DIM_T if DIM_T >= 0 else -1)
        inside_t = (n[:, None] < N) & (m[None, :] < M)
        value = to_float8(tl.trans(tile), factor, inside_t, out_t.dtype.element_ty, LIMIT, PADDED, CLAMP)
        target = out_t + n_wide[:, None] * out_t_columns + m_wide[None, :]
        tl.store(target, value, (n[:, None] < out_t_rows) & (m[None, :] < out_t_columns))
