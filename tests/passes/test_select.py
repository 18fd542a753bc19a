"""*select*: every guard leaves the matmul, and the graph, exactly as it was, and says why."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import f8fx
from f8fx import hardware
from f8fx.passes import Pipeline, describe
from f8fx.recipe import PRESETS
from f8fx.report import Decision
from tests.helpers import bf16, joint_graphs, randn, report_of


def untouched(fn, *args, dynamic=False, **options) -> list[Decision]:
    """Decisions for a graph in which nothing may be converted; asserts that it stays as it was."""
    parsed = f8fx.Options.parse(options)
    pipeline = Pipeline(parsed.recipe, parsed.policy(), parsed.target, debug=True)
    decisions: list[Decision] = []

    def transform(graph):
        before, nodes = describe(graph), list(graph.nodes)
        report = pipeline(graph)
        assert describe(graph) == before
        assert list(graph.nodes) == nodes
        assert report.converted == 0 and report.total > 0
        decisions.extend(report.decisions)

    joint_graphs(fn, *args, transform=transform, dynamic=dynamic)
    return decisions


def reasons(decisions):
    return {d.reason for d in decisions}


def xw(m=32, k=32, n=48, dtype=bf16):
    return randn(m, k, dtype=dtype), randn(n, k, dtype=dtype)


def meta(m, k, n):
    return [torch.empty(*s, dtype=bf16, device="meta", requires_grad=True) for s in ((m, k), (n, k))]


H100 = hardware.find("h100")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.Linear(32, 32, dtype=bf16)
        self.head = nn.Linear(32, 48, dtype=bf16)

    def forward(self, x):
        return self.head(self.attn(x))


def test_float32_is_left_by_default():
    assert reasons(untouched(F.linear, *xw(dtype=torch.float32), select="all")) == {"float32 matmul"}


def test_float64_is_left():
    assert reasons(untouched(F.linear, *xw(dtype=torch.float64), select="all")) == {"float64 matmul"}


def test_integers_are_left():
    a = torch.ones(16, 16, dtype=torch.int32)
    assert reasons(untouched(torch.mm, a, a, select="all")) == {"int32 matmul"}


def test_operands_of_two_dtypes_are_left():
    """PyTorch refuses to multiply them, but for the meta device, whose kernels do not look."""
    args = torch.empty(32, 32, dtype=bf16, device="meta"), torch.empty(48, 32, device="meta")
    assert reasons(untouched(F.linear, *args, select="all")) == {"operands of two dtypes"}


def test_hardware_without_float8():
    for select in ("auto", "all"):
        decisions = untouched(F.linear, *meta(8192, 4096, 4096), select=select, target="a100")
        assert reasons(decisions) == {"no float8 tensor cores on a100"}


def test_cpu_is_never_worth_it():
    decisions = untouched(F.linear, *xw())
    assert reasons(decisions) == {"no float8 tensor cores on cpu"}
    assert 'select="all"' in decisions[0].detail


def test_hardware_without_rowwise_gemms():
    """As ``hardware.of_device`` describes an H100 to a torch that was built with an old CUDA."""
    tensorwise_only = dataclasses.replace(H100, granularities=("tensorwise",))
    for select in ("auto", "all"):
        decisions = untouched(
            F.linear, *meta(8192, 4096, 4096), select=select, recipe="rowwise", target=tensorwise_only
        )
        assert reasons(decisions) == {"no rowwise float8 gemm on h100"}


def test_hardware_without_e5m2():
    """Which is what the gradients are in; the recipe leaves the forward alone, so nothing may change."""
    e4m3_only = dataclasses.replace(H100, float8_dtypes={"e4m3": torch.float8_e4m3fn})
    recipe = f8fx.Recipe("backward only", output=None)
    for select in ("auto", "all"):
        decisions = untouched(
            F.linear, *meta(8192, 4096, 4096), select=select, recipe=recipe, target=e4m3_only
        )
        assert {d.role: d.reason for d in decisions} == {
            "output": "kept in high precision by the recipe",
            "grad_input": "no e5m2 on h100",
            "grad_weight": "no e5m2 on h100",
        }


def test_rowwise_scales_decide_what_pays():
    """A kernel of its own that rescales the result costs what the gemm gains."""
    decisions = {}
    for scales in ("in_gemm", "torchao"):
        report = report_of(
            F.linear,
            *meta(512, 4096, 4096),
            select="auto",
            target="h100",
            recipe="rowwise",
            rowwise_scales=scales,
        )
        decisions[scales] = {d.role: d.speedup for d in report.decisions}
    assert decisions["in_gemm"]["output"] == decisions["torchao"]["output"]
    assert decisions["in_gemm"]["grad_input"] > decisions["torchao"]["grad_input"]


def test_too_small():
    decisions = untouched(F.linear, *xw(), target="h100")
    assert reasons(decisions) == {"too small"}
    assert all(d.speedup is not None and d.speedup < 1 for d in decisions)


def test_padding_that_costs_more_than_it_gains():
    """Float8 itself would pay: it does some columns further."""
    decisions = untouched(F.linear, *meta(8192, 1600, 50257), target="b200")
    assert reasons(decisions) == {"not a multiple of 16"}
    assert {d.detail for d in decisions} == {"K=1600, N=50257: padding would cost more than float8 gains"}
    assert all(d.converted for d in decisions_on("b200", *meta(8192, 1600, 50272)))


def test_padding_is_part_of_the_prediction():
    """The product has columns too many and is copied without them; of the gradients none has."""
    odd, aligned = ({d.role: d for d in decisions_on("h100", *meta(8192, 4096, n))} for n in (50257, 50272))
    assert all(d.converted for d in odd.values())
    gains = {role: odd[role].speedup / aligned[role].speedup for role in odd}
    assert gains["output"] < 0.9
    assert gains["grad_input"] == pytest.approx(1, abs=0.01)
    assert gains["grad_weight"] == pytest.approx(1, abs=0.01)


def test_what_gains_less_than_the_model_is_off_by():
    decisions = untouched(F.linear, *meta(8192, 4096, 1376), target="h100")
    assert reasons(decisions) == {"too small"}
    assert {d.detail for d in decisions} == {
        "too small: float8 would be 1.02x, which is within the model's error of 5%"
    }


def test_a_role_whose_casts_cost_more_than_it_gains():
    """Casts of the gradient serve one layer; their matmuls stay as they were, beside the forward's."""
    kept = {}

    def transform(graph):
        before = {node: node.args for node in graph.nodes if node.target is torch.ops.aten.mm.default}
        options = f8fx.Options.parse({"recipe": "rowwise", "target": "h100"})
        report = Pipeline(options.recipe, options.policy(), options.target, debug=True)(graph)
        decisions = {d.role: d for d in report.decisions}
        assert decisions["output"].converted
        kept.update({role: d for role, d in decisions.items() if not d.converted})
        after = {node: node.args for node in graph.nodes if node.target is torch.ops.aten.mm.default}
        assert len(after) == len(kept) < len(before)
        assert all(before[node] == args for node, args in after.items())

    joint_graphs(F.linear, *meta(2048, 4096, 4096), transform=transform)
    assert set(kept) == {"grad_input", "grad_weight"}
    for role, decision in kept.items():
        assert decision.reason == "casts would cost more than it gains"
        assert decision.detail.startswith(f"{role} alone loses: float8 would be 0.")


