"""The passes grow with the graph, counted in calls of functions: a clock would not tell on a busy machine."""

from __future__ import annotations

import sys

import pytest

from benchmarks import graphs
from f8fx.demo.model import DecoderConfig
from f8fx.options import Options

LAYERS = (8, 32)


@pytest.fixture(scope="module")
def block():
    return graphs.traced(DecoderConfig.named("llama3_8b"), 8192)


def calls(block, layers, recipe):
    """Calls of Python and C functions of the pipeline, on a stack of blocks."""
    graph = graphs.stack(block, layers)
    options = Options.parse({"recipe": recipe, "target": "h100", "select": "all"})
    pipeline = options.pipeline(kernels=lambda device: True)
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        report = pipeline(graph)
    finally:
        sys.setprofile(None)
    assert report.converted == report.total == 21 * layers
    return count


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_four_times_the_blocks_are_four_times_the_calls(block, recipe):
    calls(block, 1, recipe)  # what is kept from call to call
    few, many = (calls(block, layers, recipe) for layers in LAYERS)
    # 4.0 times on torch 2.13, 4.24 on 2.11; of a pass of quadratic time it would be up to 16
    assert many < 1.1 * LAYERS[1] / LAYERS[0] * few
