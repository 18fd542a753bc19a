"""*check* notices what it is there to notice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import f8fx
from f8fx import ops
from f8fx.passes import Pipeline, check
from f8fx.passes.check import CheckError, signature
from tests.helpers import joint_graphs, randn


def broken(damage):
    """Converts a linear layer, damages the graph, and checks it; also by what has changed alone."""
    options = f8fx.Options.parse({"select": "all"})
    raised = []

    def transform(graph):
        before, known = signature(graph), {}
        Pipeline(options.recipe, options.policy())(graph)
        check(graph, "everything", before, known)
        damage(graph)
        for earlier in (known, None):
            with pytest.raises(CheckError) as caught:
                check(graph, "damage", before, earlier)
            raised.append(str(caught.value))
        assert raised[0] == raised[1]
        raise CheckError  # the graph is not fit to go on

    with pytest.raises(Exception, match="CheckError"):
        joint_graphs(F.linear, randn(16, 32), randn(48, 32), transform=transform)
    return raised[0]


def first(graph, target):
    return next(node for node in graph.nodes if node.target is target)


def test_missing_value():
    def damage(graph):
        del first(graph, ops.scale).meta["val"]

    assert "no fake value" in broken(damage)


def test_value_that_the_inputs_do_not_give():
    def damage(graph):
        node = first(graph, ops.quantize)
        node.kwargs = {**node.kwargs, "transpose": True}

    assert "inputs give" in broken(damage)


def test_order():
    def damage(graph):
        node = first(graph, ops.scale)
        next(iter(node.users)).append(node)

    assert "after damage" in broken(damage)


def test_layout_of_the_gemm():
    def damage(graph):
        node = first(graph, torch.ops.aten._scaled_mm.default)
        right = node.args[1]
        node.replace_input_with(right, right.args[0])

    assert "damage" in broken(damage)


def test_host_synchronisation():
    def damage(graph):
        anchor = first(graph, ops.scale)
        with graph.inserting_after(anchor):
            node = graph.call_function(torch.ops.aten._local_scalar_dense.default, (anchor,))
        node.meta = {"f8fx": anchor.meta["f8fx"], "val": 1.0}

    assert "makes the host wait" in broken(damage)


def test_outputs():
    def damage(graph):
        (output,) = graph.find_nodes(op="output")
        scale = first(graph, ops.scale)
        output.replace_input_with(output.args[0][0], scale)

    assert "outputs changed" in broken(damage)


def test_an_input_that_another_pass_changed():
    """The node itself is as it was; what it reads is not."""

    def damage(graph):
        scale = first(graph, ops.scale)
        scale.meta["val"] = scale.meta["val"].double()

    assert "damage" in broken(damage)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("m", [16, 5])
def test_no_pass_makes_the_host_wait(recipe, m):
    """`item`, `nonzero` and `_local_scalar_dense` never appear in a rewritten graph."""
    options = f8fx.Options.parse({"select": "all", "recipe": recipe})

    def transform(graph):
        Pipeline(options.recipe, options.policy(), debug=True)(graph)
        names = {str(node.target) for node in graph.nodes}
        assert not [n for n in names if "item" in n.split(".") or "nonzero" in n or "local_scalar" in n]

    joint_graphs(F.linear, randn(m, 30), randn(20, 30), transform=transform)
