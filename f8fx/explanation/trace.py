"""Tracing a model for :func:`f8fx.explain`: nothing runs and nothing is allocated.

A copy of the model whose tensors are *fakes* (:mod:`f8fx.explanation.replica`) is called under ``torch.compile`` with
fakes as inputs, as if on a GPU (:mod:`f8fx.explanation.target`). The backend there only looks: it has AOTAutograd build
the joint graph, partitions it as it is and as the passes rewrite it, and returns Dynamo's graph, which yields more
fakes. So graph breaks, several graphs and Python between them work as they do in earnest.
"""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from f8fx.executor import trace as trace_once
from f8fx.executor import with_bodies
from f8fx.graph_bytes import communicated_bytes, saved_bytes
from f8fx.partition import Partitioner
from f8fx.passes import Pipeline, WeightInputs
from f8fx.passes.decided import is_decided, mark_decided
from f8fx.passes.matmuls import FLOAT8_MATMULS
from f8fx.passes.parameters import KnownInputs, is_there
from f8fx.report import GraphReport
from f8fx.resumed import name_modules
from f8fx.torch_private import (
    aot_backend,
    boxed,
    cause_of,
    fake_tensor_mode,
    flex_attention_with_gradients,
    forget_traced_regions,
    input_position,
    min_cut_partition,
    uncompiled,
    unlogged_fake_errors,
    unnoticed_by_dynamo,
)
from f8fx.weights.inputs import CastsOf, extended
from f8fx.wire import Call, calls_of

from .replica import ExplainError, Replica, name_of
from .target import as_on_target

Learned = Callable[[Sequence[Any], CastsOf], tuple[WeightInputs, bool]]


@dataclass(frozen=True)
class GraphTrace:
    """What was found out about one graph.

    Attributes:
        report: what the passes decided.
        saved_bytes_high, saved_bytes_float8: bytes that are kept from forward to backward, in high precision and
            in float8 (:func:`f8fx.graph_bytes.saved_bytes`).
        communicated_bytes_high, communicated_bytes: bytes in the collectives, likewise.
        calls_high, calls: the collectives of forward and backward, likewise; what is recomputed is there twice.
        recomputed: the layers whose forward matmul the backward runs again.
    """

    report: GraphReport
    saved_bytes_high: int = 0
    saved_bytes_float8: int = 0
    communicated_bytes_high: int = 0
    communicated_bytes: int = 0
    calls_high: tuple[Call, ...] = ()
    calls: tuple[Call, ...] = ()
    recomputed: frozenset[str] = frozenset()


def trace(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    pipeline: Callable[[WeightInputs | None], Pipeline],
    learned: Learned | None,
    partitioner: Partitioner,
    like_gpu: bool,
    dynamic: bool,
) -> tuple[list[GraphTrace], int]:
    """Traces a call of a module or function with its gradients, if any are asked for.

    Returns:
        The graphs, and how often the call runs the one that it runs most.

    Args:
        pipeline: the passes, for a graph whose weights may be cast elsewhere, or for any.
        learned: :func:`f8fx.weights.inputs.learned` under the options, which says what is cast elsewhere; ``None``: nothing.
        partitioner: what the float8 graph is split with.
        like_gpu: trace attention and autocast as on a GPU, wherever the tensors are.
        dynamic: all sizes of inputs are symbolic.

    Raises:
        ExplainError: if the model cannot be copied or traced.
    """
    if lazy := _uninitialized(model):
        raise ExplainError(f"{lazy} of {name_of(model)} has no shape yet: call the model once before")
    mode = fake_tensor_mode(symbols=True, allow_non_fake_inputs=True)
    replica = Replica(mode, (model, args, kwargs))
    call = replica.of_callable(model)
    fake_args, fake_kwargs = replica.of_inputs((tuple(args), dict(kwargs)))
    collector = _Collector(pipeline, learned, partitioner, like_gpu)
    try:
        with (
            torch.compiler.set_stance("default"),
            unnoticed_by_dynamo(collector),
            unlogged_fake_errors(),
            flex_attention_with_gradients() if like_gpu else contextlib.nullcontext(),
            mode,
            warnings.catch_warnings(),
        ):
            # of no consequence: see f8fx.explanation.target
            warnings.filterwarnings("ignore", ".*CUDA is not available.*Disabling autocast")
            torch.compile(call, backend=collector, dynamic=dynamic)(*fake_args, **fake_kwargs)
    except Exception as error:
        raise _explained(model, error) from error
    return collector.graphs, max(collector.runs, default=0)


def _uninitialized(model: Callable[..., Any]) -> str | None:
    """The name of a parameter or buffer of a lazy module that has not been called."""
    model = uncompiled(model)
    if not isinstance(model, nn.Module):
        return None
    named = (*model.named_parameters(), *model.named_buffers())
    return next((name for name, tensor in named if nn.parameter.is_lazy(tensor)), None)


def _explained(model: Callable[..., Any], error: Exception) -> ExplainError:
    cause = cause_of(error)
    lines = str(cause).strip().splitlines()
    text = f"{type(cause).__name__}: {lines[0] if lines else ''}"
    hint = _line_of_user(error)
    if "DataDependent" in text or "DynamicOutputShape" in text:
        hint += "; its sizes or branches depend on values, and explain has none: it only traces"
    return ExplainError(f"could not trace {name_of(model)}: {text}{hint}")


