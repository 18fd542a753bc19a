"""The looking half of *merge*: which layers read one input and can be one (:mod:`passes.merge`).

Every layer that reads an input others read too ends in a :class:`Family` or in an :class:`Apart` with its reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from f8fx import ops
from f8fx.hardware import ALIGNMENT
from f8fx.recipe import Role
from f8fx.torch_private import stands_for_write

from .bias import settled
from .choice import KEPT_BY_RECIPE, Choice, Convert
from .fqn import short_names
from .gemm import Gemm, Operand, Unmatched
from .lifetimes import Members, copied_out
from .operand import KEEP_VALUES, is_same, is_view, shape_of
from .origins import is_gathered
from .sums import Sum, sum_of

aten = torch.ops.aten

_FORWARD = (aten.mm.default, aten.addmm.default)
_GRADIENTS: tuple[Role, ...] = ("grad_input", "grad_weight")


@dataclass(frozen=True)
class Family:
    """Layers of one input that can be merged.

    Attributes:
        members: for every role that is merged its conversions, in the order of the parts.
        grads: the output gradients of the layers, in the same order; empty without a backward.
        sum: how the gradients of the input are used, if they are merged.
        kept: the ``grad_weight`` matmuls that the recipe keeps in high precision, if they can be one too.
        copied: the forward matmuls whose results are copied out of the merged product.
    """

    members: dict[Role, tuple[Convert, ...]]
    grads: tuple[Operand, ...] = ()
    sum: Sum | None = None
    kept: tuple[Gemm, ...] = ()
    copied: frozenset[fx.Node] = frozenset()

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


#: Runs of layers that could be one, each of which is looked at by itself.
Parted = Callable[[Members], Sequence[Members]]
#: Ways to make gemms of layers that could be one, the best first; given whether their gradients are merged too.
Ways = Callable[[Members, bool], Sequence[Sequence[Members]]]


def families(
    choices: Sequence[Choice],
    backward: Set[fx.Node],
    parted: Parted,
    ways: Ways,
) -> list[Family | Apart]:
    """What becomes of all layers that read one input, of those at least that are converted.

    Args:
        backward: the nodes of the backward.
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
    summed: set[fx.Node] = set()
    for members in (run for group in groups.values() for run in _runs(_distinct_weights(group), parted)):
        if len(members) < 2:
            found.append(_apart(members, "its result would be in memory for too long"))
            continue
        members = settled(members)
        trains = any(gradients.get((member.gemm.node, role)) for member in members for role in _GRADIENTS)
        outcome: list[Family | Apart] = []
        for way in (*ways(members, trains), [members]):  # as one last, for the reason if there is no way
            made = [_family(part, gradients, kept, backward) for part in way if len(part) > 1]
            outcome = _apart_where_sums_overlap(made, summed)
            if all(isinstance(each, Family) for each in outcome):
                outcome += [
                    _apart(part, "copying its result out would cost more") for part in way if len(part) == 1
                ]
                break
        summed |= {node for each in outcome for node in _additions(each)}
        found += outcome
    judged = {gemm.node for each in found for gemm in each.layers}
    for siblings in readers.values():
        found += _alone(siblings, groups, judged)
    return found


def _runs(members: Members, parted: Parted) -> Sequence[Members]:
    return parted(members) if len(members) > 1 else ()


def _apart_where_sums_overlap(found: Iterable[Family | Apart], summed: set[fx.Node]) -> list[Family | Apart]:
    """Each sum is replaced once. It may read another as a whole."""
    taken, result = set(summed), []
    for each in found:
        if taken.isdisjoint(_additions(each)):
            taken |= _additions(each)
        else:
            each = Apart(each.layers, "another merged sum is part of theirs")
        result.append(each)
    return result


def _additions(found: Family | Apart) -> frozenset[fx.Node]:
    return found.sum.additions if isinstance(found, Family) and found.sum is not None else frozenset()


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
    if gemm.experts:
        return "a grouped matmul"
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
    if _is_written(gemm.right.node):
        return "an operator writes to the weight"
    return "the weight is gathered in the graph" if is_gathered(gemm.right.node) else ""


