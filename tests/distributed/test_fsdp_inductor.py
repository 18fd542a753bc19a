"""Float8 gathers through Inductor's own code generation."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh

import f8fx
from f8fx.torch_private import local_tensor
from tests.distributed.harness import run_checks
from tests.distributed.models import Net, Setup, assert_same, train, world_mesh
from tests.distributed.test_fsdp_copies import Checkpointed, build, in_blocks, steps
from tests.distributed.test_fsdp_meshes import tensor_parallel
from tests.helpers import bf16
from tests.long import with_long

pytestmark = pytest.mark.slow


class Layer(nn.Module):
    """In place of a block: as little code as has weights in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


def same_code_same_bits(recipe: str):
    results = []
    for float8 in (False, True):
        torch.manual_seed(0)
        model = Net(depth=1)
        model.blocks[0] = Layer()
        setup = Setup(recipe, world_mesh(), float8, options={"executor": "inductor"})
        results.append(train(setup.apply(model.to(bf16)), 3, rank=dist.get_rank()))
    assert_same(*results, recipe)


def by_inductor(module: nn.Module) -> None:
    module.compile(backend=f8fx.f8fx, options={"select": "all", "recipe": "rowwise", "strict": True})


def checkpointed_graphs_read_the_forwards_copy_in_the_backward():
    """Such a graph is split twice: what reads the other half's copy is compiled in the second attempt.

    The result of ``down`` is none that the backward reads, so that it does not run again there.
    """
    runs = []
    for sent in ("both", "auto"):
        before = dict(counters["aot_autograd"])
        model = build(sent, by_inductor, Checkpointed)
        runs.append(steps(model))
        attempts = counters["aot_autograd"]["total"] - before.get("total", 0)
        assert attempts == (1 if sent == "both" else 2)
    (counts, both), (seen, auto) = runs
    assert_same(both, auto)
    forward, backward = counts[2]
    less = forward - in_blocks(model) // 2, backward - in_blocks(model, "down") // 2
    assert seen == [counts[0], less, less], (seen, counts)


def shards_do_not_run_code_that_was_compiled_for_plain_ones():
    """AOTAutograd's cache knows a DTensor by its specification; a shard's memory is one level further inside."""

    def squares(float8: bool) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model = Setup("tensorwise", world_mesh(), float8, net={"depth": 1}).build()
        compute = torch.compile(
            lambda p: p.float().square(), backend="inductor", fullgraph=True, dynamic=False
        )
        return [local_tensor(compute(p.detach())) for p in model.parameters()]

    results, hits = [], []
    with fresh_cache():
        for float8 in (False, True, False):
            before = counters["aot_autograd"]["autograd_cache_hit"]
            results.append(squares(float8))
            hits.append(counters["aot_autograd"]["autograd_cache_hit"] - before)
    for plain, shard, again in zip(*results, strict=True):
        assert torch.equal(plain, shard) and torch.equal(plain, again)
    assert hits[0] < hits[2], "the cache is not in use"


def replicas_and_tensor_parallelism():
    """On meshes of two dimensions; with scales of rows in three steps, so that gathers carry one copy at last."""
    inductor = {"executor": "inductor"}

    def hsdp(float8: bool) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        return Setup("rowwise", mesh, float8, options=inductor, net={"depth": 1}).build()

    def fsdp_and_tp(float8: bool) -> nn.Module:
        return tensor_parallel(float8, "tensorwise", **inductor)

    for made in (hsdp, fsdp_and_tp):
        (plain, wanted), (counts, found) = (steps(made(float8)) for float8 in (False, True))
        assert_same(wanted, found, made.__name__)
        assert sum(counts[2]) < sum(plain[2])


def test_two_ranks():
    run_checks(
        2,
        [
            partial(same_code_same_bits, "tensorwise"),
            *with_long((), shards_do_not_run_code_that_was_compiled_for_plain_ones),
        ],
    )


@pytest.mark.long
def test_rowwise():
    run_checks(2, [partial(same_code_same_bits, "rowwise")])


@pytest.mark.long
def test_checkpointing():
    run_checks(2, [checkpointed_graphs_read_the_forwards_copy_in_the_backward])


@pytest.mark.long
def test_four_ranks():
    run_checks(4, [replicas_and_tensor_parallelism])
