"""Pass 2, *select*: for every matmul, ``Convert`` or ``Skip(reason)``. Only looks.

The guards stand in the order in which a user can do something about them: what the recipe and the
hardware allow, what the user filtered, what shapes allow, and last whether it pays. Each gives its
reason in words that recur, so that reasons can be counted, and the numbers in ``detail``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from f8fx import hardware as hardware_table
from f8fx.cost import CostModel, PlannedGemm, PlannedOperand, Verdict
from f8fx.hardware import Hardware
from f8fx.recipe import GemmSpec, Recipe
from f8fx.report import Decision, GemmInfo
from f8fx.torch_private import size_hint, statically_true

from .find import Found
from .gemm import Gemm, Operand, Size, Unmatched

#: Both contracted and trailing sizes of a float8 gemm must be multiples of this (``_scaled_mm``).
ALIGNMENT = 16

FilterFn = Callable[[str, GemmInfo], bool]


@dataclass(frozen=True)
class Policy:
    """The user's say in which matmuls are converted.

    Attributes:
        select: ``"auto"``: where the cost model says it pays; ``"all"``: wherever it is legal.
        filter_fqns: substrings of module names to leave alone.
        only_fqns: substrings of module names to convert; empty for no restriction.
        filter_fn: called with name and matmul; false leaves it alone.
        pad: ``"auto"``: zero-pad sizes that are no multiple of 16 (under ``select="auto"``: where
            that pays); ``"never"``: leave such matmuls alone.
    """

    select: Literal["auto", "all"] = "auto"
    filter_fqns: tuple[str, ...] = ()
    only_fqns: tuple[str, ...] = ()
    filter_fn: FilterFn | None = None
    pad: Literal["auto", "never"] = "auto"


@dataclass(frozen=True)
class Convert:
    """A matmul to rewrite, and how."""

    gemm: Gemm
    spec: GemmSpec
    left_dtype: torch.dtype
    right_dtype: torch.dtype
    pad_k: bool = False
    pad_n: bool = False
    detail: str = ""
    speedup: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Skip:
    """A matmul to leave as it is, and why."""

    gemm: Gemm | Unmatched
    reason: str
    detail: str = ""
    speedup: float | None = None
    seconds: float | None = None


Choice = Convert | Skip


def decision(choice: Choice) -> Decision:
    """The choice as plain data for reports."""
    gemm = choice.gemm
    return Decision(
        fqn=gemm.fqn,
        role=gemm.role,
        m=_plain(gemm.m),
        k=_plain(gemm.k),
        n=_plain(gemm.n),
        converted=isinstance(choice, Convert),
        reason="converted" if isinstance(choice, Convert) else choice.reason,
        detail=choice.detail,
        speedup=choice.speedup,
        seconds=choice.seconds,
    )


def _plain(size: Size) -> int | str:
    if isinstance(size, int):
        return size if size >= 0 else "?"
    return str(size)


class Select:
    """Decides for every matmul that `find` saw.

    Args:
        recipe: what float8 means for each role.
        policy: the user's say.
        hardware: what the decisions are for; ``None``: the device each matmul runs on.
        predict: put the cost model's figures on every choice, also where they decide nothing.
    """

    def __init__(
        self, recipe: Recipe, policy: Policy, hardware: Hardware | None = None, predict: bool = False
    ) -> None:
        self.recipe = recipe
        self.policy = policy
        self.hardware = hardware
        self.predict = predict

    def __call__(self, found: Found) -> list[Choice]:
        choices = [self._legal(gemm) for gemm in found.gemms]
        if self.policy.select == "auto":
            choices = self._worthwhile(choices)
        elif self.predict:
            choices = self._predicted(choices)
        left = [Skip(unmatched, unmatched.reason) for unmatched in found.unmatched]
        choices = [*choices, *left]
        return [self._timed(choice) for choice in choices] if self.predict else choices

    def hardware_of(self, device: torch.device) -> Hardware:
        """The hardware a matmul on that device is decided for."""
        return self.hardware or _hardware_of(device)

    # -- what is legal

    def _legal(self, gemm: Gemm) -> Choice:
        for guard in (self._recipe_guard, self._hardware_guard, self._filter_guard, self._size_guard):
            skip = guard(gemm)
            if skip is not None:
                return skip
        spec = self.recipe.gemm(gemm.role)
        assert spec is not None  # by the recipe guard
        hardware = self.hardware_of(gemm.device)
        return Convert(
            gemm,
            spec,
            hardware.float8_dtypes[self._operand_spec(gemm, gemm.left).dtype],
            hardware.float8_dtypes[self._operand_spec(gemm, gemm.right).dtype],
            pad_k=not is_aligned(gemm.k),
            pad_n=not is_aligned(gemm.n),
        )

    def _operand_spec(self, gemm: Gemm, operand: Operand):
        spec = self.recipe.operand(gemm.role, operand.kind)
        assert spec is not None
        return spec

    def _recipe_guard(self, gemm: Gemm) -> Skip | None:
        if self.recipe.gemm(gemm.role) is None:
            return Skip(gemm, "kept in high precision by the recipe", f"{self.recipe.name}: {gemm.role}")
        if gemm.dtype not in self.recipe.convert_dtypes:
            name = str(gemm.dtype).removeprefix("torch.")
            return Skip(gemm, f"{name} matmul", f"recipe {self.recipe.name} converts {self._dtypes()}")
        for operand in (gemm.left, gemm.right):
            if operand.dtype not in (torch.bfloat16, torch.float16, torch.float32):
                return Skip(gemm, f"{str(operand.dtype).removeprefix('torch.')} operand")
        return None

    def _dtypes(self) -> str:
        return ", ".join(str(dtype).removeprefix("torch.") for dtype in self.recipe.convert_dtypes)

    def _hardware_guard(self, gemm: Gemm) -> Skip | None:
        hardware = self.hardware_of(gemm.device)
        if not hardware.float8_dtypes:
            return Skip(gemm, f"no float8 tensor cores on {hardware.name}")
        if self.policy.select == "auto" and not hardware.float8_tensor_cores:
            hint = 'select="all" converts anyway, as an emulation' if hardware.float8_dtypes else ""
            return Skip(gemm, f"no float8 tensor cores on {hardware.name}", hint)
        for operand in (gemm.left, gemm.right):
            spec = self._operand_spec(gemm, operand)
            if spec.dtype not in hardware.float8_dtypes:
                return Skip(gemm, f"no {spec.dtype} on {hardware.name}")
            if spec.granularity not in hardware.granularities:
                return Skip(gemm, f"no {spec.granularity} float8 gemm on {hardware.name}")
        return None

    def _filter_guard(self, gemm: Gemm) -> Skip | None:
        policy = self.policy
        for part in policy.filter_fqns:
            if part in gemm.fqn:
                return Skip(gemm, "filtered", f"filter_fqns has {part!r}")
        if policy.only_fqns and not any(part in gemm.fqn for part in policy.only_fqns):
            return Skip(gemm, "filtered", "not in only_fqns")
        if policy.filter_fn is not None and not policy.filter_fn(gemm.fqn, _info(gemm)):
            return Skip(gemm, "filtered", "filter_fn said no")
        return None

    def _size_guard(self, gemm: Gemm) -> Skip | None:
        for size in (gemm.m, gemm.k, gemm.n):
            if statically_true(size == 0):
                return Skip(gemm, "empty")
        if self.policy.pad == "never":
            for letter, size in (("k", gemm.k), ("n", gemm.n)):
                if not is_aligned(size):
                    return Skip(gemm, f"not a multiple of {ALIGNMENT}", f'{letter}={size}, pad="never"')
        return None

    # -- what pays

    def _worthwhile(self, choices: list[Choice]) -> list[Choice]:
        result = list(choices)
        for index, choice, prediction in self._predictions(choices):
            if prediction is None:
                result[index] = Skip(choice.gemm, "size known only at run time", 'select="all" converts')
            else:
                result[index] = self._judge(choice, *prediction)
        return result

    def _predicted(self, choices: list[Choice]) -> list[Choice]:
        """The same choices, with what the cost model would say of them."""
        result = list(choices)
        for index, choice, prediction in self._predictions(choices):
            if prediction is not None:
                _, verdict, _ = prediction
                result[index] = replace(
                    choice,
                    detail=verdict.reason,
                    speedup=_speedup(verdict),
                    seconds=verdict.high_seconds,
                )
        return result

    def _predictions(
        self, choices: Sequence[Choice]
    ) -> Iterator[tuple[int, Convert, tuple[PlannedGemm, Verdict, CostModel] | None]]:
        """Index and cost of every matmul that could be converted; ``None`` where sizes are unknown."""
        by_model: dict[Hardware, list[tuple[int, Convert, PlannedGemm]]] = {}
        for index, choice in enumerate(choices):
            if isinstance(choice, Convert):
                plan = self._planned(choice)
                if plan is None:
                    yield index, choice, None
                else:
                    hardware = self.hardware_of(choice.gemm.device)
                    by_model.setdefault(hardware, []).append((index, choice, plan))
        for hardware, planned in by_model.items():
            model = _cost_model(hardware)
            verdicts = model.plan([plan for _, _, plan in planned])
            for (index, choice, plan), verdict in zip(planned, verdicts, strict=True):
                yield index, choice, (plan, verdict, model)

    def _timed(self, choice: Choice) -> Choice:
        """The choice with the seconds of its matmul as it is, where sizes are known."""
        if choice.seconds is not None:
            return choice
        gemm = choice.gemm
        sizes = [size_hint(size) for size in (gemm.m, gemm.k, gemm.n)]
        if any(size is None or size < 0 for size in sizes):
            return choice
        m, k, n = (int(size or 0) for size in sizes)
        value = gemm.node.meta["val"]
        batch = 1
        for size in value.shape[:-2]:
            batch *= size_hint(size) or 1
        model = _cost_model(self.hardware_of(value.device))
        # a batch fills the device like so many more rows
        seconds = model.gemm_seconds(batch * m, k, n, False, itemsize=value.dtype.itemsize)
        return replace(choice, seconds=seconds)

    def _judge(self, choice: Convert, plan: PlannedGemm, verdict: Verdict, model: CostModel) -> Choice:
        gemm = choice.gemm
        predicted = _speedup(verdict)
        detail = verdict.reason
        if not isinstance(gemm.m, int) and gemm.role == "output":
            threshold = model.threshold(plan.k, plan.n, self.recipe)
            detail += "; never pays" if threshold is None else f"; pays for M >= {threshold}"
        if not verdict.convert:
            return Skip(gemm, "too small", detail, predicted, verdict.high_seconds)
        padded = (choice.pad_n and gemm.role != "grad_weight") or (
            choice.pad_k and gemm.role != "grad_weight"
        )
        if padded and not model.pad_pays(plan.m, plan.k, plan.n, self.recipe):
            return Skip(
                gemm,
                f"not a multiple of {ALIGNMENT}",
                f"k={plan.k}, n={plan.n}: padding would cost more than float8 gains",
                predicted,
                verdict.high_seconds,
            )
        return Convert(
            gemm,
            choice.spec,
            choice.left_dtype,
            choice.right_dtype,
            choice.pad_k,
            choice.pad_n,
            detail,
            predicted,
            verdict.high_seconds,
        )

    def _planned(self, choice: Convert) -> PlannedGemm | None:
        gemm = choice.gemm
        sizes = [size_hint(size) for size in (gemm.m, gemm.k, gemm.n)]
        if any(size is None for size in sizes):
            return None
        m, k, n = (int(size or 0) for size in sizes)
        left = self._planned_operand(gemm, gemm.left, m, k, contracted=1)
        right = self._planned_operand(gemm, gemm.right, k, n, contracted=0)
        return PlannedGemm(
            role=gemm.role,
            m=m,
            k=k,
            n=n,
            itemsize=gemm.dtype.itemsize,
            rowwise=choice.spec.is_rowwise,
            rescale=choice.spec.scales_after_gemm,
            operands=(left, right),
            layer=gemm.layer,
        )

    def _planned_operand(
        self, gemm: Gemm, operand: Operand, rows: int, columns: int, contracted: int
    ) -> PlannedOperand:
        # the gemm takes both operands with the contracted dimension innermost
        stored = contracted if not operand.transposed else 1 - contracted
        return PlannedOperand(
            key=operand.key,
            rows=rows,
            cols=columns,
            transposed=stored == 0,
            rowwise=self._operand_spec(gemm, operand).granularity == "rowwise",
            itemsize=operand.dtype.itemsize,
            amax_fused=operand.fused,
        )


def _speedup(verdict: Verdict) -> float:
    """Of one matmul; ``float8_seconds`` already holds its share of the casts."""
    return verdict.high_seconds / max(verdict.float8_seconds, 1e-12)


def is_aligned(size: Size) -> bool:
    """Whether a size is a multiple of 16 whatever its value at run time."""
    return statically_true(size % ALIGNMENT == 0)


def _info(gemm: Gemm) -> GemmInfo:
    m, k, n = (size_hint(size) or 0 for size in (gemm.m, gemm.k, gemm.n))
    return GemmInfo(gemm.fqn, gemm.role, m, k, n, gemm.dtype)


@lru_cache(maxsize=64)
def _hardware_of(device: torch.device) -> Hardware:
    return hardware_table.of_device(device)


@lru_cache(maxsize=16)
def _cost_model(hardware: Hardware) -> CostModel:
    return CostModel(hardware)
