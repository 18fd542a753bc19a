"""Sizes of tensors, which may be symbols: compared without adding guards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx


def shape_of(node: fx.Node) -> tuple:
    """Sizes of the value of a node."""
    return tuple(node.meta["val"].shape)


def is_size(node: fx.Node) -> bool:
    """Whether a value is a number of elements, by which a tensor can be cut or shaped, and no tensor."""
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def is_same(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are known to be equal, without adding a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return str(a) == str(b)


def is_same_shape(a: Sequence[int | torch.SymInt], b: Sequence[int | torch.SymInt]) -> bool:
    """Whether two shapes are known to be equal, without adding a guard."""
    return len(a) == len(b) and all(map(is_same, a, b))
