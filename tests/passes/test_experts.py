"""Grouped matmuls of experts: the graphs they become, and all that leaves them as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import TestCase
from torch import nn
from torch.library import custom_op

import f8fx
from f8fx.passes import describe
from f8fx.recipe import PRESETS
from tests.helpers import Experts, bf16, compiled, graph_after, joint_graphs, randn, report_of, sqnr

COUNTS = torch.tensor([16, 0, 20, 12])
OFFSETS = torch.tensor([16, 16, 36, 48], dtype=torch.int32)
LEFT = "grouped matmul of experts"
GRADIENT = "grouped gradient of experts"


def layer(x, w):
    return torch._grouped_mm(x, w.mT, OFFSETS)


def turned_layer(x, w):
    return torch._grouped_mm(x, w, OFFSETS)


def reasons(fn, *args, recipe="rowwise", experts="convert", **options):
    """Why the matmuls of a graph are left, by role; asserts that it stays as it was."""
    parsed = f8fx.Options.parse({"select": "all", "recipe": recipe, "experts": experts, **options})
    found = {}

    def transform(graph):
        before, nodes = describe(graph), list(graph.nodes)
        report = parsed.pipeline(debug=True, runs=True)(graph)
        assert describe(graph) == before and list(graph.nodes) == nodes
        assert report.converted == 0 and report.total > 0
        found.update({decision.role: decision.reason for decision in report.decisions})

    joint_graphs(fn, *args, transform=transform)
    return found


class TestGraphs(TestCase):
    def test_rowwise(self):
        """Matrices are cast below each other, for the gradient as their transposes; the weights' gradient stays."""
        text = graph_after(layer, randn(48, 32), randn(4, 64, 32), recipe="rowwise", experts="convert")
        self.assertExpectedInline(
            text,
            """\
primals_1: bf16[4,64,32]
primals_2: bf16[48,32]
primals_3: i32[4]
tangents_1: bf16[48,64]
amax: f32[48] = f8fx.amax(primals_2, 1)
scale: f32[48] = f8fx.scale(amax, dtype=e4m3, power_of_2=True)
quantize: e4m3[48,32] = f8fx.quantize(primals_2, scale, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal: f32[48] = reciprocal(scale)
view: bf16[256,32] = view(primals_1, [256, 32])
amax_1: f32[256] = f8fx.amax(view, 1)
scale_1: f32[256] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=True)
quantize_1: e4m3[256,32] = f8fx.quantize(view, scale_1, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_1: f32[256] = reciprocal(scale_1)
view_1: e4m3[4,64,32] = view(quantize_1, [4, 64, 32])
view_2: f32[4,64] = view(reciprocal_1, [4, 64])
permute: e4m3[4,32,64] = permute(view_1, [0, 2, 1])
grouped_mm: bf16[48,64] = f8fx.grouped_mm(quantize, permute, reciprocal, view_2, primals_3, dtype=bf16)
permute_1: bf16[64,48] = permute(tangents_1, [1, 0])
_grouped_mm: bf16[4,64,32] = _grouped_mm(permute_1, primals_2, primals_3)
permute_2: bf16[4,32,64] = permute(_grouped_mm, [0, 2, 1])
amax_2: f32[48] = f8fx.amax(tangents_1, 1)
scale_2: f32[48] = f8fx.scale(amax_2, dtype=e4m3, power_of_2=True)
quantize_2: e4m3[48,64] = f8fx.quantize(tangents_1, scale_2, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_2: f32[48] = reciprocal(scale_2)
permute_3: bf16[4,32,64] = permute(primals_1, [0, 2, 1])
clone: bf16[4,32,64] = clone(permute_3, memory_format=torch.contiguous_format)
view_3: bf16[128,64] = view(clone, [128, 64])
amax_3: f32[128] = f8fx.amax(view_3, 1)
scale_3: f32[128] = f8fx.scale(amax_3, dtype=e4m3, power_of_2=True)
quantize_3: e4m3[128,64] = f8fx.quantize(view_3, scale_3, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_3: f32[128] = reciprocal(scale_3)
view_4: e4m3[4,32,64] = view(quantize_3, [4, 32, 64])
view_5: f32[4,32] = view(reciprocal_3, [4, 32])
permute_4: e4m3[4,64,32] = permute(view_4, [0, 2, 1])
grouped_mm_1: bf16[48,32] = f8fx.grouped_mm(quantize_2, permute_4, reciprocal_2, view_5, primals_3, dtype=bf16)
permute_5: bf16[4,64,32] = permute(permute_2, [0, 2, 1])
return [grouped_mm, permute_5, grouped_mm_1, None]""",
        )

    def test_rowwise_of_matrices_that_lie_as_they_are_read(self):
        """As in gpt-oss: the forward transposes, the gradient does not."""
        text = graph_after(turned_layer, randn(48, 32), randn(4, 32, 64), recipe="rowwise", experts="convert")
        self.assertExpectedInline(
            text,
            """\
primals_1: bf16[48,32]
primals_2: bf16[4,32,64]
primals_3: i32[4]
tangents_1: bf16[48,64]
amax: f32[48] = f8fx.amax(primals_1, 1)
scale: f32[48] = f8fx.scale(amax, dtype=e4m3, power_of_2=True)
quantize: e4m3[48,32] = f8fx.quantize(primals_1, scale, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal: f32[48] = reciprocal(scale)
permute: bf16[4,64,32] = permute(primals_2, [0, 2, 1])
clone: bf16[4,64,32] = clone(permute, memory_format=torch.contiguous_format)
view: bf16[256,32] = view(clone, [256, 32])
amax_1: f32[256] = f8fx.amax(view, 1)
scale_1: f32[256] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=True)
quantize_1: e4m3[256,32] = f8fx.quantize(view, scale_1, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_1: f32[256] = reciprocal(scale_1)
view_1: e4m3[4,64,32] = view(quantize_1, [4, 64, 32])
view_2: f32[4,64] = view(reciprocal_1, [4, 64])
permute_1: e4m3[4,32,64] = permute(view_1, [0, 2, 1])
grouped_mm: bf16[48,64] = f8fx.grouped_mm(quantize, permute_1, reciprocal, view_2, primals_3, dtype=bf16)
permute_2: bf16[32,48] = permute(primals_1, [1, 0])
_grouped_mm: bf16[4,32,64] = _grouped_mm(permute_2, tangents_1, primals_3)
amax_2: f32[48] = f8fx.amax(tangents_1, 1)
scale_2: f32[48] = f8fx.scale(amax_2, dtype=e4m3, power_of_2=True)
quantize_2: e4m3[48,64] = f8fx.quantize(tangents_1, scale_2, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_2: f32[48] = reciprocal(scale_2)
view_3: bf16[128,64] = view(primals_2, [128, 64])
amax_3: f32[128] = f8fx.amax(view_3, 1)
scale_3: f32[128] = f8fx.scale(amax_3, dtype=e4m3, power_of_2=True)
quantize_3: e4m3[128,64] = f8fx.quantize(view_3, scale_3, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_3: f32[128] = reciprocal(scale_3)
view_4: e4m3[4,32,64] = view(quantize_3, [4, 32, 64])
view_5: f32[4,32] = view(reciprocal_3, [4, 32])
permute_3: e4m3[4,64,32] = permute(view_4, [0, 2, 1])
grouped_mm_1: bf16[48,32] = f8fx.grouped_mm(quantize_2, permute_3, reciprocal_2, view_5, primals_3, dtype=bf16)
return [grouped_mm, grouped_mm_1, _grouped_mm, None]""",
        )

    def test_rowwise_with_gw_hp(self):
        """The gradient reads weights with one scale for all experts, as it does of one matrix."""
        options = {"recipe": "rowwise_with_gw_hp", "experts": "convert"}
        self.assertExpectedInline(
            graph_after(layer, randn(48, 32), randn(4, 64, 32), **options),
            """\
primals_1: bf16[4,64,32]
primals_2: bf16[48,32]
primals_3: i32[4]
tangents_1: bf16[48,64]
amax: f32[48] = f8fx.amax(primals_2, 1)
scale: f32[48] = f8fx.scale(amax, dtype=e4m3, power_of_2=True)
quantize: e4m3[48,32] = f8fx.quantize(primals_2, scale, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal: f32[48] = reciprocal(scale)
view: bf16[256,32] = view(primals_1, [256, 32])
amax_1: f32[256] = f8fx.amax(view, 1)
scale_1: f32[256] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=True)
quantize_1: e4m3[256,32] = f8fx.quantize(view, scale_1, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_1: f32[256] = reciprocal(scale_1)
view_1: e4m3[4,64,32] = view(quantize_1, [4, 64, 32])
view_2: f32[4,64] = view(reciprocal_1, [4, 64])
permute: e4m3[4,32,64] = permute(view_1, [0, 2, 1])
grouped_mm: bf16[48,64] = f8fx.grouped_mm(quantize, permute, reciprocal, view_2, primals_3, dtype=bf16)
permute_1: bf16[64,48] = permute(tangents_1, [1, 0])
_grouped_mm: bf16[4,64,32] = _grouped_mm(permute_1, primals_2, primals_3)
permute_2: bf16[4,32,64] = permute(_grouped_mm, [0, 2, 1])
amax_2: f32[48] = f8fx.amax(tangents_1, 1)
scale_2: f32[48] = f8fx.scale(amax_2, dtype=e4m3, power_of_2=True)
quantize_2: e4m3[48,64] = f8fx.quantize(tangents_1, scale_2, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_2: f32[48] = reciprocal(scale_2)
permute_3: bf16[4,32,64] = permute(primals_1, [0, 2, 1])
clone: bf16[4,32,64] = clone(permute_3, memory_format=torch.contiguous_format)
view_3: bf16[128,64] = view(clone, [128, 64])
amax_3: f32[] = f8fx.amax(view_3, None)
scale_3: f32[] = f8fx.scale(amax_3, dtype=e4m3, power_of_2=True)
quantize_3: e4m3[128,64] = f8fx.quantize(view_3, scale_3, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal_3: f32[] = reciprocal(scale_3)
view_4: e4m3[4,32,64] = view(quantize_3, [4, 32, 64])
expand: f32[4,32] = expand(reciprocal_3, [4, 32])
clone_1: f32[4,32] = clone(expand, memory_format=torch.contiguous_format)
permute_4: e4m3[4,64,32] = permute(view_4, [0, 2, 1])
grouped_mm_1: bf16[48,32] = f8fx.grouped_mm(quantize_2, permute_4, reciprocal_2, clone_1, primals_3, dtype=bf16)
permute_5: bf16[4,64,32] = permute(permute_2, [0, 2, 1])
return [grouped_mm, permute_5, grouped_mm_1, None]""",
        )


