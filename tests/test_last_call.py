"""Weights of which nothing has changed are not asked one by one."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from f8fx import refresh_weights
from f8fx.weights import watch as weight_watch
from f8fx.weights.last_call import LastCall
from f8fx.weights.watch import WATCHES
from tests.helpers import bf16, compiled, randn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 64, dtype=bf16), nn.Linear(64, 32, dtype=bf16)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


@pytest.fixture
def asked(monkeypatch):
    """Parameters whose state was asked for."""
    parameters = []
    state = weight_watch.Watch.state

    def ask(watch, parameter, *how):
        parameters.append(parameter)
        return state(watch, parameter, *how)

    monkeypatch.setattr(weight_watch.Watch, "state", ask)
    yield parameters
    torch._dynamo.reset()


@pytest.fixture
def served(asked):
    """A frozen model whose weights are cached, compiled, called until nothing is asked; and its input."""
    model, x = Net().requires_grad_(False), randn(16, 32, grad=False)
    f8 = compiled(model, weights="cached")
    for _ in range(3):  # compiling reads `.data`, after which a weight is cast again
        f8(x)
    asked.clear()
    f8(x)
    assert not asked
    return model, f8, x


def replaced(model):
    """By another parameter on its memory, which counts the same versions."""
    model.old = [model.second.weight]
    model.second.weight = nn.Parameter(model.second.weight.detach(), requires_grad=False)


def moved(model):
    """As those do it who free the memory of a weight for a while."""
    storage, bits = model.second.weight.untyped_storage(), model.second.weight.clone()
    before = storage.data_ptr()
    storage.resize_(0)
    model.blocks = [torch.empty_like(bits) for _ in range(8)]
    storage.resize_(bits.nbytes)
    assert storage.data_ptr() != before
    storage.copy_(bits.untyped_storage())


def trained_elsewhere(model):
    """A training graph with this option runs: an optimizer of the user's own may follow."""
    model.others = [nn.Linear(32, 32, dtype=bf16)]  # when it goes, that is a sign of its own
    options = {"executor": "eager", "select": "all", "strict": True, "weights": "cached"}
    other = torch.compile(
        model.others[0], backend="f8fx", options=options
    )  # `compiled` would forget the graph
    other(randn(16, 32, grad=False)).sum().backward()


def stepped(model):
    model.second.weight.requires_grad_(True).grad = torch.zeros_like(model.second.weight)
    optimizer = torch.optim.AdamW([model.second.weight], fused=True, lr=0.0, weight_decay=0.0)
    model.second.weight.requires_grad_(False)
    version = model.second.weight._version
    optimizer.step()
    assert model.second.weight._version == version


