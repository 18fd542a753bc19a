"""Weights sharded as DTensors and gathered in the graph: float8 gathers give the bits of bf16 gathers."""

from __future__ import annotations

import functools
import itertools
import math
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from f8fx import explain, graph_pass, ops, recording
from f8fx.passes import Collectives, FilterError, check
from f8fx.passes.rewrite import Provenance
from f8fx.ranks import ledger
from f8fx.ranks.agreement import confirm
from f8fx.ranks.ledger import RankDisagreement
from f8fx.torch_private import group_timeout
from tests.distributed.harness import TIMEOUT, checks_of, outcome_fixture
from tests.distributed.models import saved_bytes
from tests.distributed.sent import InGraph
from tests.distributed.simple_fsdp import simple_fsdp
from tests.helpers import IR, Block, Experts, bf16, compiled, randn
from tests.long import with_long

OPTIMIZERS = {"SGD": lambda p: torch.optim.SGD(p, 1e-3), "AdamW": lambda p: torch.optim.AdamW(p, 1e-3)}


class Net(nn.Module):
    """A block and a head whose width no number of ranks divides.

    Sizes of all shards are multiples of 64: optimizers round the tail of a vector differently from the rest
    (CPU kernels of torch), so with others a sharded weight is not updated to the bits of a whole one.
    Rows of weights grow from the first to the last, so that scales of shards alone would be seen.
    """

    def __init__(self, dtype=bf16):
        super().__init__()
        torch.manual_seed(0)
        self.block = Block(128, 192)
        self.head = nn.Linear(128, 51, bias=False)
        with torch.no_grad():
            for layer in (self.block.gate, self.block.up, self.block.down, self.head):
                layer.weight.mul_(torch.linspace(0.25, 4, layer.out_features)[:, None])
        self.to(dtype)

    def forward(self, x):
        return self.head(self.block(x))


class Layers(nn.Module):
    """Where two weights are enough."""

    def __init__(self, dtype=bf16):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.head = nn.Linear(128, 192, bias=False), nn.Linear(192, 51, bias=False)
        self.to(dtype)

    def forward(self, x):
        return self.head(torch.tanh(self.up(x)))


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))


