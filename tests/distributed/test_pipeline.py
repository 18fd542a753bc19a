"""Pipeline parallelism: stages are compiled each, and a schedule runs several forwards before a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from f8fx import recording
from f8fx.torch_private.versions import release
from tests.distributed.harness import run_checks
from tests.distributed.models import assert_same
from tests.helpers import Block, bf16, compiled, randn
from tests.long import with_long

MICROBATCHES = 4


def stage(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(Block(64, 96), Block(64, 96)).to(bf16)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


def batch() -> tuple[Tensor, Tensor]:
    return randn(32, 64, grad=False), randn(32, 64, grad=False, seed=1).float()


def gradients_of_one_process(stages: int) -> list[dict[str, Tensor]]:
    """Of the same stages run one after the other, by microbatches."""
    modules = [stage(index) for index in range(stages)]
    calls = [compiled(module) for module in modules]
    for x, target in zip(*(part.chunk(MICROBATCHES) for part in batch()), strict=True):
        for call in calls:
            x = call(x)
        loss(x, target).backward()
    named = [dict(module.named_parameters()) for module in modules]
    return [{name: p.grad / MICROBATCHES for name, p in parameters.items()} for parameters in named]


def in_place(module: nn.Module) -> nn.Module:
    options = {"select": "all", "executor": "eager", "debug": True, "strict": True}
    module.compile(backend="f8fx", options=options, fullgraph=True)
    return module


def has_the_gradients_of_one_process(
    schedule: type, stages: int, compiled: Callable[[nn.Module], Callable[..., Any]] = compiled
) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    wanted = gradients_of_one_process(stages)
    mine = range(rank, stages, world)
    modules = [stage(index) for index in mine]
    with recording() as reports:
        parts = [
            PipelineStage(compiled(module), index, stages, torch.device("cpu"))
            for index, module in zip(mine, modules, strict=True)
        ]
        run = schedule(parts if stages > world else parts[0], MICROBATCHES, loss_fn=loss)
        x, target = batch()
        run.step(*([x] if rank == 0 else []), **({"target": target} if rank == world - 1 else {}))
    assert reports and all(report.converted for report in reports)
    for index, module in zip(mine, modules, strict=True):
        assert_same(wanted[index], {name: p.grad for name, p in module.named_parameters()})


def one_stage_a_rank():
    has_the_gradients_of_one_process(Schedule1F1B, 2)


def two_stages_a_rank():
    has_the_gradients_of_one_process(ScheduleInterleaved1F1B, 4)


def zero_bubble():
    """A backward in two parts, the second of which runs the graph again; PyTorch refuses what ``torch.compile`` wraps."""
    has_the_gradients_of_one_process(ScheduleInterleavedZeroBubble, 4, in_place)


@pytest.mark.long
def test_two_ranks():
    run_checks(2, [two_stages_a_rank, *with_long((), one_stage_a_rank)])


@pytest.mark.long
@pytest.mark.skipif(release() < (2, 13), reason="this torch splits no backward of compiled code")
def test_a_backward_in_two_parts():
    run_checks(2, [zero_bubble])
