"""Column scales in two stages: amaxes of blocks of rows, then their maximum and its scale.

What :func:`kernels.cast_transpose.cast_transpose` needs for a rowwise transposed copy: with a row-major
source, a column's amax is known only after the last row, so the source is read once for it and once for
the casts. Partial amaxes cost one float32 for each ``rows_per_program`` elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from f8fx.recipe import EPS

from . import cast as definition
from . import launch
from .launch import Tile

#: Step of the first stage. **Not measured yet: to be tuned on a GPU.** 256 bytes of a row at a time, and
#: 32 elements a thread: four 16-byte loads in flight.
TILE = Tile(32, 128, 4)
#: Programs per multiprocessor that the first stage aims at.
_PROGRAMS = 8
#: Step of the second stage: partial amaxes x columns.
_SECOND = Tile(32, 64, 4)


def rows_per_program(rows: int, columns: int, tile: Tile, multiprocessors: int) -> int:
    """How many rows each program of the first stage reduces: a multiple of the tile's, at least four."""
    blocks = max(1, launch.ceil_div(columns, tile.columns))
    programs = max(1, launch.ceil_div(_PROGRAMS * multiprocessors, blocks))
    return max(4, launch.ceil_div(launch.ceil_div(rows, programs), tile.rows)) * tile.rows


def reference(x: Tensor, *, dtype: torch.dtype, power_of_2: bool = False) -> Tensor:
    """What :func:`column_scale` computes, by definition."""
    return definition.scale(definition.amax(x, 0), dtype, power_of_2)


def column_scale(
    x: Tensor, *, dtype: torch.dtype, power_of_2: bool = False, tile: Tile | None = None
) -> Tensor:
    """Scales of the columns of ``x`` [M, N]: float32 [N], multiplying on the way in.

    Args:
        x: bfloat16, float16 or float32; any strides, fast if the last is 1.
        dtype: float8 type the scales are for.
        power_of_2: round scales down to powers of two.
        tile: of the first stage.
    """
    if reason := launch.why_not(x, dtype):
        launch.say_fallback(reason)
        return reference(x, dtype=dtype, power_of_2=power_of_2)
    M, N = x.shape
    scale = torch.empty(N, dtype=torch.float32, device=x.device)
    if not N:
        return scale
    tile = tile or TILE
    step = rows_per_program(M, N, tile, launch.multiprocessors(x.device))
    parts = launch.ceil_div(M, step)
    partial = torch.empty(parts, N, dtype=torch.float32, device=x.device)
    module = launch.kernels("column_scale")
    with launch.on(x.device):
        if parts:
            module.column_amax_kernel[(launch.ceil_div(N, tile.columns), parts)](
                *(x, partial, M, N, *x.stride(), step),
                BLOCK_M=tile.rows,
                BLOCK_N=tile.columns,
                num_warps=tile.warps,
            )
        module.scale_of_partials_kernel[(launch.ceil_div(N, _SECOND.columns),)](
            *(partial, scale, parts, N),
            LIMIT=torch.finfo(dtype).max,
            EPS=EPS,
            POWER_OF_2=power_of_2,
            BLOCK_P=_SECOND.rows,
            BLOCK_N=_SECOND.columns,
            num_warps=_SECOND.warps,
        )
    return scale
