"""Batches with a weight for each: the graphs they become, and all that leaves them as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import TestCase
from torch import nn

import f8fx
from f8fx.passes import describe
from f8fx.recipe import PRESETS
from tests.helpers import bf16, compiled, graph_after, joint_graphs, randn, report_of, sqnr

OPTIONS = {"recipe": "rowwise", "experts": "convert"}
LEFT = "batched matmul with a weight for each batch"
GRADIENT = "batched gradient of a weight for each batch"
MATRICES = nn.Parameter(randn(4, 32, 64, grad=False) / 6)


def layer(x, w):
    return torch.bmm(x, w)


def weight(*shape, dtype=bf16):
    return nn.Parameter(randn(*shape, dtype=dtype, grad=False))


def reasons(fn, *args, **options):
    """Why the matmuls of a graph are left, by role; asserts that it stays as it was to the node."""
    parsed = f8fx.Options.parse({"select": "all", **OPTIONS, **options})
    found = {}

    def transform(graph):
        before, nodes = describe(graph), list(graph.nodes)
        report = parsed.pipeline(debug=True, runs=True)(graph)
        assert describe(graph) == before and list(graph.nodes) == nodes
        assert report.converted == 0 and report.total > 0
        found.update({decision.role: decision.reason for decision in report.decisions})

    joint_graphs(fn, *args, transform=transform, known=True)
    return found


def converted(fn, *args, **options):
    """The roles of the matmuls that are converted, and why the others are not."""
    report = report_of(fn, *args, **{**OPTIONS, **options})
    done = [d.role for d in report.decisions if d.converted]
    return done, {d.role: d.reason for d in report.decisions if not d.converted}


class TestGraphs(TestCase):
    maxDiff = None

    def test_rowwise(self):
        """All rows below each other; where those of an expert end is counted once."""
        args = randn(4, 24, 32), weight(4, 32, 64)
        text = graph_after(layer, *args, known=True, **OPTIONS)
        self.assertExpectedInline(
            text,
            """\
