"""Matmuls of two activations are left; what could be a weight is one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

import f8fx
from tests.helpers import bf16, compiled, randn, recording, report_of

LEFT = "matmul of two activations"
HELD = "matmul of buffers or of an optimizer's state"


def linear(columns: int = 32, rows: int = 32) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False, dtype=bf16)


def told(report, converted: bool) -> list[str]:
    """``role`` or ``role: reason`` of the matmuls that are converted, or are not."""
    found = [d for d in report.decisions if d.converted is converted]
    return sorted(d.role if converted else f"{d.role}: {d.reason}" for d in found)


class Attention(nn.Module):
    """Of one sequence: without batch and heads, its products look like layers."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = linear(), linear(), linear()

    def forward(self, x):
        scores = torch.softmax(self.q(x) @ self.k(x).mT, -1)
        return scores @ self.v(x)


def test_attention_without_a_batch_is_left_with_its_reason():
    """Forward, backward and inference; its layers are converted."""
    report = report_of(Attention(), randn(48, 32))
    assert told(report, False) == [f"grad_input: {LEFT}"] * 4 + [f"output: {LEFT}"] * 2
    assert told(report, True) == sorted(["output", "grad_input", "grad_weight"] * 3)
    assert {d.fqn for d in report.decisions if not d.converted} == {""}
    with torch.no_grad():
        report = report_of(Attention(), randn(48, 32))
    assert told(report, False) == [f"output: {LEFT}"] * 2
    rows = f8fx.explain(Attention(), randn(48, 32), select="all").rows
    assert [row.role for row in rows if row.reason == LEFT] == ["output"] * 2 + ["grad_input"] * 4


def test_converted_if_the_user_says_so():
    report = report_of(Attention(), randn(48, 32), activations="convert")
    assert not told(report, False) and len(report.decisions) == 15


class Codebook(nn.Module):
    """Distances from what a parameter holds, as a vector-quantizing layer takes them."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Embedding(48, 32, dtype=bf16)

    def forward(self, x):
        return torch.cdist(x, self.codes.weight)


def test_distances_are_left():
    """PyTorch takes them by a matmul of what is cast and of its squared norms, which nearly cancel."""
    reason = "distances from products and squared norms"
    report = report_of(Codebook(), randn(64, 32))
    assert told(report, False) == [f"grad_input: {reason}"] * 2 + [f"output: {reason}"]
    with torch.no_grad():
        assert told(report_of(Codebook(), randn(64, 32)), False) == [f"output: {reason}"]
        assert told(report_of(Codebook(), randn(64, 32), activations="convert"), True) == ["output"]


def chameleon(z, codes):
    """As Transformers' Chameleon and Janus look codes up."""
    norms = torch.sum(z**2, dim=1, keepdim=True) + torch.sum(codes**2, dim=1)
    return norms - 2 * torch.einsum("bd,dn->bn", z, codes.transpose(0, 1))


def encodec(z, codes):
    codes = codes.t()
    return -(z.pow(2).sum(1, keepdim=True) - 2 * z @ codes + codes.pow(2).sum(0, keepdim=True))


def added(z, codes):
    norms = (z * z).sum(1, keepdim=True) + (codes * codes).sum(1)
    return torch.addmm(norms, z, codes.t(), alpha=-2)


def upcast(z, codes):
    """Norms in float32, of what autocast multiplies in bfloat16."""
    return z.float().pow(2).sum(1, keepdim=True) - 2 * (z @ codes.t()).float() + codes.float().pow(2).sum(1)


@pytest.mark.parametrize("distances", [chameleon, encodec, added, upcast])
def test_distances_that_a_model_writes_out_are_left(distances):
    reason = "distances from products and squared norms"
    codes = nn.Parameter(randn(48, 32, grad=False))

    def look_up(z):
        return distances(z, codes)

    report = report_of(look_up, randn(64, 32))
    assert told(report, False) == [f"grad_input: {reason}"] * 2 + [f"output: {reason}"]
    with torch.no_grad():
        assert told(report_of(look_up, randn(64, 32)), False) == [f"output: {reason}"]
        assert told(report_of(look_up, randn(64, 32), activations="convert"), True) == ["output"]