def test_left_unless_asked_for():
    roles = dict.fromkeys(("output", "grad_input", "grad_weight"), LEFT)
    assert reasons(layer, randn(48, 32), randn(4, 64, 32), experts="leave") == roles


def test_left_under_a_recipe_with_one_scale_for_all_rows():
    """Rows that are no expert's may hold anything."""
    found = reasons(layer, randn(48, 32), randn(4, 64, 32), recipe="tensorwise")
    why = "grouped matmul under a recipe that is not rowwise"
    assert found == {"output": why, "grad_input": why, "grad_weight": GRADIENT}


def test_left_where_the_gradient_is_e5m2():
    rowwise = PRESETS["rowwise"]
    e5m2 = replace(rowwise.grad_input.left, dtype="e5m2")
    mine = replace(rowwise, name="mine", grad_input=replace(rowwise.grad_input, left=e5m2))
    report = report_of(Experts().to(bf16), randn(48, 32), COUNTS, recipe=mine, experts="convert")
    left = {d.role: d.reason for d in report.decisions if not d.converted}
    assert left == {"grad_input": "grouped float8 gemms take e4m3 alone", "grad_weight": GRADIENT}


@pytest.mark.parametrize(("k", "n"), [(40, 64), (32, 40)])
def test_left_where_a_size_is_no_multiple_of_16(k, n):
    """torch's own grouped matmul takes multiples of 8."""
    found = reasons(layer, randn(48, k), randn(4, n, k))
    assert found == {
        "output": "not a multiple of 16",
        "grad_input": "not a multiple of 16",
        "grad_weight": GRADIENT,
    }


