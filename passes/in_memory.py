"""What is in memory, whichever kernels Inductor makes of a graph: a kernel can read it as it lies."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any, cast

import torch
from torch import fx

from f8fx import ops
from f8fx.torch_private import c10d

from .elements import SPLITS, base_of, is_given
from .matmuls import FLOAT8_MATMULS

aten = torch.ops.aten

#: Operators whose result is written to memory by a kernel that nothing is fused into.
_WRITTEN = frozenset(
    (
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten._grouped_mm.default,
        *FLOAT8_MATMULS,
        ops.materialize,
        c10d.wait_tensor.default,
    )
)


def is_in_memory(node: fx.Node) -> bool:
    """Whether a value, up to views, is an input of the graph or written by a kernel that nothing is fused into."""
    base = base_of(node)
    target = base.args[0].target if base.target is operator.getitem else base.target  # type: ignore[union-attr]
    return is_given(base) or target in _WRITTEN or "scaled_dot_product" in str(target)


def part_in_memory(node: fx.Node) -> Hashable | None:
    """What tells a part of a tensor in memory from others, where a node is such: a slice, or one of a split, or of a part."""
    which: tuple[Any, ...] = (node.target,)
    if node.target is operator.getitem:
        which = node.args[1:]
        node = cast("fx.Node", node.args[0])
        if node.target not in SPLITS:
            return None
    elif node.target is not aten.slice.Tensor:
        return None
    base = base_of(cast("fx.Node", node.args[0]))
    whole = base if is_in_memory(base) else part_in_memory(base)
    return None if whole is None else (whole, str((which, node.args[1:], node.kwargs)))