def _line_of_user(error: Exception) -> str:
    """Where in the user's code Dynamo says that it was: it lists lines of torch's modules there too."""
    _, _, traceback = str(error).partition("from user code:")
    frames = re.findall(r'File "([^"]+)", line (\d+), in .*\n *(.*)', traceback)
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    for file, number, code in reversed(frames):
        if not file.startswith(inside):
            return f" (at {Path(file).name}:{number}: {code})"
    return ""


class _Collector:
    """A Dynamo backend that looks at each graph and hands it back as it was."""

    def __init__(
        self,
        pipeline_with: Callable[[WeightInputs | None], Pipeline],
        learned: Learned | None,
        partitioner: Partitioner,
        like_gpu: bool,
    ) -> None:
        self.pipeline_with = pipeline_with
        self.pipeline = pipeline_with(None)
        self.learned = learned
        self.partitioner = partitioner
        self.like_gpu = like_gpu
        self.known, self.own = KnownInputs(), 0
        self.graphs: list[GraphTrace] = []
        self.runs: list[int] = []

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        name_modules(gm)
        if self.like_gpu:
            as_on_target(gm)
        self.known, self.own = KnownInputs.of(inputs), len(inputs)
        graph, inputs = self._with_copies(gm, inputs)
        aot_backend(_keep, self._infer, self._partition)(graph, inputs)
        number = len(self.runs)
        self.runs.append(0)

        def run(*args: Any) -> Any:
            self.runs[number] += 1
            return gm.forward(*args)

        return run

    def _with_copies(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, Sequence[Any]]:
        """The graph as the backend has it compiled: with inputs for the copies of weights that are made elsewhere."""
        self.pipeline = self.pipeline_with(None)
        if self.learned is None:
            return gm, inputs

        def casts_of(found: WeightInputs) -> tuple[WeightInputs, bool]:
            trial, reports = self.pipeline_with(found), []

            def look(graph: fx.Graph) -> None:
                if not is_decided(graph):
                    self.known.mark(graph)
                    reports.append(trial(graph))
                    mark_decided(graph)

            trace_once(gm, inputs, look)
            forget_traced_regions()
            assert trial.reuse is not None
            return found.with_casts(trial.reuse.seen), any(report.training for report in reports)

        kept, training = self.learned(inputs, casts_of)
        if not kept.copies:
            return gm, inputs
        self.pipeline = self.pipeline_with(kept)
        return extended(gm, inputs, kept, is_static=not training or kept.last)

    def _infer(self, graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        self.known.mark(graph.graph)
        rewritten = _copied(graph.graph)
        report = self._report(rewritten, graph)
        communicated = (communicated_bytes(graph.graph), communicated_bytes(rewritten))
        before, after = (tuple(calls_of(g, backward=False)) for g in (graph.graph, rewritten))
        self.graphs.append(GraphTrace(report, 0, 0, *communicated, before, after))
        return boxed(graph.forward)

    def _partition(self, joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        self.known.mark(joint.graph)
        rewritten = fx.GraphModule(joint, _copied(joint.graph))
        report = self._report(rewritten.graph, joint)
        communicated = (communicated_bytes(joint.graph), communicated_bytes(rewritten.graph))
        outputs = kwargs["num_fwd_outputs"]
        halves = min_cut_partition(joint, inputs, **kwargs)
        float8 = halves
        if report.converted:
            rewritten.recompile()
            float8 = self.partitioner(rewritten, inputs, **kwargs)
        high, low = (saved_bytes(forward.graph, outputs, self._is_there) for forward, _ in (halves, float8))
        before, after = ((*calls_of(f.graph, False), *calls_of(b.graph, True)) for f, b in (halves, float8))
        again = _run_again(float8[1].graph, report)
        self.graphs.append(GraphTrace(report, high, low, *communicated, before, after, again))
        return halves

    def _is_there(self, node: fx.Node) -> bool:
        """Whether an input is kept anyway: what modules hold, and copies of weights."""
        position = input_position(node)
        return is_there(node) or (position is not None and position >= self.own)

    def _report(self, rewritten: fx.Graph, whole: fx.GraphModule) -> GraphReport:
        """Rewrites the copy of a graph; what is decided in it and in the bodies of its higher-order operators."""
        reports = [self.pipeline(rewritten)]
        for body in with_bodies(whole):
            if body is not whole and not is_decided(body.graph):
                reports.append(self.pipeline(_copied(body.graph)))
            mark_decided(body.graph)
        return GraphReport.merged(reports)[0]


def _run_again(backward: fx.Graph, report: GraphReport) -> frozenset[str]:
    """The layers whose forward matmul stands in the backward. (Of one that was merged it is not known which of its parts is read.)"""
    names = {
        provenance.fqn
        for node in backward.nodes
        if node.target in FLOAT8_MATMULS and (provenance := node.meta["f8fx"]).role == "output"
    }
    merged = {merge.layers for merge in report.merges if merge.merged}
    return frozenset(names).union(
        d.fqn for d in report.decisions if d.recomputed and any(d.fqn in layers for layers in merged)
    )


def _keep(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    return boxed(graph.forward)


def _copied(graph: fx.Graph) -> fx.Graph:
    """A copy with the same metadata (``deepcopy`` would also copy, and warn about, pytree specs)."""
    copied = fx.Graph()
    result: Any = copied.graph_copy(graph, {})
    copied.output(result).meta = copy.copy(graph.output_node().meta)
    return copied
