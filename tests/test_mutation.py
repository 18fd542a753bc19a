"""Graphs that overwrite inputs and results that share memory: what bf16 gives, in float8 too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import f8fx
from f8fx import lowerings, ops
from tests.helpers import bf16, compiled, joint_graphs, randn, sqnr
from tests.long import seldom


class Averaged(nn.Module):
    """A layer whose weight is computed with a buffer that the forward overwrites, before or after it is read."""

    def __init__(self, frozen: bool, before: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(96, 128, grad=False) / 8, requires_grad=not frozen)
        self.register_buffer("average", randn(96, 128, grad=False, seed=1) / 8)
        self.before = before

    def update(self):
        with torch.no_grad():
            self.average.mul_(-1.0)

    def forward(self, x):
        if self.before:
            self.update()
        y = F.linear(x, self.weight + self.average)
        if not self.before:
            self.update()
        return y


@pytest.mark.parametrize("save", ["lean", "fast"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_a_weight_of_an_overwritten_buffer(save, frozen, before):
    """The backward does not compute the weight anew from what the buffer holds by then."""
    results = []
    for call in (lambda model: model, lambda model: compiled(model, save=save)):
        model, x = Averaged(frozen, before), randn(32, 128)
        y = call(model)(x)
        y.backward(randn(32, 96, grad=False, seed=2))
        results.append((y.detach(), x.grad, model.weight.grad, model.average))
    for want, got in zip(*results, strict=True):
        assert (want is None) == (got is None)
        if want is not None:
            assert torch.equal(want, got) or sqnr(want, got) > 18


@pytest.mark.parametrize("save", ["lean", "fast"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_an_activation_that_is_overwritten_after_its_use(save, recipe):
    """AOTAutograd writes it, since it has a gradient; the backward may not need what it was."""
    weight = nn.Parameter(randn(96, 128, grad=False) / 8)

    def f(x):
        y = F.linear(torch.tanh(x) * 2, weight)
        x.mul_(2)
        return y

    results = []
    for call in (f, compiled(f, recipe=recipe, save=save)):
        leaf, weight.grad = randn(32, 128), None
        x = leaf * 1
        y = call(x)
        (y.float().square().mean() + x.float().square().mean()).backward()
        results.append((y.detach(), x.detach(), leaf.grad, weight.grad))
    for want, got in zip(*results, strict=True):
        assert torch.equal(want, got) or sqnr(want, got) > 18


@pytest.mark.parametrize(
    ("shape", "executor"),
    [
        ((2, 16, 64), "eager"),
        ((32, 64), "eager"),
        pytest.param((2, 16, 64), "inductor", marks=(pytest.mark.slow, pytest.mark.long)),
        pytest.param((32, 64), "inductor", marks=(pytest.mark.slow, pytest.mark.long)),
    ],
)
def test_equal_results_are_two_tensors(executor, shape):
    """torch's own elimination of common subexpressions keeps outputs apart, by the memory of their fake values."""
    layer = nn.Linear(64, 96, dtype=bf16)
    with torch._inductor.config.patch(force_disable_caches=True):
        first, second = compiled(lambda x: (layer(x), layer(x)), executor=executor)(randn(*shape))
    before = second.detach().clone()
    with torch.no_grad():
        first.zero_()
    assert torch.equal(before, second)


@pytest.mark.parametrize("merge", ["auto", "never"])
def test_values_of_views_share_memory_with_what_they_are_views_of(merge):
    """In the rewritten graph, of every form that a matmul's result takes."""
    a, b, frozen = (nn.Parameter(randn(48, 64, grad=False, seed=i)) for i in range(3))
    frozen.requires_grad_(False)
    pipeline = f8fx.Options.parse({"select": "all", "merge": merge}).pipeline(debug=True)
    wrong, views = [], []

    def transform(graph):
        pipeline(graph)
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            source, value = node.args[0].meta["val"], node.meta["val"]
            views.append(node)
            if source.untyped_storage()._cdata != value.untyped_storage()._cdata:
                wrong.append(node.name)

    def layers(x):
        y = F.linear(x, a, b[:, 0]) * F.linear(x, b)
        turned = F.linear(x.transpose(0, 1), frozen).transpose(0, 1)
        return y + turned + torch.einsum("bsk,nk->bsn", x, a[:, :64])

    joint_graphs(layers, randn(4, 16, 64), transform=transform)
    assert len(views) > 5 and not wrong


