"""Inputs of training graphs that were made under ``torch.inference_mode``: weights that were loaded so, mostly frozen.

Autograd refuses to save such tensors. A graph in bf16 has no need to where it computes with a rounding of them, as under
autocast; in float8 the backward casts the weight itself once more, and so saves it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .weights.inputs import may_train


def savable(compiled: Callable[..., Any], example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiled graph that may save its inputs: it gets ordinary tensors on the memory of those that are not."""
    made_so = [
        index
        for index, value in enumerate(example_inputs)
        if type(value) in (Tensor, nn.Parameter) and value.is_inference()
    ]
    if not made_so or not may_train(example_inputs):
        return compiled

    def run(*args: Any) -> Any:
        ordinary = list(args)
        for index in made_so:
            ordinary[index] = _Ordinary.apply(args[index])
        return compiled(*ordinary)

    return run


class _Ordinary(torch.autograd.Function):
    """The same numbers in the same memory; the gradient is that of the tensor made in inference mode."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            return empty.set_(
                tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
            )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
