"""Gradients of experts' weights in float8: the graphs they become, and all that leaves them as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import TestCase
from torch import nn

import f8fx
from f8fx import hardware
from f8fx.calibration import own_calibration
from f8fx.cost import CostModel
from f8fx.passes import describe
from f8fx.recipe import PRESETS
from tests.helpers import BatchedExperts, Experts, bf16, graph_after, joint_graphs, randn, report_of

OPTIONS = {"recipe": "rowwise", "experts": "with_grad_weight"}
COUNTS = torch.tensor([16, 0, 20, 12])
OFFSETS = torch.tensor([16, 16, 36, 48], dtype=torch.int32)
#: Only the gradient of the weights, which the graphs are about.
ALONE = replace(PRESETS["rowwise"], name="alone", output=None, grad_input=None)


def layer(x, w):
    return torch._grouped_mm(x, w.mT, OFFSETS)


def turned_layer(x, w):
    return torch._grouped_mm(x, w, OFFSETS)


def batches(x, w):
    return torch.bmm(x, w)


def weight(*shape):
    return nn.Parameter(randn(*shape, grad=False))


def decided(fn, *args, **options):
    """Why the gradient of the weights is left; "converted" if it is not."""
    report = report_of(fn, *args, **{**OPTIONS, **options})
    (found,) = {d.reason for d in report.decisions if d.role == "grad_weight"}
    return found


class TestGraphs(TestCase):
    maxDiff = None

    def test_of_matrices_that_are_read_as_their_transposes(self):
        text = graph_after(layer, randn(48, 32), weight(4, 64, 32), **{**OPTIONS, "recipe": ALONE})
        self.assertExpectedInline(
            text,
            """\
primals_1: bf16[4,64,32]
primals_2: bf16[48,32]
primals_3: i32[4]
tangents_1: bf16[48,64]
permute: bf16[4,32,64] = permute(primals_1, [0, 2, 1])
_grouped_mm: bf16[48,64] = _grouped_mm(primals_2, permute, primals_3)
padded_ends: i32[4] = f8fx.padded_ends(primals_3)
amax_groups: f32[4,64] = f8fx.amax_groups(tangents_1, primals_3)
scale: f32[4,64] = f8fx.scale(amax_groups, dtype=e4m3, power_of_2=True)
quantize_groups: e4m3[64,112] = f8fx.quantize_groups(tangents_1, scale, primals_3, padded_ends, dtype=e4m3)
reciprocal: f32[4,64] = reciprocal(scale)
view: f32[256] = view(reciprocal, [-1])
amax_groups_1: f32[4,32] = f8fx.amax_groups(primals_2, primals_3)
scale_1: f32[4,32] = f8fx.scale(amax_groups_1, dtype=e4m3, power_of_2=True)
quantize_groups_1: e4m3[32,112] = f8fx.quantize_groups(primals_2, scale_1, primals_3, padded_ends, dtype=e4m3)
reciprocal_1: f32[4,32] = reciprocal(scale_1)
view_1: f32[128] = view(reciprocal_1, [-1])
permute_1: e4m3[112,32] = permute(quantize_groups_1, [1, 0])
grouped_mm: bf16[4,64,32] = f8fx.grouped_mm(quantize_groups, permute_1, view, view_1, padded_ends, dtype=bf16)
permute_2: bf16[4,32,64] = permute(grouped_mm, [0, 2, 1])
permute_3: bf16[4,64,32] = permute(permute, [0, 2, 1])
_grouped_mm_1: bf16[48,32] = _grouped_mm(tangents_1, permute_3, primals_3)
permute_4: bf16[4,64,32] = permute(permute_2, [0, 2, 1])
return [_grouped_mm, permute_4, _grouped_mm_1, None]""",
        )

    def test_of_matrices_as_they_are_read(self):
        """Operands change sides."""
        text = graph_after(turned_layer, randn(48, 32), weight(4, 32, 64), **{**OPTIONS, "recipe": ALONE})
        self.assertExpectedInline(
            text,
            """\
