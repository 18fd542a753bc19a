"""Float8 gathers on meshes: HSDP, FSDP x TP, uneven and empty shards, other dimensions, one rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import f8fx
from f8fx import recording
from f8fx.fsdp import enable_float8_all_gather, precompute_scales
from f8fx.report import log
from tests.distributed.harness import run_checks
from tests.distributed.models import (
    OPTIONS,
    Net,
    Setup,
    assert_same,
    batch,
    loss_of,
    train,
    whole,
    world_mesh,
)
from tests.distributed.sent import collectives
from tests.distributed.test_fsdp import other_data_on_every_rank
from tests.helpers import bf16
from tests.long import with_long


def compare(build: Callable[[bool], nn.Module], what: str, reductions: int = 2) -> None:
    """Two steps without and with float8 gathers, different data on every rank of the FSDP dimension."""
    results = []
    for float8 in (False, True):
        model = build(float8)
        with collectives() as sent:
            results.append(train(model, 2, rank=getattr(model, "data_rank", dist.get_rank())))
        gathered = {c.dtype for c in sent if c.op == "all_gather_into_tensor"}
        if gathered:  # FSDP2 does not gather in a group of one
            assert (torch.uint8 in gathered) == float8, (what, gathered)
            # beside those of amaxes there are those of HSDP's gradients
            assert sum(c.dtype == torch.int32 for c in sent) == (reductions if float8 else 0), (what, sent)
    assert_same(*results, what)


def hsdp():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for recipe in with_long(("tensorwise",), "rowwise"):
        compare(lambda float8, recipe=recipe: Setup(recipe, mesh, float8).build(), f"hsdp {recipe}")


def tensor_parallel(float8: bool, recipe: str, **options: Any) -> Net:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Net().to(bf16)
    for block in model.blocks:
        # bias=True in `down` is replicated by RowwiseParallel
        plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    if float8:
        decided = enable_float8_all_gather(model, recipe, filter_fqns=["head"])
        assert {d.fqn: d.shape for d in decided if d.converted} == {
            f"blocks.{i}.{name}.weight": shape
            for i in range(2)
            for name, shape in (("gate", (48, 64)), ("up", (48, 64)), ("down", (64, 48)))
        }
    for block in model.blocks:
        block.compile(backend=f8fx.f8fx, options={**OPTIONS, "recipe": recipe, **options})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    # split by rows over both dimensions, or by columns over one and rows over the other
    gate, down = (getattr(model.blocks[0], name).weight.placements for name in ("gate", "down"))
    assert gate == (_StridedShard(0, split_factor=2), Shard(0)) and down == (Shard(0), Shard(1))
    model.data_rank = mesh["dp"].get_local_rank()  # type: ignore[assignment]
    return model


def fsdp_and_tensor_parallel():
    """The scale of a local part is its own, as it is where a graph quantizes that part."""
    for recipe in with_long(("tensorwise",), "rowwise"):
        compare(lambda float8, recipe=recipe: tensor_parallel(float8, recipe), f"2-D {recipe}")


def smaller_groups_are_refused():
    """FSDP2 has no way to gather such a parameter again from a part of what it gathered."""
    model = Setup("tensorwise", world_mesh(), True, shard={"reshard_after_forward": 2}).build()
    try:
        model(batch(0))
    except NotImplementedError as error:
        assert "reshard_after_forward=True or False" in str(error)
    else:
        raise AssertionError("no error")


def other_options_on_one_rank():
    """It computes something else than the others; the collectives are the same. Who is later says so."""
    options = {"save": "fast"} if dist.get_rank() else {}
    model = Setup("tensorwise", world_mesh(), True, options=options, net={"depth": 1}).build()
    with mock.patch.object(log, "warning") as warned:
        loss_of(model(batch(0))).backward()
    texts = [str(call) for call in warned.call_args_list if "different options" in str(call)]
    assert all("save='fast'" in text and "save='lean'" in text for text in texts)
    found = torch.tensor(len(texts))
    dist.all_reduce(found)
    assert found == 1 or found == 2


def models_of_equal_shapes_one_after_the_other():
    """With other options each, on all ranks: a comparison, say."""
    with mock.patch.object(log, "warning") as warned:
        for options in (
            {},
            {"save": "fast", "only_fqns": {"up", "down", "gate", "q"}},  # a set has no order
        ):
            model = Setup("tensorwise", world_mesh(), True, options=options, net={"depth": 1}).build()
            loss_of(model(batch(0))).backward()
            dist.barrier()
    assert not [call for call in warned.call_args_list if "different options" in str(call)]


def replicas_of_which_one_runs_alone():
    """Its first graph, too: it waits for nobody."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = Setup("tensorwise", mesh, True, net={"depth": 1}).build()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(batch(0))
    dist.barrier()
    loss_of(model(batch(0))).backward()


