"""Weight casts that are reused: the same bits, made once, and never stale."""

from __future__ import annotations

import copy
import gc
import json
import logging
import math
import sys
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import f8fx
from f8fx import ops, recording
from f8fx.kernels import cast
from f8fx.passes import reuse
from f8fx.passes.reuse import CastFormat, ScaleFormat
from f8fx.weights import copies as weight_copies
from f8fx.weights import kept
from f8fx.weights import watch as weight_watch
from tests.helpers import bf16, compiled, randn
from tests.processes import printed_by

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


class Net(nn.Module):
    def __init__(self, k=32, n=64):
        super().__init__()
        self.first = nn.Linear(k, n, dtype=bf16)
        self.second = nn.Linear(n, k, dtype=bf16)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


def copies_of(*parameters, dim=0):
    """Those that are kept of one parameter, or of several side by side."""
    watches = tuple(map(weight_watch.watch_of, parameters))
    return watches[0].copies[dim, watches]


@pytest.fixture(autouse=True)
def _no_leftovers():
    yield
    torch._dynamo.reset()
    gc.collect()


def x16(k=32, seed=9):
    return randn(16, k, grad=False, seed=seed)


def infer(model, x):
    with torch.no_grad():
        return model(x)


def uncached(model, x, **options):
    return infer(compiled(model, **options), x)


def warm(model, x, **options):
    """The model with cached weights, called until nothing is cast anew."""
    f8 = compiled(model, weights="cached", **options)
    for _ in range(2):  # AOTAutograd looks at the inputs of a first call through `.data`
        infer(f8, x)
    return f8


# -- the bits, and how often they are made


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


def uncached_rows(model, x):
    """Without touching what Dynamo has compiled."""
    return torch.compile(
        copy.deepcopy(model), backend=f8fx.f8fx, options={"select": "all", "executor": "eager"}, dynamic=False
    )(x).detach()


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
    seen = []

    def compile_fx(gm, inputs, **kwargs):
        from torch._inductor.compile_fx import compile_fx as original

        def inner(graph, examples, **more):
            seen.append((len(examples), sorted(more["static_input_idxs"])))
            return graph.forward

        return original(gm, inputs, inner_compile=inner, **kwargs)

    from f8fx.backend import compile_graph

    options = f8fx.Options.parse({"select": "all", "weights": "cached", "strict": True})

    def backend(gm, inputs):
        compile_graph(gm, inputs, options, compile_fx=compile_fx)
        return gm.forward

    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):  # a hit would not come here
        infer(torch.compile(Net(), backend=backend), x16())
    # weight, bias, x, weight, bias; then scale and data of both weights
    assert seen == [(9, [0, 1, 3, 4, 5, 6, 7, 8])]


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


# -- never stale


def step(optimizer: Callable[..., torch.optim.Optimizer], **options) -> Callable[[Net], None]:
    def change(model: Net) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer(model.parameters(), lr=0.5, **options).step()

    return change


def compiled_step(model: Net) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.compile(torch.optim.AdamW(model.parameters(), lr=0.5, fused=True).step, backend="aot_eager")()


def load(assign: bool) -> Callable[[Net], None]:
    def change(model: Net) -> None:
        other = Net()
        model.load_state_dict({name: value * 2 for name, value in other.state_dict().items()}, assign=assign)

    return change


def through_an_alias_kept_from_before(model: Net) -> None:
    # two steps: `.data` is read, the model runs, and only then is the alias written
    model.kept.view(-1)[:100].mul_(3)


def data_of_another_tensor(model: Net) -> None:
    model.first.weight.data = torch.randn_like(model.first.weight)


def merge_lora(model: Net) -> None:
    """As ``peft`` merges an adapter."""
    model.first.weight.data += torch.ones_like(model.first.weight.data)


def there_and_back(model: Net) -> None:
    """Another dtype and back, which may be given the same address."""
    model.to(torch.float32)
    with torch.no_grad():
        model.first.weight.mul_(2)
    model.to(bf16)


def functional(model: Net) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 2, model.parameters())


def in_place(model: Net) -> None:
    with torch.no_grad():
        model.first.weight.add_(1)


def under_inference_mode(model: Net) -> None:
    with torch.inference_mode():
        model.first.weight.add_(1)


def copied(model: Net) -> None:
    with torch.no_grad():
        model.first.weight.copy_(torch.randn_like(model.first.weight))


def through_the_state_dict(model: Net) -> None:
    model.state_dict()["first.weight"].mul_(2)


