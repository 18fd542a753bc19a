"""The cost model against what was measured: ``python -m benchmarks.calibrate [RESULT.json ...]``.

Reads committed results of one device (:mod:`~benchmarks.ceilings`, :mod:`~benchmarks.linear_sweep`, :mod:`~benchmarks.llama_block`; by default the latest of each in
``results/``) and prints

* predicted and measured speedup of every point of the sweep, and the error;
* every ``auto`` verdict that was wrong: converted though bf16 was faster, or left though float8 was;
* the constants of :class:`f8fx.calibration.Calibration` and of the hardware table, fitted to the measurements, and how much nearer the
  predictions come with them.

It changes no file. How the fit works: :mod:`benchmarks.fitting`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from f8fx import hardware
from f8fx.calibration import Calibration, own_calibration
from f8fx.hardware import Hardware
from f8fx.recipe import Recipe

from . import ceilings, common, linear_sweep, variants
from .common import Grid, Row, console, show
from .fitting import Fitted, as_asked, as_run, calibrated, is_measured, sweep_formula

NAME = "calibrate"
Result = dict[str, Any]


# -- what is printed ------------------------------------------------------------------------------


def compared(
    hw: Hardware, calibration: Calibration, rows: Sequence[Row], cuda: str | None, asked: bool = False
) -> list[Row]:
    """Predicted beside measured speedup of f8fx over bf16, everything converted, for every point of the sweep.

    Args:
        cuda: the version of it that the sweep ran with.
        asked: predict as the passes ask the cost model; else what ran, with the scales in the gemm where they were.
    """
    found = []
    for recipe in variants.RECIPES:
        chosen = Recipe.named(recipe) if asked else as_run(Recipe.named(recipe), hw, cuda)
        rescales = as_asked(hw, cuda) if asked else True
        formulas = [
            sweep_formula(hw, calibration, chosen, float8, rescales=rescales) for float8 in (False, True)
        ]
        for row in rows:
            if row["recipe"] == recipe and is_measured(row):
                high, low = (float(formula((), row["m"], row["k"], row["n"])) for formula in formulas)
                measured = variants.speedup(row, "f8fx", "bf16")
                found.append(
                    {key: row[key] for key in linear_sweep.CASE}
                    | {"predicted": high / low, "measured": measured}
                )
    return found


def error_of(points: Sequence[Row]) -> dict[str, float]:
    """Mean and largest absolute error of predicted speedups, and how many fall on the wrong side of 1."""
    errors = [abs(p["predicted"] - p["measured"]) for p in points]
    wrong = sum((p["predicted"] > 1) != (p["measured"] > 1) for p in points)
    if not errors:
        return {"points": 0, "mean": math.nan, "largest": math.nan, "wrong_side": 0}
    return {
        "points": len(errors),
        "mean": sum(errors) / len(errors),
        "largest": max(errors),
        "wrong_side": wrong,
    }


def points_grid(before: Sequence[Row], after: Sequence[Row]) -> Grid:
    """Every point of the sweep."""
    cells = tuple(
        (
            f"{old['recipe']} {old['m']} x {old['k']} x {old['n']}",
            show(old["measured"]),
            show(old["predicted"]),
            show(old["predicted"] - old["measured"], "+.2f"),
            show(new["predicted"]),
            show(new["predicted"] - new["measured"], "+.2f"),
        )
        for old, new in zip(before, after, strict=True)
    )
    headers = ("M x K x N", "measured", "predicted", "error", "predicted, fitted", "error, fitted")
    return Grid("Speedup of f8fx over bf16, everything converted", headers, cells)


def to_write(fitted: Fitted, start: Calibration) -> list[str]:
    """Lines for the source: constants that a fit found, with what they were."""
    lines = [f"launch_overhead = {fitted.hardware.launch_overhead:.2e}  # f8fx/hardware_table.py"]
    for name in fitted.found:
        value = getattr(fitted.calibration, name)
        text = f"{value:.0f}" if value > 10 else f"{value:.3f}"
        lines.append(f"{name} = {text}  # f8fx/calibration.py, Calibration; is {getattr(start, name):g}")
    return lines


def wrong_verdicts(results: Sequence[Result]) -> list[Row]:
    """Where ``select="auto"`` was slower than bf16 or left speed behind, in sweep and block."""
    found = []
    for result in results:
        case = (*linear_sweep.CASE, "model", "checkpointing")
        verdicts = variants.verdicts([dict.fromkeys(case) | row for row in result["rows"]], case)
        for kind in ("auto_slower_than_bf16", "auto_left_behind"):
            for entry in verdicts[kind]:
                known = {key: value for key, value in entry.items() if value is not None}
                found.append({"benchmark": result["name"], "verdict": kind, **known})
    return found


def latest(folder: Path, device: str | None = None) -> list[Path]:
    """The newest result of each benchmark that is read here; of one device, where its slug is given."""
    found = []
    for name in (ceilings.NAME, linear_sweep.NAME, "llama_block"):
        paths = [p for p in common.results_of(folder, name) if device is None or f"-{device}-" in p.name]
        found += paths[-1:]
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.calibrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="*", type=Path, help="JSON files (default: the latest in results/)")
    parser.add_argument("--results-folder", type=Path, default=common.RESULTS, help="(%(default)s)")
    parser.add_argument("--hardware", help="the table's entry (default: that of the results' device)")
    args = parser.parse_args(argv)
    results = [json.loads(path.read_text()) for path in args.results or latest(args.results_folder)]
    if not results:
        console.print(
            "No results of ceilings, linear_sweep or llama_block were found, so there is nothing to fit. "
            "They are measured on a GPU by python -m benchmarks.gpu."
        )
        return 0
    devices = {result["stamp"]["device"] for result in results}
    if len(devices) > 1:
        console.print(f"The results are of several devices: {', '.join(sorted(devices))}", markup=False)
        return 2
    report(results, hardware.find(args.hardware) if args.hardware else _hardware(devices.pop()))
    return 0


def _hardware(device: str) -> Hardware:
    """The entry for a device's name, such as "NVIDIA H200"."""
    try:
        return hardware.find(device)
    except ValueError as error:
        raise SystemExit(f"{device} is not in the hardware table: name an entry with --hardware") from error


