"""The looking half of *merge*: which layers read one input and can be one (:mod:`passes.merge`).

Every layer that reads an input others read too ends in a :class:`~.family.Family` or in an :class:`~.family.Apart`
with its reason.
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

from .bias import settled
from .choice import KEPT_BY_RECIPE, Choice, Convert
from .family import GRADIENTS, Apart, Family, apart, family_of
from .gemm import Gemm, Unmatched
from .lifetimes import Members
from .origins import is_gathered
from .sizes import shape_of
from .written import is_written

aten = torch.ops.aten

_FORWARD = (aten.mm.default, aten.addmm.default)


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


@dataclass(frozen=True)
class _Matmuls:
    """The matmuls of a graph.

    Attributes:
        readers: of each input the forward ones, converted or not.
        groups: those of them that could be one.
        gradients: of each layer the conversions of its gradients.
        kept: of each layer the ``grad_weight`` that the recipe keeps in high precision.
    """

    readers: Mapping[fx.Node, list[Choice]]
    groups: Mapping[_Likeness, list[Convert]]
    gradients: Mapping[tuple[fx.Node, Role], list[Convert]]
    kept: Mapping[fx.Node, list[Gemm]]

    @staticmethod
    def of(choices: Sequence[Choice]) -> _Matmuls:
        found = _Matmuls(*(defaultdict(list) for _ in range(4)))
        for choice in choices:
            gemm = choice.gemm
            if isinstance(gemm, Unmatched):
                continue
            if gemm.role == "output":
                found.readers[_input(gemm)].append(choice)
                if isinstance(choice, Convert) and not _unfit(choice):
                    found.groups[_Likeness.of(choice)].append(choice)
            elif isinstance(choice, Convert):
                found.gradients[gemm.layer, gemm.role].append(choice)
            elif gemm.role == "grad_weight" and choice.reason == KEPT_BY_RECIPE:
                found.kept[gemm.layer].append(gemm)
        return found


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
    matmuls = _Matmuls.of(choices)
    found: list[Family | Apart] = []
    summed: set[fx.Node] = set()
    for group in matmuls.groups.values():
        for members in _runs(_distinct_weights(group), parted):
            if len(members) < 2:
                found.append(apart(members, "its result would be in memory for too long"))
                continue
            made = _in_best_way(settled(members), ways, matmuls, backward, summed)
            summed |= {node for each in made for node in _additions(each)}
            found += made
    judged = {gemm.node for each in found for gemm in each.layers}
    for siblings in matmuls.readers.values():
        found += _alone(siblings, matmuls.groups, judged)
    return found


def _in_best_way(
    members: Members, ways: Ways, matmuls: _Matmuls, backward: Set[fx.Node], summed: set[fx.Node]
) -> list[Family | Apart]:
    """What becomes of layers that could be one.

    Args:
        summed: the additions of sums that are replaced already.
    """
    trains = any(matmuls.gradients.get((each.gemm.node, role)) for each in members for role in GRADIENTS)
    for way in (*ways(members, trains), [members]):  # as one last, for the reason if there is no way
        made = [family_of(part, matmuls.gradients, matmuls.kept, backward) for part in way if len(part) > 1]
        made = _apart_where_sums_overlap(made, summed)
        if all(isinstance(each, Family) for each in made):
            single = [part for part in way if len(part) == 1]
            return [*made, *(apart(part, "copying its result out would cost more") for part in single)]
    return made


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
    if gemm.right.node.target in ops.MARKERS or "weight" in conversion.as_stored:
        return "the weight is float8 already"
    if is_written(gemm.right.node):
        return "an operator writes to the weight"
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


def _distinct_weights(group: list[Convert]) -> list[Convert]:
    """Members with weights of their own that are known before the first of the matmuls."""
    first = group[0].gemm.node
    members: dict[fx.Node, Convert] = {}
    for conversion in group:
        weight = conversion.gemm.right.node
        if weight < first:
            members.setdefault(weight, conversion)
    return list(members.values())