def initialised(model: Net) -> None:
    nn.init.normal_(model.first.weight)


def foreach(model: Net) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 2)


CHANGES = {
    "fused AdamW": step(torch.optim.AdamW, fused=True),
    "fused SGD": step(torch.optim.SGD, fused=True),
    "foreach AdamW": step(torch.optim.AdamW, foreach=True),
    "SGD": step(torch.optim.SGD, foreach=False),
    "compiled fused AdamW": compiled_step,
    "load_state_dict": load(assign=False),
    "load_state_dict(assign=True)": load(assign=True),
    "p.data.mul_": lambda model: model.first.weight.data.mul_(2),
    "p.data.copy_": lambda model: model.first.weight.data.copy_(torch.ones_like(model.first.weight)),
    "p.data = other": data_of_another_tensor,
    "LoRA merge": merge_lora,
    "alias": through_an_alias_kept_from_before,
    ".to() and back": there_and_back,
    "vector_to_parameters": functional,
    "in place": in_place,
    "in place under inference_mode": under_inference_mode,
    "copy_": copied,
    "detach": lambda model: model.first.weight.detach().mul_(2),
    "state_dict": through_the_state_dict,
    "init": initialised,
    "foreach": foreach,
    "set_": lambda model: model.first.weight.detach().set_(torch.ones_like(model.first.weight)),
}


#: Of which autograd leaves no trace in a weight.
TRACELESS = ("p.data.mul_", "p.data = other", "in place under inference_mode", "load_state_dict", "set_")


@pytest.mark.parametrize(
    ("name", "requires_grad"),
    [
        *((name, True) for name in CHANGES),
        *(pytest.param(n, False, marks=() if n in TRACELESS else pytest.mark.long) for n in CHANGES),
    ],
)
def test_a_changed_weight_is_cast_anew(name, requires_grad):
    torch.manual_seed(0)
    model, x = Net().requires_grad_(requires_grad), x16()
    f8 = warm(model, x)
    model.kept = model.first.weight.data
    before = infer(f8, x)
    assert torch.equal(infer(f8, x), before)
    old = model.first.weight.detach().clone()
    CHANGES[name](model)
    after = infer(f8, x)
    assert torch.equal(uncached(model, x), after), name
    # `set_` of an alias leaves the parameter as it was, and so does torch 2.13's fused SGD for bfloat16 on a CPU
    assert torch.equal(before, after) == torch.equal(old, model.first.weight)


@pytest.mark.parametrize("sets", [1, 2])
def test_a_tensor_that_data_was_set_to_is_the_weight_from_then_on(sets):
    model, x = Net(), x16()
    f8 = warm(model, x)
    for _ in range(sets):
        mine = torch.randn_like(model.first.weight)
        model.first.weight.data = mine
    infer(f8, x)
    infer(f8, x)
    mine.mul_(2)
    assert torch.equal(infer(f8, x), uncached(model, x))


@pytest.mark.parametrize(
    "again",
    [lambda p: setattr(p, "data", p.data), lambda p: setattr(p, "data", p.data.view(-1).view_as(p))],
    ids=["itself", "a view of itself"],
)
def test_setting_data_to_the_memory_it_has_forgets_no_other_tensor_on_it(again):
    model, x = Net(), x16()
    f8 = warm(model, x)
    mine = torch.randn_like(model.first.weight)
    model.first.weight.data = mine
    again(model.first.weight)
    infer(f8, x)
    infer(f8, x)
    mine.mul_(2)
    assert torch.equal(infer(f8, x), uncached(model, x))


