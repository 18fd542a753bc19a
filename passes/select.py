"""Pass 2, *select*: for every matmul, ``Convert`` or ``Skip(reason)``. Only looks.

The guards stand in the order in which a user can do something about them: what the recipe and the
hardware allow, what the user filtered, what shapes allow, and last whether it pays. Each gives its
reason in words that recur, so that reasons can be counted, and the numbers in ``detail``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import fx

from f8fx import hardware as hardware_table
from f8fx import ops
from f8fx.cost import CostModel
from f8fx.hardware import ALIGNMENT, Hardware
from f8fx.lacks import lacks, lacks_grouped, not_grouped
from f8fx.recipe import HIGH_DTYPES, QuantSpec, Recipe
from f8fx.report import NO_TENSOR_CORES, GemmInfo, dtype_name
from f8fx.torch_private import overwritten_inputs, size_hint, statically_true

from .choice import EMPTY, KEPT_BY_RECIPE, Choice, Convert, Skip
from .find import Found
from .gemm import Gemm, Operand, Size, Unmatched
from .left import UNEVEN
from .matmuls import operands_of
from .parameters import is_uneven
from .stored import contracted, stored
from .worth import Worth, cost_model


class FilterError(ValueError):
    """The user's ``filter_fn`` raised, or gave no answer; the message says for which matmul."""


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


