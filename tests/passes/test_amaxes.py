"""*amaxes*: which whole-tensor amaxes come from those of the rows, or of the columns."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase

import f8fx
from f8fx.passes import Amaxes
from f8fx.passes import amaxes as amaxes_pass
from f8fx.torch_private.versions import release
from tests.helpers import compiled, graph_after, randn
from tests.long import seldom

MIXED = f8fx.Recipe(
    "rows, then the whole",
    output=f8fx.GemmSpec(f8fx.QuantSpec(granularity="rowwise"), f8fx.QuantSpec(granularity="rowwise")),
    grad_input=f8fx.GemmSpec(),
    grad_weight=f8fx.GemmSpec(),
)
WHOLE_FIRST = f8fx.Recipe(
    "the whole, then rows",
    output=f8fx.GemmSpec(),
    grad_input=f8fx.GemmSpec(f8fx.QuantSpec(granularity="rowwise"), f8fx.QuantSpec(granularity="rowwise")),
    grad_weight=f8fx.GemmSpec(),
)


def args():
    return randn(16, 32), randn(48, 32, seed=1)


def amaxes(fn, *inputs, **options):
    """The lines of the graph that take an amax."""
    return [line for line in graph_after(fn, *inputs, **options).splitlines() if "f8fx.amax(" in line]


class TestGraph(TestCase):
    def test_a_weight_scaled_by_rows_and_as_a_whole_is_read_once(self):
        text = graph_after(F.linear, *args(), recipe="rowwise_with_gw_hp")
        lines = [line for line in text.splitlines() if "amax" in line]
        self.assertExpectedInline(
            "\n".join(lines),
            """\
amax: f32[16] = f8fx.amax(primals_1, 1)
scale: f32[16] = f8fx.scale(amax, dtype=e4m3, power_of_2=True)
amax_1: f32[48] = f8fx.amax(primals_2, 1)
scale_1: f32[48] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=True)
amax_2: f32[16] = f8fx.amax(tangents_1, 1)
scale_2: f32[16] = f8fx.scale(amax_2, dtype=e4m3, power_of_2=True)
unsqueeze: f32[1,48] = unsqueeze(amax_1, 0)
amax_3: f32[] = f8fx.amax(unsqueeze, None)
scale_3: f32[] = f8fx.scale(amax_3, dtype=e4m3, power_of_2=True)""",
        )

    def test_a_gradient_that_is_summed_for_a_bias_is_read_once(self):
        """Its columns' amaxes are taken where its columns are summed."""
        text = graph_after(lambda *xs: activated(*xs, F.relu), *inputs_of_an_activation())
        backward = text[text.rindex("amax", 0, text.index("f8fx.amax(tangents_1")) :].splitlines()
        self.assertExpectedInline(
            "\n".join(line for line in backward if "amax" in line or " sum(" in line),
            """\
amax_4: f32[] = f8fx.amax(tangents_1, None)
scale_4: f32[] = f8fx.scale(amax_4, dtype=e5m2, power_of_2=False)
amax_5: f32[16384] = f8fx.amax(rounded_2, 0)
unsqueeze: f32[1,16384] = unsqueeze(amax_5, 0)
amax_6: f32[] = f8fx.amax(unsqueeze, None)
scale_5: f32[] = f8fx.scale(amax_6, dtype=e5m2, power_of_2=False)
sum: bf16[1,16384] = sum(rounded_2, [0], True)""",
        )


def empty(*shape, grad=True):
    """A tensor of a size that matters; the graph is looked at, not run."""
    return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=grad)


def inputs_of_an_activation(tokens=2048, hidden=16384, trained=True):
    return empty(tokens, 32), empty(hidden, 32), empty(hidden, grad=trained), empty(32, hidden)


def activated(x, first, bias, second, function=F.silu):
    return F.linear(function(F.linear(x, first, bias)), second)


def by_columns(fn, *inputs, **options):
    """How many whole amaxes come from those of the columns."""
    return sum(line.endswith(", 0)") for line in amaxes(fn, *inputs, **options))


def test_what_is_summed_and_what_is_not():
    x, *others = inputs_of_an_activation()
    for shape in ((2048, 32), (1, 2048, 32), (2, 1024, 32)):
        assert by_columns(activated, x.detach().view(shape).requires_grad_(), *others) == 1
    assert by_columns(activated, *inputs_of_an_activation(trained=False)) == 0
    # Inductor has a kernel for the rows' amaxes and the sums of a tensor that is tall, and torch 2.15 of others
    assert by_columns(activated, *inputs_of_an_activation(8192, 4096)) == 0
    assert by_columns(activated, *inputs_of_an_activation(4096, 4096)) == (release() < (2, 15))
    with torch._inductor.config.patch({"triton.mix_order_reduction": False}):
        assert by_columns(activated, *inputs_of_an_activation(8192, 4096)) == 1
    # and the cache keeps a small one
    assert by_columns(activated, *inputs_of_an_activation(512, 16384)) == 0
    assert by_columns(activated, *inputs_of_an_activation(), dynamic=True) == 0


def test_a_gradient_in_memory_that_is_summed():
    inputs = empty(2048, 32), empty(16384, 32), empty(16384)
    assert by_columns(F.linear, *inputs) == 1
    assert by_columns(F.linear, *inputs[:2]) == 0


