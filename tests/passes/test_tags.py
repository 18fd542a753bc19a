"""*tags*: marks of checkpointed regions on inserted nodes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import f8fx
from f8fx.passes import Pipeline, Tags
from tests.helpers import joint_graphs, randn
from tests.passes.test_collectives import graph_of


def marks(fn, *args, recipe="tensorwise"):
    """Inserted forward nodes -> their mark."""
    result = {}
    options = f8fx.Options.parse({"recipe": recipe, "select": "all"})

    def transform(graph):
        Pipeline(options.recipe, options.policy(), debug=True)(graph)
        for node in graph.nodes:
            if "f8fx" in node.meta:
                result[node.name] = (node.meta["f8fx"].role, node.meta.get("recompute"), node.meta)

    joint_graphs(fn, *args, transform=transform)
    return result


def checkpointed(x, w):
    return checkpoint(lambda x: torch.sin(F.linear(torch.cos(x), w)), x, use_reentrant=False)


def test_without_checkpointing_there_are_no_marks():
    assert {mark for _, mark, _ in marks(F.linear, randn(16, 32), randn(48, 32)).values()} == {None}


def test_forward_nodes_inherit_the_regions_mark_and_number():
    found = marks(checkpointed, randn(16, 32), randn(48, 32))
    assert {"quantize", "scale"} <= found.keys()
    for name, (role, mark, meta) in found.items():
        if role == "output":
            if name.startswith("scale") and "mm" not in name:
                assert mark == CheckpointPolicy.MUST_SAVE
                continue
            assert mark in (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)
            assert "ac_graph_id" in meta


def test_a_cast_shared_with_the_outside_of_a_region_is_recomputable():
    """Otherwise it is saved on top of its source, which the region saves anyway."""

    def f(x, w, v):
        outside = F.linear(x, w)
        inside = checkpoint(lambda x: torch.sin(F.linear(x, v)), x, use_reentrant=False)
        return outside + inside

    found = marks(f, randn(16, 32), randn(48, 32, seed=1), randn(48, 32, seed=2))
    shared = found["quantize"]
    assert shared[1] == CheckpointPolicy.PREFER_RECOMPUTE and "ac_graph_id" in shared[2]


def test_a_sum_that_is_written_before_a_region_is_none_of_its_tensors():
    """What stands next in the graph is the region's first."""

    def f(x, w, v):
        h = x + F.linear(x, w)
        return h + checkpoint(lambda h: torch.sin(F.linear(torch.cos(h), v)), h, use_reentrant=False)

    found = marks(f, randn(32, 32), randn(32, 32, seed=1), randn(32, 32, seed=2))
    _, mark, meta = found["materialize"]
    assert mark is None and "ac_graph_id" not in meta


def test_every_inserted_node_says_where_it_comes_from():
    found = marks(F.linear, randn(16, 32), randn(48, 32), recipe="rowwise")
    assert len(found) > 10
    for _, _, meta in found.values():
        provenance = meta["f8fx"]
        assert provenance.gemm and provenance.inserted_by == "quantize" and "seq_nr" in meta


def test_what_is_computed_from_an_overwritten_input_is_saved():
    """Not the write, nor the results; and what a region marks keeps its mark."""

    def f(x, state, tangents_1):
        inside, outside = state.cos(), state.view(-1).sin()
        state.copy_(x)
        return state, inside * outside.view_as(x) * tangents_1

    graph = graph_of(f, (16, 32), (16, 32), (16, 32))
    graph.find_nodes(op="placeholder")[2].target = "tangents_1"
    (inside,) = graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default)
    inside.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    Tags()(graph)
    assert {node.name: node.meta["recompute"] for node in graph.nodes if "recompute" in node.meta} == {
        "cos": CheckpointPolicy.MUST_RECOMPUTE,
        "sin": CheckpointPolicy.MUST_SAVE,
    }
