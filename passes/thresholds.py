"""From how many rows on a conversion pays, where their number is dynamic.

A verdict is for the number of rows that a graph was traced with, and for a matmul among others, with which it
shares casts. So is the threshold: the matmuls that share casts, directly or through each other, are planned anew with
other numbers of rows. It never contradicts the verdict: what is converted has one that is no larger than the number
it was traced with, what is not a larger one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from f8fx.cost import MAX_M, CostModel
from f8fx.hardware import ALIGNMENT, aligned
from f8fx.plan import PlannedGemm, plan

from .choice import Convert


@dataclass(frozen=True)
class _Group:
    """Matmuls that are planned together; groups of one kind are planned alike."""

    kind: int
    members: Sequence[int]


class Thresholds:
    """Answers for the matmuls of a graph.

    Args:
        model: predicts what they cost.
        gemms: all that could be converted, as they were traced.
        choices: the same.
        planned: makes the former of the latter, dynamic sizes multiplied by a factor.
    """

    def __init__(
        self,
        model: CostModel,
        gemms: Sequence[PlannedGemm],
        choices: Sequence[Convert],
        planned: Callable[[Convert, float], PlannedGemm | None],
    ) -> None:
        self.model = model
        self.gemms, self.choices = gemms, choices
        self.planned = planned
        self.known: dict[Hashable, int | None] = {}
        self.verdicts: dict[Hashable, dict[int, bool]] = {}

    def rows(self, index: int, traced: int, pays: bool) -> int | None:
        """The smallest number of rows, a multiple of 16 or that of the trace, from which it is converted; ``None``: at none.

        Args:
            traced: the number of rows it was traced with.
            pays: what was decided for that number.
        """
        group, place = self._groups[index]
        key = (traced, pays, place, group.kind)
        if key not in self.known:
            self.known[key] = self._search(group, place, max(traced, 1), pays)
        return self.known[key]

    @cached_property
    def _groups(self) -> dict[int, tuple[_Group, int]]:
        """For each matmul its group, and its place there."""
        kinds: dict[Hashable, int] = {}
        found: dict[int, tuple[_Group, int]] = {}
        for members in _groups(self.gemms):
            dynamic = tuple(_dynamic(self.choices[i]) for i in members)
            likeness = _likeness([self.gemms[i] for i in members]), dynamic
            kind = kinds.setdefault(likeness, len(kinds))
            group = _Group(kind, members)
            found.update({index: (group, place) for place, index in enumerate(members)})
        return found

    def _verdicts(self, group: _Group, traced: int, rows: int) -> dict[int, bool]:
        """Which places of a group are converted with a number of rows: one plan for all its members' searches."""
        key = (group.kind, traced, rows)
        if key not in self.verdicts:
            made = [self.planned(self.choices[i], rows / traced) for i in group.members]
            gemms = {place: gemm for place, gemm in enumerate(made) if gemm is not None}
            plans = plan(self.model, list(gemms.values()))
            self.verdicts[key] = {place: each.convert for place, each in zip(gemms, plans, strict=True)}
        return self.verdicts[key]

    def _search(self, group: _Group, place: int, traced: int, pays: bool) -> int | None:
        def converted(rows: int) -> bool:
            return self._verdicts(group, traced, rows).get(place, False)

        if pays:
            low, high = 0, aligned(traced)
        else:
            low = high = traced // ALIGNMENT * ALIGNMENT
            while not converted(high := max(2 * high, ALIGNMENT)):
                low = high
                if high >= MAX_M:
                    return None
        while high - low > ALIGNMENT:
            middle = (low + high) // (2 * ALIGNMENT) * ALIGNMENT
            low, high = (low, middle) if converted(middle) else (middle, high)
        # it need not be converted at fewer rows than it was traced with
        return min(high, traced) if pays else high


def _groups(gemms: Sequence[PlannedGemm]) -> list[list[int]]:
    """The matmuls that share layers or casts, directly or through each other."""
    members: dict[Hashable, list[int]] = defaultdict(list)
    for index, gemm in enumerate(gemms):
        for shared in (("layer", gemm.layer), *(operand.key for operand in gemm.operands)):
            members[shared].append(index)
    neighbours: dict[int, set[int]] = defaultdict(set)
    for sharing in members.values():
        for index in sharing[1:]:
            neighbours[sharing[0]].add(index)
            neighbours[index].add(sharing[0])
    groups, seen = [], set[int]()
    for start in range(len(gemms)):
        todo, found = [start], set[int]()
        while todo:
            index = todo.pop()
            if index not in seen:
                seen.add(index)
                found.add(index)
                todo.extend(neighbours[index])
        if found:
            groups.append(sorted(found))
    return groups


def _dynamic(choice: Convert) -> tuple[bool, ...]:
    """Which sizes of a matmul are multiplied with the number of rows."""
    gemm = choice.gemm
    return tuple(not isinstance(size, int) for size in (gemm.m, gemm.k, gemm.n))


def _likeness(gemms: Sequence[PlannedGemm]) -> Hashable:
    """Equal for groups that are planned alike: tensors and layers count by which is which."""
    numbers: dict[Hashable, int] = {}

    def number(key: Hashable) -> int:
        return numbers.setdefault(key, len(numbers))

    def alike(gemm: PlannedGemm) -> PlannedGemm:
        left, right = (replace(operand, key=number(operand.key)) for operand in gemm.operands)
        return replace(gemm, layer=number(("layer", gemm.layer)), operands=(left, right))

    return tuple(map(alike, gemms))