primals_1: bf16[48,32]
primals_2: bf16[4,32,64]
primals_3: i32[4]
tangents_1: bf16[48,64]
_grouped_mm: bf16[48,64] = _grouped_mm(primals_1, primals_2, primals_3)
padded_ends: i32[4] = f8fx.padded_ends(primals_3)
amax_groups: f32[4,32] = f8fx.amax_groups(primals_1, primals_3)
scale: f32[4,32] = f8fx.scale(amax_groups, dtype=e4m3, power_of_2=True)
quantize_groups: e4m3[32,112] = f8fx.quantize_groups(primals_1, scale, primals_3, padded_ends, dtype=e4m3)
reciprocal: f32[4,32] = reciprocal(scale)
view: f32[128] = view(reciprocal, [-1])
amax_groups_1: f32[4,64] = f8fx.amax_groups(tangents_1, primals_3)
scale_1: f32[4,64] = f8fx.scale(amax_groups_1, dtype=e4m3, power_of_2=True)
quantize_groups_1: e4m3[64,112] = f8fx.quantize_groups(tangents_1, scale_1, primals_3, padded_ends, dtype=e4m3)
reciprocal_1: f32[4,64] = reciprocal(scale_1)
view_1: f32[256] = view(reciprocal_1, [-1])
permute: e4m3[112,64] = permute(quantize_groups_1, [1, 0])
grouped_mm: bf16[4,32,64] = f8fx.grouped_mm(quantize_groups, permute, view, view_1, padded_ends, dtype=bf16)
permute_1: bf16[4,64,32] = permute(primals_2, [0, 2, 1])
_grouped_mm_1: bf16[48,32] = _grouped_mm(tangents_1, permute_1, primals_3)
return [_grouped_mm, _grouped_mm_1, grouped_mm, None]""",
        )

    def test_in_batches(self):
        """The rows of all batches below each other."""
        text = graph_after(
            batches, randn(4, 24, 32), weight(4, 32, 64), known=True, **{**OPTIONS, "recipe": ALONE}
        )
        self.assertExpectedInline(
            text,
            """\
primals_1: bf16[4,24,32]
primals_2: bf16[4,32,64]
tangents_1: bf16[4,24,64]
iota: i32[4] = prims.iota(4, start=24, step=24, dtype=i32, device=cpu, requires_grad=False)
view: bf16[96,32] = view(primals_1, [96, 32])
bmm: bf16[4,24,64] = bmm(primals_1, primals_2)
view_1: bf16[96,64] = view(tangents_1, [96, 64])
padded_ends: i32[4] = f8fx.padded_ends(iota)
amax_groups: f32[4,32] = f8fx.amax_groups(view, iota)
scale: f32[4,32] = f8fx.scale(amax_groups, dtype=e4m3, power_of_2=True)
quantize_groups: e4m3[32,160] = f8fx.quantize_groups(view, scale, iota, padded_ends, dtype=e4m3)
reciprocal: f32[4,32] = reciprocal(scale)
view_2: f32[128] = view(reciprocal, [-1])
amax_groups_1: f32[4,64] = f8fx.amax_groups(view_1, iota)
scale_1: f32[4,64] = f8fx.scale(amax_groups_1, dtype=e4m3, power_of_2=True)
quantize_groups_1: e4m3[64,160] = f8fx.quantize_groups(view_1, scale_1, iota, padded_ends, dtype=e4m3)
reciprocal_1: f32[4,64] = reciprocal(scale_1)
view_3: f32[256] = view(reciprocal_1, [-1])
permute: e4m3[160,64] = permute(quantize_groups_1, [1, 0])
grouped_mm: bf16[4,32,64] = f8fx.grouped_mm(quantize_groups, permute, view_2, view_3, padded_ends, dtype=bf16)
permute_1: bf16[4,64,32] = permute(primals_2, [0, 2, 1])
bmm_1: bf16[4,24,32] = bmm(tangents_1, permute_1)
return [bmm, bmm_1, grouped_mm]""",
        )


def test_layers_of_one_input_share_its_copy():
    """Gate and up; and all layers where their rows end."""

    def fn(x, gate, up):
        return layer(x, gate) * layer(x, up)

    text = graph_after(fn, randn(48, 32), weight(4, 64, 32), weight(4, 64, 32), **OPTIONS)
    assert [text.count(f"f8fx.{name}(") for name in ("quantize_groups", "amax_groups", "padded_ends")] == [
        3,
        3,
        1,
    ]


def test_its_gradient_is_written_to_memory_once():
    """The kernels read memory, and the cast for the input's gradient reads the same."""
    text = graph_after(lambda x, w: layer(x, w).sin(), randn(48, 32), weight(4, 64, 32), **OPTIONS)
    (line,) = (line for line in text.splitlines() if "f8fx.materialize(" in line)
    name = line.partition(":")[0]
    assert f"f8fx.amax_groups({name}, " in text and f"f8fx.amax({name}, 1)" in text


