"""The looking half of *merge*: which layers read one input and can be one (:mod:`passes.merge`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from f8fx import ops
from f8fx.recipe import Role

from .choice import ALIGNMENT, Convert
from .gemm import Gemm, Operand
from .operand import CASTS, MOVEMENTS, SAME_ORDER, is_same, shape_of

aten = torch.ops.aten

_FORWARD = (aten.mm.default, aten.addmm.default)
_GRADIENTS: tuple[Role, ...] = ("grad_input", "grad_weight")


@dataclass(frozen=True)
class Sum:
    """A sum that the merged ``grad_input`` gemm computes.

    Attributes:
        root: the last addition.
        others: summands that are not gradients of the family, in order.
        summand: one of the family's summands as the sum sees it, after views.
    """

    root: fx.Node
    others: tuple[fx.Node, ...]
    summand: fx.Node


@dataclass(frozen=True)
class Family:
    """Layers of one input that can be merged.

    Attributes:
        members: for every role that is merged its conversions, in the order of the parts.
        grads: the output gradients of the layers, in the same order; empty without a backward.
        sum: how the gradients of the input are used, if they are merged.
    """

    members: dict[Role, tuple[Convert, ...]]
    grads: tuple[Operand, ...] = ()
    sum: Sum | None = None


def families(conversions: Sequence[Convert], order: dict[fx.Node, int]) -> list[Family]:
    """All families among the conversions.

    Args:
        order: position of every node of the graph.
    """
    groups: dict[Hashable, list[Convert]] = defaultdict(list)
    gradients: dict[tuple[fx.Node, Role], list[Convert]] = defaultdict(list)
    for conversion in conversions:
        gemm = conversion.gemm
        if gemm.role == "output":
            if _is_plain(conversion):
                groups[_key(conversion)].append(conversion)
        else:
            gradients[gemm.layer, gemm.role].append(conversion)
    found: list[Family] = []
    sums: set[fx.Node] = set()
    for group in groups.values():
        members = _distinct_weights(group, order)
        family = _family(members, gradients, order) if len(members) > 1 else None
        if family is None:
            continue
        if family.sum is not None:
            if not sums.isdisjoint((family.sum.root, *family.sum.others)):
                continue  # another family's sum is part of this one's, and will have been replaced
            sums.add(family.sum.root)
        found.append(family)
    return found


def _key(conversion: Convert) -> Hashable:
    """Equal for forward matmuls that could be one."""
    gemm = conversion.gemm
    meta = gemm.node.meta
    return (
        gemm.left.node,
        gemm.right.transposed,
        gemm.right.dtype,
        gemm.dtype,
        conversion.left_dtype,
        conversion.right_dtype,
        meta.get("recompute"),
        meta.get("ac_graph_id"),
    )


def _is_plain(conversion: Convert) -> bool:
    gemm = conversion.gemm
    weight = shape_of(gemm.right.node)
    return (
        gemm.node.target in _FORWARD
        and not gemm.node.kwargs  # alpha, beta
        and gemm.left.kind == "input"
        and not gemm.left.transposed
        and len(weight) == 2
        and all(isinstance(size, int) for size in weight)
        and isinstance(gemm.n, int)
        and gemm.n % ALIGNMENT == 0
        and not conversion.pad_k
        and gemm.right.node.target not in ops.MARKERS
        and not _is_gathered(gemm.right.node)
    )


def _is_gathered(node: fx.Node) -> bool:
    """Whether a weight comes out of a collective; gathers in float8 (pass 6) save more than merging."""
    while node.op == "call_function" and (node.target in MOVEMENTS or node.target in CASTS):
        node = node.all_input_nodes[0]
    return node.op == "call_function" and getattr(node.target, "namespace", "").startswith("_c10d_functional")


def _distinct_weights(group: list[Convert], order: dict[fx.Node, int]) -> list[Convert]:
    """Members with weights of their own that are known before the first of the matmuls."""
    first = order[group[0].gemm.node]
    members: dict[fx.Node, Convert] = {}
    for conversion in group:
        weight = conversion.gemm.right.node
        if order[weight] < first:
            members.setdefault(weight, conversion)
    return list(members.values())


def _family(
    outputs: list[Convert], gradients: dict[tuple[fx.Node, Role], list[Convert]], order: dict[fx.Node, int]
) -> Family | None:
    members: dict[Role, tuple[Convert, ...]] = {"output": tuple(outputs)}
    for role in _GRADIENTS:
        found = [gradients.get((conversion.gemm.node, role), []) for conversion in outputs]
        if any(len(conversions) > 1 for conversions in found):
            return None
        if all(found):
            members[role] = tuple(conversions[0] for conversions in found)
        elif any(found):
            return None
    grads: tuple[Operand, ...] = ()
    total = None
    if "grad_input" in members:
        grads = tuple(conversion.gemm.left for conversion in members["grad_input"])
        total = _sum(members["grad_input"])
        pairs = zip(members["grad_input"], outputs, strict=True)
        if total is None or not all(_differentiates(grad.gemm, output.gemm) for grad, output in pairs):
            return None
    if "grad_weight" in members:
        own = tuple(conversion.gemm.left for conversion in members["grad_weight"])
        if not all(grad.transposed and grad.kind == "grad_output" for grad in own):
            return None
        if any(c.gemm.node.target is not aten.mm.default for c in members["grad_weight"]):
            return None
        source = outputs[0].gemm.left.node
        if any(c.gemm.right.node is not source or c.gemm.right.transposed for c in members["grad_weight"]):
            return None
        if grads and [grad.node for grad in grads] != [grad.node for grad in own]:
            return None
        grads = own
        if not _can_wait(members["grad_weight"], order):
            return None
    if grads and len({grad.node for grad in grads}) != len(grads):
        return None  # the layers' outputs were added: their gradients are one tensor already
    for role in members:
        formats = {(c.left_dtype, c.right_dtype, c.pad_k, c.gemm.dtype) for c in members[role]}
        if len(formats) != 1:
            return None
    return Family(members, grads, total)


def _differentiates(grad: Gemm, output: Gemm) -> bool:
    """Whether a matmul is ``dy @ w`` for the weight of an ``output``."""
    return (
        grad.node.target is aten.mm.default
        and grad.left.kind == "grad_output"
        and not grad.left.transposed
        and grad.right.node is output.right.node
    )


def _sum(members: Sequence[Convert]) -> Sum | None:
    """The one sum that uses the gradients of the input, and uses nothing of them but their sum."""
    summands = [_through_views(conversion.gemm.node) for conversion in members]
    chains = [_additions(summand) for summand in summands]
    common = [node for node in chains[0] if all(node in chain for chain in chains[1:])]
    if not common:
        return None
    root = common[0]
    inside = {node for chain in chains for node in chain[: chain.index(root) + 1]}
    others: list[fx.Node] = []

    def collect(node: fx.Node) -> None:
        for summand in node.args[:2]:
            assert isinstance(summand, fx.Node)
            if summand in inside:
                collect(summand)
            elif summand not in summands:
                others.append(summand)

    collect(root)
    return Sum(root, tuple(others), summands[0])


def _through_views(node: fx.Node) -> fx.Node:
    while len(node.users) == 1:
        (user,) = node.users
        if user.target not in SAME_ORDER:
            break
        node = user
    return node


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
    if node.args[0] is node.args[1]:
        return False
    nodes = [arg for arg in (node, *node.args[:2]) if isinstance(arg, fx.Node)]
    values = [n.meta["val"] for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    if len(values) != 3:
        return False
    same_shape = all(
        value.dim() == values[0].dim() and all(map(is_same, value.shape, values[0].shape)) for value in values
    )
    return same_shape and len({value.dtype for value in values}) == 1


def _can_wait(members: Sequence[Convert], order: dict[fx.Node, int]) -> bool:
    """Whether nothing that the last of the matmuls needs depends on an earlier one."""
    nodes = {conversion.gemm.node for conversion in members}
    last = max(order[node] for node in nodes)
    dependent = set(nodes)
    for node in users_between(nodes, order, last):
        dependent.add(node)
    return not any(source in dependent for node in nodes for source in node.all_input_nodes)


def users_between(nodes: set[fx.Node], order: dict[fx.Node, int], last: int) -> list[fx.Node]:
    """Everything that depends on the nodes and stands before position `last`, in graph order."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        for user in todo.pop().users:
            if user not in found and user not in nodes and order[user] < last:
                found.add(user)
                todo.append(user)
    return sorted(found, key=order.__getitem__)
