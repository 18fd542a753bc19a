"""Layers of one input that are read one after the other: joined as far as their results do not fill the memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from f8fx import recording
from f8fx.passes import lifetimes
from tests.helpers import compiled, randn, sqnr
from tests.long import seldom

D, ROWS = 64, 128
#: Of one result and its weight.
SIZE = 2 * ROWS * D + D * D


def heads(x):
    return x.view(1, -1, 2, D // 2).transpose(1, 2)


def decoder(x, encoded, weights):
    """Blocks that attend to one encoder's output; their keys' and values' weights in turn."""
    for key, value in zip(weights[::2], weights[1::2], strict=True):
        k, v = F.linear(encoded, key), F.linear(encoded, value)
        attended = F.scaled_dot_product_attention(heads(x), heads(k), heads(v))
        x = x + attended.transpose(1, 2).reshape(-1, D)
    return x


def made(blocks, each=2):
    return [randn(ROWS, D), randn(ROWS, D, seed=1), [randn(D, D, seed=2 + i) for i in range(each * blocks)]]


def joined(fn, *args, **options):
    """How many layers each gemm of the forward stands for."""
    f8 = compiled(fn, target="h100", **options)
    with recording() as reports:
        f8(*args)
    return [len(merge.layers) if merge.merged else merge.reason for merge in reports[0].merges]


@pytest.fixture(params=[3 * SIZE, *seldom(4 * SIZE), 7 * SIZE], ids=["three", "four", "seven"])
def at_once(request, monkeypatch):
    """What may be in memory at once, of five blocks' two results each; and how many layers are joined for it."""
    monkeypatch.setattr(lifetimes, "AT_ONCE", request.param)
    return {3: [4, 4, 2], 4: [4, 4, 2], 7: [6, 4]}[request.param // SIZE]


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_keys_and_values_of_many_blocks(at_once, training):
    with torch.set_grad_enabled(training):
        assert joined(decoder, *made(5)) == at_once


def test_all_of_them_where_they_are_small():
    assert joined(decoder, *made(5)) == [10]


@pytest.mark.parametrize(
    "recipe",
    [
        "tensorwise",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("rowwise", "rowwise_with_gw_hp")),
    ],
)
def test_gradients(recipe, monkeypatch):
    """Of the encoder's output they are added up across runs."""
    monkeypatch.setattr(lifetimes, "AT_ONCE", 3 * SIZE)

    def of(fn):
        x, encoded, weights = made(5)
        out = fn(x, encoded, [weight / D**0.5 for weight in weights])
        grads = torch.autograd.grad(out, [x, encoded, *weights], randn(ROWS, D, seed=9))
        return torch.cat([grad.flatten() for grad in (out.detach(), *grads)])

    exact = of(decoder)
    apart, runs = (
        of(compiled(decoder, recipe=recipe, target="h100", merge=merge)) for merge in ("never", "auto")
    )
    assert sqnr(exact, runs) > max(20, sqnr(exact, apart) - 0.3)


def test_one_that_is_left(monkeypatch):
    monkeypatch.setattr(lifetimes, "AT_ONCE", 1)

    def f(x, encoded, weights):
        for weight in weights:
            k = heads(F.linear(encoded, weight))
            x = F.scaled_dot_product_attention(heads(x), k, k).transpose(1, 2).reshape(-1, D)
        return x

    x, encoded, weights = made(3, each=1)
    assert joined(f, x, encoded, weights) == [2, "its result would be in memory for too long"]
    assert joined(f, x, encoded, weights, merge="never") == ["switched off"]


def gated(x, encoded, weights):
    """The first result has been read, element by element, before the second is there; both are in memory then."""
    gate, up, third = weights
    return F.silu(F.linear(encoded, gate)) * F.linear(encoded, up) * F.linear(encoded, third)


def normed(x, encoded, weights):
    q, k, v = (F.rms_norm(F.linear(encoded, weight), (D,)) for weight in weights)
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v))


def read_last(x, encoded, weights):
    out = [F.linear(encoded, weight) for weight in weights]
    return [heads(left) @ heads(right).mT for left, right in pairwise(out)]


@pytest.mark.parametrize("f", [gated, normed, read_last])
def test_results_that_are_in_memory_together_anyway(f, monkeypatch):
    monkeypatch.setattr(lifetimes, "AT_ONCE", 1)
    with torch.no_grad():
        assert joined(f, *made(3, each=1)) == [3]


def test_two_runs_stay_together(monkeypatch):
    """Attention and feed-forward that read one norm."""
    monkeypatch.setattr(lifetimes, "AT_ONCE", 1)

    def f(x, encoded, weights):
        q, k, v = (heads(F.linear(encoded, weight)) for weight in weights[:3])
        attended = F.scaled_dot_product_attention(q, k, v)
        return attended.transpose(1, 2).reshape(-1, D) + F.gelu(F.linear(encoded, weights[3]))

    with torch.no_grad():
        assert joined(f, *made(2)) == [4]
