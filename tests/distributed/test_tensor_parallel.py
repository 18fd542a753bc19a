"""Tensor and sequence parallelism: activations and their gradients are gathered in float8, with the bits of bf16."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint

import f8fx
from f8fx import explain, recording
from f8fx.fsdp import enable_float8_all_gather
from f8fx.passes import by_rank
from tests.distributed.harness import checks_of, outcome_fixture
from tests.distributed.models import OPTIONS
from tests.distributed.sent import InGraph, collectives
from tests.distributed.simple_fsdp import simple_fsdp
from tests.helpers import bf16, compiled, randn
from tests.long import with_long


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
    def __init__(self, depth=2):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([FeedForward() for _ in range(depth)])
        self.to(bf16)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


SEQUENCE = Shard(1)


def parallel(model, mesh):
    """Activations sharded along the sequence between layers, features inside."""
    for layer in model.layers:
        plan = {
            "norm": SequenceParallel(),
            "gate": ColwiseParallel(input_layouts=SEQUENCE),
            "up": ColwiseParallel(input_layouts=SEQUENCE),
            "down": RowwiseParallel(output_layouts=SEQUENCE),
        }
        parallelize_module(layer, mesh, plan)
    return model


class Checkpointed(Net):
    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Gate(nn.Module):
    def __init__(self, residual):
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(64, 128, bias=False, dtype=bf16)
        self.up = nn.Linear(64, 128, bias=False, dtype=bf16)
        self.down = nn.Linear(128, 64, bias=False, dtype=bf16)
        self.residual = residual

    def forward(self, x):
        y = self.down(F.silu(self.gate(x)) * self.up(x))
        return x + y if self.residual else y


def steps(model, seed, **options):
    """Outputs, gradients and weights of three steps on this rank's part of the sequence."""
    step = compiled(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    found = {}
    for index in range(3):
        x = randn(2, 16, 64, seed=10 * seed + index)
        y = step(x)
        y.backward(randn(2, 16, 64, grad=False, seed=1000 + 10 * seed + index))
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


def compare(make, moved, **options):
    """float8 gathers == high-precision gathers of the same float8 model, to the bit."""
    seed = dist.get_rank()
    with recording() as reports:
        found = steps(make(), seed, **options)
    gathers = [gather for report in reports for gather in report.gathers]
    assert sum(gather.moved for gather in gathers) == moved, gathers
    assert_same(found, steps(make(), seed, wire="off", **options))


def tp_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def check_sequence_parallel():
    """Two layers, an activation and a gradient each."""
    compare(lambda: parallel(Net(), tp_mesh()), moved=4)


@contextmanager
def watched_rows():
    """Whether gemms in front of scatters compute their rows in another order."""
    turned = []

    def watched(*args):
        turned.append(by_rank.reorder(*args))
        return turned[-1]

    with mock.patch("f8fx.passes.async_tp.reorder", watched):
        yield turned


def check_rows_in_the_order_they_are_sent():
    """Of the gemms in front of scatters: of each layer's output, and of the gradients of its two inputs. The same bits."""
    with watched_rows() as turned:
        found = steps(parallel(Net(depth=1), tp_mesh()), dist.get_rank())
    assert turned == [True] * 3
    with mock.patch("f8fx.passes.async_tp.reorder", lambda *args: False):
        assert_same(found, steps(parallel(Net(depth=1), tp_mesh()), dist.get_rank()))


def check_one_long_sequence():
    """Of sizes over 256 DTensor traces a slice that is all of its input; of one sequence it makes no copy before."""
    outputs = []
    for wire in ("uint8", "off"):
        model, x = parallel(Net(depth=1), tp_mesh()), randn(1, 300, 64, seed=dist.get_rank())
        with recording() as reports:
            y = compiled(model, wire=wire)(x)
            y.sum().backward()
        assert [gather.moved for gather in reports[0].gathers] == [wire == "uint8"] * 2
        outputs.append({"output": y.detach(), "input grad": x.grad})
    assert_same(*outputs)


def check_batches_of_any_size():
    outputs = []
    for wire in ("uint8", "off"):
        model, x = parallel(Net(depth=1), tp_mesh()), randn(4, 16, 64, seed=dist.get_rank())
        torch._dynamo.mark_dynamic(x, 0)
        with recording() as reports, watched_rows() as turned:
            y = compiled(model, wire=wire, dynamic=None)(x)
            y.backward(randn(*y.shape, grad=False, seed=9))
        assert [gather.moved for gather in reports[0].gathers] == [wire == "uint8"] * 2, reports[0].gathers
        outputs.append({"output": y.detach(), "input grad": x.grad})
        assert turned == [False] * 3
    assert_same(*outputs)


def check_one_rank_compiles_for_any_size():
    """As after another model of the class, which that rank alone ran: collectives and sizes are the others'."""
    model, x = parallel(Net(depth=1), tp_mesh()), randn(2, 16, 64, seed=dist.get_rank())
    if dist.get_rank() == 0:
        torch._dynamo.mark_dynamic(x, 0)
    with recording() as reports:
        compiled(model, dynamic=None)(x).sum().backward()
    assert [gather.moved for gather in reports[0].gathers] == [True, True]


def check_unequal_parts():
    """Of a vocabulary that the ranks do not divide: both leave the layer, where one alone could convert its part."""
    model = nn.ModuleDict({"norm": nn.RMSNorm(64), "head": nn.Linear(64, 97, bias=False)}).to(bf16)
    plan = {
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=Shard(-1)),
    }
    parallelize_module(model, tp_mesh(), plan)
    with recording() as reports:
        call = compiled(lambda x: model["head"](model["norm"](x)), fullgraph=False, pad="never")
        y = call(randn(2, 16, 64, seed=dist.get_rank()))
        y.to_local().sum().backward() if isinstance(y, DTensor) else y.sum().backward()
    assert y.shape[-1] in (48, 49, 97)
    assert [report.reasons for report in reports] == [{"split unevenly by tensor parallelism": 3}]