def test_a_layer_whose_result_is_added_to_other_squares_is_one():
    layer = linear()
    report = report_of(lambda x: layer(x) + layer(x).square().sum(-1, True), randn(64, 32))
    assert not told(report, False)


def test_a_layer_whose_result_is_added_to_products_of_its_input_is_one():
    """A factorization machine's, say: sums of ``x * v`` are no squared norms, though what is multiplied is added to them."""
    layer = linear()

    def f(x, v):
        return layer(x) + (x * v).sum(-1, True)

    assert not told(report_of(f, randn(64, 32), randn(64, 32, seed=1)), False)


def test_a_layer_of_what_was_put_together_with_its_norms_is_one():
    layer = linear(33)
    report = report_of(lambda x: layer(torch.cat([x, x.square().sum(-1, True)], -1)), randn(64, 32))
    assert told(report, True) == ["grad_input", "grad_weight", "output"] and not told(report, False)


def test_gradients_of_what_is_left_are_not_those_of_a_layer_of_its_sizes():
    """Both read ``h`` and multiply the same three sizes: the gradients of ``h @ h.T`` are no gradients of the layer."""
    first, layer = linear(), linear(rows=48)

    def f(x):
        h = first(x)
        return (h @ h.mT).sin(), layer(h)

    with recording() as reports:
        scores, y = compiled(f)(randn(48, 32))
        (scores.sum() + y.sum()).backward()
    (report,) = reports
    assert told(report, False) == [f"grad_input: {LEFT}"] * 2 + [f"output: {LEFT}"]
    assert told(report, True) == sorted(["output", "grad_input", "grad_weight"] * 2)


class Towers(nn.Module):
    """A contrastive loss: similarities of what two encoders made, times a learned temperature."""

    def __init__(self):
        super().__init__()
        self.texts, self.images = linear(), linear()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=bf16))

    def forward(self, a, b):
        a, b = (F.normalize(tower(x), dim=-1) for tower, x in ((self.texts, a), (self.images, b)))
        return self.scale.exp() * a @ b.t()


def test_similarities_are_left():
    report = report_of(Towers(), randn(16, 32), randn(16, 32, seed=1))
    assert told(report, False) == [f"grad_input: {LEFT}"] * 2 + [f"output: {LEFT}"]
    assert len(told(report, True)) == 6


@pytest.mark.parametrize("dtype", [bf16, torch.float32])
def test_an_optimizer_is_left(dtype):
    """Muon's Newton-Schulz iteration, compiled by itself or by ``f8fx.install()``: no parameter is among its inputs."""

    def orthogonalized(gradient):
        x = gradient.to(bf16)
        x = x / (x.norm() + 1e-7)
        for _ in range(2):
            a = x @ x.mT
            x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
        return x

    gradient = randn(32, 64, grad=False, dtype=dtype)
    report = report_of(orthogonalized, gradient)
    assert told(report, False) == [f"output: {LEFT}"] * 6
    assert torch.equal(compiled(orthogonalized)(gradient), orthogonalized(gradient))


def test_a_compiled_step_of_an_optimizer_is_left():
    """Its graph has parameters; what it multiplies is computed from their gradients."""
    net = nn.Sequential(linear(), linear(32, 64))
    optimizer = torch.optim.Muon(net.parameters(), lr=0.1)
    net(randn(16, 32)).sum().backward()
    with recording() as reports:
        compiled(optimizer.step)()
    (report,) = reports
    assert {d.reason for d in report.decisions} <= {LEFT, HELD} and len(report.decisions) == 30


def test_a_product_of_buffers_is_left():
    """Such as a frozen low-rank update, merged in the graph: the layer that reads it is one."""
    net = linear()
    a, b = (nn.Buffer(randn(*shape, grad=False)) for shape in ((16, 32), (32, 16)))
    net.a, net.b = a, b
    report = report_of(lambda x: F.linear(torch.tanh(net(x)), net.weight + net.b @ net.a), randn(16, 32))
    assert told(report, False) == [f"output: {HELD}"]
    assert told(report, True) == sorted(["output", "grad_input", "grad_weight"] * 2)


def test_a_matrix_with_itself_is_left():
    """Correlations, also of an input of the graph."""
    report = report_of(lambda x: x.t() @ x, randn(16, 32, grad=False))
    assert told(report, False) == [f"output: {LEFT}"]


