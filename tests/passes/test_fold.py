"""*fold*: batches multiplied by one frozen weight are one matmul, or left as they were to the node."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

import f8fx
from f8fx import recording
from f8fx.passes import Fold, describe
from f8fx.report import GraphReport
from tests.helpers import bf16, compiled, graph_after, joint_graphs, randn, report_of, sqnr
from tests.test_bitwise import PARAMS, run, torchao_of

WEIGHT = nn.Parameter(randn(48, 32, grad=False, seed=1), requires_grad=False)
CONVERTED = {"converted"}


def reasons(report: GraphReport) -> list[str]:
    return [d.reason for d in report.decisions]


def test_expected_graph():
    """The input is copied once, as matrix; the weight is not expanded; the input gradient likewise."""
    text = graph_after(lambda x: F.linear(x.transpose(0, 1), WEIGHT), randn(4, 8, 32))
    assert_expected_inline(
        text,
        """\
primals_1: bf16[4,8,32]
primals_2: bf16[48,32]
tangents_1: bf16[8,4,48]
permute: bf16[8,4,32] = permute(primals_1, [1, 0, 2])
clone: bf16[8,4,32] = clone(permute, memory_format=torch.contiguous_format)
view: bf16[32,32] = view(clone, [32, 32])
amax: f32[] = f8fx.amax(view, None)
scale: f32[] = f8fx.scale(amax, dtype=e4m3, power_of_2=False)
quantize: e4m3[32,32] = f8fx.quantize(view, scale, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale)
amax_1: f32[] = f8fx.amax(primals_2, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[48,32] = f8fx.quantize(primals_2, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal_1: f32[] = reciprocal(scale_1)
permute_1: e4m3[32,48] = permute(quantize_1, [1, 0])
scaled_mm: bf16[32,48] = _scaled_mm(quantize, permute_1, reciprocal, reciprocal_1, None, None, bf16, True)
view_1: bf16[8,4,48] = view(scaled_mm, [8, 4, 48])
view_2: bf16[8,4,48] = view(view_1, [8, 4, 48])
view_3: bf16[32,48] = view(tangents_1, [32, 48])
amax_2: f32[] = f8fx.amax(view_3, None)
scale_2: f32[] = f8fx.scale(amax_2, dtype=e5m2, power_of_2=False)
quantize_2: e5m2[32,48] = f8fx.quantize(view_3, scale_2, dtype=e5m2, transpose=False, align=[1, 1])
reciprocal_2: f32[] = reciprocal(scale_2)
quantize_3: e4m3[32,48] = f8fx.quantize(primals_2, scale_1, dtype=e4m3, transpose=True, align=[1, 1])
permute_2: e4m3[48,32] = permute(quantize_3, [1, 0])
scaled_mm_1: bf16[32,32] = _scaled_mm(quantize_2, permute_2, reciprocal_2, reciprocal_1, None, None, bf16, False)
view_4: bf16[8,4,32] = view(scaled_mm_1, [8, 4, 32])
view_5: bf16[8,4,32] = view(view_4, [8, 4, 32])
permute_3: bf16[4,8,32] = permute(view_5, [1, 0, 2])
return [view_2, permute_3, None]""",
    )


def test_a_slice_of_one_row_is_read_where_it_lies():
    """The last token of every sequence, as before an output head."""
    text = graph_after(lambda x: F.linear(x[:, -1:], WEIGHT), randn(4, 8, 32, grad=False))
    assert_expected_inline(
        text,
        """\
arg0_1: bf16[4,8,32]
arg1_1: bf16[48,32]
slice: bf16[4,1,32] = slice(arg0_1, 1, -1, 9223372036854775807)
view: bf16[4,32] = view(slice, [4, 32])
amax: f32[] = f8fx.amax(view, None)
scale: f32[] = f8fx.scale(amax, dtype=e4m3, power_of_2=False)
quantize: e4m3[4,32] = f8fx.quantize(view, scale, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale)
amax_1: f32[] = f8fx.amax(arg1_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[48,32] = f8fx.quantize(arg1_1, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal_1: f32[] = reciprocal(scale_1)
permute: e4m3[32,48] = permute(quantize_1, [1, 0])
scaled_mm: bf16[4,48] = _scaled_mm(quantize, permute, reciprocal, reciprocal_1, None, None, bf16, True)
view_1: bf16[4,1,48] = view(scaled_mm, [4, 1, 48])
view_2: bf16[4,1,48] = view(view_1, [4, 1, 48])
return [view_2]""",
    )


FORMS = {
    "turned": lambda x, w: F.linear(x.transpose(0, 1), w),
    "with a bias": lambda x, w: F.linear(x.transpose(0, 1), w, w[:, 0]),
    "a slice": lambda x, w: F.linear(x[:, 1:], w),
    "one token": lambda x, w: F.linear(x[:, -1:], w),
    "@": lambda x, w: x[:, 1:] @ w.t(),
    "four dimensions": lambda x, w: F.linear(x.unflatten(2, (2, 16)).transpose(1, 2).flatten(3), w[:, :16]),
    "computed from the weight": lambda x, w: F.linear(x.transpose(0, 1), w * 0.5 + w[:1]),
    "two layers, one input": lambda x, w: F.linear(x[:, 1:], w) * F.linear(x[:, 1:], w.flip(0)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("training", [False, True])
def test_forms(form, training):
    x = randn(4, 8, 32, grad=training)
    with recording() as reports:
        y = compiled(lambda x: FORMS[form](x, WEIGHT))(x)
        if training:
            y.float().square().sum().backward()
    assert set(reasons(reports[0])) == CONVERTED, reports[0].decisions
    want = FORMS[form](x, WEIGHT)
    assert sqnr(want.detach(), y.detach()) > 20
    if training:
        got, x.grad = x.grad, None
        want.float().square().sum().backward()
        assert sqnr(x.grad, got) > 15  # gradients are e5m2


def test_layers_of_one_input_share_its_cast():
    weights = randn(48, 32, grad=False), randn(48, 32, grad=False, seed=1)

    def layers(x, a, b):
        x = x[:, 1:]
        return F.linear(x, a) * F.linear(x, b)

    text = graph_after(layers, randn(4, 8, 32, grad=False), *weights)
    assert text.count("f8fx.amax(") == 3 and text.count("clone(") == 1


@pytest.mark.parametrize("recipe", PARAMS)
def test_bits_are_torchaos(recipe):
    """On an input made contiguous, which its rowwise recipes ask for."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Linear(64, 96, dtype=bf16).requires_grad_(False)
            self.layer = nn.Linear(96, 32, dtype=bf16)

        def forward(self, x):
            x = x.transpose(0, 1)
            x = self.frozen(x.contiguous() if self.contiguous else x)[:, 1:]
            return self.layer(x.contiguous() if self.contiguous else x)

    torch.manual_seed(0)
    model = Turned()
    reference = torchao_of(model, recipe)
    model.contiguous, reference.contiguous = False, True
    x, grad = randn(8, 4, 64, grad=False), randn(4, 7, 32, grad=False, seed=2)
    want = [*run(reference, x, grad), reference.layer.weight.grad, reference.layer.bias.grad]
    got = run(compiled(model, recipe=recipe, merge="never", rowwise_scales="torchao"), x, grad)
    got += [model.layer.weight.grad, model.layer.bias.grad]
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)


def test_autocast_without_gradients():
    """A rounded weight needs no gradient there, even of a parameter that does."""
    layer = nn.Linear(32, 48, bias=False)
    x = randn(4, 8, 32, dtype=torch.float32, grad=False)
    with torch.no_grad(), torch.autocast("cpu", bf16):
        report = report_of(lambda x: layer(x.transpose(0, 1)), x)
    assert reasons(report) == ["converted"]
    reference = torchao_of(nn.Sequential(copy.deepcopy(layer)), "tensorwise")
    with torch.no_grad(), torch.autocast("cpu", bf16):
        got = compiled(lambda x: layer(x.transpose(0, 1)))(x)
        want = reference(x.transpose(0, 1).to(bf16))
    assert torch.equal(got, want)


def test_dynamic_sizes():
    call = compiled(lambda x: F.linear(x[:, 1:], WEIGHT), dynamic=True)
    for batch, length in ((4, 9), (3, 17)):
        x = randn(batch, length, 32)
        with recording() as reports:
            y = call(x)
            y.sum().backward()
        assert all(set(reasons(report)) == CONVERTED for report in reports)
        assert sqnr(F.linear(x[:, 1:], WEIGHT).detach(), y.detach()) > 20 and x.grad.shape == x.shape


def test_frozen_layers_of_one_input_are_merged():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = (nn.Linear(4096, 4096, bias=False, dtype=bf16) for _ in range(2))

        def forward(self, x):
            x = x[:, 1:]
            return self.q(x) * self.k(x)

    with torch.device("meta"):
        model, x = Heads().requires_grad_(False), torch.empty(2, 4097, 4096, dtype=bf16)
    rows = f8fx.explain(model, x, target="h100").rows
    assert [(row.converted, row.merge) for row in rows] == [(True, "merged with k"), (True, "merged with q")]


def untouched(fn, *args, **options):
    """The report; the graph is the one without the pass, to the name of each node."""
    reports: list[GraphReport] = []
    pipeline = f8fx.Options.parse({"select": "all", **options}).pipeline(debug=True)

    def transform(graph):
        before = [node.format_node() for node in graph.nodes]
        reports.append(pipeline(graph))
        assert [node.format_node() for node in graph.nodes] == before

    joint_graphs(fn, *args, transform=transform)
    return reports[0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"filter_fn": lambda name, gemm: False}, "filtered"),
        ({"only_fqns": ["head"]}, "filtered"),
        ({"select": "auto", "target": "a100"}, "no float8 tensor cores on a100"),
        ({"select": "auto", "target": "h100"}, "too small"),
    ],
)
def test_what_is_not_converted_is_left_with_its_own_reason(options, reason):
    report = untouched(lambda x: F.linear(x.transpose(0, 1), WEIGHT), randn(4, 8, 32), **options)
    assert [(d.reason, d.role, d.m, d.k, d.n) for d in report.decisions] == [
        (reason, "output", 32, 32, 48),
        (reason, "grad_input", 32, 48, 32),
    ]


