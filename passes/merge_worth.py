"""The part of *merge* that asks whether one gemm is faster than several, and what each of them gains by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from f8fx.cost import CostModel
from f8fx.recipe import Role
from f8fx.report import NO_TENSOR_CORES, MergeDecision
from f8fx.torch_private import size_hint

from .choice import Choice, Skip
from .family import Apart, Family
from .fqn import short_names
from .lifetimes import copied_bytes

#: The size of a role's gemm that its parts make up: n, k and m of [m, k] x [k, n].
_AXIS: dict[Role, int] = {"output": 2, "grad_input": 1, "grad_weight": 0}


@dataclass(frozen=True)
class Paying:
    """A family to merge.

    Attributes:
        separate: predicted seconds of its gemms as they are, for each role in the order of the parts.
        merged: of the one gemm of each role, and of what is copied for it.
    """

    family: Family
    separate: Mapping[Role, tuple[float, ...]]
    merged: Mapping[Role, float]

    @property
    def separate_seconds(self) -> float:
        """Of all gemms."""
        return sum(map(sum, self.separate.values()))

    @property
    def merged_seconds(self) -> float:
        """Of all gemms."""
        return sum(self.merged.values())


def judged(family: Family, model: CostModel) -> Paying | Apart:
    """Whether the merged gemms are predicted to take less time than the separate ones."""
    if not model.can_pay:
        return Apart(family.layers, f"{NO_TENSOR_CORES} {model.hardware.name}")
    separate: dict[Role, tuple[float, ...]] = {}
    merged: dict[Role, float] = {}
    for role, members in family.members.items():
        rowwise, exact = members[0].spec.is_rowwise, members[0].spec.scales_after_gemm
        parts = []
        for gemm in (conversion.gemm for conversion in members):
            sizes = [size_hint(size) for size in (gemm.m, gemm.k, gemm.n)]
            if any(size is None for size in sizes):
                return Apart(family.layers, "size known only at run time")
            parts.append([int(size or 0) for size in sizes])
        whole = list(parts[0])
        whole[_AXIS[role]] = sum(part[_AXIS[role]] for part in parts)
        separate[role] = tuple(model.gemm_seconds(m, k, n, True, rowwise, exact) for m, k, n in parts)
        merged[role] = model.gemm_seconds(whole[0], whole[1], whole[2], True, rowwise, exact)
    if family.copied:
        merged["output"] += model.copy_seconds(copied_bytes(family.members["output"], family.copied))
    result = Paying(family, separate, merged)
    if result.merged_seconds >= result.separate_seconds:
        return Apart(family.layers, "would be no faster", _figures(result))
    return _with_kept(result, model) if family.kept else result


def _with_kept(paying: Paying, model: CostModel) -> Paying:
    """With the ``grad_weight`` of the family that stay in high precision, if that pays too."""
    family = paying.family
    sizes = [[int(size_hint(size) or 0) for size in (gemm.m, gemm.k, gemm.n)] for gemm in family.kept]
    width = family.kept[0].left.dtype.itemsize
    parts = tuple(model.gemm_seconds(m, k, n, False, itemsize=width) for m, k, n in sizes)
    _, k, n = sizes[0]
    merged = model.gemm_seconds(sum(m for m, _, _ in sizes), k, n, False, itemsize=width)
    for gemm, (m, _, _) in zip(family.kept, sizes, strict=True):
        if not gemm.left.fused:
            merged += model.copy_seconds(m * k * width)
    if merged >= sum(parts):
        return replace(paying, family=replace(family, kept=()))
    return replace(
        paying,
        separate={**paying.separate, "grad_weight": parts},
        merged={**paying.merged, "grad_weight": merged},
    )


def _figures(paying: Paying) -> str:
    return f"{paying.separate_seconds * 1e6:.4g} us apart, {paying.merged_seconds * 1e6:.4g} us as one"


# -- for the report -------------------------------------------------------------------------------


def merge_decision(outcome: Paying | Apart) -> MergeDecision:
    """What became of layers that read one input, as plain data."""
    if isinstance(outcome, Apart):
        names = tuple(gemm.fqn for gemm in outcome.layers)
        return MergeDecision(names, False, outcome.reason, outcome.detail)
    names = tuple(gemm.fqn for gemm in outcome.family.layers)
    return MergeDecision(
        names,
        True,
        "merged",
        _figures(outcome),
        roles=tuple(outcome.family.members),
        kept_roles=("grad_weight",) if outcome.family.kept else (),
        separate_seconds=outcome.separate_seconds,
        merged_seconds=outcome.merged_seconds,
    )


def noted(choices: Sequence[Choice], outcomes: Sequence[Paying | Apart]) -> list[Choice]:
    """The choices; those of layers that read one input say whether they were merged, and gain what merging gains."""
    notes: dict[fx.Node, str] = {}
    kept: dict[fx.Node, str] = {}
    gains: dict[fx.Node, float] = {}
    for outcome in outcomes:
        if isinstance(outcome, Apart):
            why = f"{outcome.reason}: {outcome.detail}" if outcome.detail else outcome.reason
            notes.update((gemm.node, f"not merged: {why}") for gemm in outcome.layers)
            continue
        texts = _merged_with([gemm.fqn for gemm in outcome.family.layers])
        notes.update(zip((gemm.node for gemm in outcome.family.layers), texts, strict=True))
        kept.update((gemm.node, text) for gemm, text in zip(outcome.family.kept, texts, strict=False))
        for role, members in outcome.family.members.items():
            parts = outcome.separate[role]
            left = outcome.merged[role] / sum(parts)  # of each gemm's seconds
            pairs = zip(members, parts, strict=True)
            gains.update((conversion.gemm.node, seconds * (1 - left)) for conversion, seconds in pairs)
    return [_noted(choice, notes, kept, gains) for choice in choices]


def _noted(
    choice: Choice, notes: Mapping[fx.Node, str], kept: Mapping[fx.Node, str], gains: Mapping[fx.Node, float]
) -> Choice:
    if isinstance(choice, Skip):
        return replace(choice, merge=kept.get(choice.gemm.node, ""))
    noted = replace(choice, merge=notes.get(choice.gemm.layer, ""))
    gain = gains.get(choice.gemm.node, 0.0)
    if not gain or not choice.seconds or not choice.speedup:
        return noted
    float8 = choice.seconds / choice.speedup - gain
    return replace(noted, speedup=choice.seconds / float8)


def _merged_with(names: Sequence[str]) -> list[str]:
    """For each layer which others it is one with; how many, where names do not tell."""
    if not all(names) or len(set(names)) < len(names):
        return [f"merged with {len(names) - 1} more"] * len(names)
    short = short_names(names)
    return [f"merged with {', '.join(other for other in short if other != own)}" for own in short]