@pytest.mark.parametrize(
    ("dtype", "reason"), [(torch.float16, "grouped float16 matmul"), (torch.float32, "float32 matmul")]
)
def test_left_in_other_dtypes(dtype, reason):
    """Which torch 2.13 does not trace; the dtype of the result is put into its graph."""
    parsed = f8fx.Options.parse({"select": "all", "recipe": "rowwise", "experts": "convert"})
    found = {}

    def transform(graph):
        for node in graph.nodes:
            if node.target is torch.ops.aten._grouped_mm.default:
                node.meta["val"] = node.meta["val"].to(dtype)
        report = parsed.pipeline()(graph)
        found.update({decision.role: decision.reason for decision in report.decisions})

    joint_graphs(layer, randn(48, 32), randn(4, 64, 32), transform=transform)
    assert found == {"output": reason, "grad_input": reason, "grad_weight": GRADIENT}


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("a100", "no float8 tensor cores on a100"),
        ("l40s", "no grouped float8 gemm on l40s"),
        ("b200", "no grouped float8 gemm on b200"),
        ("mi300x", "target mi300x: no float8_e4m3fnuz on cpu"),
    ],
)
def test_left_for_hardware_without_such_a_gemm(target, reason):
    found = reasons(layer, randn(48, 32), randn(4, 64, 32), target=target)
    assert found == {"output": reason, "grad_input": reason, "grad_weight": GRADIENT}