@pytest.mark.parametrize("kind", [Experts, BatchedExperts])
def test_each_is_its_layers(kind):
    model, x = kind().to(bf16), randn(48, 32)
    report = report_of(model, x, torch.full((4,), 12), **OPTIONS)
    roles = [d.role for d in report.decisions]
    assert all(d.converted for d in report.decisions)
    assert {role: roles.count(role) for role in roles} == {"output": 3, "grad_input": 3, "grad_weight": 3}


@pytest.mark.parametrize("fn", [layer, batches])
def test_left_unless_asked_for(fn):
    args = (randn(4, 24, 32), weight(4, 32, 64)) if fn is batches else (randn(48, 32), weight(4, 64, 32))
    why = "batched gradient of a weight for each batch" if fn is batches else "grouped gradient of experts"
    assert decided(fn, *args, experts="convert") == why
    assert decided(fn, *args) == "converted"


def test_left_where_a_recipe_keeps_it():
    found = decided(layer, randn(48, 32), weight(4, 64, 32), recipe="rowwise_with_gw_hp")
    assert found == "kept in high precision by the recipe"


def test_left_under_a_recipe_with_one_scale_for_all_rows():
    why = "grouped matmul under a recipe that is not rowwise"
    assert decided(layer, randn(48, 32), weight(4, 64, 32), recipe="tensorwise") == why
    rowwise, tensorwise = (PRESETS[name].grad_weight for name in ("rowwise", "tensorwise"))
    for mixed in (replace(rowwise, right=tensorwise.right), replace(rowwise, left=tensorwise.left)):
        mine = replace(PRESETS["rowwise"], name="mine", grad_weight=mixed)
        assert decided(layer, randn(48, 32), weight(4, 64, 32), recipe=mine) == why


def test_left_where_the_gradient_is_e5m2():
    rowwise = PRESETS["rowwise"]
    e5m2 = replace(rowwise.grad_weight.left, dtype="e5m2")
    mine = replace(rowwise, name="mine", grad_weight=replace(rowwise.grad_weight, left=e5m2))
    assert (
        decided(layer, randn(48, 32), weight(4, 64, 32), recipe=mine)
        == "grouped float8 gemms take e4m3 alone"
    )


@pytest.mark.parametrize(("k", "n"), [(40, 64), (32, 40)])
def test_left_where_a_size_of_the_weights_is_no_multiple_of_16(k, n):
    """What is summed may be any number of rows."""
    assert decided(layer, randn(48, k), weight(4, n, k)) == "not a multiple of 16"
    offsets = torch.tensor([3, 3, 30, 41], dtype=torch.int32)
    ragged = lambda x, w: torch._grouped_mm(x, w.mT, offsets)  # noqa: E731
    assert decided(ragged, randn(41, 32), weight(4, 64, 32)) == "converted"


def test_left_where_nothing_is_padded():
    assert decided(layer, randn(48, 32), weight(4, 64, 32), pad="never") == "rows of experts are padded"


@pytest.mark.parametrize("target", ["l40s", "b200"])
def test_left_for_hardware_without_such_a_gemm(target):
    why = f"no grouped float8 gemm on {target}"
    assert decided(layer, randn(48, 32), weight(4, 64, 32), target=target) == why


def test_left_where_filtered():
    found = decided(
        layer, randn(48, 32), weight(4, 64, 32), filter_fn=lambda fqn, gemm: gemm.role != "grad_weight"
    )
    assert found == "filtered"


