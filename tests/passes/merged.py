"""Layers that read one input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import compiled, graph_after, randn

#: The cost model is asked about a GPU; sizes are large enough for it to see a gain.
H100 = {"target": "h100"}


M, K = 64, 128


def weights(*rows, grad=True):
    return [randn(n, K, seed=seed + 1, grad=grad) for seed, n in enumerate(rows)]


def gate_up(x, gate, up):
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def gemms(fn, *args, **options):
    """How many float8 gemms the graph has."""
    return graph_after(fn, *args, **H100, **options).count("= _scaled_mm(")


def trained(model, x, **options):
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = compiled(model, **H100, **options)(x)
    y.backward(randn(*y.shape, grad=False, seed=3))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


class Attention(nn.Module):
    """Grouped-query attention with biases, of very different magnitudes."""

    def __init__(self, bias=True):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(K, n, bias=bias) for n in (128, 64, 64))
        with torch.no_grad():
            self.k.weight *= 8
            self.v.weight /= 8

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 32)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(-2)


def reference(model, x):
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = model(x)
    y.backward(randn(*y.shape, grad=False, seed=3))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]
