"""Float8 columns of groups of rows: operands of the gemm that sums over the rows of each expert.

The gradient of experts' weights is a sum over rows, expert by expert. A float8 gemm takes 16 of them at once, so that each group has to
begin at a multiple of 16, and how many rows a group has is known on the device alone. So the transposed copy, which has to be written
anyway, is written with zeros behind each group. One without rows is 16 of zeros: not all gemms can sum nothing::

    x [m, n], groups of 3, 0 and 18 rows   ->   [n, 16 + 16 + 32 + what is left], zeros but in columns 0-2 and 32-49

Each group has a scale of its own for every column. A scale is known after the last row of its group, so the source is read twice.
Rows behind the last group belong to none and are not read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import cast as definition
from . import launch
from .launch import Tile

#: Rows that a float8 gemm sums at once.
MULTIPLE = 16
#: Of both kernels. **Not measured yet: to be tuned on a GPU.** 128 bytes of a row are read at a time, and 64 or 128 of a row of the
#: copy are written.
TILES = (Tile(64, 64, 4), Tile(128, 64, 8))
#: Programs that share the rows of one group in one block of columns, of the cast. **Not measured yet.**
SPLITS = 8


def width(rows: Any, groups: int, floor_div: Callable[[Any, int], Any] = operator.floordiv) -> Any:
    """Columns of the copy: as many as any groups of so many rows in all can need, a multiple of 16.

    Args:
        rows: a number, or what stands for one; ``floor_div`` divides it and rounds down.
    """
    return floor_div(rows + MULTIPLE * groups, MULTIPLE) * MULTIPLE


def padded_ends(offsets: Tensor) -> Tensor:
    """Where groups end in the copy, int32 ``[groups]``; ``offsets``: where they end in the source."""
    multiples = (offsets - _starts(offsets) + (MULTIPLE - 1)) // MULTIPLE
    return (multiples.clamp(min=1) * MULTIPLE).cumsum(0, dtype=torch.int32)


def amax(x: Tensor, offsets: Tensor) -> Tensor:
    """Largest magnitudes of the columns of each group, exact: float32 ``[groups, columns]``; 0 of one without rows.

    NaN wins over every number.
    """
    groups, columns = offsets.shape[0], x.shape[1]
    found = x.new_zeros((groups + 1, columns), dtype=torch.float32)
    rows = torch.arange(x.shape[0], dtype=offsets.dtype, device=x.device)
    into = torch.searchsorted(offsets.contiguous(), rows, right=True)[:, None].expand(x.shape)
    found.scatter_reduce_(0, into, x.abs().to(torch.float32), "amax")
    return found[:groups].clone()


def quantize(x: Tensor, scale: Tensor, offsets: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """The transposed copy, ``[columns, width]``, contiguous: of each group and the rows of zeros behind it, of which NaN is made
    where the scale is NaN, as of the group's own rows.

    Args:
        x: ``[rows, columns]``.
        scale: float32 ``[groups, columns]``.
        offsets: ``[groups]``: where groups end in ``x``, never falling.
        ends: :func:`padded_ends` of them.
    """
    rows, groups = x.shape[0], offsets.shape[0]
    place = torch.arange(int(width(rows, groups)), dtype=ends.dtype, device=x.device)
    group = torch.searchsorted(ends, place, right=True)
    none = ends.new_zeros(1)
    source = place + torch.cat([_starts(offsets) - _starts(ends), none])[group]
    is_row = source < torch.cat([offsets, none])[group]
    # a row of zeros stands for those that are missing
    padded = torch.cat([x, x.new_zeros(1, x.shape[1])])[torch.where(is_row, source, rows)]
    factor = torch.cat([scale, scale.new_ones(1, x.shape[1])])[group]
    return definition.quantize(padded, factor, dtype, None, True, [1, 1])


def _starts(ends: Tensor) -> Tensor:
    return torch.cat([ends.new_zeros(1), ends[:-1]])


def blocks(columns: int, groups: int, tile: Tile) -> int:
    """Programs that take one block of columns of one group each."""
    return launch.ceil_div(columns, tile.columns) * groups


def constants(dtype: torch.dtype) -> dict[str, Any]:
    """The compile-time arguments of the cast."""
    return {"LIMIT": torch.finfo(dtype).max, "SPLITS": SPLITS}


def amax_groups(x: Tensor, offsets: Tensor, tile: Tile = TILES[0]) -> Tensor:
    """:func:`amax` by the kernel."""
    columns, groups = x.shape[1], offsets.shape[0]
    found = torch.empty((groups, columns), dtype=torch.float32, device=x.device)
    kernel = launch.kernels("groups").amax_groups_kernel
    with launch.on(x.device):
        kernel[(blocks(columns, groups, tile),)](
            *(x, offsets, found, x.shape[0], columns, x.stride(0)),
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            num_warps=tile.warps,
        )
    return found


def quantize_groups(
    x: Tensor, scale: Tensor, offsets: Tensor, ends: Tensor, dtype: torch.dtype, tile: Tile = TILES[0]
) -> Tensor:
    """:func:`quantize` by the kernel."""
    (rows, columns), groups = x.shape, offsets.shape[0]
    size = width(rows, groups)
    out = torch.empty((columns, size), dtype=dtype, device=x.device)
    kernel = launch.kernels("groups").quantize_groups_kernel
    with launch.on(x.device):
        kernel[(blocks(columns, groups + 1, tile) * SPLITS,)](
            *(x, scale, offsets, ends, out, rows, columns, size, groups, x.stride(0)),
            **constants(dtype),
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            num_warps=tile.warps,
        )
    return out
