"""Each way to more than one device through Inductor, code generation included; FSDP2: test_fsdp_inductor."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from f8fx import recording
from tests.distributed.harness import checks_of, name_of, outcome_fixture
from tests.distributed.sent import InGraph
from tests.distributed.simple_fsdp import simple_fsdp
from tests.distributed.test_tensor_parallel import Net, parallel, tp_mesh
from tests.helpers import Block, bf16, compiled, gradients, randn, sqnr

pytestmark = pytest.mark.slow


def make():
    """A layer that is sharded evenly, one that is not, and rows that need padding for the gemm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 51, bias=False), nn.GELU(), nn.Linear(51, 64, bias=False)).to(bf16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    return simple_fsdp(model, mesh)


def found(model, x, executor="inductor", fullgraph=True, **options):
    """Values, reports and what was sent; generated code fuses other things around the casts, and rounds otherwise."""
    step = compiled(model, executor=executor, fullgraph=fullgraph, **options)
    with recording() as reports:
        y = step(x)
    grad = randn(*y.shape, grad=False, seed=9)
    with InGraph() as sent:
        values = gradients(model, step, x, grad)
    values = {n: v.to_local() if hasattr(v, "to_local") else v for n, v in values.items()}
    return values, reports, sent


def assert_close(wanted, values):
    """As close as two roundings of the same: not the same bits (measured 30 dB and more)."""
    for name, value in values.items():
        assert sqnr(wanted[name], value) > 25, (name, sqnr(wanted[name], value))


def check_simple_fsdp():
    x = randn(32, 64, seed=dist.get_rank())
    values, (report,), sent = found(make(), x)
    assert [gather.moved for gather in report.gathers] == [True, True]
    assert sent.calls["all_gather_into_tensor", torch.uint8] == 2
    assert sent.calls["all_reduce", torch.int32] == 1
    assert_close(found(make(), x, "eager", wire="off")[0], values)


def check_that_what_is_sent_is_rounded_first():
    """float32 weights gathered in bf16: Inductor would cast them to float8 without the rounding between."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def bits(**options):
        torch.manual_seed(0)
        model = simple_fsdp(nn.Linear(64, 64, bias=False), mesh, param_dtype=bf16)
        return found(model, randn(32, 64, seed=dist.get_rank()), **options)[0]

    wanted, values = bits(wire="off"), bits()
    assert all(torch.equal(wanted[name], value) for name, value in values.items())


def check_tensor_parallel():
    def split():
        model = Net()
        del model.layers[1]
        return parallel(model, tp_mesh())

    x = randn(2, 16, 64, seed=dist.get_rank())
    values, (report,), sent = found(split(), x)
    assert [gather.moved for gather in report.gathers] == [True, True]
    assert sent.calls["all_gather_into_tensor", torch.uint8] == 2
    assert_close(found(split(), x, "eager", wire="off")[0], values)


def check_a_rank_is_not_served_the_code_of_another():
    """Of a cache in common: code that shards a tensor takes the part of the rank that it was compiled on."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows, weight = (
        distribute_tensor(randn(*shape, grad=False, seed=index), mesh, [Replicate()])
        for index, shape in enumerate(((32, 64), (64, 64)))
    )

    def step(x, w):
        return x.redistribute(placements=[Shard(0)]).to_local() @ w.to_local().t()

    wanted = compiled(step, executor="eager")(rows, weight)
    for _ in range(2):
        torch._dynamo.reset()
        dist.barrier()  # all have written theirs
        with recording() as reports:
            found = compiled(step, executor="inductor")(rows, weight)
        assert torch.equal(found, wanted)
    # torch 2.11 caches no graph with DTensors
    assert reports[0].cached == hasattr(DTensor, "_stable_hash_for_caching")


class Residual(nn.Module):
    """One layer, in a module that is not torch's: Dynamo compiles no frame of those alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return x + self.layer(x)


def check_ddp(module=Residual, matmuls=3):
    def wrapped():
        torch.manual_seed(0)
        return DistributedDataParallel(module().to(bf16))

    x = randn(32, 64, seed=dist.get_rank())
    values, (report,), _ = found(wrapped(), x, fullgraph=False)
    assert report.converted == matmuls
    assert_close(found(wrapped(), x, "eager", fullgraph=False)[0], values)


CHECKS = checks_of(
    dict(globals()),
    partial(check_ddp, Block, 9),
    check_that_what_is_sent_is_rounded_first,
)
outcome = outcome_fixture(2, CHECKS)


@pytest.mark.parametrize("check", list(map(name_of, CHECKS)))
def test_two_ranks(outcome, check):
    assert check not in outcome, outcome[check]
