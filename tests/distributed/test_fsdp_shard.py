"""What a local shard notices: every write to its memory, through whatever view, and no read."""

from __future__ import annotations

import copy
import gc
import io
import logging
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from f8fx.fsdp import enable_float8_all_gather
from f8fx.fsdp.formats import Format
from f8fx.fsdp.shard import Float8Shard, _wire_dtype
from f8fx.fsdp.weight import Float8Weight
from f8fx.torch_private import fake_store
from f8fx.torch_private.versions import release
from tests.helpers import Block, bf16


@pytest.fixture
def shard():
    model = Block()
    enable_float8_all_gather(model)
    return model.gate.weight.detach()


WRITES = {
    "add_": lambda p: p.add_(1),
    "out": lambda p: torch.add(p, 1, out=p),
    "foreach": lambda p: torch._foreach_add_([p], 1),
    "setitem": lambda p: p.__setitem__(0, 1.0),
    "select": lambda p: p[0].fill_(1),
    "column": lambda p: p[:, 0].fill_(1),
    "transposed": lambda p: p.t().mul_(2),
    "T": lambda p: p.T.mul_(2),
    "unbind": lambda p: p.unbind()[0].fill_(1),
    "diagonal": lambda p: p.diagonal().fill_(1),
    "unsqueeze": lambda p: p.unsqueeze(0).mul_(2),
    "flatten": lambda p: p.flatten().mul_(2),
    "view of a view": lambda p: p.t()[0].unsqueeze(0).mul_(2),
    "data": lambda p: p.data[:, 0].fill_(1),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_noticed(name, shard):
    before, elements = shard.version(), shard.plain.clone()
    WRITES[name](shard)
    assert not torch.equal(shard.plain, elements)
    assert shard.version() != before


READS = {
    "copy_": lambda p, own: own.copy_(p),
    "lerp_": lambda p, own: own.lerp_(p, 0.1),
    "foreach": lambda p, own: torch._foreach_add_([own], [p]),
    "out": lambda p, own: torch.mul(p, 2, out=own),
    "a view": lambda p, own: own.copy_(p.t()[0].unsqueeze(0)[0].expand_as(own)),
    "a clone": lambda p, own: p.clone().mul_(2),
    "a cast": lambda p, own: p.double().mul_(2),
}


@pytest.mark.parametrize("name", READS)
def test_reads_are_none(name, shard):
    """An average of the weights, say, which is updated between forward and backward or by one rank alone."""
    own = torch.zeros(shard.shape[0], shard.shape[0]) if name == "a view" else torch.zeros(shard.shape)
    before, elements = shard.version(), shard.plain.clone()
    READS[name](shard, own)
    assert torch.equal(shard.plain, elements)
    assert shard.version() == before


@pytest.fixture
def two_ranks():
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


COLLECTIVES = {
    "broadcast": lambda p: dist.broadcast(p, 1),
    "all_reduce": lambda p: dist.all_reduce(p),
    "scatter": lambda p: dist.scatter(p, src=1),
    "recv": lambda p: dist.recv(p, 1),
    "all_gather": lambda p: dist.all_gather([torch.empty_like(p.plain), p], torch.ones_like(p.plain)),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_write(name, shard, two_ranks):
    """Their schemas do not say so."""
    before = shard.version()
    COLLECTIVES[name](shard)
    assert shard.version() != before


def test_to_send_is_to_read(shard, two_ranks):
    before = shard.version()
    dist.send(shard, 1)
    dist.all_gather([torch.empty_like(shard.plain) for _ in range(2)], shard)
    assert shard.version() == before


def test_addresses_are_those_of_the_elements():
    """By them tools tell parameters apart, and find those that are tied."""
    model = Block()
    before = [p.data_ptr() for p in model.parameters()]
    enable_float8_all_gather(model)
    parameters = list(model.parameters())
    assert sum(isinstance(p, Float8Shard) for p in parameters) > 1
    assert [p.data_ptr() for p in parameters] == before and len(set(before)) == len(before)
    weight = model.gate.weight
    assert weight.detach()[1:].data_ptr() == weight.data_ptr() + weight.stride(0) * weight.itemsize


def test_a_pickled_model_has_parameters():
    model = Block()
    model.up.weight.requires_grad_(False)
    enable_float8_all_gather(model)
    buffer = io.BytesIO()
    torch.save(model.gate.weight, buffer)
    torch.save(model.up.weight, other := io.BytesIO())
    assert b"f8fx" not in buffer.getvalue()
    for file, weight, trains in ((buffer, model.gate.weight, True), (other, model.up.weight, False)):
        file.seek(0)
        loaded = torch.load(file)
        assert type(loaded) is nn.Parameter and loaded.requires_grad == trains
        assert isinstance(weight, Float8Shard) and torch.equal(loaded, weight.plain)


def test_what_is_gathered_in_float8_is_freed():
    """Python's garbage collector does not look into tensors: a shard must not hold what holds it."""
    model = nn.Sequential(Block(), Block())
    enable_float8_all_gather(model)
    average = model[0].gate.weight.detach().clone()
    layer, whole = weakref.ref(model[0].gate), weakref.ref(model)
    del model[0]
    gc.collect()
    assert layer() is not None  # ranks would collect it at different times, and reduce different amaxes
    del model
    gc.collect()
    assert whole() is layer() is None
    assert isinstance(average, Float8Shard)


def test_a_copied_layer_takes_nothing_else_along():
    model = nn.Sequential(Block(), Block())
    enable_float8_all_gather(model)
    memo = {}
    part = copy.deepcopy(model[0], memo)
    assert not {id(module) for module in model[1].modules()} & memo.keys()
    manager = part.gate.weight.weight.manager
    assert manager is not model[0].gate.weight.weight.manager
    assert [w.fqn for w in manager.weights] == ["0.gate.weight", "0.up.weight", "0.down.weight"]
    assert [w.shard() for w in manager.weights] == [part.gate.weight, part.up.weight, part.down.weight]


def test_copied_weights_stay_tied():
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32), "c": nn.Linear(32, 32)})
    model["c"].weight = model["a"].weight
    enable_float8_all_gather(model)
    twin = copy.deepcopy(model)
    assert twin["a"].weight is twin["c"].weight is not twin["b"].weight
    shared = twin["a"].weight.weight
    assert [module for module, _ in shared.holders()] == [twin["a"], twin["c"]]
    assert shared.manager.weights == [shared, twin["b"].weight.weight]


