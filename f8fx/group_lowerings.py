"""Lowerings of what reads groups of rows: the kernels of :mod:`kernels.groups` on GPUs, elsewhere their definitions.

Inductor has no code for a reduction over groups whose sizes are known on the device alone. Where :mod:`f8fx.canary` found the kernels
to write wrong bytes, the definitions are called, too.
"""

from __future__ import annotations

from typing import Any

import torch

from . import ops
from .kernel_forms import candidates, form
from .kernels import groups, launch
from .torch_private import Lowering

aten = torch.ops.aten

#: What the kernels are tuned among: tiles of one width, which the number of programs depends on.
_CHOICES = [{"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "num_warps": tile.warps} for tile in groups.TILES]


def amax_groups(table: Lowering, x: Any, offsets: Any) -> Any:
    """Largest magnitudes of the columns of each group."""
    x, offsets = table.row_major(x), _dense(table, offsets)
    if (sizes := _sizes(table, x, offsets)) is None:
        return table.definition(ops.amax_groups, x, offsets)
    rows, columns, count = sizes
    amaxes = table.empty((count, columns), torch.float32, x)
    arguments = {"x": x, "offsets": offsets, "amaxes": amaxes, "M": rows, "N": columns}
    table.launched(
        launch.kernels("groups").amax_groups_kernel,
        groups.blocks(columns, count, groups.TILES[0]),
        candidates(_CHOICES),
        {**arguments, "stride_m": x.get_stride()[0]},
        ("amaxes",),
    )
    return amaxes


def quantize_groups(
    table: Lowering, x: Any, scale: Any, offsets: Any, ends: Any, *, dtype: torch.dtype
) -> Any:
    """Their transposed copy."""
    x, offsets = table.row_major(x), _dense(table, offsets)
    if (sizes := _sizes(table, x, offsets)) is None:
        return table.definition(ops.quantize_groups, x, scale, offsets, ends, dtype=dtype)
    rows, columns, count = sizes
    width = groups.width(rows, count, table.floor_div)
    out = table.empty((columns, width), dtype, x)
    arguments = {"x": x, "scale": scale, "offsets": offsets, "ends": ends, "out": out}
    numbers = {"M": rows, "N": columns, "WIDTH": width, "G": count, "stride_m": x.get_stride()[0]}
    table.launched(
        launch.kernels("groups").quantize_groups_kernel,
        groups.blocks(columns, count + 1, groups.TILES[0]) * groups.SPLITS,
        candidates(_CHOICES),
        {**arguments, **numbers, **groups.constants(dtype)},
        ("out",),
    )
    return out


def padded_ends(table: Lowering, offsets: Any) -> Any:
    """Where groups end in the copy."""
    (count,) = offsets.get_size()
    starts = table(aten.constant_pad_nd, table(aten.slice, offsets, 0, 0, count - 1), [1, 0], 0)
    sizes = table(aten.add, table(aten.sub, offsets, starts), groups.MULTIPLE - 1)
    padded = table(aten.bitwise_and, sizes, table.constant_like(-groups.MULTIPLE, sizes))
    return table(aten.cumsum, table(aten.clamp_min, padded, groups.MULTIPLE), 0, dtype=torch.int32)


def _sizes(table: Lowering, x: Any, offsets: Any) -> tuple[Any, int, int] | None:
    """Rows, columns and groups where the kernels are for a tensor; ``None`` where they are not."""
    device = x.get_device()
    if (
        device.type != "cuda"
        or form(device, "groups") != "fused"
        or table.numbers(x.get_stride()[1:]) != (1,)
    ):
        return None
    rows, columns = x.get_size()
    known = table.numbers((columns, *offsets.get_size()))
    return (rows, *known) if known is not None and all(known) else None


def _dense(table: Lowering, offsets: Any) -> Any:
    """Offsets one behind the other, as the kernels read them."""
    offsets.realize()
    return offsets if table.numbers(offsets.get_stride()) == (1,) else table.copied(offsets)
