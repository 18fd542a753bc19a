"""Where the gradients of one input are added up, so that one gemm can do it (:mod:`passes.merge`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from .elements import CASTS, SAME_ORDER, is_elementwise

aten = torch.ops.aten


@dataclass(frozen=True)
class Sum:
    """A sum that the merged ``grad_input`` gemm computes.

    Attributes:
        root: the last addition.
        others: summands that are not gradients of the family, in order.
        summand: one of the family's summands as the sum sees it, after views.
        additions: all that it replaces.
    """

    root: fx.Node
    others: tuple[fx.Node, ...]
    summand: fx.Node
    additions: frozenset[fx.Node]


def sum_of(gradients: Sequence[fx.Node]) -> Sum | None:
    """The one sum that uses the gradients of an input, and uses nothing of them but their sum."""
    summands = [_through_views(gradient) for gradient in gradients]
    chains = [_additions(summand) for summand in summands]
    common = set(chains[0]).intersection(*chains[1:])
    root = next((node for node in chains[0] if node in common), None)
    if root is None:
        return None
    inside = {node for chain in chains for node in chain[: chain.index(root) + 1]}
    others: list[fx.Node] = []
    known = set(summands)
    todo = [root]  # depth first, from left to right, however many there are
    while todo:
        node = todo.pop()
        if node in inside:
            todo += [summand for summand in reversed(node.args[:2]) if isinstance(summand, fx.Node)]
        elif node not in known:
            others.append(node)
    return Sum(root, tuple(others), summands[0], frozenset(inside))


def _through_views(node: fx.Node) -> fx.Node:
    while len(node.users) == 1:
        (user,) = node.users
        if user.target not in SAME_ORDER and not _widens(user):
            break
        node = user
    return node


def _widens(node: fx.Node) -> bool:
    """Whether values are cast to float32, as under autocast: the sum of the gradients is not rounded after each addition.

    Merged it is rounded once, behind the accumulator.
    """
    return node.target in CASTS and node.meta["val"].dtype == torch.float32


def _additions(node: fx.Node) -> list[fx.Node]:
    """The additions, from the inside out, in which a node's value is used and nothing else is."""
    chain: list[fx.Node] = []
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is not aten.add.Tensor or user.kwargs or not _adds_alike(user):
            break
        chain.append(user)
        node = user
    return chain


def _adds_alike(node: fx.Node) -> bool:
    """Whether two tensors of one shape and dtype are added, without broadcasting."""
    return node.args[0] is not node.args[1] and is_elementwise(node)
