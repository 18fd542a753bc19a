"""The matmul operators: where their operands are, which sizes they have, which kernels an amax can ride in."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from f8fx import ops

from .elements import CASTS, base_of, flat_base, is_pointwise
from .experts import GROUPED_MM
from .left import LEFT, LEFT_OPERAND
from .sizes import is_same, shape_of

aten = torch.ops.aten

#: Those that a recipe can speak of: the positions of their operands.
GEMMS: dict[Any, tuple[int, int]] = {
    aten.mm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.bmm.default: (0, 1),
    GROUPED_MM: (0, 1),
}
#: What those become.
FLOAT8_MATMULS = frozenset((aten._scaled_mm.default, aten._scaled_grouped_mm.default, ops.grouped_mm))
COMPUTE = frozenset((*GEMMS, *LEFT))


def operands_of(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Left and right operand of one of `GEMMS`."""
    left, right = GEMMS[node.target]
    return node.args[left], node.args[right]  # type: ignore[return-value]


def sizes_of(node: fx.Node) -> tuple:
    """m, k and n of one of `GEMMS`."""
    m, n = shape_of(node)[-2:]
    return m, shape_of(operands_of(node)[0])[-1], n


def seen_sizes(node: fx.Node) -> tuple:
    """m, k and n of any matmul that is seen, 1 where it has no such dimension."""
    if node.target in GEMMS:
        return sizes_of(node)
    shape = first_shape(node)
    m, n = (shape[-2] if len(shape) > 1 else 1), shape[-1] if shape else 1
    return m, shape_of(node.args[LEFT_OPERAND.get(node.target, 0)])[-1], n  # type: ignore[index,arg-type]


def is_matrix(node: fx.Node) -> bool:
    """Whether all dimensions of a value but the last two are of size 1."""
    return all(is_same(size, 1) for size in shape_of(node)[:-2])


def first_shape(node: fx.Node) -> tuple:
    """Sizes of the value of a node, or of the first one of several."""
    value = node.meta["val"]
    return tuple((value[0] if isinstance(value, (tuple, list)) else value).shape)


def is_fused(node: fx.Node) -> bool:
    """Whether the kernel that writes a tensor is one that an amax can ride in."""
    node = flat_base(node)
    provenance = node.meta.get("f8fx")
    if node.target is aten.clone.default and provenance is not None and provenance.inserted_by == "fold":
        # that copy is the cast's
        return is_fused(base_of(node.args[0]))  # type: ignore[arg-type]
    if node.op != "call_function" or node.target in COMPUTE:
        return False
    return is_pointwise(node) or node.target in CASTS or node.target is aten.cat.default
