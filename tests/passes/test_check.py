"""*check* notices what it is there to notice."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import f8fx
from f8fx import ops
from f8fx.passes import Pipeline, check, describe
from f8fx.passes.check import CheckError, signature
from tests.helpers import Block, bf16, compiled, joint_graphs, randn
from tests.long import seldom


@pytest.fixture
def gemms_as_on_a_gpu():
    """Layouts are for *check* to find fault with."""


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


def test_value_of_a_call_that_was_right_before():
    def damage(graph):
        node = first(graph, ops.quantize)
        node.meta["val"] = node.meta["val"].t()

    assert "recorded as" in broken(damage)


def test_value_that_the_inputs_do_not_give():
    def damage(graph):
        node = first(graph, ops.quantize)
        node.kwargs = {**node.kwargs, "transpose": True}

    assert "inputs give" in broken(damage)


def test_a_stride_that_nothing_is_found_by():
    """Operators differ in the strides they give to dimensions of size 1."""

    def transform(graph):
        before = signature(graph)
        Pipeline(options.recipe, options.policy())(graph)
        node = first(graph, ops.quantize)
        assert node.meta["val"].shape == (1, 32)
        node.meta["val"] = node.meta["val"].as_strided((1, 32), (64, 1))
        check(graph, "everything", before)
        node.meta["val"] = node.meta["val"].as_strided((1, 32), (1, 2))
        with pytest.raises(CheckError, match="inputs give"):
            check(graph, "everything", before)
        checked.append(node)

    options, checked = f8fx.Options.parse({"select": "all"}), []
    joint_graphs(F.linear, randn(1, 32, grad=False), randn(48, 32, grad=False), transform=transform)
    assert checked


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

    assert "are not k-innermost" in broken(damage)


def cast_before(graph, index, dtype):
    """Gives the float8 gemm an operand or a scale of another dtype."""
    gemm = first(graph, torch.ops.aten._scaled_mm.default)
    operand = gemm.args[index]
    with graph.inserting_before(gemm):
        node = graph.call_function(torch.ops.prims.convert_element_type.default, (operand, dtype))
    node.meta = {**operand.meta, "val": operand.meta["val"].to(dtype)}
    gemm.update_arg(index, node)


@pytest.mark.parametrize(
    ("index", "dtype", "why"),
    [(0, bf16, "operands are"), (1, bf16, "operands are"), (2, bf16, "a scale is"), (3, bf16, "a scale is")],
)
def test_dtypes_of_the_gemm(index, dtype, why):
    assert why in broken(lambda graph: cast_before(graph, index, dtype))


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


def host_waits(graph):
    """The operators of a graph that bring a value to the host."""
    names = {str(node.target) for node in graph.nodes}
    return {n for n in names if "item" in n.split(".") or "nonzero" in n or "local_scalar" in n}


def rewritten(monkeypatch, fn, *args, grad=True, **options):
    """Text of what the passes make of each graph of a call; asserts that nothing in it makes the host wait."""
    plain, texts = Pipeline.__call__, []

    def call(self, graph, *rest):
        assert not host_waits(graph)
        report = plain(self, graph, *rest)
        assert report.converted and not host_waits(graph)
        texts.append(describe(graph))
        return report

    monkeypatch.setattr(Pipeline, "__call__", call)
    with torch.set_grad_enabled(grad):
        compiled(fn, **options)(*args)
    return texts


RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def test_what_makes_the_host_wait_is_known():
    for fn in (lambda x: x.sum().item(), torch.nonzero):
        assert host_waits(make_fx(fn, tracing_mode="symbolic")(torch.ones(3)).graph)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("m", [16, 5])
def test_no_pass_makes_the_host_wait(monkeypatch, recipe, m):
    """`item`, `nonzero` and `_local_scalar_dense` never appear in a rewritten graph."""
    assert rewritten(monkeypatch, F.linear, randn(m, 30), randn(20, 30), recipe=recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("save", ["lean", *seldom("fast")])
def test_no_merge_makes_the_host_wait(monkeypatch, recipe, save):
    """Gate and up as one matmul."""
    model = Block(64, 96).to(bf16)
    (text,) = rewritten(monkeypatch, model, randn(32, 64), recipe=recipe, target="h100", save=save)
    assert "f8fx.concat(" in text


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("pad", ["auto", "never"])
def test_no_dynamic_size_makes_the_host_wait(monkeypatch, recipe, pad):
    """Padding of M by an amount that is known when the graph runs, or none of it."""
    k, n = (30, 20) if pad == "auto" else (32, 48)
    layer = torch.nn.Linear(k, n, dtype=bf16)
    (text,) = rewritten(monkeypatch, layer, randn(24, k), recipe=recipe, dynamic=True, pad=pad)
    assert re.search(rf"bf16\[s\d+,{k}\]", text), text


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_cached_weight_makes_the_host_wait(monkeypatch, recipe):
    """The inference graph, which takes float8 copies and scales as inputs."""
    model = torch.nn.Linear(30, 20, dtype=bf16)
    texts = rewritten(
        monkeypatch, model, randn(16, 30, grad=False), recipe=recipe, grad=False, weights="cached"
    )
    assert "e4m3[32,32]" in texts[-1] and texts[-1].count("f8fx.quantize(") == 1
