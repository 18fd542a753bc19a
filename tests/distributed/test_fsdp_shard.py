"""What a local shard notices: every write to its memory, through whatever view, and no read."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

from f8fx.fsdp import enable_float8_all_gather
from f8fx.fsdp.shard import Float8Shard
from f8fx.torch_private import fake_store
from tests.helpers import Block


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
