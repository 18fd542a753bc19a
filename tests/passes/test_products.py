"""Matmuls of one row or one column that Inductor turned into products and sums under ``coordinate_descent_tuning``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch._inductor.decomposition import select_decomp_table

import f8fx
from f8fx import recording
from f8fx.passes import describe
from f8fx.passes.products import products
from tests.helpers import bf16, compiled, graph_after, joint_graphs, randn, report_of
from tests.long import seldom

aten = torch.ops.aten


def in_parts(a, b):
    """As ``torch._inductor.decomposition.mm`` does it on GPUs."""
    if a.shape[0] != 1 and b.shape[1] != 1:
        return NotImplemented
    products = a.float().unsqueeze(2) * b.float().unsqueeze(0)
    return products.sum(dim=1).to(a.dtype)


@pytest.fixture
def parts(monkeypatch):
    """Matmuls on CPUs are taken apart too."""
    monkeypatch.setitem(select_decomp_table(), aten.mm.default, in_parts)


class Net(nn.Module):
    def __init__(self, requires_grad=True, columns=1):
        super().__init__()
        self.q = nn.Linear(32, 64, bias=False, dtype=bf16)
        self.k = nn.Linear(32, 64, bias=False, dtype=bf16)
        self.down = nn.Linear(64, 32, bias=False, dtype=bf16)
        self.head = nn.Linear(32, columns, bias=False, dtype=bf16)
        self.requires_grad_(requires_grad)

    def forward(self, x):
        return self.head(self.down(self.q(x) * self.k(x).sigmoid()))


def text_of(fn, *args, transform=lambda graph: None):
    texts = []

    def look(graph):
        transform(graph)
        texts.append(describe(graph))

    joint_graphs(fn, *args, transform=look)
    return texts[0]


def test_expected_graph():
    """PyTorch's own decomposition, as on a GPU under ``max-autotune``."""
    x, w = (torch.empty(*size, dtype=bf16, device="meta") for size in ((1, 32), (48, 32)))
    with torch._inductor.config.patch(coordinate_descent_tuning=True):
        assert "_mm" not in (stock := text_of(F.linear, x, w)) and "unsqueeze" in stock
        text = graph_after(F.linear, x, w, target="h100", rowwise_scales="in_gemm", recipe="rowwise")
    assert_expected_inline(
        text,
        """\
arg0_1: bf16[1,32]
arg1_1: bf16[48,32]
amax: f32[1] = f8fx.amax(arg0_1, 1)
scale: f32[1] = f8fx.scale(amax, dtype=e4m3, power_of_2=True)
quantize: e4m3[1,32] = f8fx.quantize(arg0_1, scale, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal: f32[1] = reciprocal(scale)
amax_1: f32[48] = f8fx.amax(arg1_1, 1)
scale_1: f32[48] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=True)
quantize_1: e4m3[48,32] = f8fx.quantize(arg1_1, scale_1, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_1: f32[48] = reciprocal(scale_1)
permute: e4m3[32,48] = permute(quantize_1, [1, 0])
as_strided: f32[1,1] = as_strided(reciprocal, [1, 1], [1, 1])
as_strided_1: f32[1,48] = as_strided(reciprocal_1, [1, 48], [48, 1])
scaled_mm: bf16[1,48] = _scaled_mm(quantize, permute, as_strided, as_strided_1, None, None, bf16, True)
return [scaled_mm]""",
    )


@pytest.mark.parametrize("rows", [7, *seldom(1)])
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_bits_are_those_of_whole_matmuls(rows, requires_grad, recipe, monkeypatch):
    """Of the head, of one column, too. (One of one row as well PyTorch takes apart in another way on CPUs.)"""
    torch.manual_seed(0)
    model = Net(requires_grad, columns=16 if rows == 1 else 1)

    def run():
        x = randn(rows, 32, grad=requires_grad)
        with recording() as reports:
            y = compiled(model, recipe=recipe, target="h100")(x)
            if requires_grad:
                y.sum().backward()
        grads = [p.grad for p in (x, *model.parameters()) if p.grad is not None]
        model.zero_grad()
        decisions = [(d.fqn, d.role, d.m, d.k, d.n, d.reason) for d in reports[0].decisions]
        return [y, *grads], decisions, reports[0].gemms

    whole, decisions, gemms = run()
    monkeypatch.setitem(select_decomp_table(), aten.mm.default, in_parts)
    taken_apart, same_decisions, same_gemms = run()
    assert all(map(torch.equal, whole, taken_apart)) and len(whole) == len(taken_apart)
    assert (decisions, gemms) == (same_decisions, same_gemms)
    assert all(reason == "converted" for *_, reason in decisions)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"filter_fqns": ["q", "k", "down", "head"]}, "filtered"),
        ({"select": "auto", "target": "a100"}, "no float8 tensor cores on a100"),
        ({"select": "auto", "target": "h100"}, "too small"),
    ],
)
@pytest.mark.parametrize("requires_grad", [True, *seldom(False)])
def test_what_is_left_is_as_it_was(parts, options, reason, requires_grad):
    """To the name of each node; and it is reported, gradients too."""
    model, x = Net(requires_grad), randn(1, 32, grad=requires_grad)
    pipeline = f8fx.Options.parse({"select": "all", **options}).pipeline(debug=True)
    reports = []
    left = text_of(model, x, transform=lambda graph: reports.append(pipeline(graph)))
    assert left == text_of(model, x)
    assert len(reports[0].decisions) == (12 if requires_grad else 4)
    assert {d.reason for d in reports[0].decisions} == {reason}