@pytest.mark.parametrize("writing", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_writes_through_data_read_between_calls_under_inference_mode(writing):
    """The first reading of ``.data`` is then Dynamo's, in that mode."""
    model, x = Net(), x16()
    f8 = compiled(model, weights="cached")

    def called():
        with torch.inference_mode():
            return f8(x)

    called()
    alias = model.first.weight.data
    called()
    with writing():
        alias.mul_(1.5)
    assert torch.equal(called(), uncached(model, x))


def test_training_and_evaluation_in_turns():
    """With an optimizer that f8fx cannot know."""
    model, x = Net(), x16()
    f8 = compiled(model, weights="cached")
    hidden = [torch._C.TensorBase.data.__get__(p) for p in model.parameters()]  # past the property
    for _ in range(3):
        model.train()
        f8(x).sum().backward()
        for alias in hidden:
            alias.add_(1)
        model.eval()
        y = infer(f8, x)
        want = copy.deepcopy(model)
        assert torch.equal(y, infer(uncompiled_reference(want), x))
        assert torch.equal(infer(f8, x), y)


def uncompiled_reference(model):
    options = {"select": "all", "executor": "eager", "strict": True}
    return torch.compile(model, backend=f8fx.f8fx, options=options)


def test_another_models_optimizer_does_not_mind_a_frozen_model(casts):
    teacher, student, x = Net().requires_grad_(False), Net(), x16()
    f8 = warm(teacher, x)
    CHANGES["fused AdamW"](student)
    casts.clear()
    infer(f8, x)
    assert casts == [(16, 32), (16, 64)]


def test_an_evaluation_in_the_optimizers_own_hook():
    """It runs before the hooks of all optimizers do, and a fused step leaves no other trace."""
    model, x = Net(), x16()
    f8, seen = warm(model, x), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    optimizer.register_step_post_hook(lambda *_: seen.append((infer(f8, x), uncached(model, x))))
    model(x).sum().backward()
    optimizer.step()
    ((got, want),) = seen
    assert torch.equal(got, want)


def test_a_step_that_fails_halfway():
    model, x = Net(), x16()
    f8 = warm(model, x)
    first, *others = model.parameters()
    optimizer = torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=0.5, fused=True)
    model(x).sum().backward()
    del optimizer.param_groups[1]["betas"]
    with pytest.raises(KeyError):
        optimizer.step()
    assert torch.equal(infer(f8, x), uncached(model, x))


def test_data_between_two_graphs_is_read_and_set_without_compiling_for_it():
    """As hooks do that keep weights in a smaller dtype between two calls; behind a graph break Dynamo sees them."""
    seen = []

    def run(weights):
        model = Net()

        def stored(x):
            torch._dynamo.graph_break()
            model.first.weight.data = model.first.weight.data.to(bf16)
            out = model(x)
            torch._dynamo.graph_break()
            model.first.weight.data = model.first.weight.data.to(torch.float16)
            return out

        with recording() as reports:
            torch._dynamo.reset()
            frames = torch._dynamo.utils.counters["frames"]
            frames.clear()
            f8 = compiled(stored, weights=weights, fullgraph=False)
            outs = [infer(f8, x16()) for _ in range(3)]
        seen.append((frames["total"], len(reports)))
        return outs

    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = run("dynamic")
        torch.manual_seed(0)
        for out, plain in zip(run("cached"), expected, strict=True):
            assert torch.equal(out, plain)
    assert seen[0] == seen[1]


def test_data_read_and_set_in_a_graph():
    model = Net()
    infer(compiled(model, weights="cached"), x16())  # the property stands

    def f(x):
        model.first.weight.data = model.first.weight.data * 2
        return x @ model.first.weight.data.t()

    x = x16()
    expected = x @ (model.first.weight.detach() * 2).t()
    assert torch.equal(torch.compile(f, backend="aot_eager", fullgraph=True)(x), expected)


@pytest.mark.parametrize("alias", [lambda p: p.detach(), lambda p: p.data])
def test_a_frozen_model_minds_the_optimizer_of_one_on_its_memory(alias):
    trained = Net()
    served = copy.deepcopy(trained).requires_grad_(False)
    for mine, its in zip(served.parameters(), trained.parameters(), strict=True):
        mine.data = alias(its)
    x = x16()
    f8 = warm(served, x)
    before = infer(f8, x)
    step(torch.optim.AdamW, fused=True)(trained)
    after = infer(f8, x)
    assert not torch.equal(before, after) and torch.equal(after, uncached(served, x))


def test_a_frozen_model_that_moves_onto_the_memory_of_one_in_training():
    """Between two steps, and it is evaluated there, so that its copies are as its memory says."""
    trained, served = Net(), Net().requires_grad_(False)
    x = x16()
    f8 = warm(served, x)
    CHANGES["fused AdamW"](trained)
    for mine, its in zip(served.parameters(), trained.parameters(), strict=True):
        with torch.no_grad():
            mine.set_(its.detach())
    before = infer(f8, x)
    CHANGES["fused AdamW"](trained)
    after = infer(f8, x)
    assert not torch.equal(before, after) and torch.equal(after, uncached(served, x))


