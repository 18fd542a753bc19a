"""*merge*: what stays as it is, and the reason that is on record for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import f8fx
from f8fx import hardware, ops
from f8fx.cost import CostModel
from f8fx.passes import merge as merge_pass
from f8fx.passes import select as select_pass
from f8fx.passes.family import Family
from f8fx.passes.siblings import families
from f8fx.report import GraphReport
from tests.helpers import bf16, compiled, joint_graphs, randn, sqnr

M, K = 64, 128


def weights(*rows, grad=True):
    return [randn(n, K, seed=seed + 1, grad=grad) for seed, n in enumerate(rows)]


def gate_up(x, gate, up):
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def report(fn: Any, *args: Any, dynamic: bool = False, **options: Any) -> tuple[GraphReport, int]:
    """The passes' report, and how many float8 gemms the graph really has."""
    found: list[tuple[GraphReport, int]] = []
    pipeline = f8fx.Options.parse({"select": "all", "target": "h100", **options}).pipeline(debug=True)

    def transform(graph):
        result = pipeline(graph)
        found.append(
            (result, len(graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default)))
        )

    joint_graphs(fn, *args, transform=transform, dynamic=dynamic)
    return found[0]


def unmerged(reason: str, fn: Callable[..., Any], *args: Any, detail: str = "", **options: Any) -> None:
    """Nothing is merged, and every layer says so, for this reason alone."""
    result, gemms = report(fn, *args, **options)
    assert gemms == result.gemms == result.converted > 0
    assert {(merge.merged, merge.reason, merge.detail) for merge in result.merges} == {
        (False, reason, detail)
    }
    why = f"{reason}: {detail}" if detail else reason
    assert {d.merge for d in result.decisions if d.converted} == {f"not merged: {why}"}


class GateUp(nn.Module):
    def __init__(self, gate: int = 64, up: int = 64) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(K, n, bias=False, dtype=bf16) for n in (gate, up))

    def forward(self, x):
        return F.silu(self.gate(x)) * self.up(x)


# -- what is merged


def test_merged_layers_name_each_other():
    result, gemms = report(nn.Sequential(GateUp()), randn(M, K))
    assert (gemms, result.gemms, result.converted) == (3, 3, 6)
    (merge,) = result.merges
    assert merge.layers == ("0.gate", "0.up") and merge.merged and merge.reason == "merged"
    assert set(merge.roles) == {"output", "grad_input", "grad_weight"}
    assert 0 < merge.merged_seconds < merge.separate_seconds
    texts = {d.fqn: d.merge for d in result.decisions}
    assert texts == {"0.gate": "merged with up", "0.up": "merged with gate"}
    assert result.line() == "f8fx: 6 of 6 matmuls in float8 (tensorwise), merged into 3 gemms"
    assert GraphReport.from_dict(result.to_dict()) == result


def test_layers_without_names_are_counted():
    result, _ = report(gate_up, randn(M, K), *weights(64, 64))
    assert {d.merge for d in result.decisions} == {"merged with 1 more"}


def test_layers_that_share_no_input_have_nothing_to_say():
    result, _ = report(
        lambda x, y, a, b: F.linear(x, a) * F.linear(y, b), randn(M, K), randn(M, K, seed=7), *weights(64, 64)
    )
    assert not result.merges and {d.merge for d in result.decisions} == {""}
    assert result.gemms == result.converted == 6


def test_the_rest_of_a_family_says_why():
    """The layer that needs padding stays; the two others are one."""

    def f(x, a, b, c):
        return F.linear(x, a) * F.linear(x, b), F.linear(x, c)

    result, gemms = report(f, randn(M, K, grad=False), *weights(64, 64, 56, grad=False))
    assert gemms == result.gemms == 2
    assert [(merge.merged, merge.reason, len(merge.layers)) for merge in result.merges] == [
        (True, "merged", 2),
        (False, "needs padding", 1),
    ]


# -- weight gradients that the recipe keeps in high precision


def high_precision(fn: Any, *args: Any, **options: Any) -> tuple[GraphReport, int]:
    """The report of ``rowwise_with_gw_hp``, and how many matmuls the graph has in high precision."""
    found: list[tuple[GraphReport, int]] = []
    parsed = f8fx.Options.parse(
        {"select": "all", "target": "h100", "recipe": "rowwise_with_gw_hp", **options}
    )
    pipeline = parsed.pipeline(debug=True)

    def transform(graph):
        result = pipeline(graph)
        found.append((result, len(graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default))))

    joint_graphs(fn, *args, transform=transform)
    return found[0]