def cast(x, b, w):
    with torch.autocast("cpu", dtype=bf16):
        return F.linear(x, b)


def cat_of_weights(x, b, w):
    return F.linear(x, torch.cat([b[:32].to(bf16), w[:32]]))


def cat_of_columns(x, b, w):
    return F.linear(torch.cat([x, b.to(bf16)[:32]], 1), torch.cat([w, w], 1))


def repeated(x, b, w):
    return torch.bmm(x.view(4, 8, 64), b.to(bf16).t().expand(4, 64, 64).contiguous())


def strided(x, b, w):
    return F.linear(x, torch.as_strided(b, (64, 64), (64, 1)) * 2)


def reinterpreted(x, b, w):
    return F.linear(x, b.view(torch.int16).view(bf16) * 2)


def unfolded(x, b, w):
    return F.linear(x, b.view(-1).unfold(0, 64, 64) * 2) @ w


OF_FLOAT32 = [
    (cast, torch.float32, False),
    (cast, torch.float32, True),
    (cat_of_weights, torch.float32, True),
]
OF_BF16 = [
    (function, bf16, False)
    for function in (cat_of_weights, cat_of_columns, repeated, strided, reinterpreted, unfolded)
]


@pytest.mark.parametrize("recipe", ["tensorwise", *seldom("rowwise")])
@pytest.mark.parametrize(("function", "dtype", "trained"), OF_FLOAT32 + OF_BF16)
def test_a_copy_of_what_is_overwritten_after_its_use(function, recipe, dtype, trained):
    """The copy is there to keep the values for the backward: its source is not read in its place."""

    def f(x, b, w):
        y = function(x, b, w)
        with torch.no_grad():
            b.mul_(-1)
        return y

    results = []
    for call in (f, compiled(f, recipe=recipe)):
        x, w = randn(32, 64), randn(64, 64, seed=1)
        b = nn.Parameter(randn(64, 64, grad=False, seed=2).to(dtype), requires_grad=trained)
        y = call(x, b, w)
        y.backward(randn(*y.shape, grad=False, seed=3).to(y.dtype))
        results.append((y.detach(), x.grad, w.grad, b.detach()))
    for want, got in zip(*results, strict=True):
        assert (want is None) == (got is None)
        if want is not None:
            assert torch.equal(want, got) or sqnr(want, got) > 18


@torch.library.custom_op("f8fx_tests::fill", mutates_args={"x"})
def overwrite(x: torch.Tensor) -> None:
    x.fill_(-7.0)


@pytest.mark.long
@pytest.mark.parametrize("whole", [False, True])
def test_what_is_written_side_by_side_is_not_what_is_overwritten_later(whole):
    """A part that was computed in its place there would be overwritten there, too."""
    lowerings.register()

    def f(a, b):
        first, second = torch.sin(a) * 2, torch.cos(b) * 3
        both = ops.materialize(ops.concat([first, second], 1), whole=whole)
        overwrite(first)
        return both, first + 1

    inputs = torch.randn(64, 32), torch.randn(64, 48)
    torch.compiler.reset()
    # as in training graphs, whose nodes Inductor leaves in their order
    with torch.no_grad(), torch._inductor.config.patch(reorder_for_locality=False, force_disable_caches=True):
        got = torch.compile(f, fullgraph=True)(*inputs)
    for value, want in zip(got, f(*inputs), strict=True):
        torch.testing.assert_close(value, want)
