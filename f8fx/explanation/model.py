"""Explaining a model: it is traced as it is and as the passes rewrite it, and the reports become rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from f8fx.hardware import Hardware
from f8fx.interconnect import INTERCONNECTS
from f8fx.nearest import unmatched
from f8fx.options import OptionError, Options
from f8fx.partition import Partitioner
from f8fx.passes import Pipeline, WeightInputs, rowwise_scales_on
from f8fx.report import Decision
from f8fx.torch_private import runs_joint_passes, tree_leaves
from f8fx.weights.inputs import learned

from .parallelized import Parallelize, parallelized
from .replica import name_of
from .result import Explanation, Row
from .trace import GraphTrace, trace

if TYPE_CHECKING:
    from f8fx.communication import World
    from f8fx.fsdp.copies import Wanted


def explain(
    model: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    target: str | Hardware | None = "h100",
    dynamic: bool = False,
    world: World | int | str | None = None,
    copies: Wanted = "auto",
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    parallelize: Parallelize | None = None,
    **options: Any,
) -> Explanation:
    """Says which matmuls of ``model(*args, **kwargs)`` would run in float8, why, and what it gains.

    Needs no GPU, computes nothing and allocates no tensor (what else its Python does, it does once): a model built under ``torch.device("meta")``
    will do, with inputs there too. The model and what it is called with are traced on copies and stay as they are; a
    function's globals are not copied, so pass it a model as an argument, or close over it. With gradients
    enabled and asked for by any parameter or input, forward and backward are traced, else the forward.

    Args:
        model: a module or a function; what ``torch.compile`` made of one is explained from the source.
        args, kwargs: what it is called with; of tensors only shape, dtype and device count.
        target: name of the hardware; ``None``: the device the tensors are on.
        dynamic: take sizes of inputs as symbolic; rows then say from which M float8 pays.
        world: ranks that the model would be trained on under FSDP2: ``8``, or ``"8x4"`` (or ``"fsdp=8,tp=4"``) for
            FSDP x tensor parallelism, ``"replicate=2,fsdp=8"`` for HSDP, ``"replicate=8"`` for DDP. The explanation then says what a step sends, see
            :mod:`f8fx.communication`; `model` is a module that is not sharded yet. No process group is needed.
        copies: of rowwise weights, as ``f8fx.fsdp.enable_float8_all_gather`` takes it.
        param_dtype, reduce_dtype: of FSDP2's ``MixedPrecisionPolicy``: what weights are gathered in where not in float8, and
            gradients are reduced in; default: each parameter's own dtype. What is computed in follows the model as it is.
        parallelize: tensor parallelism: ``parallelize(model, mesh)`` splits a copy of the model over a mesh of the
            world's last dimension, as ``parallelize_module`` does, and may return another module. Graphs are then those
            of a rank, and what they send is counted. A model that is parallelized already needs none.
        options: of the backend, see :class:`f8fx.options.Options`.

    Raises:
        OptionError: for an unknown option, value or target, and under ``use_joint_graph_passes=False``, with which nothing is converted.
        ValueError: for a world that cannot be, or ``parallelize`` without ranks to split over.
        TypeError: for a world and a model that is no module.
        ExplainError: if the model cannot be copied or traced.
    """
    for name, value in options.items():
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
            raise OptionError(
                f"{name} is no option but an input: inputs by name go into kwargs={{{name!r}: ...}}"
            )
    if not callable(model):
        raise TypeError(f"model must be a module or a function, got {type(model).__name__}")
    for name in options.keys() & _arguments(model) - {f.name for f in fields(Options)}:
        raise OptionError(
            f"{name} is no option but an argument of the model: those go into kwargs={{{name!r}: ...}}"
        )
    parsed = Options.parse({**options, "target": target})
    if parsed.executor == "inductor" and not runs_joint_passes(parsed.inductor):
        raise OptionError(
            "inductor: with use_joint_graph_passes=False Inductor runs no passes, so nothing would be in float8"
        )
    if world is not None:
        from f8fx.communication import World

        world = World.parse(world)
        if not isinstance(model, nn.Module):
            raise TypeError(f"world: model must be a module, got {type(model).__name__}")
    with parallelized(model, world, parallelize) as on_rank:
        return _explained(
            on_rank,
            name_of(model),
            args,
            kwargs or {},
            dynamic,
            world,
            {"copies": copies, "param_dtype": param_dtype, "reduce_dtype": reduce_dtype},
            parsed,
        )


def _explained(
    model: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic: bool,
    world: World | None,
    policy: Mapping[str, Any],
    parsed: Options,
) -> Explanation:
    from f8fx.communication import predict

    like_gpu = parsed.target is not None and parsed.target.name != "cpu"
    learn = partial(learned, weights=parsed.weights, experts=parsed.experts)
    traces, most_runs = trace(
        model,
        args,
        kwargs,
        partial(_pipeline, parsed),
        None if parsed.weights == "dynamic" else learn,
        Partitioner(parsed.save),
        like_gpu,
        dynamic,
    )
    target_names = sorted({trace.report.target for trace in traces if trace.report.target})
    explanation = Explanation(
        model=name,
        target=parsed.target.name if parsed.target else ", ".join(target_names),
        recipe=parsed.recipe.name,
        select=parsed.select,
        training=any(trace.report.training for trace in traces),
        filters_without_match=unmatched(
            (*parsed.filter_fqns, *parsed.only_fqns),
            [decision.fqn for trace in traces for decision in trace.report.decisions],
        ),
        graphs=[trace.report for trace in traces],
        rows=_rows(traces),
        most_runs=most_runs,
    )
    for figure in ("saved_bytes_high", "saved_bytes_float8", "communicated_bytes_high", "communicated_bytes"):
        setattr(explanation, figure, sum(getattr(trace, figure) for trace in traces))
    high = [call for trace in traces for call in trace.calls_high]
    float8 = [call for trace in traces for call in trace.calls]
    if world is not None or high:
        explanation.communication = predict(
            cast("nn.Module", model) if world is not None else nn.Module(),
            world or 1,
            parsed,
            training=explanation.training,
            **policy,
            interconnect=INTERCONNECTS.get(parsed.target.name) if parsed.target else None,
            in_graph=(high, float8) if high else None,
            recomputed={fqn for trace in traces for fqn in trace.recomputed},
        )
    return explanation


def _arguments(model: Callable[..., Any]) -> set[str]:
    """Names of what a model can be called with, as far as they can be known."""
    try:
        return set(inspect.signature(getattr(model, "forward", model)).parameters)
    except (TypeError, ValueError):  # something written in C
        return set()


def _pipeline(options: Options, weights: WeightInputs | None = None) -> Pipeline:
    """The passes, as they run on the target, for a graph whose ``weights`` may be cast elsewhere."""
    if options.target is not None and options.target.name != "cpu" and options.rowwise_scales is None:
        scales = rowwise_scales_on(options.target)
        return options.pipeline(predict=True, weights=weights, rowwise_scales=lambda device: scales)
    return options.pipeline(predict=True, weights=weights)


def _rows(traces: list[GraphTrace]) -> list[Row]:
    decisions = [(index, d) for index, trace in enumerate(traces) for d in trace.report.decisions]
    total = sum(d.seconds or 0.0 for _, d in decisions)
    return [_row(index, decision, total) for index, decision in decisions]


def _row(graph: int, d: Decision, total: float) -> Row:
    decided = d.seconds
    if d.seconds is not None and d.converted and d.speedup:
        decided = d.seconds / d.speedup
    return Row(
        graph=graph,
        fqn=d.fqn,
        role=d.role,
        m=d.m,
        k=d.k,
        n=d.n,
        converted=d.converted,
        reason=d.reason,
        detail=d.detail,
        speedup=d.speedup,
        high_seconds=d.seconds,
        float8_seconds=decided,
        share=d.seconds / total if d.seconds is not None and total else None,
        merge=d.merge,
    )
