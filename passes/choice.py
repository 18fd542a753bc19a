"""What `select` decides for a matmul, and what the rewriting passes act on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from f8fx.hardware import ALIGNMENT
from f8fx.recipe import ROLE_OPERANDS, GemmSpec, OperandKind, QuantSpec
from f8fx.report import Decision

from .gemm import Gemm, Operand, Size, Unmatched
from .rewrite import RECOMPUTED

#: Why a matmul is left whose role the recipe has no float8 for.
KEPT_BY_RECIPE = "kept in high precision by the recipe"
EMPTY = "empty"


@dataclass(frozen=True)
class Convert:
    """A matmul to rewrite, and how; ``merge`` is what `merge` has to say of it.

    ``adds_bias``: the gemm adds the bias, before it rounds. ``as_stored``: its operands that are float8 already, and are
    read as they are (:mod:`passes.stored`).
    """

    gemm: Gemm
    spec: GemmSpec
    left_dtype: torch.dtype
    right_dtype: torch.dtype
    pad_k: bool = False
    pad_n: bool = False
    detail: str = ""
    speedup: float | None = None
    seconds: float | None = None
    merge: str = ""
    adds_bias: bool = False
    as_stored: tuple[OperandKind, ...] = ()

    def quant_spec(self, operand: Operand) -> QuantSpec:
        """How one of its operands is quantized, or was when it was stored."""
        return self.spec.left if self._is_first(operand) else self.spec.right

    def with_rows(self, operand: Operand) -> Convert:
        """The same with a scale for each row of the operand, or for each column."""
        rows = replace(self.quant_spec(operand), granularity="rowwise")
        both = replace(self.spec, left=rows) if self._is_first(operand) else replace(self.spec, right=rows)
        return replace(self, spec=both)

    def _is_first(self, operand: Operand) -> bool:
        """Whether it is the first of its role's two, which `spec` has on the left; the graph may have it on the right."""
        return operand.kind == ROLE_OPERANDS[self.gemm.role][0]


def reading(conversion: Convert, replaced: Mapping[fx.Node, fx.Node]) -> Convert:
    """The conversion, with operands that other nodes have replaced (``a @ b @ c``) as they are now."""
    gemm = conversion.gemm
    left, right = (replace(x, node=current(x.node, replaced)) for x in (gemm.left, gemm.right))
    return replace(conversion, gemm=replace(gemm, left=left, right=right))


def current(node: fx.Node, replaced: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """What stands for a node after it, and what replaced it, may have been replaced."""
    while node in replaced:
        node = replaced[node]
    return node


@dataclass(frozen=True)
class Skip:
    """A matmul to leave in high precision, and why; ``merge`` is what `merge` has to say of it."""

    gemm: Gemm | Unmatched
    reason: str
    detail: str = ""
    speedup: float | None = None
    seconds: float | None = None
    merge: str = ""


Choice = Convert | Skip


def decision(choice: Choice) -> Decision:
    """The choice as plain data for reports."""
    gemm, detail = choice.gemm, choice.detail
    if isinstance(choice, Convert) and (choice.pad_k or choice.pad_n):
        detail = "; ".join(filter(None, (detail, f"padded to multiples of {ALIGNMENT}")))
    if isinstance(choice, Convert) and choice.as_stored:
        kept = f"{' and '.join(choice.as_stored)} in float8 already".replace("_", " ")
        detail = "; ".join(filter(None, (detail, kept)))
    return Decision(
        fqn=gemm.fqn,
        role=gemm.role,
        m=_plain(gemm.m),
        k=_plain(gemm.k),
        n=_plain(gemm.n),
        converted=isinstance(choice, Convert),
        reason="converted" if isinstance(choice, Convert) else choice.reason,
        detail=detail,
        speedup=choice.speedup,
        seconds=choice.seconds,
        merge=choice.merge,
        recomputed=gemm.role == "output" and gemm.node.meta.get("recompute") in RECOMPUTED,
    )


def _plain(size: Size) -> int | str:
    return size if isinstance(size, int) else str(size)