def test_sizes_that_are_known_only_at_run_time():
    """Nothing says whether they pay; ``select="all"`` asks for no more than that they are legal."""

    def chosen(x, mask, w):
        return F.linear(x[mask], w)

    args = (randn(64, 32, grad=False), torch.ones(64, dtype=torch.bool), randn(48, 32, grad=False))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        decisions = untouched(chosen, *args, target="h100")
        assert reasons(decisions) == {"size known only at run time"}
        assert {d.detail for d in decisions} == {'select="all" converts'}
        for recipe in PRESETS:
            assert report_of(chosen, *args, recipe=recipe).converted == 1


def test_filter_fqns():
    decisions = untouched(Net(), randn(16, 32), select="all", filter_fqns=["att", "head"])
    assert reasons(decisions) == {"filtered"}
    assert {d.fqn for d in decisions} == {"attn", "head"}


@pytest.mark.parametrize("how", ["closure", "copy"])
def test_filters_know_modules_whose_forward_was_replaced(how):
    """As TorchTitan's tensor parallelism and accelerate's hooks do."""
    net = nn.ModuleDict({"block": Net()})
    net.forward = lambda x: net["block"](x)
    block = net["block"]
    original = block.forward
    if how == "copy":
        block._old_forward = original
        block.forward = lambda *args: block._old_forward(*args)
    else:
        block.forward = lambda *args: original(*args)
    decisions = untouched(net, randn(16, 32), select="all", filter_fqns=["block."])
    assert {d.fqn for d in decisions} == {"block.attn", "block.head"}


