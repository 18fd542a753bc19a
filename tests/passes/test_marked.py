"""Experts' weights that are float8 already: folded into the matmuls of both halves, in either layout."""

from __future__ import annotations

import pytest
import torch
from expecttest import TestCase
from torch.fx.experimental.proxy_tensor import make_fx

from f8fx import ops
from f8fx.fsdp.formats import Format
from f8fx.passes.marked import unfolded
from tests.helpers import bf16, compiled, graph_after, randn, report_of

fp8 = torch.float8_e4m3fn
OFFSETS = torch.tensor([16, 16, 36, 48], dtype=torch.int32)
OPTIONS = {"recipe": "rowwise", "experts": "convert"}


def layer(x, weight, turned):
    return torch._grouped_mm(x, weight if turned else weight.mT, OFFSETS)


def marked_layer(turned, contracted=None):
    """By weights ``[experts, n, k]``, or ``[experts, k, n]``, of which there are two float8 copies."""
    dim, dim_other = contracted or ((1, 2) if turned else (2, 1))

    def f(x, data, scale, other, scale_other):
        mark = ops.dequantize_both(
            data,
            scale,
            other,
            scale_other,
            dtype=bf16,
            dim=dim,
            dim_other=dim_other,
            power_of_2=True,
            power_of_2_other=True,
        )
        return layer(x, mark, turned)

    return f


def quantized(w, dim):
    form = Format(fp8, dim, True)
    scale = form.scale(w.abs().amax(dim).float())
    return form.quantize(w, scale), scale


class TestGraphs(TestCase):
    def weight_of(self, turned):
        w = randn(4, 64, 32, grad=False)
        args = *quantized(w, 1 if turned else 2), *quantized(w, 2 if turned else 1)
        text = graph_after(marked_layer(turned), randn(48, 64 if turned else 32), *args, **OPTIONS)
        assert "dequantize" not in text
        return "\n".join(
            line for line in text.splitlines() if "[4," in line or "[128" in line or "[256" in line
        )

    def test_the_forwards_copy_as_it_is_the_backwards_turned(self):
        self.assertExpectedInline(
            self.weight_of(False),
            """\
primals_1: e4m3[4,64,32]
primals_2: f32[4,64]
primals_3: e4m3[4,64,32]
primals_4: f32[4,32]
view: f32[256] = view(primals_2, [256])
view_1: e4m3[256,32] = view(primals_1, [256, 32])
reciprocal_1: f32[256] = reciprocal(view)
view_2: e4m3[4,64,32] = view(view_1, [4, 64, 32])
view_3: f32[4,64] = view(reciprocal_1, [4, 64])
permute: e4m3[4,32,64] = permute(view_2, [0, 2, 1])
view_4: f32[128] = view(primals_4, [128])
permute_1: e4m3[4,32,64] = permute(primals_3, [0, 2, 1])
clone: e4m3[4,32,64] = clone(permute_1, memory_format=torch.contiguous_format)
view_5: e4m3[128,64] = view(clone, [128, 64])
reciprocal_3: f32[128] = reciprocal(view_4)
view_6: e4m3[4,32,64] = view(view_5, [4, 32, 64])
view_7: f32[4,32] = view(reciprocal_3, [4, 32])
permute_2: e4m3[4,64,32] = permute(view_6, [0, 2, 1])""",
        )

    def test_the_forwards_copy_turned_the_backwards_as_it_is(self):
        self.assertExpectedInline(
            self.weight_of(True),
            """\
primals_1: e4m3[4,64,32]
primals_2: f32[4,32]
primals_3: e4m3[4,64,32]
primals_4: f32[4,64]
view: f32[128] = view(primals_2, [128])
permute: e4m3[4,32,64] = permute(primals_1, [0, 2, 1])
clone: e4m3[4,32,64] = clone(permute, memory_format=torch.contiguous_format)
view_1: e4m3[128,64] = view(clone, [128, 64])
reciprocal_1: f32[128] = reciprocal(view)
view_2: e4m3[4,32,64] = view(view_1, [4, 32, 64])
view_3: f32[4,32] = view(reciprocal_1, [4, 32])
permute_1: e4m3[4,64,32] = permute(view_2, [0, 2, 1])
view_4: f32[256] = view(primals_4, [256])
view_5: e4m3[256,32] = view(primals_3, [256, 32])
reciprocal_3: f32[256] = reciprocal(view_4)
view_6: e4m3[4,64,32] = view(view_5, [4, 64, 32])
view_7: f32[4,64] = view(reciprocal_3, [4, 64])
permute_2: e4m3[4,32,64] = permute(view_6, [0, 2, 1])""",
        )


@pytest.mark.parametrize(
    ("turned", "executor"),
    [
        (False, "eager"),
        (True, "eager"),
        pytest.param(False, "inductor", marks=pytest.mark.long),
        pytest.param(True, "inductor", marks=pytest.mark.long),
    ],
)
def test_folded_marks_give_the_bits(turned, executor):
    w, grad = randn(4, 64, 32, grad=False, seed=1), randn(48, 32 if turned else 64, grad=False, seed=2)

    def gradients(fn, *args):
        x = randn(48, 64 if turned else 32)
        y = compiled(fn, executor=executor, **OPTIONS)(x, *args)
        y.backward(grad)
        return y, x.grad

    wanted = gradients(lambda x, w: layer(x, w, turned), w)
    copies = *quantized(w, 1 if turned else 2), *quantized(w, 2 if turned else 1)
    assert all(map(torch.equal, wanted, gradients(marked_layer(turned), *copies)))


@pytest.mark.parametrize("options", [{"experts": "leave"}, {"recipe": "tensorwise"}, {}])
def test_what_is_not_folded_is_said(options):
    """A layer that is left, and copies of other formats than the layer's: dimensions that it does not contract."""
    w = randn(4, 32, 32, grad=False)
    contracted = None if options else (0, 0)
    args = (*quantized(w, 0), *quantized(w, 0)) if contracted else (*quantized(w, 2), *quantized(w, 1))
    report = report_of(marked_layer(False, contracted), randn(48, 32), *args, **OPTIONS | options)
    assert "read in high precision" in report.warnings[0]


def test_readers_that_nothing_reads_are_not_named():
    """Views of what was folded stay behind."""
    data, scale = quantized(randn(4, 32, 32, grad=False), 2)
    graph = make_fx(lambda x, data, scale: x * ops.dequantize(data, scale, dtype=bf16, dim=2))(
        randn(4, 32, 32, grad=False), data, scale
    ).graph
    (mark,) = graph.find_nodes(op="call_function", target=ops.dequantize)
    (product,) = mark.users
    with graph.inserting_after(mark):
        view = graph.call_function(torch.ops.aten.mT.default, (mark,))
    for node, name in ((view, "layer"), (product, "mask")):
        node.meta["nn_module_stack"] = {"": (f"L['self'].{name}", torch.nn.Module)}
    assert unfolded(graph) == ["mask"]
