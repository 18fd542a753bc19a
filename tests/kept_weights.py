"""Models with weights that are kept in float8."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import f8fx
from f8fx.backend import compile_graph
from f8fx.weights import watch as weight_watch
from tests.helpers import bf16, compiled, randn

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


class Net(nn.Module):
    def __init__(self, k=32, n=64):
        super().__init__()
        self.first = nn.Linear(k, n, dtype=bf16)
        self.second = nn.Linear(n, k, dtype=bf16)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


def copies_of(*parameters, dim=0, promised=False):
    """Those that are kept of one parameter, or of several side by side."""
    watches = tuple(map(weight_watch.watch_of, parameters))
    return watches[0].copies[dim, watches, promised]


@pytest.fixture(autouse=True)
def _no_leftovers():
    yield
    torch._dynamo.reset()
    gc.collect()


def x16(k=32, seed=9):
    return randn(16, k, grad=False, seed=seed)


def infer(model, *args):
    with torch.no_grad():
        return model(*args)


def uncached(model, x, **options):
    return infer(compiled(model, **options), x)


def warm(model, x, **options):
    """The model with cached weights, called until nothing is cast anew."""
    f8 = compiled(model, weights="cached", **options)
    for _ in range(2):  # AOTAutograd looks at the inputs of a first call through `.data`
        infer(f8, x)
    return f8


def uncached_rows(model, x):
    """Without touching what Dynamo has compiled."""
    return torch.compile(
        copy.deepcopy(model), backend=f8fx.f8fx, options={"select": "all", "executor": "eager"}, dynamic=False
    )(x).detach()


def in_place(model: Net) -> None:
    with torch.no_grad():
        model.first.weight.add_(1)


def inputs_of_inductor(function, *args):
    """The shapes of the inputs of an inference graph as it is generated, and whether each is said to keep its address."""
    seen = []

    def compile_fx(gm, inputs, **kwargs):
        from torch._inductor.compile_fx import compile_fx as original

        def inner(graph, examples, **more):
            static = set(more["static_input_idxs"])
            seen.extend((tuple(value.shape), index in static) for index, value in enumerate(examples))
            return graph.forward

        return original(gm, inputs, inner_compile=inner, **kwargs)

    options = f8fx.Options.parse({"select": "all", "weights": "cached", "strict": True})

    def backend(gm, inputs):
        compile_graph(gm, inputs, options, compile_fx=compile_fx)
        return gm.forward

    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):  # a hit would not come here
        infer(torch.compile(function, backend=backend), *args)
    return seen