def report(results: Sequence[Result], hw: Hardware) -> None:
    """Prints everything."""
    rows: dict[str, list[Row]] = {result["name"]: result["rows"] for result in results}
    sweep = rows.get(linear_sweep.NAME, [])
    stamps = {result["name"]: result["stamp"] for result in results}
    cuda = (stamps.get(linear_sweep.NAME) or results[0]["stamp"])["cuda"]
    start = own_calibration(hw)
    fitted = calibrated(hw, rows.get(ceilings.NAME, []), sweep, cuda)
    before = compared(hw, start, sweep, cuda, asked=True)
    after = compared(fitted.hardware, fitted.calibration, sweep, cuda)
    if before:
        points_grid(before, after).print()
    console.print()
    for label, points in (
        ("as the cost model is", before),
        ("the same, scales in the gemm", compared(hw, start, sweep, cuda)),
        ("fitted", after),
    ):
        error = error_of(points)
        console.print(
            f"{label}: {error['points']} points, mean error {error['mean']:.3f}, "
            f"largest {error['largest']:.3f}, {error['wrong_side']} on the wrong side of 1"
        )
    if fitted.gemm_error:
        console.print("gemm times, mean error: {:.1%} as it is, {:.1%} fitted".format(*fitted.gemm_error))
    wrong = wrong_verdicts([r for r in results if r["name"] != ceilings.NAME])
    console.print(f'\nwrong verdicts of select="auto", beyond noise: {len(wrong)}')
    for entry in wrong:
        console.print(f"  {entry}", markup=False)
    console.print(f"\nTo write for {hw.name} (nothing is changed by this command):")
    for line in to_write(fitted, start):
        console.print(f"  {line}", markup=False)


if __name__ == "__main__":
    raise SystemExit(main())