def test_one_is_converted_and_the_next_one_left():
    """Which reads its result, so that the first look saw through the matmul that is undone."""

    def two(x):
        return F.linear(F.linear(x.transpose(0, 1), WEIGHT), WEIGHT.t()).sum()

    for kept in (48, 32):
        report = report_of(two, randn(4, 8, 32), filter_fn=lambda name, gemm, kept=kept: gemm.n == kept)
        assert sorted((d.n, d.converted) for d in report.decisions if d.role == "output") == [
            (32, kept == 32),
            (48, kept == 48),
        ]


@pytest.mark.parametrize("role", ["output", "grad_input"])
def test_one_of_a_layer_is_converted(role):
    """A gradient is known by its forward matmul also where that is left, and the other way round."""
    report = report_of(
        lambda x: F.linear(x.transpose(0, 1), WEIGHT),
        randn(4, 8, 32),
        filter_fn=lambda name, gemm: gemm.role == role,
    )
    found = {d.role: (d.converted, d.reason) for d in report.decisions}
    other = "grad_input" if role == "output" else "output"
    assert found == {role: (True, "converted"), other: (False, "filtered")}


def test_gradients_taken_in_the_graph_keep_their_roles():
    """They have AOTAutograd's mark (torch 2.11: none), and no tangents."""
    found = []
    for turned in (False, True):

        def f(x, turned=turned):
            with torch.enable_grad():
                loss = F.linear(x.transpose(0, 1) if turned else x, WEIGHT).float().square().sum()
                return torch.autograd.grad(loss, x)

        with torch._dynamo.config.patch(trace_autograd_ops=True), recording() as reports:
            compiled(f)(randn(4, 8, 32))
        found.append([(d.role, d.reason) for d in reports[0].decisions])
    assert found[0] == found[1]
    marked = torch.__version__ >= (2, 12)
    assert found[0] == [("output", "converted"), ("grad_input" if marked else "output", "converted")]


