"""``f8fx.explain``: what float8 would do to a model on any hardware, without that hardware.

    print(f8fx.explain(model, tokens, target="h100").gemm_speedup)

The model is traced with tensors that have shapes and no data (:mod:`f8fx.explain_trace`), so a
model of any size is explained in the memory of its graph. Every matmul gets a row: its module, sizes,
what was decided and why, and what the cost model predicts.

What is *not* predicted: everything that is no matmul (attention kernels, norms, optimizer), so the
speedup of a training step is smaller than that of its matmuls; and the gain from kernels better or worse
than those the cost model was fitted to. Where a graph breaks inside a module, names are relative to that
module, as everywhere in ``torch.compile``.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import torch
from torch import Tensor, nn

from . import explain_trace, weight_inputs
from .explain_replica import ExplainError, name_of
from .explain_trace import GraphTrace
from .hardware import Hardware
from .interconnect import INTERCONNECTS
from .options import OptionError, Options
from .parallelized import Parallelize, parallelized
from .partition import Partitioner
from .passes import Pipeline, WeightInputs, rowwise_scales_on
from .recipe import Role
from .report import Decision, GraphReport, MergeDecision
from .torch_private import tree_leaves

if TYPE_CHECKING:
    from .communication import Communication, World
    from .fsdp.copies import Wanted

__all__ = ["ExplainError", "Explanation", "Row", "explain"]


@dataclass(frozen=True)
class Row:
    """One matmul.

    Attributes:
        graph: index of the graph it is in; more than one where the graph breaks.
        fqn: the module whose forward called it, "" where none did.
        role: ``output``, ``grad_input`` or ``grad_weight``.
        m, k, n: sizes of ``[m, k] @ [k, n]``; a string such as ``"s77"`` where dynamic, "?" unknown.
        converted: whether it would run in float8.
        reason, detail: why.
        speedup: predicted seconds as it is over those in float8, its share of the casts included; also of a
            matmul that is left as it is, where float8 would be legal. ``None`` where there is no prediction.
        high_seconds: predicted, as it is; ``None`` where sizes are unknown.
        float8_seconds: predicted, as decided: in float8 with its share of casts and of a merged gemm if converted,
            else as it is.
        share: of the predicted seconds of all matmuls as they are, 0 to 1.
        merge: where others read the input too: what it would be merged with, or why it would not.
    """

    graph: int
    fqn: str
    role: Role
    m: int | str
    k: int | str
    n: int | str
    converted: bool
    reason: str
    detail: str
    speedup: float | None
    high_seconds: float | None
    float8_seconds: float | None
    share: float | None
    merge: str = ""

    @property
    def size(self) -> str:
        """``M x K x N``."""
        return f"{self.m} x {self.k} x {self.n}"


@dataclass
class Explanation:
    """What f8fx would do to a model, and what it would gain.

    Attributes:
        model: name of the module's class or of the function.
        target: name of the hardware.
        recipe, select: the options that matter most.
        training: whether a backward was traced.
        graphs: one report for each graph.
        rows: one for each matmul, in graph order.
        saved_bytes_high, saved_bytes_float8: bytes kept from forward to backward, with the high-precision graph and
            with the float8 one: intermediates, and inputs that no module holds; parameters are there anyway.
        communicated_bytes_high, communicated_bytes: bytes in collectives of the graphs, likewise: of each its
            input or output, whichever is larger; 0 on a single device.
        communication: what a step sends: under FSDP2 on the world that was asked for, and in the graphs. ``None``
            without either.
    """

    model: str
    target: str
    recipe: str
    select: str
    training: bool
    graphs: list[GraphReport] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    saved_bytes_high: int = 0
    saved_bytes_float8: int = 0
    communicated_bytes_high: int = 0
    communicated_bytes: int = 0
    communication: Communication | None = None

    @property
    def total(self) -> int:
        """Matmuls seen."""
        return len(self.rows)

    @property
    def converted(self) -> int:
        """Matmuls that would run in float8."""
        return sum(row.converted for row in self.rows)

    @property
    def gemms(self) -> int:
        """Float8 gemms that would run: as many as matmuls in float8, fewer where some are merged."""
        return sum(graph.gemms for graph in self.graphs)

    @property
    def merges(self) -> list[MergeDecision]:
        """Sets of layers that read one input, and whether each would be merged."""
        return [merge for graph in self.graphs for merge in graph.merges]

    @property
    def reasons(self) -> dict[str, int]:
        """How many matmuls are skipped for each reason, most frequent first."""
        return dict(Counter(row.reason for row in self.rows if not row.converted).most_common())

    @property
    def high_seconds(self) -> float:
        """Predicted seconds of all matmuls as they are."""
        return sum(row.high_seconds or 0.0 for row in self.rows)

    @property
    def float8_seconds(self) -> float:
        """Predicted seconds of all matmuls as decided, casts included."""
        return sum(row.float8_seconds or 0.0 for row in self.rows)

    @property
    def gemm_speedup(self) -> float:
        """Predicted speedup of all matmuls together, casts included; 1 where nothing is converted."""
        return self.high_seconds / self.float8_seconds if self.float8_seconds else 1.0

    def line(self) -> str:
        """The summary in a line."""
        text = f"{self.converted} of {self.total} matmuls of {self.model} in float8 ({self.recipe})"
        text += f" on {self.target}"
        if self.gemms < self.converted:
            text += f", merged into {self.gemms} gemms"
        if self.reasons:
            text += "; " + ", ".join(f"{count} {reason}" for reason, count in self.reasons.items())
        return text

    # -- as data

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON-ready data; ``totals`` repeats what can be computed from the rest."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        own["graphs"] = [graph.to_dict() for graph in self.graphs]
        own["rows"] = [dataclasses.asdict(row) for row in self.rows]
        own["communication"] = self.communication.to_dict() if self.communication else None
        names = ("total", "converted", "gemms", "reasons", "high_seconds", "float8_seconds", "gemm_speedup")
        own["totals"] = {name: getattr(self, name) for name in names}
        return own

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Explanation:
        """The inverse of :meth:`to_dict`."""
        own = {name: value for name, value in data.items() if name != "totals"}
        own["graphs"] = [GraphReport.from_dict(graph) for graph in own["graphs"]]
        own["rows"] = [Row(**row) for row in own["rows"]]
        if own.get("communication") is not None:
            from .communication import Communication

            own["communication"] = Communication.from_dict(own["communication"])
        return Explanation(**own)

    def to_json(self, indent: int | None = 2) -> str:
        """:meth:`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=indent)

    # -- to look at

    def print(self, file: TextIO | None = None, expand: bool = False) -> None:
        """Prints a table of the matmuls and the totals, to stdout by default.

        Args:
            expand: a line for each matmul; by default equal ones of repeated layers share one.
        """
        from .explain_show import print_explanation

        print_explanation(self, file, expand)

    def to_html(self) -> str:
        """One page with charts and a table; it loads nothing."""
        from .explain_html import page

        return page(self)

    def save_html(self, path: str | PathLike[str]) -> None:
        """Writes :meth:`to_html` to a file."""
        Path(path).write_text(self.to_html(), encoding="utf-8")


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
    will do, with inputs there too. The model is traced on a copy and stays as it is. With gradients
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
        OptionError: for an unknown option, value or target.
        ValueError: for a world that cannot be, or ``parallelize`` without ranks to split over.
        TypeError: for a world and a model that is no module.
        ExplainError: if the model cannot be copied or traced.
    """
    for name, value in options.items():
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
            raise OptionError(
                f"{name} is no option but an input: inputs by name go into kwargs={{{name!r}: ...}}"
            )
    parsed = Options.parse({**options, "target": target})
    if not callable(model):
        raise TypeError(f"model must be a module or a function, got {type(model).__name__}")
    if world is not None:
        from .communication import World

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
    from .communication import predict

    like_gpu = parsed.target is not None and parsed.target.name != "cpu"
    learned = partial(weight_inputs.learned, weights=parsed.weights, experts=parsed.experts)
    traces = explain_trace.trace(
        model,
        args,
        kwargs,
        partial(_pipeline, parsed),
        None if parsed.weights == "dynamic" else learned,
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
        graphs=[trace.report for trace in traces],
        rows=_rows(traces),
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
            recomputed={row.fqn for trace in traces for row in trace.report.decisions if row.recomputed},
        )
    return explanation


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
