"""*merge*: matmuls that read one input become one, with the same numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase

import f8fx
from f8fx.demo.model import Decoder, DecoderConfig
from tests.helpers import bf16, compiled, graph_after, randn, sqnr
from tests.passes.merged import H100, Attention, K, M, gate_up, gemms, reference, trained, weights


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


@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("rowwise", marks=pytest.mark.long)])
def test_a_block_has_twelve_gemms_instead_of_twenty_one(recipe):
    model = Decoder(DecoderConfig(dim=128, layers=1, heads=4, kv_heads=2, ffn_dim=256)).to(bf16)
    tokens = torch.zeros(2, 32, dtype=torch.long)
    head = ["output"]
    assert gemms(model, tokens, recipe=recipe, filter_fqns=head) == 12
    assert gemms(model, tokens, recipe=recipe, filter_fqns=head, merge="never") == 21


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
