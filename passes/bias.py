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

from f8fx.torch_private import statically_true

from .choice import Choice, Convert
from .elements import CASTS
from .gemm import Gemm
from .quantize import RowwiseScales, is_scaled_after
from .rewrite import Inserter
from .sizes import is_same

aten = torch.ops.aten

#: Bytes that where a bias begins is a multiple of, as matrices have to; PyTorch tells cuBLASLt of none.
_ALIGNMENT = 16


def biases_in_gemms(
    choices: Sequence[Choice], rowwise_scales: Callable[[Gemm], RowwiseScales]
) -> list[Choice]:
    """The choices, with ``adds_bias`` where the gemm can.

    Args:
        rowwise_scales: where the scale vectors of a gemm are applied: a bias comes after them.
    """
    return [
        replace(choice, adds_bias=True)
        if isinstance(choice, Convert) and _can(choice, rowwise_scales(choice.gemm))
        else choice
        for choice in choices
    ]


def settled(members: Sequence[Convert]) -> list[Convert]:
    """Layers that may become one gemm, which adds the biases of all that have one, or of none.

    Args:
        members: in graph order.
    """
    first = members[0].gemm.node
    biased = [member for member in members if member.gemm.node.target is aten.addmm.default]
    if all(member.adds_bias and _source(member) < first for member in biased):
        return [*members]
    return [replace(member, adds_bias=False) for member in members]


def _source(conversion: Convert) -> fx.Node:
    """What a bias is, before autocast rounds it where its layer is."""
    bias = conversion.gemm.node.args[0]
    assert isinstance(bias, fx.Node)
    source = bias.args[0] if bias.target in CASTS else bias
    assert isinstance(source, fx.Node)
    return source


def concatenated_biases(members: Sequence[Convert], insert: Inserter) -> fx.Node | None:
    """What the gemm that layers have become adds, zeros for those without a bias; ``None`` where it adds nothing.

    Args:
        members: as :func:`settled` gave them.
        insert: before the first of them.
    """
    if not any(member.adds_bias for member in members):
        return None
    first = members[0].gemm.node
    biases = []
    for gemm in (member.gemm for member in members):
        bias = gemm.node.args[0]
        assert isinstance(bias, fx.Node)
        if gemm.node.target is not aten.addmm.default:
            bias = insert(aten.full.default, [gemm.n], 0, dtype=gemm.dtype, device=gemm.device)
        elif not bias < first:
            assert not isinstance(bias.target, str)
            bias = insert(bias.target, *bias.args, **bias.kwargs)
        biases.append(bias)
    return insert(aten.cat.default, biases)


def _can(conversion: Convert, scales: RowwiseScales) -> bool:
    """Whether it is one number a column, in the 16-bit dtype that the gemm writes, neither padded nor scaled, aligned."""
    gemm, spec = conversion.gemm, conversion.spec
    if gemm.node.target is not aten.addmm.default or gemm.node.kwargs or conversion.pad_n:
        return False
    bias = gemm.node.args[0]
    assert isinstance(bias, fx.Node)
    value = bias.meta["val"]
    if value.dim() != 1 or not is_same(value.shape[0], gemm.n) or not is_same(value.stride(0), 1):
        return False
    if value.dtype != gemm.dtype or gemm.dtype not in (torch.bfloat16, torch.float16):
        return False
    if not statically_true(value.storage_offset() * gemm.dtype.itemsize % _ALIGNMENT == 0):
        return False
    # scaled by rows, gemms write bfloat16
    return not spec.is_rowwise or (gemm.dtype == torch.bfloat16 and not is_scaled_after(conversion, scales))