class Select:
    """Decides for every matmul that `find` saw.

    Args:
        recipe: what float8 means for each role.
        policy: the user's say.
        hardware: what the decisions are for; ``None``: the device each matmul runs on.
        predict: put the cost model's figures on every choice, also where they decide nothing.
        rescales: whether on a device a kernel of its own applies rowwise scales (:class:`f8fx.cost.CostModel`).
        runs: the graph is to run where its tensors are, so that what that device cannot run is left alone,
            whatever it is decided for; false where a graph is only looked at.
    """

    def __init__(
        self,
        recipe: Recipe,
        policy: Policy,
        hardware: Hardware | None = None,
        predict: bool = False,
        rescales: Callable[[torch.device], bool | None] = lambda device: True,
        runs: bool = False,
    ) -> None:
        self.recipe = recipe
        self.policy = policy
        self.hardware = hardware
        self.predict = predict
        self.rescales = rescales
        self.runs = runs

    def __call__(self, found: Found, cached: Collection[fx.Node] = ()) -> list[Choice]:
        """The choices; casts of the ``cached`` weights cost nothing."""
        uneven = {
            gemm.layer for gemm in found.gemms if is_uneven(gemm.left.node) or is_uneven(gemm.right.node)
        }
        overwritten = frozenset(overwritten_inputs(found.gemms[0].node.graph) if found.gemms else ())
        choices = [
            Skip(gemm, UNEVEN, "ranks would decide differently by their sizes")
            if gemm.layer in uneven
            else self._legal(gemm, overwritten)
            for gemm in found.gemms
        ]
        worth = Worth(self.recipe, self.model_of, cached)
        if self.policy.select == "auto":
            judged = worth.decide(choices)
            # a weight that exists in float8 only has no high-precision matmul to fall back to
            choices = [old if _is_float8(old.gemm) else new for old, new in zip(choices, judged, strict=True)]
        elif self.predict:
            choices = worth.predict(choices)
        choices += [Skip(unmatched, unmatched.reason) for unmatched in found.unmatched]
        return [worth.timed(choice) for choice in choices] if self.predict else choices

    def timed(self, choice: Skip) -> Skip:
        """The same, with what its matmul takes as it is, if figures are asked for."""
        return Worth(self.recipe, self.model_of).timed(choice) if self.predict else choice

    def hardware_of(self, device: torch.device) -> Hardware:
        """The hardware a matmul on that device is decided for."""
        return self.hardware or _hardware_of(device)

    def model_of(self, device: torch.device) -> CostModel:
        """What a matmul on that device is predicted to cost."""
        hardware = self.hardware_of(device)
        # decided for a GPU from anywhere else, a matmul is to run as it would there
        return cost_model(
            hardware, self.rescales(torch.device("cuda") if hardware.float8_tensor_cores else device)
        )

    # -- what is legal

    def _legal(self, gemm: Gemm, overwritten: Collection[fx.Node]) -> Choice:
        for guard in (
            self._recipe_guard,
            self._hardware_guard,
            self._experts_guard,
            self._filter_guard,
            self._size_guard,
        ):
            skip = guard(gemm)
            if skip is not None:
                return skip
        spec = self.recipe.gemm(gemm.role)
        assert spec is not None  # by the recipe guard
        hardware = self.hardware_of(gemm.device)
        dtypes = {
            operand.kind: hardware.float8_dtypes[self._operand_spec(gemm, operand).dtype]
            for operand in (gemm.left, gemm.right)
        }
        choice = Convert(
            gemm,
            spec,
            dtypes[gemm.left.kind],
            dtypes[gemm.right.kind],
            pad_k=not gemm.sums_groups and not is_aligned(gemm.k),
            pad_n=not is_aligned(gemm.n),
        )
        return self._reading_stored(choice, overwritten)

    def _reading_stored(self, choice: Convert, overwritten: Collection[fx.Node]) -> Convert:
        """The conversion, with the operands it reads as they are stored, be it with scales of rows where the recipe has one scale."""
        gemm, as_stored = choice.gemm, []
        for operand, dtype in ((gemm.left, choice.left_dtype), (gemm.right, choice.right_dtype)):
            if (found := stored(operand.node, overwritten)) is None:
                continue
            along = contracted(operand, operand is gemm.left)
            rowwise = choice.quant_spec(operand).granularity == "rowwise"
            if found.serves(dtype, along if rowwise else None):
                as_stored.append(operand.kind)
            elif not rowwise and not gemm.experts and found.serves(dtype, along):
                with_rows = choice.with_rows(operand)
                if not self._lacks(gemm, with_rows.quant_spec(operand)):
                    choice = with_rows
                    as_stored.append(operand.kind)
        return replace(choice, as_stored=tuple(as_stored))

    def _operand_spec(self, gemm: Gemm, operand: Operand):
        spec = self.recipe.operand(gemm.role, operand.kind)
        assert spec is not None
        return spec

    def _recipe_guard(self, gemm: Gemm) -> Skip | None:
        if self.recipe.gemm(gemm.role) is None:
            return Skip(gemm, KEPT_BY_RECIPE, f"{self.recipe.name}: {gemm.role}")
        if gemm.dtype not in self.recipe.convert_dtypes:
            dtypes = ", ".join(map(dtype_name, self.recipe.convert_dtypes))
            return Skip(
                gemm, f"{dtype_name(gemm.dtype)} matmul", f"recipe {self.recipe.name} converts {dtypes}"
            )
        read = [dtype_name(node.meta["val"].dtype) for node in operands_of(gemm.node)]
        if read[0] != read[1]:  # an error, which float8 would hide
            return Skip(gemm, "operands of two dtypes", " and ".join(read))
        for operand in (gemm.left, gemm.right):
            if operand.dtype not in HIGH_DTYPES:
                return Skip(gemm, f"{dtype_name(operand.dtype)} operand")
        return None

    def _hardware_guard(self, gemm: Gemm) -> Skip | None:
        hardware = self.hardware_of(gemm.device)
        if not hardware.float8_dtypes:
            return Skip(gemm, f"{NO_TENSOR_CORES} {hardware.name}")
        if self.policy.select == "auto" and not hardware.float8_tensor_cores and not _is_float8(gemm):
            hint = 'select="all" converts anyway, as an emulation'
            return Skip(gemm, f"{NO_TENSOR_CORES} {hardware.name}", hint)
        for operand in (gemm.left, gemm.right):
            if missing := self._lacks(gemm, self._operand_spec(gemm, operand)):
                return Skip(gemm, missing)
        return None

    def _lacks(self, gemm: Gemm, spec: QuantSpec) -> str:
        """What is missing for an operand, where the gemm is decided for or where it is to run; "" if nothing is."""
        hardware = self.hardware_of(gemm.device)
        if missing := lacks(hardware, spec):
            return missing
        dtype = hardware.float8_dtypes[spec.dtype]
        missing = lacks(_hardware_of(gemm.device), spec, dtype) if self.runs else ""
        return f"target {hardware.name}: {missing}" if missing else ""

    def _experts_guard(self, gemm: Gemm) -> Skip | None:
        """What ``torch._scaled_grouped_mm`` takes: certain operands, sizes in multiples of 16, a bfloat16 result."""
        if not gemm.experts:
            return None
        hardware = self.hardware_of(gemm.device)
        if missing := lacks_grouped(hardware):
            return Skip(gemm, missing)
        if self.runs and (missing := lacks_grouped(_hardware_of(gemm.device))):
            return Skip(gemm, f"target {hardware.name}: {missing}")
        if gemm.dtype != torch.bfloat16:
            reason = f"grouped {dtype_name(gemm.dtype)} matmul"
            return Skip(gemm, reason, "grouped float8 gemms give bfloat16 alone")
        reason, detail = not_grouped(self.recipe, gemm.role)
        if reason:
            return Skip(gemm, reason, detail)
        for letter, size in (("m", gemm.m) if gemm.sums_groups else ("k", gemm.k), ("n", gemm.n)):
            if not is_aligned(size):
                return Skip(
                    gemm, f"not a multiple of {ALIGNMENT}", f"{letter}={size}: experts are not padded"
                )
        return None

    def _filter_guard(self, gemm: Gemm) -> Skip | None:
        policy = self.policy
        for part in policy.filter_fqns:
            if part in gemm.fqn:
                return Skip(gemm, "filtered", f"filter_fqns has {part!r}")
        if policy.only_fqns and not any(part in gemm.fqn for part in policy.only_fqns):
            return Skip(gemm, "filtered", "not in only_fqns")
        if policy.filter_fn is not None and not _ask(policy.filter_fn, gemm):
            return Skip(gemm, "filtered", "filter_fn said no")
        return None

    def _size_guard(self, gemm: Gemm) -> Skip | None:
        for size in (gemm.m, gemm.k, gemm.n):
            if statically_true(size == 0):
                return Skip(gemm, EMPTY)
        if self.policy.pad == "never":
            if gemm.sums_groups:
                return Skip(gemm, "rows of experts are padded", 'pad="never"')
            for letter, size in (("k", gemm.k), ("n", gemm.n)):
                if not is_aligned(size):
                    return Skip(gemm, f"not a multiple of {ALIGNMENT}", f'{letter}={size}, pad="never"')
        return None


