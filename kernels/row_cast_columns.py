"""A rowwise float8 copy, its reciprocal scales, and the amaxes of the columns, from one read, of up to eight tensors.

Scaled by rows for one matmul and by columns for another, a tensor needs both sets of amaxes before either is
done with. Inductor takes them in two kernels, since its kernels that reduce in both directions at once know
sums only; that is a second read of the tensor.

One tensor may be many matrices of one size, the weights of experts, each of which has amaxes of its own.

Each program enters the amaxes of its columns into those of all by an atomic maximum of their bits, which
gives the same in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from f8fx.recipe import EPS

from . import cast as definition
from . import launch

#: Tensors that one launch takes: six weights of a decoder block have rows of one length.
MOST = 8
#: Bytes of the longest rows: two of them, the second on its way, are in shared memory (64 KiB of 99 or more).
LONGEST_ROW = 32768
#: Programs per multiprocessor, for rows of up to so many elements: as many as registers allow, 60 for each of 16 elements a
#: thread, and 118 for each of 32. Places must not stay empty: on an H100, 256 programs in 528 places reached 52 % of the
#: bandwidth of a copy, and 304 in them, with a launch of 128 in 132, 65 % (before rows were fetched ahead).
_PROGRAMS = ((1024, 16), (2048, 8), (4096, 4), (8192, 2), (LONGEST_ROW, 1))
#: A program reduces at least so many rows, or entering its columns' amaxes is a good part of its work. **Not measured yet.**
_FEWEST_ROWS = 8
#: Each number of rows is a kernel to compile, so they are multiples of this.
_ROWS_ALIKE = 4


def rows_per_program(rows: int, columns: int, multiprocessors: int) -> int:
    """How many rows each program takes, so that all run at once."""
    programs = next(number for longest, number in _PROGRAMS if columns <= longest) * multiprocessors
    groups = launch.ceil_div(launch.ceil_div(rows, programs), _ROWS_ALIKE)
    return max(_FEWEST_ROWS, groups * _ROWS_ALIKE)


def choices(columns: int) -> tuple[dict[str, int], ...]:
    """Warps of a program: 16 elements a thread, 32 for the longest rows; and half, or for these twice, as many.

    Which is fastest is found on the device.
    """
    elements = launch.next_power_of_2(columns)
    first = max(1, min(elements // 512, 16))
    second = first * 2 if elements // first > 512 else first // 2
    return tuple({"num_warps": number} for number in (first, second) if number)


def why_not(tensors: Sequence[Tensor], dtype: torch.dtype) -> str | None:
    """Why the kernel cannot take tensors (fake ones will do), in one sentence; ``None`` where it can.

    The number of rows may be a symbol, of one or more.
    """
    x = tensors[0]
    if x.dim() != 2 or x.dtype not in launch.SOURCES or dtype not in launch.TRITON_FLOAT8:
        return "the kernel reads 2-D bfloat16, float16 and float32 tensors and writes float8"
    if len(tensors) > MOST:
        return f"there are more than {MOST} tensors"
    layouts = [(tensor.shape[1], *tensor.stride()) for tensor in tensors]
    if not all(type(size) is int for layout in layouts for size in layout):
        return "the length of rows, or the distance between them, is not known"
    empty = any(isinstance(tensor.shape[0], int) and not tensor.shape[0] for tensor in tensors)
    if empty or not 0 < x.shape[1] * x.element_size() <= LONGEST_ROW:
        return f"rows have 1 to {LONGEST_ROW} bytes"
    if any(layout != (x.shape[1], x.stride(0), 1) for layout in layouts):
        return "elements of a row do not lie side by side, or rows of the tensors at different distances"
    return None


def arguments(
    tensors: Sequence[Any],
    rows: Sequence[int],
    groups: Sequence[int],
    columns: int,
    stride: int,
    outputs: Sequence[Any],
) -> dict[str, Any]:
    """The kernel's run-time arguments, of tensors or of what stands for them.

    Args:
        rows: of each tensor.
        groups: how many tensors each group has.
        stride: from row to row.
        outputs: copy, reciprocal scales, and bits of the columns' amaxes of each group, which are zeros.
    """
    missing = [0] * (MOST - len(tensors))
    sources = [*tensors, *(tensors[0] for _ in missing)]
    members = [index for index, size in enumerate(groups) for _ in range(size)]
    return {
        **{f"x{index}": source for index, source in enumerate(sources)},
        **dict(zip(("out", "inverse", "amaxes"), outputs, strict=True)),
        **{f"M{index}": height for index, height in enumerate([*rows, *missing])},
        **{f"G{index}": group for index, group in enumerate([*members, *missing])},
        "N": columns,
        "stride_m": stride,
    }


def constants(columns: int, step: int, dtype: torch.dtype, power_of_2: bool, each: int = 0) -> dict[str, Any]:
    """The kernel's compile-time arguments.

    Args:
        step: rows of a program.
        each: rows of each matrix, where one tensor is several.
    """
    return {
        "LIMIT": torch.finfo(dtype).max,
        "EPS": EPS,
        "POWER_OF_2": power_of_2,
        "EACH": each,
        "ROWS": step,
        "BLOCK": launch.next_power_of_2(columns),
    }


def programs(rows: Sequence[int], step: int) -> int:
    """How many programs take ``rows`` of each tensor, or matrix, ``step`` at a time."""
    return sum(launch.ceil_div(number, step) for number in rows)


def reference(
    tensors: Sequence[Tensor],
    groups: Sequence[int] | None = None,
    *,
    dtype: torch.dtype,
    power_of_2: bool = False,
    matrices: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """What :func:`row_cast_columns` computes, by definition."""
    x = torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]
    scale = definition.scale(definition.amax(x, 1), dtype, power_of_2)
    rest = iter(tensors)
    members = [torch.cat([next(rest) for _ in range(size)]) for size in groups or [len(tensors)]]
    if matrices > 1:
        members = list(x.unflatten(0, (matrices, -1)))
    amaxes = torch.stack([definition.amax(member, 0) for member in members])
    return definition.quantize(x, scale, dtype, 1, False, [1, 1]), scale.reciprocal(), amaxes


def row_cast_columns(
    tensors: Sequence[Tensor],
    groups: Sequence[int] | None = None,
    *,
    dtype: torch.dtype,
    power_of_2: bool = False,
    matrices: int = 1,
    step: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors [M_i, N], one below the other, in float8, each row scaled by its own amax, and the columns' amaxes.

    Args:
        tensors: one to eight of them, bfloat16, float16 or float32.
        groups: how many tensors, one after the other, have amaxes in common; default: all.
        power_of_2: round scales down to powers of two.
        matrices: of how many, of one height, one tensor alone consists, each of which is a group.
        step: rows that a program takes.

    Returns:
        The copy [M, N], contiguous, M the sum of all M_i; the reciprocals of the scales, float32 [M]; the
        amaxes, float32 [groups, N].

    Raises:
        ValueError: there are matrices of several tensors, or not of one height.
    """
    x, groups = tensors[0], groups or [len(tensors)]
    if matrices > 1 and (len(tensors) > 1 or x.shape[0] % matrices):
        raise ValueError(f"{len(tensors)} tensors of {x.shape[0]} rows are not one of {matrices} matrices")
    if reason := launch.why_not(x, dtype) or why_not(tensors, dtype):
        launch.say_fallback(reason)
        return reference(tensors, groups, dtype=dtype, power_of_2=power_of_2, matrices=matrices)
    rows, N = [tensor.shape[0] for tensor in tensors], x.shape[1]
    each = rows[0] // matrices if matrices > 1 else 0
    step = step or rows_per_program(sum(rows), N, launch.multiprocessors(x.device))
    outputs = (
        torch.empty(sum(rows), N, dtype=dtype, device=x.device),
        torch.empty(sum(rows), dtype=torch.float32, device=x.device),
        torch.zeros(len(groups) * matrices, N, dtype=torch.int32, device=x.device),
    )
    kernel = launch.kernels("row_cast_columns").row_cast_columns_kernel
    with launch.on(x.device):
        kernel[(programs([each] * matrices if each else rows, step),)](
            **arguments(tensors, rows, groups, N, x.stride(0), outputs),
            **constants(N, step, dtype, power_of_2, each),
            **choices(N)[0],
        )
    return outputs[0], outputs[1], outputs[2].view(torch.float32)
