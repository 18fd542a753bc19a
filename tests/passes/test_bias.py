"""*bias*: which gemms add the bias of their layer, under ``bias="in_gemm"``."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import nn

from f8fx.options import Options
from f8fx.passes import best_rowwise_scales
from f8fx.recipe import PRESETS, GemmSpec, QuantSpec, Recipe
from tests.helpers import bf16, compiled, gradients, graph_after, joint_graphs, randn, sqnr


def linear(dim, width):
    return nn.Linear(dim, width, dtype=bf16)


def args(dtype=bf16, width=48):
    return tuple(
        randn(*shape, seed=seed, grad=False).to(dtype)
        for seed, shape in enumerate([(16, 32), (width, 32), (width,)])
    )


def added(fn, *inputs, bias="in_gemm", **options):
    """Of each gemm in the forward: whether it adds a bias."""
    text = graph_after(fn, *inputs, bias=bias, **options)
    gemms = re.findall(r"= _scaled_mm\((.*)\)", text)
    return [gemm.split(", ")[4] != "None" for gemm in gemms]


class TestGraph(TestCase):
    def test_tensorwise(self):
        self.assertExpectedInline(
            graph_after(F.linear, *args(), bias="in_gemm"),
            """\
arg0_1: bf16[16,32]
arg1_1: bf16[48,32]
arg2_1: bf16[48]
amax: f32[] = f8fx.amax(arg0_1, None)
scale: f32[] = f8fx.scale(amax, dtype=e4m3, power_of_2=False)
quantize: e4m3[16,32] = f8fx.quantize(arg0_1, scale, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale)
amax_1: f32[] = f8fx.amax(arg1_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[48,32] = f8fx.quantize(arg1_1, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal_1: f32[] = reciprocal(scale_1)
permute: e4m3[32,48] = permute(quantize_1, [1, 0])
scaled_mm: bf16[16,48] = _scaled_mm(quantize, permute, reciprocal, reciprocal_1, arg2_1, None, bf16, True)
return [scaled_mm]""",
        )

    def test_merged_layers(self):
        """Their biases stand side by side, as their weights do."""

        def f(x, first, b, second, c):
            return F.linear(x, first, b).sin(), F.linear(x, second, c).cos()

        self.assertExpectedInline(
            graph_after(
                f,
                *args(),
                *args()[1:],
                bias="in_gemm",
                recipe="rowwise",
                rowwise_scales="in_gemm",
                target="h100",
            ),
            """\
arg0_1: bf16[16,32]
arg1_1: bf16[48,32]
arg2_1: bf16[48]
arg3_1: bf16[48,32]
arg4_1: bf16[48]
concat: bf16[96,32] = f8fx.concat([arg1_1, arg3_1], 0)
cat: bf16[96] = cat([arg2_1, arg4_1])
amax: f32[16] = f8fx.amax(arg0_1, 1)
scale: f32[16] = f8fx.scale(amax, dtype=e4m3, power_of_2=True)
quantize: e4m3[16,32] = f8fx.quantize(arg0_1, scale, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal: f32[16] = reciprocal(scale)
amax_1: f32[96] = f8fx.amax(concat, 1)
scale_1: f32[96] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=True)
quantize_1: e4m3[96,32] = f8fx.quantize(concat, scale_1, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_1: f32[96] = reciprocal(scale_1)
permute: e4m3[32,96] = permute(quantize_1, [1, 0])
as_strided: f32[16,1] = as_strided(reciprocal, [16, 1], [1, 1])
as_strided_1: f32[1,96] = as_strided(reciprocal_1, [1, 96], [96, 1])
scaled_mm: bf16[16,96] = _scaled_mm(quantize, permute, as_strided, as_strided_1, cat, None, bf16, True)
slice: bf16[16,48] = slice(scaled_mm, 1, 0, 48)
slice_1: bf16[16,48] = slice(scaled_mm, 1, 48, 96)
sin: bf16[16,48] = sin(slice)
cos: bf16[16,48] = cos(slice_1)
return [sin, cos]""",
        )


@pytest.mark.parametrize(
    ("recipe", "scales"),
    [("tensorwise", "torchao"), ("rowwise", "in_gemm"), ("rowwise_with_gw_hp", "in_gemm")],
)
def test_recipes(recipe, scales):
    assert added(F.linear, *args(), recipe=recipe, rowwise_scales=scales) == [True]


def test_by_default_a_bias_is_added_to_the_rounded_result():
    assert added(F.linear, *args(), bias="torchao") == [False]


@pytest.mark.parametrize(("scales", "fast"), [("after", True), ("torchao", False)])
def test_scales_that_are_applied_later_come_before_the_bias(scales, fast):
    rowwise = PRESETS["rowwise"]
    recipe = replace(rowwise, output=replace(rowwise.output, use_fast_accum=fast))
    assert added(F.linear, *args(), recipe=recipe, rowwise_scales=scales) == [False]
    assert added(F.linear, *args(), recipe=recipe, rowwise_scales="in_gemm") == [True]


@pytest.mark.parametrize("kwargs", [{"alpha": 2}, {"beta": 2}, {"beta": 0}])
def test_what_is_scaled_stays(kwargs):
    x, weight, bias = args()
    assert added(lambda x, w, b: torch.addmm(b, x, w.t(), **kwargs), x, weight, bias) == [False]


@pytest.mark.parametrize("shape", [(16, 48), (1, 48), (1,)])
def test_other_shapes_stay(shape):
    x, weight, _ = args()
    bias = randn(*shape, grad=False)
    assert added(lambda x, w, b: torch.addmm(b, x, w.t()), x, weight, bias) == [False]


def test_a_bias_that_is_expanded_stays():
    x, weight, bias = args()
    assert added(lambda x, w, b: F.linear(x, w, b[:1].expand(48)), x, weight, bias) == [False]


@pytest.mark.parametrize(("first", "is_aligned"), [(0, True), (8, True), (4, False), (1, False)])
def test_a_bias_that_begins_where_no_vector_of_16_bytes_does_stays(first, is_aligned):
    x, weight, _ = args()
    packed = randn(64, grad=False)
    assert added(lambda x, w, b: F.linear(x, w, b[first : first + 48]), x, weight, packed) == [is_aligned]
    assert added(F.linear, x, weight, packed[first : first + 48]) == [is_aligned]


def test_padded_columns_stay():
    assert added(F.linear, *args(width=40)) == [False]


def test_dtypes():
    """A gemm scaled by rows writes bfloat16, which is cast to float16 then."""
    assert added(F.linear, *args(torch.float16)) == [True]
    assert added(F.linear, *args(torch.float16), recipe="rowwise", rowwise_scales="in_gemm") == [False]
    float32 = replace(PRESETS["tensorwise"], convert_dtypes=(torch.float32,))
    assert added(F.linear, *args(torch.float32), recipe=float32) == [False]  # gemms add none of that dtype


def test_a_number_of_rows_that_changes():
    x, weight, bias = args()
    torch._dynamo.mark_dynamic(x, 0)
    assert added(F.linear, x, weight, bias, dynamic=None) == [True]


def test_autocast_casts_biases_where_their_layers_are():
    """Merged, they are cast before the first of them."""

    def f(x, first, b, second, c):
        with torch.autocast("cpu", bf16):
            return F.linear(x, first, b).sin(), F.linear(x, second, c).cos()

    x, *layer = args(torch.float32)
    inputs = (x, *layer, *args(torch.float32)[1:])
    assert added(f, *inputs, target="h100") == [True]
    assert added(f, *inputs, merge="never") == [True, True]


def test_a_bias_that_is_computed_after_the_first_layer_is_added_to_its_slice():
    def f(x, first, b, second):
        y = F.linear(x, first, b)
        return y.sin(), F.linear(x, second, y.mean(0)).cos()

    x, weight, bias = args()
    inputs = (x, weight, bias, args()[1])
    assert added(f, *inputs, target="h100") == [False]
    assert added(f, *inputs, merge="never") == [True, True]


def test_a_layer_without_a_bias_among_those_with_adds_zeros():
    def f(x, first, b, second):
        return F.linear(x, first, b).sin(), F.linear(x, second).cos()

    x, weight, bias = args()
    other = args()[1]
    assert added(f, x, weight, bias, other, target="h100") == [True]
    merged, apart = (
        compiled(f, bias="in_gemm", target=target)(x, weight, bias, other) for target in ("h100", None)
    )
    assert all(sqnr(a, b) > 25 for a, b in zip(apart, merged, strict=True))


def test_layers_without_biases_add_nothing():
    def f(x, first, second):
        return F.linear(x, first).sin(), F.linear(x, second).cos()

    x, weight, _ = args()
    assert added(f, x, weight, args()[1], target="h100") == [False]


def test_a_bias_whose_strides_nothing_is_known_of_stays():
    def f(x, weight, columns, count):
        wide = columns.new_zeros(48, count.item()) + columns[:, :1]
        return F.linear(x, weight, wide[:, 0])

    x, weight, _ = args()
    inputs = (x, weight, randn(48, 8, grad=False), torch.tensor(5))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert added(f, *inputs) == [False]


def test_the_sum_is_rounded_once():
    """256.5 takes ten digits, bfloat16 has eight: rounded first, it is 256, and stays it.

    Neither it nor 257.25 is half-way between two numbers: the last bit of how a CPU applies scales decides nothing.
    """
    x, weight, bias = (torch.zeros(shape, dtype=bf16) for shape in ((16, 32), (48, 32), (48,)))
    x[:, 0], x[:, 1] = 256, 0.5
    weight[:, 0] = weight[:, 1] = 1
    bias[:] = 0.75
    found = [
        compiled(F.linear, bias=where)(x, weight, bias).unique().tolist() for where in ("torchao", "in_gemm")
    ]
    assert found == [[256.0], [258.0]]


IN_GEMM = {"recipe": "rowwise", "rowwise_scales": "in_gemm"}


class Projected(nn.Module):
    """Grouped-query attention with biases."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (linear(64, width) for width in (64, 32, 32))
        self.o = linear(64, 64)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 16)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("options", "executor"),
    [
        ({}, "eager"),
        (IN_GEMM, "eager"),
        pytest.param({}, "inductor", marks=(pytest.mark.slow, pytest.mark.long)),
        pytest.param(IN_GEMM, "inductor", marks=(pytest.mark.slow, pytest.mark.long)),
    ],
)
def test_no_less_precise(options, executor):
    if options and best_rowwise_scales(torch.device("cpu")) == "after":
        pytest.skip("this torch has no float8 gemm with vectors of scales for CPUs")
    torch.manual_seed(0)
    model, x, grad = Projected(), randn(2, 16, 64), randn(2, 16, 64, seed=1, grad=False)
    want = gradients(model, model, x, grad)
    inside, after = (
        gradients(model, compiled(model, bias=where, executor=executor, **options), x, grad)
        for where in ("in_gemm", "torchao")
    )
    del want["k.bias"]  # noise: softmax takes what all keys have in common for nothing
    for name, value in want.items():
        assert min(sqnr(value, inside[name]), 60) > min(sqnr(value, after[name]), 60) - 0.3, name


def test_the_gradients_of_one_layer_are_the_same_bits():
    model, x, grad = linear(32, 48), randn(16, 32), randn(16, 48, seed=1, grad=False)
    inside, after = (
        gradients(model, compiled(model, bias=where), x, grad) for where in ("in_gemm", "torchao")
    )
    assert inside.keys() == after.keys() and len(inside) == 4
    assert all(torch.equal(inside[name], after[name]) for name in inside if name != "output")


def test_a_gemm_whose_result_is_scaled_adds_no_bias():
    """Merged, the gemms are too large for the device to scale by rows; each by itself is not."""
    row = QuantSpec("e4m3", granularity="rowwise", power_of_2_scale=True)
    exact = GemmSpec(row, row)
    recipe = Recipe("exact", output=exact, grad_input=exact, grad_weight=exact)
    pipeline = Options.parse(
        {"select": "all", "target": "h100", "recipe": recipe, "bias": "in_gemm"}
    ).pipeline(debug=True, rowwise_scales=lambda device: "by_size")
    with torch.device("meta"):
        x = torch.empty(8192, 32768, dtype=bf16)
        parts = [torch.empty(1024, *shape, dtype=bf16) for shape in ((32768,), ()) for _ in range(4)]

    def f(x, *parts):
        return [F.linear(x, w, b) for w, b in zip(parts[:4], parts[4:], strict=True)]

    found = []

    def transform(graph):
        (merge,) = pipeline(graph).merges
        gemms = graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default)
        found.append((merge.merged, [(gemm.args[2].meta["val"].dim(), gemm.args[4]) for gemm in gemms]))

    joint_graphs(f, x, *parts, transform=transform)
    assert found == [(True, [(0, None)])]
