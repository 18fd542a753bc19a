"""Row amax, scale and cast from one read: a rowwise float8 copy and its scales.

The definition is three operators (``amax`` over ``dim=1``, ``scale``, ``quantize``); here a row stays in
registers between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from f8fx.recipe import EPS

from . import cast as definition
from . import launch
from .launch import Tile

#: Rows longer than this are walked through twice, the second time out of the cache.
#: **Not measured yet: to be tuned on a GPU.** 32 elements a thread with 16 warps, no register spills.
LONGEST_ROW = 16384
#: Elements a program handles at a time of a longer row.
_STEP = 8192
#: Short rows are taken together until a program has this many elements.
_FEWEST = 2048


def tile_of(columns: int) -> Tile:
    """Rows and columns that a program handles: powers of two, 16 to 32 elements a thread."""
    block = launch.next_power_of_2(columns) if columns <= LONGEST_ROW else _STEP
    rows = max(1, min(_FEWEST // block, 32))
    return Tile(rows, block, max(2, min(rows * block // 512, 16)))


def reference(
    x: Tensor, *, dtype: torch.dtype, power_of_2: bool = False, align: Sequence[int] = (1, 1)
) -> tuple[Tensor, Tensor]:
    """What :func:`row_cast` computes, by definition."""
    scale = definition.scale(definition.amax(x, 1), dtype, power_of_2)
    return definition.quantize(x, scale, dtype, 1, False, list(align)), scale


def row_cast(
    x: Tensor,
    *,
    dtype: torch.dtype,
    power_of_2: bool = False,
    align: Sequence[int] = (1, 1),
    tile: Tile | None = None,
    clamp: bool = True,
) -> tuple[Tensor, Tensor]:
    """``x`` [M, N] in float8, contiguous, each row scaled by its own amax.

    Args:
        x: bfloat16, float16 or float32; any strides, fast if the last is 1.
        power_of_2: round scales down to powers of two.
        align: the copy's two sizes are rounded up to multiples of these, the rest being zeros.
        tile: rows, and elements of a row, a program handles at a time; both powers of two.
        clamp: as in :func:`kernels.cast_transpose.cast_transpose`.

    Returns:
        The copy, and the scales: float32 [M], multiplying on the way in.
    """
    if reason := launch.why_not(x, dtype):
        launch.say_fallback(reason)
        return reference(x, dtype=dtype, power_of_2=power_of_2, align=align)
    rows, columns = (size + definition.padding(size, by) for size, by in zip(x.shape, align, strict=True))
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    tile = tile or tile_of(columns)
    if not rows:
        return out, scale
    kernel = launch.kernels("row_cast").row_cast_kernel
    with launch.on(x.device):
        kernel[(launch.ceil_div(rows, tile.rows),)](
            *(x, out, scale),
            *(*x.shape, *x.stride(), rows, columns),
            LIMIT=torch.finfo(dtype).max,
            EPS=EPS,
            POWER_OF_2=power_of_2,
            PADDED=out.numel() != x.numel(),
            CLAMP=clamp,
            LOOP=columns > tile.columns,
            ROWS=tile.rows,
            BLOCK=tile.columns,
            num_warps=tile.warps,
        )
    return out, scale