def test_an_optimizer_for_each_parameter_looks_for_its_own(monkeypatch):
    """As they run in the backward: with hundreds of weights, none of their steps may look at all of them."""
    model, x = Net(), x16()
    warm(model, x)
    memories, memory_of = [], weight_watch.memory_of

    def asked(parameter):
        memories.append(parameter)
        return memory_of(parameter)

    monkeypatch.setattr(weight_watch, "memory_of", asked)
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD([parameter], lr=0.0) for parameter in parameters]
    model(x).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert 2 * len(parameters) <= len(memories) <= 3 * len(parameters)


def test_optimizers_of_sparse_and_lazy_parameters_are_let_be():
    model, x = Net(), x16()
    f8 = warm(model, x)
    sparse = nn.Parameter(torch.eye(3).to_sparse())
    torch.optim.SGD([sparse, nn.UninitializedParameter()], lr=0.5).step()
    assert torch.equal(infer(f8, x), uncached(model, x))


def test_weights_that_change_without_a_trace_are_never_kept(casts):
    flat = randn(48 * 32 + 5, grad=False)
    model, x = nn.Linear(32, 48, bias=False, dtype=bf16), x16()
    f8 = warm(model, x)
    model.weight.data = flat[5:].view(48, 32)  # a part of another tensor, as flat buffers of optimizers are
    for factor in (2, 3):
        flat.mul_(factor)
        y = infer(f8, x)
        assert torch.equal(y, uncached_rows(model, x))


def test_a_region_is_reported_after_an_attempt_with_kept_weights_failed(monkeypatch):
    class Region(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 32, dtype=bf16)

        @torch.compiler.nested_compile_region
        def forward(self, x):
            return self.layer(x).relu()

    def fail(*args, **kwargs):
        raise RuntimeError("no such thing")

    net = nn.Sequential(Region(), Region(), nn.Linear(32, 32, dtype=bf16))
    with recording() as reports:
        infer(compiled(net), x16())
    wanted = [report.converted for report in reports]
    monkeypatch.setattr("f8fx.weights.inputs.wrapped", fail)
    with recording() as reports, pytest.warns(UserWarning, match="no such thing"):
        infer(compiled(net, weights="cached", strict=False), x16())
    assert [report.converted for report in reports] == wanted == [2]


def test_what_cannot_be_watched_is_refused_with_one_warning(casts):
    weights_refused = f8fx.weights.inputs._SAID
    weights_refused.clear()
    with torch.inference_mode():
        model = nn.Linear(32, 48, bias=False, dtype=bf16)
    x = x16()
    with pytest.warns(UserWarning, match="not cached, and quantized in each call, since it was made under"):
        f8 = compiled(model, weights="cached")
        with torch.inference_mode():
            f8(x)
    with torch.inference_mode():
        model.weight.add_(1)
        y = f8(x)
    assert torch.equal(y, uncached(copy.deepcopy(model), x))


def test_weights_that_other_processes_can_write_are_not_kept():
    """Also where they come to be shared only after they were cached."""
    model, x = Net().requires_grad_(False), x16()
    f8 = warm(model, x)
    weight = model.first.weight
    assert weight_copies.refusal(weight) is None
    model.share_memory()
    assert "shared with other processes" in (weight_copies.refusal(weight) or "")
    infer(f8, x)
    torch._C.TensorBase.data.__get__(weight).mul_(2)  # as another process would: nothing here sees it
    assert torch.equal(infer(f8, x), uncached_rows(model, x))


def test_only_a_module_that_is_sharded_makes_weights_unwatchable():
    """FSDP2's own classes are no sign of one: importing ``replicate``, as trainers do, derives from ``FSDPModule``."""
    from torch.distributed._composable.replicate_with_fsdp import ReplicateModule
    from torch.distributed.fsdp import FSDPModule

    assert issubclass(ReplicateModule, FSDPModule)
    weight = nn.Parameter(randn(4, 4))
    gc.collect()
    assert weight_copies.refusal(weight) is None
    for mixin in (FSDPModule, ReplicateModule):
        sharded = type("Sharded", (mixin, nn.Linear), {})
        assert "FSDP" in (weight_copies.refusal(weight) or "")
        del sharded
        gc.collect()
        assert weight_copies.refusal(weight) is None


def test_weights_of_fsdp1_are_not_kept():
    """It marks them; they are views of a flat parameter."""
    weight = nn.Parameter(randn(4, 4))
    weight._fsdp_flattened = True  # type: ignore[attr-defined]
    assert "FSDP" in (weight_copies.refusal(weight) or "")