def is_aligned(size: Size) -> bool:
    """Whether a size is a multiple of 16 whatever its value at run time."""
    return statically_true(size % ALIGNMENT == 0)


def _is_float8(gemm: Gemm | Unmatched) -> bool:
    """Whether an operand is float8 already: a weight that was gathered so."""
    if isinstance(gemm, Unmatched):
        return False
    return gemm.left.node.target in ops.MARKERS or gemm.right.node.target in ops.MARKERS


def _ask(filter_fn: FilterFn, gemm: Gemm) -> bool:
    info = _info(gemm)
    try:
        answer = filter_fn(gemm.fqn, info)
        says = bool(answer)  # raises for an array of several
    except Exception as error:
        raise FilterError(
            f"filter_fn raised {type(error).__name__} for {gemm.fqn!r}, {info}: {error}"
        ) from error
    if answer is None:
        raise FilterError(
            f"filter_fn returned None for {gemm.fqn!r}, {info}: it must return True (convert) or False"
        )
    return says


def _info(gemm: Gemm) -> GemmInfo:
    m, k, n = (size_hint(size) or 0 for size in (gemm.m, gemm.k, gemm.n))
    return GemmInfo(gemm.fqn, gemm.role, m, k, n, gemm.dtype)


@lru_cache(maxsize=64)
def _hardware_of(device: torch.device) -> Hardware:
    return hardware_table.of_device(device)
