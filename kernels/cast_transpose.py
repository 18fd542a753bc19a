"""One read, two layouts: float8 copies of a tensor, row-major and transposed, from one read of it.

:func:`cast_transpose` is ``f8fx.quantize_both`` (:mod:`f8fx.ops`) with the same arguments and the same
bits; :func:`cast` makes the row-major copy alone.
Where the Triton kernel cannot run (a CPU, a GPU without float8, a ``fnuz`` type on an NVIDIA GPU, for
which Triton has no type) the definition runs instead, and the log says why, once.

Scales are device tensors and are read by the kernel: nothing waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import cast as definition
from . import launch
from .launch import Tile, TileChoice

#: Candidates for autotuning. **Not measured yet: to be tuned on a GPU.** What speaks for each: with 128 x 128
#: all three streams (a bf16 source, both copies) move whole 128-byte cache lines and 3 programs fit on
#: a multiprocessor; with a side of 64, one stream moves half lines, and there are twice as many programs
#: to fill the machine and to overlap reading with writing. 64 elements a thread, but for one tile with 32: eight
#: 16-byte loads of bf16 in flight. No register spills: tests/kernels/test_compile.py compiles each tile, tensorwise
#: and rowwise, from bf16 for sm_90 (the first for sm_89, sm_100 and sm_120, too), and with --long from
#: every source for all four.
TILES = (
    Tile(128, 128, 8),
    Tile(64, 128, 4),
    Tile(128, 64, 4),
    Tile(64, 64, 4),
    Tile(64, 64, 2),
    Tile(256, 64, 8),
    Tile(64, 256, 8),
)


def starting_tile(rows: int, columns: int, itemsize: int, multiprocessors: int) -> Tile:
    """The tile used without autotuning: the largest that gives every multiprocessor two programs.

    Four-byte sources take half a tile, which is as many bytes.
    """
    ladder = (Tile(128, 128, 8), Tile(64, 128, 4), Tile(64, 64, 4), Tile(32, 64, 2))
    for tile in ladder[1 if itemsize > 2 else 0 :]:
        if launch.ceil_div(rows, tile.rows) * launch.ceil_div(columns, tile.columns) >= 2 * multiprocessors:
            return tile
    return ladder[-1]


def reference(
    x: Tensor,
    scale: Tensor,
    scale_t: Tensor,
    *,
    dtype: torch.dtype,
    dim: int | None = None,
    dim_t: int | None = None,
    align: Sequence[int] = (1, 1),
    align_t: Sequence[int] = (1, 1),
) -> tuple[Tensor, Tensor]:
    """What :func:`cast_transpose` computes, by definition."""
    return (
        definition.quantize(x, scale, dtype, dim, False, list(align)),
        definition.quantize(x, scale_t, dtype, dim_t, True, list(align_t)),
    )


def cast_transpose(
    x: Tensor,
    scale: Tensor,
    scale_t: Tensor,
    *,
    dtype: torch.dtype,
    dim: int | None = None,
    dim_t: int | None = None,
    align: Sequence[int] = (1, 1),
    align_t: Sequence[int] = (1, 1),
    tile: TileChoice = None,
    clamp: bool = True,
) -> tuple[Tensor, Tensor]:
    """Float8 copies of ``x`` [M, N]: [M, N] and [N, M], both contiguous.

    Args:
        x: bfloat16, float16 or float32, of any strides; fast if either is 1.
        scale: float32, multiplies on the way in; one element for ``dim=None``, [M] for ``dim=1``, [N] for
            ``dim=0``: ``dim`` is what the amax ran over.
        scale_t: the same for the transposed copy, with ``dim_t`` also in terms of ``x``.
        dtype: of both copies.
        align: the copy's two sizes are rounded up to multiples of these, the rest being zeros.
        align_t: the same for the transposed copy.
        tile: see :data:`~kernels.launch.TileChoice`.
        clamp: False leaves saturation to the GPU's conversion (NVIDIA, same bits, a third fewer instructions).

    Raises:
        ValueError: a scale's dtype or size does not fit.
    """
    if reason := launch.why_not(x, dtype):
        launch.say_fallback(reason)
        return reference(x, scale, scale_t, dtype=dtype, dim=dim, dim_t=dim_t, align=align, align_t=align_t)
    out = _empty(x, x.shape, align, dtype)
    out_t = _empty(x, x.shape[::-1], align_t, dtype)
    _launch(x, scale, scale_t, out, out_t, dtype, dim, dim_t, tile, clamp)
    return out, out_t


def cast(
    x: Tensor,
    scale: Tensor,
    *,
    dtype: torch.dtype,
    dim: int | None = None,
    align: Sequence[int] = (1, 1),
    tile: TileChoice = None,
    clamp: bool = True,
) -> Tensor:
    """The row-major copy alone; arguments as in :func:`cast_transpose`."""
    if reason := launch.why_not(x, dtype):
        launch.say_fallback(reason)
        return definition.quantize(x, scale, dtype, dim, False, list(align))
    out = _empty(x, x.shape, align, dtype)
    _launch(x, scale, None, out, None, dtype, dim, None, tile, clamp)
    return out


def _empty(x: Tensor, shape: Sequence[int], align: Sequence[int], dtype: torch.dtype) -> Tensor:
    sizes = [size + definition.padding(size, multiple) for size, multiple in zip(shape, align, strict=True)]
    return torch.empty(sizes, dtype=dtype, device=x.device)


def _launch(
    x: Tensor,
    scale: Tensor | None,
    scale_t: Tensor | None,
    out: Tensor | None,
    out_t: Tensor | None,
    dtype: torch.dtype,
    dim: int | None,
    dim_t: int | None,
    tile: TileChoice,
    clamp: bool,
) -> None:
    for factors, over in ((scale, dim), (scale_t, dim_t)):
        if factors is not None:
            check_scale(x, factors, over)
    if x.stride(0) == 1 and x.stride(1) != 1:
        # transposed in memory: read along its rows, with the roles of both copies exchanged
        x, scale, scale_t, out, out_t = x.t(), scale_t, scale, out_t, out
        dim, dim_t = (None if over is None else 1 - over for over in (dim_t, dim))
    M, N = x.shape
    rows, columns = out.shape if out is not None else (0, 0)
    rows_t, columns_t = out_t.shape if out_t is not None else (0, 0)
    whole = (max(rows, columns_t), max(columns, rows_t))
    if not all(whole):
        return
    some = out if out is not None else out_t
    factor = scale if scale is not None else scale_t
    arguments = (
        x,
        scale if scale is not None else factor,
        scale_t if scale_t is not None else factor,
        out if out is not None else some,
        out_t if out_t is not None else some,
        *(M, N, *x.stride()),
        *(rows, columns, rows_t, columns_t),
    )
    options = constants(dtype, dim, dim_t, out is not None, out_t is not None, padded=False, clamp=clamp)
    options["PADDED"] = any(copy is not None and copy.numel() != x.numel() for copy in (out, out_t))
    with launch.on(x.device):
        if tile == "auto":
            _autotuned()[grid(*whole)](*arguments, **options)
            return
        tile = tile or starting_tile(*whole, x.element_size(), launch.multiprocessors(x.device))
        kernel = launch.kernels("cast_transpose").cast_transpose_kernel
        options |= {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "num_warps": tile.warps}
        kernel[grid(*whole)](*arguments, **options)


def constants(
    dtype: torch.dtype,
    dim: int | None,
    dim_t: int | None,
    write: bool = True,
    write_t: bool = True,
    padded: bool = False,
    clamp: bool = True,
) -> dict[str, Any]:
    """The kernel's compile-time arguments other than its tile."""
    return {
        "LIMIT": torch.finfo(dtype).max,
        "DIM": -1 if dim is None else dim,
        "DIM_T": -1 if dim_t is None else dim_t,
        "WRITE": write,
        "WRITE_T": write_t,
        "PADDED": padded,
        "CLAMP": clamp,
    }


