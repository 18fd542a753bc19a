"""The matrices of a mixture of experts: which parameters they are, and how their layers read them.

Nothing tells what a parameter of three dimensions is read by: ``torch._grouped_mm`` is called by modules of many
libraries, and by none of PyTorch's. Those who ask for experts get what looks like them: at least two matrices, in
a module that is not PyTorch's own (a convolution's weights have three dimensions too, and so do embeddings of
positions, of which there is one). What else reads a weight that was gathered in float8 is warned of.
"""

from __future__ import annotations

import torch
from torch import nn

from f8fx.hardware import Hardware
from f8fx.lacks import lacks_grouped, not_grouped
from f8fx.recipe import Recipe, Role

_ROLES: tuple[Role, ...] = ("output", "grad_input")


def may_be_experts(module: nn.Module, param: torch.Tensor) -> bool:
    """Whether a module's parameter looks like the matrices of several experts."""
    return param.dim() == 3 and param.shape[0] > 1 and not type(module).__module__.startswith("torch.nn.")


def contracted(module: nn.Module) -> tuple[int, int]:
    """The dimensions of ``[experts, n, k]`` that forward and backward contract.

    Those of ``[experts, k, n]`` where the module's ``is_transposed`` says so, as Transformers' do.
    """
    return (1, 2) if getattr(module, "is_transposed", False) is True else (2, 1)


def why_no_grouped_gemm(recipe: Recipe, hardware: Hardware) -> str:
    """Why layers of experts stay in high precision, whose weights must then too; "" if they do not."""
    reasons = (lacks_grouped(hardware), *(not_grouped(recipe, role)[0] for role in _ROLES))
    return next(filter(None, reasons), "")
