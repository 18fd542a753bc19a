"""A value replaced by one that lies otherwise in memory: whoever reads it is given what suits him."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from f8fx.torch_private import as_it_runs, is_of_torch, is_operator, size_hint

from .elements import is_view
from .fake import set_value_by_layout
from .rewrite import refresh_views, take_over

aten = torch.ops.aten


def replace_laid_out(old: fx.Node, new: fx.Node) -> None:
    """Makes all users of a node read another, whose strides may differ."""
    if _layout(old) == _layout(new):
        take_over(old, new)
    else:
        former = old.meta["val"]
        old.replace_all_uses_with(new)
        _refresh(new, former)


def _refresh(node: fx.Node, former: Any) -> None:
    """Computes the fake values anew that depend on a node's strides, as far as they make a difference.

    A user that these strides do not suit, or of whose need of them nothing is known, reads a copy that lies as it was.

    Args:
        former: the value that it had before.
    """
    for user in list(node.users):
        if user.op != "call_function" or "val" not in user.meta:
            continue
        before, value = _layout(user), user.meta["val"]
        try:
            if not takes_any_strides(user.target):
                raise ValueError(f"{user.target} may need its arguments as they were")
            if "unbacked_bindings" in user.meta:
                raise ValueError(f"{user.target} would give other symbols for its sizes")
            set_value_by_layout(user)
            _run_on_meta(user)
        except (RuntimeError, ValueError):
            user.meta["val"] = value
            _read_copy(user, node, former)
        else:
            if _layout(user) != before:
                _refresh(user, value)
            elif is_view(user):
                refresh_views(user)


def _run_on_meta(user: fx.Node) -> None:
    """Runs a view as it will run. A fake one takes strides of dimensions of size 1 that this one refuses (torch 2.13, 2.15)."""
    if user.target is not aten.view.default:
        return
    source, result = user.args[0].meta["val"], user.meta["val"]  # type: ignore[union-attr]
    sizes, shape, stride = map(_hints, (result.shape, source.shape, source.stride()))
    if sizes and shape and stride:
        with as_it_runs():
            torch.empty_strided(shape, stride, device="meta").view(sizes)


def _hints(sizes: Sequence[int | torch.SymInt]) -> list[int] | None:
    hints = [size_hint(size) for size in sizes]
    return None if None in hints else hints  # type: ignore[return-value]


def takes_any_strides(target: Any) -> bool:
    """Whether an operator is right for any strides of its arguments, or refuses them.

    PyTorch's own are, and f8fx's. A custom one may be given memory and sizes alone, which its fake implementation does not tell.
    """
    if target is operator.getitem:
        return True  # of several results
    if not is_operator(target):
        return False
    return is_of_torch(target) or target.namespace == "f8fx" or torch.Tag.flexible_layout in target.tags


def _read_copy(user: fx.Node, node: fx.Node, former: torch.Tensor) -> None:
    """Lets a user read a copy of a node that lies in memory as the node's value did before."""
    order = _order(former)
    is_turned = order != sorted(order)
    copy = _insert(user, aten.permute.default, node, order) if is_turned else node
    copy = _insert(user, aten.clone.default, copy, memory_format=torch.contiguous_format)
    if is_turned:
        copy = _insert(user, aten.permute.default, copy, [order.index(dim) for dim in range(len(order))])
    user.replace_input_with(node, copy)


def _insert(user: fx.Node, target: Any, source: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
    with user.graph.inserting_before(user):
        node = user.graph.call_function(target, (source, *args), kwargs)
    node.meta = dict(source.meta)
    set_value_by_layout(node)
    return node


def _order(value: torch.Tensor) -> list[int]:
    """The dimensions of a tensor as they lie in memory, the outermost first; as they are where nothing is known of them."""
    strides, dims = _hints(value.stride()), range(value.dim())
    return [*dims] if strides is None else sorted(dims, key=lambda dim: -strides[dim])


def _layout(node: fx.Node) -> object:
    return _layout_of(node.meta.get("val"))


def _layout_of(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(map(str, value.shape)), tuple(map(str, value.stride())), value.dtype
    if isinstance(value, tuple | list):  # the parts of a split
        return tuple(map(_layout_of, value))
    return None if value is None else type(value)
