"""The parts of a tensor that the ranks of a mesh hold."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, without importing what makes them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def largest_part(tensor: Tensor) -> tuple[tuple[int, ...], bool]:
    """Sizes of the largest part of a DTensor, and whether all ranks have parts of these sizes."""
    whole: Any = tensor
    sizes, even = list(whole.shape), True
    for count, placement in zip(whole.device_mesh.shape, whole.placements, strict=True):
        dim = getattr(placement, "dim", None)  # replicated and partial ones are of no dimension
        if dim is not None:
            even = even and sizes[dim] % count == 0
            sizes[dim] = -(-sizes[dim] // count)
    return tuple(sizes), even


def dtensor_like(tensor: Any, local: Tensor) -> Tensor:
    """A DTensor that is split as another one, with a local part of its own."""
    return type(tensor).from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
