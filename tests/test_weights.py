"""Weights that are kept in float8: ``weights="cached"``, for inference."""

from __future__ import annotations

import copy
import json
import logging
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torchao.quantization import Float8WeightOnlyConfig, quantize_

import f8fx
from f8fx import ops, recording
from f8fx.kernels import cast
from f8fx.passes import reuse
from f8fx.passes.reuse import CastFormat, ScaleFormat
from f8fx.weights import kept
from f8fx.weights import watch as weight_watch
from tests.helpers import bf16, compiled, randn
from tests.kept_weights import (
    RECIPES,
    Net,
    _no_leftovers,  # noqa: F401
    copies_of,
    infer,
    inputs_of_inductor,
    uncached,
    uncached_rows,
    warm,
    x16,
)
from tests.processes import printed_by


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bits_of_casting_in_every_call(recipe, casts):
    model, x = Net(), x16()
    f8 = warm(model, x, recipe=recipe)
    casts.clear()
    y = infer(f8, x)
    assert casts == [(16, 32), (16, 64)]  # the inputs of both layers
    with torch.inference_mode():
        assert torch.equal(f8(x), y)
    assert torch.equal(uncached(model, x, recipe=recipe), y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=() if name == "rowwise" else pytest.mark.long) for name in RECIPES]
)
def test_the_bits_through_inductor(recipe):
    model, x = Net(), x16()
    f8 = warm(model, x, recipe=recipe, executor="inductor")
    y = infer(f8, x)
    model.first.weight.data.mul_(2)
    changed = infer(f8, x)
    assert torch.equal(uncached(model, x, recipe=recipe, executor="inductor"), changed)
    model.first.weight.data.div_(2)
    assert torch.equal(uncached(model, x, recipe=recipe, executor="inductor"), y)


class TestGraph(TestCase):
    def test_the_inference_graph_reads_no_weight(self):
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        log = logging.getLogger("f8fx")
        level = log.level
        log.addHandler(handler)
        log.setLevel(logging.DEBUG)
        try:
            infer(compiled(nn.Linear(32, 48, bias=False, dtype=bf16), weights="cached"), x16())
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
        text = [r for r in records if r.startswith("after tags")][-1]
        self.assertExpectedInline(
            text,
            """\
after tags:
arg0_1: bf16[48,32]
arg1_1: bf16[16,32]
arg2_1: f32[]
arg3_1: e4m3[48,32]
permute: bf16[32,48] = permute(arg0_1, [1, 0])
amax: f32[] = f8fx.amax(arg1_1, None)
scale: f32[] = f8fx.scale(amax, dtype=e4m3, power_of_2=False)
quantize: e4m3[16,32] = f8fx.quantize(arg1_1, scale, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale)
reciprocal_1: f32[] = reciprocal(arg2_1)
permute_1: e4m3[32,48] = permute(arg3_1, [1, 0])
scaled_mm: bf16[16,48] = _scaled_mm(quantize, permute_1, reciprocal, reciprocal_1, None, None, bf16, True)
return [scaled_mm]""",
        )


def test_transposed_weights_padding_and_autocast(casts):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(randn(30, 50))  # neither size a multiple of 16, and read transposed

        def forward(self, x):
            return x @ self.w

    model, x = Odd(), x16(30)
    f8 = warm(model, x)
    casts.clear()
    y = infer(f8, x)
    assert casts == [(16, 30)] and torch.equal(uncached(model, x), y)

    model, x = nn.Linear(32, 48), torch.randn(16, 32)
    with torch.autocast("cpu", dtype=bf16):
        f8 = warm(model, x)
        casts.clear()
        y = infer(f8, x)
        assert casts == [(16, 32)] and torch.equal(uncached(model, x), y)


def test_one_copy_for_all_graphs_that_read_a_weight(casts):
    first, second = nn.Linear(32, 48, bias=False, dtype=bf16), nn.Linear(32, 48, bias=False, dtype=bf16)
    second.weight = first.weight
    a = warm(first, x16())
    casts.clear()
    b = torch.compile(
        lambda x: F.relu(second(x)),
        backend=f8fx.f8fx,
        options={"weights": "cached", "select": "all", "executor": "eager"},
    )
    infer(b, x16())
    infer(b, x16())
    infer(a, x16())
    assert casts.count((48, 32)) <= 1  # AOTAutograd's look at `.data`
    assert len(copies_of(first.weight).tensors) == 2  # scale and data


