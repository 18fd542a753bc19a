"""Models with weights that are kept in float8."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import f8fx
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


def copies_of(*parameters, dim=0):
    """Those that are kept of one parameter, or of several side by side."""
    watches = tuple(map(weight_watch.watch_of, parameters))
    return watches[0].copies[dim, watches]


@pytest.fixture(autouse=True)
def _no_leftovers():
    yield
    torch._dynamo.reset()
    gc.collect()


def x16(k=32, seed=9):
    return randn(16, k, grad=False, seed=seed)


def infer(model, x):
    with torch.no_grad():
        return model(x)


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