def test_one_of_two_layers_is_left(parts):
    """Decisions are in graph order."""
    report = report_of(Net(False), randn(1, 32, grad=False), filter_fqns=["k"])
    assert [(d.fqn, d.reason) for d in report.decisions] == [
        ("q", "converted"),
        ("k", "filtered"),
        ("down", "converted"),
        ("head", "converted"),
    ]


def test_two_activations_are_left_with_their_reason(parts):
    """Which nothing reports of products and sums but this."""
    w = nn.Parameter(randn(32, 32, grad=False))

    def fn(x):
        y = F.linear(x, w)
        return y @ y.sin().expand(32, 32)

    report = report_of(fn, randn(1, 32, grad=False))
    assert [d.reason for d in report.decisions[:2]] == ["converted", "matmul of two activations"]


def test_products_of_the_model_itself_are_no_matmul(parts):
    w = nn.Parameter(randn(32, 48, grad=False))

    def fn(x):
        return (x.float().unsqueeze(2) * w.float().unsqueeze(0)).sum(1).to(bf16)

    found = []
    joint_graphs(fn, randn(1, 32), transform=lambda graph: found.extend(products(graph)))
    assert found == []


def test_float32(parts):
    """Nothing is cast on the way; kept in high precision unless the recipe says otherwise."""
    x, w = torch.randn(1, 32), nn.Parameter(torch.randn(48, 32), requires_grad=False)
    assert report_of(lambda x: F.linear(x, w), x).reasons == {"float32 matmul": 1}
    recipe = f8fx.Recipe("all", convert_dtypes=(torch.float32,))
    assert report_of(lambda x: F.linear(x, w), x, recipe=recipe).converted == 1


def test_under_autocast_the_weight_is_quantized_from_its_parameter(parts):
    model, x = Net(False).float(), torch.randn(1, 32)
    with torch.autocast("cpu", dtype=bf16):
        text = graph_after(model, x)
    assert "unsqueeze" not in text and "bf16[64,32]" not in text


@pytest.mark.parametrize("taken_apart", [True, False])
def test_a_stored_weight_is_read_by_products_as_well(taken_apart, monkeypatch):
    """They cast it up on the way: its bytes are no gain of float8, as they are where a kernel of its own casts it up."""
    if taken_apart:
        monkeypatch.setitem(select_decomp_table(), aten.mm.default, in_parts)
    x, w = randn(1, 4096, grad=False), randn(4096, 4096, grad=False).to(torch.float8_e4m3fn)
    report = report_of(lambda x, w: F.linear(x, w.to(x.dtype)), x, w, select="auto", target="h100")
    (decision,) = report.decisions
    assert decision.converted is not taken_apart
    assert (decision.speedup < 1.1) is taken_apart


def test_a_product_reads_half_the_bytes_of_what_is_stored_in_float8(parts):
    """It casts them up on the way: no copy is made of them, with or without f8fx."""

    def seconds(dtype):
        x, w = (torch.empty(n, 8192, dtype=d, device="meta") for n, d in ((1, bf16), (8192, dtype)))
        pipeline, reports = f8fx.Options.parse({"target": "h100", "activations": "convert"}).pipeline(), []
        joint_graphs(
            lambda x, w: F.linear(x, w.to(bf16)),
            x,
            w,
            transform=lambda graph: reports.append(pipeline(graph)),
        )
        return reports[0].decisions[0].seconds

    assert seconds(torch.float8_e4m3fn) < 0.6 * seconds(bf16)