def test_only_fqns():
    assert reasons(untouched(Net(), randn(16, 32), select="all", only_fqns=["mlp"])) == {"filtered"}


def test_filter_fn_sees_every_gemm():
    seen = []

    def refuse(fqn, gemm):
        seen.append((fqn, gemm.role, gemm.m, gemm.k, gemm.n, gemm.dtype))
        return False

    assert reasons(untouched(Net(), randn(16, 32), select="all", filter_fn=refuse)) == {"filtered"}
    assert ("head", "output", 16, 32, 48, bf16) in seen
    assert ("attn", "grad_weight", 32, 16, 32, bf16) in seen
    assert len(seen) == 6


def test_pad_never_leaves_odd_sizes():
    decisions = untouched(F.linear, *xw(5, 30, 20), select="all", pad="never")
    assert reasons(decisions) == {"not a multiple of 16"}
    assert {d.detail for d in decisions} >= {'k=30, pad="never"'}


def test_what_is_padded_says_so():
    padded, aligned = (report_of(F.linear, *xw(16, k, 32), select="all").decisions for k in (30, 32))
    assert {(d.converted, d.detail) for d in padded} == {(True, "padded to multiples of 16")}
    assert {(d.converted, d.detail) for d in aligned} == {(True, "")}


def test_pad_never_leaves_a_dynamic_contraction():
    """grad_weight contracts M; nothing says that it is a multiple of 16 at step N."""
    weight = nn.Parameter(randn(48, 32, grad=False))
    x = randn(32, 32)
    torch._dynamo.mark_dynamic(x, 0)
    parsed = f8fx.Options.parse({"select": "all", "pad": "never"})
    roles = {}

    def transform(graph):
        for d in Pipeline(parsed.recipe, parsed.policy())(graph).decisions:
            roles[d.role] = (d.converted, d.reason)

    joint_graphs(lambda x: F.linear(x, weight), x, transform=transform)
    assert roles["grad_weight"] == (False, "not a multiple of 16")
    assert roles["output"][0] and roles["grad_input"][0]


def test_empty():
    x = torch.empty(0, 32, dtype=bf16, requires_grad=True)
    assert reasons(untouched(F.linear, x, randn(48, 32), select="all")) == {"empty"}


def test_the_weight_gradient_of_an_expert_without_rows():
    """Its forward is no matmul any more."""
    weights = randn(2, 48, 32)

    def experts(x):
        return torch.cat(
            [F.linear(rows, w) for rows, w in zip(x.split([16, 0]), weights.unbind(), strict=True)]
        )

    left = [d for d in report_of(experts, randn(16, 32)).decisions if not d.converted]
    assert {d.reason for d in left} == {"empty"}


def test_attention_stays():
    def attention(q, k):
        return q @ k.transpose(-1, -2)

    decisions = untouched(attention, randn(2, 4, 16, 32), randn(2, 4, 16, 32, seed=1), select="all")
    assert reasons(decisions) == {"batched matmul of two activations"}


