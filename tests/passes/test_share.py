"""*share*: what becomes one, and what must stay two."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import nn

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


@pytest.mark.parametrize("save", ["lean", "fast"])
def test_both_layouts_of_weights_that_stand_side_by_side_are_made_at_once_if_asked_for(save):
    layers = [randn(128, 128, seed=seed) for seed in (1, 2, 3)]
    text = graph_after(qkv, randn(64, 128), *layers, target="h100", save=save)
    assert text.count("f8fx.concat([primals_2, primals_3, primals_4], 0)") == 1
    assert ("f8fx.quantize_both(concat, " in text) == (save == "fast")


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
        Quantize(lambda device: True)(graph, choices)
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


def quantized(w, dim=None, power_of_2=False):
    """Float8 copy and scale, as the recipes make them."""
    scale = ops.scale(ops.amax(w, dim), dtype=fp8, power_of_2=power_of_2)
    return ops.quantize(w, scale, dtype=fp8, dim=dim), scale


class TestMarkerInTraining(TestCase):
    def test_forward_and_backward_read_the_same_bytes_once_transposed(self):
        def f(x, data, scale):
            return F.linear(x, ops.dequantize(data, scale, dtype=bf16))

        text = graph_after(f, randn(16, 32), torch.zeros(48, 32, dtype=fp8), torch.ones(()))
        self.assertExpectedInline(
            text,
            """\
primals_1: e4m3[48,32]
primals_2: f32[]
primals_3: bf16[16,32]
tangents_1: bf16[16,48]
amax: f32[] = f8fx.amax(primals_3, None)
scale: f32[] = f8fx.scale(amax, dtype=e4m3, power_of_2=False)
quantize: e4m3[16,32] = f8fx.quantize(primals_3, scale, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale)
reciprocal_1: f32[] = reciprocal(primals_2)
permute: e4m3[32,48] = permute(primals_1, [1, 0])
scaled_mm: bf16[16,48] = _scaled_mm(quantize, permute, reciprocal, reciprocal_1, None, None, bf16, True)
amax_1: f32[] = f8fx.amax(tangents_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e5m2, power_of_2=False)
quantize_1: e5m2[16,48] = f8fx.quantize(tangents_1, scale_1, dtype=e5m2, transpose=False, align=[1, 1])
reciprocal_2: f32[] = reciprocal(scale_1)
relayout: e4m3[32,48] = f8fx.relayout(primals_1, transpose=True, align=[1, 1])
permute_1: e4m3[48,32] = permute(relayout, [1, 0])
scaled_mm_1: bf16[16,32] = _scaled_mm(quantize_1, permute_1, reciprocal_2, reciprocal_1, None, None, bf16, False)
return [scaled_mm, None, None, scaled_mm_1]""",
        )

    def test_two_copies_each_for_its_half(self):
        def f(x, data, scale, other, scale_other):
            marked = ops.dequantize_both(
                data,
                scale,
                other,
                scale_other,
                dtype=bf16,
                dim=1,
                dim_other=0,
                power_of_2=True,
                power_of_2_other=True,
            )
            return F.linear(x, marked)

        zeros = torch.zeros(48, 32, dtype=fp8)
        text = graph_after(
            f, randn(16, 32), zeros, torch.ones(48), zeros.clone(), torch.ones(32), recipe="rowwise"
        )
        weight = [line for line in text.splitlines() if "primals_1" in line or "primals_3" in line]
        self.assertExpectedInline(
            "\n".join(weight),
            """\
primals_1: e4m3[48,32]
primals_3: e4m3[48,32]
permute: e4m3[32,48] = permute(primals_1, [1, 0])
relayout: e4m3[32,48] = f8fx.relayout(primals_3, transpose=True, align=[1, 1])""",
        )


def test_padding_is_a_copy_of_the_bytes_too():
    def f(x, data, scale):
        return F.linear(x, ops.dequantize(data, scale, dtype=bf16))

    text = graph_after(f, randn(16, 40), torch.zeros(24, 40, dtype=fp8), torch.ones(()))
    assert "f8fx.relayout(primals_1, transpose=False, align=[16, 16])" in text
    assert "f8fx.relayout(primals_1, transpose=True, align=[16, 16])" in text
    assert "dequantize" not in text


def test_scales_of_another_kind_are_another_format():
    """A power-of-two scale gives other numbers: the mark must not pass for the recipe's own format."""

    def f(x, data, scale):
        return F.linear(x, ops.dequantize(data, scale, dtype=bf16, power_of_2=True))

    text = graph_after(f, randn(16, 32), torch.zeros(48, 32, dtype=fp8), torch.ones(()))
    assert text.count("f8fx.quantize(dequantize,") == 2 and "relayout" not in text


def test_marks_of_one_tensor_are_one_tensor():
    """Each use of a gathered weight brings a mark of its own."""

    def f(x, data, scale):
        a, b = (ops.dequantize(data, scale, dtype=bf16) for _ in range(2))
        return F.linear(F.linear(x, a), b)

    text = graph_after(f, randn(16, 32), torch.zeros(32, 32, dtype=fp8), torch.ones(()))
    assert "dequantize" not in text
    assert text.count("f8fx.relayout(") == 1 and text.count("_scaled_mm(") == 4