def options_that_change():
    """All ranks compile a model with others; then each compiles it once more, for sizes of its own."""
    model = Setup("tensorwise", world_mesh(), True, net={"depth": 1}).build()
    rows = 32 if dist.get_rank() else 16
    with recording() as reports:
        for options, sizes in (({}, [16]), ({"save": "fast"}, [16, rows])):
            model.blocks[0].compile(backend=f8fx.f8fx, options={**OPTIONS, **options}, dynamic=False)
            for size in sizes:
                loss_of(model(batch(0, rows=size))).backward()
    assert [bool(report.converted) for report in reports] == [True] * (3 if dist.get_rank() else 2)


def uneven():
    """64 and 96 rows over three ranks: 22 + 22 + 20, and 32 each."""
    for recipe in with_long(("rowwise",), "tensorwise"):
        compare(lambda float8, recipe=recipe: Setup(recipe, world_mesh(), float8).build(), f"uneven {recipe}")


def amaxes_before_the_first_forward():
    """Where shards are uneven, FSDP2 would move the smaller ones after them."""
    ways = {
        "manual": ({"scales": "manual"}, precompute_scales),
        "precomputed": ({}, precompute_scales),
        "gathered": ({}, lambda model: model.unshard()),
    }
    results = []
    for enable, begin in ({}, lambda model: None), *ways.values():
        model = Setup("tensorwise", world_mesh(), bool(results), enable=enable).build()
        begin(model)
        y = model(batch(0))
        loss_of(y).backward()
        grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        results.append({"y": y.detach(), **grads})
    for way, found in zip(ways, results[1:], strict=True):
        assert_same(found, results[0], way)


def inference_alone():
    """The first forward, at which FSDP2 lays out the shards, in inference mode; then with what was loaded."""
    for recipe in ("tensorwise", "rowwise"):
        results = []
        for float8 in (False, True):
            model = Setup(recipe, world_mesh(), float8).build()
            with torch.inference_mode():
                first = model(batch(0))
            state = {name: 0.5 * value for name, value in model.state_dict().items()}
            model.load_state_dict(state)
            with torch.inference_mode():
                results.append({"first": first, "loaded": model(batch(0))})
        assert_same(*results, recipe)


def columns():
    """Sharded along the contracted dimension, where FSDP2 can: then it is the other scales that are local."""

    def placement(parameter):
        return Shard(1) if parameter.dim() == 2 else Shard(0)

    for recipe in with_long(("rowwise",), "tensorwise"):
        shard = {"shard_placement_fn": placement}
        compare(
            lambda float8, recipe=recipe, shard=shard: Setup(
                recipe, world_mesh(), float8, shard=shard
            ).build(),
            f"Shard(1) {recipe}",
        )


class OddVocabulary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64, bias=False)
        self.head = nn.Linear(64, 97, bias=False)

    def forward(self, x):
        return self.head(self.up(x))


