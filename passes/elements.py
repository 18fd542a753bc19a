"""Operators by what they do to the elements of a tensor: which move them, copy them or compute each from those at its place.

And the walks over such operators: back to what is read from memory, and on to what reads it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from f8fx import ops
from f8fx.torch_private import schema_of

from .sizes import is_same_shape

aten = torch.ops.aten

#: Operators that keep the order of the elements, whatever shape they give.
SAME_ORDER = frozenset(
    (
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.alias.default,
        aten.detach.default,
    )
)
PERMUTES = frozenset((aten.permute.default, aten.t.default, aten.transpose.int))
#: Operators that give every element of a tensor once, and as a rule copy none.
VIEWS = SAME_ORDER | PERMUTES
#: Operators that change the dtype.
CASTS = frozenset((torch.ops.prims.convert_element_type.default, aten._to_copy.default))
#: Operators that give a tensor of the same shape in memory of its own.
COPIES = CASTS | {aten.clone.default}
SPLITS = frozenset((aten.split.Tensor, aten.split_with_sizes.default))
#: Operators that choose or rearrange elements without computing or, as a rule, copying any.
MOVEMENTS = (
    VIEWS
    | SPLITS
    | {
        aten.slice.Tensor,
        aten.select.int,
        aten.expand.default,
        aten.unbind.int,
        operator.getitem,
    }
)
#: Operators that move, copy or cast elements.
KEEP_VALUES = MOVEMENTS | COPIES | ops.MARKERS


def is_pointwise(node: fx.Node) -> bool:
    """Whether torch says that an operator computes each element from those at its place."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_elementwise(node: fx.Node) -> bool:
    """Whether a node with two tensor operands has their one shape and dtype: nothing is broadcast."""
    nodes = [arg for arg in (node, *node.args[:2]) if isinstance(arg, fx.Node)]
    values = [n.meta["val"] for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    if len(values) != 3:
        return False
    shape, dtype = values[0].shape, values[0].dtype
    return all(value.dtype == dtype and is_same_shape(value.shape, shape) for value in values)


def readers(node: fx.Node, through: Collection[Any]) -> set[fx.Node]:
    """What reads a value, directly or through operators that only move its elements."""
    found: set[fx.Node] = set()
    for user in node.users:
        found |= readers(user, through) if user.target in through else {user}
    return found


def is_view(node: fx.Node) -> bool:
    """Whether a node's value lies in the memory of what it is made from."""
    return node.op == "call_function" and _makes_views(node.target)


@lru_cache(maxsize=256)
def _makes_views(target: Any) -> bool:
    if target is operator.getitem:
        return True
    schema = schema_of(target)
    return (
        schema is not None
        and not schema.is_mutable
        and any(result.alias_info is not None for result in schema.returns)
    )


def readers_of_memory(
    node: fx.Node, through: Collection[Any] = MOVEMENTS, until: Collection[Any] = ()
) -> set[fx.Node]:
    """What reads a value, directly, through views or through operators that only move its elements.

    Args:
        until: views that count as readers.
    """
    found: set[fx.Node] = set()
    passed = {node}
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if user.target in through or (user.target not in until and is_view(user)):
                if user not in passed:
                    passed.add(user)
                    todo.append(user)
            else:
                found.add(user)
    return found


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of an operator, given by its position or by its name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def amax_dim(amax: fx.Node) -> int | None:
    """The dimension that an ``f8fx.amax`` runs over; ``None``: all."""
    return argument(amax, 1, "dim")


def input_of(node: fx.Node) -> fx.Node | None:
    """The input of the graph that a tensor is, at most viewed, permuted, copied or cast."""
    node = base_of(node)
    while node.target in COPIES | ops.MARKERS:
        node = base_of(node.args[0])  # type: ignore[arg-type]
    return node if is_given(node) else None


def stays_on_device(cast: fx.Node) -> bool:
    """Whether what changes a tensor's dtype leaves it where it is; ``_to_copy`` can do both."""
    (source,) = cast.all_input_nodes
    return source.meta["val"].device == cast.meta["val"].device


def is_given(node: fx.Node) -> bool:
    """Whether a tensor is there before the graph runs: an input, or a constant that its module holds."""
    return node.op in ("placeholder", "get_attr")


def is_part_of(node: fx.Node, tensors: Collection[fx.Node]) -> bool:
    """Whether a value lies in one of the tensors, at most viewed, moved or sliced."""
    while node.op == "call_function" and (node.target in MOVEMENTS or is_view(node)):
        node = node.all_input_nodes[0]
    return node in tensors


def base_of(node: fx.Node) -> fx.Node:
    """The node under all views and permutes: what is read from memory."""
    while node.op == "call_function" and node.target in VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def flat_base(node: fx.Node) -> fx.Node:
    """The node under the views that keep the order of the elements."""
    while node.op == "call_function" and node.target in SAME_ORDER:
        node = node.args[0]  # type: ignore[assignment]
    return node


def is_part_of_input(node: fx.Node) -> bool:
    """Whether a tensor is an input of the graph or a slice of one, at most moved, copied or cast."""
    while node.target in KEEP_VALUES:
        node = node.all_input_nodes[0]
    return is_given(node)
