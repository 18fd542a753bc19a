"""The passes: joint graph in, joint graph out. Read :class:`Pipeline` from top to bottom.

======  ==============  ==============================================================================
 order  pass            what it does
======  ==============  ==============================================================================
   0    fold            batches multiplied by one frozen weight, and matmuls in parts, become one matmul; of experts, a grouped one
   1    find            every matmul, its role, name, sizes and operands            (only looks)
   2    select          convert or skip, with the reason                            (only looks)
   3    merge           matmuls that read one input become one
   3a   concatenations  tensors put together for float8 matmuls alone are never written
   4    quantize        float8 operands and ``aten._scaled_mm`` for the chosen ones
   4b   reuse           casts of weights that were made before, where the caller offers them
   5    share           one amax, scale and cast for each tensor and granularity
   6    collectives     casts move above all-gathers, so that float8 travels
   6a   amaxes          the amax of a tensor comes from its rows' or columns' amaxes, where that spares a read
   6b   materialize     residual sums, and gradients of norms over heads or out of RoPE, are written once
   6c   rounding        operands that are not written and that others read, too, have the digits that memory would hold
   7    tags            what activation checkpointing may recompute
   7b   one_read        row cast and column amaxes of a tensor in memory by one kernel of our own
   7c   amax_both       amaxes of rows and columns, and sums of columns, of a tensor that is not in memory by another
======  ==============  ==============================================================================

The numbers are those of the full design; lowering to kernels (8) is Inductor's job, with the rules
in :mod:`f8fx.lowerings`. Every pass is an object built from plain values and called with a graph; it
can be used alone on any aten joint graph whose values live in one fake mode, as those of AOTAutograd, ``torch.export`` and
``make_fx(tracing_mode="fake")`` do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import fx

from f8fx.hardware import Hardware
from f8fx.recipe import Recipe
from f8fx.report import Decision, GraphReport

from . import halves
from .amax_both import AmaxBoth
from .amaxes import Amaxes
from .backward import has_backward
from .bias import biases_in_gemms
from .check import Known, check, signature
from .choice import EMPTY, Choice, Convert, Skip, decision
from .collectives import Collectives, Wire
from .collector import collector_paused
from .concatenations import Concatenations
from .describe import describe
from .experts import Experts
from .find import Find, Found
from .fold import Fold
from .gemm import Gemm
from .marked import unfolded
from .materialize import Materialize
from .matmuls import sizes_of
from .merge import Merge
from .one_read import OneRead
from .parameters import constants as constant_parameters
from .quantize import DeviceScales, Quantize
from .reuse import Reuse, WeightInputs
from .rounding import Rounding
from .rowwise import ScalesOf, best_rowwise_scales, rowwise_scales_on
from .select import FilterError, Policy, Select
from .share import Share
from .tags import Tags

__all__ = [
    "AmaxBoth",
    "Amaxes",
    "Collectives",
    "Concatenations",
    "FilterError",
    "Find",
    "Fold",
    "Materialize",
    "Merge",
    "OneRead",
    "Pipeline",
    "Policy",
    "Quantize",
    "Reuse",
    "Rounding",
    "Select",
    "Share",
    "Tags",
    "WeightInputs",
    "best_rowwise_scales",
    "check",
    "describe",
    "rowwise_scales_on",
]


class Pipeline:
    """All passes in order.

    Args:
        recipe: what float8 means for each gemm.
        policy: the user's say in what is converted.
        hardware: what decisions are made for; ``None``: the device each matmul runs on.
        debug: check the graph after every pass.
        watch: called with the name of each pass and the graph's text after it.
        predict: put the cost model's figures on every decision, also where they decide nothing.
        rowwise_scales: where a device applies rowwise scales; default: what this torch does best there.
        weights_at_once: make both layouts of a weight in the forward (``save="fast"``).
        merge: whether matmuls that read one input become one: where the cost model says it pays, or never.
        wire: dtype in which float8 is gathered; see :class:`Collectives`.
        bias: where a bias is added: to the rounded result, as torchao does, or by the gemm where it can (:mod:`passes.bias`).
        kernels: the devices on which a Triton kernel of our own may be used, where it reads less than Inductor's.
        weights: parameters that are cast elsewhere, and the inputs through which their copies come.
        constants: what is computed from constants of the graph alone is computed once, not in every call.
        leave_activations: matmuls of two activations stay as they are (:mod:`passes.activations`).
        experts: whether grouped matmuls of experts are looked at too (:mod:`passes.experts`), and batched ones
            (:mod:`passes.batched_experts`), and whether the gradients of their weights are.
        runs: the graph is to run where its tensors are: what that device cannot run is left alone, whatever
            ``hardware`` can.
    """

    def __init__(
        self,
        recipe: Recipe,
        policy: Policy,
        hardware: Hardware | None = None,
        debug: bool = False,
        watch: Callable[[str, str], None] | None = None,
        predict: bool = False,
        rowwise_scales: Callable[[torch.device], DeviceScales] | None = None,
        merge: Literal["auto", "never"] = "auto",
        bias: Literal["torchao", "in_gemm"] = "torchao",
        weights_at_once: bool = False,
        wire: Wire = "auto",
        weights: WeightInputs | None = None,
        kernels: Callable[[torch.device], bool] = lambda device: False,
        constants: bool = False,
        runs: bool = False,
        leave_activations: bool = True,
        experts: Experts = "leave",
    ) -> None:
        self.recipe = recipe
        self.debug = debug
        self.watch = watch
        self.fold = Fold(experts)
        self.find = Find(leave_activations, experts)
        scales = rowwise_scales or best_rowwise_scales
        rescales = {"in_gemm": False, "by_size": None}
        self.select = Select(
            recipe, policy, hardware, predict, lambda device: rescales.get(scales(device), True), runs
        )
        self.rowwise_scales, self.bias = ScalesOf(scales, self.select.model_of), bias
        self.merge = Merge(merge, self.select.model_of)
        self.concatenations = Concatenations()
        self.quantize = Quantize(self.rowwise_scales)
        self.reuse = Reuse(weights) if weights is not None else None
        self.constants = constants
        self.share = Share(weights_at_once)
        self.collectives = Collectives(wire)
        self.amaxes = Amaxes()
        self.materialize = Materialize()
        self.rounding = Rounding()
        self.tags = Tags()
        self.one_read = OneRead(kernels)
        self.amax_both = AmaxBoth(kernels)

    def __call__(self, graph: fx.Graph) -> GraphReport:
        """Rewrites the graph in place and says what was done.

        A graph in which nothing is converted is left exactly as it was.
        """
        with collector_paused():
            return self._rewritten(graph)

    def _rewritten(self, graph: fx.Graph) -> GraphReport:
        report = GraphReport(self.recipe.name, training=has_backward(graph))
        outputs = signature(graph) if self.debug else None
        halves.mark(graph)
        known: Known = {}

        def run(name: str, step: Callable[..., Any], *args: Any) -> Any:
            start = time.perf_counter()
            result = step(*args)
            report.pass_seconds[name] = report.pass_seconds.get(name, 0.0) + time.perf_counter() - start
            if self.watch is not None:
                self.watch(name, describe(graph))
            if self.debug:
                check(graph, name, outputs, known)
            return result

        cached = self._cached(graph, report.training)
        found, choices = self._decide(graph, cached, run)
        if any(isinstance(choice, Convert) for choice in choices):
            if self.bias == "in_gemm":
                choices = biases_in_gemms(choices, self.rowwise_scales)
            merged = run("merge", self.merge, graph, choices)
            choices, report.merges = merged.choices, merged.decisions
            conversions = run("concatenations", self.concatenations, graph, merged.conversions)
            run("quantize", self.quantize, graph, conversions)
            if self.reuse is not None:
                before = len(self.reuse.taken)  # of other graphs: this one may be the body of an operator
                run("reuse", self.reuse, graph)
                report.reused_weights = len(self.reuse.taken) - before
            elif self.constants:
                report.reused_weights = len(_read_by(choices).intersection(cached))
            run("share", self.share, graph)
            report.gathers = run("collectives", self.collectives, graph)
            run("amaxes", self.amaxes, graph)
            run("materialize", self.materialize, graph)
            run("rounding", self.rounding, graph)
            run("tags", self.tags, graph)
            run("one_read", self.one_read, graph)
            run("amax_both", self.amax_both, graph)
        report.decisions = [decision(choice) for choice in choices]
        empty = {
            choice.gemm.node for choice in choices if isinstance(choice, Skip) and choice.reason == EMPTY
        }
        rounded = unfolded(graph, empty)
        report.warnings = [_read_rounded(rounded, report.decisions)] if rounded else []
        report.target = _target_name(self.select, found)
        return report

    def _cached(self, graph: fx.Graph, training: bool) -> set[fx.Node]:
        """The parameters whose casts need not be made in every call of a graph."""
        if self.reuse is not None:
            return self.reuse.cached(graph, training)
        return constant_parameters(graph) if self.constants and not training else set()

    def _decide(
        self, graph: fx.Graph, cached: Collection[fx.Node], run: Callable[..., Any]
    ) -> tuple[Found, list[Choice]]:
        """The matmuls, and what becomes of each.

        What was folded and is then not converted stays as it was. Others may have been seen through the matmul in its
        place, so all are looked at again.
        """
        folded = {each.matmul: each for each in run("fold", self.fold, graph)}
        left: dict[fx.Node, Skip] = {}
        layers: dict[fx.Node, Gemm] = {}
        while True:
            done = {*(each.old for each in folded.values()), *(left.keys() - layers.keys())}
            found = run("find", self.find, graph, done, layers)
            choices = run("select", self.select, found, cached)
            skips = [c for c in choices if isinstance(c, Skip) and c.gemm.node in folded]
            if not skips:
                break
            for skip in skips:
                undone = folded.pop(skip.gemm.node)
                undone.undo()
                gemm = replace(skip.gemm, node=undone.old)
                if isinstance(gemm, Gemm) and gemm.sums_groups:  # of each batch
                    m, k, n = sizes_of(undone.old)
                    gemm = replace(gemm, m=m, k=k, n=n, experts=0)
                    skip = self.select.timed(replace(skip, gemm=gemm, seconds=None))
                # a batched one may have a reason of its own
                if isinstance(gemm, Gemm) or not undone.is_batched:
                    left[undone.old] = replace(skip, gemm=gemm)
                if isinstance(gemm, Gemm) and gemm.role == "output":
                    layers[undone.old] = replace(gemm, layer=undone.old)
        for each in folded.values():
            each.finish()
        found.gemms += layers.values()
        if left:
            choices = sorted([*choices, *left.values()], key=lambda choice: choice.gemm.node)
        return found, choices

    def rewritten(self, graph: fx.Graph) -> GraphReport:
        """The report on a graph that earlier passes have rewritten: all matmuls stay as they are."""
        found = self.find(graph)
        skips = [
            *(Skip(gemm, "decided in the graph it was taken from") for gemm in found.gemms),
            *(Skip(unmatched, unmatched.reason) for unmatched in found.unmatched),
        ]
        skips.sort(key=lambda skip: skip.gemm.node)
        report = GraphReport(self.recipe.name, training=has_backward(graph))
        report.decisions = [decision(skip) for skip in skips]
        report.target = _target_name(self.select, found)
        return report


def _read_rounded(names: list[str], decisions: Sequence[Decision]) -> str:
    where = "; ".join(sorted({name or "the model itself" for name in names}))
    modules = {fqn for name in names for fqn in name.split(", ")}
    left = sorted({d.reason for d in decisions if not d.converted and d.fqn in modules})
    why = f", of whose matmuls some are left as they are: {', '.join(left)}" if left else ""
    return (
        f"f8fx: {len(names)} of the tensors that were gathered in float8 are read in high precision (in {where}{why}): "
        "what is read is their float8 rounding. Give the backend and f8fx.fsdp.enable_float8_all_gather the same recipe "
        "and filters, compute in bf16 or fp16 (MixedPrecisionPolicy, autocast), and leave weights that are read by "
        "anything but a matmul out of both"
    )


def _read_by(choices: Iterable[Choice]) -> set[fx.Node]:
    """The operands of all matmuls that are converted."""
    gemms = [choice.gemm for choice in choices if isinstance(choice, Convert)]
    return {operand.node for gemm in gemms for operand in (gemm.left, gemm.right)}


def _target_name(select: Select, found: Any) -> str:
    if select.hardware is not None:
        return select.hardware.name
    names = sorted({select.hardware_of(gemm.device).name for gemm in found.gemms})
    return ", ".join(names)
