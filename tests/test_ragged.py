"""Nested tensors (``torch.jagged``): sequences of different lengths, one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import f8fx
from tests.helpers import bf16, compiled, randn, recording


class Block(nn.Module):
    """What a transformer does to each token."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32, dtype=bf16)
        self.qkv, self.out = nn.Linear(32, 96, dtype=bf16), nn.Linear(32, 32, dtype=bf16)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(q * k.sigmoid() * v)


def ragged(values: Tensor, *lengths: int) -> Tensor:
    offsets = torch.tensor((0, *lengths)).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def trained(block, x: Tensor) -> list[Tensor]:
    """The output's values and all gradients."""
    block.zero_grad()
    values = block(x)
    values = values.values() if values.is_nested else values
    values.float().square().sum().backward()
    return [values.detach(), *(p.grad for p in block.parameters())]


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_a_ragged_batch_has_the_bits_of_its_tokens(recipe):
    """Three batches: as many sequences, more of them, and as many tokens as before."""
    block = Block()
    for lengths in ((5, 11), (7, 3, 14), (20, 4)):
        values = randn(sum(lengths), 32, grad=False)
        with recording() as reports:
            ours = trained(compiled(block, recipe=recipe), ragged(values, *lengths))
        assert [(report.converted, len(report.decisions)) for report in reports] == [(6, 6)]
        wanted = trained(compiled(block, recipe=recipe), values)
        assert all(map(torch.equal, ours, wanted))


@torch.no_grad()
def test_inference_with_cached_weights():
    block = Block()
    model = compiled(block, weights="cached")
    for lengths in ((5, 11), (7, 3, 14)):
        values = randn(sum(lengths), 32, grad=False)
        assert torch.equal(model(ragged(values, *lengths)).values(), compiled(block)(values))


def test_explain_takes_them():
    """The number of tokens is a symbol, as where sizes are dynamic."""
    found = f8fx.explain(Block(), ragged(randn(16, 32, grad=False), 5, 11), target="h100", select="all")
    sizes = {(row.fqn, row.role): (row.m, row.k, row.n) for row in found.rows if row.converted}
    tokens, _, _ = sizes["out", "output"]
    assert isinstance(tokens, str)
    assert sizes == {
        ("qkv", "output"): (tokens, 32, 96),
        ("qkv", "grad_input"): (tokens, 96, 32),
        ("qkv", "grad_weight"): (96, tokens, 32),
        ("out", "output"): (tokens, 32, 32),
        ("out", "grad_input"): (tokens, 32, 32),
        ("out", "grad_weight"): (32, tokens, 32),
    }