def uneven_parts():
    """A vocabulary of odd size, which tensor parallelism splits unevenly: reason and shape are the same on all ranks."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    results = []
    for float8 in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = OddVocabulary().to(bf16)
        parallelize_module(model, mesh["tp"], {"head": ColwiseParallel(output_layouts=Replicate())})
        if float8:
            up, head = enable_float8_all_gather(model)
            assert up.converted and head.shape == (49, 64)
            assert head.reason == "split unevenly by tensor parallelism"
        model.compile(backend=f8fx.f8fx, options=OPTIONS)
        fully_shard(model, mesh=mesh["dp"])
        y = model(batch(0))
        y.sum().backward()
        results.append({"y": y.detach(), **{n: p.grad.full_tensor() for n, p in model.named_parameters()}})
    assert_same(*results, "uneven parts")


def replicated():
    """Every rank holds every weight: nothing is gathered, and FSDP2 is handed the mesh of the copies."""
    for recipe in with_long(("tensorwise",), "rowwise"):
        results = []
        for float8 in (False, True):
            torch.manual_seed(0)
            torch._dynamo.reset()
            model = Net(depth=1).to(bf16)
            if float8:
                enable_float8_all_gather(model, recipe, filter_fqns=["head"])
            model.compile(backend=f8fx.f8fx, options={**OPTIONS, "recipe": recipe})
            replicate(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",)))
            with f8fx.recording() as reports:
                loss = model(batch(dist.get_rank())).float().square().mean()
            assert reports[0].converted
            loss.backward()
            results.append({"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters()}})
        assert_same(*results, f"replicate {recipe}")


def offloaded():
    shard = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    compare(lambda float8: Setup("tensorwise", world_mesh(), float8, shard=shard).build(), "offloaded")
    results = []
    for float8 in (False, True):
        model = Setup("tensorwise", world_mesh(), float8, shard=shard).build()
        results.append(train(model, 1))
        with torch.inference_mode():
            results[-1]["evaluated"] = model(batch(7))
    assert_same(*results, "offloaded, evaluated")


def one_rank():
    for recipe in ("tensorwise", "rowwise"):
        compare(
            lambda float8, recipe=recipe: Setup(recipe, world_mesh(), float8).build(), f"one rank {recipe}"
        )


def empty(recipe: str):
    """16 rows over five ranks: 4 each, none for the last; over seven: 3 each, 1 for the sixth, none for the last."""

    def build(float8: bool) -> Net:
        model = Setup(recipe, world_mesh(), float8, net={"hidden": 16, "depth": 1}).build()
        sizes = [parameter.to_local().numel() for parameter in model.parameters()]
        assert (0 in sizes) == (dist.get_rank() == dist.get_world_size() - 1), sizes
        return model

    compare(build, recipe)


def other_data_on_four_ranks():
    """Whose sums depend on their order, as those of two do not."""
    other_data_on_every_rank(("tensorwise", "rowwise"), ("AdamW",), steps=3)


def test_four_ranks():
    run_checks(
        4,
        [
            hsdp,
            fsdp_and_tensor_parallel,
            smaller_groups_are_refused,
            *with_long((), other_data_on_four_ranks),
        ],
    )


def a_padded_weight_that_is_replaced():
    """By one that is no float8 weight; FSDP2 looks at it after a state dict is loaded."""
    warnings.simplefilter("ignore")
    model = nn.Sequential(nn.Linear(96, 64, bias=False), nn.Linear(64, 96, bias=False)).to(bf16)
    enable_float8_all_gather(model)
    fully_shard(model)
    model(torch.ones(16, 96, dtype=bf16))
    kept = model.state_dict()  # shares the memory of the padded shard
    old = model[0].weight
    plain = torch.zeros(old.to_local().shape, dtype=bf16)
    new = DTensor.from_local(plain, old.device_mesh, old.placements, shape=old.shape, stride=old.stride())
    model[0].weight = nn.Parameter(new)
    model.load_state_dict({name: value.clone() for name, value in kept.items()})


def test_three_ranks():
    run_checks(
        3,
        [
            uneven,
            a_padded_weight_that_is_replaced,
            amaxes_before_the_first_forward,
            *with_long((), inference_alone),
        ],
    )


def test_two_ranks():
    run_checks(
        2,
        [
            other_options_on_one_rank,
            uneven_parts,
            *with_long(
                (),
                offloaded,
                inference_alone,
                columns,
                options_that_change,
                replicated,
                models_of_equal_shapes_one_after_the_other,
            ),
        ],
    )


@pytest.mark.long
def test_one_rank():
    run_checks(1, [one_rank])


def test_five_ranks():
    run_checks(5, [partial(empty, "tensorwise")])


@pytest.mark.long
def test_seven_ranks():
    run_checks(7, [partial(empty, recipe) for recipe in ("tensorwise", "rowwise")])