def test_experts_stay():
    """A grouped matmul, and its two gradients, one of which is grouped by columns."""
    offsets = torch.tensor([16, 32], dtype=torch.int32)

    def experts(x, w):
        return torch._grouped_mm(x, w, offsets)

    decisions = untouched(experts, randn(32, 32), randn(2, 32, 48), select="all")
    assert reasons(decisions) == {"grouped matmul of experts"}
    assert sorted(d.role for d in decisions) == ["grad_input", "grad_weight", "output"]


def test_a_matrix_times_a_vector_stays():
    """Inductor decomposes it to multiply and sum before any pass runs, but a user's own pass may bring one."""
    graph = make_fx(lambda m, v: torch.addmv(torch.mv(m, v), m, v), tracing_mode="fake")(
        randn(32, 32, grad=False), randn(32, grad=False)
    ).graph
    options = f8fx.Options.parse({"select": "all"})
    before = describe(graph)
    decisions = Pipeline(options.recipe, options.policy(), debug=True)(graph).decisions
    assert describe(graph) == before
    assert [(d.reason, d.m, d.n) for d in decisions] == [("matrix times vector", 1, 32)] * 2


def test_an_operator_with_several_results_stays():
    """What PyTorch's own attention takes without gradients; told by the first of them."""

    def attention(x, qkv, b, out, c):
        return torch.ops.aten._native_multi_head_attention(x, x, x, 32, 4, qkv, b, out, c)[0]

    shapes = (2, 16, 32), (96, 32), (96,), (32, 32), (32,)
    graph = make_fx(attention)(*(randn(*shape, grad=False) for shape in shapes)).graph
    options = f8fx.Options.parse({"select": "all"})
    (decision,) = Pipeline(options.recipe, options.policy())(graph).decisions
    assert (decision.reason, decision.m, decision.k, decision.n) == ("inside a fused operator", 16, 32, 32)


class Gram(torch.autograd.Function):
    """Its gradient is no matmul of a layer: gradients are multiplied with each other, and with a constant."""

    @staticmethod
    def forward(ctx, x, constant):
        ctx.save_for_backward(constant)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (constant,) = ctx.saved_tensors
        return grad @ grad.t() @ constant, None


def test_gradients_of_no_layer_stay():
    decisions = untouched(Gram.apply, randn(32, 48), randn(32, 48, grad=False), select="all")
    assert [d.reason for d in decisions] == [
        "both operands are gradients",
        "no forward matmul it is the gradient of",
    ]


def test_gradients_of_complex_matmuls_say_so():
    x, w = (torch.randn(32, 32, dtype=torch.complex64, requires_grad=True) for _ in range(2))
    decisions = untouched(torch.mm, x, w, select="all")
    assert [d.reason for d in decisions] == ["complex64 matmul"] * 3


def test_recipe_without_a_role():
    recipe = f8fx.Recipe("forward only", grad_input=None, grad_weight=None)
    parsed = f8fx.Options.parse({"recipe": recipe, "select": "all"})
    kept = {}

    def transform(graph):
        for d in Pipeline(parsed.recipe, parsed.policy())(graph).decisions:
            kept[d.role] = d.reason

    joint_graphs(F.linear, *xw(), transform=transform)
    assert kept == {
        "output": "converted",
        "grad_input": "kept in high precision by the recipe",
        "grad_weight": "kept in high precision by the recipe",
    }


def decisions_on(target, *args, **options):
    parsed = f8fx.Options.parse({"target": target, **options})
    result = []

    def transform(graph):
        result.extend(Pipeline(parsed.recipe, parsed.policy(), parsed.target)(graph).decisions)

    joint_graphs(F.linear, *args, transform=transform)
    return result


def test_auto_converts_what_pays_on_the_target():
    decisions = decisions_on("h100", *meta(8192, 4096, 8192))
    assert len(decisions) == 3 and all(d.converted for d in decisions)
    assert all(d.speedup is not None and d.speedup > 1 for d in decisions)


