"""Tracing a matmul's operand back to the tensor it came from.

Between a tensor and the gemms that read it stand movement operators: ``view`` to two dimensions,
``permute``, and, for ``einsum``, ``unsqueeze`` and permutes of size-1 dimensions. Forward and
backward use different ones, so that one tensor looks like several. :func:`trace` peels them and
returns a 2-D node plus one bit, *transposed*.

Every peeled operator either keeps the order of the elements (a view) or swaps two groups of
dimensions (a transpose); anything else ends the walk. What is left is exact: the operand equals
``node`` or ``node.T``, element for element.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import fx

from f8fx import ops
from f8fx.torch_private import schema_of

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


def permutation(node: fx.Node) -> list[int]:
    """For each dimension of a permute's result, the dimension of its input."""
    rank = len(shape_of(node))
    if node.target is aten.t.default:
        return list(range(rank))[::-1]
    if node.target is aten.transpose.int:
        order = list(range(rank))
        i, j = cast("tuple[int, int]", node.args[1:3])
        order[i], order[j] = order[j], order[i]
        return order
    return [d % rank for d in cast("list[int]", node.args[1])]


def amax_dim(amax: fx.Node) -> int | None:
    """The dimension that an ``f8fx.amax`` runs over; ``None``: all."""
    return amax.args[1] if len(amax.args) > 1 else amax.kwargs.get("dim")  # type: ignore[return-value]


def _product(sizes: list) -> int | torch.SymInt:
    result: int | torch.SymInt = 1
    for size in sizes:
        result = result * size
    return result


def keeps_order(node: fx.Node) -> bool:
    """Whether a permute moves dimensions of size 1 only."""
    order = _moved(node)
    return order == sorted(order)


def _moved(node: fx.Node) -> list[int]:
    """The permutation without dimensions of size 1."""
    source = shape_of(node.args[0])  # type: ignore[arg-type]
    return [d for d in permutation(node) if not is_same(source[d], 1)]


def _is_swap(node: fx.Node, rows: int | torch.SymInt) -> bool | None:
    """How a permute acts on its input seen as a matrix: transposes it, leaves it, or neither (None).

    The *output* is seen as ``[rows, columns]`` with ``rows`` given.
    """
    source, order = shape_of(node.args[0]), _moved(node)  # type: ignore[arg-type]
    if order == sorted(order):
        return False
    for split in range(1, len(order)):
        swapped = order[split:] + order[:split]
        if swapped == sorted(order) and is_same(_product([source[d] for d in order[:split]]), rows):
            return True
    return None


def trace(node: fx.Node) -> tuple[fx.Node, bool]:
    """The 2-D node an operand comes from, and whether the operand is its transpose.

    Args:
        node: operand of a matmul, ``[rows, columns]`` or ``[1, rows, columns]``.

    Returns:
        The earliest node of that shape, up to leading dimensions of size 1, that has the operand's
        elements or those of its transpose.
    """
    rows, columns = shape_of(node)[-2:]
    transposed = False
    best, best_transposed = node, False
    current = node
    while True:
        if current.op != "call_function" or not current.args:
            break
        if current.target in SAME_ORDER:
            current = current.args[0]  # type: ignore[assignment]
        elif current.target in PERMUTES:
            # `current` holds a [rows, columns] matrix, or its transpose, in row-major order
            swap = _is_swap(current, columns if transposed else rows)
            if swap is None:
                break
            transposed ^= swap
            current = current.args[0]  # type: ignore[assignment]
        else:
            break
        shape = shape_of(current)
        expected = (columns, rows) if transposed else (rows, columns)
        units = (1,) * (len(shape) - 2)
        if is_same_shape(shape, units + expected):
            best, best_transposed = current, transposed
        elif is_same_shape(shape, units + expected[::-1]) and (is_same(rows, 1) or is_same(columns, 1)):
            # [n, 1] and [1, n] hold the same elements in the same order: either is the other's transpose
            best, best_transposed = current, not transposed
    return best, best_transposed


def repeated_matrix(expanded: fx.Node) -> tuple[fx.Node, bool] | None:
    """The 2-D node that is repeated over the batch of ``[b, rows, columns]``, and whether each is its transpose.

    ``None`` where there is no one matrix.
    """
    sizes = shape_of(expanded)[-2:]
    node, transposed, is_expanded = expanded, False, False
    while node.op == "call_function":
        source = node.args[0]
        if not isinstance(source, fx.Node):
            return None
        if node.target in PERMUTES:
            order, rank = permutation(node), len(shape_of(node))
            if order != [*range(rank - 2), rank - 1, rank - 2]:
                return None
            transposed, sizes = not transposed, sizes[::-1]
        elif node.target is aten.expand.default:
            is_expanded = True
        elif node.target not in SAME_ORDER and node.target is not aten.clone.default:
            return None
        node = source
        shape = shape_of(node)
        if not is_same_shape(shape[-2:], sizes):
            return None
        if len(shape) == 2:
            return (node, transposed) if is_expanded else None
    return None


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
