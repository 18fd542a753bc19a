"""Matrices of experts: how they are quantized, and a grouped float8 gemm where PyTorch has none."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_mm(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    """Each row times the matrix of its expert, summed in float32, scaled and rounded once.

    Args:
        left: ``[m, k]``, float8.
        right: ``[experts, k, n]``, float8; or ``[k, n]``: then k is summed expert by expert.
        left_scale: ``[m]``, float32: the factors that take the rows back; or ``[experts * m]``.
        right_scale: ``[experts, n]``, the same of the matrices' columns; or ``[experts * n]``.
        offsets: ``[experts]``: where the rows of each expert end. Rows behind the last one give zeros; CUDA leaves
            them undefined. Or where what is summed of k does.
        dtype: of the result ``[m, n]``; or ``[experts, m, n]``.
    """
    if right.dim() == 2:
        return _sums(left, right, left_scale, right_scale, offsets, dtype)
    result = left.new_zeros((left.shape[0], right.shape[2]), dtype=dtype)
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            product = left[start:end].float() @ right[expert].float()
            scaled = product * left_scale[start:end, None] * right_scale[expert]
            result[start:end] = scaled.to(dtype)
            start = end
    return result


def _sums(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    sizes = offsets.shape[0], left.shape[0], right.shape[1]
    result, start = left.new_zeros(sizes, dtype=dtype), 0
    rows, columns = left_scale.view(sizes[0], -1), right_scale.view(sizes[0], -1)
    for expert, end in enumerate(offsets.tolist()):
        product = left[:, start:end].float() @ right[start:end].float()
        result[expert] = (product * rows[expert, :, None] * columns[expert]).to(dtype)
        start = end
    return result


def below_each_other(matrices: Tensor, columns: int) -> Tensor:
    """``[experts, n, k]`` (``columns=2``) or ``[experts, k, n]`` (``columns=1``) -> ``[experts * n, k]``, contiguous."""
    turned = matrices.movedim(columns, 2)
    return turned.reshape(-1, turned.shape[2])