def test_left_where_filtered():
    found = reasons(layer, randn(48, 32), randn(4, 64, 32), filter_fn=lambda fqn, gemm: False)
    assert found == {"output": "filtered", "grad_input": "filtered", "grad_weight": GRADIENT}


def test_left_without_rows():
    found = reasons(layer, torch.empty(0, 32, dtype=bf16, requires_grad=True), randn(4, 64, 32))
    assert found["output"] == "empty"


def test_other_forms_are_left():
    """A matrix for each expert on both sides, and one whose columns are the experts'."""
    with torch.no_grad():
        batched = reasons(torch._grouped_mm, randn(4, 16, 32), randn(4, 32, 48))
        columns = reasons(lambda w, x: torch._grouped_mm(w, x, OFFSETS), randn(4, 16, 32), randn(32, 48))
    assert batched == columns == {"output": "grouped matmul of another form"}


@pytest.mark.parametrize(
    "form",
    [{"offs": OFFSETS, "out_dtype": torch.float32}, {"offs": OFFSETS, "bias": torch.zeros(4, 64)}],
    ids=str,
)
def test_forms_that_torch_does_not_have_yet_are_left(form):
    """Put into its graph, as no CPU runs them."""
    parsed = f8fx.Options.parse({"select": "all", "recipe": "rowwise", "experts": "convert"})
    found = []

    def transform(graph):
        (node,) = (n for n in graph.nodes if n.target is torch.ops.aten._grouped_mm.default)
        node.args, node.kwargs = node.args[:2], {**form, "offs": node.args[2]}
        found.extend(parsed.pipeline()(graph).decisions)

    with torch.no_grad():
        joint_graphs(layer, randn(48, 32), randn(4, 64, 32), transform=transform)
    assert [decision.reason for decision in found] == ["grouped matmul of another form"]


def test_matrices_that_are_no_weights_are_left():
    def attention(x, y):
        return torch._grouped_mm(x, torch.tanh(y).mT, OFFSETS)

    why = "grouped matmul of two activations"
    assert reasons(attention, randn(48, 32), randn(4, 64, 32)) == {
        "output": why,
        "grad_input": why,
        "grad_weight": GRADIENT,
    }


def test_what_data_makes_of_parameters_is_no_weight():
    """Where it is known which inputs are parameters."""
    table = nn.Linear(32, 32, bias=False).to(bf16)

    def attention(x, y):
        return torch._grouped_mm(x, table(y).mT, OFFSETS)

    report = report_of(attention, randn(48, 32), randn(4, 64, 32), recipe="rowwise", experts="convert")
    left = {d.role: d.reason for d in report.decisions if d.fqn != "table" and not d.converted}
    why = "grouped matmul of two activations"
    assert left == {"output": why, "grad_input": why, "grad_weight": GRADIENT}


def test_one_matrix_for_all_experts_is_left():
    """It would be cast as often as there are experts."""
    shared = nn.Parameter(randn(64, 32, grad=False))

    def layer(x):
        return torch._grouped_mm(x, shared.expand(4, -1, -1).mT, OFFSETS)

    report = report_of(layer, randn(48, 32), recipe="rowwise", experts="convert")
    why = "grouped matmul with one matrix"
    assert {d.role: d.reason for d in report.decisions} == {
        "output": why,
        "grad_input": why,
        "grad_weight": GRADIENT,
    }