def test_auto_says_from_which_m_a_dynamic_gemm_pays():
    weight = torch.empty(4096, 4096, dtype=bf16, device="meta", requires_grad=True)
    x = torch.empty(16, 4096, dtype=bf16, device="meta", requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)
    output = next(d for d in decisions_on("h100", x, weight) if d.role == "output")
    assert not output.converted
    assert "pays for M >= " in output.detail


@pytest.mark.parametrize("rows", [2602, 2603, 2608])
def test_what_is_converted_has_no_more_rows_than_it_is_converted_from(rows):
    weight = torch.empty(4096, 4096, dtype=bf16, device="meta")
    x = torch.empty(rows, 4096, dtype=bf16, device="meta")
    torch._dynamo.mark_dynamic(x, 0)
    (output,) = decisions_on("h100", x, weight)
    least = int(re.search(r"pays for M >= (\d+)", output.detail)[1])
    assert output.converted == (rows >= least)


def test_what_else_is_dynamic_counts_in_what_m_it_pays_from():
    """K grows with M in one of two matmuls, which are alike as they were traced."""
    weights = [torch.empty(4096, 4096, dtype=bf16, device="meta") for _ in range(2)]
    xs = [torch.empty(4096, 4096, dtype=bf16, device="meta") for _ in range(2)]
    for tensor, dim in ((xs[0], 0), (xs[1], 0), (xs[1], 1), (weights[1], 0)):
        torch._dynamo.mark_dynamic(tensor, dim)

    def f(*pairs):
        return [x @ weight for x, weight in pairs]

    def least(*pairs):
        pipeline, reports = f8fx.Options.parse({"target": "h100", "activations": "convert"}).pipeline(), []
        joint_graphs(f, *pairs, transform=lambda graph: reports.append(pipeline(graph)))
        return [int(re.search(r"pays for M >= (\d+)", d.detail)[1]) for d in reports[0].decisions]

    pairs = tuple(zip(xs, weights, strict=True))
    assert least(*pairs) == [*least(pairs[0]), *least(pairs[1])] == [3424, 3600]


@pytest.mark.parametrize("target", ["mi300x", "b200", "h100"])
def test_formats_are_those_of_the_hardware(target):
    """MI300X has the fnuz flavours; everything else the OCP ones."""
    parsed = f8fx.Options.parse({"target": target, "select": "all"})
    texts = []

    def transform(graph):
        Pipeline(parsed.recipe, parsed.policy(), parsed.target)(graph)
        texts.append(describe(graph))

    joint_graphs(F.linear, *meta(8192, 8192, 8192), transform=transform)
    assert ("e4m3fnuz" in texts[0]) == (target == "mi300x")
    assert "_scaled_mm" in texts[0]


@pytest.mark.parametrize("select", ["auto", "all"])
def test_what_the_device_cannot_run_is_left_whatever_the_target(select: str, monkeypatch: pytest.MonkeyPatch):
    """In what is compiled to run; `explain` decides for hardware that is not there."""
    args = xw()
    decided = report_of(F.linear, *args, target="mi300x", select=select).decisions
    assert {d.reason for d in decided} == {
        "target mi300x: no float8_e4m3fnuz on cpu",
        "target mi300x: no float8_e5m2fnuz on cpu",
    }
    large = [torch.empty(8192, 8192, dtype=bf16, device="meta", requires_grad=True) for _ in range(2)]
    assert f8fx.explain(F.linear, *large, target="mi300x", select=select).converted == 3
    assert report_of(F.linear, *args, target="h100", select="all").converted == 3

    from f8fx.passes import select as select_module

    for name, wanted in (("a100", "no float8_e4m3fn on a100"), ("b200", "no rowwise float8 gemm on b200")):
        hardware = f8fx.hardware.find(name)
        if hardware.granularities:  # as with an older CUDA
            hardware = dataclasses.replace(hardware, granularities=("tensorwise",))
        monkeypatch.setattr(select_module, "_hardware_of", lambda device, hardware=hardware: hardware)
        decided = report_of(F.linear, *args, target="h100", select="all", recipe="rowwise").decisions
        assert {d.reason for d in decided} == {f"target h100: {wanted}"}
