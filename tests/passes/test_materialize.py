"""*materialize*: which sums are written once."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase

import f8fx
from f8fx import ops
from f8fx.passes import Materialize
from f8fx.recipe import PRESETS
from tests.helpers import compiled, graph_after, randn


def residual(x, w):
    h = x + F.linear(x, w)
    return h + F.rms_norm(h, (32,))


def args(grad=False):
    return randn(16, 32, grad=grad), randn(32, 32, grad=grad, seed=1)


def marked(fn, *inputs, **options):
    return graph_after(fn, *inputs, **options).count("= f8fx.materialize(")


class TestGraph(TestCase):
    def test_a_residual_sum_with_several_readers(self):
        self.assertExpectedInline(
            graph_after(residual, *args()),
            """\
arg0_1: bf16[16,32]
arg1_1: bf16[32,32]
amax: f32[] = f8fx.amax(arg0_1, None)
scale: f32[] = f8fx.scale(amax, dtype=e4m3, power_of_2=False)
quantize: e4m3[16,32] = f8fx.quantize(arg0_1, scale, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale)
amax_1: f32[] = f8fx.amax(arg1_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[32,32] = f8fx.quantize(arg1_1, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal_1: f32[] = reciprocal(scale_1)
permute: e4m3[32,32] = permute(quantize_1, [1, 0])
scaled_mm: bf16[16,32] = _scaled_mm(quantize, permute, reciprocal, reciprocal_1, None, None, bf16, True)
add: bf16[16,32] = add(arg0_1, scaled_mm)
materialize: bf16[16,32] = f8fx.materialize(add)
convert_element_type: f32[16,32] = prims.convert_element_type(materialize, f32)
pow: f32[16,32] = pow(convert_element_type, 2)
mean: f32[16,1] = mean(pow, [1], True)
add_1: f32[16,1] = add(mean, 1.1920928955078125e-07)
rsqrt: f32[16,1] = rsqrt(add_1)
mul: f32[16,32] = mul(convert_element_type, rsqrt)
convert_element_type_1: bf16[16,32] = prims.convert_element_type(mul, bf16)
add_2: bf16[16,32] = add(materialize, convert_element_type_1)
return [add_2]""",
        )


def test_the_backward_reads_it_too():
    assert marked(residual, *args(grad=True)) == 1


def test_scales_behind_the_gemm_are_part_of_it():
    """As exact rowwise gemms have them: a tensor as large as the result, which nothing else reads."""
    rowwise = f8fx.Recipe.named("rowwise")
    exact = replace(rowwise, output=replace(rowwise.output, use_fast_accum=False))
    options = {"recipe": exact, "rowwise_scales": "torchao"}
    assert "f32[16,32] = mul(unsqueeze, unsqueeze_1)" in graph_after(residual, *args(), **options)
    assert marked(residual, *args(), **options) == 1


def test_scales_of_rows_by_the_one_of_the_other_operand_are_part_of_it():
    hybrid = f8fx.Recipe.named("rowwise_with_gw_hp")
    exact = replace(hybrid, output=replace(hybrid.grad_input, use_fast_accum=False))
    options = {"recipe": exact, "rowwise_scales": "torchao"}
    assert "f32[16,1] = unsqueeze(" in graph_after(residual, *args(), **options)
    assert marked(residual, *args(), **options) == 1


def test_a_bias_is_part_of_the_matmul():
    def f(x, w, b):
        h = x + F.linear(x, w, b)
        return h.sin() + h.cos()

    assert marked(f, *args(), randn(32, grad=False)) == 1


def test_a_matmul_of_experts_is_one_too():
    def f(x, w):
        h = x + torch._grouped_mm(x, w.mT, torch.tensor([6, 16], dtype=torch.int32))
        return h.sin() + F.rms_norm(h, (32,))

    inputs = randn(16, 32, grad=False), randn(2, 32, 32, grad=False)
    assert marked(f, *inputs, recipe="rowwise", experts="convert") == 1


def grouped(x, w):
    """A layer of experts whose gradient is computed element by element."""
    return torch._grouped_mm(x, w.mT, torch.tensor([6, 16], dtype=torch.int32)).sin()


def test_what_the_gradient_of_experts_weights_reads():
    """Beside the cast of the same gradient; it stays in high precision, and reads memory."""
    inputs = randn(16, 32), randn(2, 32, 32, seed=1)
    text = graph_after(grouped, *inputs, recipe="rowwise", experts="convert")
    (marked,) = (line for line in text.splitlines() if "f8fx.materialize(" in line)
    name, _, source = marked.partition(":")
    assert source.startswith(" bf16[16,32] = f8fx.materialize(mul")
    assert f"f8fx.amax({name}, 1)" in text and re.search(rf"permute\({name}, ", text)


def test_gradients_of_experts_that_nothing_casts():
    inputs = randn(16, 32), randn(2, 32, 32, seed=1)
    assert marked(grouped, *inputs, recipe="rowwise", experts="leave") == 0


def test_what_a_layer_of_experts_reads_is_no_gradient():
    def f(x, w):
        return torch._grouped_mm(x.sin(), w.mT, torch.tensor([6, 16], dtype=torch.int32))

    inputs = randn(16, 32), randn(2, 32, 32, seed=1)
    assert marked(f, *inputs, recipe="rowwise", experts="convert") == 0


def test_a_size_that_appears_in_a_tensor_is_defined_by_it_alone(monkeypatch):
    """As by the rows that a mask chooses; Inductor asks for one definition."""
    materialize, found = Materialize.__call__, []

    def watched(self, graph):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
            node.meta["unbacked_bindings"] = {}
        materialize(self, graph)
        written = graph.find_nodes(op="call_function", target=ops.materialize)
        found.extend("unbacked_bindings" in node.meta for node in written)

    monkeypatch.setattr(Materialize, "__call__", watched)
    graph_after(residual, *args())
    assert found == [False]


def test_a_gradient_of_experts_that_is_in_memory():
    def f(x, w):
        return torch._grouped_mm(x, w.mT, torch.tensor([6, 16], dtype=torch.int32))

    inputs = randn(16, 32), randn(2, 32, 32, seed=1)
    assert marked(f, *inputs, recipe="rowwise", experts="convert") == 0


def test_dropout_is_no_other_matmul():
    def f(x, w):
        h = x + F.dropout(F.linear(x, w), 0.5)
        return h.sin() + h.cos()

    assert marked(f, *args(grad=True)) == 1


def heads(x, w, scale):
    """A projection whose parts are normalized, as those of q and k."""
    h = F.linear(x, w).view(-1, 2, 16)
    return F.rms_norm(h, (16,), scale).sin()


def test_the_gradient_of_a_norm_of_parts():
    """The norm's rows have 16 elements, the matmul's 32: no kernel has the sums, and whole rows at hand."""
    text = graph_after(heads, *args(grad=True), randn(16, seed=2))
    (marked,) = (line for line in text.splitlines() if "f8fx.materialize(" in line)
    name, _, source = marked.partition(":")
    assert source.startswith(" bf16[16,2,16] = f8fx.materialize(convert_element_type")
    assert re.search(rf"view_\d+: bf16\[16,32\] = view\({name}, \[16, 32\]\)", text)


@pytest.mark.parametrize("recipe", PRESETS)
def test_the_gradients_of_norms_of_merged_layers(recipe):
    def f(x, q, k, v):
        q, k = (F.rms_norm(F.linear(x, w).view(-1, 2, 16), (16,)) for w in (q, k))
        return q * k, F.linear(x, v).exp()

    inputs = randn(16, 32), *(randn(32, 32, seed=seed) for seed in (1, 2, 3))
    before = marked(f, *inputs, recipe=recipe, only_fqns=["none"])
    assert before == 0
    text = graph_after(f, *inputs, recipe=recipe)
    assert len(re.findall(r"bf16\[16,2,16\] = f8fx.materialize\(", text)) == 2


def halves_turned(x, w):
    """A projection to two heads, each of whose halves change places, as RoPE's do."""
    first, second = F.linear(x, w).view(-1, 2, 16).chunk(2, -1)
    return torch.cat((second, -first), -1).sin()


def halves_padded(x, w):
    """The same, of which autograd fills each half's gradient up with zeros."""
    y = F.linear(x, w).view(-1, 2, 16)
    return y.cos() * torch.cat((-y[..., 8:], y[..., :8]), -1)


@pytest.mark.parametrize("function", [halves_turned, halves_padded])
def test_a_gradient_whose_elements_are_moved(function):
    """It is read by rows and by columns, in order where it is in memory."""
    text = graph_after(function, *args(grad=True), recipe="rowwise")
    (line,) = (line for line in text.splitlines() if "f8fx.materialize(" in line)
    name, _, made = line.partition(":")
    assert made.startswith(" bf16[16,32] = f8fx.materialize(") and made.endswith(", whole=True)")
    for dim in (0, 1):
        assert f"f8fx.amax({name}, {dim})" in text
    assert f"f8fx.quantize_both({name}, " in text


def test_gradients_that_are_moved_beside_one_that_is_not():
    def f(x, q, k, v):
        return halves_turned(x, q), halves_turned(x, k), F.linear(x, v)

    weights = (randn(32, 32, seed=seed) for seed in (1, 2, 3))
    text = graph_after(f, randn(16, 32), *weights, recipe="rowwise", target="h100")
    (line,) = (line for line in text.splitlines() if ", whole=True)" in line)
    assert " bf16[16,96] = f8fx.materialize(concat" in line


def test_a_gradient_that_is_moved_beside_one_that_is_computed():
    """The other part's amaxes and casts read what it is computed from."""

    def f(x, q, k, v):
        y = F.linear(x, v)
        return halves_turned(x, q), halves_turned(x, k), y.sigmoid() * y

    weights = (randn(32, 32, seed=seed) for seed in (1, 2, 3))
    text = graph_after(f, randn(16, 32), *weights, recipe="rowwise", target="h100")
    assert "concat_1: bf16[16,96] = f8fx.concat(" in text and "whole=True" not in text
    assert len(re.findall(r"bf16\[16,32\] = f8fx.materialize\(view", text)) == 2


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp"])
def test_a_gradient_whose_elements_are_moved_and_that_no_columns_scale(recipe):
    assert marked(halves_turned, *args(grad=True), recipe=recipe) == 0


def test_a_gradient_that_is_computed_where_it_lies():
    assert marked(lambda x, w: F.linear(x, w).view(-1, 2, 16).sin(), *args(grad=True), recipe="rowwise") == 0


def test_an_input_whose_elements_are_moved():
    """Written, it would be saved for the backward."""

    def f(x, w):
        first, second = x.chunk(2, -1)
        return F.linear(torch.cat((second, -first), -1).sin(), w)

    assert marked(f, *args(grad=True), recipe="rowwise", save="fast") == 0


@pytest.mark.parametrize("function", [halves_turned, halves_padded])
def test_gradients_that_are_moved_are_the_same(function, monkeypatch):
    x, w = args(grad=True)

    def gradients():
        return torch.autograd.grad(compiled(function, recipe="rowwise")(x, w).sum(), (x, w))

    written = gradients()
    monkeypatch.setattr(Materialize, "__call__", lambda self, graph: None)
    assert all(map(torch.equal, gradients(), written))


# -- what stays


@pytest.mark.parametrize("norm", [F.rms_norm, F.layer_norm])
def test_the_gradient_of_a_norm_of_the_matmuls_rows(norm):
    """One kernel takes the sums, the gradient and its amax; with a part of one row to a row, too."""
    assert marked(lambda x, w: norm(F.linear(x, w), (32,)).sin(), *args(grad=True)) == 0
    assert marked(lambda x, w: norm(F.linear(x, w).view(4, 4, 32), (32,)).sin(), *args(grad=True)) == 0


def test_the_gradient_of_a_norm_of_parts_that_nothing_casts():
    def f(x, w):
        return F.rms_norm(x.view(-1, 2, 16), (16,)).sin(), F.linear(x.detach(), w)

    assert marked(f, *args(grad=True)) == 0


def test_a_gradient_of_parts_without_sums():
    assert marked(lambda x, w: F.linear(x, w).view(-1, 2, 16).sin().mul(2), *args(grad=True)) == 0


def test_a_norm_of_parts_in_the_forward():
    """What it is made of is read for the cast as well as a copy of the result would be."""
    assert marked(lambda x, w: F.linear(F.rms_norm(x.view(-1, 2, 16), (16,)).view(-1, 32), w), *args()) == 0


def test_one_reader():
    assert marked(lambda x, w: (x + F.linear(x, w)).sin(), *args()) == 0


def test_a_matmul_whose_result_is_used_elsewhere():
    """It may be saved for that other use; saving the sum as well would be more."""

    def f(x, w):
        y = F.linear(x, w)
        h = x + y
        return h.sin() + h.cos() + y.exp()

    assert marked(f, *args()) == 0


def test_no_matmul():
    def f(x, w):
        h = x + x.sin()
        return F.linear(h.cos() * h.exp(), w)

    assert marked(f, *args()) == 0


def test_broadcasting():
    def f(x, w, b):
        h = F.linear(x, w) + b
        return h.sin() + h.cos()

    assert marked(f, *args(), randn(32, grad=False)) == 0


def test_nothing_converted_nothing_marked():
    assert marked(residual, *args(), only_fqns=["nothing"]) == 0


def test_results_are_the_same(monkeypatch):
    x, w = args()
    with torch.no_grad():
        written = compiled(residual)(x, w)
        monkeypatch.setattr(Materialize, "__call__", lambda self, graph: None)
        assert marked(residual, x, w) == 0
        assert torch.equal(compiled(residual)(x, w), written)
