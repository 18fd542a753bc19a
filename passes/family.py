"""The looking half of *merge*: which layers read one input and can be one (:mod:`passes.merge`).

Every layer that reads an input others read too ends in a :class:`Family` or in an :class:`Apart` with its reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from f8fx import ops
from f8fx.recipe import Role

from .choice import ALIGNMENT, KEPT_BY_RECIPE, Choice, Convert
from .fqn import short_names
from .gemm import Gemm, Operand, Unmatched
from .operand import CASTS, SAME_ORDER, is_elementwise, is_gathered, shape_of

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
        kept: the ``grad_weight`` matmuls that the recipe keeps in high precision, if they can be one too.
    """

    members: dict[Role, tuple[Convert, ...]]
    grads: tuple[Operand, ...] = ()
    sum: Sum | None = None
    kept: tuple[Gemm, ...] = ()

    @property
    def layers(self) -> tuple[Gemm, ...]:
        """The forward matmuls, in the order of the parts."""
        return gemms(self.members["output"])


@dataclass(frozen=True)
class Apart:
    """Layers that stay as they are though others read their input too.

    Attributes:
        layers: their forward matmuls.
        reason: why, in a few words that recur and can be counted.
        detail: the same with names or numbers, or "".
    """

    layers: tuple[Gemm, ...]
    reason: str
    detail: str = ""


#: The gradients' conversions of each layer.
Gradients = Mapping[tuple[fx.Node, Role], Sequence[Convert]]
#: The ``grad_weight`` matmuls of each layer that the recipe keeps in high precision.
Kept = Mapping[fx.Node, Sequence[Gemm]]


class _Likeness(NamedTuple):
    """Equal for forward matmuls that could be one."""

    source: fx.Node
    transposed: bool
    weight: torch.dtype
    result: torch.dtype
    left: torch.dtype
    right: torch.dtype
    recompute: Hashable
    checkpoint: Hashable

    @staticmethod
    def of(conversion: Convert) -> _Likeness:
        gemm = conversion.gemm
        meta = gemm.node.meta
        return _Likeness(
            gemm.left.node,
            gemm.right.transposed,
            gemm.right.dtype,
            gemm.dtype,
            conversion.left_dtype,
            conversion.right_dtype,
            meta.get("recompute"),
            meta.get("ac_graph_id"),
        )

    def difference(self, other: _Likeness) -> str:
        """Why two matmuls of one input cannot be one; "" if they could."""
        if self.transposed != other.transposed:
            return "weights lie in memory differently"
        if self[2:6] != other[2:6]:
            return "dtypes differ"
        return "checkpointed differently" if self != other else ""


def families(choices: Sequence[Choice], order: dict[fx.Node, int]) -> list[Family | Apart]:
    """What becomes of all layers that read one input, of those at least that are converted.

    Args:
        order: position of every node of the graph.
    """
    groups: dict[_Likeness, list[Convert]] = defaultdict(list)
    gradients: dict[tuple[fx.Node, Role], list[Convert]] = defaultdict(list)
    kept: dict[fx.Node, list[Gemm]] = defaultdict(list)
    readers: dict[fx.Node, list[Choice]] = defaultdict(list)
    for choice in choices:
        gemm = choice.gemm
        if isinstance(gemm, Unmatched):
            continue
        if gemm.role == "output":
            readers[_input(gemm)].append(choice)
            if isinstance(choice, Convert) and not _unfit(choice):
                groups[_Likeness.of(choice)].append(choice)
        elif isinstance(choice, Convert):
            gradients[gemm.layer, gemm.role].append(choice)
        elif gemm.role == "grad_weight" and choice.reason == KEPT_BY_RECIPE:
            kept[gemm.layer].append(gemm)
    found: list[Family | Apart] = []
    sums: set[fx.Node] = set()
    for group in groups.values():
        members = _distinct_weights(group, order)
        if len(members) < 2:
            continue
        family = _family(members, gradients, kept, order)
        if isinstance(family, Family) and family.sum is not None:
            if sums.isdisjoint((family.sum.root, *family.sum.others)):
                sums.add(family.sum.root)
            else:  # it will have been replaced
                family = _apart(members, "another merged sum is part of theirs")
        found.append(family)
    judged = {gemm.node for each in found for gemm in each.layers}
    for siblings in readers.values():
        found += _alone(siblings, groups, judged)
    return found


def _input(gemm: Gemm) -> fx.Node:
    return gemm.right.node if gemm.left.kind == "weight" else gemm.left.node


def _unfit(conversion: Convert) -> str:
    """Why a layer can be merged with no other; "" if it could be."""
    gemm = conversion.gemm
    weight = shape_of(gemm.right.node)
    if gemm.left.kind != "input":
        return "the weight is the left operand"
    if gemm.left.transposed:
        return "the input is read transposed"
    if gemm.node.target not in _FORWARD or len(weight) != 2:
        return "a batched matmul"
    if gemm.node.kwargs:
        return "scaled by alpha or beta"
    if not all(isinstance(size, int) for size in (*weight, gemm.n)):
        return "a weight of dynamic size"
    if gemm.n % ALIGNMENT or conversion.pad_k:
        return "needs padding"
    if gemm.right.node.target in ops.MARKERS:
        return "the weight is float8 already"
    return "the weight is gathered in the graph" if is_gathered(gemm.right.node) else ""


