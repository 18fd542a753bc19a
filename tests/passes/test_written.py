"""Tensors that a graph writes to, as AOTAutograd has it: by operators that give what is there afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2

from f8fx.passes.written import is_written, keeps_its_values

aten = torch.ops.aten


@pytest.fixture
def graph():
    return fx.Graph()


def write(graph: fx.Graph, *values: fx.Node) -> None:
    graph.call_function(auto_functionalized_v2, (aten.relu_.default,), {"_all_bases": list(values)})


def moved(graph: fx.Graph, value: fx.Node) -> fx.Node:
    return graph.call_function(aten.permute.default, (value, [1, 0]))


def test_the_tensor_itself(graph):
    weight, other = graph.placeholder("weight"), graph.placeholder("other")
    write(graph, weight)
    assert is_written(weight) and not is_written(other)
    assert not keeps_its_values(weight, ()) and keeps_its_values(other, ())


def test_one_of_several(graph):
    weight, other = graph.placeholder("weight"), graph.placeholder("other")
    write(graph, other, weight)
    assert is_written(weight) and is_written(other)


def test_what_it_is_moved_of(graph):
    weight = graph.placeholder("weight")
    read = moved(graph, moved(graph, weight))
    assert not is_written(read)
    write(graph, weight)
    assert is_written(read) and not keeps_its_values(read, ())


def test_the_copy_that_it_is_moved_of(graph):
    weight = graph.placeholder("weight")
    copy = graph.call_function(aten.clone.default, (weight,))
    read = moved(graph, copy)
    write(graph, copy)
    assert is_written(read) and not is_written(weight)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_view_of_it(graph, steps):
    weight = graph.placeholder("weight")
    view = weight
    for _ in range(steps):
        view = moved(graph, view)
    write(graph, view)
    assert is_written(weight)


def test_another_tensor_that_is_computed_from_it(graph):
    weight = graph.placeholder("weight")
    write(graph, graph.call_function(aten.neg.default, (weight,)))
    assert not is_written(weight) and keeps_its_values(weight, ())


def test_an_input_that_gets_new_values_after_the_graph(graph):
    weight, other = graph.placeholder("weight"), graph.placeholder("other")
    assert not keeps_its_values(moved(graph, weight), {weight})
    assert keeps_its_values(moved(graph, weight), {other})