def test_a_layer_after_one_that_needs_no_gradient_keeps_its_gradients():
    """AOTAutograd may number both alike."""
    layer = linear()

    def fn(x):
        h = layer(x)
        with torch.no_grad():
            weights = torch.softmax(h @ (h * 2).mT, -1)
        return layer(h) * weights.sum()

    report = report_of(fn, randn(16, 32))
    assert told(report, False) == [f"output: {LEFT}"]
    assert told(report, True) == sorted(["output", "grad_input", "grad_weight"] * 2)


# -- what is no activation -------------------------------------------------------------------------


def pruned() -> nn.Module:
    layer = linear()
    prune.random_unstructured(layer, "weight", 0.5)  # weight_orig * weight_mask, a buffer
    return layer


@pytest.mark.parametrize(
    "layer",
    [
        pruned,
        lambda: parametrizations.spectral_norm(linear()),
        lambda: parametrizations.weight_norm(linear()),
    ],
)
def test_a_weight_that_is_computed_with_buffers_is_a_weight(layer):
    net = nn.Sequential(linear(), nn.Tanh(), layer())
    report = report_of(net, randn(16, 32))
    assert told(report, True) == sorted(["output", "grad_input", "grad_weight"] * 2)


class Branches(nn.Module):
    """A layer in both branches, behind an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("mask", torch.ones(32, 32, dtype=bf16).tril())

    def forward(self, x):
        return torch.cond(x.float().sum() > 0, self.taken, lambda x: self.taken(x) * 2, (x,))

    def taken(self, x):
        return F.linear(x.tanh(), self.layer.weight * self.mask)


def test_a_weight_that_is_computed_in_a_branch_is_a_weight():
    """Which inputs of a branch are parameters is not known."""
    with recording() as reports, torch.no_grad():
        compiled(Branches())(randn(16, 32, grad=False))
    assert {reason for report in reports for reason in told(report, False)} == set()
    assert sum(report.converted for report in reports) == 2


@pytest.mark.parametrize("how", ["matrix_exp", "cayley", pytest.param("householder", marks=pytest.mark.long)])
def test_a_weight_that_is_computed_with_constants_is_a_weight(how):
    """The triangle of ``tril`` and the identity are computed from nothing."""
    layer = nn.Linear(32, 32, bias=False)  # the decompositions want float32
    net = nn.Sequential(linear(), nn.Tanh(), parametrizations.orthogonal(layer, orthogonal_map=how))

    def fn(x):
        with torch.autocast("cpu", bf16):
            return net(x)

    with recording() as reports:
        compiled(fn, fullgraph=False)(randn(16, 32)).sum().backward()
    layers = [d for report in reports for d in report.decisions if d.fqn in ("0", "2")]
    assert {d.converted for d in layers} == {True} and len(layers) == 6


def test_a_weight_that_a_graph_without_parameters_changes_is_a_weight():
    """After a graph break all that it gets are plain tensors."""
    first, w = linear(), nn.Parameter(randn(32, 32, grad=False))

    def fn(x):
        h, product = first(x), w * 0.5
        torch._dynamo.graph_break()
        return F.layer_norm(h, (32,)) @ (product * 2)

    with recording() as reports:
        compiled(fn, fullgraph=False)(randn(16, 32)).sum().backward()
    assert told(reports[-1], True) == ["grad_input", "grad_weight", "output"]


def test_parts_of_updated_weights_are_weights():
    """Fast weights in one vector, of two steps."""
    flat = nn.Parameter(randn(2 * 16 * 16, grad=False))

    def fn(x, gradient):
        fast = flat - 0.1 * (gradient.t() @ x).flatten().repeat(2)
        w1, w2 = fast.split(256)
        w1, w2 = (w - 0.1 * (gradient.t() @ x).flatten() for w in (w1, w2))
        return F.linear(torch.tanh(F.linear(x, w1.view(16, 16))), w2.view(16, 16))

    with torch.no_grad():
        report = report_of(fn, randn(32, 16), randn(32, 16))
    layers = [d for d in report.decisions if (d.m, d.k, d.n) == (32, 16, 16)]
    assert [d.converted for d in layers] == [True, True]


def test_a_weight_that_data_chooses_is_a_weight():
    experts, router = nn.Parameter(randn(4, 32, 32, grad=False)), linear(32, 4)

    def fn(x):
        chosen = experts.index_select(0, router(x[:1]).argmax(-1))[0]
        return torch.tanh(F.linear(x, chosen)) @ chosen

    report = report_of(fn, randn(16, 32), pad="never")
    layers = [d for d in report.decisions if 4 not in (d.m, d.k, d.n)]
    assert {d.converted for d in layers} == {True} and len(layers) == 6


class Packed(nn.Module):
    """4-bit weights, two in a byte, as GPTQ has them: no parameter, and one matrix is held by no buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("packed", torch.randint(0, 256, (48, 16), dtype=torch.uint8))
        self.register_buffer("scales", torch.rand(48, 1, dtype=bf16))
        self.first = randn(32, 32, grad=False)

    def forward(self, x):
        weight = torch.stack((self.packed & 15, self.packed >> 4), -1).flatten(1)
        weight = (weight - 8.0).to(bf16) * self.scales
        return F.linear(torch.tanh(F.linear(torch.tanh(x), self.first * 0.5)), weight)