def test_a_weight_of_two_layers_is_cast_once(casts):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Linear(32, 32, bias=False, dtype=bf16) for _ in range(2))
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x)) @ self.a.weight

    model = Tied()
    f8 = compiled(model, weights="cached")
    y = infer(f8, x16())
    assert casts.count((32, 32)) == 2  # row-major and transposed
    assert torch.equal(y, uncached(model, x16()))


def test_dynamic_shapes_and_recompilation(casts):
    model = Net()
    f8 = compiled(model, weights="cached", dynamic=None)
    results = []
    for m in (16, 16, 24, 40, 16):
        casts.clear()
        x = randn(m, 32, grad=False)
        results.append((x, infer(f8, x)))
    assert not {(64, 32), (32, 64)} & set(casts)
    for x, y in results:
        assert torch.equal(y, uncached_rows(model, x))


def test_two_models_of_one_class_share_code_and_no_weights():
    one, two, x = Net(), Net(), x16()
    options = {"weights": "cached", "select": "all", "executor": "eager", "strict": True}
    torch._dynamo.reset()
    with recording() as reports:
        f8 = [torch.compile(model, backend=f8fx.f8fx, options=options) for model in (one, two)]
        got = [infer(model, x) for model in f8]
    assert len(reports) <= 2
    for model, y in zip((one, two), got, strict=True):
        assert torch.equal(y, uncached(model, x))


def test_auto_knows_that_cached_weights_cost_nothing():
    """At 16 rows a cast in every call eats up what float8 gains; a cached one does not."""
    model = nn.Linear(8192, 64, bias=False, dtype=bf16)
    x = torch.zeros(16, 8192, dtype=bf16)
    converted = {}
    for choice in ("dynamic", "cached"):
        with recording() as reports:
            infer(compiled(model, select="auto", target="h100", weights=choice), x)
        converted[choice] = reports[0].converted
    assert converted == {"dynamic": 0, "cached": 1}