def _alone(
    siblings: Sequence[Choice], groups: Mapping[_Likeness, Sequence[Convert]], judged: set[fx.Node]
) -> list[Apart]:
    """The layers of one input that have nothing to be merged with, by reason."""
    left: dict[str, list[Gemm]] = defaultdict(list)
    for choice in siblings if len(siblings) > 1 else ():
        if isinstance(choice, Convert) and choice.gemm.node not in judged:
            others = [other for other in siblings if other is not choice]
            left[_unfit(choice) or _why_alone(choice, others, groups)].append(choice.gemm)
    return [Apart(tuple(gemms), reason) for reason, gemms in left.items()]


def _why_alone(
    conversion: Convert, others: Sequence[Choice], groups: Mapping[_Likeness, Sequence[Convert]]
) -> str:
    converted = [other for other in others if isinstance(other, Convert)]
    if not converted:
        return "the other layers of its input are not in float8"
    fit = [other for other in converted if not _unfit(other)]
    if not fit:
        return "the other layers of its input cannot be merged"
    own = _Likeness.of(conversion)
    if len(groups[own]) == 1:
        return own.difference(_Likeness.of(fit[0]))
    weights = [other.gemm.right.node for other in groups[own] if other is not conversion]
    return (
        "one weight used twice" if conversion.gemm.right.node in weights else "a weight is computed too late"
    )


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
    members: Sequence[Convert], gradients: Gradients, kept: Kept, order: dict[fx.Node, int]
) -> Family | Apart:
    roles: dict[Role, tuple[Convert, ...]] = {"output": tuple(members)}
    for role in _GRADIENTS:
        found = [gradients.get((conversion.gemm.node, role), ()) for conversion in members]
        if any(len(conversions) > 1 for conversions in found):
            return _apart(members, f"a layer has more than one {role}")
        if all(found):
            roles[role] = tuple(conversions[0] for conversions in found)
        elif any(found):
            names = short_names([conversion.gemm.fqn for conversion in members])
            lacking = [name for name, conversions in zip(names, found, strict=True) if not conversions]
            return _apart(members, f"{role} of only some is in float8", _listed("not", lacking))
    grads: tuple[Operand, ...] = ()
    total = None
    if "grad_input" in roles:
        grads = tuple(conversion.gemm.left for conversion in roles["grad_input"])
        total = _sum(roles["grad_input"])
        pairs = zip(roles["grad_input"], members, strict=True)
        if not all(_differentiates(grad.gemm, output.gemm) for grad, output in pairs):
            return _apart(members, "grad_input is no plain matmul with the same weight")
        if total is None:
            return _apart(members, "input gradients are not only added up")
    if "grad_weight" in roles:
        own = tuple(conversion.gemm.left for conversion in roles["grad_weight"])
        if not _are_plain(gemms(roles["grad_weight"]), members[0].gemm.left.node):
            return _apart(members, "grad_weight is no plain matmul with the same input")
        if grads and [grad.node for grad in grads] != [grad.node for grad in own]:
            return _apart(members, "grad_input and grad_weight read different gradients")
        grads = own
        if not _can_wait(gemms(roles["grad_weight"]), order):
            return _apart(members, "one weight gradient depends on another")
    if grads and len({grad.node for grad in grads}) != len(grads):
        # the gradients are one tensor already
        return _apart(members, "the outputs are added up, so their gradients are one tensor")
    for role, conversions in roles.items():
        formats = {(c.left_dtype, c.right_dtype, c.pad_k, c.gemm.dtype) for c in conversions}
        if len(formats) != 1:
            return _apart(members, f"{role} is converted differently")
    return Family(roles, grads, total, _kept(members, kept, grads, order))


def _kept(
    members: Sequence[Convert], kept: Kept, grads: Sequence[Operand], order: dict[fx.Node, int]
) -> tuple[Gemm, ...]:
    """The high-precision ``grad_weight`` of all layers, if one gemm can compute them; else none."""
    found = [kept.get(conversion.gemm.node, ()) for conversion in members]
    if not grads or any(len(gemms) != 1 for gemms in found):
        return ()
    matmuls = tuple(own[0] for own in found)
    fits = _are_plain(matmuls, members[0].gemm.left.node) and _can_wait(matmuls, order)
    return matmuls if fits and [gemm.left.node for gemm in matmuls] == [grad.node for grad in grads] else ()


def gemms(conversions: Iterable[Convert]) -> tuple[Gemm, ...]:
    """What is converted."""
    return tuple(conversion.gemm for conversion in conversions)


def _apart(members: Iterable[Convert], reason: str, detail: str = "") -> Apart:
    return Apart(gemms(members), reason, detail)


def _listed(what: str, names: Sequence[str]) -> str:
    return f"{what} {', '.join(names)}" if all(names) else ""


def _are_plain(grad_weights: Sequence[Gemm], source: fx.Node) -> bool:
    """Whether matmuls are ``dy.T @ x`` for the input `x`."""
    return all(
        gemm.left.transposed
        and gemm.left.kind == "grad_output"
        and gemm.node.target is aten.mm.default
        and gemm.right.node is source
        and not gemm.right.transposed
        for gemm in grad_weights
    )


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


def _can_wait(members: Sequence[Gemm], order: dict[fx.Node, int]) -> bool:
    """Whether nothing that the last of the matmuls needs depends on an earlier one."""
    nodes = {gemm.node for gemm in members}
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