def sharded(placement=0, dtype=bf16, over=mesh, net=Net, **kwargs):
    """The net, sharded; along the last dimension for ``placement=-1``, vectors always along their only one."""
    return simple_fsdp(net(dtype), over(), placement, **kwargs)


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trained(model, steps=5, seed=0, optimizers=("SGD",), **options):
    """Outputs and gradients of every step, and the weights after the last; with each optimizer from the start."""
    step = compiled(model, **options)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = {}
    for name in optimizers:
        model.load_state_dict(start)
        optimizer = OPTIMIZERS[name](model.parameters())
        for index in range(steps):
            x = randn(2, 16, 128, seed=100 * seed + index)
            y = step(x)
            y.backward(randn(2, 16, 51, grad=False, seed=1000 + 100 * seed + index))
            found |= {f"{name} output {index}": y.detach(), f"{name} input grad {index}": x.grad}
            found |= {f"{name} {n} grad {index}": full(p.grad) for n, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        found |= {f"{name} {n}": full(p.detach()).clone() for n, p in model.named_parameters()}
    return found


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert value.isfinite().all(), name
        assert torch.equal(value, wanted[name]), name


@contextmanager
def moving(count=4):
    """Of the one graph that is compiled inside, so many gathers carry float8: those of all four weights, if not said."""
    with recording() as reports:
        yield
    (report,) = reports
    assert sum(gather.moved for gather in report.gathers) == count, report.gathers


def compare_gathers(steps=1, **kwargs):
    """float8 gathers == bf16 gathers, with other data on every rank."""
    options = {"seed": dist.get_rank(), "steps": steps, "recipe": kwargs.pop("recipe", "tensorwise")}
    with moving():
        found = trained(sharded(**kwargs), **options)
    with moving(0):
        wanted = trained(sharded(**kwargs), wire="off", **options)
    assert_same(found, wanted)


def alone(recipe, optimizers, steps=5):
    """One process on the data of all ranks, with the mean of their gradients: what :func:`trained` gives on this one."""
    model = Net()
    step, ranks = compiled(model, recipe=recipe), range(dist.get_world_size())
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = {}
    for name in optimizers:
        model.load_state_dict(start)
        optimizer = OPTIMIZERS[name](model.parameters())
        for index in range(steps):
            grads = {n: [] for n, _ in model.named_parameters()}
            for rank in ranks:
                x = randn(2, 16, 128, seed=100 * rank + index)
                y = step(x)
                y.backward(randn(2, 16, 51, grad=False, seed=1000 + 100 * rank + index))
                if rank == dist.get_rank():
                    found |= {f"{name} output {index}": y.detach(), f"{name} input grad {index}": x.grad}
                for n, p in model.named_parameters():
                    grads[n].append(p.grad)
                    p.grad = None
            for n, p in model.named_parameters():
                p.grad = sum(grads[n]) / len(ranks)
                found[f"{name} {n} grad {index}"] = p.grad
            optimizer.step()
            optimizer.zero_grad()
        found |= {f"{name} {n}": p.detach().clone() for n, p in model.named_parameters()}
    return found


def compare(recipe, **kwargs):
    """float8 gathers == bf16 gathers == one process on the data of all, to the bit: a sum of two is the same in either order."""
    options = {"seed": dist.get_rank(), "recipe": recipe, "optimizers": tuple(OPTIMIZERS)}
    with moving():
        found = trained(sharded(**kwargs), **options)
    with moving(0):
        wanted = trained(sharded(**kwargs), wire="off", **options)
    assert_same(found, wanted)
    assert_same(found, alone(recipe, tuple(OPTIMIZERS)))


def check_tensorwise():
    compare("tensorwise")


def check_rowwise():
    """Gathers are redone in the backward: where a weight is gathered once, bf16 is what travels."""
    compare("rowwise", reshard=True)


def check_sharded_by_columns():
    compare_gathers(placement=-1)


def check_mixed_precision():
    """float32 parameters gathered as bf16, gradients reduced in float32."""
    compare_gathers(dtype=torch.float32, param_dtype=bf16, reduce_dtype=torch.float32)


def check_that_rounded_shards_are_not_saved():
    """Shards of float32 weights that are gathered in bf16: no more is kept for the backward than of bf16 gathers."""
    for reshard in with_long((True,), False):
        saved = {}
        for wire in ("auto", "off"):
            model = sharded(dtype=torch.float32, param_dtype=bf16, reshard=reshard)
            saved[wire] = saved_bytes(compiled(model, wire=wire)(randn(2, 16, 128)), model)
        assert 0 < saved["auto"] <= saved["off"], (reshard, saved)


def check_native_float8_is_what_gloo_rejects():
    """The default is bytes; with float8 gloo says no, so the option is not decoration."""
    group = dist.new_group(timeout=timedelta(seconds=20))  # of no use afterwards
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        dist.all_gather_into_tensor(
            torch.zeros(4, dtype=torch.float8_e4m3fn), torch.zeros(2, dtype=torch.float8_e4m3fn), group
        )


def check_native_float8_is_refused_on_gloo():
    with recording() as reports:
        compiled(sharded(net=Layers), wire="float8")(randn(2, 16, 128))
    assert {gather.reason for gather in reports[0].gathers} == {"gloo sends no float8"}


def gathered_by(x, size, group):
    c10d = torch.ops._c10d_functional
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, size, group))


