"""Tensors that get new values while a graph runs, or after it."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from f8fx.torch_private import stands_for_write

from .elements import KEEP_VALUES, is_part_of, is_view


def is_written(weight: fx.Node) -> bool:
    """Whether an operator writes to what a weight is, or is moved or cast of.

    It must not before all have read the weight that read it as it was, which Inductor of torch 2.13 does not make sure of.
    """
    while weight.target in KEEP_VALUES:
        if _is_written_through(weight):
            return True
        weight = weight.all_input_nodes[0]
    return _is_written_through(weight)


def _is_written_through(value: fx.Node) -> bool:
    """Whether an operator writes to a value, or to a view of it."""
    return any(
        stands_for_write(user, value) or (is_view(user) and _is_written_through(user)) for user in value.users
    )


def keeps_its_values(tensor: fx.Node, overwritten: Collection[fx.Node]) -> bool:
    """Whether a tensor has, until the backward has ended, the values that it has now.

    Args:
        overwritten: inputs of its graph that get new values.
    """
    return not (is_part_of(tensor, overwritten) or is_written(tensor))
