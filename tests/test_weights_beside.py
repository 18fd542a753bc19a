"""Weights that are kept in float8 in graphs some of whose inputs AOTAutograd takes apart, joins, or adds."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import f8fx
from f8fx import recording
from tests.helpers import bf16, compiled, randn
from tests.kept_weights import Net, _no_leftovers, infer, inputs_of_inductor, uncached, x16  # noqa: F401
from tests.long import seldom


class WithHead(Net):
    """Whose last weight is a tensor subclass: int8 numbers and their scales."""

    def __init__(self, frozen=False):
        super().__init__()
        self.head = nn.Linear(32, 32, bias=False, dtype=bf16)
        self.low = nn.Linear(32, 16, bias=False, dtype=bf16)
        quantize_(self.head, Int8WeightOnlyConfig(set_inductor_config=False))
        self.first.requires_grad_(not frozen)
        self.second.requires_grad_(not frozen)

    def forward(self, x):
        x = self.low(x) @ self.low.weight
        return self.head(super().forward(x))


def kept_in(run):
    """How many weights of the graphs that are compiled are kept."""
    with recording() as reports:
        run()
    return [report.reused_weights for report in reports]


@pytest.mark.parametrize(
    "executor", ["eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.long])]
)
def test_beside_a_tensor_subclass(casts, executor):
    model, x = WithHead(), x16()
    f8 = compiled(model, weights="cached", executor=executor)
    assert kept_in(lambda: infer(f8, x)) == [3]
    for change in (lambda: None, lambda: model.second.weight.data.mul_(2)):
        change()
        assert torch.equal(infer(f8, x), uncached(model, x, executor=executor))
    if executor == "eager":
        for _ in range(3):
            casts.clear()
            infer(f8, x)
        # the inputs of five matmuls, and the weight of the head, which is computed
        assert sorted(casts) == [(16, 16), (16, 32), (16, 32), (16, 32), (16, 64), (32, 32)]


def test_beside_a_nested_input():
    layer = nn.Linear(32, 48, dtype=bf16)
    f8 = compiled(layer.forward, weights="cached")
    values, offsets = x16(), torch.tensor([0, 5, 9, 16])
    jagged = torch.nested.nested_tensor_from_jagged(values, offsets)
    assert kept_in(lambda: infer(f8, jagged)) == [1]
    for _ in range(2):
        assert torch.equal(infer(f8, jagged).values(), uncached(layer, values))
        with torch.no_grad():
            layer.weight.neg_()


def test_beside_an_effect():
    """Whose order a token keeps: a further input of the graph."""

    class Talking(Net):
        def forward(self, x):
            torch.ops.aten._print("")
            return super().forward(x)

    model, x = Talking(), x16()
    f8 = compiled(model, weights="cached")
    assert kept_in(lambda: infer(f8, x)) == [2]
    model.first.weight.data.mul_(2)
    assert torch.equal(infer(f8, x), uncached(model, x))


def test_beside_views_of_one_tensor_that_is_written_to():
    class Caching(Net):
        def forward(self, x, keys, values):
            keys[:, :16] = x.t()
            values[:, :16] = x.t() * 2
            return super().forward(x) + (keys @ values.t()).sum()

    model, x = Caching(), x16()

    def cache():
        return torch.zeros(2, 32, 48, dtype=bf16)

    f8, f8_uncached = (compiled(model, weights=how, filter_fqns=[]) for how in ("cached", "dynamic"))
    with torch.no_grad():
        assert kept_in(lambda: f8(x, *cache())) == [2]
        written, expected = cache(), cache()
        assert torch.equal(f8(x, *written), f8_uncached(x, *expected))
        assert torch.equal(written, expected) and written.any()


@pytest.mark.parametrize("weights", ["reused", *seldom("cached")])
def test_training_beside_a_tensor_subclass(weights):
    frozen = weights == "cached"
    model, x = WithHead(frozen), randn(16, 32)
    f8, dynamic = compiled(model, weights=weights), compiled(model)

    def gradients(run):
        x.grad = None
        model.zero_grad()
        run(x).float().square().mean().backward()
        return [x.grad] + [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients(dynamic)
    with nullcontext() if frozen else f8fx.reuse_weights(model):
        assert kept_in(lambda: gradients(f8)) == [2 if frozen else 3]
        for _ in range(2):
            found = gradients(f8)
            assert len(found) == len(expected)
            assert all(map(torch.equal, found, expected))


def test_a_position_is_that_of_the_graph_of_dynamo():
    """A subclass in front of the weights shifts what comes behind it."""

    def f(scaled, x, weight):
        return F.linear(x, weight) + F.linear(x, scaled)

    head = nn.Linear(32, 32, bias=False, dtype=bf16)
    quantize_(head, Int8WeightOnlyConfig(set_inductor_config=False))
    weight, x = nn.Parameter(randn(32, 32, grad=False)), x16()
    with torch.no_grad():
        f8 = compiled(f, weights="cached")
        assert kept_in(lambda: f8(head.weight, x, weight)) == [1]
        assert torch.equal(f8(head.weight, x, weight), compiled(f)(head.weight, x, weight))


def test_inductor_is_told_which_inputs_keep_their_address():
    """By the place that they have when a subclass has been taken apart; CUDA graphs copy the others."""

    def f(scaled, x, weight):
        return F.linear(x, weight) + F.linear(x, scaled)

    head = nn.Linear(32, 48, bias=False, dtype=bf16)
    quantize_(head, Int8WeightOnlyConfig(set_inductor_config=False))
    *own, scale, data = inputs_of_inductor(f, head.weight, x16(), nn.Parameter(randn(48, 32, grad=False)))
    assert ((16, 32), False) in own and len(own) > 4, "the subclass is several"
    assert (scale, data) == (((), True), ((48, 32), True))
