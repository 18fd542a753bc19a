"""Graphs in which a tensor is gathered over four ranks that exist on paper alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy

import f8fx
from f8fx.passes import Collectives, Pipeline, check, describe
from f8fx.passes.rewrite import Provenance
from f8fx.torch_private import fake_tensor_mode
from tests.helpers import IR, bf16

aten = torch.ops.aten


c10d = torch.ops._c10d_functional


GATHER = "all_gather_into_tensor("


@pytest.fixture(autouse=True)
def four_ranks():
    """A process group of four that only exists on paper; this is its rank 1."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


#: Converts float32 matmuls too.
F32 = replace(f8fx.Recipe.named("tensorwise"), convert_dtypes=(bf16, torch.float16, torch.float32))


def gather(x, group="0", size=4):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, size, group))


def graph_of(fn, *shapes, dtype=bf16):
    """The aten graph of a function of tensors, traced without running anything."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with fake_tensor_mode():
        args = [torch.empty(*shape, dtype=dtype) for shape in shapes]
    graph = make_fx(fn, tracing_mode="real")(*args).graph
    graph.eliminate_dead_code()
    return graph


def passed(graph, recipe="tensorwise", wire="auto", bias="torchao"):
    """Runs all passes on a graph; what they report."""
    options = f8fx.Options.parse({"select": "all", "recipe": recipe})
    pipeline = Pipeline(
        options.recipe,
        options.policy(),
        debug=True,
        rowwise_scales=lambda device: "torchao",
        wire=wire,
        bias=bias,
    )
    report = pipeline(graph)
    check(graph, "collectives")
    return report


def rewritten(fn, *shapes, dtype=bf16, recompute=False, **kwargs):
    """The graph after all passes, and what they report.

    Args:
        recompute: gathers are marked to be redone in the backward.
    """
    graph = graph_of(fn, *shapes, dtype=dtype)
    for node in graph.nodes:
        if recompute and node.target in (c10d.all_gather_into_tensor.default, c10d.wait_tensor.default):
            node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 1}
    report = passed(graph, **kwargs)
    assert [*reversed([*reversed(graph.nodes)])] == [*graph.nodes]  # the list is whole, both ways
    for node in [*reversed(graph.nodes)]:
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    return describe(graph), report


def assert_moves(fn, *shapes, **kwargs):
    """Every gather carries float8; the graph's text."""
    text, report = rewritten(fn, *shapes, **kwargs)
    assert report.gathers and all(g.moved for g in report.gathers), report.gathers
    assert "bf16" not in "".join(line for line in text.splitlines() if GATHER in line)
    return text


def assert_stays(reason, fn, *shapes, **kwargs):
    """No gather is touched: the graph is that of the pass turned off. And the reason is on record."""
    text, report = rewritten(fn, *shapes, **kwargs)
    assert [g.moved for g in report.gathers] == [False] * len(report.gathers)
    assert reason in [(g.reason, g.detail) for g in report.gathers], report.gathers
    kwargs["wire"] = "off"
    assert text == rewritten(fn, *shapes, **kwargs)[0]


def gathered_into(x, dtype):
    """A tensor gathered as ``dist.all_gather_into_tensor(out, x)`` is traced."""
    return aten.copy.default(x.new_empty(4 * x.shape[0], *x.shape[1:], dtype=dtype), gather(x))


def layer(x, w, tangents):
    """Forward and backward of ``x @ w.T``."""
    return x @ w.t(), tangents @ w, tangents.t() @ x


def side_by_side(x, dim):
    """A tensor gathered along a dimension that is not the first."""
    return torch.cat(torch.split(gather(x), x.shape[0]), dim)


def by_hand(fn, *shapes, trace=None):
    """The graph of a function that calls the operators of the IR, as if passes had put them there."""
    graph = (trace or graph_of)(fn, *shapes)
    for node in graph.nodes:
        if node.target in IR:
            node.meta["f8fx"] = Provenance(node.name, "", "output", "test")
    return graph


def assert_stays_by_hand(reason, fn, *shapes, trace=None):
    graph = by_hand(fn, *shapes, trace=trace)
    before = describe(graph)
    assert [(d.reason, d.detail) for d in Collectives()(graph)] == [reason]
    assert describe(graph) == before


def symbolic(fn, *shapes):
    """The graph of a function of tensors whose sizes are all symbols."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(fn, tracing_mode="symbolic")(*(torch.zeros(*shape, dtype=bf16) for shape in shapes)).graph
