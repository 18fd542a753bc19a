"""Calibration recovers the constants that synthetic measurements were made with, and says what it found."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import calibrate, ceilings, fitting, linear_sweep, variants
from f8fx import hardware
from f8fx.calibration import Calibration, own_calibration
from f8fx.cost import CostModel, K, M, N
from f8fx.passes import Pipeline, rowwise_scales_on
from f8fx.passes.select import Policy
from f8fx.recipe import Recipe

H200 = hardware.find("h200")
#: Another machine than the one in the table.
TRUE = Calibration(
    bf16_efficiency=0.72,
    fp8_efficiency=0.78,
    fill=0.3,
    fp8_k_fill=400.0,
    memory_efficiency=0.89,
    transpose_efficiency=0.82,
    input_column_efficiency=0.5,
    weight_column_efficiency=0.6,
    grad_output_column_efficiency=0.7,
)
LAUNCH_US = 3.0
ACTUAL = dataclasses.replace(H200, launch_overhead=LAUNCH_US * 1e-6)
CUDA = "13.0"


def _ceilings(noise: float = 0.0) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    rows: list[dict[str, Any]] = [
        {"kind": "copy", "mib": 1024, "gb_s": {"copy": H200.memory_bandwidth * TRUE.memory_efficiency / 1e9}},
        {"kind": "launch", "us": LAUNCH_US},
    ]
    formulas = {f: fitting.gemm_formula(ACTUAL, TRUE, f, ()) for f in (False, True)}
    for case in ceilings.cases(quick=False):
        if case["kind"] == "gemm":
            sizes = (case["m"], case["k"], case["n"])
            ms = [
                1e3 * float(f((), *sizes)) * np.exp(noise * random.standard_normal())
                for f in formulas.values()
            ]
            rows.append(
                {**case, "ms": {"bf16": ms[0], "tensorwise_fast": ms[1], "rowwise_exact": 1.1 * ms[1]}}
            )
    return rows


@functools.cache
def _sweep() -> list[dict[str, Any]]:
    rows = []
    for name in variants.RECIPES:
        recipe = fitting.as_run(Recipe.named(name), ACTUAL, CUDA)
        formulas = [fitting.sweep_formula(ACTUAL, TRUE, recipe, float8) for float8 in (False, True)]
        for case in linear_sweep.cases((1024, 4096, 8192), quick=False):
            if case["recipe"] == name:
                high, low = (1e3 * float(f((), case["m"], case["k"], case["n"])) for f in formulas)
                auto = high if case["m"] < 2048 else low
                ms = {"bf16": high, "torchao": 1.2 * low, "f8fx": low, "f8fx_auto": auto}
                rows.append({**case, "ms": ms, "timings": {}, "errors": {}})
    return rows


def test_the_sweeps_formula_is_the_cost_models_own():
    recipe = Recipe.named("rowwise")
    layer = CostModel(H200).layer(4096, 2048, 8192, recipe)
    high, low = (
        float(fitting.sweep_formula(H200, Calibration(), recipe, f)((), 4096, 2048, 8192))
        for f in (False, True)
    )
    assert high - low == pytest.approx(layer.high_seconds - layer.float8_seconds)


@pytest.mark.parametrize(
    "gpu, cuda, rescales",
    [
        pytest.param("h100", "12.8", True, marks=pytest.mark.long),
        ("h100", "13.0", None),
        ("b200", "13.0", False),
    ],
)
def test_predictions_of_the_model_as_it_is_are_what_the_passes_ask(gpu, cuda, rescales):
    hw, recipe = hardware.find(gpu), Recipe.named("rowwise")
    scales = rowwise_scales_on(hw, cuda)
    select = Pipeline(recipe, Policy(), hw, rowwise_scales=lambda device: scales).select
    model = select.model_of(torch.device("cuda"))
    assert fitting.as_asked(hw, cuda) is model.rescales is rescales
    sizes = {"m": 4096, "k": 2048, "n": 8192}
    row = {**sizes, "recipe": "rowwise", "ms": {"bf16": 2.0, "f8fx": 1.0}, "timings": {}}
    (point,) = calibrate.compared(hw, own_calibration(hw), [row], cuda, asked=True)
    layer = model.layer(*sizes.values(), recipe)
    formula = fitting.around_seconds(hw, model.calibration.memory_efficiency)
    around = float(formula.subs(dict(zip((M, K, N), sizes.values(), strict=True))))
    assert point["predicted"] == pytest.approx(
        (around + layer.high_seconds) / (around + layer.float8_seconds)
    )


def test_constants_are_recovered():
    fitted = fitting.calibrated(H200, _ceilings(), _sweep(), CUDA)
    assert fitted.hardware.launch_overhead == pytest.approx(3e-6)
    for name in fitted.found:
        assert getattr(fitted.calibration, name) == pytest.approx(getattr(TRUE, name), rel=0.02), name
    large = {"exact_rowwise_bytes", "exact_rowwise_double_bytes"}
    by_hand = {"scale_kernels", "margin", "grouped_efficiency", *large}
    assert set(fitted.found) == {f.name for f in dataclasses.fields(TRUE)} - by_hand
    assert fitted.gemm_error is not None and fitted.gemm_error[1] < 0.005 < fitted.gemm_error[0]


def test_constants_are_recovered_from_noisy_times():
    """2 % of noise in each of 49 shapes; what only the small ones tell (fill) is less certain."""
    fitted = fitting.calibrated(H200, _ceilings(noise=0.02), [], CUDA)
    for name, tolerance in {
        "bf16_efficiency": 0.03,
        "fp8_efficiency": 0.05,
        "fill": 0.2,
        "fp8_k_fill": 0.2,
    }.items():
        assert getattr(fitted.calibration, name) == pytest.approx(getattr(TRUE, name), rel=tolerance), name


def test_what_was_not_measured_stays_as_it_is():
    fitted = fitting.calibrated(H200, [], [], None)
    assert fitted.calibration == own_calibration(H200) and fitted.found == () and fitted.gemm_error is None


def _files(folder: Any) -> list[str]:
    stamp = {"device": "NVIDIA H200", "cuda": CUDA, "date": "2026-01-02T03:04:05+00:00"}
    paths = []
    for name, rows in ((ceilings.NAME, _ceilings()), (linear_sweep.NAME, _sweep())):
        path = folder / f"2026-01-02-nvidia-h200-{name}.json"
        path.write_text(json.dumps({"name": name, "stamp": stamp, "rows": rows}))
        paths.append(str(path))
    return paths


@pytest.mark.long
def test_the_command_states_errors_verdicts_and_what_to_write(tmp_path, capsys):
    _files(tmp_path)
    assert calibrate.main(["--results-folder", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"fitted: {len(_sweep())} points, mean error 0.000" in out
    assert "bf16_efficiency = 0.720  # f8fx/calibration.py, Calibration; is 0.74" in out
    assert "launch_overhead = 3.00e-06" in out
    assert "'verdict': 'auto_left_behind', 'm': 1024" in out
    assert "auto_slower_than_bf16" in out


def test_without_results_it_says_so(tmp_path, capsys):
    assert calibrate.main(["--results-folder", str(tmp_path)]) == 0
    assert "nothing to fit" in capsys.readouterr().out


def test_results_of_two_devices_are_not_mixed(tmp_path, capsys):
    first, _ = _files(tmp_path)
    path = tmp_path / "other.json"
    path.write_text(
        json.dumps({"name": "ceilings", "stamp": {"device": "NVIDIA H100", "cuda": CUDA}, "rows": []})
    )
    assert calibrate.main([first, str(path)]) == 2
    assert "several devices: NVIDIA H100, NVIDIA H200" in capsys.readouterr().out
