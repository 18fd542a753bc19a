"""Why batched matmuls are left: part of pass 1, *find*.

Most are attention. Others multiply by weights: each matrix of the batch by its own, or all by one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import fx

from .left import BATCHED, BATCHED_GRADIENT, BATCHED_MATRIX, BATCHED_WEIGHT, BATCHED_WEIGHT_GRADIENT
from .matmuls import is_matrix
from .operand import repeated_matrix
from .parameters import expanded_parameter
from .sizes import is_same, shape_of


def parameters_of(batched: fx.Node, weights: Collection[fx.Node]) -> list[fx.Node]:
    """What a batched matmul, with a sum or without, reads of parameters.

    Args:
        weights: parameters, and what is computed from them.
    """
    sides: Any = batched.args[-2:]  # of bmm and of baddbmm
    return [found for side in sides if (found := expanded_parameter(side, weights)) is not None]


def is_of_each(operand: fx.Node, parameter: fx.Node) -> bool:
    """Whether an operand of a batched matmul is all of a parameter's elements: no matrix is expanded over the batch."""
    return is_same(parameter.meta["val"].numel(), operand.meta["val"].numel())


def why_left(batched: fx.Node, weights: Collection[fx.Node]) -> str:
    """Why a batched matmul of a forward is left."""
    sides: Any = batched.args[-2:]
    parameters, is_batch = parameters_of(batched, weights), not is_same(shape_of(batched)[0], 1)
    # one matrix is expanded; several that stand below each other in one parameter are not
    of_each = (is_batch and any(is_of_each(side, found) for side in sides) for found in parameters)
    if any(not is_matrix(found) for found in parameters) or any(of_each):
        return BATCHED_WEIGHT
    if parameters or (is_batch and any(map(repeated_matrix, sides))):
        return BATCHED_MATRIX
    return BATCHED


def why_gradient_is_left(bmm: fx.Node) -> str:
    """Why the gradient of a batched matmul's weight is left, where another matmul stands in the place of that, or did."""
    return BATCHED_WEIGHT_GRADIENT if repeated_matrix(bmm.args[1]) is None else BATCHED_GRADIENT  # type: ignore[arg-type]
