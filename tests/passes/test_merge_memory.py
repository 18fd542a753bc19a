"""*merge*: no more is saved, nor lives longer, than of separate matmuls."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import f8fx
from f8fx.cost import CostModel
from tests.helpers import bf16, compiled, graph_after, joint_graphs, randn, sqnr
from tests.long import seldom
from tests.passes.merged import H100, Attention, K, M, weights


def saved(fn, *args, **options):
    """Bytes kept for the backward, each storage counted once."""
    sizes = []
    parsed = f8fx.Options.parse({"select": "all", **H100, **options})

    def on_partition(forward, backward):
        inputs = {
            n.meta["val"].untyped_storage()._cdata
            for n in forward.graph.find_nodes(op="placeholder")
            if isinstance(n.meta["val"], torch.Tensor)
        }
        (output,) = forward.graph.find_nodes(op="output")
        kept = {}
        for node in output.args[0]:
            value = getattr(node, "meta", {}).get("val")
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in inputs:
                kept[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
        sizes.append(sum(kept.values()))

    joint_graphs(fn, *args, transform=parsed.pipeline(debug=True), on_partition=on_partition)
    return sizes[0]


class Normed(Attention):
    """q and k are normalized, so the matmuls' own results are needed again in the backward."""

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 32)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = F.rms_norm(q, (32,)), F.rms_norm(k, (32,))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(-2)


class Rotated(Attention):
    """Of q and k only what was made of them is needed again; of v its own slice of the product."""

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 32)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return (
            F.scaled_dot_product_attention(
                (q.float() * 0.5).to(bf16), (k.float() * 0.5).to(bf16), v, enable_gqa=True
            )
            .transpose(1, 2)
            .flatten(-2)
        )


class Parallel(nn.Module):
    """Attention and a gated feed-forward read one tensor; all is saved but the results for q and k."""

    def __init__(self, width=K):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 32)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = ((y.float() * 0.5).to(bf16) for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return y + self.down(F.silu(self.gate(x)) * self.up(x))


class FeedForwardFirst(Parallel):
    """Its gradients are added up in another order."""

    def forward(self, x):
        y = self.down(F.silu(self.gate(x)) * self.up(x))
        q, k, v = (f(x).unflatten(-1, (-1, 32)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = ((y.float() * 0.5).to(bf16) for y in (q, k))
        return y + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


def without_biases():
    return Rotated(bias=False)


class BiasedFeedForward(nn.Module):
    """As GPT-J's: of a biased layer the product is saved, and its bias is added anew; v has none."""

    def __init__(self, width=K, bias=False):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=bias) for _ in range(3))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 32)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = ((y.float() * 0.5).to(bf16) for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return y + self.down(F.gelu(self.up(x), approximate="tanh"))


class Biased(BiasedFeedForward):
    """As Phi's: v with its bias is a tensor of its own, which attention reads."""

    def __init__(self, width=K):
        super().__init__(width, bias=True)


class Returned(nn.Module):
    """The backward needs nothing of the result that is scaled and returned."""

    def __init__(self):
        super().__init__()
        self.skip, self.up = (nn.Linear(K, 4 * K, bias=False) for _ in range(2))

    def forward(self, x):
        return self.skip(x) * 0.5, F.silu(self.up(x))


class Skipped(nn.Module):
    """As TimesFM's: of the layer that is skipped to and the last one the backward needs but the sum."""

    def __init__(self):
        super().__init__()
        self.up, self.skip, self.down = nn.Linear(K, 4 * K), nn.Linear(K, 2 * K), nn.Linear(4 * K, 2 * K)
        self.norm = nn.RMSNorm(2 * K)

    def forward(self, x):
        return self.norm(self.down(F.silu(self.up(x))) + self.skip(x))


class Clamped(nn.Module):
    """Of the clamped result the backward needs a mask, of the other one all of it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(K, 4 * K, bias=False) for _ in range(2))

    def forward(self, x):
        return self.first(x).clamp(-1, 1), F.silu(self.second(x))


class Scaled(Clamped):
    """By way of float32: that the scaled result has smaller elements than that does not tell which of the two is kept."""

    def forward(self, x):
        scaled = (self.first(x).float() * 0.5).to(bf16)
        return scaled * scaled, F.silu(self.second(x))


BLOCKS = [
    Clamped,
    Scaled,
    Returned,
    Skipped,
    Attention,
    Normed,
    Rotated,
    without_biases,
    Parallel,
    FeedForwardFirst,
    BiasedFeedForward,
    Biased,
]


@pytest.mark.parametrize("model", [*BLOCKS[::2], *seldom(*BLOCKS[1::2])])
def test_no_more_is_saved_than_of_separate_gemms(model):
    net, x = model().to(bf16), randn(4, 64, K)
    scales = 64  # a scale more or less
    assert saved(net, x) <= saved(net, x, merge="never") + scales


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        (Parallel, {("q", "k"), ("v", "gate", "up")}),
        (FeedForwardFirst, {("q", "k", "v"), ("gate", "up")}),
        (BiasedFeedForward, {("q", "k"), ("v", "up")}),
        (Biased, {("q", "k", "v")}),
    ],
)
def test_layers_are_parted_by_how_long_their_results_live(model, groups, monkeypatch):
    """Rather than copied. Where the sum of gradients does not allow the best way, the next best is taken."""
    monkeypatch.setattr(
        CostModel, "copy_seconds", lambda self, size: size * 7e-11
    )  # few bytes, as if they were many
    net, x = model().to(bf16), randn(4, 64, K)
    with f8fx.recording() as reports:
        y = compiled(net, **H100)(x)
        y.sum().backward()
    assert {found.layers for found in reports[0].merges if found.merged} == groups
    weights = [
        p for p in net.parameters() if p.ndim == 2
    ]  # k's bias changes nothing, so its gradient is noise
    got = [x.grad, *(p.grad for p in weights)]
    x.grad = None
    net.zero_grad()
    net(x).sum().backward()
    for one, other in zip(got, [x.grad, *(p.grad for p in weights)], strict=True):
        assert sqnr(other, one) > 18


def test_at_real_sizes_a_parallel_block_is_parted():
    with torch.device("meta"):
        net, x = Parallel(4096).to(bf16), torch.empty(4, 2048, 4096, dtype=bf16)
    rows = f8fx.explain(net, x, target="h100").rows
    merged = {row.fqn: row.merge for row in rows if row.role == "output"}
    assert merged["q"] == "merged with k" and merged["v"] == "merged with gate, up"


def test_a_small_result_is_copied():
    """As v of grouped-query attention: that costs less than a gemm of its own."""
    net, x = Rotated(bias=False).to(bf16), randn(4, 64, K)
    with f8fx.recording() as reports:
        compiled(net, **H100)(x)
    assert [found.layers for found in reports[0].merges if found.merged] == [("q", "k", "v")]


def test_a_checkpointed_result_is_not_copied():
    """Nothing of the region is kept, so nothing is kept for nothing."""
    net, x = Rotated(bias=False).to(bf16), randn(4, 64, K)

    def copies(fn):
        return graph_after(fn, x, **H100).count("= f8fx.materialize(")

    assert copies(net) == 1
    assert copies(lambda y: checkpoint(net, y, use_reentrant=False)) == 0


def test_results_that_leave_the_graph_have_their_own_memory():
    def f(x, a, b):
        return F.linear(x, a), F.linear(x, b)

    one, other = compiled(f, **H100)(randn(M, K, grad=False), *weights(64, 64, grad=False))
    assert one.is_contiguous() and one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