def prepared(residual):
    """A module whose input is gathered once, for all in it."""
    model = nn.Sequential(Gate(residual))
    plan = {
        "0": PrepareModuleInput(
            input_layouts=SEQUENCE, desired_input_layouts=Replicate(), use_local_output=True
        ),
        "0.gate": ColwiseParallel(),
        "0.up": ColwiseParallel(),
        "0.down": RowwiseParallel(output_layouts=Replicate() if residual else SEQUENCE),
    }
    return parallelize_module(model, tp_mesh(), plan)


def check_prepare_module_input():
    """The input of two layers, and the gradient of the output."""
    compare(lambda: prepared(residual=False), moved=2)


def check_prepare_module_input_that_is_also_added():
    with recording() as reports:
        compiled(prepared(residual=True))(randn(2, 16, 64))
    (gather,) = reports[0].gathers
    assert not gather.moved and gather.reason == "also read in high precision"


def check_rowwise_in_inference():
    """Rows are local to a shard of the sequence: data and scales travel, and nothing is reduced."""
    model = parallel(Net(), tp_mesh())
    x = randn(2, 16, 64, grad=False, seed=dist.get_rank())
    with torch.no_grad(), recording() as reports:
        found = compiled(model, recipe="rowwise")(x)
        assert torch.equal(found, compiled(model, recipe="rowwise", wire="off")(x))
    assert [gather.moved for gather in reports[0].gathers] == [True, True]


class WithHead(Net):
    """Whose head is not parallel: a plain parameter beside DTensors."""

    def __init__(self, depth=2):
        super().__init__(depth)
        self.head = nn.Linear(64, 96, bias=False, dtype=bf16)

    def forward(self, x):
        return self.head(super().forward(x))


