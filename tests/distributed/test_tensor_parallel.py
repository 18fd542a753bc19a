"""Tensor and sequence parallelism: activations and their gradients are gathered in float8, with the bits of bf16."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from f8fx import recording
from tests.distributed.ranks import outcome_fixture
from tests.helpers import bf16, compiled, randn


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.gate = nn.Linear(64, 128, bias=False)
        self.up = nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([FeedForward(), FeedForward()])
        self.to(bf16)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def parallel(model, mesh, prepare=False):
    """Activations sharded along the sequence between layers, features inside."""
    for layer in model.layers:
        plan = {
            "norm": SequenceParallel(),
            "gate": ColwiseParallel(input_layouts=None if prepare else Shard(1)),
            "up": ColwiseParallel(input_layouts=None if prepare else Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        if prepare:
            plan["gate"] = plan["up"] = ColwiseParallel(input_layouts=Shard(1))
        parallelize_module(layer, mesh, plan)
    return model


def steps(model, **options):
    """Outputs, gradients and weights of three steps on this rank's part of the sequence."""
    step = compiled(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    rank = dist.get_rank()
    found = {}
    for index in range(3):
        x = randn(2, 16, 64, seed=10 * rank + index)
        y = step(x)
        y.backward(randn(2, 16, 64, grad=False, seed=1000 + 10 * rank + index))
        found |= {f"output {index}": y.detach(), f"input grad {index}": x.grad}
        found |= {f"{n} grad {index}": local(p.grad) for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return found | {n: local(p.detach()) for n, p in model.named_parameters()}


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert value.isfinite().all(), name
        assert torch.equal(value, wanted[name]), name


def tp_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def check_tensorwise():
    with recording() as reports:
        found = steps(parallel(Net(), tp_mesh()))
    assert [gather.moved for report in reports for gather in report.gathers] == [True] * 4
    assert_same(found, steps(parallel(Net(), tp_mesh()), wire="off"))


CHECKS = [value for name, value in dict(globals()).items() if name.startswith("check_")]
outcome = outcome_fixture(2, CHECKS)


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_two_ranks(outcome, check):
    assert check not in outcome, outcome[check]