def moved_by_hand(fn, x):
    """What a function of the operators of the IR gives once its gather carries float8."""
    graph_module = make_fx(fn)(x)
    for node in graph_module.graph.nodes:
        if node.target in IR:
            node.meta["f8fx"] = Provenance(node.name, "", "output", "test")
    (decision,) = Collectives()(graph_module.graph)
    assert decision.moved, decision
    check(graph_module.graph, "collectives")
    graph_module.recompile()
    return graph_module(x)


def check_scales_over_any_dimensions():
    """Of three, sharded along any, read in any order, as a matrix whose rows or columns are scaled."""
    x = randn(2, 3, 4, grad=False, dtype=torch.float32, seed=dist.get_rank())
    size, group = dist.get_world_size(), dist.group.WORLD.group_name

    def quantized(x, sharded_dim, order, rows, dim):
        whole = gathered_by(x, size, group)
        if sharded_dim:
            whole = torch.cat(torch.split(whole, x.shape[0]), sharded_dim)
        turned = whole.permute(order)
        matrix = turned.reshape(math.prod(turned.shape[:rows]), -1)
        scale = ops.scale(ops.amax(matrix, dim), dtype=torch.float8_e4m3fn)
        return ops.quantize(matrix, scale, dtype=torch.float8_e4m3fn, dim=dim).view(torch.uint8), scale

    for case in itertools.product(range(3), itertools.permutations(range(3)), (1, 2), (0, 1)):
        fn = functools.partial(quantized, sharded_dim=case[0], order=case[1], rows=case[2], dim=case[3])
        for found, wanted in zip(moved_by_hand(fn, x), fn(x), strict=True):
            assert torch.equal(found, wanted), case


def check_experts():
    """Where gathers are redone in the backward: each half reads a copy of its own, turned on the shard if need be."""
    counts = torch.tensor([16, 0, 20, 12])

    def gradients(recipe, turned, dtype, **options):
        param_dtype = None if dtype is bf16 else bf16
        model = simple_fsdp(Experts(turned=turned).to(dtype), mesh(), param_dtype=param_dtype, reshard=True)
        step = compiled(model, experts="convert", recipe=recipe, **options)
        for _ in range(2):  # the second one compiles nothing
            model.zero_grad()
            x = randn(48, 32, seed=dist.get_rank())
            with InGraph() as sent:
                y = step(x, counts)
                y.backward(randn(*y.shape, grad=False, seed=5))
        found = {"y": y.detach(), "x": x.grad} | {n: full(p.grad) for n, p in model.named_parameters()}
        return found, sent.bytes

    for case in (("rowwise", False, bf16), ("rowwise_with_gw_hp", True, torch.float32)):
        found, sent = gradients(*case)
        wanted, before = gradients(*case, wire="off")
        assert_same(found, wanted)
        weights = 3 * 4 * 32 * 48
        assert before["all_gather_into_tensor", bf16] == 2 * 2 * weights  # in the forward and in the backward
        assert sent["all_gather_into_tensor", torch.uint8] == 2 * weights, (case, sent)
        assert ("all_gather_into_tensor", bf16) not in sent


def check_resharded_after_the_forward():
    """Every gather is redone in the backward: one copy twice, or rows' copies, then columns'."""
    for recipe in ("rowwise_with_gw_hp", "tensorwise"):
        compare_gathers(reshard=True, recipe=recipe)


def check_bytes_sent():
    """Counted from what is sent: half of bf16 for a converted weight, and one reduction."""
    sent = {}
    for wire in ("off", "auto"):
        model = sharded()
        step = compiled(model, wire=wire)
        for _ in range(2):  # the second one compiles nothing
            with InGraph() as sent[wire]:
                step(randn(2, 16, 128)).sum().backward()
    weights = 3 * 128 * 192 + 52 * 128  # the head has 51 rows, padded to 52
    norm_and_bias = 2 * 128
    before, after = sent["off"], sent["auto"]
    assert before.bytes["all_gather_into_tensor", bf16] == 2 * (weights + norm_and_bias)
    assert after.bytes["all_gather_into_tensor", torch.uint8] == weights
    assert after.bytes["all_gather_into_tensor", bf16] == 2 * norm_and_bias
    assert after.calls["all_reduce", torch.int32] == 1
    assert after.bytes["all_reduce", torch.int32] == 4 * 4  # four weights
    assert not any(name == "all_reduce" for name, _ in before.calls)
    reduced = {key: value for key, value in before.bytes.items() if key[0] == "reduce_scatter_tensor"}
    assert reduced == {key: value for key, value in after.bytes.items() if key[0] == "reduce_scatter_tensor"}