def check_weights_beside_those_that_are_parallel():
    """They are kept in float8, and what is parallel is quantized in every call; with the bits of quantizing all."""
    model, x = parallel(WithHead(), tp_mesh()), randn(2, 16, 64, grad=False, seed=dist.get_rank())
    cached, dynamic = (compiled(model, weights=weights) for weights in ("cached", "dynamic"))
    with torch.no_grad():
        with recording() as reports:
            cached(x)
        assert [report.reused_weights for report in reports] == [1], reports
        for factor in (1, 2):
            model.head.weight.mul_(factor)
            model.layers[0].down.weight.mul_(factor)
            assert torch.equal(cached(x), dynamic(x))


def check_rowwise_training_stays():
    """Rows in the forward, columns in the backward: two float8 copies are as many bytes as bf16."""
    with recording() as reports:
        steps(parallel(Net(depth=1), tp_mesh()), 0, recipe="rowwise")
    gathers = [gather for report in reports for gather in report.gathers]
    assert {gather.reason for gather in gathers} == {"its readers need different float8 copies"}


def check_bytes_sent():
    sent = {}
    for wire in ("off", "auto"):
        step = compiled(parallel(Net(), tp_mesh()), wire=wire)
        for _ in range(2):
            with InGraph() as sent[wire]:
                step(randn(2, 16, 64)).sum().backward()
    before, after = sent["off"], sent["auto"]
    half = before.bytes["all_gather_into_tensor", bf16] // 2
    assert after.bytes["all_gather_into_tensor", torch.uint8] == half > 0
    assert ("all_gather_into_tensor", bf16) not in after.bytes
    # the activation of one layer depends on that of the one before: a reduction each
    assert after.calls["all_reduce", torch.int32] == 4
    # what `explain` reads off the graphs is what is sent; of a gather it counts what a rank hands in
    explained = explain(
        parallel(Net(), tp_mesh()), randn(2, 16, 64), target="cpu", select="all"
    ).communication
    for side, sent_bytes in ((explained.high, before.bytes), (explained.float8, after.bytes)):
        counted = {(s.op, s.dtype): s.input_bytes for s in side}
        assert counted == {
            (name.split("_into")[0].split("_tensor")[0], str(dtype).split(".")[1]): size * _handed_in(name)
            for (name, dtype), size in sent_bytes.items()
        }


def check_rowwise_under_checkpointing():
    """In the backward an activation is gathered again, as two float8 copies: with scales of rows and of columns.

    The gradient of the output is gathered once, and stays as it is.
    """
    compare(lambda: parallel(Checkpointed(depth=1), tp_mesh()), moved=1, recipe="rowwise")


def check_bytes_sent_under_checkpointing():
    """In the backward checkpointing gathers the forward's rows again, and the gradient reads columns: 3 bytes for 4."""
    with recording() as reports:
        step = compiled(parallel(Checkpointed(depth=1), tp_mesh()), recipe="rowwise")
        for _ in range(2):
            with InGraph() as sent:
                step(randn(2, 16, 64)).sum().backward()
    moved = [gather.detail for report in reports for gather in report.gathers if gather.moved]
    before, after = (sum(int(detail.split()[i]) for detail in moved) for i in (0, 3))
    sizes = sent.bytes
    gathered = [sizes["all_gather_into_tensor", dtype] for dtype in (torch.uint8, torch.float32)]
    assert after == sum(gathered) + 2 * sizes["all_reduce", torch.int32]
    assert gathered[0] == 3 * before // 4


def _handed_in(collective):
    """Bytes that a rank hands in, relative to those it gets."""
    ranks = dist.get_world_size()
    return {"all_gather_into_tensor": 1 / ranks, "reduce_scatter_tensor": ranks}.get(collective, 1)


