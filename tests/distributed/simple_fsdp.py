"""TorchTitan's SimpleFSDP in short: weights are gathered where they are read, in the graph."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def simple_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    dim: int = 0,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard: bool = False,
    hybrid: bool = False,
) -> nn.Module:
    """Shards every parameter and gathers it where it is read, as TorchTitan's SimpleFSDP does.

    Parameters become DTensors; reading one redistributes it, in the graph. In place.

    Args:
        dim: the sharded dimension.
        param_dtype, reduce_dtype: what parameters are gathered and gradients reduced in.
        reshard: gathers are redone in the backward, by checkpointing.
        hybrid: copies along the first dimension of the mesh, shards along the others.
    """
    replicate = [Replicate()] * mesh.ndim
    average = [Partial("avg")] * mesh.ndim

    def gathered(name: str) -> property:
        def whole(parameter: DTensor) -> torch.Tensor:
            found = parameter.redistribute(
                placements=replicate, forward_dtype=param_dtype, backward_dtype=reduce_dtype
            )
            return found.to_local(grad_placements=average)

        def read(module: nn.Module) -> torch.Tensor:
            parameter = module._parameters[name]
            if not reshard:
                return whole(parameter)
            return checkpoint(whole, parameter, use_reentrant=False, context_fn=_redo_gathers)

        return property(read)

    for module in model.modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if not names:
            continue
        for name in names:
            data = module._parameters[name].data
            placements = [Shard(dim % data.dim())] * mesh.ndim
            if hybrid:
                placements[0] = Replicate()
            module._parameters[name] = nn.Parameter(distribute_tensor(data, mesh, placements))
        kind = type(module)
        module.__class__ = type(f"SimpleFSDP{kind.__name__}", (kind,), {n: gathered(n) for n in names})
    return model


def _redo_gathers():
    redone = (
        torch.ops._c10d_functional.all_gather_into_tensor.default,
        torch.ops._c10d_functional.wait_tensor.default,
        torch.ops.aten._to_copy.default,
    )

    def policy(context, func, *args, **kwargs):
        return CheckpointPolicy.MUST_RECOMPUTE if func in redone else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