def check_bytes_sent_under_checkpointing():
    """What is gathered twice is gathered twice in float8, each copy once; amaxes are reduced once."""
    weights = 3 * 128 * 192 + 52 * 128  # the head has 51 rows, padded to 52
    for recipe in with_long(("rowwise",), "tensorwise", "rowwise_with_gw_hp"):
        step = compiled(sharded(reshard=True), recipe=recipe)
        for _ in range(2):  # the second one compiles nothing
            with InGraph() as sent:
                step(randn(2, 16, 128)).sum().backward()
        assert sent.calls["all_reduce", torch.int32] == 1
        assert sent.calls["all_gather_into_tensor", torch.uint8] == 8
        assert sent.bytes["all_gather_into_tensor", torch.uint8] == 2 * weights
    explained = explain(
        sharded(reshard=True), randn(2, 16, 128), target="cpu", select="all", recipe="rowwise"
    ).communication
    counted = {(row.op, row.dtype): row.input_bytes for row in explained.float8}
    assert counted["all_gather", "uint8"] == weights  # what a rank hands in


def check_nan_and_inf_are_not_hidden():
    """In the shard of one rank, for which the others see only an amax."""
    for value in with_long((float("nan"),), float("inf")):
        outputs = []
        for wire in ("auto", "off"):
            model = sharded(net=Layers)
            with torch.no_grad():
                weight = model.up._parameters["weight"].to_local()
                if dist.get_rank() == 1:
                    weight[3, 5] = value
            with moving(2 if wire == "auto" else 0):
                outputs.append(compiled(model, wire=wire)(randn(2, 16, 128)).detach())
        assert outputs[0].isnan().all()
        assert torch.equal(outputs[0].isnan(), outputs[1].isnan())


def check_inference():
    model = sharded()
    x = randn(2, 16, 128, grad=False)
    with torch.no_grad():
        for recipe in with_long(("rowwise",), "tensorwise"):
            with moving():
                found = compiled(model, recipe=recipe)(x)
            assert torch.equal(found, compiled(model, recipe=recipe, wire="off")(x))


def check_ranks_that_decide_differently_get_an_error():
    filters = {"filter_fqns": ["up"]} if dist.get_rank() else {}
    with pytest.raises(Exception, match="ranks decided differently about one graph"):
        compiled(sharded(net=Layers), **filters)(randn(2, 16, 128))


def check_a_rank_that_leaves_its_gathers_alone_is_an_error():
    """Found out by the others, before a gather that it joins in with other bytes."""
    alone = dist.get_rank() == 1

    def said_and_stopped(sent):
        confirm(sent)
        raise FilterError("before the gather")

    with (
        mock.patch.object(ledger, "ALONE", timedelta(seconds=1)),
        mock.patch.object(graph_pass, "confirm", said_and_stopped if alone else confirm),
        pytest.raises(
            Exception, match="before the gather|not all ranks did" if alone else "rank 1 .* not all ranks did"
        ),
    ):
        compiled(sharded(dtype=torch.float16, net=Layers), wire="off" if alone else "auto")(
            randn(2, 16, 128, dtype=torch.float16)
        )


