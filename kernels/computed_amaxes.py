"""Amaxes of rows and of columns, and sums of columns, from one read of what they are computed from.

A tensor that is computed in the kernels that cast it (the gradients of a gate, say) is not in memory, and
:mod:`kernels.row_cast_columns` has nothing to read. Inductor takes its rows' amaxes in the kernel that casts the rows,
which holds whole rows, and its columns' amaxes in another: the inputs are read three times before both
copies are there. Here they are read twice: for the amaxes of both, tile by tile, and for both casts.

The arithmetic is a graph's own, so there is no kernel before there is a graph: this module writes one around it.
Several tensors of one shape that are computed from the same inputs are one launch. The first of them stand
side by side, so that their rows have amaxes in common; of the others (what the activation function gave, which its
weight's gradient needs) only the columns' amaxes are taken.

The sums of a gradient's columns are the gradient of a bias. Each program adds up its own rows and writes that, in
float32; these are few numbers, which the graph goes on to add up. So a run gives the bits of any other run, as it would not if
programs added to one number in the order in which they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import cast as definition
from . import launch

NAME = "computed_amaxes_kernel"
#: A program goes down so many rows of ``_BLOCK`` columns, ``_STEP`` rows at a time, with rows that one warp reads side
#: by side. **Not measured yet: to be tuned on a GPU.**
ROWS = 64
_STEP, _BLOCK = 8, 256


def source(
    inputs: int,
    lines: Sequence[str],
    results: Sequence[str],
    side_by_side: int,
    summed: Sequence[int] = (),
    imports: str = "",
) -> str:
    """The text of a module with the kernel in it.

    Args:
        inputs: how many tensors are read, as ``in0``, ``in1``, ...
        lines: statements that compute the elements of a tile from its row numbers ``m`` (a column of int64) and column
            numbers ``n`` (a row); they read with the mask ``inside``.
        results: the names of the tensors in them, float32, each of the tile's shape.
        side_by_side: how many of them rows go through.
        summed: whose columns are summed, by their place among the results, each once; if any, the kernel takes ``sums``, too: float32
            [summed, bands, columns], of each summed tensor what the rows of each program add up to.
        imports: statements that import what the lines need beside ``tl``.
    """
    assert len({*summed}) == len(summed), "a place named twice would be added to twice"
    written = ["amaxes", "sums"] if summed else ["amaxes"]
    arguments = ", ".join([*(f"in{index}" for index in range(inputs)), *written])
    tensors = range(len(results))
    bits = [
        f"        bits{i} = tl.where(inside, {x}.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)"
        for i, x in enumerate(results)
    ]
    both = "bits0"
    for index in tensors[1:side_by_side]:
        both = f"tl.maximum({both}, bits{index})"
    return "\n".join(
        [
            "import triton",
            "import triton.language as tl",
            imports,
            "",
            "",
            "@triton.jit",
            f"def {NAME}({arguments}, M, N: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, "
            "BLOCK: tl.constexpr, STAGES: tl.constexpr):",
            "    blocks: tl.constexpr = (N + BLOCK - 1) // BLOCK",
            "    program = tl.program_id(0)",
            "    n = (program % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]",
            "    first = (program // blocks) * ROWS",
            *(f"    columns{index} = tl.zeros([STEP, BLOCK], tl.int32)" for index in tensors),
            *(f"    sums{index} = tl.zeros([STEP, BLOCK], tl.float32)" for index in summed),
            "    for step in tl.range(0, ROWS, STEP, num_stages=STAGES):",
            "        rows = first + step + tl.arange(0, STEP)",
            "        inside = (rows < M)[:, None] & (n < N)",
            "        m = rows.to(tl.int64)[:, None]",
            *(f"        {line}" for line in lines),
            *bits,
            *(f"        columns{index} = tl.maximum(columns{index}, bits{index})" for index in tensors),
            # beyond the edge the arithmetic has been done, too, on zeros
            *(f"        sums{index} += tl.where(inside, {results[index]}, 0.0)" for index in summed),
            f'        tl.atomic_max(amaxes + rows, tl.max({both}, 1), rows < M, sem="relaxed")',
            *(
                f"    tl.atomic_max(amaxes + M + {index} * N + n, tl.max(columns{index}, 0)[None, :], n < N, "
                'sem="relaxed")'
                for index in tensors
            ),
            *(
                f"    tl.store(sums + ({place} * ((M + ROWS - 1) // ROWS) + (program // blocks).to(tl.int64)) * N + n, "
                f"tl.sum(sums{index}, 0)[None, :], n < N)"
                for place, index in enumerate(summed)
            ),
            "",
        ]
    )


def constants(columns: int, summed: int = 0) -> dict[str, int]:
    """The kernel's compile-time arguments, but for those of :func:`choices`, for tensors of so many columns of which some are summed.

    Sums are kept in registers beside the amaxes, so a step is half as large.
    """
    return {"N": columns, "ROWS": ROWS, "STEP": _STEP // 2 if summed else _STEP, "BLOCK": _BLOCK}


def choices(summed: int = 0) -> tuple[dict[str, int], ...]:
    """Warps of a program, 16 elements a thread or 8, which are one load; and whether it fetches ahead: of three stages
    two are buffers in shared memory, one of which is filled while the other is worked on. Which is fastest is found on the device.
    """
    warps = (4,) if summed else (4, 8)
    return *({"num_warps": number, "STAGES": 1} for number in warps), {"num_warps": 4, "STAGES": 3}


def across(columns: int) -> int:
    """How many programs stand side by side; below each other there is one for :data:`ROWS` rows."""
    return launch.ceil_div(columns, _BLOCK)


def length(rows: Any, columns: int, tensors: int) -> Any:
    """Elements of ``amaxes``: int32, zeros before the launch, the bits of float32 after it; rows, then columns."""
    return rows + tensors * columns


def reference(tensors: Sequence[Tensor], side_by_side: int) -> Tensor:
    """What is in ``amaxes`` after the launch, as float32: rows, then columns of one tensor after the other."""
    rows = definition.amax(torch.cat(list(tensors[:side_by_side]), 1), 1)
    return torch.cat([rows, *(definition.amax(x, 0) for x in tensors)])