primals_1: bf16[4,24,32]
primals_2: bf16[4,32,64]
tangents_1: bf16[4,24,64]
iota: i32[4] = prims.iota(4, start=24, step=24, dtype=i32, device=cpu, requires_grad=False)
view: bf16[96,32] = view(primals_1, [96, 32])
amax: f32[96] = f8fx.amax(view, 1)
scale: f32[96] = f8fx.scale(amax, dtype=e4m3, power_of_2=True)
quantize: e4m3[96,32] = f8fx.quantize(view, scale, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal: f32[96] = reciprocal(scale)
permute: bf16[4,64,32] = permute(primals_2, [0, 2, 1])
clone: bf16[4,64,32] = clone(permute, memory_format=torch.contiguous_format)
view_1: bf16[256,32] = view(clone, [256, 32])
amax_1: f32[256] = f8fx.amax(view_1, 1)
scale_1: f32[256] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=True)
quantize_1: e4m3[256,32] = f8fx.quantize(view_1, scale_1, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_1: f32[256] = reciprocal(scale_1)
view_2: e4m3[4,64,32] = view(quantize_1, [4, 64, 32])
view_3: f32[4,64] = view(reciprocal_1, [4, 64])
permute_1: e4m3[4,32,64] = permute(view_2, [0, 2, 1])
grouped_mm: bf16[96,64] = f8fx.grouped_mm(quantize, permute_1, reciprocal, view_3, iota, dtype=bf16)
view_4: bf16[4,24,64] = view(grouped_mm, [4, 24, 64])
permute_2: bf16[4,32,24] = permute(primals_1, [0, 2, 1])
bmm: bf16[4,32,64] = bmm(permute_2, tangents_1)
view_5: bf16[96,64] = view(tangents_1, [96, 64])
amax_2: f32[96] = f8fx.amax(view_5, 1)
scale_2: f32[96] = f8fx.scale(amax_2, dtype=e4m3, power_of_2=True)
quantize_2: e4m3[96,64] = f8fx.quantize(view_5, scale_2, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_2: f32[96] = reciprocal(scale_2)
view_6: bf16[128,64] = view(primals_2, [128, 64])
amax_3: f32[128] = f8fx.amax(view_6, 1)
scale_3: f32[128] = f8fx.scale(amax_3, dtype=e4m3, power_of_2=True)
quantize_3: e4m3[128,64] = f8fx.quantize(view_6, scale_3, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_3: f32[128] = reciprocal(scale_3)
view_7: e4m3[4,32,64] = view(quantize_3, [4, 32, 64])
view_8: f32[4,32] = view(reciprocal_3, [4, 32])
permute_3: e4m3[4,64,32] = permute(view_7, [0, 2, 1])
grouped_mm_1: bf16[96,32] = f8fx.grouped_mm(quantize_2, permute_3, reciprocal_2, view_8, iota, dtype=bf16)
view_9: bf16[4,24,32] = view(grouped_mm_1, [4, 24, 32])
return [view_4, view_9, bmm]""",
        )


def test_left_unless_asked_for():
    args = randn(4, 24, 32), weight(4, 32, 64)
    assert reasons(layer, *args, experts="leave") == dict.fromkeys(
        ("output", "grad_input", "grad_weight"), LEFT
    )


def test_left_under_a_recipe_with_one_scale_for_all_rows():
    why = "grouped matmul under a recipe that is not rowwise"
    found = reasons(layer, randn(4, 24, 32), weight(4, 32, 64), recipe="tensorwise")
    assert found == {"output": why, "grad_input": why, "grad_weight": GRADIENT}


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("a100", "no float8 tensor cores on a100"),
        ("l40s", "no grouped float8 gemm on l40s"),
        ("b200", "no grouped float8 gemm on b200"),
    ],
)
def test_left_for_hardware_without_such_a_gemm(target, reason):
    found = reasons(layer, randn(4, 24, 32), weight(4, 32, 64), target=target)
    assert found == {"output": reason, "grad_input": reason, "grad_weight": GRADIENT}


def test_left_where_filtered():
    found = reasons(layer, randn(4, 24, 32), weight(4, 32, 64), filter_fn=lambda fqn, gemm: False)
    assert found == {"output": "filtered", "grad_input": "filtered", "grad_weight": GRADIENT}


def test_left_where_it_is_too_small():
    found = reasons(layer, randn(4, 24, 32), weight(4, 32, 64), select="auto", target="h100")
    assert found == {"output": "too small", "grad_input": "too small", "grad_weight": GRADIENT}


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (randn(4, 24, 40), weight(4, 40, 64)),
        (randn(4, 24, 32), weight(4, 32, 40)),
        (randn(4, 24, 32, dtype=torch.float16), weight(4, 32, 64, dtype=torch.float16)),
        (randn(4, 24, 32, dtype=torch.float32), weight(4, 32, 64, dtype=torch.float32)),
        (randn(4, 24, 32), nn.Parameter(randn(4, 32, 128, grad=False)[..., ::2])),
    ],
    ids=["K is no multiple of 16", "N is none", "float16", "float32", "every second column"],
)
def test_left_where_torch_has_no_such_gemm(x, w):
    assert reasons(layer, x, w) == dict.fromkeys(("output", "grad_input", "grad_weight"), LEFT)


def test_attention_is_left():
    """Where parameters are known: keys that are an input of the graph are none."""
    found = reasons(lambda q, k, w: torch.bmm(q * w, k), randn(4, 24, 32), randn(4, 32, 64), weight(32))
    assert found == dict.fromkeys(("output", "grad_input"), "batched matmul of two activations")


def test_left_where_nobody_told_what_is_a_parameter():
    parsed = f8fx.Options.parse({"select": "all", **OPTIONS})
    found = []
    joint_graphs(
        layer,
        randn(4, 24, 32),
        randn(4, 32, 64),
        transform=lambda graph: found.append(parsed.pipeline(debug=True)(graph)),
    )
    assert found[0].converted == 0


def test_a_product_of_weights_is_left():
    """Nothing in it is data."""
    found = reasons(layer, weight(4, 16, 32), weight(4, 32, 64))
    assert set(found.values()) == {LEFT}


def test_one_matrix_for_all_is_one_matmul():
    """It is no layer of experts, whose matrix would be cast as often."""
    shared = nn.Parameter(randn(32, 64, grad=False), requires_grad=False)
    done, _ = converted(lambda x: torch.bmm(x.transpose(0, 1), shared.expand(4, -1, -1)), randn(24, 4, 32))
    report = report_of(lambda x: torch.bmm(x, shared.expand(4, -1, -1)), randn(4, 24, 32), **OPTIONS)
    assert done == ["output", "grad_input"]
    assert [(d.m, d.k, d.n) for d in report.decisions] == [(96, 32, 64), (96, 64, 32)]


@pytest.mark.parametrize("role", ["output", "grad_input"])
def test_one_of_a_layer_is_converted(role):
    """The other one stays a batched matmul, with its reason."""
    other = "grad_input" if role == "output" else "output"
    recipe = replace(PRESETS["rowwise"], name="mine", **{other: None})
    x = randn(4, 24, 32)
    report = report_of(lambda x: torch.bmm(x, MATRICES), x, recipe=recipe, experts="convert")
    assert [d.role for d in report.decisions if d.converted] == [role]
    left = {d.role: d.reason for d in report.decisions if not d.converted}
    assert set(left) == {other, "grad_weight"} and left["grad_weight"] == GRADIENT
    step = compiled(lambda x: torch.bmm(x, MATRICES), recipe=recipe, experts="convert")
    assert sqnr(torch.bmm(x, MATRICES), step(x)) > 20


ROWS = nn.Parameter(randn(4 * 64, 32, grad=False) / 6)
FORMS = {
    "bmm": (lambda x: torch.bmm(x, MATRICES), (4, 24, 32)),
    "matmul": (lambda x: x @ MATRICES, (4, 24, 32)),
    "rows of experts inside": (lambda x: (x.transpose(0, 1) @ MATRICES).transpose(0, 1), (24, 4, 32)),
    "transposed": (lambda x: x @ ROWS.view(4, 64, 32).mT, (4, 24, 32)),
    "einsum": (lambda x: torch.einsum("etk,ekn->etn", x, MATRICES), (4, 24, 32)),
    "einsum, experts inside": (lambda x: torch.einsum("tek,ekn->ten", x, MATRICES), (24, 4, 32)),
    "einsum of sequences": (lambda x: torch.einsum("besk,ekn->besn", x, MATRICES), (2, 4, 12, 32)),
    "scaled": (lambda x: x @ (MATRICES * 0.5), (4, 24, 32)),
    "a slice": (lambda x: x @ MATRICES[:2], (2, 24, 32)),
    "copied": (lambda x: x @ ROWS.view(4, 64, 32).mT.contiguous(), (4, 24, 32)),
    "a bias": (lambda x: x @ MATRICES + MATRICES[:, :1], (4, 24, 32)),
    "an expert's one row": (lambda x: x @ MATRICES, (4, 1, 32)),
    "rows of one input": (lambda x: x.expand(4, -1, -1) @ MATRICES, (1, 24, 32)),
    "one row of one input": (lambda x: x.expand(4, -1, -1) @ MATRICES, (1, 1, 32)),
    "one token for all": (lambda x: x.repeat(4, 1).view(4, -1, 32) @ MATRICES, (1, 32)),
    "the first columns": (lambda x: x[..., :32] @ MATRICES, (4, 24, 36)),
    "every second column": (lambda x: x[..., ::2] @ MATRICES, (4, 24, 64)),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    form, shape = FORMS[name]
    x = randn(*shape)
    done, left = converted(form, x)
    assert done == ["output", "grad_input"]
    assert left == {"grad_weight": GRADIENT} or (
        1 in shape[:2] and not left
    )  # of one row torch 2.13 makes products
    x = x.detach()
    assert sqnr(form(x), compiled(form, **OPTIONS)(x)) > 20


@pytest.mark.parametrize("loss", [lambda y: y.sum(), lambda y: y.sum(-1), lambda y: y[:2].sum() + y.sum()])
def test_a_loss_in_the_graph(loss):
    """Whose gradient is one number for all elements, or for each row."""
    args = randn(4, 24, 32), weight(4, 32, 64)
    done, left = converted(lambda x, w: loss(torch.bmm(x, w)), *args)
    assert done == ["output", "grad_input"] and left == {"grad_weight": GRADIENT}
    found = reasons(lambda x, w: loss(torch.bmm(x, w)), *args, filter_fn=lambda fqn, gemm: False)
    assert found["output"] == found["grad_input"] == "filtered"


@pytest.mark.parametrize(("experts", "k", "n"), [(0, 32, 64), (4, 0, 64), (4, 32, 0)])
def test_left_where_there_is_nothing(experts, k, n):
    assert not converted(layer, randn(experts, 24, k), weight(experts, k, n))[0]


@pytest.mark.parametrize("left", ["weight on the left", "added to a matrix"])
def test_forms_that_are_left(left):
    fn = {
        "weight on the left": lambda x: MATRICES.mT @ x,
        "added to a matrix": lambda x: torch.baddbmm(MATRICES[:, :1], x.mT, MATRICES),
    }[left]
    done, why = converted(fn, randn(4, 32, 16))
    assert not done and set(why.values()) == {LEFT}


def test_layers_of_one_input_share_its_cast_and_its_rows_ends():
    args = randn(4, 24, 32), weight(4, 32, 64), weight(4, 32, 16)

    def both(x, a, b):
        return torch.bmm(x, a), torch.bmm(x, b)

    with torch.no_grad():
        text = graph_after(both, *args, known=True, **OPTIONS)
    assert text.count("f8fx.grouped_mm") == 2
    assert text.count("= prims.iota(") == text.count("amax(view, 1)") == 1


def test_a_parameter_that_is_written_behind_its_matmul():
    w, x = weight(4, 32, 64), randn(4, 24, 32)

    def step(x, w):
        y = torch.bmm(x, w)
        with torch.no_grad():
            w.mul_(-1)
        return y

    with torch.no_grad():
        before = w.clone()
        assert sqnr(torch.bmm(x, before), compiled(step, **OPTIONS)(x, w)) > 20
        assert torch.equal(w, -before)


def test_sizes_that_change():
    """Of each expert's rows: where they end is computed of their number."""
    fn = lambda x: torch.bmm(x, MATRICES)  # noqa: E731
    step = compiled(fn, dynamic=True, **OPTIONS)
    with f8fx.recording() as reports:
        for rows in (24, 7, 40):
            x = randn(4, rows, 32)
            want, got = fn(x), step(x)
            assert sqnr(want, got) > 20
            grad = randn(*got.shape, grad=False, seed=5)
            assert sqnr(*(torch.autograd.grad(y, x, grad)[0] for y in (want, got))) > 20
    assert [report.converted for report in reports] == [2]
