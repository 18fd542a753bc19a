"""Text of kernels that are written for a graph."""

from __future__ import annotations

from collections.abc import Sequence

from f8fx.kernels import computed_amaxes


def gate(columns: int, summed: Sequence[int] = (), plus: str = "") -> str:
    """Text for a gate's gradients: of ``in0`` [M, N], ``in1`` [M, 2 N], with the product of the halves besides.

    ``plus``, such as ``+ 0.5``, is added to each, so that it is not zero where nothing was loaded.
    """
    load = "tl.load(tl.broadcast_to({}, [STEP, BLOCK]), inside, 0.0).to(tl.float32)"
    lines = (
        f"grad = {load.format(f'in0 + ({columns}*m + 1*n + 0)')}",
        f"gate = {load.format(f'in1 + ({2 * columns}*m + 1*n + 0)')}",
        f"up = {load.format(f'in1 + ({2 * columns}*m + 1*n + {columns})')}",
        f"left = grad * up {plus}",
        f"right = grad * gate {plus}",
        f"product = gate * up {plus}",
    )
    return computed_amaxes.source(2, lines, ("left", "right", "product"), 2, summed)


def parts(number: int, columns: int, summed: bool) -> str:
    """Text for tensors in memory that stand side by side, all of them summed or none."""
    load = "tl.load(tl.broadcast_to(in{} + ({}*m + 1*n + 0), [STEP, BLOCK]), inside, 0.0).to(tl.float32)"
    names = [f"part{index}" for index in range(number)]
    lines = [f"{name} = {load.format(index, columns)}" for index, name in enumerate(names)]
    return computed_amaxes.source(number, lines, names, number, range(number) if summed else ())