def test_a_weight_that_is_unpacked_from_buffers_is_a_weight():
    """Also where the graph has no parameter at all."""
    assert told(report_of(Packed(), randn(16, 32)), True) == ["grad_input"] * 2 + ["output"] * 2
    rows = f8fx.explain(Packed(), randn(16, 32), select="all").rows
    assert [row.role for row in rows if row.converted] == ["output", "output", "grad_input", "grad_input"]


def test_a_weight_that_is_updated_in_the_graph_is_a_weight():
    """Fast weights (MAML): a parameter less a step along a gradient, which depends on the data."""
    w = nn.Parameter(randn(32, 32, grad=False))

    def fn(x, gradient):
        fast = w - 0.1 * (gradient.t() @ x)
        return F.linear(torch.tanh(F.linear(x, w)), fast[:16])

    with torch.no_grad():
        report = report_of(fn, randn(16, 32), randn(16, 32))
    assert told(report, True) == ["output"] * 3


@torch.library.custom_op("f8fx_test::unpacked", mutates_args=())
def unpacked(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (packed.view(-1, 32) * scale).to(bf16)


@unpacked.register_fake
def _(packed, scale):
    return packed.new_empty(packed.numel() // 32, 32, dtype=bf16)


def test_a_weight_that_a_custom_operator_unpacks_is_a_weight():
    """Of a parameter and of a tensor that nobody registered (bitsandbytes' ``absmax``)."""
    packed = nn.Parameter(torch.randint(-8, 8, (48 * 32,), dtype=torch.int8), requires_grad=False)
    scale, layer = torch.rand(1), linear()
    report = report_of(lambda x: F.linear(layer(x), unpacked(packed, scale)), randn(16, 32))
    assert told(report, True) == ["grad_input", "grad_input", "grad_weight", "output", "output"]


@pytest.mark.parametrize("known", [True, False])
def test_weights_that_are_plain_tensors_are_weights(known):
    """``functional_call``: inputs of the graph, at most cast and sliced, next to parameters or not."""
    norm = nn.Parameter(torch.ones(32, dtype=bf16)) if known else torch.ones(32, dtype=bf16)

    def fn(x, w1, w2):
        return F.linear(torch.tanh(F.linear(x, w1)) * norm, w2[:48].to(bf16))

    report = report_of(fn, randn(16, 32), randn(32, 32), randn(64, 32, dtype=torch.float32))
    assert told(report, True) == sorted(["output", "grad_input", "grad_weight"] * 2)


def test_gradients_that_a_model_takes_itself_are_no_products_of_activations():
    first, second = linear(), linear()

    def loss(weights, x):
        return torch.func.functional_call(second, weights, (torch.tanh(first(x)),)).square().sum()

    with torch.no_grad(), recording() as reports:
        compiled(torch.func.grad(loss))(dict(second.named_parameters()), randn(16, 32, grad=False))
    assert told(reports[0], True) == ["output"] * 3  # two layers, and the gradient of the weight of one
    assert not told(reports[0], False)
