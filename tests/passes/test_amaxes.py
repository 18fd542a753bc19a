"""*amaxes*: which whole-tensor amaxes come from those of the rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase

import f8fx
from f8fx.passes import Amaxes
from tests.helpers import compiled, graph_after, randn

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