@custom_op("f8fx_tests::unpacked_experts", mutates_args=())
def unpacked(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table[codes.long()]


@unpacked.register_fake
def _(codes, table):
    return table.new_empty(codes.shape)


BASE = nn.Parameter(randn(6, 64, 32, grad=False))
DOWN, UP = nn.Parameter(randn(4, 8, 32, grad=False) / 6), nn.Parameter(randn(4, 64, 8, grad=False) / 3)
CODES = torch.randint(0, 16, (4, 64, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
TABLE = torch.linspace(-1, 1, 16, dtype=bf16)


@pytest.mark.parametrize(
    "weights",
    [
        lambda: (BASE * 0.5)[:4],
        lambda: BASE[:4] + 2.0 * (UP @ DOWN),
        lambda: unpacked(CODES, TABLE),
        lambda: TABLE[CODES.long()],
    ],
    ids=["a slice, scaled", "an adapter", "unpacked", "looked up"],
)
def test_weights_computed_from_parameters_are_weights(weights):
    def adapted(x, delta):
        return torch._grouped_mm(x, weights().mT, OFFSETS) + delta

    x, delta = randn(48, 32), randn(48, 64)
    report = report_of(adapted, x, delta, recipe="rowwise", experts="convert")
    grouped = [d.role for d in report.decisions if d.converted and (d.m, d.k * d.n) == (48, 64 * 32)]
    assert grouped == ["output", "grad_input"]
    assert sqnr(adapted(x, delta), compiled(adapted, recipe="rowwise", experts="convert")(x, delta)) > 20


def test_weights_that_are_kept_as_one_matrix():
    """All experts' rows below each other, as checkpoints have them: what is quantized are the matrices that it is viewed as."""
    x, rows = randn(48, 32), nn.Parameter(randn(4 * 64, 32, grad=False) / 6)

    def kept(x):
        return torch._grouped_mm(x, rows.view(4, 64, 32).mT, OFFSETS)

    report = report_of(kept, x, recipe="rowwise", experts="convert")
    assert {d.role for d in report.decisions if d.converted} == {"output", "grad_input"}
    assert sqnr(kept(x), compiled(kept, recipe="rowwise", experts="convert")(x)) > 20


def test_an_adapter_is_a_weight_where_activations_are_converted_too():
    def adapted(x):
        return torch._grouped_mm(x, (BASE[:4] + UP @ DOWN).mT, OFFSETS)

    options = {"recipe": "rowwise", "experts": "convert", "activations": "convert"}
    report = report_of(adapted, randn(48, 32), **options)
    grouped = [d.role for d in report.decisions if d.converted and (d.m, d.k * d.n) == (48, 64 * 32)]
    assert grouped == ["output", "grad_input"]


def test_matrices_whose_sizes_change_are_left():
    x, w = randn(48, 32), randn(4, 64, 32)
    f8 = compiled(layer, recipe="rowwise", experts="convert", dynamic=True)
    with f8fx.recording() as reports:
        y = f8(x, w)
    assert torch.equal(y, layer(x, w))
    left = {d.role: d.reason for report in reports for d in report.decisions}
    why = "grouped matmul of matrices whose sizes change"
    assert left == {"output": why, "grad_input": why, "grad_weight": GRADIENT}


def test_a_dtype_of_the_result_that_is_the_rows():
    def layer(x, w):
        return torch._grouped_mm(x, w.mT, OFFSETS, out_dtype=bf16)

    x, w = randn(48, 32), nn.Parameter(randn(4, 64, 32, grad=False))
    report = report_of(layer, x, w, recipe="rowwise", experts="convert")
    assert [d.role for d in report.decisions if d.converted] == ["output", "grad_input"]


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_weights_that_are_put_together(dim):
    """A `cat` of matrices is one tensor of theirs; that of rows is read part by part, as any layer's."""
    parts = [nn.Parameter(randn(4, 32, 32, grad=False, seed=seed) / 6) for seed in range(2)]
    wide = [nn.Parameter(part.detach()[:2].contiguous()) for part in parts] if dim == 0 else parts

    def together(x):
        return torch._grouped_mm(x, torch.cat([0.5 * part for part in wide], dim), OFFSETS)

    def halves(a, b):
        return together(torch.cat([a.sin(), b.cos()], -1))

    options = {"recipe": "rowwise", "experts": "convert"}
    for fn, *args in ((halves, randn(48, 16), randn(48, 16, seed=1)), (together, randn(48, 32))):
        if dim == 1:
            args = [torch.cat([arg, arg], -1).detach().requires_grad_() for arg in args]
        assert sqnr(fn(*args), compiled(fn, **options)(*args)) > 20


def test_a_graph_of_grouped_float8_matmuls_is_not_converted_again():
    """By a second compile of what was compiled, say; nor is a user's own."""
    x, w = randn(48, 32, grad=False), randn(4, 64, 32, grad=False)
    e4m3 = torch.float8_e4m3fn
    ones = torch.ones(48), torch.ones(4, 64)

    def own(x, w):
        return torch.ops.f8fx.grouped_mm(x.to(e4m3), w.to(e4m3).mT, *ones, OFFSETS, dtype=bf16)

    with f8fx.recording() as reports:
        result = compiled(own)(x, w)
    assert torch.equal(result, own(x, w))
    assert not [d for report in reports for d in report.decisions if d.converted]
