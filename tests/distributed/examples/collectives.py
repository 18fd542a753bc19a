"""The examples of the README's section on collectives; :mod:`tests.distributed.test_examples` runs them."""

from __future__ import annotations


def ddp(model):
    import torch
    from torch.nn.parallel import DistributedDataParallel

    return torch.compile(DistributedDataParallel(model), backend="f8fx")  # gradients as without f8fx


def simple_fsdp(model):
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.nn.utils import parametrize

    mesh = init_device_mesh("cpu", (2,))  # "cuda", and as many GPUs as there are

    class Gather(nn.Module):  # as TorchTitan's SimpleFSDP, which sums gradients and divides elsewhere
        def forward(self, sharded):
            whole = sharded.redistribute(placements=[Replicate()])
            return whole.to_local(grad_placements=[Partial("avg")])

    for module in list(model.modules()):
        for name, p in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(p.data, mesh, [Shard(0)])))
            parametrize.register_parametrization(module, name, Gather(), unsafe=True)

    return torch.compile(model, backend="f8fx")  # weights are gathered in float8


def tensor_parallel(model):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    plan = {
        "gate": ColwiseParallel(input_layouts=Shard(1)),  # the sequence is sharded between layers
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, plan)
    return torch.compile(model, backend="f8fx")  # activations are gathered in float8


def graph_trainer(joint):
    from f8fx import Recipe, lowerings
    from f8fx.passes import Pipeline, Policy

    lowerings.register()  # how Inductor, which compiles the graph later, fuses the casts
    report = Pipeline(Recipe.named("tensorwise"), Policy(select="all"))(joint.graph)
    joint.recompile()
    print(report.line())  # f8fx: 1 of 1 matmuls in float8 (tensorwise); 1 of 1 gathers in float8
    return report
