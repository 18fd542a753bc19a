"""Fake values that are made from what is known of an operator are those that the operator gives."""

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from f8fx.passes import fake
from f8fx.passes.fake import set_value, set_value_by_layout
from f8fx.torch_private import storage_key

aten = torch.ops.aten

VIEWS = [
    (aten.view.default, [8, 48]),
    (aten.reshape.default, [6, 64]),
    (aten.permute.default, [2, 0, 1]),
    (aten.slice.Tensor, 2, 3, 13),
    (aten.select.int, 0, 3),
    (aten.unsqueeze.default, 1),
    (aten.expand.default, [4, 6, 16]),
    (aten.view.dtype, torch.int16),
    (aten.view.dtype, torch.uint8),
    (aten.as_strided.default, [2, 3], [48, 2], 100),
    (aten.alias.default,),
]
NEW = [(aten.clone.default,), (aten.sum.dim_IntList, [1]), (aten._to_copy.default,)]


def of_source(source):
    """A graph's input with that value."""
    node = fx.Graph().placeholder("x")
    node.meta["val"] = source
    return node


def values(source, target, *args):
    """What the operator gives, twice what is given by its layout: found out, and known."""
    x = of_source(source)
    nodes = [x.graph.call_function(target, (x, *args)) for _ in range(3)]
    set_value(nodes[0])
    for node in nodes[1:]:
        set_value_by_layout(node)
    return [node.meta["val"] for node in nodes]


def described(value, source):
    layout = value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, type(value)
    return layout, storage_key(value) == storage_key(source), value.untyped_storage().nbytes()


@pytest.fixture
def made(monkeypatch):
    """Names of what made each value that was not computed."""
    monkeypatch.setattr(fake, "_RESULTS", {})
    found = []
    for name in ("fake_like", "fake_view"):
        function = getattr(fake, name)
        monkeypatch.setattr(fake, name, lambda *args, f=function, n=name: found.append(n) or f(*args))
    return found


@pytest.mark.parametrize("call", [*VIEWS, *NEW], ids=lambda call: str(call[0]))
@pytest.mark.parametrize("offset", [0, 384])
def test_a_value_of_a_known_layout(made, call, offset):
    with FakeTensorMode():
        memory = torch.empty(1000, dtype=torch.bfloat16)
        source = memory[offset : offset + 4 * 6 * 16].view(4, 6, 16)
        expected, first, second = (described(value, source) for value in values(source, *call))
    assert first == second == expected
    assert made == ["fake_view" if call in VIEWS else "fake_like"]


def test_an_offset_is_that_of_its_source(made):
    with FakeTensorMode():
        memory = torch.empty(64)
        results = [
            values(memory[start : start + 8].view(2, 4), aten.select.int, 0, 1)[2] for start in (0, 8, 16)
        ]
    assert [result.storage_offset() for result in results] == [4, 12, 20]


def test_a_reshape_that_copies_is_no_view(made):
    with FakeTensorMode():
        source = torch.empty(4, 6).t()
        for value in values(source, aten.reshape.default, [24]):
            assert storage_key(value) != storage_key(source)
    assert not made


def test_symbolic_sizes_are_computed(made):
    sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    source = mode.from_tensor(torch.empty(6, 4), symbolic_context=sizes)
    with mode:
        assert not isinstance(source.shape[0], int)
        for value in values(source, aten.permute.default, [1, 0]):
            assert value.shape == source.shape[::-1]
    assert not made


def test_static_views_of_memory_of_symbolic_size_are_computed(made):
    """Making one would compare the size of the memory, and guard the graph."""
    sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    source = mode.from_tensor(torch.empty(6, 4), symbolic_context=sizes)
    with mode:
        row = source[1]
        assert row.shape == (4,)
        guards = len(shapes.guards)
        values(row, aten.unsqueeze.default, 0)
    assert not made
    assert len(shapes.guards) == guards
