"""Graphs that take the float8 copies of their weights as inputs: ``weights="cached"``, ``"constant"`` and ``"reused"``.

Which weights a graph casts, and how, only the passes know, on the graph that AOTAutograd makes. So
a graph is traced twice: once to learn it (:func:`candidates`), and once, with further inputs
(:func:`extended`), to compile it. What is compiled is then called through :func:`wrapped`, which fetches
the copies from :mod:`f8fx.weights`. Nothing of a copy is in the compiled code, so Inductor's caches,
recompilations and CUDA graphs need to know nothing about them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from f8fx.kernels.cast import padding
from f8fx.parts import is_dtensor
from f8fx.passes.experts import Experts
from f8fx.passes.reuse import CastFormat, ScaleFormat, Weight, WeightInputs
from f8fx.recipe import HIGH_DTYPES
from f8fx.torch_private import copy_of_graph, detect_fake_mode, is_fake, local_part, mark_as_dynamo_input

from . import kept
from .copies import refusal
from .last_call import LastCall
from .watch import training_ran, watch_of

CastsOf = Callable[[WeightInputs], tuple[WeightInputs, bool]]


def candidates(
    example_inputs: Sequence[Any],
    weights: str,
    experts: Experts = "leave",
    frozen: bool = False,
) -> WeightInputs:
    """The parameters among a Dynamo graph's inputs whose copies could be inputs as well.

    Args:
        weights: the option, ``"cached"``, ``"constant"`` or ``"reused"``.
        experts: whether those with a matrix for each expert are cast.
        frozen: of a training graph, those only that need no gradient, whose copies last from step to step.
    """
    promised = _is_promised(weights)
    found, ranks = [], (2,) if experts == "leave" else (2, 3)
    for position, value in enumerate(example_inputs):
        if not isinstance(value, nn.Parameter) or value.dim() not in ranks or value.dtype not in HIGH_DTYPES:
            continue
        if frozen and value.requires_grad:
            continue
        is_whole = promised and is_dtensor(value)
        if type(value) is not nn.Parameter and not (is_fake(value) or is_whole):
            continue  # a subclass, with a layout of its own
        part = local_part(value) if is_whole else value
        if reason := refusal(part, promised):
            _say_refused(reason)
            continue
        if all(isinstance(size, int) for size in part.shape):
            found.append(Weight(position, tuple(part.shape), part.dtype))
    return WeightInputs(len(example_inputs), tuple(found), last=frozen, promised=promised)


def _is_promised(weights: str) -> bool:
    return weights == "constant"


def should_keep_some(example_inputs: Sequence[Any], weights: str) -> bool:
    """Whether it takes a word that no copies are kept: no weight is float8 itself, and no other warning gives a reason."""
    if weights == "reused":
        return False
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    if any(part.dtype.is_floating_point and part.dtype.itemsize == 1 for part in _parts(tensors)):
        return False
    promised = _is_promised(weights)
    return not any(isinstance(value, nn.Parameter) and refusal(value, promised) for value in tensors)


def _parts(tensors: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors, and those that a subclass consists of, among other things (a DTensor also of its mesh)."""
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            yield from _parts(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        elif isinstance(tensor, torch.Tensor):
            yield tensor


def may_train(example_inputs: Sequence[Any]) -> bool:
    """Whether a Dynamo graph may have a backward."""
    return torch.is_grad_enabled() and any(getattr(value, "requires_grad", False) for value in example_inputs)


def learned(
    example_inputs: Sequence[Any], casts_of: CastsOf, weights: str, experts: Experts
) -> tuple[WeightInputs, bool]:
    """The casts of weights that need not be made in a Dynamo graph, and whether it trains.

    Args:
        casts_of: traces the graph, and says which of the candidates it casts and whether it trains.
        weights, experts: see :func:`candidates`.
    """
    frozen = weights != "reused" and may_train(example_inputs)
    found = casts_of(candidates(example_inputs, weights, experts, frozen))
    # in inference all weights last
    return found if found[1] or not frozen else casts_of(candidates(example_inputs, weights, experts))


def extended(
    gm: fx.GraphModule, example_inputs: Sequence[Any], inputs: WeightInputs, is_static: bool
) -> tuple[fx.GraphModule, list[Any]]:
    """A copy of a Dynamo graph with an input for each scale and copy, and its example inputs.

    Args:
        is_static: whether those keep their addresses from call to call.
    """
    result = copy_of_graph(gm)
    graph = result.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    fake_mode = detect_fake_mode([node.meta.get("example_value") for node in placeholders])
    assert fake_mode is not None  # Dynamo's graphs have fake values
    last, examples = placeholders[-1], list(example_inputs)
    shapes = {weight.position: weight.shape for weight in inputs.weights}
    for copies in inputs.copies:
        device = example_inputs[copies.place.positions[0]].device
        shape = arranged_shape([shapes[position] for position in copies.place.positions], copies.place.dim)
        for form in copies.formats:
            with graph.inserting_after(last):
                last = graph.placeholder(f"f8fx_weight_{len(examples)}")
            with fake_mode:
                value = torch.empty(shape_of(shape, form), dtype=dtype_of(form), device=device)
            last.meta["example_value"] = value
            mark_as_dynamo_input(last, is_static=is_static)
            examples.append(value)
    result.recompile()
    return result, examples


def arranged_shape(shapes: Sequence[tuple[int, ...]], dim: int) -> tuple[int, int]:
    """The shape of matrices side by side along a dimension, or of those of experts below each other."""
    if len(shapes[0]) == 3:
        experts, *sizes = shapes[0]
        return experts * sizes[2 - dim], sizes[dim - 1]
    rows, columns = shapes[0]
    total = sum(shape[dim] for shape in shapes)
    return (total, columns) if dim == 0 else (rows, total)


def shape_of(shape: tuple[int, int], form: ScaleFormat | CastFormat) -> tuple[int, ...]:
    """The shape of a scale or copy of a matrix."""
    if isinstance(form, ScaleFormat):
        return () if form.dim is None else (shape[1 - form.dim],)
    rows, columns = shape[::-1] if form.transpose else shape
    sizes = zip((rows, columns), form.align, strict=True)
    return tuple(size + padding(size, multiple) for size, multiple in sizes)


def dtype_of(form: ScaleFormat | CastFormat) -> torch.dtype:
    """The dtype of a scale or copy."""
    return torch.float32 if isinstance(form, ScaleFormat) else form.scale.dtype


def wrapped(
    compiled: Callable[..., Any], inputs: WeightInputs, training: bool, last: bool
) -> Callable[..., Any]:
    """A compiled graph with further inputs, as Dynamo calls it: with its own.

    Args:
        last: whether copies last from call to call, or for a block of :func:`f8fx.reuse_weights`.
    """
    promised = inputs.promised
    fetch = partial(kept.cached, promised=promised) if last else kept.reused
    places = [(copies.place.positions, copies.place.dim, copies.formats) for copies in inputs.copies]
    every = [position for positions, _, _ in places for position in positions]
    call = LastCall(promised) if last and not training else None

    def run(*args: Any) -> Any:
        given = {position: _watched_part(args[position]) for position in every} if promised else args
        parameters = [given[position] for position in every]
        wanted = (
            ([given[position] for position in positions], dim, forms) for positions, dim, forms in places
        )
        if is_fake(parameters[0]):
            copies = kept.made_anew(wanted)
        elif call is not None:
            copies = kept.served(call, parameters, wanted)
        else:
            copies = fetch(wanted, training)
        if training:
            training_ran(args)
        return compiled(*args, *copies)

    return run


def _watched_part(parameter: Any) -> Any:
    """What this process has of a parameter: of a DTensor its part, whose watch learns what was written to the whole."""
    part = local_part(parameter)
    if part is not parameter and not is_fake(part):
        watch_of(part).note_whole(parameter)
    return part


def noting_training(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled training graph that has no further inputs, but after which weights may change."""

    def run(*args: Any) -> Any:
        training_ran(args)
        return compiled(*args)

    return run


def _say_refused(reason: str) -> None:
    if reason not in _SAID:
        _SAID.add(reason)
        warnings.warn(
            f"f8fx: a weight is not cached, and quantized in each call, since {reason}", stacklevel=2
        )


_SAID: set[str] = set()