def test_left_where_it_is_too_small():
    assert decided(layer, randn(48, 32), weight(4, 64, 32), select="auto", target="h100") == "too small"


def test_left_where_no_layer_reads_what_it_reads():
    """A sum over the rows of each expert that is no gradient, and one of two gradients."""

    def sums(x, y):
        return torch._grouped_mm(x.mT, y, OFFSETS)

    found = []

    def transform(graph):
        before = describe(graph)
        report = f8fx.Options.parse({"select": "all", **OPTIONS}).pipeline(debug=True)(graph)
        assert describe(graph) == before
        found.extend((d.role, d.reason) for d in report.decisions)

    joint_graphs(sums, randn(48, 32), randn(48, 64), transform=transform)
    why = "no forward matmul it is the gradient of"
    assert ("output", why) in found and len(found) == 3
    assert {reason for _, reason in found} == {why, "grouped matmul of two activations"}


class ByHand(torch.autograd.Function):
    """Batches by a weight for each, with gradients in the dtype of a parameter."""

    @staticmethod
    def forward(ctx, x, w, dtype):
        ctx.save_for_backward(x, w)
        ctx.dtype = dtype
        return torch.bmm(x, w)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        of_weight = torch.bmm(x.mT.to(ctx.dtype), grad.to(ctx.dtype))
        return torch.bmm(grad, w.mT), of_weight.to(w.dtype), None


class LowRank(torch.autograd.Function):
    """A weight and an adapter of a rank that no grouped matmul takes, all of whose products have one number in the backward."""

    @staticmethod
    def forward(ctx, x, w, a, b):
        ctx.save_for_backward(x, w, a, b)
        return torch.bmm(x, w) + torch.bmm(torch.bmm(x, a), b)

    @staticmethod
    def backward(ctx, grad):
        x, w, a, b = ctx.saved_tensors
        inner = torch.bmm(grad, b.mT)
        of_input = torch.bmm(grad, w.mT) + torch.bmm(inner, a.mT)
        return of_input, torch.bmm(x.mT, grad), torch.bmm(x.mT, inner), torch.bmm(torch.bmm(x, a).mT, grad)


def test_a_layer_whose_gradient_is_taken_by_hand():
    def converted(fn, *args):
        return [d.role for d in report_of(fn, *args, **OPTIONS).decisions if d.converted]

    x, w, other = randn(4, 24, 32), weight(4, 32, 64), weight(4, 32, 64)
    layers = ["output", "grad_input", "grad_weight"]
    assert sorted(converted(lambda x: ByHand.apply(x, w, bf16), x)) == sorted(layers)
    # gradients in float32 are not looked at
    assert sorted(converted(lambda x: ByHand.apply(x, w, torch.float32), x)) == sorted(layers[:2])
    # of two layers on one input all products of the backward have one number
    both = lambda x: ByHand.apply(x, w, bf16) * ByHand.apply(x, other, bf16)  # noqa: E731
    assert sorted(converted(both, x)) == sorted(2 * layers)
    a, b = weight(4, 32, 4), weight(4, 4, 64)
    assert sorted(converted(lambda x: LowRank.apply(x, w, a, b), x)) == sorted(layers)


class GroupedByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return layer(x, w)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return turned_layer(grad, w), torch._grouped_mm(grad.mT, x, OFFSETS)


def test_a_dense_layer_of_the_same_sizes_on_the_same_input():
    """Numbers do not tell them apart in the backward of what is differentiated by hand."""
    dense, w = nn.Linear(32, 64, bias=False).to(bf16), weight(4, 64, 32)
    report = report_of(lambda x: dense(x) * GroupedByHand.apply(x, w), randn(48, 32), **OPTIONS)
    assert [d.role for d in report.decisions if not d.converted] == [] and report.total == 6


