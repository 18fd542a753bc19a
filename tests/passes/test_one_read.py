"""*one_read*: which tensors have their rows cast and their columns' amaxes taken in one read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase

import f8fx
from f8fx import ops
from tests.helpers import joint_graphs, randn


def args(rows=16):
    return randn(rows, 32), randn(48, 32, seed=1)


def graph_with(fn, *inputs, dynamic=False, **options):
    """Text of the joint graph, as if the CPU were a device that the kernel is for."""
    from f8fx.passes import describe

    texts = []
    parsed = f8fx.Options.parse({"select": "all", "recipe": "rowwise", **options})
    pipeline = parsed.pipeline(
        debug=True, rowwise_scales=lambda device: "torchao", kernels=lambda device: parsed.kernels == "triton"
    )

    def transform(graph):
        pipeline(graph)
        graph.eliminate_dead_code()
        texts.append(describe(graph))

    joint_graphs(fn, *inputs, transform=transform, dynamic=dynamic)
    return texts[0]


def taken(fn, *inputs, **options):
    """The tensors that the kernel is for."""
    text = graph_with(fn, *inputs, kernels="triton", **options)
    return [
        line.split("quantize_rowwise([")[1].split("]")[0]
        for line in text.splitlines()
        if "quantize_rowwise([" in line
    ]


class TestGraph(TestCase):
    def test_an_output_gradient(self):
        text = graph_with(F.linear, *args(), kernels="triton")
        lines = [line for line in text.splitlines() if "tangents" in line or "quantize_rowwise" in line]
        self.assertExpectedInline(
            "\n".join(lines),
            """\
tangents_1: bf16[16,48]
quantize_rowwise: (e4m3[16,48], f32[16], e4m3[48,16], f32[48]) = f8fx.quantize_rowwise([tangents_1], dtype=e4m3, power_of_2=True, power_of_2_t=True, align_t=[1, 1])
getitem: e4m3[16,48] = getitem(quantize_rowwise, 0)
getitem_1: f32[16] = getitem(quantize_rowwise, 1)
getitem_2: e4m3[48,16] = getitem(quantize_rowwise, 2)
getitem_3: f32[48] = getitem(quantize_rowwise, 3)""",
        )


def test_it_is_asked_for():
    assert "quantize_rowwise" not in graph_with(F.linear, *args())


def test_weights_that_are_cast_at_once():
    assert taken(F.linear, *args()) == ["tangents_1"]
    assert taken(F.linear, *args(), save="fast") == ["primals_1", "primals_2", "tangents_1"]


def test_merged_weights_are_one_launch():
    def gate_up(x, gate, up):
        h = x.sin()
        return F.silu(F.linear(h, gate)) * F.linear(h, up)

    inputs = randn(4096, 1024), randn(1024, 1024, seed=1), randn(1024, 1024, seed=2)
    assert taken(gate_up, *inputs, save="fast", target="h100") == ["primals_2, primals_3"]
    assert taken(gate_up, *inputs, save="fast", merge="never") == ["primals_2", "primals_3"]


def test_a_gradient_that_its_casts_compute_stays():
    """Written to memory for the kernel it would cost more than the read it saves."""

    def f(x, w):
        return F.linear(x, w).sin()

    assert taken(f, *args()) == []


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp"])
def test_other_recipes_stay(recipe):
    assert taken(F.linear, *args(), recipe=recipe) == []


def test_sizes_that_are_not_known_stay():
    assert taken(F.linear, *args(), dynamic=True) == []


def test_padded_row_copies_stay():
    assert taken(F.linear, randn(16, 40), randn(24, 40, seed=1)) == []


def test_results_are_the_same_bits():
    x, _ = args(64)
    y = randn(64, 32, grad=False, seed=3)
    data, scale, data_t, scale_t = ops.quantize_rowwise(
        [x.detach(), y], dtype=torch.float8_e4m3fn, power_of_2=True
    )
    both = torch.cat([x.detach(), y])
    rows = ops.scale(ops.amax(both, 1), dtype=torch.float8_e4m3fn, power_of_2=True)
    columns = ops.scale(ops.amax(both, 0), dtype=torch.float8_e4m3fn)
    want = ops.quantize_both(both, rows, columns, dtype=torch.float8_e4m3fn, dim=1, dim_t=0)
    for got, expected in zip((data, data_t), want, strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale, rows) and torch.equal(scale_t, columns)
