"""The passes grow with the graph, counted in calls of functions: a clock would not tell on a busy machine."""

from __future__ import annotations

import gc
import sys
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import f8fx.passes.thresholds
from benchmarks import graphs
from f8fx.demo.model import DecoderConfig
from f8fx.options import Options
from f8fx.passes import fake
from f8fx.passes.sums import sum_of
from tests.helpers import bf16, compiled, joint_graphs, randn

aten = torch.ops.aten

LAYERS = (6, 24)


@pytest.fixture(scope="module")
def block():
    return graphs.traced(DecoderConfig.named("llama3_8b"), 8192)


def counted(run):
    """What a function returns, and the calls of Python and C functions until it does."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return result, count


def calls(block, layers, recipe):
    """Calls of Python and C functions of the pipeline, on a stack of blocks."""
    graph = graphs.stack(block, layers)
    options = Options.parse({"recipe": recipe, "target": "h100", "select": "all"})
    pipeline = options.pipeline(kernels=lambda device: True)
    report, count = counted(lambda: pipeline(graph))
    assert report.converted == report.total == 21 * layers
    return count


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_four_times_the_blocks_are_four_times_the_calls(block, recipe):
    calls(block, 1, recipe)  # what is kept from call to call
    few, many = (calls(block, layers, recipe) for layers in LAYERS)
    # 4.0 times on torch 2.13, 4.24 on 2.11; of a pass of quadratic time it would be up to 16
    assert many < 1.1 * LAYERS[1] / LAYERS[0] * few


def test_what_is_known_of_a_layout_is_used_in_a_compile(monkeypatch):
    """AOTAutograd calls the passes under a fake mode of its own."""
    made = []
    of_layout = fake.fake_like

    def counting(*args):
        made.append(of_layout(*args))
        return made[-1]

    monkeypatch.setattr(fake, "fake_like", counting)
    layers = [nn.Linear(32, 32, dtype=bf16) for _ in range(4)]
    compiled(nn.Sequential(*layers))(randn(16, 32))
    assert len(made) > len(layers) and None not in made


def test_rows_that_are_copied_one_after_the_other():
    """Each is read along two paths: from the row before, and from the memory that both lie in."""

    def passes(rows):
        def f(x, first, second):
            y, z = F.linear(x, first), F.linear(x, second).relu()
            for row in range(1, rows):
                y[row] = y[row - 1]
            return y.sin(), z

        pipeline, counts = Options.parse({"target": "h100", "select": "all"}).pipeline(), []
        args = (randn(64, 64, grad=False, seed=seed) for seed in range(3))
        joint_graphs(f, *args, transform=lambda graph: counts.append(counted(lambda: pipeline(graph))[1]))
        return counts[0]

    passes(6)
    assert passes(12) < 4 * passes(6)


def test_a_sum_of_any_number_of_gradients():
    graph = fx.Graph()
    gradients = [graph.placeholder(f"gradient_{i}") for i in range(2000)]
    total = gradients[0]
    for gradient in gradients[1:]:
        total = graph.call_function(aten.add.Tensor, (total, gradient))
    graph.output(total)
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2, 2, device="meta")
    found = sum_of([gradients[0], gradients[-1]])
    assert found is not None
    assert found.root is total
    assert list(found.others) == gradients[1:-1]


def test_thresholds_of_a_tied_weight(monkeypatch):
    """The matmuls of one weight are planned together, for one number of rows after the other: not once for each of them."""
    plans = []

    def plan(model, gemms):
        plans.append(len(gemms))
        return planned(model, gemms)

    planned = f8fx.passes.thresholds.plan
    monkeypatch.setattr(f8fx.passes.thresholds, "plan", plan)
    with torch.device("meta"):
        x, weight = (torch.empty(4096, 4096, dtype=bf16, requires_grad=True) for _ in range(2))
    torch._dynamo.mark_dynamic(x, 0)

    def f(x, weight):
        y = x
        for _ in range(12):
            y = torch.tanh(F.linear(y, weight) + x)
        return y

    pipeline, reports = Options.parse({"target": "h100"}).pipeline(), []
    joint_graphs(f, x, weight, transform=lambda graph: reports.append(pipeline(graph)))
    assert all("pays for M >=" in decision.detail for decision in reports[0].decisions)
    assert plans.count(36) == len(plans) < 36


@pytest.mark.parametrize("was_on", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_looked_for_meanwhile(was_on, fails):
    seen = []

    def watch(name, text):
        seen.append(gc.isenabled())
        if fails:
            raise RuntimeError("stopped")

    pipeline = Options.parse({"select": "all"}).pipeline(watch=watch)
    x, w = randn(16, 32), randn(48, 32)
    if not was_on:
        gc.disable()
    try:
        with pytest.raises(RuntimeError) if fails else nullcontext():
            joint_graphs(F.linear, x, w, transform=pipeline)
        assert gc.isenabled() is was_on
    finally:
        gc.enable()
    assert not any(seen) and seen
