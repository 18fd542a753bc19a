"""Which gemms add the bias of their layer themselves (option ``bias="in_gemm"``).

torchao adds a bias to the rounded result, and so does this library by default, to the bit. Where attention, or anything
else that no kernel of Inductor computes, reads the result, that is a kernel of its own, which reads all of it and
writes all of it. A gemm adds the bias to its float32 accumulator for nothing, which is rounded once instead of twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx

from .choice import Choice, Convert
from .operand import is_same
from .quantize import RowwiseScales, is_scaled_after

aten = torch.ops.aten


def biases_in_gemms(
    choices: Sequence[Choice], rowwise_scales: Callable[[torch.device], RowwiseScales]
) -> list[Choice]:
    """The choices, with ``adds_bias`` where the gemm can.

    Args:
        rowwise_scales: where a device applies scale vectors: a bias comes after them.
    """
    return [
        replace(choice, adds_bias=True)
        if isinstance(choice, Convert) and _can(choice, rowwise_scales(choice.gemm.device))
        else choice
        for choice in choices
    ]


def _can(conversion: Convert, scales: RowwiseScales) -> bool:
    """Whether it is one number a column, in the 16-bit dtype that the gemm writes, neither padded nor scaled."""
    gemm, spec = conversion.gemm, conversion.spec
    if gemm.node.target is not aten.addmm.default or gemm.node.kwargs or conversion.pad_n:
        return False
    bias = gemm.node.args[0]
    assert isinstance(bias, fx.Node)
    value = bias.meta["val"]
    if value.dim() != 1 or not is_same(value.shape[0], gemm.n) or value.stride() != (1,):
        return False
    if value.dtype != gemm.dtype or gemm.dtype not in (torch.bfloat16, torch.float16):
        return False
    # scaled by rows, gemms write bfloat16
    return not spec.is_rowwise or (gemm.dtype == torch.bfloat16 and not is_scaled_after(gemm, spec, scales))
