"""What a recipe asks for that an accelerator has not got, in the words in which reports count it."""

from __future__ import annotations

import torch

from .accelerator import Hardware
from .recipe import ROLE_OPERANDS, QuantSpec, Recipe, Role
from .report import dtype_name


def lacks(hardware: Hardware, spec: QuantSpec, dtype: torch.dtype | None = None) -> str:
    """What is missing for a float8 gemm with such an operand; ``""`` if nothing is.

    Args:
        dtype: the float8 dtype to run with, where it was chosen for another accelerator.
    """
    missing = (
        dtype not in hardware.float8_dtypes.values() if dtype else spec.dtype not in hardware.float8_dtypes
    )
    if missing:
        return f"no {dtype_name(dtype or spec.dtype)} on {hardware.name}"
    if spec.granularity not in hardware.granularities:
        return f"no {spec.granularity} float8 gemm on {hardware.name}"
    return ""


def lacks_grouped(hardware: Hardware) -> str:
    """What is missing for layers of experts; ``""`` if nothing is."""
    return "" if hardware.grouped_gemm else f"no grouped float8 gemm on {hardware.name}"


def not_grouped(recipe: Recipe, role: Role) -> tuple[str, str]:
    """Why ``torch._scaled_grouped_mm`` does not take the operands that a recipe has in a role, and a detail.

    Both are ``""`` if it does, and where the role stays in high precision. It takes e4m3 alone. Rows that are no expert's
    may hold anything, infinities too: a scale for all rows would follow them.
    """
    spec = recipe.gemm(role)
    if spec is None:
        return "", ""
    # of weights there may be one scale for all experts: those are not the rows that may hold anything
    of_rows = (spec.left, spec.right) if role == "grad_weight" else (spec.left,)
    if any(operand.granularity != "rowwise" for operand in of_rows):
        why = "rows of no expert may hold anything: each needs a scale of its own"
        return "grouped matmul under a recipe that is not rowwise", why
    for kind, operand in zip(ROLE_OPERANDS[role], (spec.left, spec.right), strict=True):
        if operand.dtype != "e4m3":
            return "grouped float8 gemms take e4m3 alone", f"{kind} is {operand.dtype}"
    return "", ""
