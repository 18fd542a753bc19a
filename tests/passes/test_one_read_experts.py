"""*one_read* of experts' weights: rows of all matrices cast, and amaxes of the columns of each taken, in one read."""

from __future__ import annotations

import pytest
import torch
from expecttest import TestCase
from torch.utils.checkpoint import checkpoint

import f8fx
from f8fx import ops
from f8fx.passes import describe
from tests.helpers import joint_graphs, randn
from tests.passes.test_one_read import graph_with, run_with, taken

EXPERTS = {"experts": "convert"}


def ends(*rows):
    return torch.tensor(rows).cumsum(0).to(torch.int32)


def layer(x, w, offsets):
    """With the weights of each expert as ``nn.Linear`` has them."""
    return torch._grouped_mm(x, w.mT, offsets)


def turned_layer(x, w, offsets):
    return torch._grouped_mm(x, w, offsets)


def args(turned=False):
    w = randn(3, 32, 64, seed=1) if turned else randn(3, 64, 32, seed=1)
    return randn(48, 32), w, ends(16, 0, 32)


class TestGraph(TestCase):
    maxDiff = None

    def test_experts(self):
        """The gradient of the output, which is in memory, has rows alone: its columns are summed expert by expert."""
        self.assertExpectedInline(
            graph_with(layer, *args(), **EXPERTS),
            """\
primals_1: bf16[3,64,32]
primals_2: bf16[48,32]
primals_3: i32[3]
tangents_1: bf16[48,64]
amax: f32[48] = f8fx.amax(primals_2, 1)
scale: f32[48] = f8fx.scale(amax, dtype=e4m3, power_of_2=True)
quantize: e4m3[48,32] = f8fx.quantize(primals_2, scale, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal: f32[48] = reciprocal(scale)
view: bf16[192,32] = view(primals_1, [192, 32])
quantize_rowwise: (e4m3[192,32], f32[192], f32[96]) = f8fx.quantize_rowwise([view], [1], dtype=e4m3, power_of_2=True, matrices=3)
getitem: e4m3[192,32] = getitem(quantize_rowwise, 0)
getitem_1: f32[192] = getitem(quantize_rowwise, 1)
getitem_2: f32[96] = getitem(quantize_rowwise, 2)
view_1: e4m3[3,64,32] = view(getitem, [3, 64, 32])
view_2: f32[3,64] = view(getitem_1, [3, 64])
permute: e4m3[3,32,64] = permute(view_1, [0, 2, 1])
grouped_mm: bf16[48,64] = f8fx.grouped_mm(quantize, permute, reciprocal, view_2, primals_3, dtype=bf16)
permute_1: bf16[64,48] = permute(tangents_1, [1, 0])
_grouped_mm: bf16[3,64,32] = _grouped_mm(permute_1, primals_2, primals_3)
permute_2: bf16[3,32,64] = permute(_grouped_mm, [0, 2, 1])
amax_1: f32[48] = f8fx.amax(tangents_1, 1)
scale_1: f32[48] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=True)
quantize_1: e4m3[48,64] = f8fx.quantize(tangents_1, scale_1, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_1: f32[48] = reciprocal(scale_1)
permute_3: bf16[3,32,64] = permute(primals_1, [0, 2, 1])
clone: bf16[3,32,64] = clone(permute_3, memory_format=torch.contiguous_format)
view_3: bf16[96,64] = view(clone, [96, 64])
scale_2: f32[96] = f8fx.scale(getitem_2, dtype=e4m3, power_of_2=True)
quantize_2: e4m3[96,64] = f8fx.quantize(view_3, scale_2, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_2: f32[96] = reciprocal(scale_2)
view_4: e4m3[3,32,64] = view(quantize_2, [3, 32, 64])
view_5: f32[3,32] = view(reciprocal_2, [3, 32])
permute_4: e4m3[3,64,32] = permute(view_4, [0, 2, 1])
grouped_mm_1: bf16[48,32] = f8fx.grouped_mm(quantize_1, permute_4, reciprocal_1, view_5, primals_3, dtype=bf16)
permute_5: bf16[3,64,32] = permute(permute_2, [0, 2, 1])
return [grouped_mm, permute_5, grouped_mm_1, None]""",
        )


def test_gradients_of_weights_take_the_rest_as_they_do():
    assert taken(layer, *args(), experts="with_grad_weight") == ["view"]


def test_a_copy_that_only_the_backward_reads_stays_there():
    """Matrices that lie the other way round: the forward reads the columns' copies."""
    assert taken(turned_layer, *args(turned=True), **EXPERTS) == []


def test_experts_that_are_left_stay():
    assert taken(layer, *args(), experts="leave") == []


