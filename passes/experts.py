"""Grouped matmuls: the layers of a mixture of experts, each row times the matrix of its expert.

``_grouped_mm(x, w, offsets)`` has three forms in a training graph. With ``x: [m, k]``, ``w: [experts, k, n]`` and
rows sorted by expert, ``offsets`` being where each expert's rows end:

* the layer, ``x`` by ``w``, and its ``grad_input``, the gradient by ``w.mT``: a float8 gemm takes each row with a scale
  of its own, and each expert's matrix with one for every column of the result;
* ``grad_weight``, where the rows are contracted, expert by expert. A float8 gemm reads 16 of them at once, and how many an
  expert has is known on the device alone: both operands are copied with zeros behind the rows of each (:mod:`kernels.groups`). If that
  is not asked for, it stays in high precision.

Here is only what tells them apart; :mod:`passes.find` collects them, if asked to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import fx

from .elements import CASTS, PERMUTES, SAME_ORDER, argument, stays_on_device
from .left import GROUPED_DYNAMIC, GROUPED_FORM, GROUPED_GRADIENT
from .operand import permutation
from .sizes import is_same_shape, shape_of

aten = torch.ops.aten

#: What is done with such layers, and with the batched ones of :mod:`passes.batched_experts`: the option of this name.
Experts = Literal["leave", "convert", "with_grad_weight"]

GROUPED_MM = aten._grouped_mm.default


def why_no_layer(node: fx.Node) -> str:
    """Why a grouped matmul is not one of rows by the matrices of their experts; "" if it is."""
    if contracts_rows(node):
        return GROUPED_GRADIENT
    left, right = node.args[:2]
    dtype = argument(node, 4, "out_dtype")
    plain = argument(node, 3, "bias") is None and dtype in (None, left.meta["val"].dtype)  # type: ignore[union-attr]
    if (len(shape_of(left)), len(shape_of(right))) != (2, 3) or not plain:  # type: ignore[arg-type]
        return GROUPED_FORM
    sizes: tuple = shape_of(right)  # type: ignore[arg-type]
    return "" if all(isinstance(size, int) for size in sizes) else GROUPED_DYNAMIC


def contracts_rows(node: fx.Node) -> bool:
    """Whether a grouped matmul sums over the rows of each expert, as a gradient of their weights does."""
    return all(len(shape_of(operand)) == 2 for operand in node.args[:2])  # type: ignore[arg-type]


def offsets_of(node: fx.Node) -> fx.Node:
    """Where the rows of each expert end."""
    offsets = argument(node, 2, "offs")
    assert isinstance(offsets, fx.Node)
    return offsets


def is_turned(node: fx.Node) -> bool:
    """Whether it gives each matrix of a batch transposed."""
    return node.target in PERMUTES and permutation(node) == [0, 2, 1]


def trace_matrices(node: fx.Node, is_quantized: Callable[[fx.Node], bool]) -> tuple[fx.Node, bool]:
    """The 3-D node that the matrices of experts come from, and whether the matmul reads its transpose.

    Args:
        is_quantized: whether a recipe quantizes a tensor, not its rounding that the matmul reads.
    """
    transposed = False
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        source = node.args[0]
        if is_turned(node):
            transposed = not transposed
        elif node.target in CASTS:
            if not is_quantized(source) or not stays_on_device(node):
                break
        elif node.target not in SAME_ORDER or not is_same_shape(shape_of(node), shape_of(source)):
            break
        node = source
    return node, transposed


def stacked(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The matrices of experts that `quantize` has put below each other, and which dimension became the columns."""
    if node.target is not aten.view.default or "f8fx" not in node.meta:
        return None
    source = node.args[0]
    if isinstance(source, fx.Node) and source.target is aten.clone.default and "f8fx" in source.meta:
        source = source.args[0]
    if not isinstance(source, fx.Node) or len(shape_of(source)) != 3:
        return None
    if source.target is aten.permute.default and "f8fx" in source.meta:
        return source.args[0], 1  # type: ignore[return-value]
    return source, 2
