"""Weights that are kept in float8 and then change, in whatever way."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import f8fx
from f8fx import recording
from f8fx.passes.reuse import ScaleFormat
from f8fx.weights import copies as weight_copies
from f8fx.weights import watch as weight_watch
from f8fx.weights.parameter_data import Installation
from tests.helpers import bf16, compiled, randn
from tests.kept_weights import (
    Net,
    _no_leftovers,  # noqa: F401
    copies_of,
    in_place,
    infer,
    uncached,
    uncached_rows,
    warm,
    x16,
)


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


def test_a_tensor_that_data_could_not_be_set_to_is_not_the_weight():
    model, x = Net(), x16()
    f8 = warm(model, x)
    mine = torch.randn_like(model.first.weight)
    model.first.weight.data = mine
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        model.first.weight.data = torch.empty(48, 32, dtype=bf16, device="meta")
    infer(f8, x)
    infer(f8, x)
    mine.mul_(2)
    assert torch.equal(infer(f8, x), uncached(model, x))


def test_an_alias_stays_on_the_memory_that_it_was_read_on():
    """And what counts its versions is on none."""
    model = Net()
    warm(model, x16())
    weight = model.first.weight
    alias = weight.data
    kept = alias.clone()
    weight.data = torch.zeros_like(weight)
    assert not weight.data.any() and torch.equal(alias, kept)
    assert [probe.numel() for probe in weight_watch.WATCHES[id(weight)].probes] == [0, 0]


def test_another_property_on_data_is_called_and_left_where_it_is(monkeypatch):
    native, reads = inspect.getattr_static(nn.Parameter, "data"), []

    def read(parameter):
        reads.append(parameter)
        return native.__get__(parameter)

    def installed():
        return Installation(lambda parameter, alias: alias, lambda parameter, value: None)

    before, over = property(read, native.__set__), property(read)
    monkeypatch.setattr(nn.Parameter, "data", before, raising=False)
    ours = installed()
    assert nn.Parameter(torch.ones(2)).data.sum() == 2 and len(reads) == 1
    ours.remove()
    assert vars(nn.Parameter)["data"] is before
    ours = installed()
    monkeypatch.setattr(nn.Parameter, "data", over)
    ours.remove()
    assert vars(nn.Parameter)["data"] is over


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


@pytest.mark.parametrize(
    ("requires_grad", "first"), [(True, "before"), (False, "before"), (True, "in a step")]
)
def test_an_evaluation_in_a_steps_closure_is_not_kept(requires_grad, first, casts):
    """A fused step writes after its closure, and its own post-hook runs before those of all optimizers do."""
    model, x = Net(), x16()
    evaluated = model if requires_grad else copy.deepcopy(model).requires_grad_(False)
    for ours, theirs in zip(evaluated.parameters(), model.parameters(), strict=True):
        ours.data = theirs.data
    f8 = compiled(evaluated, weights="cached")
    seen: list[tuple[Tensor, Tensor]] = []
    if first == "before":
        f8 = warm(evaluated, x)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)

    def closure():
        optimizer.zero_grad()
        model(x).float().square().sum().backward()
        for _ in range(2):
            infer(f8, x)

    optimizer.register_step_post_hook(lambda *_: seen.append((infer(f8, x), uncached(evaluated, x))))
    for _ in range(2):
        optimizer.step(closure)
    assert all(torch.equal(*outputs) for outputs in seen) and len(seen) == 2
    assert not torch.equal(seen[0][0], seen[1][0])
    for _ in range(2):  # compiled anew, which AOTAutograd looks at the inputs through `.data` for
        infer(f8, x)
    casts.clear()
    infer(f8, x)
    assert casts == [(16, 32), (16, 64)]  # the inputs alone


def test_frozen_weights_are_kept_where_a_trainer_runs_the_step_in_a_closure(casts):
    """As Lightning does; of a model with adapters, say."""
    model, x = Net().requires_grad_(False), x16()
    adapter = nn.Parameter(torch.ones(32, dtype=bf16))
    optimizer = torch.optim.AdamW([adapter], lr=0.1, fused=True)
    f8 = compiled(lambda x: model(x) * adapter, weights="cached")

    def closure():
        optimizer.zero_grad()
        f8(x).float().sum().backward()

    for _ in range(3):
        casts.clear()
        optimizer.step(closure)
    assert casts == [(16, 32), (16, 64)]  # the inputs alone


def test_hooks_neither_come_nor_go_while_hooks_run(casts):
    """PyTorch iterates over the hooks of all optimizers while it calls them."""
    trained, x, kept = Net(), x16(), []
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)

    @torch.compiler.disable
    def evaluate(*_):
        kept.clear()  # the last weights that are watched
        gc.collect()
        kept.append(Net())
        for _ in range(2):
            assert torch.equal(infer(compiled(kept[0], weights="cached"), x), uncached(kept[0], x))

    hooks = [register_optimizer_step_post_hook(hook) for hook in (evaluate, lambda *_: seen.append(1))]
    seen: list[int] = []
    try:
        for _ in range(3):
            trained(x).sum().backward()
            optimizer.step()
    finally:
        for hook in hooks:
            hook.remove()
    assert len(seen) == 3
    f8 = warm(kept[0], x)
    casts.clear()
    infer(f8, x)
    assert casts == [(16, 32), (16, 64)]  # the inputs alone


def test_garbage_that_was_watched_may_be_collected_while_an_optimizer_looks_for_its_own(monkeypatch):
    models, x = [Net() for _ in range(4)], x16()
    for model in models:
        warm(model, x)
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
    memory_of = weight_watch.memory_of

    def collecting(parameter):
        del models[1:]  # as the collector would, in the midst of the loop
        gc.collect()
        return memory_of(parameter)

    models[0](x).sum().backward()
    weight_watch.memories_changed()
    monkeypatch.setattr(weight_watch, "memory_of", collecting)
    optimizer.step()
    assert len(models) == 1


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


def test_data_read_in_a_frame_that_dynamo_leaves_out_is_not_compiled():
    model, frames, seen = Net(), torch._dynamo.utils.counters["frames"], []

    @torch._dynamo.disable(recursive=False)
    def hook():
        return model.first.weight.data

    def f(x):
        return x + hook().sum()

    for _ in range(2):
        torch._dynamo.reset()
        frames.clear()
        torch.compile(f, backend="eager")(x16())
        seen.append(frames["total"])
        warm(model, x16())  # the property stands
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


def in_inference_mode():
    with torch.inference_mode():
        return nn.Parameter(randn(48, 32, grad=False, seed=3).clone(), requires_grad=False)


#: Weights that can be written to without a trace.
UNWATCHED = {
    "made in inference mode": in_inference_mode,
    "a slice": lambda: nn.Parameter(randn(49 * 32, grad=False)[32:].view(48, 32), requires_grad=False),
    "shared": lambda: nn.Parameter(randn(48, 32, grad=False), requires_grad=False).share_memory_(),
}


@pytest.mark.parametrize("made", UNWATCHED)
def test_weights_that_cannot_be_watched_are_kept_on_a_promise(made):
    """As long as ``refresh_weights`` is called after what was written."""
    weight, x = UNWATCHED[made](), x16()
    f8, dynamic = (compiled(lambda x: x @ weight.t(), weights=w) for w in ("constant", "dynamic"))
    with torch.inference_mode(), recording() as reports:
        wanted = dynamic(x)
        for _ in range(2):  # AOTAutograd looks at the inputs of a first call through `.data`
            assert torch.equal(f8(x), wanted)
        assert [report.reused_weights for report in reports] == [0, 1]
        assert copies_of(weight, promised=True).state is not None
        torch._C.TensorBase.data.__get__(weight).mul_(2)  # nothing here sees it
        assert torch.equal(f8(x), wanted)
        f8fx.refresh_weights([weight])
        assert torch.equal(f8(x), dynamic(x)) and not torch.equal(f8(x), wanted)


@pytest.mark.parametrize("written", ["assigned", "set", "cast and back"])
def test_what_is_noticed_of_weights_made_in_inference_mode(written):
    model, x = nn.Linear(32, 48, bias=False, dtype=bf16), x16()
    model.weight = in_inference_mode()
    f8, dynamic = (compiled(model, weights=w) for w in ("constant", "dynamic"))
    with torch.inference_mode():
        for _ in range(2):
            before = (dynamic(x), f8(x))[1]
        if written == "assigned":
            model.load_state_dict({"weight": model.weight * 2}, assign=True)
        elif written == "set":
            model.weight.data = model.weight * 2
        else:
            model.double().bfloat16()
        after = f8(x)
        assert torch.equal(after, dynamic(x))
        assert torch.equal(after, before) == (written == "cast and back")


def test_a_promise_is_that_of_the_function_it_was_given_for():
    """Another one of the same weights, which come to be shared with other processes, casts them in each call."""
    model, x = Net().requires_grad_(False), x16()
    cached, promised, dynamic = (compiled(model, weights=w) for w in ("cached", "constant", "dynamic"))
    for _ in range(2):
        wanted = [infer(call, x) for call in (dynamic, cached, promised)]
    model.share_memory()
    for call in (cached, promised, cached):
        infer(call, x)
    torch._C.TensorBase.data.__get__(model.first.weight).mul_(2)  # nothing here sees it
    assert torch.equal(infer(promised, x), wanted[0])
    assert torch.equal(infer(cached, x), infer(dynamic, x)) and not torch.equal(infer(cached, x), wanted[0])


@pytest.mark.parametrize("made", [in_inference_mode, lambda: nn.Parameter(randn(48, 32, grad=False))])
def test_nothing_kept_on_a_promise_is_said(made, monkeypatch):
    """Of weights that the graph computes."""
    monkeypatch.setattr("f8fx.backend._WARNED", set())
    weight = made().requires_grad_(False)
    with (
        pytest.warns(UserWarning, match='weights="constant" keeps nothing for a graph'),
        torch.inference_mode(),
    ):
        compiled(lambda x: x @ (weight * weight.abs()).t(), weights="constant")(x16())


def test_what_fsdp_writes_is_nobodys_promise():
    from torch.distributed.fsdp import FSDPModule

    weight = nn.Parameter(randn(4, 4))
    sharded = type("Sharded", (FSDPModule, nn.Linear), {})
    assert "FSDP" in (weight_copies.refusal(weight, promised=True) or "")
    del sharded
    gc.collect()


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


def test_an_optimizer_that_trains_a_weight_frozen_since_its_backward():
    model, x = Net().requires_grad_(False), x16()
    f8 = warm(model, x)
    step(torch.optim.AdamW, fused=True)(
        model
    )  # it asks for gradients that are there, not for those that are wanted
    assert torch.equal(infer(f8, x), uncached_rows(model, x))


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


def test_refresh_weights_frees_the_copies():
    model = Net().requires_grad_(False)
    warm(model, x16())
    copies = weakref.ref(copies_of(model.first.weight))
    f8fx.refresh_weights(model)
    gc.collect()
    assert copies() is None


def test_refresh_weights_refuses_what_has_no_weights():
    model = Net()
    for wrong, hint in (
        (model.named_parameters(), "give .parameters"),
        (model.state_dict(), "OrderedDict"),
        (model.first.weight, "Parameter"),
        ("first", "str"),
        (3, "got a int"),
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


def test_copies_go_when_a_parameter_moves_to_another_device():
    """As ``.to()`` moves models between CPU and GPU, to free memory. Here the other device is meta, which ``.data`` cannot be set to."""
    model, x = Net(), x16()
    f8 = warm(model, x)
    tensors = [next(iter(copies_of(layer.weight).tensors.values())) for layer in (model.first, model.second)]
    moved, kept = map(weakref.ref, tensors)
    del tensors
    weight_watch.watch_of(model.first.weight).was_set(model.first.weight.to("meta"))
    assert moved() is None and kept() is not None
    model.second.weight.data = kept_data = torch.ones_like(model.second.weight)
    assert kept() is not None and kept_data.device == x.device
    assert torch.equal(infer(f8, x), uncached(model, x))


def test_copies_go_when_the_memory_of_a_parameter_is_freed():
    """As trainers do that keep weights elsewhere meanwhile."""
    model, x = Net(), x16()
    f8 = warm(model, x)
    freed = weakref.ref(next(iter(copies_of(model.first.weight).tensors.values())))
    data = model.first.weight.data
    model.first.weight.data = torch.empty(0, dtype=bf16)
    assert freed() is None
    model.first.weight.data = data
    assert torch.equal(infer(f8, x), uncached(model, x))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_process_that_is_forked_meanwhile_can_go_on():
    """A loader's workers, while a thread casts weights."""
    held = threading.Event()

    def hold():
        with weight_watch.LOCK:
            held.set()
            time.sleep(0.2)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        os._exit(not weight_watch.LOCK.acquire(timeout=5))
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert weight_watch.LOCK.acquire(timeout=5)  # nor does this one hold it still
    weight_watch.LOCK.release()


def test_state_dict_pickles_and_copies_know_nothing_of_it():
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    warm(model, x16())
    after = copy.deepcopy(model).state_dict()
    assert list(before) == list(after) and all(torch.equal(before[n], after[n]) for n in before)
    assert not [name for name in vars(model.first.weight) if "f8fx" in name]