def check_ranks_that_run_graphs_of_two_decisions_get_an_error():
    """All have compiled both, for few rows and for many; then one has few and nobody compiles."""
    for recipe, training in with_long((("tensorwise", True),), ("rowwise", False)):
        f8 = compiled(
            sharded(net=Layers), recipe=recipe, dynamic=False, filter_fn=lambda fqn, gemm: int(gemm.m) >= 32
        )
        with torch.set_grad_enabled(training):
            for rows in (64, 16, 64, 16):
                f8(randn(rows, 128))
            with pytest.raises(RankDisagreement, match="ranks run graphs that were decided differently"):
                f8(randn(16 if dist.get_rank() else 64, 128))
            f8(randn(64, 128))  # and nothing is left behind


def check_a_rank_that_compiles_alone_waits_no_longer_than_its_group_would():
    """Anew, where all have decided before; and a graph that no other rank has."""
    known, unknown = sharded(net=Layers), sharded(dtype=torch.float32, net=Layers)
    compiled(known)(randn(2, 16, 128))
    if dist.get_rank() == 0:
        return
    group = mesh().get_group()
    limit = group_timeout(group.group_name)
    assert limit == TIMEOUT
    _set_pg_timeout(timedelta(seconds=2), group)  # of this rank only
    try:
        with pytest.raises(Exception, match="rank 0 compiled none within 1 s"):
            compiled(known, filter_fqns=["up"])(randn(2, 16, 128))
        with pytest.raises(Exception, match="rank 0 compiled no such graph within 2 s"):
            compiled(unknown)(randn(2, 16, 128))
    finally:
        _set_pg_timeout(limit, group)


CHECKS = checks_of(
    dict(globals()),
    check_experts,
    check_inference,
    check_mixed_precision,
    check_resharded_after_the_forward,
    check_scales_over_any_dimensions,
    check_sharded_by_columns,
    check_that_rounded_shards_are_not_saved,
)
outcome = outcome_fixture(2, CHECKS)


# -- four ranks


def rows_over_four():
    """The head's 51 rows are 13, 13, 13 and 12."""
    compare_gathers(steps=2)


def replicas():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def hybrid():
    """Shards over one dimension of the mesh, copies over the other: gradients are averaged over both.

    Amaxes are reduced over the two ranks that a weight is gathered over: the other two have a copy of it.
    """
    with recording() as reports:
        compare_gathers(steps=2, over=replicas, hybrid=True)
    (traffic,) = reports[0].traffic
    assert len(traffic.ranks) == 2 and any("all_reduce" in send for send in traffic.sends), traffic


def uneven_over_two_dimensions():
    """DTensor pads what the inner gather gives on some ranks alone, up to torch 2.13: all leave it, or none does."""
    mesh = init_device_mesh("cpu", (2, 2))
    by_columns, by_rows = ((48, 33), [Shard(1), Shard(0)]), ((33, 32), [Shard(0), Shard(0)])
    usual = ("rowwise", by_columns), ("tensorwise", by_rows)
    for recipe, (shape, placements) in with_long(usual, ("rowwise", by_rows), ("tensorwise", by_columns)):
        weight = distribute_tensor(randn(*shape, grad=False), mesh, placements).requires_grad_()

        def layer(x, weight=weight):
            whole = weight.redistribute(placements=[Replicate()] * 2)
            return x @ whole.to_local(grad_placements=[Partial("avg")] * 2).t()

        x, results = randn(16, shape[1], grad=False), []
        for wire in ("off", "auto"):
            y = compiled(layer, recipe=recipe, wire=wire)(x)
            y.sum().backward()
            results.append((y, weight.grad.to_local()))
            weight.grad = None
        assert all(map(torch.equal, *results)), (recipe, shape)


FOUR = with_long((uneven_over_two_dimensions,), hybrid, rows_over_four)
outcome_of_four = outcome_fixture(4, FOUR)


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_two_ranks(outcome, check):
    assert check not in outcome, outcome[check]


@pytest.mark.parametrize("check", [check.__name__ for check in FOUR])
def test_four_ranks(outcome_of_four, check):
    assert check not in outcome_of_four, outcome_of_four[check]
