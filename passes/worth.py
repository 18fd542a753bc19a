"""The part of *select* that asks whether a legal conversion pays.

Layers decide as a whole, forward and backward together, and share the casts of tensors they both
read (:mod:`f8fx.plan`). A dynamic size counts with the value it was traced with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TypeVar

import torch
from torch import fx

from f8fx.calibration import own_calibration
from f8fx.cost import CostModel
from f8fx.hardware import ALIGNMENT, Hardware
from f8fx.plan import PlannedGemm, PlannedOperand, Verdict, plan
from f8fx.recipe import ROLES, Recipe, Role
from f8fx.torch_private import size_hint

from .choice import Choice, Convert, Skip
from .experts import GROUPED_MM, contracts_rows
from .gemm import Gemm, Operand, Size
from .sizes import is_same
from .thresholds import Thresholds

_Choice = TypeVar("_Choice", bound=Choice)


@dataclass(frozen=True)
class _Layer:
    """Sizes of the layer ``[m, k] @ [k, n]`` and the roles that could be converted."""

    m: int
    k: int
    n: int
    dynamic: bool
    roles: tuple[Role, ...]


@dataclass(frozen=True)
class _Prediction:
    """``pays_unpadded``: it would be converted if its sizes, and those of others, needed no padding."""

    verdict: Verdict
    layer: _Layer
    threshold: Callable[[], int | None]
    pays_unpadded: bool

    @property
    def speedup(self) -> float:
        return self.verdict.high_seconds / max(self.verdict.float8_seconds, 1e-12)


class Worth:
    """Judges choices by the cost model.

    Args:
        recipe: decides what casts a gemm needs.
        model_of: the cost model of what a matmul on a device is decided for.
        cached: weights whose casts cost nothing, since they were made before.
    """

    def __init__(
        self,
        recipe: Recipe,
        model_of: Callable[[torch.device], CostModel],
        cached: Collection[fx.Node] = (),
    ) -> None:
        self.recipe = recipe
        self.model_of = model_of
        self.cached = cached

    def decide(self, choices: Sequence[Choice]) -> list[Choice]:
        """The choices with every conversion that does not pay turned into a skip."""
        result = list(choices)
        for index, choice, prediction in self._predictions(choices, drop=True):
            if prediction is None:
                result[index] = Skip(choice.gemm, "size known only at run time", 'select="all" converts')
            else:
                result[index] = self._judge(choice, prediction)
        return result

    def predict(self, choices: Sequence[Choice]) -> list[Choice]:
        """The same choices, with what the cost model says of them."""
        result = list(choices)
        for index, choice, prediction in self._predictions(choices, drop=False):
            if prediction is not None:
                result[index] = replace(
                    choice,
                    detail=prediction.verdict.reason,
                    speedup=prediction.speedup,
                    seconds=prediction.verdict.high_seconds,
                )
        return result

    def timed(self, choice: _Choice) -> _Choice:
        """The choice with the seconds of its matmul as it is, where sizes are known."""
        if choice.seconds is not None:
            return choice
        gemm = choice.gemm
        sizes = [size_hint(size) for size in (gemm.m, gemm.k, gemm.n)]
        if None in sizes:
            return choice
        m, k, n = (int(size or 0) for size in sizes)
        value = gemm.node.meta["val"]
        model, experts = self.model_of(value.device), getattr(gemm, "experts", 0)
        batch, summed = 1, gemm.node.target is GROUPED_MM and contracts_rows(gemm.node)
        if summed:
            experts = int(value.shape[0])
        elif gemm.node.target is not GROUPED_MM:
            for size in value.shape[:-2]:
                batch *= size_hint(size) or 1
        # a batch fills the device like so many more rows
        itemsize = value.dtype.itemsize
        seconds = model.gemm_seconds(
            batch * m, k, n, False, itemsize=itemsize, experts=experts, sums_groups=summed
        )
        return replace(choice, seconds=seconds)

    def _predictions(
        self, choices: Sequence[Choice], drop: bool
    ) -> Iterator[tuple[int, Convert, _Prediction | None]]:
        """What every matmul that could be converted costs; ``None`` where sizes are unknown."""
        by_model: dict[CostModel, list[tuple[int, Convert, PlannedGemm]]] = {}
        layers = _layers(choice.gemm for choice in choices if isinstance(choice, Convert))
        for index, choice in enumerate(choices):
            if isinstance(choice, Convert):
                planned = self._planned(choice)
                if planned is None:
                    yield index, choice, None
                else:
                    by_model.setdefault(self.model_of(choice.gemm.device), []).append(
                        (index, choice, planned)
                    )
        for model, group in by_model.items():
            gemms = [planned for _, _, planned in group]
            thresholds = Thresholds(model, gemms, [choice for _, choice, _ in group], self._planned)
            verdicts = plan(model, gemms, drop)
            unpadded = _unpadded(model, gemms, verdicts)
            for place, verdict in enumerate(verdicts):
                index, choice, _ = group[place]
                layer = layers[choice.gemm.layer]
                threshold = partial(thresholds.rows, place, layer.m, verdict.convert)
                yield index, choice, _Prediction(verdict, layer, threshold, unpadded[place].convert)

    def _judge(self, choice: Convert, prediction: _Prediction) -> Choice:
        gemm, verdict, layer = choice.gemm, prediction.verdict, prediction.layer
        speedup, seconds = prediction.speedup, verdict.high_seconds
        reason, detail = self._reason(prediction)
        if layer.dynamic and not any(operand.node in self.cached for operand in (gemm.left, gemm.right)):
            threshold = prediction.threshold()
            detail += "; never pays" if threshold is None else f"; pays for M >= {threshold}"
        if not verdict.convert:
            return Skip(gemm, reason, detail, speedup, seconds)
        return replace(choice, detail=detail, speedup=speedup, seconds=seconds)

    def _reason(self, prediction: _Prediction) -> tuple[str, str]:
        """Why a matmul is left, in a few words and in more; the former says nothing where it is converted."""
        verdict, layer = prediction.verdict, prediction.layer
        if prediction.pays_unpadded and not verdict.convert:
            detail = f"K={layer.k}, N={layer.n}: padding would cost more than float8 gains"
            return f"not a multiple of {ALIGNMENT}", detail
        alone = "alone loses" in verdict.reason
        return "casts would cost more than it gains" if alone else "too small", verdict.reason

    def _planned(self, choice: Convert, factor: float = 1) -> PlannedGemm | None:
        """A matmul as `plan` sees it, its dynamic sizes so many times those it was traced with."""
        gemm = choice.gemm
        given = (gemm.m, gemm.k, gemm.n)
        sizes = [size_hint(size) for size in given]
        if any(size is None for size in sizes):
            return None
        factors = (1 if isinstance(size, int) else factor for size in given)
        m, k, n = (round((size or 0) * by) for size, by in zip(sizes, factors, strict=True))
        # a product reads what is stored itself, and casts it up on the way
        itemsize = 1 if _is_product(gemm) and "weight" in choice.as_stored else gemm.dtype.itemsize
        return PlannedGemm(
            role=gemm.role,
            m=m,
            k=k,
            n=n,
            itemsize=itemsize,
            rowwise=choice.spec.is_rowwise,
            rescale=choice.spec.scales_after_gemm,
            operands=(
                self._planned_operand(choice, gemm.left, m, k, contracted=1),
                self._planned_operand(choice, gemm.right, k, n, contracted=0),
            ),
            layer=gemm.layer,
            experts=gemm.experts,
            sums_groups=gemm.sums_groups,
            cut_bytes=gemm.dtype.itemsize * m * n if choice.pad_n else 0,
        )

    def _planned_operand(
        self, choice: Convert, operand: Operand, rows: int, columns: int, contracted: int
    ) -> PlannedOperand:
        gemm = choice.gemm
        spec = choice.quant_spec(operand)
        if operand.transposed:
            rows, columns, contracted = columns, rows, 1 - contracted
        if gemm.experts and operand.kind == "weight":
            rows *= gemm.experts
        return PlannedOperand(
            key=(operand.node, spec.dtype, spec.power_of_2_scale, gemm.sums_groups),
            rows=rows,
            cols=columns,
            transposed=contracted == 0,  # the gemm wants the contracted dimension innermost
            # that of groups has kernels of its own, which read for the amaxes, and then as if there were one
            rowwise=spec.granularity == "rowwise" and not gemm.sums_groups,
            itemsize=operand.dtype.itemsize,
            amax_fused=operand.fused and not gemm.sums_groups,
            # what is stored is copied where it is read as its transpose, which costs no more than the cast that it counts as
            cached=(operand.kind == "weight" and operand.node in self.cached)
            or (operand.kind in choice.as_stored and contracted != 0),
            # an activation in float8 is cast up by the kernel that makes it
            stored=operand.kind == "weight" and operand.kind in choice.as_stored and not _is_product(gemm),
        )


def _layers(gemms: Iterable[Gemm]) -> dict[fx.Node, _Layer]:
    sizes: dict[fx.Node, tuple[Size, Size, Size]] = {}
    roles: dict[fx.Node, set[Role]] = {}
    for gemm in gemms:
        roles.setdefault(gemm.layer, set()).add(gemm.role)
        sizes.setdefault(gemm.layer, _layer_sizes(gemm))
    return {
        layer: _Layer(
            m=size_hint(m) or 0,
            k=size_hint(k) or 0,
            n=size_hint(n) or 0,
            dynamic=not isinstance(m, int),
            roles=tuple(role for role in ROLES if role in roles[layer]),
        )
        for layer, (m, k, n) in sizes.items()
    }


def _layer_sizes(gemm: Gemm) -> tuple[Size, Size, Size]:
    """M, K, N of the layer, from any of its three gemms."""
    if gemm.role == "output":
        # a weight on the left computes the transposed output
        return (gemm.n, gemm.k, gemm.m) if gemm.left.kind == "weight" else (gemm.m, gemm.k, gemm.n)
    first_is_grad = gemm.left.kind == "grad_output"
    if gemm.role == "grad_input":
        return (gemm.m, gemm.n, gemm.k) if first_is_grad else (gemm.n, gemm.m, gemm.k)
    return (gemm.k, gemm.n, gemm.m) if first_is_grad else (gemm.k, gemm.m, gemm.n)


def _is_product(gemm: Gemm) -> bool:
    """Whether what is a matmul to the passes is one kernel of products and sums otherwise (:mod:`passes.products`)."""
    provenance = gemm.node.meta.get("f8fx")
    is_folded = provenance is not None and provenance.inserted_by == "fold"
    return is_folded and any(is_same(size, 1) for size in (gemm.m, gemm.n))


def _unpadded(model: CostModel, gemms: Sequence[PlannedGemm], verdicts: list[Verdict]) -> list[Verdict]:
    """What would be said of gemms whose padding cost nothing."""
    if all(verdict.convert for verdict in verdicts) or not any(gemm.cut_bytes for gemm in gemms):
        return verdicts
    return plan(model, [replace(gemm, cut_bytes=0) for gemm in gemms])


@lru_cache(maxsize=16)
def cost_model(hardware: Hardware, rescales: bool | None) -> CostModel:
    """The model of a GPU, made once."""
    return CostModel(hardware, own_calibration(hardware), rescales)