def test_folded_marks_give_the_bits_in_training():
    from tests.helpers import compiled

    x, w, grad = (
        randn(16, 32, grad=False),
        randn(48, 32, grad=False, seed=1),
        randn(16, 48, seed=2, grad=False),
    )

    def gradients_of(fn, *args, recipe):
        leaf = x.clone().requires_grad_()
        y = compiled(fn, recipe=recipe)(leaf, *args)
        y.backward(grad)
        return y, leaf.grad

    def one(x, data, scale):
        return F.linear(x, ops.dequantize(data, scale, dtype=bf16))

    def two(x, *tensors):
        return F.linear(
            x,
            ops.dequantize_both(
                *tensors, dtype=bf16, dim=1, dim_other=0, power_of_2=True, power_of_2_other=True
            ),
        )

    copies = {
        "tensorwise": (one, quantized(w)),
        "rowwise": (two, (*quantized(w, 1, True), *quantized(w, 0, True))),
    }
    for recipe, (fn, tensors) in copies.items():
        want = gradients_of(lambda x: F.linear(x, w), recipe=recipe)
        got = gradients_of(fn, *tensors, recipe=recipe)
        assert all(map(torch.equal, got, want)), recipe


class TestReadInHighPrecision:
    """A tensor that exists in float8 only: what is not folded reads its rounding, and is told of."""

    def warnings_of(self, fn, *args, **options):
        from tests.helpers import report_of

        return report_of(fn, *args, **options).warnings

    def test_a_folded_mark_is_no_matter(self):
        def f(x, data, scale):
            return F.linear(x, ops.dequantize(data, scale, dtype=bf16))

        assert not self.warnings_of(f, randn(16, 32), torch.zeros(48, 32, dtype=fp8), torch.ones(()))

    def test_a_matmul_of_no_rows(self):
        """A rank without tokens: it reads nothing."""

        def f(x, data, scale):
            return F.linear(x, ops.dequantize(data, scale, dtype=bf16))

        assert not self.warnings_of(f, randn(0, 32), torch.zeros(48, 32, dtype=fp8), torch.ones(()))

    def test_a_matmul_that_is_not_converted(self):
        def f(x, data, scale):
            return F.linear(x, ops.dequantize(data, scale, dtype=bf16))

        args = randn(16, 32), torch.zeros(48, 32, dtype=fp8), torch.ones(())
        for options in ({"only_fqns": ["other"]}, {"recipe": "rowwise"}):
            (warning,) = self.warnings_of(f, *args, **options)
            assert warning.startswith(
                "f8fx: 1 of the tensors that were gathered in float8 are read in high precision"
            )
            assert ("are left as they are: filtered)" in warning) == ("only_fqns" in options)

    def test_a_matmul_in_another_precision(self):
        def f(x, data, scale):
            return F.linear(x, ops.dequantize(data, scale, dtype=torch.float32))

        args = randn(16, 32).float(), torch.zeros(48, 32, dtype=fp8), torch.ones(())
        (warning,) = self.warnings_of(f, *args)
        assert "are left as they are: float32 matmul)" in warning and "autocast" in warning

    def test_reasons_are_those_of_the_modules_that_read_it(self):
        class Reads(nn.Module):
            def forward(self, x, data, scale):
                return F.linear(x, ops.dequantize(data, scale, dtype=bf16))

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.gathered, self.other = Reads(), nn.Linear(48, 64)

            def forward(self, x, data, scale):
                return self.other(self.gathered(x, data, scale).float())

        args = randn(16, 32), torch.zeros(48, 32, dtype=fp8), torch.ones(())
        (warning,) = self.warnings_of(Net(), *args, filter_fqns=["gathered"])
        assert "(in gathered, of whose matmuls some are left as they are: filtered)" in warning

    def test_something_that_is_no_matmul(self):
        def f(x, data, scale):
            w = ops.dequantize(data, scale, dtype=bf16)
            return F.linear(x, w) + w.sum()

        assert self.warnings_of(f, randn(16, 32), torch.zeros(48, 32, dtype=fp8), torch.ones(()))

    def test_auto_keeps_what_has_no_high_precision_to_fall_back_to(self):
        """On a CPU "auto" converts nothing else."""

        def f(x, data, scale, w):
            return F.linear(F.linear(x, ops.dequantize(data, scale, dtype=bf16)), w)

        from tests.helpers import report_of

        args = randn(16, 32), torch.zeros(32, 32, dtype=fp8), torch.ones(()), randn(48, 32)
        report = report_of(f, *args, select="auto")
        assert [d.converted for d in report.decisions if d.n != 48 and d.k != 48 and d.m != 48] == [
            True,
            True,
        ]
        assert report.converted == 2 and report.total == 5


@pytest.mark.parametrize("batch", [1, 2])
def test_einsums_of_one_input_read_one_cast(batch):
    """Though each permutes dimensions of size 1 for itself."""
    weights = [randn(32, 4, 16, grad=False, seed=seed) for seed in (1, 2, 3)]

    def f(x):
        return [torch.einsum("bnd,dhk->bnhk", x, w) for w in weights]

    text = graph_after(f, randn(batch, 16, 32, grad=False))
    assert text.count("= f8fx.quantize(") == 4 and text.count("_scaled_mm(") == 3


def test_layers_under_autocast_read_one_cast():
    """Though each has its own cast of the float32 input."""
    first, second = (randn(48, 32, dtype=torch.float32, grad=False, seed=seed) for seed in (1, 2))

    def f(x):
        h = x.sin()
        with torch.autocast("cpu", bf16):
            return F.linear(h, first), F.linear(h, second)

    text = graph_after(f, randn(16, 32, dtype=torch.float32, grad=False))
    assert text.count("= f8fx.quantize(") == 3 and text.count("_scaled_mm(") == 2