def test_a_model_out_of_a_file_is_a_plain_one(caplog):
    model = Block()
    enable_float8_all_gather(model)
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with caplog.at_level(logging.WARNING, "f8fx"):
        loaded(torch.randn(16, 64))
        loaded.load_state_dict(model.state_dict(), assign=True)
    assert not caplog.records
    assert {type(p) for p in loaded.parameters()} == {nn.Parameter}
    enable_float8_all_gather(loaded)
    assert isinstance(loaded.gate.weight, Float8Shard)


@pytest.mark.skipif(release() < (2, 15), reason="this torch does not tell whether a gradient's dtype was set")
def test_parameters_that_are_loaded_as_they_are_keep_their_gradients_dtype():
    """``assign=True`` makes them the model's own; a checkpoint may hold parameters."""
    model = Block().to(bf16)
    enable_float8_all_gather(model)
    loaded = {name: nn.Parameter(torch.ones_like(value)) for name, value in model.state_dict().items()}
    for parameter in loaded.values():
        parameter.grad_dtype = torch.float32
    model.load_state_dict(loaded, assign=True)
    assert isinstance(model.gate.weight, Float8Shard) and model.gate.weight.eq(1).all()
    assert model.gate.weight.grad_dtype is torch.float32


GATHERED_WRITES = {
    "add_": lambda w: w.add_(1),
    "copy_": lambda w: w.copy_(torch.ones(16, 16)),
    "out": lambda w: torch.add(torch.ones(16, 16, dtype=bf16), 1, out=w),
    "foreach": lambda w: torch._foreach_zero_([torch.ones(2), w]),
    "broadcast": lambda w: dist.broadcast(w, 1),
}


@pytest.mark.parametrize("name", GATHERED_WRITES)
def test_what_was_gathered_is_not_written_to(name, two_ranks):
    """It would be lost: the gathered weight is a copy."""
    form = Format(torch.float8_e4m3fn, None, False)
    data = torch.zeros(16, 16).to(form.dtype)
    weight = Float8Weight((data,), (torch.ones(()),), (form,), bf16, "gate.weight")
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"would change 'gate\.weight'"):
        GATHERED_WRITES[name](weight)


@pytest.mark.parametrize(
    ("backend", "on_cpu", "on_cuda"),
    [("cpu:gloo,cuda:nccl", False, True), ("nccl", False, True), ("gloo", False, False)],
)
def test_what_carries_float8_is_asked_of_the_device(monkeypatch, backend, on_cpu, on_cuda):
    """A group that was made without a backend has one for each device."""
    from torch.distributed.device_mesh import DeviceMesh

    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=2)
    try:
        meshes = [DeviceMesh("cpu", [0, 1], _init_backend=False) for _ in range(2)]
        monkeypatch.setattr(dist, "get_backend_config", lambda group: backend)
        for mesh, native in zip(meshes, (on_cpu, on_cuda), strict=True):
            mesh._device_type = "cuda" if mesh is meshes[1] else "cpu"
            monkeypatch.setattr(mesh, "get_group", lambda: dist.group.WORLD)
            assert (_wire_dtype("auto", mesh) is None) == native
            if native:
                assert _wire_dtype("float8", mesh) is None
            else:
                with pytest.raises(ValueError, match="needs NCCL"):
                    _wire_dtype("float8", mesh)
    finally:
        dist.destroy_process_group()