def test_a_weight_that_was_trained_between_two_freezes_is_not_stale():
    """Also where what wrote to it left no trace: a training graph had run."""
    model = Net()
    run, x = compiled(model, weights="cached"), x16()
    for _ in range(3):
        model.requires_grad_(True)
        run(x).sum().backward()
        parameters = list(model.parameters())
        versions = [p._version for p in parameters]
        zeros = [[torch.zeros_like(p) for p in parameters] for _ in range(2)]
        torch._fused_adamw_(
            parameters,
            [p.grad for p in parameters],
            *zeros,
            [],
            [torch.ones(()) for _ in parameters],
            lr=0.5,
            beta1=0.9,
            beta2=0.99,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
        assert [p._version for p in parameters] == versions, "this optimizer leaves traces"
        for parameter in parameters:
            parameter.grad = None
        model.requires_grad_(False)
        y = infer(run, x)
    # a copy is made by way of `.data`, which is a trace
    assert torch.equal(y, infer(compiled(copy.deepcopy(model)), x))


def test_the_log_line_counts_the_weights_that_are_kept():
    """Of a training graph, and of weights that are no parameters, none are."""
    lines = {}
    for name, model in (("inference", Net().requires_grad_(False)), ("training", Net())):
        with recording() as reports:
            compiled(model, weights="cached")(x16())
        lines[name] = reports[0].line()
    with recording() as reports:
        compiled(F.linear, weights="cached")(x16(), x16())
    lines["no parameter"] = reports[0].line()
    assert lines == {
        "inference": "f8fx: 2 of 2 matmuls in float8 (tensorwise); 2 weights kept in float8",
        "training": "f8fx: 5 of 5 matmuls in float8 (tensorwise)",
        "no parameter": "f8fx: 1 of 1 matmuls in float8 (tensorwise)",
    }


def test_the_log_line_counts_the_weights_of_bodies_once():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.a, self.b, self.last = (
                nn.Linear(32, 32, bias=False, dtype=bf16) for _ in range(4)
            )

        def forward(self, x):
            y = self.first(x)
            y = torch.cond(x.sum() > 0, lambda y: self.a(y), lambda y: self.b(y), (y,))
            return self.last(y)

    with recording() as reports:
        infer(compiled(Branches(), weights="cached"), x16())
    assert reports[0].line() == "f8fx: 4 of 4 matmuls in float8 (tensorwise); 2 weights kept in float8"


def test_a_second_compile_knows_the_casts_without_tracing(monkeypatch, tmp_path):
    from f8fx import executor

    monkeypatch.setattr("f8fx.cache.inductor_cache_dir", lambda: str(tmp_path))
    model, x = Net(), x16()
    y = infer(compiled(model, weights="cached"), x)
    monkeypatch.setattr(executor, "trace", None)
    assert torch.equal(infer(compiled(model, weights="cached"), x), y)


def test_a_graph_that_cannot_take_weights_quantizes_them_itself(monkeypatch, casts):
    def fail(*args, **kwargs):
        raise RuntimeError("no such thing")

    monkeypatch.setattr("f8fx.weights.inputs.extended", fail)
    model, x = Net(), x16()
    with pytest.warns(UserWarning, match="quantized in each call .RuntimeError: no such thing"):
        f8 = compiled(model, weights="cached", strict=False)
        y = infer(f8, x)
    casts.clear()
    assert torch.equal(infer(f8, x), y) and len(casts) == 4
    with pytest.raises(Exception, match="no such thing"):
        infer(compiled(model, weights="cached", strict=True), x)


@pytest.mark.parametrize("how", ["computed", "installed"])
def test_a_graph_none_of_whose_weights_is_kept_says_so(monkeypatch, how, casts):
    monkeypatch.setattr("f8fx.backend._WARNED", set())
    model, x = Net(), x16()
    if how == "computed":
        for layer in (model.first, model.second):
            nn.utils.parametrizations.weight_norm(layer)
    f8 = compiled(model, weights="cached")
    with torch._dynamo.config.patch(install_free_tensors=how == "installed"):
        with pytest.warns(UserWarning, match='weights="cached" keeps nothing for a graph'):
            infer(f8, x)
        casts.clear()
        infer(f8, x)
    assert len(casts) == 4


@pytest.mark.parametrize("what", ["kept", "left", "stored", "torchao", "training"])
def test_and_no_other_does(monkeypatch, recwarn, what):
    monkeypatch.setattr("f8fx.backend._WARNED", set())
    model, x = Net(), x16()
    if what == "stored":
        for layer in (model.first, model.second):
            layer.weight = nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
            layer.forward = lambda x, layer=layer: F.linear(x, layer.weight.to(x.dtype), layer.bias)
    if what == "torchao":
        quantize_(model, Float8WeightOnlyConfig(set_inductor_config=False))
    f8 = compiled(model, weights="cached", filter_fqns=["first", "second"] if what == "left" else [])
    if what == "training":
        f8(x).sum().backward()
    else:
        infer(f8, x)
    assert not [w for w in recwarn if "keeps nothing" in str(w.message)]


def test_installed_on_the_stock_backend(casts):
    model, x = Net(), x16()
    torch._dynamo.reset()
    with f8fx.installed(select="all", executor="eager", weights="cached"):
        f8 = torch.compile(model)
        y = infer(f8, x)
        infer(f8, x)
        casts.clear()
        assert torch.equal(infer(f8, x), y) and casts == [(16, 32), (16, 64)]


def test_inductor_is_told_which_inputs_keep_their_address():
    """CUDA graphs then need not copy the weights."""
    seen = inputs_of_inductor(Net(), x16())
    # weight, bias, x, weight, bias; then scale and data of both weights
    assert [is_static for _, is_static in seen] == [True, True, False, *[True] * 6]


def test_peft_merges_are_seen():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(
        Net(), peft.LoraConfig(target_modules=["first"], init_lora_weights=False, r=4)
    ).eval()
    x = x16()
    f8 = warm(model, x)
    before = infer(f8, x)
    for change in (model.merge_adapter, model.unmerge_adapter, model.merge_adapter):
        change()
        infer(f8, x)
        y = infer(f8, x)
        torch._dynamo.reset()
        options = {"select": "all", "executor": "eager"}
        assert torch.equal(infer(torch.compile(model, backend=f8fx.f8fx, options=options), x), y)
        f8 = warm(model, x)
    assert not torch.equal(before, y)


#: Compiles a model for inference with cached weights; prints what happened.
CHILD = """
import json, torch
from torch import nn
import f8fx
from torch._dynamo.utils import counters
from f8fx.passes import Find
ran = []
original = Find.__call__
Find.__call__ = lambda self, *args: (ran.append(1), original(self, *args))[1]
torch.manual_seed(0)
model = nn.Linear(32, 48).to(torch.bfloat16)
f8 = torch.compile(model, backend=f8fx.f8fx, options={"select": "all", "strict": True, "weights": "cached"})
x = torch.ones(16, 32, dtype=torch.bfloat16).div_(3)
with torch.no_grad(), f8fx.recording() as reports:
    first = f8(x).float().sum().item()
    model.weight.mul_(2)
    second = f8(x).float().sum().item()
aot = counters["aot_autograd"]
print(json.dumps({"passes": len(ran), "hits": aot["autograd_cache_hit"], "sums": [first, second],
                  "lines": [r.line() for r in reports]}))
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_second_process_runs_no_pass(tmp_path):
    cold, warm_start = (json.loads(printed_by(CHILD, caches=tmp_path).splitlines()[-1]) for _ in range(2))
    # once to learn the casts, once in the graph that takes them
    assert (cold["passes"], cold["hits"]) == (2, 0)
    assert (warm_start["passes"], warm_start["hits"]) == (0, 1)
    assert warm_start["sums"] == cold["sums"] and cold["sums"][0] != cold["sums"][1]
    assert warm_start["lines"] == [cold["lines"][0] + " [cached]"]


def test_formats_are_told_apart():
    e4m3 = ScaleFormat(torch.float8_e4m3fn, None, False)
    rows = ScaleFormat(torch.float8_e4m3fn, 1, True)
    weight = nn.Parameter(randn(20, 32))
    formats = [e4m3, CastFormat(e4m3), CastFormat(e4m3, True, (16, 16)), rows, CastFormat(rows)]
    got = kept.cached([([weight], 0, formats)])
    assert [tuple(t.shape) for t in got] == [(), (20, 32), (32, 32), (20,), (20, 32)]
    assert torch.equal(got[2][:, :20].view(torch.uint8), got[1].t().contiguous().view(torch.uint8))
    assert torch.equal(got[3], cast.scale(cast.amax(weight, 1), torch.float8_e4m3fn, True))


def test_only_a_cast_by_its_own_amax_has_a_format():
    """That of another tensor, in another dimension, or for another dtype is not what a kept copy was made with."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    w, v = torch.randn(32, 32), torch.randn(32, 32)

    def form(cast):
        graph = make_fx(cast)(w, v).graph
        (quantize,) = graph.find_nodes(op="call_function", target=ops.quantize)
        return reuse._format_of(quantize)

    def quantized(w, amax, scaled_to=e4m3):
        return ops.quantize(w, ops.scale(amax, dtype=scaled_to), dtype=e4m3, dim=1)

    assert form(lambda w, v: quantized(w, ops.amax(w, 1))) == CastFormat(ScaleFormat(e4m3, 1, False))
    assert form(lambda w, v: quantized(w, ops.amax(v, 1))) is None
    assert form(lambda w, v: quantized(w, ops.amax(w, 0))) is None
    assert form(lambda w, v: quantized(w, ops.amax(w, 1), e5m2)) is None
    assert form(lambda w, v: ops.quantize(w, ops.scale(w.max(), dtype=e4m3), dtype=e4m3)) is None
    assert form(lambda w, v: ops.quantize(w, v[0], dtype=e4m3, dim=1)) is None


def test_a_branch_is_not_taken_for_the_graph():
    """Its operands, sorted by name, are as many as the graph's inputs with their copies: the second is like the weight."""
    weight = nn.Parameter(randn(32, 32, grad=False) / 8)

    def f(x):
        y = F.linear(x, weight)
        operands = (x, weight.cos(), y.abs().sum(), y.abs() + 1)
        return y + torch.cond(
            x.sum() > 0,
            lambda x, w, c, d: F.linear(x, w) * c + d,
            lambda x, w, c, d: F.linear(x, w) - c + d,
            operands,
        )

    x = x16()
    with torch.no_grad():
        assert torch.equal(compiled(f, weights="cached")(x), compiled(f)(x))


def test_two_threads_watch_a_parameter_once(monkeypatch):
    """Copies made under a watch that another thread replaced would not be told of changes."""
    lock, weight, first = weight_watch.LOCK, nn.Parameter(randn(4, 4)), []

    class Late:
        def __enter__(self):
            lock.acquire()
            if not first:
                first.append(None)
                first.append(weight_watch.watch_of(weight))

        def __exit__(self, *error):
            lock.release()

    monkeypatch.setattr(weight_watch, "LOCK", Late())
    assert weight_watch.watch_of(weight) is first[1]


def test_functions_that_dynamo_traces_once_more():
    """A float that varies: AOTAutograd finds out, in the first of several traces, that Dynamo must specialize it."""
    layer = nn.Linear(32, 32, dtype=bf16)
    options = {"select": "all", "executor": "eager", "weights": "cached"}
    call = torch.compile(lambda x, t: layer(x) * math.floor(t), backend="f8fx", options=options)
    with torch.no_grad(), recording() as reports, warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in (1.5, 2.1, 3.3):
            call(randn(16, 32, grad=False), t)
    assert [r.reused_weights for r in reports] == [1] * len(reports) and reports


@pytest.fixture
def layer():
    """A layer whose weight is kept."""
    linear = nn.Linear(32, 32, bias=False, dtype=bf16).requires_grad_(False)
    warm(nn.Sequential(linear), x16())
    return linear


def test_data_is_traced_as_it_is_without(layer):
    def f(x):
        return x + layer.weight.data.sum()

    x = x16()
    for traced in (make_fx(f)(x), torch.jit.trace(f, x), make_fx(f, pre_dispatch=True)(x)):
        assert torch.equal(traced(x), f(x))


def test_data_set_is_traced_as_it_is_without(layer):
    x, mine = x16(), torch.ones(32, 32, dtype=bf16)

    def traced(linear):
        def f(x):
            linear.weight.data = mine
            return x + 1

        return make_fx(f)(x).code

    assert traced(layer) == traced(nn.Linear(32, 32, bias=False, dtype=bf16))


def test_data_is_read_in_function_transforms(layer):
    def f(x):
        return (x @ layer.weight.data.t()).float().sum()

    x = x16()
    want = torch.ones(16, 32, dtype=bf16) @ layer.weight
    assert torch.allclose(torch.func.grad(f)(x), want, rtol=1e-2, atol=1e-2)
    assert torch.func.vmap(torch.func.grad(f))(x).shape == x.shape
    assert torch.func.jvp(f, (x,), (x,))[0] == f(x)


def test_frozen_weights_on_meta():
    """A sign that they may have changed, where there are no bits to compare."""
    model = nn.Sequential(nn.Linear(32, 32, dtype=bf16)).requires_grad_(False).to("meta")
    f8 = compiled(model, weights="cached")
    x = torch.empty(16, 32, dtype=bf16, device="meta", requires_grad=True)
    f8(x).sum().backward()
    assert model[0].weight.data.is_meta
    f8(x).sum().backward()


@pytest.mark.parametrize("fails", ["f8fx.passes.Quantize.__call__", "f8fx.weights.inputs.learned"])
@pytest.mark.filterwarnings("ignore:f8fx. a graph runs without float8", "ignore:f8fx. the weights of a graph")
def test_a_training_graph_that_fell_back_has_trained(fails, monkeypatch):
    """After it weights may have been written by an optimizer that leaves no trace."""
    model, x = Net(), x16()
    alias = model.first.weight.data
    model.second.requires_grad_(False)  # so that there is something to keep in training
    f8, trained = compiled(model, weights="cached"), compiled(model, weights="cached", strict=False)
    with monkeypatch.context() as patch:
        patch.setattr(fails, lambda *args, **kwargs: 1 / 0)
        trained(x)
    with torch.no_grad():
        f8(x)
        before = f8(x)
    trained(x).sum().backward()
    alias.mul_(2)
    with torch.no_grad():
        assert not torch.equal(f8(x), before)
