"""Graphs that take the float8 copies of their weights as inputs: ``weights="cached"`` and ``"reused"``.

Which weights a graph casts, and how, only the passes know, on the graph that AOTAutograd makes. So
a graph is traced twice: once to learn it (:func:`plan`), and once, with further inputs
(:func:`extended`), to compile it. What is compiled is then called through :func:`wrapped`, which fetches
the copies from :mod:`f8fx.weights`. Nothing of a copy is in the compiled code, so Inductor's caches,
recompilations and CUDA graphs need to know nothing about them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from . import weights
from .passes.reuse import CastFormat, ScaleFormat, Weight, WeightInputs
from .torch_private import copy_of_graph, detect_fake_mode, is_fake, mark_as_dynamo_input

_SOURCES = (torch.bfloat16, torch.float16, torch.float32)


def candidates(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> WeightInputs:
    """The parameters among a Dynamo graph's inputs whose copies could be inputs as well."""
    found = []
    for position, value in enumerate(example_inputs):
        if not isinstance(value, nn.Parameter) or value.dim() != 2 or value.dtype not in _SOURCES:
            continue
        if type(value) is nn.Parameter:  # not a fake one, and no subclass with a layout of its own
            if reason := weights.refusal(value):
                _say_refused(reason)
                continue
        elif not is_fake(value):
            continue
        if all(isinstance(size, int) for size in value.shape):
            found.append(Weight(position, tuple(map(int, value.shape)), value.dtype))
    return WeightInputs(len(example_inputs), tuple(found))


def extended(
    gm: fx.GraphModule, example_inputs: Sequence[Any], inputs: WeightInputs, training: bool
) -> tuple[fx.GraphModule, list[Any]]:
    """A copy of a Dynamo graph with an input for each scale and copy, and its example inputs."""
    result = copy_of_graph(gm)
    graph = result.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    fake_mode = detect_fake_mode([node.meta.get("example_value") for node in placeholders])
    assert fake_mode is not None  # Dynamo's graphs have fake values
    last, examples = placeholders[-1], list(example_inputs)
    for weight in inputs.weights:
        device = example_inputs[weight.position].device
        for form in weight.formats:
            with graph.inserting_after(last):
                last = graph.placeholder(f"f8fx_weight_{len(examples)}")
            with fake_mode:
                value = torch.empty(shape_of(weight, form), dtype=dtype_of(form), device=device)
            last.meta["example_value"] = value
            # in inference its address stays
            mark_as_dynamo_input(last, is_static=not training)
            examples.append(value)
    result.recompile()
    return result, examples


def shape_of(weight: Weight, form: ScaleFormat | CastFormat) -> tuple[int, ...]:
    """The shape of a scale or copy of a parameter."""
    if isinstance(form, ScaleFormat):
        return () if form.dim is None else (weight.shape[1 - form.dim],)
    rows, columns = weight.shape[::-1] if form.transpose else weight.shape
    return _round_up(rows, form.align[0]), _round_up(columns, form.align[1])


def dtype_of(form: ScaleFormat | CastFormat) -> torch.dtype:
    """The dtype of a scale or copy."""
    return torch.float32 if isinstance(form, ScaleFormat) else form.scale.dtype


def wrapped(compiled: Callable[..., Any], inputs: WeightInputs, training: bool) -> Callable[..., Any]:
    """A compiled graph with further inputs, as Dynamo calls it: with its own."""
    fetch = weights.reused if training else weights.cached
    wanted = [(weight.position, weight.formats) for weight in inputs.weights if weight.formats]

    def run(*args: Any) -> Any:
        copies = fetch((args[position], formats) for position, formats in wanted)
        if training:
            weights.training_ran()
        return compiled(*args, *copies)

    return run


def noting_training(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled training graph that has no further inputs, but after which weights may change."""

    def run(*args: Any) -> Any:
        weights.training_ran()
        return compiled(*args)

    return run


def _round_up(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


def _say_refused(reason: str) -> None:
    if reason not in _SAID:
        _SAID.add(reason)
        warnings.warn(
            f"f8fx: a weight is not cached, and quantized in each call, since {reason}", stacklevel=2
        )


_SAID: set[str] = set()
