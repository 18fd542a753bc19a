"""Float8 gathers through Inductor, code generation included."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from f8fx import recording
from tests.distributed.harness import outcome_fixture
from tests.distributed.sent import InGraph
from tests.distributed.simple_fsdp import simple_fsdp
from tests.helpers import bf16, compiled, gradients, randn, sqnr

pytestmark = pytest.mark.slow


def make():
    """A layer that is sharded evenly, one that is not, and rows that need padding for the gemm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 51, bias=False), nn.GELU(), nn.Linear(51, 64, bias=False)).to(bf16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    return simple_fsdp(model, mesh)


def found(recipe, **options):
    model = make()
    step = compiled(model, recipe=recipe, executor="inductor", **options)
    x, grad = randn(32, 64, seed=dist.get_rank()), randn(32, 64, grad=False, seed=9)
    with recording() as reports:
        step(x)
    with InGraph() as sent:
        values = gradients(model, step, x, grad)
    values = {n: v.to_local() if hasattr(v, "to_local") else v for n, v in values.items()}
    return values, reports[0], sent


def check_inductor():
    values, report, sent = found("tensorwise")
    assert [gather.moved for gather in report.gathers] == [True, True]
    assert sent.calls["all_gather_into_tensor", torch.uint8] == 2
    assert sent.calls["all_reduce", torch.int32] == 1
    wanted, _, _ = found("tensorwise", wire="off")
    for name, value in values.items():
        # generated code fuses other things around the casts, and may round them differently: not the same bits
        assert sqnr(wanted[name], value) > 40, (name, sqnr(wanted[name], value))


CHECKS = [check_inductor]
outcome = outcome_fixture(2, CHECKS)


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_two_ranks(outcome, check):
    assert check not in outcome, outcome[check]
