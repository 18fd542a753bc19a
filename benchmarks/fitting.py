"""The constants of the cost model, fitted to what was measured.

The fit is the one by which the constants in use were found, least absolute logarithmic error: first the gemms' constants from
cuBLAS's times alone, then bandwidth and launch from theirs, then what the casts reach from the sweep, whose layers are predicted
by :class:`f8fx.cost.CostModel` itself with symbols for the constants. :mod:`benchmarks.calibrate` is the command.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import sympy

from f8fx.calibration import Calibration, own_calibration
from f8fx.cost import CostModel, K, M, N
from f8fx.hardware import Hardware
from f8fx.passes import rowwise_scales_on
from f8fx.recipe import GemmSpec, Recipe

from . import ceilings, variants
from .common import Row

GEMM_CONSTANTS = ("bf16_efficiency", "fp8_efficiency", "fill", "fp8_k_fill")
CAST_CONSTANTS = {
    "tensorwise": ("transpose_efficiency",),
    "rowwise": ("input_column_efficiency", "weight_column_efficiency", "grad_output_column_efficiency"),
}
#: What a fit may not leave: an efficiency above 1 says that something else was measured.
_BOUNDS = {"fill": (1e-3, 10.0), "fp8_k_fill": (1.0, 1e4)}
_EFFICIENCY = (0.02, 1.5)


# -- predictions ----------------------------------------------------------------------------------


def in_gemm(recipe: Recipe) -> Recipe:
    """The recipe as it runs where the gemm scales its accumulator: no kernel of its own rescales anything."""

    def scaled(gemm: GemmSpec | None) -> GemmSpec | None:
        return gemm and dataclasses.replace(gemm, use_fast_accum=True)

    return dataclasses.replace(
        recipe,
        output=scaled(recipe.output),
        grad_input=scaled(recipe.grad_input),
        grad_weight=scaled(recipe.grad_weight),
    )


def around_seconds(hw: Hardware, memory_efficiency: Any) -> Any:
    """What the sweep times beside the layer: its norm and sigmoid, in :data:`M`, :data:`K` and :data:`N`.

    The norm moves 12 bytes per element of the input (2 in, 2 out; backward 4 in, 2 out and a second
    read of 2), the sigmoid 10 per element of the output (2 in, 2 out; backward 4 in, 2 out), in five kernels.
    """
    return (12 * M * K + 10 * M * N) / (hw.memory_bandwidth * memory_efficiency) + 5 * hw.launch_overhead


Formula = Callable[..., Any]


def _formula(expression: sympy.Expr, constants: Sequence[str]) -> Formula:
    """A function of (constants, M, K, N) on arrays."""
    return sympy.lambdify(([sympy.Symbol(name) for name in constants], M, K, N), expression, modules="numpy")


def _with_symbols(calibration: Calibration, constants: Sequence[str]) -> Calibration:
    symbols: dict[str, Any] = {name: sympy.Symbol(name) for name in constants}
    return dataclasses.replace(calibration, **symbols)


def sweep_formula(
    hw: Hardware,
    calibration: Calibration,
    recipe: Recipe,
    float8: bool,
    constants: Sequence[str] = (),
    rescales: bool | None = True,
) -> Formula:
    """Seconds of a point of the sweep under a calibration some of whose constants are left open.

    Args:
        rescales: as in :class:`f8fx.cost.CostModel`.
    """
    open_ = _with_symbols(calibration, constants)
    layer = CostModel(hw, open_, rescales).expression(recipe, float8)
    return _formula(around_seconds(hw, open_.memory_efficiency) + layer, constants)


def gemm_formula(hw: Hardware, calibration: Calibration, float8: bool, constants: Sequence[str]) -> Formula:
    """Seconds of a gemm [M, K] x [K, N]."""
    model = CostModel(hw, _with_symbols(calibration, constants))
    return _formula(model.gemm_expression(float8), constants)


# -- fitting --------------------------------------------------------------------------------------


def fit(
    predict: Callable[[np.ndarray], np.ndarray], start: Sequence[float], bounds: Sequence[tuple[float, float]]
) -> np.ndarray:
    """Positive constants at which the absolute logarithmic errors add up to the least.

    Iteratively reweighted, damped Gauss-Newton steps in the logarithms of the constants.

    Args:
        predict: logarithms of predicted over measured for constants.
        start: where to begin.
        bounds: of each constant.
    """
    low, high = (np.log(np.array(side, dtype=float)) for side in zip(*bounds, strict=True))
    at = np.clip(np.log(np.array(start, dtype=float)), low, high)
    errors = predict(np.exp(at))
    damping = 1e-2
    for _ in range(200):
        weights = 1 / np.maximum(np.abs(errors), 1e-3)
        slopes = np.stack([_slope(predict, at, index, errors) for index in range(len(at))], axis=1)
        normal = slopes.T @ (weights[:, None] * slopes)
        wanted = normal + damping * np.diag(np.diag(normal) + 1e-9)
        step = np.linalg.solve(wanted, -slopes.T @ (weights * errors))
        there = np.clip(at + np.clip(step, -0.5, 0.5), low, high)
        new = predict(np.exp(there))
        if np.abs(new).sum() < np.abs(errors).sum():
            done = np.abs(there - at).max() < 1e-6
            at, errors, damping = there, new, damping / 3
            if done:
                break
        else:
            damping *= 4
            if damping > 1e9:
                break
    return np.exp(at)


def _slope(
    predict: Callable[[np.ndarray], np.ndarray], at: np.ndarray, index: int, errors: np.ndarray
) -> np.ndarray:
    nearby = at.copy()
    nearby[index] += 1e-4
    return (predict(np.exp(nearby)) - errors) / 1e-4


def _bounds(constants: Sequence[str]) -> list[tuple[float, float]]:
    return [_BOUNDS.get(name, _EFFICIENCY) for name in constants]


@dataclasses.dataclass(frozen=True)
class Fitted:
    """What a fit found.

    Attributes:
        hardware: the table's entry with the launch that was measured.
        calibration: the constants.
        found: names of the constants that were fitted; the others are as they were.
        gemm_error: mean absolute relative error of gemm times, before and after.
    """

    hardware: Hardware
    calibration: Calibration
    found: tuple[str, ...]
    gemm_error: tuple[float, float] | None


def calibrated(
    hw: Hardware, ceiling_rows: Sequence[Row], sweep_rows: Sequence[Row], cuda: str | None
) -> Fitted:
    """Constants fitted to ceilings, and then to the sweep; what there are no measurements of stays as it is."""
    calibration, found = own_calibration(hw), []
    bandwidth = ceilings.bandwidth(list(ceiling_rows))
    launch = next((row["us"] for row in ceiling_rows if row["kind"] == "launch"), None)
    if launch is not None:
        hw = dataclasses.replace(hw, launch_overhead=launch * 1e-6)
    if bandwidth is not None:
        calibration = dataclasses.replace(calibration, memory_efficiency=bandwidth / hw.memory_bandwidth)
        found.append("memory_efficiency")
    gemm_error = None
    gemms = [row for row in ceiling_rows if row["kind"] == "gemm"]
    if len(gemms) > len(GEMM_CONSTANTS):
        before = _gemm_error(hw, calibration, gemms)
        calibration = _fit_gemms(hw, calibration, gemms)
        gemm_error = (before, _gemm_error(hw, calibration, gemms))
        found += GEMM_CONSTANTS
    for name, constants in CAST_CONSTANTS.items():
        rows = [row for row in sweep_rows if row["recipe"] == name and is_measured(row)]
        if len(rows) > len(constants):
            calibration = _fit_casts(hw, calibration, as_run(Recipe.named(name), hw, cuda), rows, constants)
            found += constants
    return Fitted(hw, calibration, tuple(found), gemm_error)


def as_run(recipe: Recipe, hw: Hardware, cuda: str | None) -> Recipe:
    """The recipe as f8fx runs it on that hardware with that CUDA."""
    return in_gemm(recipe) if rowwise_scales_on(hw, cuda) != "torchao" else recipe


def as_asked(hw: Hardware, cuda: str | None) -> bool | None:
    """``rescales`` of the cost model that the passes ask on that hardware with that CUDA (:class:`f8fx.passes.Pipeline`)."""
    return {"in_gemm": False, "by_size": None}.get(rowwise_scales_on(hw, cuda), True)


def is_measured(row: Row) -> bool:
    """Whether a point of the sweep has both versions."""
    return {"bf16", "f8fx"} <= set(row["ms"])


def _gemm_points(rows: Sequence[Row]) -> list[tuple[bool, np.ndarray, np.ndarray]]:
    """For bf16 and float8: sizes [3, n] and seconds [n] of the fastest version."""
    points = []
    for float8 in (False, True):
        pairs = [(row, ms) for row in rows if (ms := ceilings.best_ms(row, float8)) is not None]
        sizes = np.array([[row[key] for row, _ in pairs] for key in ("m", "k", "n")], dtype=float)
        points.append((float8, sizes, np.array([ms * 1e-3 for _, ms in pairs])))
    return points


def _fit_gemms(hw: Hardware, calibration: Calibration, rows: Sequence[Row]) -> Calibration:
    points = [
        (gemm_formula(hw, calibration, float8, GEMM_CONSTANTS), sizes, seconds)
        for float8, sizes, seconds in _gemm_points(rows)
        if len(seconds)
    ]

    def errors(values: np.ndarray) -> np.ndarray:
        return np.concatenate(
            [np.log(formula(values, *sizes) / seconds) for formula, sizes, seconds in points]
        )

    start = [getattr(calibration, name) for name in GEMM_CONSTANTS]
    values = fit(errors, start, _bounds(GEMM_CONSTANTS))
    return _replaced(calibration, GEMM_CONSTANTS, values)


def _replaced(calibration: Calibration, constants: Sequence[str], values: np.ndarray) -> Calibration:
    changes: dict[str, Any] = dict(zip(constants, map(float, values), strict=True))
    return dataclasses.replace(calibration, **changes)


def _gemm_error(hw: Hardware, calibration: Calibration, rows: Sequence[Row]) -> float:
    errors = [
        np.abs(gemm_formula(hw, calibration, float8, ())((), *sizes) / seconds - 1)
        for float8, sizes, seconds in _gemm_points(rows)
        if len(seconds)
    ]
    return float(np.concatenate(errors).mean())


def _fit_casts(
    hw: Hardware, calibration: Calibration, recipe: Recipe, rows: Sequence[Row], constants: Sequence[str]
) -> Calibration:
    sizes = np.array([[row[key] for row in rows] for key in ("m", "k", "n")], dtype=float)
    measured = np.array([variants.speedup(row, "f8fx", "bf16") for row in rows], dtype=float)
    high = sweep_formula(hw, calibration, recipe, False)((), *sizes)
    float8 = sweep_formula(hw, calibration, recipe, True, constants)

    def errors(values: np.ndarray) -> np.ndarray:
        return np.log(high / float8(values, *sizes) / measured)

    start = [getattr(calibration, name) for name in constants]
    values = fit(errors, start, _bounds(constants))
    return _replaced(calibration, constants, values)
