"""Weights that are kept in float8 for training: frozen ones, and across microbatches."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import f8fx
from f8fx.weights import kept
from tests.helpers import bf16, compiled, randn
from tests.kept_weights import (
    RECIPES,
    Net,
    _no_leftovers,  # noqa: F401
    in_place,
    infer,
    uncached_rows,
    x16,
)


def train(model, call, x, grad):
    x = x.detach().clone().requires_grad_()
    y = call(x)
    y.backward(grad)
    return [y.detach(), x.grad]


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("recipe", RECIPES)
def test_microbatches_cast_each_weight_once(recipe, casts):
    model = Net()
    batches = [x16(seed=seed) for seed in range(3)]
    grad = randn(16, 32, grad=False, seed=5)
    dynamic = compiled(model, recipe=recipe)
    want = [train(model, dynamic, x, grad) for x in batches]
    want_grads = gradients(model)
    model.zero_grad()

    f8 = compiled(model, recipe=recipe, weights="reused")
    made = []
    with f8fx.reuse_weights(model):
        got = []
        for x in batches:
            casts.clear()
            got.append(train(model, f8, x, grad))
            made.append([shape for shape in casts if 16 not in shape])
    assert [len(shapes) for shapes in made] == [4, 0, 0]  # two weights, both layouts
    for a, b in zip(want, got, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(want_grads, gradients(model), strict=True))

    casts.clear()  # outside the block: every call casts
    x = batches[0]
    model.zero_grad()
    after = train(model, f8, x, grad)
    assert len([shape for shape in casts if 16 not in shape]) == 4
    assert all(torch.equal(p, q) for p, q in zip(want[0], after, strict=True))


def test_a_step_inside_the_block_is_seen():
    model, grad = Net(), randn(16, 32, grad=False, seed=5)
    f8 = compiled(model, weights="reused")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    with f8fx.reuse_weights(model):
        for seed in range(2):
            got = train(model, f8, x16(seed=seed), grad)
            optimizer.step()
        got = train(model, f8, x16(), grad)
    want = train(model, compiled(model), x16(), grad)
    assert all(torch.equal(p, q) for p, q in zip(want, got, strict=True))


def test_weights_are_refreshed_inside_the_block():
    model, x = Net(), x16()
    hidden = torch._C.TensorBase.data.__get__(model.first.weight)
    f8 = compiled(model, weights="reused")
    with f8fx.reuse_weights(model):
        f8(x)
        hidden.mul_(2)
        f8fx.refresh_weights(model)
        got = f8(x)
    assert torch.equal(got, uncached_rows(model, x))


def test_the_block_frees_its_copies_and_a_pending_backward_keeps_what_it_needs():
    model, x = Net(), x16()
    f8 = compiled(model, weights="reused")
    with f8fx.reuse_weights(model):
        f8(x)
        y = f8(x)
        (scope,) = kept._SCOPES
        copies = [weakref.ref(c) for c in scope.copies.values()]
    in_place(model)
    with f8fx.reuse_weights(model):
        f8(x)
    y.sum().backward()  # of the weights as they were
    del scope
    gc.collect()
    assert not kept._SCOPES and all(c() is None for c in copies)


def test_a_block_in_which_nothing_is_reused_says_so():
    with pytest.warns(UserWarning, match='options={"weights": "reused"}'), f8fx.reuse_weights(Net()):
        pass


def test_weights_that_the_graph_computes_are_named_as_not_reused():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32, bias=False, dtype=bf16))
    f8 = compiled(model, weights="reused")
    with (
        pytest.warns(UserWarning, match="weights that the graph computes .* are cast in every call"),
        f8fx.reuse_weights(model),
    ):
        f8(x16()).sum().backward()


def test_evaluation_between_microbatches():
    model, x, grad = Net(), x16(), randn(16, 32, grad=False, seed=5)
    f8 = compiled(model, weights="reused")
    with f8fx.reuse_weights(model):
        train(model, f8, x, grad)
        y = infer(f8, x)
        train(model, f8, x, grad)
    assert torch.equal(y, uncached_rows(model, x))


@pytest.mark.long
@pytest.mark.slow
def test_microbatches_through_inductor():
    model, x, grad = Net(), x16(), randn(16, 32, grad=False, seed=5)
    want = train(model, compiled(model, executor="inductor"), x, grad)
    want += gradients(model)
    model.zero_grad()
    f8 = compiled(model, executor="inductor", weights="reused")
    with f8fx.reuse_weights(model):
        train(model, f8, x, grad)
        model.zero_grad()
        got = train(model, f8, x, grad)
    got += gradients(model)
    assert all(torch.equal(p, q) for p, q in zip(want, got, strict=True))