def test_frozen_weights_are_read_once_too():
    """Their columns' scales are those of the gradient of the input."""
    x, w, offsets = args()
    assert taken(layer, x, w.detach(), offsets, **EXPERTS) == ["view"]


def test_inference_needs_no_columns():
    x, w, offsets = args()
    assert taken(layer, x.detach(), w.detach(), offsets, **EXPERTS) == []


def test_first_layers_need_no_columns():
    """Nobody asks for the gradient of their input."""
    x, w, offsets = args()
    assert taken(layer, x.detach(), w, offsets, **EXPERTS) == []


def test_checkpointed_weights_stay():
    def f(x, w, offsets):
        return checkpoint(lambda *given: layer(*given).sin(), x.sin(), w, offsets, use_reentrant=False)

    assert taken(f, *args(), **EXPERTS) == []


@pytest.mark.parametrize("number", [1, 3])
def test_columns_that_are_scaled_before_rows(number):
    """Both in the forward, of one weight for two layers."""

    def f(x, w, offsets):
        return layer(turned_layer(x, w, offsets).tanh(), w, offsets)

    x, w = randn(48, 32), randn(number, 32, 32, seed=1)
    text = graph_with(f, x, w, ends(*[48 // number] * number), **EXPERTS)
    (line,) = [line for line in text.splitlines() if "quantize_rowwise(" in line]
    assert f"bf16[{number * 32},32] = view(primals_" in text[: text.index(line)]
    assert f"f32[{number * 32}]) = f8fx.quantize_rowwise([view" in line


def test_each_weight_is_a_launch_of_its_own():
    def gate_up(x, gate, up, offsets):
        return layer(x, gate, offsets) * layer(x, up, offsets)

    x, gate, offsets = args()
    up = randn(3, 64, 32, seed=2)
    found = taken(gate_up, x, gate, up, offsets, **EXPERTS)
    assert len(found) == 2 and all(tensor.startswith("view") for tensor in found)


def test_one_scale_is_kept_for_each_column():
    """And nothing else, beside what is kept without float8."""
    kept = {}

    def keep(name, pipeline):
        joint_graphs(
            lambda x, w, offsets: layer(x.sin(), w, offsets),
            *args(),
            transform=pipeline,
            on_partition=lambda forward, _: kept.update({name: _outputs(forward)}),
        )

    parsed = f8fx.Options.parse({"select": "all", "recipe": "rowwise", **EXPERTS})
    keep("bf16", lambda graph: None)
    keep("float8", parsed.pipeline(debug=True, kernels=lambda device: True))
    more = [shape for shape in kept["float8"] if shape not in kept["bf16"]]
    assert more == [((3 * 32,), torch.float32)] and len(kept["float8"]) == len(kept["bf16"]) + 1


def _outputs(graph):
    (output,) = graph.graph.find_nodes(op="output")
    return [(tuple(node.meta["val"].shape), node.meta["val"].dtype) for node in output.args[0]]


@pytest.mark.parametrize("matrices", [2, 5])
def test_results_are_the_same_bits(matrices):
    x = randn(matrices * 24, 32, grad=False)
    x[30, 3] = torch.nan
    data, inverse, columns = ops.quantize_rowwise(
        [x], [1], dtype=torch.float8_e4m3fn, power_of_2=True, matrices=matrices
    )
    rows = ops.scale(ops.amax(x, 1), dtype=torch.float8_e4m3fn, power_of_2=True)
    want = ops.quantize(x, rows, dtype=torch.float8_e4m3fn, dim=1)
    assert data.view(torch.uint8).equal(want.view(torch.uint8))
    torch.testing.assert_close(inverse, rows.reciprocal(), rtol=0, atol=0, equal_nan=True)
    each = torch.cat([ops.amax(part, 0) for part in x.split(24)])
    torch.testing.assert_close(columns, each, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("experts", ["convert", "with_grad_weight"])
def test_gradients_are_the_same_bits(experts):
    results = []
    for kernels in (True, False):
        parsed = f8fx.Options.parse({"select": "all", "recipe": "rowwise", "experts": experts})
        texts = []

        def pipeline(graph, used=kernels, parsed=parsed, texts=texts):
            report = parsed.pipeline(debug=True, kernels=lambda device: used)(graph)
            texts.append(describe(graph))
            return report

        x, w, offsets = args()
        y = run_with(pipeline, layer, x, w, offsets)
        results.append([y, *torch.autograd.grad(y, (x, w), randn(*y.shape, grad=False, seed=5))])
        assert ("quantize_rowwise" in texts[0]) == kernels
    assert all(map(torch.equal, *results))