CHECKS = checks_of(
    dict(globals()),
    check_batches_of_any_size,
    check_one_long_sequence,
    check_one_rank_compiles_for_any_size,
    check_prepare_module_input,
    check_rowwise_in_inference,
    check_rowwise_training_stays,
    check_rowwise_under_checkpointing,
    check_weights_beside_those_that_are_parallel,
)
outcome = outcome_fixture(2, CHECKS)


# -- a mesh of two dimensions


def meshes():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


class Gathered(torch.autograd.Function):
    """A shard of rows in, all rows out; gradients the other way."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return funcol.all_gather_tensor(x, 0, group)

    @staticmethod
    def backward(ctx, grad):
        return funcol.reduce_scatter_tensor(grad, "sum", 0, ctx.group), None


class OnBoth(nn.Module):
    """Weights sharded over ``dp`` and gathered there; activations sharded over ``tp`` and gathered there."""

    def __init__(self, mesh):
        super().__init__()
        torch.manual_seed(mesh.get_local_rank("tp"))  # every rank of `tp` has its own columns
        self.up = nn.Linear(64, 96, bias=False, dtype=bf16)
        self.down = nn.Linear(96, 64, bias=False, dtype=bf16)
        simple_fsdp(self, mesh["dp"])
        self.tp = mesh.get_group("tp")

    def forward(self, x):
        h = F.silu(self.up(Gathered.apply(x.sin(), self.tp)))
        return funcol.reduce_scatter_tensor_autograd(self.down(h), "sum", 0, self.tp)


def steps_of_both(**options):
    mesh = meshes()
    model = OnBoth(mesh)
    rank = dist.get_rank()
    x, grad = randn(16, 64, seed=rank), randn(16, 64, grad=False, seed=100 + rank)
    with recording() as reports:
        y = compiled(model, **options)(x)
        y.backward(grad)
    found = {"output": y.detach(), "input": x.grad}
    return found | {n: local(p.grad) for n, p in model.named_parameters()}, reports[0]


def check_weights_over_one_dimension_and_activations_over_the_other():
    """Each amax is reduced over the group of its gather: the other one would give other scales."""
    found, report = steps_of_both()
    assert [gather.moved for gather in report.gathers] == [True] * len(report.gathers)
    assert {len(traffic.ranks) for traffic in report.traffic} == {2} and len(report.traffic) == 2
    assert_same(found, steps_of_both(wire="off")[0])


def check_weights_over_both_dimensions():
    """Sharded twice, gathered twice, reduced twice."""

    def outcome(**options):
        torch.manual_seed(0)
        model = simple_fsdp(nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)).to(bf16), meshes())
        x = randn(16, 64, seed=dist.get_rank())
        with recording() as reports:
            y = compiled(model, **options)(x)
            y.sum().backward()
        found = {"output": y.detach(), "input": x.grad}
        return found | {n: local(p.grad) for n, p in model.named_parameters()}, reports[0]

    found, report = outcome()
    assert sum(gather.moved for gather in report.gathers) == 4, report.gathers
    assert_same(found, outcome(wire="off")[0])


class Strided(nn.Module):
    """A weight split over ``tp`` first and each part over ``dp``, as FSDP shards what is tensor parallel."""

    def __init__(self, rows, over_tp):
        super().__init__()
        mesh = meshes()
        self.whole = randn(rows, 64, grad=False, seed=3)
        part = self.whole.chunk(2)[mesh.get_local_rank("tp")]
        shard = part.chunk(2)[mesh.get_local_rank("dp")]
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        sizes = {"shape": self.whole.shape, "stride": self.whole.stride()}
        self.weight = nn.Parameter(DTensor.from_local(shard, mesh, placements, run_check=False, **sizes))
        self.target = [Replicate(), Replicate() if over_tp else Shard(0)]
        self.grads = [Partial("avg"), Partial("sum") if over_tp else Shard(0)]
        self.part = self.whole if over_tp else part

    def forward(self, x):
        gathered = self.weight.redistribute(placements=self.target)
        return F.linear(x, gathered.to_local(grad_placements=self.grads))


def check_strided_shards():
    """Gathered over ``dp`` or over both, even and uneven: the rows in order, the bits of bf16 gathers."""
    cases = [(rows, over_tp, "tensorwise") for rows in (96, 42) for over_tp in (False, True)]
    for rows, over_tp, recipe in (*cases, (96, True, "rowwise")):
        results = []
        x = randn(16, 64, seed=dist.get_rank(), grad=recipe == "tensorwise")
        for wire in ("auto", "off"):
            model = Strided(rows, over_tp)
            with recording() as reports, torch.set_grad_enabled(recipe == "tensorwise"):
                y = compiled(model, wire=wire, recipe=recipe)(x)
            results.append({"output": y.detach()})
            if recipe == "tensorwise":
                y.backward(randn(*y.shape, grad=False, seed=9))
                results[-1]["weight"] = local(model.weight.grad)
            moved = [gather.moved for gather in reports[0].gathers]
            assert moved == [wire == "auto"] * (1 + over_tp), reports[0].gathers
        assert_same(*results)
        alone = compiled(F.linear, recipe=recipe)(x, model.part)
        assert torch.equal(results[0]["output"], alone), (rows, over_tp, recipe)


def check_sequence_parallel_over_four():
    compare(lambda: parallel(Net(depth=1), tp_mesh()), moved=2)


def fsdp2_and_sequence_parallel(float8):
    """What steps give, and what is sent in the last one by FSDP2's hooks and in graphs."""
    mesh = meshes()
    model = parallel(Net(depth=1), mesh["tp"])
    if float8:
        enable_float8_all_gather(model)
    torch._dynamo.reset()
    (layer,) = model.layers
    layer.compile(backend=f8fx.f8fx, options={**OPTIONS, "wire": "auto" if float8 else "off"})
    for module in (layer, model):
        fully_shard(module, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = {}
    for index in range(3):
        x = randn(2, 16, 64, seed=10 * dist.get_rank() + index)
        with collectives() as sent, InGraph() as sent_in_graph:
            y = model(x)
            y.backward(randn(2, 16, 64, grad=False, seed=1000 + 10 * dist.get_rank() + index))
        optimizer.step()
        optimizer.zero_grad()
        found |= {f"output {index}": y.detach(), f"input grad {index}": x.grad}
    weights = [call.bytes for call in sent if call.dtype == torch.uint8]
    return found | {n: local(p.detach()) for n, p in model.named_parameters()}, weights, sent_in_graph.bytes


def check_fsdp2_weights_and_sequence_parallel_activations():
    """Weights over one dimension by FSDP2's hooks, activations and gradients over the other in the graph, all in float8."""
    wanted, none, before = fsdp2_and_sequence_parallel(False)
    found, weights, after = fsdp2_and_sequence_parallel(True)
    assert_same(found, wanted)
    # for the forward and for the backward: a quarter of three weights, and half of the norm's in bf16
    assert weights == 2 * [3 * 64 * 128 // 4 + 2 * 64 // 2] and not none
    activations = after["all_gather_into_tensor", torch.uint8]
    assert activations == before["all_gather_into_tensor", bf16] // 2 > 0
    assert ("all_gather_into_tensor", bf16) not in after


MESH_CHECKS = with_long(
    [check_weights_over_one_dimension_and_activations_over_the_other],
    check_fsdp2_weights_and_sequence_parallel_activations,
    check_sequence_parallel_over_four,
    check_strided_shards,
    check_weights_over_both_dimensions,
)
mesh_outcome = outcome_fixture(4, MESH_CHECKS)


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_two_ranks(outcome, check):
    assert check not in outcome, outcome[check]


@pytest.mark.parametrize("check", [check.__name__ for check in MESH_CHECKS])
def test_four_ranks(mesh_outcome, check):
    assert check not in mesh_outcome, mesh_outcome[check]
