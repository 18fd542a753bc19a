"""A model as tensor parallelism would leave it on one rank of a mesh that need not exist.

What tensor parallelism sends depends on its plan: which layers are split, where activations are whole and where they
are shards of the sequence. The plan is code, the user's, that is given a model and a mesh (``parallelize_module`` and
the like). Here that code is run on a copy of the model without data, on a process group that exists on paper
only. The collectives then stand in the traced graphs, where :func:`f8fx.wire.calls_of` counts them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from f8fx.torch_private import mesh_on_paper
from f8fx.wire import World

#: Splits a model over a ``DeviceMesh`` of one dimension, in place or not.
Parallelize = Callable[[nn.Module, Any], "nn.Module | None"]


@contextmanager
def parallelized(model: Any, world: World | None, parallelize: Parallelize | None) -> Iterator[Any]:
    """A parallelized copy of the model, of use inside the block; without ``parallelize`` the model itself.

    Raises:
        ValueError: without a dimension to split over, or where there is a process group already.
    """
    if parallelize is None:
        yield model
        return
    if world is None or world.tp == 1:
        raise ValueError('parallelize: needs a world with ranks of tensor parallelism, such as world="8x4"')
    if dist.is_initialized():
        raise ValueError(
            "parallelize: there is a process group already; explain a model that is parallelized on it instead"
        )
    with mesh_on_paper({"fsdp": world.fsdp, "tp": world.tp}, "tp") as mesh:
        copied = _without_data(model)
        yield parallelize(copied, mesh) or copied


def _without_data(model: nn.Module) -> nn.Module:
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {}
    for tensor in tensors:
        made: Tensor = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
        memo[id(tensor)] = (
            nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        )
    return copy.deepcopy(model, memo)
