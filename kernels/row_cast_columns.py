"""A rowwise float8 copy, its scales, and the amaxes of the columns, from one read.

Scaled by rows for one matmul and by columns for another, a tensor needs both sets of amaxes before either is
done with. Inductor takes them in two kernels, since its kernels that reduce in both directions at once know
sums only; that is a second read of the tensor.

The amaxes of the columns come as partial ones, of ``rows_per_program`` rows each, which whoever makes the column
scales reduces: float32, one for so many elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from f8fx.recipe import EPS

from . import cast as definition
from . import launch

#: Bytes of the longest rows: two of them, the second on its way, are in shared memory (64 KiB of 99 or more).
LONGEST_ROW = 32768
#: Programs per multiprocessor, for rows of up to so many elements. **Not measured yet: to be tuned on a GPU.** As
#: many as registers allow: 57 for each of 16 elements a thread, and 96 for each of 32.
_PROGRAMS = ((4096, 4), (8192, 2), (LONGEST_ROW, 1))
#: A program reduces at least so many rows, or partial amaxes are a good part of the traffic.
_FEWEST_ROWS = 16


def rows_per_program(rows: int, columns: int, multiprocessors: int) -> int:
    """How many rows each program takes, so that all run at once."""
    programs = next(number for longest, number in _PROGRAMS if columns <= longest) * multiprocessors
    return max(_FEWEST_ROWS, launch.next_power_of_2(launch.ceil_div(rows, programs)))


def warps(columns: int) -> int:
    """Warps of a program: 16 elements a thread, 32 for the longest rows."""
    return max(1, min(launch.next_power_of_2(columns) // 512, 16))


def why_not(x: Tensor, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot take a tensor (a fake one will do), in one sentence; ``None`` where it can."""
    if x.dim() != 2 or x.dtype not in launch.SOURCES or dtype not in launch.TRITON_FLOAT8:
        return "the kernel reads 2-D bfloat16, float16 and float32 tensors and writes float8"
    if not all(isinstance(size, int) for size in (*x.shape, *x.stride())):
        return "sizes are not known"
    if not x.numel() or x.shape[1] * x.element_size() > LONGEST_ROW:
        return f"rows have 1 to {LONGEST_ROW} bytes"
    if x.stride(1) != 1:
        return "elements of a row do not lie side by side"
    return None


def constants(columns: int, rows: int, dtype: torch.dtype, power_of_2: bool) -> dict[str, Any]:
    """The kernel's compile-time arguments; ``rows``: per program."""
    return {
        "LIMIT": torch.finfo(dtype).max,
        "EPS": EPS,
        "POWER_OF_2": power_of_2,
        "ROWS": rows,
        "BLOCK": launch.next_power_of_2(columns),
    }


def reference(x: Tensor, *, dtype: torch.dtype, power_of_2: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """What :func:`row_cast_columns` computes, by definition."""
    scale = definition.scale(definition.amax(x, 1), dtype, power_of_2)
    return definition.quantize(x, scale, dtype, 1, False, [1, 1]), scale, definition.amax(x, 0)


def row_cast_columns(
    x: Tensor, *, dtype: torch.dtype, power_of_2: bool = False, rows: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` [M, N] in float8, each row scaled by its own amax, and the amaxes of its columns.

    Args:
        x: bfloat16, float16 or float32.
        power_of_2: round scales down to powers of two.
        rows: that a program takes.

    Returns:
        The copy, contiguous; the scales, float32 [M], multiplying on the way in; the amaxes, float32 [N].
    """
    if reason := launch.why_not(x, dtype) or why_not(x, dtype):
        launch.say_fallback(reason)
        return reference(x, dtype=dtype, power_of_2=power_of_2)
    M, N = x.shape
    rows = rows or rows_per_program(M, N, launch.multiprocessors(x.device))
    programs = launch.ceil_div(M, rows)
    out = torch.empty(M, N, dtype=dtype, device=x.device)
    scale = torch.empty(M, dtype=torch.float32, device=x.device)
    partial = torch.empty(programs, N, dtype=torch.float32, device=x.device)
    kernel = launch.kernels("row_cast_columns").row_cast_columns_kernel
    kernel[(programs,)](
        *(x, out, scale, partial, M, N, x.stride(0)),
        **constants(N, rows, dtype, power_of_2),
        num_warps=warps(N),
    )
    return out, scale, partial.amax(0)
