"""Batches in which each matrix has its own weight: the layers of a mixture of experts that have as many rows each.

``bmm(x, w)`` with ``x: [experts, m, k]`` and ``w: [experts, k, n]``, as Llama 4 has it, is a grouped matmul
(:mod:`passes.experts`) of ``experts * m`` rows of which the next ``m`` belong to the next expert. So is its input gradient.
PyTorch has no other float8 matmul of batches. The gradient of the weights stays a batched matmul in high precision, or, if it is asked
for, is a grouped one, too.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from f8fx.hardware import ALIGNMENT

from .batched import is_of_each
from .operand import repeated_matrix
from .parameters import expanded_parameter
from .rewrite import Inserter
from .sizes import is_same, shape_of

aten = torch.ops.aten


def is_of_experts(bmm: fx.Node, weights: Collection[fx.Node]) -> bool:
    """Whether a batched matmul can be a grouped one: of rows by a matrix for each batch, in what that takes.

    Args:
        weights: parameters, and what is computed from them.
    """
    rows, matrices = bmm.args
    assert isinstance(rows, fx.Node) and isinstance(matrices, fx.Node)
    if is_same(shape_of(bmm)[0], 1) or repeated_matrix(matrices) is not None:
        return False
    weight = expanded_parameter(matrices, weights)
    if weight is None or not is_of_each(matrices, weight) or expanded_parameter(rows, weights) is not None:
        return False
    value = matrices.meta["val"]
    return (
        all(isinstance(size, int) and size for size in value.shape)
        and all(size % ALIGNMENT == 0 for size in value.shape[1:])
        and value.dtype == bmm.meta["val"].dtype == torch.bfloat16
        and (value.is_contiguous() or value.mT.is_contiguous())
        and not is_same(shape_of(rows)[1], 0)
    )


def ends_of_rows(insert: Inserter, rows: fx.Node) -> fx.Node:
    """Where the rows of each expert end: ``[experts]``, of ``[experts, m, k]``."""
    value, size = rows.meta["val"], insert.size(rows, 1)
    experts = value.shape[0]
    step = size if isinstance(size, int) else 1
    # not arange: before torch 2.13, Inductor has no code for it at this stage
    ends = insert(
        torch.ops.prims.iota.default,
        experts,
        start=step,
        step=step,
        dtype=torch.int32,
        device=value.device,
        requires_grad=False,
    )
    return ends if step is size else insert(aten.mul.Tensor, ends, size)