def test_without_fsdp_nothing_is_sharded(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.distributed.fsdp", raising=False)
    assert weight_copies.refusal(nn.Parameter(randn(4, 4))) is None


def test_copies_whose_state_is_not_known_are_made_in_every_call():
    """Of parameters that came to be inference tensors after the graph was compiled, which Dynamo does not allow."""
    with torch.inference_mode():
        weight = nn.Parameter(randn(16, 16, grad=False), requires_grad=False)
    scale = ScaleFormat(torch.float8_e4m3fn, None, False)
    copies = weight_copies.Copies(dim=0, in_place=True)
    (before,) = (t.clone() for t in copies.get([weight], [weight_watch.Watch(weight)], [scale], None))
    with torch.inference_mode():
        weight.mul_(2)
    (after,) = copies.get([weight], [weight_watch.Watch(weight)], [scale], None)
    assert torch.equal(before, 2 * after)


@pytest.mark.parametrize("way", ["cached", "reused"])
@pytest.mark.parametrize("training", [True, False])
def test_weights_without_data(way, training):
    """A model on the meta device, whose sizes somebody wants to know."""
    model = Net().to("meta").requires_grad_(training)
    call = compiled(model, weights=way)
    for _ in range(2):
        x = torch.empty(16, 32, dtype=bf16, device="meta", requires_grad=training)
        y = call(x)
    assert y.is_meta and y.shape == (16, 32)
    if training:
        y.sum().backward()
        assert x.grad.is_meta


def test_refresh_weights():
    model, x = Net().requires_grad_(False), x16()
    hidden = torch._C.TensorBase.data.__get__(model.first.weight)
    f8 = warm(model, x)
    for refresh in (
        lambda: f8fx.refresh_weights(model),
        lambda: f8fx.refresh_weights(f8),
        lambda: f8fx.refresh_weights(model.parameters()),
        lambda: f8fx.refresh_weights([nn.Linear(1, 1), model]),
        lambda: f8fx.refresh_weights(model.state_dict().values()),  # the same memory
        lambda: f8fx.refresh_weights([model.first.weight.view(-1)[16:]]),
        f8fx.refresh_weights,
    ):
        before = infer(f8, x)
        hidden.mul_(2)
        assert torch.equal(infer(f8, x), before)  # unseen
        refresh()
        assert torch.equal(infer(f8, x), uncached_rows(model, x))


def test_refresh_weights_refuses_what_has_no_weights():
    model = Net()
    for wrong, hint in (
        (model.named_parameters(), "give .parameters"),
        (model.state_dict(), "OrderedDict"),
        (model.first.weight, "Parameter"),
        ("first", "str"),
        (3, "int"),
    ):
        with pytest.raises(TypeError, match=hint):
            f8fx.refresh_weights(wrong)
    for wrong in (None, [model], 3):
        with pytest.raises(TypeError, match="takes a module"), f8fx.reuse_weights(wrong):
            pass


def test_an_input_that_is_inference_only_shares_memory_with_no_gradient():
    """Cached copies made under inference_mode serve outside of it, and are written there."""
    model, x = Net(), x16()
    f8 = compiled(model, weights="cached")
    with torch.inference_mode():
        f8(x)
    in_place(model)
    y = infer(f8, x)
    assert torch.equal(y, uncached_rows(model, x))


def test_copies_keep_their_address():
    model, x = Net(), x16()
    f8 = warm(model, x)

    def addresses():
        copies = copies_of(model.first.weight)
        return [tensor.data_ptr() for tensor in copies.tensors.values()]

    before = addresses()
    in_place(model)
    infer(f8, x)
    assert addresses() == before


def test_copies_of_a_weight_of_another_size_are_others():
    model, x = nn.Linear(32, 48, bias=False, dtype=bf16), x16()
    f8 = warm(model, x)
    for rows in (64, 1):
        model.weight.data = randn(rows, 32, grad=False)
        assert torch.equal(infer(f8, x), uncached(model, x))


def test_inference_compares_no_copies(monkeypatch):
    """That would wait for the GPU. A write to copies matters only to a backward that may read them still."""
    model, x = Net(), x16()
    f8 = warm(model, x)
    monkeypatch.setattr(weight_copies, "_same_bits", lambda *_: pytest.fail("compared"))
    in_place(model)
    assert torch.equal(infer(f8, x), uncached(model, x))


def test_a_model_takes_its_copies_along():
    model, x = Net(), x16()
    f8 = warm(model, x)
    copies = weakref.ref(copies_of(model.first.weight))
    assert "data" in vars(nn.Parameter)
    del model, f8
    torch._dynamo.reset()
    gc.collect()
    assert copies() is None
    assert not weight_watch.WATCHES and "data" not in vars(nn.Parameter)


def test_state_dict_pickles_and_copies_know_nothing_of_it():
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    warm(model, x16())
    after = copy.deepcopy(model).state_dict()
    assert list(before) == list(after) and all(torch.equal(before[n], after[n]) for n in before)
    assert not [name for name in vars(model.first.weight) if "f8fx" in name]


# -- training


def train(model, call, x, grad):
    x = x.detach().clone().requires_grad_()
    y = call(x)
    y.backward(grad)
    return [y.detach(), x.grad]


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("recipe", RECIPES)
def test_microbatches_cast_each_weight_once(recipe, casts):
    model = Net()
    batches = [x16(seed=seed) for seed in range(3)]
    grad = randn(16, 32, grad=False, seed=5)
    dynamic = compiled(model, recipe=recipe)
    want = [train(model, dynamic, x, grad) for x in batches]
    want_grads = gradients(model)
    model.zero_grad()

    f8 = compiled(model, recipe=recipe, weights="reused")
    made = []
    with f8fx.reuse_weights(model):
        got = []
        for x in batches:
            casts.clear()
            got.append(train(model, f8, x, grad))
            made.append([shape for shape in casts if 16 not in shape])
    assert [len(shapes) for shapes in made] == [4, 0, 0]  # two weights, both layouts
    for a, b in zip(want, got, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(want_grads, gradients(model), strict=True))

    casts.clear()  # outside the block: every call casts
    x = batches[0]
    model.zero_grad()
    after = train(model, f8, x, grad)
    assert len([shape for shape in casts if 16 not in shape]) == 4
    assert all(torch.equal(p, q) for p, q in zip(want[0], after, strict=True))


def test_a_step_inside_the_block_is_seen():
    model, grad = Net(), randn(16, 32, grad=False, seed=5)
    f8 = compiled(model, weights="reused")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    with f8fx.reuse_weights(model):
        for seed in range(2):
            got = train(model, f8, x16(seed=seed), grad)
            optimizer.step()
        got = train(model, f8, x16(), grad)
    want = train(model, compiled(model), x16(), grad)
    assert all(torch.equal(p, q) for p, q in zip(want, got, strict=True))


def test_the_block_frees_its_copies_and_a_pending_backward_keeps_what_it_needs():
    model, x = Net(), x16()
    f8 = compiled(model, weights="reused")
    with f8fx.reuse_weights(model):
        f8(x)
        y = f8(x)
        (scope,) = kept._SCOPES
        copies = [weakref.ref(c) for c in scope.copies.values()]
    in_place(model)
    with f8fx.reuse_weights(model):
        f8(x)
    y.sum().backward()  # of the weights as they were
    del scope
    gc.collect()
    assert not kept._SCOPES and all(c() is None for c in copies)


def test_a_block_in_which_nothing_is_reused_says_so():
    with pytest.warns(UserWarning, match='options={"weights": "reused"}'), f8fx.reuse_weights(Net()):
        pass


def test_weights_that_the_graph_computes_are_named_as_not_reused():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32, bias=False, dtype=bf16))
    f8 = compiled(model, weights="reused")
    with (
        pytest.warns(UserWarning, match="weights that the graph computes .* are cast in every call"),
        f8fx.reuse_weights(model),
    ):
        f8(x16()).sum().backward()


def test_evaluation_between_microbatches():
    model, x, grad = Net(), x16(), randn(16, 32, grad=False, seed=5)
    f8 = compiled(model, weights="reused")
    with f8fx.reuse_weights(model):
        train(model, f8, x, grad)
        y = infer(f8, x)
        train(model, f8, x, grad)
    assert torch.equal(y, uncached_rows(model, x))


@pytest.mark.long
@pytest.mark.slow
def test_microbatches_through_inductor():
    model, x, grad = Net(), x16(), randn(16, 32, grad=False, seed=5)
    want = train(model, compiled(model, executor="inductor"), x, grad)
    want += gradients(model)
    model.zero_grad()
    f8 = compiled(model, executor="inductor", weights="reused")
    with f8fx.reuse_weights(model):
        train(model, f8, x, grad)
        model.zero_grad()
        got = train(model, f8, x, grad)
    got += gradients(model)
    assert all(torch.equal(p, q) for p, q in zip(want, got, strict=True))


# -- parts


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


# -- what reads ``.data`` of a kept weight is no business of its tracer


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
