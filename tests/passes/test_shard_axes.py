"""*gather*: which dimensions of a shard the scales of an operand's rows or columns belong to, against every element's way."""

from __future__ import annotations

import itertools
from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from f8fx.passes.gather import Reader, Step, shard_axes

aten = torch.ops.aten


@st.composite
def shapes_of(draw, count):
    """A shape of so many elements, some of its sizes one."""
    sizes = []
    while count > 1:
        sizes.append(draw(st.sampled_from([size for size in range(2, count + 1) if count % size == 0])))
        count //= sizes[-1]
    for _ in range(draw(st.integers(0, 2))):
        sizes.insert(draw(st.integers(0, len(sizes))), 1)
    return sizes or [1]


@st.composite
def chains(draw, steps):
    """A shape and movements of it, ``(kind, arguments)``, and a dimension of the last one's result."""
    shape = first = draw(shapes_of(draw(st.sampled_from([1, 6, 8, 12, 16, 24, 36]))))
    moves = []
    for _ in range(steps):
        if steps == 1 or draw(st.booleans()):
            shape = draw(shapes_of(prod(shape)))
            moves.append(("view", shape))
        else:
            order = draw(st.permutations(range(len(shape))))
            shape = [shape[dim] for dim in order]
            moves.append(("permute", order))
    return first, moves, draw(st.integers(0, len(shape) - 1))


def asked(shape, moves, dim):
    """What ``shard_axes`` says of the shard, and the shard's elements as they lie in the end."""
    graph = fx.Graph()
    node = shard = graph.placeholder("shard")
    elements = torch.arange(prod(shape)).view(shape)
    node.meta["val"] = elements
    steps = []
    for kind, argument in moves:
        target = aten.permute.default if kind == "permute" else aten.view.default
        elements = elements.permute(argument) if kind == "permute" else elements.reshape(argument)
        node = graph.call_function(target, (node, argument))
        node.meta["val"] = elements
        steps.append(Step(kind, (node,)))
    found = shard_axes(Reader(node, node, shard, tuple(steps)), dim)
    return None if found is None else found[0], elements


def groups(elements, dims):
    """The elements that are found by the same indices of all other dimensions."""
    others = [dim for dim in range(elements.dim()) if dim not in dims]
    rows = elements.permute(*others, *sorted(dims)).reshape(-1, prod(elements.shape[dim] for dim in dims))
    return {frozenset(row.tolist()) for row in rows}


@given(chains(3))
@settings(max_examples=300, deadline=None)
def test_what_is_said_holds(chain):
    shape, moves, dim = chain
    axes, elements = asked(shape, moves, dim)
    if axes is not None:
        shard = torch.arange(prod(shape)).view(shape)
        assert groups(shard, axes) == groups(elements, {dim})


@given(chains(1))
@settings(max_examples=300, deadline=None)
def test_of_one_view_all_is_said(chain):
    """But of dimensions of size 1, which lie anywhere."""
    shape, moves, dim = chain
    axes, elements = asked(shape, moves, dim)
    if elements.shape[dim] == 1:
        return
    wanted, shard = groups(elements, {dim}), torch.arange(prod(shape)).view(shape)
    long = [axis for axis, size in enumerate(shape) if size > 1]
    subsets = itertools.chain.from_iterable(itertools.combinations(long, n) for n in range(len(long) + 1))
    assert axes == next((frozenset(subset) for subset in subsets if groups(shard, subset) == wanted), None)
