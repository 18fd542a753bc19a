"""The versions that are compared: bf16, torchao and f8fx, all from the same weights.

=============  ============================================================================
 ``bf16``       ``torch.compile(model)``
 ``torchao``    ``torch.compile(convert_to_float8_training(model))``
 ``f8fx``       ``torch.compile(model, backend="f8fx")``, every legal matmul in float8
 ``f8fx_auto``  the same with ``select="auto"``, which promises to be no slower than bf16
=============  ============================================================================

Where ``auto`` decides as one of the others did, it is the same graph and is not measured again.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from f8fx.backend import f8fx
from f8fx.report import GraphReport, recording
from f8fx.torch_private import inductor_cache_hits

from .timing import Timing, interleaved

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
NAMES = ("bf16", "torchao", "f8fx", "f8fx_auto")

#: ``auto`` may be this much slower than bf16, or than the better of the two, before it is reported.
TOLERANCE = 0.02


@dataclass
class Variant:
    """One version of a model on fixed inputs.

    Attributes:
        cuda_graphs: whether each step replays CUDA graphs; its results then last until the next step.
        compile_s: seconds of the first step, which compiles.
        cached: whether Inductor found the graph in its cache, so that ``compile_s`` is no cold compile.
    """

    model: Any
    parameters: list[nn.Parameter]
    x: Tensor
    grad: Tensor
    reports: list[GraphReport] = field(default_factory=list)
    cuda_graphs: bool = False
    compile_s: float = 0.0
    cached: bool = False

    def step(self) -> tuple[Tensor, ...]:
        """Output, then the gradients of the input and of every parameter."""
        if self.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        output = self.model(self.x)
        return (output, *torch.autograd.grad(output, [self.x, *self.parameters], self.grad))


def build(
    name: str,
    module: nn.Module,
    x: Tensor,
    grad: Tensor,
    recipe: str,
    smoke: bool,
    options: Mapping[str, Any] | None = None,
    inductor: Mapping[str, Any] | None = None,
    convert: Callable[[nn.Module, str], nn.Module] | None = None,
) -> Variant:
    """One version of ``module``, compiled and run once.

    Args:
        name: one of :data:`NAMES`.
        x: input that requires a gradient.
        grad: gradient of the output.
        smoke: without code generation.
        options: of f8fx, beside the recipe and what is selected.
        inductor: Inductor's options.
        convert: makes torchao's version for a recipe; default: :func:`to_torchao`.
    """
    module = copy.deepcopy(module)
    inductor = {} if smoke else dict(inductor or {})
    # the function and not its name, which is known only where f8fx is installed
    backend: Any = "aot_eager" if smoke else "inductor"
    chosen: dict[str, Any] = inductor
    if name == "torchao":
        module = (convert or to_torchao)(module, recipe)
    elif name != "bf16":
        backend = f8fx
        chosen = {"recipe": recipe, "select": "auto" if name == "f8fx_auto" else "all", "strict": True}
        chosen |= {**(options or {}), **({"inductor": inductor} if inductor else {})}
        if smoke:
            chosen["executor"] = "eager"
    compiled: Any = torch.compile(
        module, backend=backend, options=chosen or None, dynamic=False, fullgraph=True
    )
    variant = Variant(compiled, list(module.parameters()), x, grad)
    variant.cuda_graphs = bool(inductor.get("triton.cudagraphs"))
    hits, start = inductor_cache_hits(), time.perf_counter()
    with recording() as variant.reports:
        variant.step()
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    variant.compile_s = time.perf_counter() - start
    variant.cached = inductor_cache_hits() > hits
    return variant


def to_torchao(module: nn.Module, recipe: str) -> nn.Module:
    """The module with its linear layers swapped for torchao's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        return convert_to_float8_training(module, config=Float8LinearConfig.from_recipe_name(recipe))


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` measured; a version that did not run is in ``errors`` only.

    Attributes:
        variants: those that ran, for further measurements.
        timings: by name.
        same: names that were not measured, since they are the same graph as another.
        sqnr: decibels of signal to noise of the output and of the input's gradient, against bf16.
        errors: why a version failed, by name.
    """

    variants: dict[str, Variant]
    timings: dict[str, Timing]
    same: dict[str, str]
    sqnr: dict[str, tuple[float, float]]
    errors: dict[str, str]

    def row(self) -> dict[str, Any]:
        """The comparison as JSON-ready data."""
        ms = {name: self.timings[name].ms for name in self.timings}
        ms |= {name: ms[other] for name, other in self.same.items() if other in ms}
        reports = {name: v.reports for name, v in self.variants.items() if name.startswith("f8fx")}
        return {
            "ms": ms,
            "timings": {name: timing.to_dict() for name, timing in self.timings.items()},
            "same_graph": self.same,
            "compile_s": {name: variant.compile_s for name, variant in self.variants.items()},
            "compile_cached": {name: variant.cached for name, variant in self.variants.items()},
            "sqnr_db": {name: [finite(value) for value in pair] for name, pair in self.sqnr.items()},
            "converted": {
                name: [sum(r.converted for r in found), sum(r.total for r in found)]
                for name, found in reports.items()
            },
            "errors": self.errors,
        }


def compare(
    module: nn.Module,
    x: Tensor,
    grad: Tensor,
    recipe: str,
    smoke: bool = False,
    seconds: float = 1.0,
    options: Mapping[str, Any] | None = None,
    convert: Callable[[nn.Module, str], nn.Module] | None = None,
    without: Collection[str] = (),
) -> Comparison:
    """Builds and times all versions of a module but those in ``without``; see :func:`build`."""
    torch.compiler.reset()
    variants: dict[str, Variant] = {}
    errors: dict[str, str] = {}
    sqnr: dict[str, tuple[float, float]] = {}
    reference: tuple[Tensor, ...] = ()
    for name in (name for name in NAMES if name not in without):
        try:
            variant = build(name, module, x, grad, recipe, smoke, options, convert=convert)
            results = variant.step()[:2]
        except Exception as error:  # one version that cannot run must not hide the others
            errors[name] = one_line(error)
            continue
        variants[name] = variant
        if name == "bf16":
            reference = results
        elif reference:
            left, right = (decibels(a, b) for a, b in zip(reference, results, strict=True))
            sqnr[name] = (left, right)
            if math.isnan(left + right):
                errors[name] = "the output or the gradient of the input is not finite"
    reference = ()
    same = _same_graph(variants)
    steps = {name: variant.step for name, variant in variants.items() if name not in same}
    timings = interleaved(steps, x.device, seconds) if steps else {}
    return Comparison(variants, timings, same, sqnr, errors)


def one_line(error: BaseException) -> str:
    """An error and its message, short enough for a table."""
    cause = error.__cause__ or error
    text = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {text[0] if text else ''}"[:300]


def _same_graph(variants: Mapping[str, Variant]) -> dict[str, str]:
    auto = variants.get("f8fx_auto")
    if auto is None:
        return {}

    def decisions(variant: Variant) -> list[tuple[Any, ...]]:
        return [(d.fqn, d.role, d.converted) for r in variant.reports for d in r.decisions]

    if "f8fx" in variants and decisions(variants["f8fx"]) == decisions(auto):
        return {"f8fx_auto": "f8fx"}
    if "bf16" in variants and not any(report.converted for report in auto.reports):
        return {"f8fx_auto": "bf16"}
    return {}


def finite(value: float) -> float | None:
    """For JSON: ``None`` where two versions agree to the bit, or a value is not finite."""
    return round(value, 2) if math.isfinite(value) else None


def decibels(reference: Tensor, value: Tensor) -> float:
    """Signal to noise; NaN where a value is not finite, infinite where both are equal."""
    reference, value = reference.detach().float(), value.detach().float()
    noise = torch.linalg.vector_norm(reference - value)
    return float(20 * torch.log10(torch.linalg.vector_norm(reference) / noise))


# -- what the rows of a result say ----------------------------------------------------------------


def speedup(row: Mapping[str, Any], name: str, over: str) -> float | None:
    """How many times faster one version is than another; above 1 is good."""
    ms = row["ms"]
    return ms[over] / ms[name] if name in ms and over in ms else None


def noise(row: Mapping[str, Any], *names: str) -> float:
    """The larger relative spread of the versions, where they were measured."""
    found = [row["timings"][name] for name in names if name in row["timings"]]
    return max(((t["high"] - t["low"]) / 2 / t["ms"] for t in found), default=0.0)


def verdicts(rows: list[dict[str, Any]], case: tuple[str, ...]) -> dict[str, Any]:
    """Where ``auto`` broke its promise, where it left speed behind, and what did not run.

    A difference counts if it is larger than :data:`TOLERANCE` and than the spread of both.
    """
    slower, missed, failed = [], [], []
    for row in rows:
        label = {key: row[key] for key in case}
        if row["errors"]:
            failed.append({**label, "errors": row["errors"]})
        limit = 1 + max(TOLERANCE, noise(row, "bf16", "f8fx_auto", "f8fx"))
        auto, everything = speedup(row, "f8fx_auto", "bf16"), speedup(row, "f8fx", "bf16")
        if auto is not None and auto * limit < 1:
            slower.append({**label, "speedup": auto})
        if auto is not None and everything is not None and everything > max(auto, 1.0) * limit:
            missed.append({**label, "auto": auto, "all": everything})
    return {"auto_slower_than_bf16": slower, "auto_left_behind": missed, "failed": failed}