CHANGES = {
    "written": lambda model: model.second.weight.mul_(1),
    "replaced": replaced,
    "moved": moved,
    "read": lambda model: model.second.weight.data,
    "refreshed": refresh_weights,
    "stepped": stepped,
    "trained": trained_elsewhere,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_sign_of_change(served, asked, change):
    model, f8, x = served
    change(model)
    asked.clear()
    f8(x)
    assert any(parameter is model.second.weight for parameter in asked)
    f8(x)  # AOTAutograd may read `.data` in the first call after it has compiled something else
    asked.clear()
    f8(x)
    assert not asked


def test_layers_that_share_a_graph(asked):
    """Compiled one by one, as accelerate and TorchTitan do it."""
    layers, x = nn.Sequential(*(Net() for _ in range(3))).requires_grad_(False), randn(16, 32, grad=False)
    options = {"executor": "eager", "select": "all", "strict": True, "weights": "cached"}
    for layer in layers:
        layer.compile(backend="f8fx", options=options)
    for _ in range(3):
        layers(x)
    asked.clear()
    before = layers(x)
    assert not asked
    layers[1].second.weight.mul_(2)
    assert not torch.equal(layers(x), before)
    assert {id(parameter) for parameter in asked} == {id(layers[1].first.weight), id(layers[1].second.weight)}
    asked.clear()
    layers(x)
    assert not asked


def test_what_is_written_while_copies_are_made():
    """By another thread: it may be in them or not."""
    call, parameter, fetched = LastCall(), nn.Parameter(randn(4, 4, grad=False), requires_grad=False), []

    def fetch():
        fetched.append(True)
        if len(fetched) == 1:
            parameter.mul_(2)
        return [], True

    for _ in range(3):
        call.tensors([parameter], fetch)
    assert len(fetched) == 2


def test_parameters_that_are_to_be_trained_now():
    """Optimizers that are not torch.optim's mind them from then on. (Dynamo compiles such a graph anew.)"""
    call, parameter, fetched = LastCall(), nn.Parameter(randn(4, 4, grad=False), requires_grad=False), []

    def fetch():
        fetched.append(parameter.requires_grad)
        return [], True

    for _ in range(2):
        call.tensors([parameter], fetch)
    parameter.requires_grad_(True)
    for _ in range(2):
        call.tensors([parameter], fetch)
    assert fetched == [False, True]


@pytest.mark.parametrize("set_to", [False, True], ids=["read", "set"])
def test_writes_through_aliases_later(served, asked, set_to):
    model, f8, x = served
    alias = model.second.weight.data
    if set_to:
        alias = torch.zeros_like(alias)
        model.second.weight.data = alias
    f8(x)
    asked.clear()
    f8(x)
    assert not asked
    alias.fill_(0.25)
    got = f8(x)
    assert asked and torch.equal(got, compiled(model)(x))  # compiling reads `.data`


def test_while_a_cuda_graph_is_captured(served, asked, casts, monkeypatch):
    """Kernels run at every replay, when nobody looks: weights are cast in the graph."""
    _, f8, x = served
    for module in ("f8fx.weights.last_call", "f8fx.weights.copies"):
        monkeypatch.setattr(f"{module}.capturing", lambda: True)
    for _ in range(2):
        casts.clear()
        f8(x)
        assert {(64, 32), (32, 64)} <= set(casts)


def test_what_is_captured_into_a_cuda_graph_is_the_graphs(served, monkeypatch):
    """Its replays write there, whatever becomes of the copies that calls keep."""

    model, f8, x = served

    def kept():
        watches = [WATCHES[id(parameter)] for parameter in (model.first.weight, model.second.weight)]
        copies = [each for watch in watches for each in watch.copies.values()]
        return [data for each in copies for data in each.tensors.values() if data.itemsize == 1]

    before = [data.view(torch.uint8).clone() for data in kept()]
    for data in kept():
        data.view(torch.uint8).zero_()
    for module in ("f8fx.weights.last_call", "f8fx.weights.copies"):
        monkeypatch.setattr(f"{module}.capturing", lambda: True)
    f8(x)
    assert before and not any(data.view(torch.uint8).any() for data in kept())
    monkeypatch.undo()
    refresh_weights(model)
    f8(x)
    assert all(torch.equal(data.view(torch.uint8), bits) for data, bits in zip(kept(), before, strict=True))


def test_the_call_after_a_cuda_graph_was_captured(served, asked, monkeypatch):
    """What was cast into the graph has no values before its first replay, and is not kept beyond it."""
    model, f8, x = served
    want = f8(x)
    for weight in (model.first.weight, model.second.weight):
        for each in WATCHES[id(weight)].copies.values():
            for data in each.tensors.values():
                data.fill_(2)
    for module in ("f8fx.weights.last_call", "f8fx.weights.copies"):
        monkeypatch.setattr(f"{module}.capturing", lambda: True)
    assert torch.equal(f8(x), want)
    for module in ("f8fx.weights.last_call", "f8fx.weights.copies"):
        monkeypatch.setattr(f"{module}.capturing", lambda: False)
    asked.clear()
    assert not torch.equal(f8(x), want) and asked  # it read what is kept, which was overwritten here


@pytest.mark.filterwarnings("ignore:f8fx. a weight is not cached")
def test_weights_that_are_cast_in_each_call_anyway(asked):
    """Those that are a part of a larger tensor: nothing is kept, and so nothing is told apart."""
    memory = torch.zeros(2, 64, 32, dtype=bf16)
    layer, x = nn.Linear(32, 64, bias=False, dtype=bf16), randn(16, 32, grad=False)
    layer.requires_grad_(False)
    f8 = compiled(layer, weights="cached")
    f8(x)
    with torch.no_grad():
        memory[0] = layer.weight
        layer.weight.data = memory[0]

    def write(value):
        memory.view(-1).untyped_storage().copy_(torch.full_like(memory, value).untyped_storage())

    results = {}
    for value in (1.0, 2.0):
        write(value)
        results[value] = f8(x)
    for value, result in results.items():  # later: to compile anything else forgets the graph
        write(value)
        assert torch.equal(result, compiled(layer)(x))


def test_copies_go_with_any_of_the_weights(served):
    """At once, and not when the graph is called again."""
    model, _, _ = served
    watch = weight_watch.WATCHES[id(model.second.weight)]
    (copies,) = watch.copies.values()
    tensors = [weakref.ref(tensor) for tensor in copies.tensors.values()]
    assert tensors
    del watch, copies
    model.second.weight = None
    gc.collect()
    assert all(tensor() is None for tensor in tensors)
