"""*quantize* and *share*: the graphs they make, as text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from expecttest import TestCase

import f8fx
from f8fx import GemmSpec, QuantSpec, Recipe
from tests.helpers import graph_after, randn


class TestGraphs(TestCase):
    def test_linear_tensorwise(self):
        """One amax and one scale for each tensor; the gradient's two layouts come out of one operator."""
        text = graph_after(F.linear, randn(2, 16, 32), randn(48, 32))
        self.assertExpectedInline(
            text,
            """\
primals_1: bf16[2,16,32]
primals_2: bf16[48,32]
tangents_1: bf16[2,16,48]
view: bf16[32,32] = view(primals_1, [32, 32])
amax: f32[] = f8fx.amax(view, None)
scale: f32[] = f8fx.scale(amax, dtype=e4m3, power_of_2=False)
quantize: e4m3[32,32] = f8fx.quantize(view, scale, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale)
amax_1: f32[] = f8fx.amax(primals_2, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[48,32] = f8fx.quantize(primals_2, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal_1: f32[] = reciprocal(scale_1)
permute: e4m3[32,48] = permute(quantize_1, [1, 0])
scaled_mm: bf16[32,48] = _scaled_mm(quantize, permute, reciprocal, reciprocal_1, None, None, bf16, True)
view_1: bf16[2,16,48] = view(scaled_mm, [2, 16, 48])
view_2: bf16[32,48] = view(tangents_1, [32, 48])
amax_2: f32[] = f8fx.amax(view_2, None)
scale_2: f32[] = f8fx.scale(amax_2, dtype=e5m2, power_of_2=False)
quantize_both: (e5m2[32,48], e5m2[48,32]) = f8fx.quantize_both(view_2, scale_2, scale_2, dtype=e5m2, align=[1, 1], align_t=[1, 1])
getitem: e5m2[32,48] = getitem(quantize_both, 0)
getitem_1: e5m2[48,32] = getitem(quantize_both, 1)
reciprocal_2: f32[] = reciprocal(scale_2)
quantize_2: e4m3[32,32] = f8fx.quantize(view, scale, dtype=e4m3, transpose=True, align=[1, 1])
permute_1: e4m3[32,32] = permute(quantize_2, [1, 0])
scaled_mm_1: bf16[48,32] = _scaled_mm(getitem_1, permute_1, reciprocal_2, reciprocal, None, None, bf16, False)
permute_2: bf16[32,48] = permute(scaled_mm_1, [1, 0])
quantize_3: e4m3[32,48] = f8fx.quantize(primals_2, scale_1, dtype=e4m3, transpose=True, align=[1, 1])
permute_3: e4m3[48,32] = permute(quantize_3, [1, 0])
scaled_mm_2: bf16[32,32] = _scaled_mm(getitem, permute_3, reciprocal_2, reciprocal_1, None, None, bf16, False)
view_3: bf16[2,16,32] = view(scaled_mm_2, [2, 16, 32])
permute_4: bf16[48,32] = permute(permute_2, [1, 0])
return [view_1, view_3, permute_4]""",
        )

    def test_linear_rowwise(self):
        """Scales run over the contracted dimension, so each operand of each gemm has its own."""
        text = graph_after(F.linear, randn(32, 32), randn(48, 32), recipe="rowwise")
        self.assertExpectedInline(
            text,
            """\
primals_1: bf16[32,32]
primals_2: bf16[48,32]
tangents_1: bf16[32,48]
amax: f32[32] = f8fx.amax(primals_1, 1)
scale: f32[32] = f8fx.scale(amax, dtype=e4m3, power_of_2=True)
quantize: e4m3[32,32] = f8fx.quantize(primals_1, scale, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal: f32[32] = reciprocal(scale)
amax_1: f32[48] = f8fx.amax(primals_2, 1)
scale_1: f32[48] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=True)
quantize_1: e4m3[48,32] = f8fx.quantize(primals_2, scale_1, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_1: f32[48] = reciprocal(scale_1)
permute: e4m3[32,48] = permute(quantize_1, [1, 0])
as_strided: f32[32,1] = as_strided(reciprocal, [32, 1], [1, 1])
as_strided_1: f32[1,48] = as_strided(reciprocal_1, [1, 48], [48, 1])
scaled_mm: bf16[32,48] = _scaled_mm(quantize, permute, as_strided, as_strided_1, None, None, bf16, True)
amax_2: f32[48] = f8fx.amax(tangents_1, 0)
scale_2: f32[48] = f8fx.scale(amax_2, dtype=e4m3, power_of_2=True)
amax_3: f32[32] = f8fx.amax(tangents_1, 1)
scale_3: f32[32] = f8fx.scale(amax_3, dtype=e4m3, power_of_2=True)
quantize_both: (e4m3[32,48], e4m3[48,32]) = f8fx.quantize_both(tangents_1, scale_3, scale_2, dtype=e4m3, dim=1, dim_t=0, align=[1, 1], align_t=[1, 1])
getitem: e4m3[32,48] = getitem(quantize_both, 0)
getitem_1: e4m3[48,32] = getitem(quantize_both, 1)
reciprocal_2: f32[48] = reciprocal(scale_2)
amax_4: f32[32] = f8fx.amax(primals_1, 0)
scale_4: f32[32] = f8fx.scale(amax_4, dtype=e4m3, power_of_2=True)
quantize_2: e4m3[32,32] = f8fx.quantize(primals_1, scale_4, dtype=e4m3, dim=0, transpose=True, align=[1, 1])
reciprocal_3: f32[32] = reciprocal(scale_4)
permute_1: e4m3[32,32] = permute(quantize_2, [1, 0])
full: f32[] = full([], 1.0, dtype=f32, device=cpu, pin_memory=False)
scaled_mm_1: bf16[48,32] = _scaled_mm(getitem_1, permute_1, full, full, None, None, bf16, False)
unsqueeze: f32[48,1] = unsqueeze(reciprocal_2, 1)
unsqueeze_1: f32[1,32] = unsqueeze(reciprocal_3, 0)
mul: f32[48,32] = mul(unsqueeze, unsqueeze_1)
convert_element_type: f32[48,32] = prims.convert_element_type(scaled_mm_1, f32)
mul_1: f32[48,32] = mul(convert_element_type, mul)
convert_element_type_1: bf16[48,32] = prims.convert_element_type(mul_1, bf16)
rounded: bf16[48,32] = f8fx.rounded(convert_element_type_1)
permute_2: bf16[32,48] = permute(rounded, [1, 0])
reciprocal_4: f32[32] = reciprocal(scale_3)
amax_5: f32[32] = f8fx.amax(primals_2, 0)
scale_5: f32[32] = f8fx.scale(amax_5, dtype=e4m3, power_of_2=True)
quantize_3: e4m3[32,48] = f8fx.quantize(primals_2, scale_5, dtype=e4m3, dim=0, transpose=True, align=[1, 1])
reciprocal_5: f32[32] = reciprocal(scale_5)
permute_3: e4m3[48,32] = permute(quantize_3, [1, 0])
scaled_mm_2: bf16[32,32] = _scaled_mm(getitem, permute_3, full, full, None, None, bf16, False)
unsqueeze_2: f32[32,1] = unsqueeze(reciprocal_4, 1)
unsqueeze_3: f32[1,32] = unsqueeze(reciprocal_5, 0)
mul_2: f32[32,32] = mul(unsqueeze_2, unsqueeze_3)
convert_element_type_2: f32[32,32] = prims.convert_element_type(scaled_mm_2, f32)
mul_3: f32[32,32] = mul(convert_element_type_2, mul_2)
convert_element_type_3: bf16[32,32] = prims.convert_element_type(mul_3, bf16)
rounded_1: bf16[32,32] = f8fx.rounded(convert_element_type_3)
permute_4: bf16[48,32] = permute(permute_2, [1, 0])
return [scaled_mm, rounded_1, permute_4]""",
        )

    def test_rowwise_where_the_gemm_takes_no_scale_vectors(self):
        """The scales multiply a float32 result, which is rounded once."""
        text = graph_after(
            F.linear,
            randn(16, 32, grad=False),
            randn(48, 32, grad=False),
            recipe="rowwise",
            rowwise_scales="after",
        )
        self.assertExpectedInline(
            text,
            """\
arg0_1: bf16[16,32]
arg1_1: bf16[48,32]
amax: f32[16] = f8fx.amax(arg0_1, 1)
scale: f32[16] = f8fx.scale(amax, dtype=e4m3, power_of_2=True)
quantize: e4m3[16,32] = f8fx.quantize(arg0_1, scale, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal: f32[16] = reciprocal(scale)
amax_1: f32[48] = f8fx.amax(arg1_1, 1)
scale_1: f32[48] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=True)
quantize_1: e4m3[48,32] = f8fx.quantize(arg1_1, scale_1, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_1: f32[48] = reciprocal(scale_1)
permute: e4m3[32,48] = permute(quantize_1, [1, 0])
full: f32[] = full([], 1.0, dtype=f32, device=cpu, pin_memory=False)
scaled_mm: f32[16,48] = _scaled_mm(quantize, permute, full, full, None, None, f32, True)
unsqueeze: f32[16,1] = unsqueeze(reciprocal, 1)
unsqueeze_1: f32[1,48] = unsqueeze(reciprocal_1, 0)
mul: f32[16,48] = mul(unsqueeze, unsqueeze_1)
mul_1: f32[16,48] = mul(scaled_mm, mul)
convert_element_type: bf16[16,48] = prims.convert_element_type(mul_1, bf16)
rounded: bf16[16,48] = f8fx.rounded(convert_element_type)
return [rounded]""",
        )

    def test_linear_rowwise_with_gw_hp(self):
        """grad_weight stays ``mm``; the tensorwise weight scale multiplies the rowwise one."""
        text = graph_after(F.linear, randn(32, 32), randn(48, 32), recipe="rowwise_with_gw_hp")
        self.assertExpectedInline(
            text,
            """\
primals_1: bf16[32,32]
primals_2: bf16[48,32]
tangents_1: bf16[32,48]
amax: f32[32] = f8fx.amax(primals_1, 1)
scale: f32[32] = f8fx.scale(amax, dtype=e4m3, power_of_2=True)
quantize: e4m3[32,32] = f8fx.quantize(primals_1, scale, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal: f32[32] = reciprocal(scale)
amax_1: f32[48] = f8fx.amax(primals_2, 1)
scale_1: f32[48] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=True)
quantize_1: e4m3[48,32] = f8fx.quantize(primals_2, scale_1, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_1: f32[48] = reciprocal(scale_1)
permute: e4m3[32,48] = permute(quantize_1, [1, 0])
as_strided: f32[32,1] = as_strided(reciprocal, [32, 1], [1, 1])
as_strided_1: f32[1,48] = as_strided(reciprocal_1, [1, 48], [48, 1])
scaled_mm: bf16[32,48] = _scaled_mm(quantize, permute, as_strided, as_strided_1, None, None, bf16, True)
permute_1: bf16[48,32] = permute(tangents_1, [1, 0])
mm: bf16[48,32] = mm(permute_1, primals_1)
permute_2: bf16[32,48] = permute(mm, [1, 0])
amax_2: f32[32] = f8fx.amax(tangents_1, 1)
scale_2: f32[32] = f8fx.scale(amax_2, dtype=e4m3, power_of_2=True)
quantize_2: e4m3[32,48] = f8fx.quantize(tangents_1, scale_2, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_2: f32[32] = reciprocal(scale_2)
unsqueeze: f32[1,48] = unsqueeze(amax_1, 0)
amax_3: f32[] = f8fx.amax(unsqueeze, None)
scale_3: f32[] = f8fx.scale(amax_3, dtype=e4m3, power_of_2=True)
quantize_3: e4m3[32,48] = f8fx.quantize(primals_2, scale_3, dtype=e4m3, transpose=True, align=[1, 1])
reciprocal_3: f32[] = reciprocal(scale_3)
permute_3: e4m3[48,32] = permute(quantize_3, [1, 0])
full: f32[] = full([], 1.0, dtype=f32, device=cpu, pin_memory=False)
scaled_mm_1: bf16[32,32] = _scaled_mm(quantize_2, permute_3, full, full, None, None, bf16, False)
unsqueeze_1: f32[32,1] = unsqueeze(reciprocal_2, 1)
mul: f32[32,1] = mul(unsqueeze_1, reciprocal_3)
convert_element_type: f32[32,32] = prims.convert_element_type(scaled_mm_1, f32)
mul_1: f32[32,32] = mul(convert_element_type, mul)
convert_element_type_1: bf16[32,32] = prims.convert_element_type(mul_1, bf16)
rounded: bf16[32,32] = f8fx.rounded(convert_element_type_1)
permute_4: bf16[48,32] = permute(permute_2, [1, 0])
return [scaled_mm, rounded, permute_4]""",
        )

    def test_inference_shares_by_itself(self):
        """No partitioner runs on an inference graph: the shared input is still quantized once."""

        def qkv(x, q, k, v):
            return F.linear(x, q), F.linear(x, k), F.linear(x, v)

        weights = [randn(16, 32, grad=False, seed=seed) for seed in (1, 2, 3)]
        text = graph_after(qkv, randn(32, 32, grad=False), *weights)
        self.assertExpectedInline(
            text,
            """\
arg0_1: bf16[32,32]
arg1_1: bf16[16,32]
arg2_1: bf16[16,32]
arg3_1: bf16[16,32]
amax: f32[] = f8fx.amax(arg0_1, None)
scale: f32[] = f8fx.scale(amax, dtype=e4m3, power_of_2=False)
quantize: e4m3[32,32] = f8fx.quantize(arg0_1, scale, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale)
amax_1: f32[] = f8fx.amax(arg1_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[16,32] = f8fx.quantize(arg1_1, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal_1: f32[] = reciprocal(scale_1)
permute: e4m3[32,16] = permute(quantize_1, [1, 0])
scaled_mm: bf16[32,16] = _scaled_mm(quantize, permute, reciprocal, reciprocal_1, None, None, bf16, True)
amax_2: f32[] = f8fx.amax(arg2_1, None)
scale_2: f32[] = f8fx.scale(amax_2, dtype=e4m3, power_of_2=False)
quantize_2: e4m3[16,32] = f8fx.quantize(arg2_1, scale_2, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal_2: f32[] = reciprocal(scale_2)
permute_1: e4m3[32,16] = permute(quantize_2, [1, 0])
scaled_mm_1: bf16[32,16] = _scaled_mm(quantize, permute_1, reciprocal, reciprocal_2, None, None, bf16, True)
amax_3: f32[] = f8fx.amax(arg3_1, None)
scale_3: f32[] = f8fx.scale(amax_3, dtype=e4m3, power_of_2=False)
quantize_3: e4m3[16,32] = f8fx.quantize(arg3_1, scale_3, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal_3: f32[] = reciprocal(scale_3)
permute_2: e4m3[32,16] = permute(quantize_3, [1, 0])
scaled_mm_2: bf16[32,16] = _scaled_mm(quantize, permute_2, reciprocal, reciprocal_3, None, None, bf16, True)
return [scaled_mm, scaled_mm_1, scaled_mm_2]""",
        )

    def test_padding(self):
        """Sizes that are no multiple of 16 are padded inside the cast and sliced off the result."""
        text = graph_after(F.linear, randn(5, 30, grad=False), randn(20, 30, grad=False))
        self.assertExpectedInline(
            text,
            """\
arg0_1: bf16[5,30]
arg1_1: bf16[20,30]
amax: f32[] = f8fx.amax(arg0_1, None)
scale: f32[] = f8fx.scale(amax, dtype=e4m3, power_of_2=False)
quantize: e4m3[5,32] = f8fx.quantize(arg0_1, scale, dtype=e4m3, transpose=False, align=[1, 16])
reciprocal: f32[] = reciprocal(scale)
amax_1: f32[] = f8fx.amax(arg1_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[32,32] = f8fx.quantize(arg1_1, scale_1, dtype=e4m3, transpose=False, align=[16, 16])
reciprocal_1: f32[] = reciprocal(scale_1)
permute: e4m3[32,32] = permute(quantize_1, [1, 0])
scaled_mm: bf16[5,32] = _scaled_mm(quantize, permute, reciprocal, reciprocal_1, None, None, bf16, True)
slice: bf16[5,20] = slice(scaled_mm, 1, 0, 20)
clone: bf16[5,20] = clone(slice, memory_format=torch.contiguous_format)
return [clone]""",
        )

    def test_rows_whose_number_is_not_known(self):
        """Torch would ask whether there is one scale of rows or several: the gemm is not given them."""

        def chosen(x, mask, w):
            return F.linear(x[mask], w)

        args = randn(64, 32, grad=False), torch.ones(64, dtype=torch.bool), randn(48, 32, grad=False)
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            text = graph_after(chosen, *args, recipe="rowwise", rowwise_scales="in_gemm")
        self.assertExpectedInline(
            text[text.index("amax:") :],
            """\
amax: f32[u0] = f8fx.amax(index, 1)
scale: f32[u0] = f8fx.scale(amax, dtype=e4m3, power_of_2=True)
quantize: e4m3[u0,32] = f8fx.quantize(index, scale, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal: f32[u0] = reciprocal(scale)
amax_1: f32[48] = f8fx.amax(arg2_1, 1)
scale_1: f32[48] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=True)
quantize_1: e4m3[48,32] = f8fx.quantize(arg2_1, scale_1, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_1: f32[48] = reciprocal(scale_1)
permute: e4m3[32,48] = permute(quantize_1, [1, 0])
full: f32[] = full([], 1.0, dtype=f32, device=cpu, pin_memory=False)
scaled_mm: f32[u0,48] = _scaled_mm(quantize, permute, full, full, None, None, f32, True)
unsqueeze: f32[u0,1] = unsqueeze(reciprocal, 1)
unsqueeze_1: f32[1,48] = unsqueeze(reciprocal_1, 0)
mul: f32[u0,48] = mul(unsqueeze, unsqueeze_1)
mul_1: f32[u0,48] = mul(scaled_mm, mul)
convert_element_type: bf16[u0,48] = prims.convert_element_type(mul_1, bf16)
rounded: bf16[u0,48] = f8fx.rounded(convert_element_type)
return [rounded]""",
        )

    def test_scales_of_rows_with_e5m2_on_the_right(self):
        """Torch's gemms that take vectors of scales take no such operand: it is given none of them."""
        row, wide = QuantSpec("e4m3", "rowwise"), QuantSpec("e5m2", "rowwise")
        mine = Recipe("mine", GemmSpec(row, wide), GemmSpec(row, wide), None)
        args = randn(32, 32, grad=False), randn(48, 32, grad=False)
        text = graph_after(F.linear, *args, recipe=mine, rowwise_scales="in_gemm")
        self.assertExpectedInline(
            text[text.index("full:") :],
            """\
full: f32[] = full([], 1.0, dtype=f32, device=cpu, pin_memory=False)
scaled_mm: bf16[32,48] = _scaled_mm(quantize, permute, full, full, None, None, bf16, False)
unsqueeze: f32[32,1] = unsqueeze(reciprocal, 1)
unsqueeze_1: f32[1,48] = unsqueeze(reciprocal_1, 0)
mul: f32[32,48] = mul(unsqueeze, unsqueeze_1)
convert_element_type: f32[32,48] = prims.convert_element_type(scaled_mm, f32)
mul_1: f32[32,48] = mul(convert_element_type, mul)
convert_element_type_1: bf16[32,48] = prims.convert_element_type(mul_1, bf16)
rounded: bf16[32,48] = f8fx.rounded(convert_element_type_1)
return [rounded]""",
        )

    def test_padding_rowwise(self):
        text = graph_after(F.linear, randn(5, 30, grad=False), randn(20, 30, grad=False), recipe="rowwise")
        self.assertExpectedInline(
            text,
            """\
arg0_1: bf16[5,30]
arg1_1: bf16[20,30]
amax: f32[5] = f8fx.amax(arg0_1, 1)
scale: f32[5] = f8fx.scale(amax, dtype=e4m3, power_of_2=True)
quantize: e4m3[5,32] = f8fx.quantize(arg0_1, scale, dtype=e4m3, dim=1, transpose=False, align=[1, 16])
reciprocal: f32[5] = reciprocal(scale)
amax_1: f32[20] = f8fx.amax(arg1_1, 1)
scale_1: f32[20] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=True)
quantize_1: e4m3[32,32] = f8fx.quantize(arg1_1, scale_1, dtype=e4m3, dim=1, transpose=False, align=[16, 16])
reciprocal_1: f32[20] = reciprocal(scale_1)
permute: e4m3[32,32] = permute(quantize_1, [1, 0])
as_strided: f32[5,1] = as_strided(reciprocal, [5, 1], [1, 1])
constant_pad_nd: f32[32] = constant_pad_nd(reciprocal_1, [0, 12], 1.0)
as_strided_1: f32[1,32] = as_strided(constant_pad_nd, [1, 32], [32, 1])
scaled_mm: bf16[5,32] = _scaled_mm(quantize, permute, as_strided, as_strided_1, None, None, bf16, True)
slice: bf16[5,20] = slice(scaled_mm, 1, 0, 20)
clone: bf16[5,20] = clone(slice, memory_format=torch.contiguous_format)
return [clone]""",
        )

    def test_dynamic_rows(self):
        """A dynamic M is contracted by grad_weight: that one copy is padded, nothing else."""
        weight = torch.nn.Parameter(randn(48, 32, grad=False))

        def f(x):
            return F.linear(x, weight)

        x = randn(30, 32)
        torch._dynamo.mark_dynamic(x, 0)
        self.assertExpectedInline(
            graph_after(f, x),
            """\
primals_1: s77
primals_2: bf16[s77,32]
primals_3: bf16[48,32]
tangents_1: bf16[s77,48]
amax: f32[] = f8fx.amax(primals_2, None)
scale: f32[] = f8fx.scale(amax, dtype=e4m3, power_of_2=False)
quantize: e4m3[s77,32] = f8fx.quantize(primals_2, scale, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale)
amax_1: f32[] = f8fx.amax(primals_3, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[48,32] = f8fx.quantize(primals_3, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal_1: f32[] = reciprocal(scale_1)
permute: e4m3[32,48] = permute(quantize_1, [1, 0])
scaled_mm: bf16[s77,48] = _scaled_mm(quantize, permute, reciprocal, reciprocal_1, None, None, bf16, True)
amax_2: f32[] = f8fx.amax(tangents_1, None)
scale_2: f32[] = f8fx.scale(amax_2, dtype=e5m2, power_of_2=False)
quantize_both: (e5m2[s77,48], e5m2[48,16*(((s77+15)//16))]) = f8fx.quantize_both(tangents_1, scale_2, scale_2, dtype=e5m2, align=[1, 1], align_t=[1, 16])
getitem: e5m2[s77,48] = getitem(quantize_both, 0)
getitem_1: e5m2[48,16*(((s77+15)//16))] = getitem(quantize_both, 1)
reciprocal_2: f32[] = reciprocal(scale_2)
quantize_2: e4m3[32,16*(((s77+15)//16))] = f8fx.quantize(primals_2, scale, dtype=e4m3, transpose=True, align=[1, 16])
permute_1: e4m3[16*(((s77+15)//16)),32] = permute(quantize_2, [1, 0])
scaled_mm_1: bf16[48,32] = _scaled_mm(getitem_1, permute_1, reciprocal_2, reciprocal, None, None, bf16, False)
permute_2: bf16[32,48] = permute(scaled_mm_1, [1, 0])
quantize_3: e4m3[32,48] = f8fx.quantize(primals_3, scale_1, dtype=e4m3, transpose=True, align=[1, 1])
permute_3: e4m3[48,32] = permute(quantize_3, [1, 0])
scaled_mm_2: bf16[s77,32] = _scaled_mm(getitem, permute_3, reciprocal_2, reciprocal_1, None, None, bf16, False)
permute_4: bf16[48,32] = permute(permute_2, [1, 0])
return [scaled_mm, None, scaled_mm_2, permute_4]""",
        )

    def test_addmm_alpha_beta(self):
        def f(bias, x, w):
            return torch.addmm(bias, x, w, alpha=0.5, beta=2.0)

        text = graph_after(f, randn(64, grad=False), randn(8, 32, grad=False), randn(32, 64, grad=False))
        self.assertExpectedInline(
            text,
            """\
arg0_1: bf16[64]
arg1_1: bf16[8,32]
arg2_1: bf16[32,64]
amax: f32[] = f8fx.amax(arg1_1, None)
scale: f32[] = f8fx.scale(amax, dtype=e4m3, power_of_2=False)
quantize: e4m3[8,32] = f8fx.quantize(arg1_1, scale, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale)
amax_1: f32[] = f8fx.amax(arg2_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[64,32] = f8fx.quantize(arg2_1, scale_1, dtype=e4m3, transpose=True, align=[1, 1])
reciprocal_1: f32[] = reciprocal(scale_1)
permute: e4m3[32,64] = permute(quantize_1, [1, 0])
scaled_mm: bf16[8,64] = _scaled_mm(quantize, permute, reciprocal, reciprocal_1, None, None, bf16, True)
mul: bf16[8,64] = mul(scaled_mm, 0.5)
mul_1: bf16[64] = mul(arg0_1, 2.0)
add: bf16[8,64] = add(mul, mul_1)
rounded: bf16[8,64] = f8fx.rounded(add)
return [rounded]""",
        )

    def test_addmm_beta_zero_does_not_read_the_bias(self):
        def f(bias, x, w):
            return torch.addmm(bias, x, w, beta=0)

        text = graph_after(f, randn(64, grad=False), randn(16, 32, grad=False), randn(32, 64, grad=False))
        self.assertExpectedInline(
            text,
            """\
arg0_1: bf16[64]
arg1_1: bf16[16,32]
arg2_1: bf16[32,64]
amax: f32[] = f8fx.amax(arg1_1, None)
scale: f32[] = f8fx.scale(amax, dtype=e4m3, power_of_2=False)
quantize: e4m3[16,32] = f8fx.quantize(arg1_1, scale, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale)
amax_1: f32[] = f8fx.amax(arg2_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[64,32] = f8fx.quantize(arg2_1, scale_1, dtype=e4m3, transpose=True, align=[1, 1])
reciprocal_1: f32[] = reciprocal(scale_1)
permute: e4m3[32,64] = permute(quantize_1, [1, 0])
scaled_mm: bf16[16,64] = _scaled_mm(quantize, permute, reciprocal, reciprocal_1, None, None, bf16, True)
return [scaled_mm]""",
        )

    def test_float16_rowwise_is_computed_in_bfloat16(self):
        text = graph_after(
            F.linear,
            randn(16, 32, grad=False, dtype=torch.float16),
            randn(48, 32, grad=False, dtype=torch.float16),
            recipe="rowwise",
        )
        self.assertExpectedInline(
            text,
            """\
arg0_1: f16[16,32]
arg1_1: f16[48,32]
amax: f32[16] = f8fx.amax(arg0_1, 1)
scale: f32[16] = f8fx.scale(amax, dtype=e4m3, power_of_2=True)
quantize: e4m3[16,32] = f8fx.quantize(arg0_1, scale, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal: f32[16] = reciprocal(scale)
amax_1: f32[48] = f8fx.amax(arg1_1, 1)
scale_1: f32[48] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=True)
quantize_1: e4m3[48,32] = f8fx.quantize(arg1_1, scale_1, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_1: f32[48] = reciprocal(scale_1)
permute: e4m3[32,48] = permute(quantize_1, [1, 0])
as_strided: f32[16,1] = as_strided(reciprocal, [16, 1], [1, 1])
as_strided_1: f32[1,48] = as_strided(reciprocal_1, [1, 48], [48, 1])
scaled_mm: bf16[16,48] = _scaled_mm(quantize, permute, as_strided, as_strided_1, None, None, bf16, True)
convert_element_type: f16[16,48] = prims.convert_element_type(scaled_mm, f16)
rounded: f16[16,48] = f8fx.rounded(convert_element_type)
return [rounded]""",
        )

    def test_mixed_granularity_in_one_gemm(self):
        """A tensorwise scale beside a vector is repeated, as torchao does."""
        spec = f8fx.GemmSpec(f8fx.QuantSpec("e4m3", "rowwise"), f8fx.QuantSpec("e4m3"), use_fast_accum=True)
        recipe = f8fx.Recipe("mixed", output=spec, grad_input=None, grad_weight=None)
        text = graph_after(F.linear, randn(16, 32, grad=False), randn(48, 32, grad=False), recipe=recipe)
        self.assertExpectedInline(
            text,
            """\
arg0_1: bf16[16,32]
arg1_1: bf16[48,32]
amax: f32[16] = f8fx.amax(arg0_1, 1)
scale: f32[16] = f8fx.scale(amax, dtype=e4m3, power_of_2=False)
quantize: e4m3[16,32] = f8fx.quantize(arg0_1, scale, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal: f32[16] = reciprocal(scale)
amax_1: f32[] = f8fx.amax(arg1_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[48,32] = f8fx.quantize(arg1_1, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal_1: f32[] = reciprocal(scale_1)
permute: e4m3[32,48] = permute(quantize_1, [1, 0])
as_strided: f32[16,1] = as_strided(reciprocal, [16, 1], [1, 1])
expand: f32[48] = expand(reciprocal_1, [48])
clone: f32[48] = clone(expand, memory_format=torch.contiguous_format)
as_strided_1: f32[1,48] = as_strided(clone, [1, 48], [48, 1])
scaled_mm: bf16[16,48] = _scaled_mm(quantize, permute, as_strided, as_strided_1, None, None, bf16, True)
return [scaled_mm]""",
        )

    def test_autocast_quantizes_the_float32_parameter(self):
        """Not its bfloat16 rounding: the cast between parameter and matmul is bypassed."""
        weight = torch.nn.Parameter(randn(64, 32, grad=False, dtype=torch.float32), requires_grad=False)

        def f(x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return F.linear(x, weight)

        text = graph_after(f, randn(16, 32, grad=False, dtype=torch.float32))
        self.assertExpectedInline(
            text,
            """\
arg0_1: f32[16,32]
arg1_1: f32[64,32]
convert_element_type: bf16[16,32] = prims.convert_element_type(arg0_1, bf16)
amax: f32[] = f8fx.amax(convert_element_type, None)
scale: f32[] = f8fx.scale(amax, dtype=e4m3, power_of_2=False)
quantize: e4m3[16,32] = f8fx.quantize(convert_element_type, scale, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale)
amax_1: f32[] = f8fx.amax(arg1_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[64,32] = f8fx.quantize(arg1_1, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal_1: f32[] = reciprocal(scale_1)
permute: e4m3[32,64] = permute(quantize_1, [1, 0])
scaled_mm: bf16[16,64] = _scaled_mm(quantize, permute, reciprocal, reciprocal_1, None, None, bf16, True)
return [scaled_mm]""",
        )

    def test_einsum(self):
        text = graph_after(
            lambda x, w: torch.einsum("bsd,hd->bsh", x, w),
            randn(2, 8, 32, grad=False),
            randn(64, 32, grad=False),
        )
        self.assertExpectedInline(
            text,
            """\
arg0_1: bf16[2,8,32]
arg1_1: bf16[64,32]
unsqueeze: bf16[2,8,32,1] = unsqueeze(arg0_1, 3)
permute: bf16[2,8,1,32] = permute(unsqueeze, [0, 1, 3, 2])
permute_1: bf16[2,8,32,1] = permute(permute, [0, 1, 3, 2])
view: bf16[1,16,32] = view(permute_1, [1, 16, 32])
squeeze: bf16[16,32] = squeeze(view, [0])
amax: f32[] = f8fx.amax(squeeze, None)
scale: f32[] = f8fx.scale(amax, dtype=e4m3, power_of_2=False)
quantize: e4m3[16,32] = f8fx.quantize(squeeze, scale, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale)
amax_1: f32[] = f8fx.amax(arg1_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[64,32] = f8fx.quantize(arg1_1, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal_1: f32[] = reciprocal(scale_1)
permute_2: e4m3[32,64] = permute(quantize_1, [1, 0])
scaled_mm: bf16[16,64] = _scaled_mm(quantize, permute_2, reciprocal, reciprocal_1, None, None, bf16, True)
unsqueeze_1: bf16[1,16,64] = unsqueeze(scaled_mm, 0)
view_1: bf16[2,8,1,64] = view(unsqueeze_1, [2, 8, 1, 64])
permute_3: bf16[2,8,64,1] = permute(view_1, [0, 1, 3, 2])
view_2: bf16[2,8,64] = view(permute_3, [2, 8, 64])
return [view_2]""",
        )
