"""*merge*: which matmuls become one, and which stay as they are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import f8fx
from f8fx import recording
from f8fx.cost import CostModel
from f8fx.demo.model import Decoder, DecoderConfig
from tests.helpers import Block, bf16, compiled, gradients, graph_after, joint_graphs, randn, sqnr

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


class TestMerged(TestCase):
    def test_weight_gradients_in_high_precision(self):
        """The joined gradients are in memory, and one matmul reads them."""

        def f(x, w1, w2):
            return F.linear(x, w1).sin(), F.linear(x, w2).cos()

        args = (randn(M, K), *weights(64, 96))
        text = graph_after(f, *args, recipe="rowwise_with_gw_hp", **H100)
        self.assertExpectedInline(
            text[text.index("tangents") :],
            """\
tangents_1: bf16[64,64]
tangents_2: bf16[64,96]
concat: bf16[160,128] = f8fx.concat([primals_2, primals_3], 0)
amax: f32[64] = f8fx.amax(primals_1, 1)
scale: f32[64] = f8fx.scale(amax, dtype=e4m3, power_of_2=True)
quantize: e4m3[64,128] = f8fx.quantize(primals_1, scale, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal: f32[64] = reciprocal(scale)
amax_1: f32[160] = f8fx.amax(concat, 1)
scale_1: f32[160] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=True)
quantize_1: e4m3[160,128] = f8fx.quantize(concat, scale_1, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_1: f32[160] = reciprocal(scale_1)
permute: e4m3[128,160] = permute(quantize_1, [1, 0])
as_strided: f32[64,1] = as_strided(reciprocal, [64, 1], [1, 1])
as_strided_1: f32[1,160] = as_strided(reciprocal_1, [1, 160], [160, 1])
scaled_mm: bf16[64,160] = _scaled_mm(quantize, permute, as_strided, as_strided_1, None, None, bf16, True)
slice: bf16[64,64] = slice(scaled_mm, 1, 0, 64)
slice_1: bf16[64,96] = slice(scaled_mm, 1, 64, 160)
sin: bf16[64,64] = sin(slice)
cos: bf16[64,96] = cos(slice_1)
sin_1: bf16[64,96] = sin(slice_1)
neg: bf16[64,96] = neg(sin_1)
mul: bf16[64,96] = mul(tangents_2, neg)
cos_1: bf16[64,64] = cos(slice)
mul_1: bf16[64,64] = mul(tangents_1, cos_1)
concat_1: bf16[64,160] = f8fx.concat([mul_1, mul], 1)
materialize: bf16[64,160] = f8fx.materialize(concat_1)
permute_1: bf16[160,64] = permute(materialize, [1, 0])
mm: bf16[160,128] = mm(permute_1, primals_1)
slice_2: bf16[64,128] = slice(mm, 0, 0, 64)
slice_3: bf16[96,128] = slice(mm, 0, 64, 160)
permute_2: bf16[128,96] = permute(slice_3, [1, 0])
permute_3: bf16[96,128] = permute(permute_2, [1, 0])
permute_4: bf16[128,64] = permute(slice_2, [1, 0])
amax_2: f32[64] = f8fx.amax(materialize, 1)
scale_2: f32[64] = f8fx.scale(amax_2, dtype=e4m3, power_of_2=True)
quantize_2: e4m3[64,160] = f8fx.quantize(materialize, scale_2, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_2: f32[64] = reciprocal(scale_2)
unsqueeze: f32[1,160] = unsqueeze(amax_1, 0)
amax_3: f32[] = f8fx.amax(unsqueeze, None)
scale_3: f32[] = f8fx.scale(amax_3, dtype=e4m3, power_of_2=True)
quantize_3: e4m3[128,160] = f8fx.quantize(concat, scale_3, dtype=e4m3, transpose=True, align=[1, 1])
reciprocal_3: f32[] = reciprocal(scale_3)
permute_5: e4m3[160,128] = permute(quantize_3, [1, 0])
full: f32[] = full([], 1.0, dtype=f32, device=cpu, pin_memory=False)
scaled_mm_1: bf16[64,128] = _scaled_mm(quantize_2, permute_5, full, full, None, None, bf16, False)
unsqueeze_1: f32[64,1] = unsqueeze(reciprocal_2, 1)
mul_2: f32[64,1] = mul(unsqueeze_1, reciprocal_3)
convert_element_type: f32[64,128] = prims.convert_element_type(scaled_mm_1, f32)
mul_3: f32[64,128] = mul(convert_element_type, mul_2)
convert_element_type_1: bf16[64,128] = prims.convert_element_type(mul_3, bf16)
rounded: bf16[64,128] = f8fx.rounded(convert_element_type_1)
permute_6: bf16[64,128] = permute(permute_4, [1, 0])
return [sin, cos, rounded, permute_6, permute_3]""",
        )

    def test_inference(self):
        text = graph_after(gate_up, randn(M, K, grad=False), *weights(64, 64, grad=False), **H100)
        self.assertExpectedInline(
            text,
            """\
arg0_1: bf16[64,128]
arg1_1: bf16[64,128]
arg2_1: bf16[64,128]
concat: bf16[128,128] = f8fx.concat([arg1_1, arg2_1], 0)
amax: f32[] = f8fx.amax(arg0_1, None)
scale: f32[] = f8fx.scale(amax, dtype=e4m3, power_of_2=False)
quantize: e4m3[64,128] = f8fx.quantize(arg0_1, scale, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale)
amax_1: f32[] = f8fx.amax(concat, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[128,128] = f8fx.quantize(concat, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal_1: f32[] = reciprocal(scale_1)
permute: e4m3[128,128] = permute(quantize_1, [1, 0])
scaled_mm: bf16[64,128] = _scaled_mm(quantize, permute, reciprocal, reciprocal_1, None, None, bf16, True)
slice: bf16[64,64] = slice(scaled_mm, 1, 0, 64)
slice_1: bf16[64,64] = slice(scaled_mm, 1, 64, 128)
convert_element_type: f32[64,64] = prims.convert_element_type(slice, f32)
neg: f32[64,64] = neg(convert_element_type)
exp: f32[64,64] = exp(neg)
add: f32[64,64] = add(exp, 1)
div: f32[64,64] = div(convert_element_type, add)
convert_element_type_1: bf16[64,64] = prims.convert_element_type(div, bf16)
mul: bf16[64,64] = mul(convert_element_type_1, slice_1)
return [mul]""",
        )

    def test_training(self):
        def f(x, w1, w2):
            return F.linear(x, w1).sin() + F.linear(x, w2)[:, :64].cos()

        self.assertExpectedInline(
            graph_after(f, randn(M, K), *weights(64, 96), **H100),
            """\
primals_1: bf16[64,128]
primals_2: bf16[64,128]
primals_3: bf16[96,128]
tangents_1: bf16[64,64]
concat: bf16[160,128] = f8fx.concat([primals_2, primals_3], 0)
amax: f32[] = f8fx.amax(primals_1, None)
scale: f32[] = f8fx.scale(amax, dtype=e4m3, power_of_2=False)
quantize: e4m3[64,128] = f8fx.quantize(primals_1, scale, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale)
amax_1: f32[] = f8fx.amax(concat, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[160,128] = f8fx.quantize(concat, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal_1: f32[] = reciprocal(scale_1)
permute: e4m3[128,160] = permute(quantize_1, [1, 0])
scaled_mm: bf16[64,160] = _scaled_mm(quantize, permute, reciprocal, reciprocal_1, None, None, bf16, True)
slice: bf16[64,64] = slice(scaled_mm, 1, 0, 64)
slice_1: bf16[64,96] = slice(scaled_mm, 1, 64, 160)
sin: bf16[64,64] = sin(slice)
slice_2: bf16[64,64] = slice(slice_1, 1, 0, 64)
cos: bf16[64,64] = cos(slice_2)
add: bf16[64,64] = add(sin, cos)
sin_1: bf16[64,64] = sin(slice_2)
neg: bf16[64,64] = neg(sin_1)
mul: bf16[64,64] = mul(tangents_1, neg)
full: bf16[64,96] = full([64, 96], 0, dtype=bf16, layout=torch.strided, device=cpu, pin_memory=False)
slice_scatter: bf16[64,96] = slice_scatter(full, mul, 1, 0, 64)
cos_1: bf16[64,64] = cos(slice)
mul_1: bf16[64,64] = mul(tangents_1, cos_1)
concat_1: bf16[64,160] = f8fx.concat([mul_1, slice_scatter], 1)
amax_2: f32[] = f8fx.amax(concat_1, None)
scale_2: f32[] = f8fx.scale(amax_2, dtype=e5m2, power_of_2=False)
quantize_both: (e5m2[64,160], e5m2[160,64]) = f8fx.quantize_both(concat_1, scale_2, scale_2, dtype=e5m2, align=[1, 1], align_t=[1, 1])
getitem: e5m2[64,160] = getitem(quantize_both, 0)
getitem_1: e5m2[160,64] = getitem(quantize_both, 1)
reciprocal_2: f32[] = reciprocal(scale_2)
quantize_2: e4m3[128,64] = f8fx.quantize(primals_1, scale, dtype=e4m3, transpose=True, align=[1, 1])
permute_1: e4m3[64,128] = permute(quantize_2, [1, 0])
scaled_mm_1: bf16[160,128] = _scaled_mm(getitem_1, permute_1, reciprocal_2, reciprocal, None, None, bf16, False)
slice_3: bf16[64,128] = slice(scaled_mm_1, 0, 0, 64)
slice_4: bf16[96,128] = slice(scaled_mm_1, 0, 64, 160)
permute_2: bf16[128,96] = permute(slice_4, [1, 0])
permute_3: bf16[96,128] = permute(permute_2, [1, 0])
permute_4: bf16[128,64] = permute(slice_3, [1, 0])
quantize_3: e4m3[128,160] = f8fx.quantize(concat, scale_1, dtype=e4m3, transpose=True, align=[1, 1])
permute_5: e4m3[160,128] = permute(quantize_3, [1, 0])
scaled_mm_2: bf16[64,128] = _scaled_mm(getitem, permute_5, reciprocal_2, reciprocal_1, None, None, bf16, False)
permute_6: bf16[64,128] = permute(permute_4, [1, 0])
return [add, scaled_mm_2, permute_6, permute_3]""",
        )

    def test_bias(self):
        def f(x, w1, w2, b1, b2):
            return F.linear(x, w1, b1) * F.linear(x, w2, b2)

        args = (
            randn(M, K, grad=False),
            *weights(64, 64, grad=False),
            randn(64, grad=False),
            randn(64, grad=False),
        )
        self.assertExpectedInline(
            graph_after(f, *args, **H100),
            """\
arg0_1: bf16[64,128]
arg1_1: bf16[64,128]
arg2_1: bf16[64]
arg3_1: bf16[64,128]
arg4_1: bf16[64]
concat: bf16[128,128] = f8fx.concat([arg1_1, arg3_1], 0)
amax: f32[] = f8fx.amax(arg0_1, None)
scale: f32[] = f8fx.scale(amax, dtype=e4m3, power_of_2=False)
quantize: e4m3[64,128] = f8fx.quantize(arg0_1, scale, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale)
amax_1: f32[] = f8fx.amax(concat, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[128,128] = f8fx.quantize(concat, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal_1: f32[] = reciprocal(scale_1)
permute: e4m3[128,128] = permute(quantize_1, [1, 0])
scaled_mm: bf16[64,128] = _scaled_mm(quantize, permute, reciprocal, reciprocal_1, None, None, bf16, True)
slice: bf16[64,64] = slice(scaled_mm, 1, 0, 64)
add: bf16[64,64] = add(slice, arg2_1)
rounded: bf16[64,64] = f8fx.rounded(add)
slice_1: bf16[64,64] = slice(scaled_mm, 1, 64, 128)
add_1: bf16[64,64] = add(slice_1, arg4_1)
rounded_1: bf16[64,64] = f8fx.rounded(add_1)
mul: bf16[64,64] = mul(rounded, rounded_1)
return [mul]""",
        )


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_block_has_twelve_gemms_instead_of_twenty_one(recipe):
    model = Decoder(DecoderConfig(dim=128, layers=1, heads=4, kv_heads=2, ffn_dim=256)).to(bf16)
    tokens = torch.zeros(2, 32, dtype=torch.long)
    head = ["output"]
    assert gemms(model, tokens, recipe=recipe, filter_fqns=head) == 12
    assert gemms(model, tokens, recipe=recipe, filter_fqns=head, merge="never") == 21


# -- numerics


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


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_precision_is_that_of_separate_gemms(recipe):
    """Not below 0.3 dB of it, though parts of very different size share a tensorwise scale."""
    torch.manual_seed(0)
    model, x = Attention().to(bf16), randn(4, 64, K)
    want = [t.clone() for t in reference(model, x)]
    with f8fx.recording() as reports:
        merged = [t.clone() for t in trained(model, x, recipe=recipe)]
        separate = [t.clone() for t in trained(model, x, recipe=recipe, merge="never")]
    assert [any(merge.merged for merge in report.merges) for report in reports] == [True, False]
    for w, a, b in zip(want, merged, separate, strict=True):
        assert sqnr(w, a) > sqnr(w, b) - 0.3


def test_rowwise_is_the_same_forward():
    torch.manual_seed(0)
    model, x = Attention().to(bf16).requires_grad_(False), randn(4, 64, K, grad=False)
    with torch.no_grad():
        merged, separate = (compiled(model, recipe="rowwise", merge=m, **H100)(x) for m in ("auto", "never"))
    assert torch.equal(merged, separate)


def test_rowwise_weight_gradients_are_the_same():
    def f(x, a, b):
        return F.silu(F.linear(x, a)) * F.linear(x, b)

    grads = []
    for merge in ("auto", "never"):
        args = (randn(M, K), *weights(64, 64))
        compiled(f, recipe="rowwise", merge=merge, **H100)(*args).sum().backward()
        grads.append([w.grad for w in args[1:]])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


# -- memory


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


@pytest.mark.parametrize("model", BLOCKS)
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


def same_as_separate(fn, *args):
    """Outputs to the bit, since merging leaves the scales of rows as they are; gradients closely."""
    results = []
    for merge in ("auto", "never"):
        inputs = [arg.detach().clone().requires_grad_() for arg in args]
        with f8fx.recording() as reports:
            outputs = compiled(fn, recipe="rowwise_with_gw_hp", merge=merge, **H100)(*inputs)
        assert any(found.merged for found in reports[0].merges) == (merge == "auto")
        sum((y * i).sum() for i, y in enumerate(outputs, 1)).backward()
        results.append((outputs, [x.grad for x in inputs]))
    (merged, gradients), (separate, others) = results
    for one, other in zip(merged, separate, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(gradients, others, strict=True):
        assert sqnr(other, one) > 20


def test_elements_that_are_found_by_strides():
    def f(x, a, b):
        return torch.as_strided(F.linear(x, a), (32, 16), (64, 1), 32).sin(), F.linear(x, b).sin()

    same_as_separate(f, randn(M, K), *weights(64, 64))


class Restrided(torch.autograd.Function):
    """Its gradient is read from the beginning of the memory that it lies in, as for ``as_strided``."""

    @staticmethod
    def forward(ctx, weight):
        return weight * 1

    @staticmethod
    def backward(ctx, grad):
        return torch.as_strided(grad, grad.shape, grad.stride(), 0) * 2


def test_elements_of_weight_gradients_that_are_found_by_strides():
    """Each is a tensor of its own then, not the rows of a merged one."""

    results = []
    for merge in ("auto", "never"):
        parameters = [nn.Parameter(randn(64, K, grad=False, seed=i)) for i in (1, 2)]
        x = randn(M, K)

        def f(x, parameters=parameters):
            a, b = map(Restrided.apply, parameters)
            return F.linear(x, a).sin(), F.linear(x, b).cos()

        with f8fx.recording() as reports:
            outputs = compiled(f, recipe="rowwise", merge=merge, **H100)(x)
        assert any(found.merged for found in reports[0].merges) == (merge == "auto")
        sum((y * i).sum() for i, y in enumerate(outputs, 1)).backward()
        results.append([parameter.grad for parameter in parameters])
    assert all(sqnr(want, got) > 20 for got, want in zip(*results, strict=True))


def test_matmuls_that_read_each_other():
    """Merged results are operands of other matmuls, merged sums are the gradients of others, merged or not."""

    def f(x, a, b, up_a, up_b):
        y = F.linear(F.linear(x, a), up_a)
        z = F.linear(F.linear(x, b), up_b)
        return F.linear(y, a).sin() * F.linear(y, b), z.sin()

    same_as_separate(f, randn(M, K), *weights(64, 64), randn(K, 64, seed=7), randn(K, 64, seed=8))


def test_a_merged_result_that_another_family_reads():
    def f(x, a, b, c, d):
        y, z = F.linear(x, a), F.linear(x, b)
        return F.linear(y, c).sin() * F.linear(y, d), z.sin()

    same_as_separate(f, randn(M, K), *weights(K, K, K, K))


@pytest.mark.parametrize(
    "recipe",
    [
        "tensorwise",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("rowwise", "rowwise_with_gw_hp")),
    ],
)
def test_dynamic_batches(recipe):
    """The input gradient is a view of dynamic size."""

    def f(x, a, b):
        return F.silu(F.linear(x.sin(), a)) * F.linear(x.sin(), b)

    steps = [compiled(f, dynamic=True, recipe=recipe, merge=merge, **H100) for merge in ("auto", "never")]
    for batch in (2, 3):
        grads = []
        for step in steps:
            args = randn(batch, 32, K), *weights(64, 64)
            step(*args).sum().backward()
            grads.append(args[0].grad)
        assert sqnr(grads[1], grads[0]) > 20


def test_dynamic_sizes():
    step = compiled(gate_up, dynamic=True, **H100)
    for rows in (64, 96, 7):
        x, (a, b) = randn(rows, K, grad=False), weights(64, 64, grad=False)
        with torch.no_grad():
            assert sqnr(gate_up(x, a, b), step(x, a, b)) > 20


# -- users that a slice of the product does not suit


@torch.library.custom_op("f8fx_tests::doubled", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))
def doubled(x: torch.Tensor) -> torch.Tensor:
    """A kernel that is given memory and sizes."""
    return torch.as_strided(x, x.shape, (x.shape[1], 1)).clone() * 2


@doubled.register_fake
def _(x):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@pytest.mark.parametrize("executor", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_custom_operators_read_what_they_read_before(executor):
    x, a, b = randn(32, 64, grad=False), randn(64, 64, grad=False, seed=1), randn(64, 64, grad=False, seed=2)

    def f(x):
        return doubled(F.linear(x, a)), doubled(F.linear(x, b).view(32, 64))

    for want, got in zip(f(x), compiled(f, target="h100", executor=executor)(x), strict=True):
        assert sqnr(want, got) > 20


@torch.library.custom_op("f8fx_tests::columns", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))
def columns(x: torch.Tensor) -> torch.Tensor:
    """A kernel for transposed matrices, likewise."""
    return torch.as_strided(x, x.shape[::-1], (x.shape[0], 1), x.storage_offset()).t().contiguous()


@columns.register_fake
def _(x):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@pytest.mark.parametrize("executor", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_custom_operators_read_turned_results_as_before(executor):
    x, a, b = randn(32, 64, grad=False), randn(64, 64, grad=False, seed=1), randn(64, 64, grad=False, seed=2)

    def f(x):
        return columns(F.linear(x, a).view(32, 64).t()), F.linear(x, b).relu()

    for want, got in zip(f(x), compiled(f, target="h100", executor=executor)(x), strict=True):
        assert sqnr(want, got) > 20


def halves_turned(y):
    return y.view(2, 16, 64).permute(1, 2, 0).view(16 * 64, 2)


@pytest.mark.parametrize(
    "use",
    [
        lambda y: columns(torch.slice_scatter(y.t(), torch.zeros(8, 32, dtype=y.dtype), 0, 0, 8)),
        lambda y: columns(halves_turned(y).relu()),
    ],
    ids=["written to", "a view that reads a copy"],
)
@pytest.mark.parametrize("executor", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_custom_operators_read_what_is_laid_out_as_a_turned_result_as_before(use, executor):
    x, a, b = randn(32, 64, grad=False), randn(64, 64, grad=False, seed=1), randn(64, 64, grad=False, seed=2)

    def f(x):
        return use(F.linear(x, a)), F.linear(x, b).relu()

    with recording() as reports:
        found = compiled(f, target="h100", executor=executor)(x)
    assert reports[0].merges[0].merged
    for want, got in zip(f(x), found, strict=True):
        assert sqnr(want, got) > 20


def test_strides_of_what_is_computed_from_a_view_that_reads_a_copy():
    x, a, b = randn(32, 64, grad=False), randn(64, 64, grad=False, seed=1), randn(64, 64, grad=False, seed=2)

    def f(x):
        return halves_turned(F.linear(x, a)).relu(), F.linear(x, b).relu()

    assert compiled(f, target="h100")(x)[0].stride() == f(x)[0].stride()


def test_attention_that_is_a_higher_order_operator():
    """Heads are views whose strides it records; a copy of another layout at its door would not do."""
    x, ws = randn(2, 16, 32, grad=False), [randn(64, 32, grad=False, seed=i) for i in (1, 2, 3)]

    def f(x, *ws):
        q, k, v = (F.linear(x, w).view(2, 16, 4, 16).transpose(1, 2) for w in ws)
        return flex_attention(q, k, v).transpose(1, 2).flatten(2)

    with recording() as reports:
        got = compiled(f, target="h100", recipe="rowwise")(x, *ws)
    assert reports[0].merges[0].merged
    assert torch.equal(got, compiled(f, target="h100", recipe="rowwise", merge="never")(x, *ws))


def test_weights_that_two_families_share():
    """Gradients of one weight from both are summed up: the sum waits for whichever comes last."""
    x, y, ws = randn(M, K), randn(M, K, seed=1), weights(64, 64, 64)

    def f(x, y, a, b, c):
        q, qy = F.linear(x, a), F.linear(y, a)
        k, ky = F.linear(x, b), F.linear(y, b)
        v, vy = F.linear(x, c), F.linear(y, c)
        return q * k + v, qy * ky + vy

    same_as_separate(f, x, y, *ws)


def overwritten_columns(y):
    y[:, :8] = 0
    return y


def overwritten_row(y):
    y[0] = 1
    return y


def overwritten_diagonal(y):
    y.diagonal().zero_()
    return y


@pytest.mark.parametrize(
    "use",
    [
        overwritten_columns,
        overwritten_row,
        overwritten_diagonal,
        lambda y: y.unfold(1, 8, 4),
        torch.diagonal,
    ],
)
def test_outputs_lie_in_memory_as_they_did(use):
    x, a, b = randn(24, 16), randn(64, 16, seed=1), randn(64, 16, seed=2)

    def f(x, a, b):
        return use(F.linear(x, a)), F.linear(x, b).sin()

    with recording() as reports:
        got = compiled(f, target="h100")(x, a, b)[0]
    assert reports[0].merges[0].merged
    want = f(x, a, b)[0]
    assert got.stride() == want.stride()
    assert got.untyped_storage().nbytes() == want.untyped_storage().nbytes()


def test_the_sum_of_gradients_may_lie_otherwise():
    """One that began with a turned summand; autograd takes it as it is."""
    x, ws = randn(2, 2, 16, 32), [randn(32, 32, seed=i, grad=i > 1) for i in (1, 2, 3)]

    def f(x, a, b, c):
        turned = F.linear(x.transpose(0, -2), c)
        return turned, torch.matmul(x.unsqueeze(0), a.t()).squeeze(0) * F.linear(x, b)

    results = []
    for call in (f, compiled(f, target="h100", recipe="rowwise_with_gw_hp")):
        x.grad = None
        sum(y.float().square().sum() for y in call(x, *ws)).backward()
        results.append(x.grad)
    assert sqnr(*results) > 20 and results[0].stride() == results[1].stride()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_under_autocast(recipe):
    """Each layer has its own cast of the input, and the gradients are added up in float32."""
    torch.manual_seed(0)
    model = Block(128, 256)
    x, grad = randn(256, 128, dtype=torch.float32), randn(256, 128, grad=False, seed=1)
    results = []
    for merge in ("never", "auto"):
        with recording() as reports, torch.autocast("cpu", bf16):
            call = compiled(model, target="h100", recipe=recipe, merge=merge)
            results.append(gradients(model, call, x, grad.float()))
    assert [m.merged for m in reports[0].merges] == [True]
    assert reports[0].converted == 9 and reports[0].gemms == 6
    plain = gradients(model, torch.autocast("cpu", bf16)(model), x, grad.float())
    for name, exact in plain.items():
        apart, merged = (sqnr(exact, result[name]) for result in results)
        assert merged >= apart - 0.3, (name, apart, merged)


class LowRank(nn.Module):
    """Weights that merged layers compute: their gradients wait for those of the layers that read them."""

    def __init__(self):
        super().__init__()
        self.z, self.left, self.right = (nn.Parameter(randn(K, K, seed=seed) / 16) for seed in range(3))

    def forward(self, x):
        first, second = F.linear(self.z, self.left), F.linear(self.z, self.right)
        return F.linear(x, first).relu() + F.linear(x, second).sigmoid()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_weight_gradients_that_another_familys_gradients_read(recipe):
    model, x = LowRank(), randn(K, K, seed=9)
    separate = trained(model, x, recipe=recipe, merge="never")
    with recording() as reports:
        together = trained(model, x, recipe=recipe, strict=True)
    assert [merge.merged for merge in reports[0].merges] == [True, True]
    for exact, merged, alone in zip(reference(model, x), together, separate, strict=True):
        assert sqnr(exact, merged) > sqnr(exact, alone) - 1


@pytest.mark.parametrize(
    "use",
    [
        lambda y: [part.view(-1).sin() for part in y.split(M // 2)],
        lambda y: [part.view(-1).sin() for part in y.view(2, M // 2, -1).unbind(0)],
        lambda y: [y.view(8, M // 8, 1, 1, -1).flatten(1) * 2],
    ],
)
def test_parts_of_a_merged_result_that_are_viewed(use):
    """A view that its strides do not allow reads a copy."""
    args = (randn(M, K, grad=False), *weights(64, 64, grad=False))

    def f(x, a, b):
        return *use(F.linear(x, a)), F.linear(x, b) + 1

    expected, found = (
        compiled(f, strict=True, **options)(*args)
        for options in ({"merge": "never", "recipe": "rowwise"}, {"recipe": "rowwise", **H100})
    )
    assert all(map(torch.equal, expected, found))