def test_gradients_side_by_side_that_are_summed():
    """Of the two layers of a gate, which are merged."""

    def gates(x, gate, up, down, *biases):
        return F.linear(F.silu(F.linear(x, gate, biases[0])) * F.linear(x, up, biases[1]), down)

    wide = [empty(16384, 4096) for _ in range(2)], empty(4096, 16384), *(empty(16384) for _ in range(2))
    found = amaxes(gates, empty(2048, 4096), *wide[0], *wide[1:], target="h100")
    assert any("amax(concat" in line and line.endswith(", 0)") for line in found), found


def test_a_norm_s_gradient_is_left_alone():
    """Whole rows are in the kernel that computes it, and their amaxes ride there."""

    def normalized(x, first, bias, second):
        return F.linear(F.layer_norm(F.linear(x, first, bias), [16384]), second)

    assert by_columns(normalized, *inputs_of_an_activation()) == 0


def test_sums_of_the_forward_are_left_alone():
    """The amax is of the backward, and nothing of the tensor is read with it."""

    def f(x, first, second):
        h = F.silu(F.linear(x, first))
        return F.linear(h, second), h.sum(0)

    assert by_columns(f, empty(2048, 32), empty(16384, 32), empty(32, 16384)) == 0


@pytest.mark.parametrize("poison", [None, float("nan"), *seldom(float("inf"), 3e38)])
def test_an_amax_that_comes_from_the_columns_is_the_same_bits(poison, monkeypatch):
    monkeypatch.setattr(amaxes_pass, "CACHED", 0)

    def inputs():
        tensors = randn(16, 32), randn(48, 32, seed=1), randn(48, seed=2), randn(32, 48, seed=3)
        if poison is not None:
            tensors[0].data[3, 5] = poison
        return tensors

    def run():
        tensors = inputs()
        y = compiled(activated)(*tensors)
        y.backward(randn(16, 32, grad=False, seed=4))
        return y, *(x.grad for x in tensors)

    assert by_columns(activated, *inputs()) == 1
    derived = run()
    monkeypatch.setattr(Amaxes, "__call__", lambda self, graph: None)
    assert by_columns(activated, *inputs()) == 0
    for want, got in zip(run(), derived, strict=True):
        assert torch.equal(want.view(torch.int16), got.view(torch.int16))


def test_results_are_the_same_bits(monkeypatch):
    grad = randn(16, 48, grad=False, seed=2)

    def run(poison=None):
        x, w = args()
        if poison is not None:
            w.data[3, 5] = poison
        y = compiled(F.linear, recipe="rowwise_with_gw_hp")(x, w)
        y.backward(grad)
        return y, x.grad, w.grad

    values = (None, float("nan"), float("inf"), 3e38)
    derived = [run(value) for value in values]
    monkeypatch.setattr(Amaxes, "__call__", lambda self, graph: None)
    assert not any("unsqueeze" in line for line in amaxes(F.linear, *args(), recipe="rowwise_with_gw_hp"))
    for value, got in zip(values, derived, strict=True):
        for a, b in zip(run(value), got, strict=True):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_one_granularity_for_each_tensor_is_left_alone(recipe):
    before = amaxes(F.linear, *args(), recipe=recipe)
    assert before and not any("unsqueeze" in line for line in before)


def test_rows_of_the_backward_are_not_made_in_the_forward():
    """They would have to be kept for it."""
    text = graph_after(F.linear, *args(), recipe=WHOLE_FIRST)
    assert "f8fx.amax(primals_2, None)" in text and "f8fx.amax(primals_2, 0)" in text


def test_both_in_the_backward_in_either_order():
    """A gradient scaled as a whole for one matmul, and by its columns for a later one."""
    recipe = f8fx.Recipe(
        "gradient both ways",
        output=f8fx.GemmSpec(),
        grad_input=f8fx.GemmSpec(),
        grad_weight=f8fx.GemmSpec(
            f8fx.QuantSpec(granularity="rowwise"), f8fx.QuantSpec(granularity="rowwise")
        ),
    )
    text = graph_after(F.linear, *args(), recipe=recipe)
    lines = text.splitlines()
    column = next(i for i, line in enumerate(lines) if "f8fx.amax(tangents_1, 0)" in line)
    whole = next(i for i, line in enumerate(lines) if "f8fx.amax(unsqueeze" in line)
    assert column < whole and "f8fx.amax(tangents_1, None)" not in text


def test_a_tensor_without_elements():
    w = randn(0, 32)
    y = compiled(F.linear, recipe="rowwise_with_gw_hp")(randn(16, 32), w)
    assert y.shape == (16, 0)


def test_rows_in_the_forward_and_the_whole_in_the_backward(monkeypatch):
    def run():
        x, w = args()
        y = compiled(F.linear, recipe=MIXED)(x, w)
        y.backward(randn(16, 48, grad=False, seed=2))
        return y, x.grad, w.grad

    assert sum("amax(unsqueeze" in line for line in amaxes(F.linear, *args(), recipe=MIXED)) == 2
    derived = run()
    monkeypatch.setattr(Amaxes, "__call__", lambda self, graph: None)
    for want, got in zip(run(), derived, strict=True):
        assert torch.equal(want, got)