def test_a_batched_gradient_that_is_left_is_timed_as_one():
    """Not as the grouped one it was looked at as."""
    x = torch.empty(8, 1024, 512, dtype=bf16, device="meta", requires_grad=True)
    w = nn.Parameter(torch.empty(8, 512, 1024, dtype=bf16, device="meta"))

    def times(experts):
        options = {**OPTIONS, "experts": experts, "filter_fn": lambda fqn, gemm: gemm.role != "grad_weight"}
        rows = f8fx.explain(lambda x: torch.bmm(x, w), x, target="h100", select="all", **options).rows
        (row,) = (row for row in rows if row.role == "grad_weight")
        assert not row.converted
        return row.high_seconds, row.m, row.k, row.n

    assert times("with_grad_weight") == times("convert")


@pytest.mark.parametrize("kind", [Experts, BatchedExperts])
@pytest.mark.parametrize("left", ["output", "grad_input", "grad_weight"])
def test_any_of_a_layer_may_be_left(kind, left):
    model, x = kind().to(bf16), randn(48, 32)
    options = {**OPTIONS, "filter_fn": lambda fqn, gemm: gemm.role != left}
    report = report_of(model, x, torch.full((4,), 12), **options)
    assert {d.role for d in report.decisions if not d.converted} == {left}
    assert {d.reason for d in report.decisions if not d.converted} == {"filtered"}


def test_with_nothing_converted_the_graph_is_as_it_was():
    """Batches that were looked at as rows of experts, too."""
    parsed = f8fx.Options.parse({"select": "all", **OPTIONS, "filter_fn": lambda fqn, gemm: False})

    def transform(graph):
        before, nodes = describe(graph), list(graph.nodes)
        report = parsed.pipeline(debug=True, runs=True)(graph)
        assert describe(graph) == before and list(graph.nodes) == nodes
        assert report.total == 3 and report.converted == 0

    for fn, *args in (
        (batches, randn(4, 24, 32), weight(4, 32, 64)),
        (layer, randn(48, 32), weight(4, 64, 32)),
    ):
        joint_graphs(fn, *args, transform=transform, known=True)


def test_concatenated_rows_are_read_whole():
    """Other gemms read the parts of a ``cat`` where they lie; the kernels of groups read one tensor."""

    def fn(a, b, w):
        return layer(torch.cat([a.sin(), b.cos()], -1), w)

    text = graph_after(fn, randn(48, 16), randn(48, 16), weight(4, 64, 32), **OPTIONS)
    assert "cat: bf16[48,32] = cat(" in text and "f8fx.concat(" not in text
    assert "f8fx.amax_groups(rounded, " in text and "rounded: bf16[48,32] = f8fx.rounded(cat)" in text


def test_what_its_casts_are_predicted_to_cost():
    """Each tensor is read for its amaxes, and read and written for its copy, whoever else casts it by rows."""
    hw = hardware.find("h100")
    model = CostModel(hw, own_calibration(hw), False)
    x = torch.empty(16384, 4096, dtype=bf16, device="meta", requires_grad=True)
    w = nn.Parameter(torch.empty(8, 8192, 4096, dtype=bf16, device="meta"))
    offsets = torch.empty(8, dtype=torch.int32, device="meta")
    dense = nn.Linear(4096, 64, bias=False, dtype=bf16, device="meta")

    def call(x, w, offsets):
        x = x.sin()
        return torch._grouped_mm(x, w.mT, offsets), dense(x)

    output = PRESETS["tensorwise"].output
    same = {side: replace(getattr(output, side), power_of_2_scale=True) for side in ("left", "right")}
    one_scale = replace(ALONE, name="one scale", output=replace(output, **same))
    for recipe in (ALONE, PRESETS["rowwise"], one_scale):
        options = {**OPTIONS, "recipe": recipe, "select": "all"}
        (row,) = (
            row
            for row in f8fx.explain(call, x, w, offsets, target="h100", **options).rows
            if (row.role, row.m) == ("grad_weight", 8192)
        )
        gemm = model.gemm_seconds(8192, 16384, 4096, True, True, experts=8, sums_groups=True)
        casts = sum(
            model.amax_seconds(16384, columns, 2) + model.cast_seconds(16384, columns, 2, False, True, kind)
            for columns, kind in ((4096, "input"), (8192, "grad_output"))
        )
        assert row.high_seconds / row.speedup == pytest.approx(gemm + casts)