def test_weight_gradients_in_high_precision_are_merged_too():
    result, matmuls = high_precision(GateUp(), randn(M, K))
    (merge,) = result.merges
    assert set(merge.roles) == {"output", "grad_input"} and merge.kept_roles == ("grad_weight",)
    assert matmuls == 1 and (result.converted, result.gemms) == (4, 2)
    kept = {d.fqn: (d.reason, d.merge) for d in result.decisions if d.role == "grad_weight"}
    reason = "kept in high precision by the recipe"
    assert kept == {"gate": (reason, "merged with up"), "up": (reason, "merged with gate")}
    assert GraphReport.from_dict(result.to_dict()) == result


def separate_weight_gradients(matmuls: int, fn: Any, *args: Any) -> None:
    """The float8 gemms are merged, those in high precision are not."""
    result, found = high_precision(fn, *args)
    (merge,) = result.merges
    assert merge.merged and merge.kept_roles == () and found == matmuls
    assert {d.merge for d in result.decisions if d.role == "grad_weight"} == {""}


def test_weight_gradients_that_would_have_to_be_copied():
    """What the gradients come from is no kernel that could write them side by side, and small gemms gain too little."""

    def f(x, a, b):
        return F.linear(x, a), F.linear(x, b)

    class Launches(CostModel):
        """One gemm is faster than two by a launch, and a copy of a gradient takes as long as two."""

        def gemm_seconds(self, m, k, n, float8, *args, **kwargs):
            return 1e-6

        def copy_seconds(self, size):
            return self.copy if size == M * 64 * 2 else 0.0

    args = randn(M, K), *weights(64, 64)
    for copy, matmuls in ((2e-6, 2), (0.4e-6, 1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Launches, "copy", copy, raising=False)
            patch.setattr(select_pass, "cost_model", lambda *_: Launches(hardware.find("h100")))
            if matmuls == 2:
                separate_weight_gradients(2, f, *args)
            assert high_precision(f, *args)[1] == matmuls


def test_the_weight_gradient_of_a_frozen_weight():
    model = GateUp()
    model.up.requires_grad_(False)
    separate_weight_gradients(1, model, randn(M, K))


@pytest.mark.parametrize("how", ["input first", "two gradients"])
def test_weight_gradients_of_another_form(how):
    def f(x, a, b):
        return Linear.apply(x, a, how).sin()[:, :32] * Linear.apply(x, b, how)

    separate_weight_gradients(2, f, randn(M, K), *weights(64, 32))


# -- what stays, layer by layer


def test_never():
    unmerged("switched off", gate_up, randn(M, K), *weights(64, 64), merge="never")


def test_no_float8_gemms_to_be_faster():
    """The CPU emulates: nothing is gained there, and results stay comparable to the bit."""
    unmerged("no float8 tensor cores on cpu", gate_up, randn(M, K), *weights(64, 64), target="cpu")


def test_no_gain(monkeypatch):
    class Superlinear(CostModel):
        """In the real model one gemm is never slower than several."""

        def gemm_seconds(self, m, k, n, *args, **kwargs):
            return 1e-6 * m * n * n

    monkeypatch.setattr(select_pass, "cost_model", lambda *_: Superlinear(hardware.find("h100")))
    unmerged(
        "would be no faster",
        gate_up,
        *(randn(2, K, grad=False), *weights(16, 16, grad=False)),
        detail="1024 us apart, 2048 us as one",
    )


def test_a_size_that_is_not_known():
    def f(x, mask, a, b):
        return gate_up(x[mask], a, b)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        unmerged(
            "size known only at run time",
            f,
            *(randn(M, K, grad=False), torch.ones(M, dtype=torch.bool), *weights(64, 64, grad=False)),
        )


def test_one_weight_used_twice():
    def f(x, w):
        return F.linear(x, w) * F.linear(x, w)

    unmerged("one weight used twice", f, randn(M, K), *weights(64))


def test_a_weight_that_is_computed_from_the_other_result():
    def f(x, w):
        x = x.sin()  # of two inputs of the graph, or two computed tensors, the left one is the input
        y = F.linear(x, w)
        return F.linear(x, y.t() @ x)

    result, gemms = report(f, randn(M, K, grad=False), *weights(64, grad=False))
    assert gemms == result.gemms == 3
    assert "a weight is computed too late" in {merge.reason for merge in result.merges}


def test_sizes_that_need_padding():
    unmerged("needs padding", gate_up, randn(M, K), *weights(56, 56))


def test_one_of_two_that_needs_padding():
    def f(x, a, b):
        return F.linear(x, a), F.linear(x, b)

    result, gemms = report(f, randn(M, K), *weights(64, 56))
    assert gemms == 6
    assert [merge.reason for merge in result.merges] == [
        "the other layers of its input cannot be merged",
        "needs padding",
    ]


def test_a_weight_of_dynamic_size():
    args = randn(M, K, grad=False), *weights(64, 64, grad=False)
    unmerged("a weight of dynamic size", gate_up, *args, dynamic=True)


def test_one_of_two_filtered():
    unmerged("the other layers of its input are not in float8", GateUp(), randn(M, K), filter_fqns=["up"])


def test_a_weight_on_the_left():
    def f(x, a, b):
        x = x.sin().t()
        return (a @ x) * (b @ x)

    unmerged("the weight is the left operand", f, randn(M, K), *weights(64, 64))


def test_an_input_that_is_transposed():
    x, (a, b) = randn(K, M), weights(64, 64)
    unmerged("the input is read transposed", lambda x, a, b: F.linear(x.t(), a) * F.linear(x.t(), b), x, a, b)


def test_a_batched_matmul():
    def f(x, a, b):
        return torch.bmm(x, a) * torch.bmm(x, b)

    args = randn(1, M, K, grad=False), randn(1, K, 64, grad=False), randn(1, K, 64, grad=False, seed=1)
    unmerged("a batched matmul", f, *args)


def test_a_scaled_product():
    def f(x, a, b, c):
        return torch.addmm(c, x, a.t(), alpha=2) * torch.addmm(c, x, b.t(), alpha=3)

    args = randn(M, K, grad=False), *weights(64, 64, grad=False), randn(M, 64, grad=False)
    unmerged("scaled by alpha or beta", f, *args)


def test_a_weight_that_is_float8_already():
    def f(x, data, scale, w):
        return F.silu(F.linear(x, ops.dequantize(data, scale, dtype=bf16))) * F.linear(x, w)

    args = (
        randn(M, K, grad=False),
        randn(64, K, grad=False).to(torch.float8_e4m3fn),
        torch.ones(()),
        randn(64, K, grad=False),
    )
    result, gemms = report(f, *args)
    assert gemms == 2
    assert [merge.reason for merge in result.merges] == [
        "the weight is float8 already",
        "the other layers of its input cannot be merged",
    ]


@torch.library.custom_op("f8fx_tests::decay", mutates_args={"weight"})
def decay(weight: torch.Tensor) -> None:
    weight.mul_(0.5)


@torch.library.custom_op("f8fx_tests::added", mutates_args={"total"})
def added(total: torch.Tensor, weight: torch.Tensor) -> None:
    total.add_(weight.sum())


def test_a_weight_that_an_operator_only_reads():
    def f(x, total, a, b):
        added(total, a)
        return F.silu(F.linear(x, a)) * F.linear(x, b)

    result, gemms = report(f, randn(M, K, grad=False), torch.zeros(1), *weights(64, 64, grad=False))
    assert gemms == 1 and [merge.reason for merge in result.merges] == ["merged"]


def test_a_weight_that_is_a_part_of_what_an_operator_writes_to():
    def f(x, both):
        a, b = both.split(64)
        y, z = F.linear(x, a), F.linear(x, b)
        decay(both)
        return y, z

    unmerged("an operator writes to the weight", f, randn(M, K, grad=False), *weights(128, grad=False))


@pytest.mark.parametrize("of", [lambda w: w, lambda w: w.view(-1)])
def test_a_weight_that_an_operator_writes_to(of):
    def f(x, a, b):
        y = F.linear(x, a)
        decay(of(a))
        z = F.linear(x, b)
        decay(of(b))
        return y, z

    unmerged("an operator writes to the weight", f, randn(M, K, grad=False), *weights(64, 64, grad=False))


def test_weights_that_are_reduced_in_the_graph():
    """No gather of theirs could carry float8."""
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed._functional_collectives import all_reduce
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def f(x, a, b):
        return gate_up(x.sin(), *(all_reduce(w, "sum", dist.group.WORLD) for w in (a, b)))

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        result, gemms = report(f, randn(M, K, grad=False), *weights(64, 64, grad=False))
    finally:
        dist.destroy_process_group()
    assert gemms == 1 and [merge.reason for merge in result.merges] == ["merged"]


def test_gathered_weights():
    """A gather in float8 saves more than one gemm for two does."""
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed._functional_collectives import all_gather_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def gathered(weight, dim, how):
        whole = all_gather_tensor(weight, 0, group=dist.group.WORLD)
        if dim == 1:
            whole = torch.cat(torch.split(whole, len(weight)), 1)
        if how == "copied":
            return whole.clone()
        return F.pad(whole, (0, 0, 0, 16)) if how == "padded" else whole

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        for dim, how in ((0, ""), (1, ""), (0, "copied"), (0, "padded")):

            def f(x, a, b, dim=dim, how=how):
                return gate_up(x.sin(), *(gathered(w, dim, how) for w in (a, b)))

            sizes = (16, K) if dim == 0 else (64, K // 4)
            shards = [randn(*sizes, grad=False, seed=seed) for seed in range(2)]
            unmerged("the weight is gathered in the graph", f, randn(M, K, grad=False), *shards)
    finally:
        dist.destroy_process_group()


# -- what stays, by difference


def test_weights_that_lie_differently():
    def f(x, a, b):
        return F.linear(x, a) * (x @ b)

    args = randn(M, K), weights(64)[0], randn(K, 64, seed=3)
    unmerged("weights lie in memory differently", f, *args)


def test_dtypes_that_differ():
    def f(x, a, b):
        with torch.autocast("cpu", bf16):
            return gate_up(x, a, b)

    a, b = weights(64, 64, grad=False)
    unmerged("dtypes differ", f, randn(M, K, grad=False), a.float(), b)


def test_two_checkpointed_regions():
    def f(x, a, b):
        one = checkpoint(lambda x, w: F.linear(x, w).sin(), x, a, use_reentrant=False)
        return one * checkpoint(lambda x, w: F.linear(x, w).sin(), x, b, use_reentrant=False)

    unmerged("checkpointed differently", f, randn(M, K), *weights(64, 64))


# -- what stays, by its backward


def test_outputs_that_were_added():
    """Both layers have the same output gradient: one tensor has nothing to stand beside."""
    unmerged(
        "the outputs are added up, so their gradients are one tensor",
        lambda x, a, b: F.linear(x, a) + F.linear(x, b),
        *(randn(M, K), *weights(64, 64)),
    )


def test_one_frozen_weight():
    model = GateUp()
    model.up.requires_grad_(False)
    unmerged("grad_weight of only some is in float8", model, randn(M, K), detail="not up")


def test_an_input_gradient_that_is_used_by_itself():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    unmerged(
        "input gradients are not only added up",
        lambda x, a, b: F.linear(Scaled.apply(x), a).sin() * F.linear(Scaled.apply(x), b),
        *(randn(M, K), *weights(64, 64)),
    )


class Linear(torch.autograd.Function):
    """A layer whose backward is written by hand, as `how` says."""

    @staticmethod
    def forward(ctx, x, w, how):
        ctx.save_for_backward(x, w)
        ctx.how = how
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        if ctx.how == "weight first":
            return (w.t() @ grad.t()).t(), grad.t() @ x, None
        if ctx.how == "added":
            return torch.addmm(x, grad, w), grad.t() @ x, None
        if ctx.how == "input first":
            return grad @ w, (x.t() @ grad).t(), None
        if ctx.how == "a sum":
            return grad @ w, torch.addmm(w, grad.t(), x), None
        if ctx.how == "two gradients":
            return grad @ w, (2 * grad).t() @ x, None
        if ctx.how == "plain":
            return grad @ w, grad.t() @ x, None
        if ctx.how == "turned":
            return grad @ w.t(), grad.t() @ x, None
        assert ctx.how == "two grad_inputs"
        return grad @ w + (2 * grad) @ w, grad.t() @ x, None


@pytest.mark.parametrize(
    "how, reason",
    [
        ("weight first", "the input is transposed in memory, and so is its gradient"),
        ("added", "grad_input is no plain matmul with the same weight"),
        ("input first", "weight gradients are x.T @ dy, not dy.T @ x"),
        ("a sum", "grad_weight is no plain matmul with the same input"),
        ("two gradients", "grad_input and grad_weight read different gradients"),
        ("two grad_inputs", "a layer has more than one grad_input"),
    ],
)
def test_a_backward_of_another_form(how, reason):
    def f(x, a, b):
        return Linear.apply(x, a, how).sin()[:, :32] * Linear.apply(x, b, how)

    unmerged(reason, f, randn(M, K), *weights(64, 32))  # sizes tell which layer a gradient is of


def test_equal_layers_with_backwards_by_hand():
    """Their gradients have no number of a forward: which is of which layer is told by the gradient they read."""

    def f(x, a, b):
        return Linear.apply(x, a, "plain").sin() * Linear.apply(x, b, "plain")

    found, count = report(f, randn(M, K), *weights(K, K))
    assert [(each.merged, each.reason) for each in found.merges] == [(True, "merged")] and count == 3


@pytest.mark.parametrize("first", [F.linear, lambda x, w: Linear.apply(x, w, "turned")])
def test_a_gradient_by_a_square_weight_the_other_way_round(first):
    def f(x, a, b):
        return first(x, a).sin() * Linear.apply(x, b, "turned")

    unmerged("grad_input is no plain matmul with the same weight", f, randn(M, K), *weights(K, K))


def test_weights_that_are_multiplied_as_they_lie():
    """``x @ w`` for ``w`` of [k, n]; without a backward such layers are merged."""

    def f(x, a, b):
        return (x @ a).sin()[:, :32] * (x @ b)

    stored = randn(K, 64), randn(K, 32, seed=1)
    unmerged("weight gradients are x.T @ dy, not dy.T @ x", f, randn(M, K), *stored)


def test_an_input_that_is_transposed_in_memory():
    """As Pixtral's, at batch 1."""

    def f(x, a, b):
        y = x.t() * 2
        return F.linear(y, a).sin()[:, :32] * F.linear(y, b)

    unmerged("the input is transposed in memory, and so is its gradient", f, randn(K, M), *weights(64, 32))


class Chained(torch.autograd.Function):
    """Two layers; the gradient of the second weight needs that of the first."""

    @staticmethod
    def forward(ctx, x, a, b):
        ctx.save_for_backward(x)
        return x @ a.t(), x @ b.t()

    @staticmethod
    def backward(ctx, grad, other):
        (x,) = ctx.saved_tensors
        first = grad.t() @ x
        return None, first, (other * first.sum()).t() @ x


def test_a_weight_gradient_that_needs_another():
    def f(x, a, b):
        one, other = Chained.apply(x, a, b)
        return one.sin()[:, :32] * other

    unmerged("one weight gradient depends on another", f, randn(M, K, grad=False), *weights(64, 32))


def gradients(fn, *args, merge="auto"):
    inputs = [arg.detach().clone().requires_grad_() for arg in args]
    with f8fx.recording() as reports:
        y = compiled(fn, recipe="rowwise_with_gw_hp", target="h100", merge=merge)(*inputs)
    y.sum().backward()
    return [each.merged for each in reports[0].merges], [x.grad for x in inputs]


def test_a_sum_inside_a_sum(monkeypatch):
    """The gradients of y are summands of the gradient of x, whichever sum is replaced first."""

    def f(x, a, b, c, d):
        first = F.linear(x, a).sin()
        y = x + 1
        return first * F.linear(y, b).sin() * F.linear(x, c).sin() * F.linear(y, d)

    args = randn(M, K), *weights(64, 64, 64, 64)
    separate = gradients(f, *args, merge="never")[1]
    for turn in (list, lambda found: found[::-1]):
        with monkeypatch.context() as patch:
            patch.setattr(merge_pass, "families", lambda *given, turn=turn: turn(families(*given)))
            merged, got = gradients(f, *args)
        assert merged == [True, True]
        for one, other in zip(got, separate, strict=True):
            assert sqnr(other, one) > 20


def test_sums_that_are_one_tree():
    """Of two families whose gradients are added up in turns only one sum can be replaced."""

    def f(x, a, b, c, d):
        one, two, three, four = (F.linear(x, w).sin() for w in (a, b, c, d))
        return one * two * three * four

    choices = []
    pipeline = f8fx.Options.parse({"select": "all", "target": "h100"}).pipeline()

    def transform(graph):
        choices[:] = pipeline.select(pipeline.find(graph))

    joint_graphs(f, randn(M, K), *weights(64, 64, 64, 64), transform=transform)

    def in_turns(members, trains):
        return [[members[::2], members[1::2]], [members]]

    def side_by_side(members, trains):
        return [[members[:2], members[2:]], [members]]

    def whole(members):
        return [members]

    (one,) = families(choices, set(), whole, in_turns)
    assert isinstance(one, Family) and len(one.layers) == 4
    two = families(choices, set(), whole, side_by_side)
    assert [len(each.layers) for each in two if isinstance(each, Family)] == [2, 2]
