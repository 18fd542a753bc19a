"""*share*: what becomes one, and what must stay two."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from expecttest import TestCase

import f8fx
from f8fx import ops
from f8fx.passes import Pipeline
from tests.helpers import bf16, graph_after, joint_graphs, randn

fp8 = torch.float8_e4m3fn


def count(fn, *args, **options):
    """How often each operator of the intermediate representation stands in the graph."""
    text = graph_after(fn, *args, **options)
    return {op: text.count(f"= f8fx.{op}(") for op in ("amax", "scale", "quantize", "quantize_both")}


def qkv(x, q, k, v):
    return F.linear(x, q) + F.linear(x, k) * F.linear(x, v)


def weights(n=3, grad=True):
    return [randn(48, 32, seed=seed + 1, grad=grad) for seed in range(n)]


def test_one_amax_and_scale_for_each_tensor_forward_and_backward():
    # input, three weights, three output gradients (that of a sum is one tensor with that of its term)
    found = count(qkv, randn(16, 32), *weights())
    assert found["amax"] == found["scale"] == 1 + 3 + 3
    # input and weights twice, in forward and backward; gradients once, in both layouts
    assert found["quantize"] == 2 * (1 + 3) and found["quantize_both"] == 3


def test_three_dimensional_and_flat_uses_of_a_tensor_are_one():
    found = count(F.linear, randn(2, 8, 32), randn(48, 32))
    assert found["amax"] == 3  # input, weight, gradient


def test_rowwise_has_one_amax_for_each_direction():
    found = count(F.linear, randn(16, 32), randn(48, 32), recipe="rowwise")
    assert found["amax"] == 6 and found["quantize"] == 4 and found["quantize_both"] == 1


def test_one_dtype_is_not_another():
    """A tensor cast to e4m3 as an input and to e5m2 as a gradient has two casts."""

    def f(x, w):
        y = F.linear(x, w)
        return F.linear(y, w.t().contiguous())

    text = graph_after(f, randn(16, 32), randn(48, 32))
    assert "dtype=e5m2" in text and "dtype=e4m3" in text


def test_two_equal_matmuls_of_the_user_stay_two():
    def twice(x, w):
        return F.linear(x, w), F.linear(x, w)

    text = graph_after(twice, randn(16, 32, grad=False), randn(48, 32, grad=False))
    assert text.count("_scaled_mm(") == 2 and text.count("f8fx.quantize(") == 2


def test_users_own_equal_nodes_are_not_touched():
    def f(x, w):
        return F.linear(x.sin(), w) + F.linear(x.sin(), w)

    text = graph_after(f, randn(16, 32, grad=False), randn(48, 32, grad=False))
    assert text.count("= sin(") == 2


class TestMarker(TestCase):
    def test_a_weight_that_is_float8_already_is_not_cast_again(self):
        def f(x, data, scale):
            return F.linear(x, ops.dequantize(data, scale, dtype=bf16))

        text = graph_after(f, randn(16, 32, grad=False), torch.zeros(48, 32, dtype=fp8), torch.ones(()))
        self.assertExpectedInline(
            text,
            """\
arg0_1: e4m3[48,32]
arg1_1: f32[]
arg2_1: bf16[16,32]
amax: f32[] = f8fx.amax(arg2_1, None)
scale: f32[] = f8fx.scale(amax, dtype=e4m3, power_of_2=False)
quantize: e4m3[16,32] = f8fx.quantize(arg2_1, scale, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale)
reciprocal_1: f32[] = reciprocal(arg1_1)
permute: e4m3[32,48] = permute(arg0_1, [1, 0])
scaled_mm: bf16[16,48] = _scaled_mm(quantize, permute, reciprocal, reciprocal_1, None, None, bf16, True)
return [scaled_mm]""",
        )

    def test_another_format_is_cast(self):
        """Rowwise wanted, tensorwise marked: the marked tensor is quantized like any other."""

        def f(x, data, scale):
            return F.linear(x, ops.dequantize(data, scale, dtype=bf16))

        text = graph_after(
            f,
            randn(16, 32, grad=False),
            torch.zeros(48, 32, dtype=fp8),
            torch.ones(()),
            recipe="rowwise",
        )
        assert "quantize(dequantize" in text

    def test_another_dtype_is_cast(self):
        def f(x, data, scale):
            return F.linear(x, ops.dequantize(data, scale, dtype=bf16))

        zeros = torch.zeros(48, 32, dtype=torch.float8_e5m2)
        assert "quantize(dequantize" in graph_after(f, randn(16, 32, grad=False), zeros, torch.ones(()))


def test_folded_marker_gives_the_bits_of_its_data():
    from f8fx.kernels import cast
    from tests.helpers import compiled

    x, w = randn(16, 32, grad=False), randn(48, 32, grad=False, seed=1)
    scale = cast.scale(cast.amax(w, None), fp8, False)
    data = cast.quantize(w, scale, fp8, None, False, [1, 1])
    marked = compiled(lambda x, d, s: F.linear(x, ops.dequantize(d, s, dtype=bf16)))(x, data, scale)
    assert torch.equal(marked, compiled(F.linear)(x, w))


def test_passes_can_be_used_alone():
    """On any aten graph: find and select look, quantize rewrites, share joins."""
    from f8fx.passes import Find, Policy, Quantize, Select, Share, check

    recipe = f8fx.Recipe.named("tensorwise")
    seen = []

    def transform(graph):
        choices = Select(recipe, Policy(select="all"))(Find()(graph))
        Quantize(recipe, lambda device: True)(graph, choices)
        check(graph, "quantize")
        before = len(graph.nodes)
        Share()(graph)
        check(graph, "share")
        seen.append(before - len(graph.nodes))

    joint_graphs(F.linear, randn(16, 32), randn(48, 32), transform=transform)
    assert seen[0] > 0


def test_sharing_twice_changes_nothing():
    from f8fx.passes import Share, describe

    options = f8fx.Options.parse({"select": "all"})

    def transform(graph):
        Pipeline(options.recipe, options.policy())(graph)
        text = describe(graph)
        Share()(graph)
        assert describe(graph) == text

    joint_graphs(qkv, randn(16, 32), *weights(), transform=transform)