def test_the_copy_of_the_input_is_the_casts():
    """No kernel writes it that an amax could ride in: a turned layer pays where a plain one does."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1024, 14336, bias=False, dtype=bf16).requires_grad_(False)

        def forward(self, x):
            return self.layer(x.transpose(0, 1) if self.turned else x)

    found = []
    for turned in (True, False):
        with torch.device("meta"):
            model, x = Turned(), torch.empty(1024, 4, 1024, dtype=bf16, requires_grad=True)
        model.turned = turned
        explanation = f8fx.explain(model, x, target="h100")
        found.append([(row.role, row.converted, row.detail, row.speedup) for row in explanation.rows])
    assert found[0] == found[1]


def test_the_target_is_named_where_all_are_undone():
    report = untouched(lambda x: F.linear(x.transpose(0, 1), WEIGHT), randn(4, 8, 32), select="auto")
    assert report.target == "cpu"
    assert reasons(report) == ["no float8 tensor cores on cpu"] * 2


def test_the_gradient_of_a_weight_that_the_model_expands():
    """The model sums it over the batch itself."""
    weight = nn.Parameter(randn(32, 48, grad=False))
    report = report_of(lambda x: torch.bmm(x, expanded(weight, 4)), randn(4, 16, 32))
    assert {d.role: d.reason for d in report.decisions} == {
        "output": "converted",
        "grad_input": "converted",
        "grad_weight": "batched gradient of one matrix",
    }


def test_keys_are_no_weight_where_parameters_are_known():
    def attention(q, k):
        return torch.bmm(q * WEIGHT[0], expanded(k.t(), 4))

    report = report_of(attention, randn(4, 16, 32, grad=False), randn(24, 32, grad=False))
    assert reasons(report) == ["batched matmul with one matrix"]


def test_nothing_of_it_is_left_behind():
    """Before anything that is dead is taken out."""
    counts = []

    def transform(graph):
        f8fx.Options.parse({"select": "all"}).pipeline(debug=True)(graph)
        counts.append(sum(node.target is torch.ops.aten.bmm.default for node in graph.nodes))

    joint_graphs(lambda x: F.linear(x.transpose(0, 1), WEIGHT), randn(4, 8, 32), transform=transform)
    assert counts == [0]


def expanded(w, batch):
    return w.unsqueeze(0).expand(batch, -1, -1)


@pytest.mark.parametrize(
    ("fn", "args", "reason"),
    [
        pytest.param(
            # batch 1 and one head of keys: they are expanded over the heads of queries
            lambda q, k: torch.bmm(q[0], expanded(k.tanh()[0, 0].t(), 4)),
            ((1, 4, 16, 32), (1, 1, 16, 32)),
            "batched matmul with one matrix",
            id="attention with one head of keys",
        ),
        pytest.param(
            lambda q, k: torch.bmm(q[0], expanded(k[0, 0].t(), 4)),
            ((1, 4, 16, 32), (1, 1, 16, 32)),
            "batched matmul with one matrix",
            id="cached keys",
        ),
        pytest.param(
            lambda x, w: torch.bmm(expanded(w, 4), x),
            ((4, 32, 16), (48, 32)),
            "batched matmul with one matrix",
            id="on the left",
        ),
        pytest.param(
            # sizes by which rows could be taken for the batch
            lambda x, w: torch.bmm(x, expanded(w, 16).transpose(0, 1)),
            ((16, 16, 16), (16, 16)),
            "batched matmul of two activations",
            id="expanded over rows",
        ),
        pytest.param(
            lambda q, k: torch.bmm(q, k.squeeze(0).expand(4, -1, -1)),
            ((4, 16, 32), (1, 1, 32, 24)),
            "batched matmul of two activations",
            id="cached keys of one head",
        ),
        pytest.param(
            lambda q, k: torch.bmm(q, expanded(k.view(32, 24), 4)),
            ((4, 16, 32), (1, 1, 32, 24)),
            "batched matmul with one matrix",
            id="cached keys of one head as a matrix",
        ),
        pytest.param(
            lambda x, w: torch.bmm(x, w),
            ((4, 16, 32), (4, 32, 48)),
            "batched matmul of two activations",
            id="a matrix for each",
        ),
        pytest.param(
            lambda x, w: torch.bmm(x, w.unsqueeze(2).expand(-1, -1, 48)),
            ((4, 16, 32), (4, 32)),
            "batched matmul of two activations",
            id="expanded over columns",
        ),
    ],
)
def test_must_not_change(fn, args, reason):
    tensors = [randn(*shape, grad=False, seed=i) for i, shape in enumerate(args)]
    assert reasons(untouched(fn, *tensors)) == [reason]


def test_alone_it_can_be_undone():
    """As a pass on any graph, without the pipeline."""
    seen = []

    def transform(graph):
        before, nodes = describe(graph), list(graph.nodes)
        folded = Fold()(graph)
        assert [each.matmul.target for each in folded] == [torch.ops.aten.mm.default] * 2
        assert "mm(" in describe(graph) and describe(graph) != before
        for each in folded:
            each.undo()
        assert describe(graph) == before and list(graph.nodes) == nodes
        seen.append(True)

    joint_graphs(lambda x: F.linear(x.transpose(0, 1), WEIGHT), randn(4, 8, 32), transform=transform)
    assert seen