def grid(rows: int, columns: int) -> Callable[[dict[str, Any]], tuple[int]]:
    """Launch grid over an area of ``rows`` x ``columns``, by the kernel's tile."""
    return lambda meta: (launch.ceil_div(rows, meta["BLOCK_M"]) * launch.ceil_div(columns, meta["BLOCK_N"]),)


def check_scale(x: Tensor, scale: Tensor, dim: int | None) -> None:
    """Checks a scale before its kernel reads memory by its size.

    Raises:
        ValueError: ``scale`` cannot multiply ``x`` along ``dim``, or is not contiguous float32.
    """
    wanted = 1 if dim is None else x.shape[1 - dim]
    if scale.dtype != torch.float32 or scale.numel() != wanted or not scale.is_contiguous():
        raise ValueError(
            f"a scale for dim={dim} of a tensor of shape {tuple(x.shape)} is {wanted} contiguous float32 values, "
            f"got {scale.dtype} of shape {tuple(scale.shape)} and strides {scale.stride()}"
        )


@cache
def _autotuned() -> Any:
    kernel = launch.kernels("cast_transpose").cast_transpose_kernel
    import triton

    configs = [
        triton.Config({"BLOCK_M": tile.rows, "BLOCK_N": tile.columns}, num_warps=tile.warps) for tile in TILES
    ]
    # not by number of rows: that one changes from batch to batch, and hardly matters once there are many
    key = ["N", "stride_n", "DIM", "DIM_T", "WRITE", "WRITE_T", "PADDED", "CLAMP"]
    return triton.autotune(configs=configs, key=key)(kernel)