def _is_written(weight: fx.Node) -> bool:
    """Whether an operator writes to what a weight is, or is moved or cast of.

    It must not before the parts of the joined weight have been read, which Inductor of torch 2.13 does not make sure of.
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


def _distinct_weights(group: list[Convert]) -> list[Convert]:
    """Members with weights of their own that are known before the first of the matmuls."""
    first = group[0].gemm.node
    members: dict[fx.Node, Convert] = {}
    for conversion in group:
        weight = conversion.gemm.right.node
        if weight < first:
            members.setdefault(weight, conversion)
    return list(members.values())


def _family(members: Members, gradients: Gradients, kept: Kept, backward: Set[fx.Node]) -> Family | Apart:
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
        total = sum_of([gemm.node for gemm in gemms(roles["grad_input"])])
        pairs = zip(roles["grad_input"], members, strict=True)
        if any(grad.gemm.right.kind == "grad_output" for grad in roles["grad_input"]):
            return _apart(members, "the input is transposed in memory, and so is its gradient")
        if not all(_differentiates(grad.gemm, output.gemm) for grad, output in pairs):
            return _apart(members, "grad_input is no plain matmul with the same weight")
        if total is None:
            return _apart(members, "input gradients are not only added up")
    if "grad_weight" in roles:
        own = tuple(conversion.gemm.left for conversion in roles["grad_weight"])
        if all(conversion.gemm.right.kind == "grad_output" for conversion in roles["grad_weight"]):
            return _apart(members, "weight gradients are x.T @ dy, not dy.T @ x")
        if not _are_plain(gemms(roles["grad_weight"]), members[0].gemm.left.node):
            return _apart(members, "grad_weight is no plain matmul with the same input")
        if grads and [grad.node for grad in grads] != [grad.node for grad in own]:
            return _apart(members, "grad_input and grad_weight read different gradients")
        grads = own
        if not _can_wait(gemms(roles["grad_weight"])):
            return _apart(members, "one weight gradient depends on another")
    if grads and len({grad.node for grad in grads}) != len(grads):
        # the gradients are one tensor already
        return _apart(members, "the outputs are added up, so their gradients are one tensor")
    for role, conversions in roles.items():
        formats = {(c.left_dtype, c.right_dtype, c.pad_k, c.gemm.dtype) for c in conversions}
        if len(formats) != 1:
            return _apart(members, f"{role} is converted differently")
    return Family(roles, grads, total, _kept(members, kept, grads), copied_out(members, backward))


def _kept(members: Sequence[Convert], kept: Kept, grads: Sequence[Operand]) -> tuple[Gemm, ...]:
    """The high-precision ``grad_weight`` of all layers, if one gemm can compute them; else none."""
    found = [kept.get(conversion.gemm.node, ()) for conversion in members]
    if not grads or any(len(gemms) != 1 for gemms in found):
        return ()
    matmuls = tuple(own[0] for own in found)
    fits = _are_plain(matmuls, members[0].gemm.left.node) and _can_wait(matmuls)
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
    weight = grad.right.node is output.right.node
    # a square one can be multiplied the other way round, in a backward that is written by hand
    turned = grad.right.transposed == output.right.transposed and is_same(output.k, output.n)
    is_plain = grad.node.target is aten.mm.default and not grad.left.transposed
    return is_plain and grad.left.kind == "grad_output" and weight and not turned


def _can_wait(members: Sequence[Gemm]) -> bool:
    """Whether nothing that the last of the matmuls needs depends on an earlier one."""
    nodes = {gemm.node for gemm in members}
    dependent = nodes.union(users_between(nodes, max(nodes)))
    return not any(source in dependent for node in nodes for source in node.all_input_nodes)


def users_between(nodes: set[fx.Node], last: fx.Node) -> list[fx.Node]:
    """Everything that depends on the nodes and stands before the node `last`, in graph order."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        for user in todo.pop().users:
            if user not in found and user not in nodes and user < last:
                found.add(user)
                todo.append(user)
    return sorted(found)
