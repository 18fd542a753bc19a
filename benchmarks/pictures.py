"""Colours and axes of all pictures, and the pictures of single results: :mod:`benchmarks.report` draws with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import ablations, ceilings, train_1b

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = dict[str, Any]

INK, LINES = "#333333", "#e4e4e4"
COLOURS = {"bf16": "#8a8a8a", "torchao": "#3b6fb6", "f8fx": "#e07b1a", "f8fx_auto": "#2f8f5b"}
PASS_COLOURS = (
    "#7fb2e5",
    "#3b6fb6",
    "#2f8f5b",
    "#c2a83e",
    "#e07b1a",
    "#b64a7a",
    "#6b4fa0",
    "#2fa3a3",
    "#a9a9a9",
    "#8a8a8a",
    "#8fbf6a",
    "#333333",
    "#5a6b2f",
    "#d98c8c",
)
LABELS = {"f8fx": "f8fx, all", "f8fx_auto": "f8fx, auto"}

_VERSIONS = dict(zip(ceilings.VERSIONS, ("#8a8a8a", "#e07b1a", "#c2a83e", "#3b6fb6", "#2fa3a3"), strict=True))
_RUNS = dict(zip(train_1b.CONTENDERS, ("#333333", "#e07b1a", "#a9a9a9", "#2f8f5b", "#3b6fb6"), strict=True))
_KINDS = {
    "gemm": "#8a8a8a",
    "attention": "#6b4fa0",
    "triton": "#e07b1a",
    "copy": "#2fa3a3",
    "other": "#b64a7a",
}


def style(axes: Axes, title: str = "") -> None:
    """Light grid, no box, a small title."""
    axes.grid(color=LINES, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=8)
    axes.set_title(title, fontsize=9, color=INK)


def draw_ceilings(figure: Figure, result: Result) -> None:
    """TFLOP/s of every gemm by its size, one colour for each version."""
    figure.set_size_inches(6.4, 4)
    axes = figure.subplots()
    rows = [row for row in result["rows"] if row["kind"] == "gemm"]
    for version, colour in _VERSIONS.items():
        points = [
            (2 * r["m"] * r["k"] * r["n"], r["tflops"][version]) for r in rows if version in r["tflops"]
        ]
        if points:
            across, up = zip(*points, strict=True)
            axes.scatter(across, up, s=12, color=colour, label=version)
    axes.set_xscale("log")
    axes.set_xlabel("2 M K N", fontsize=8)
    axes.set_ylabel("TFLOP/s", fontsize=8)
    axes.set_ylim(bottom=0)
    if rows:
        axes.legend(frameon=False, fontsize=8)
    style(axes)


def draw_ablations(figure: Figure, result: Result) -> None:
    """What each version gains over the default: device time, and wall time behind it."""
    bars = []
    for row in result["rows"]:
        for name in row["ms"]:
            if name != ablations.DEFAULT and ablations.DEFAULT in row["ms"]:
                gains = [row[what][ablations.DEFAULT] / row[what][name] for what in ("ms", "wall_ms")]
                bars.append((f"{row['experiment']}: {name} ({row['recipe']})", *gains))
    figure.set_size_inches(7.5, 1 + 0.24 * max(4, len(bars)))
    axes = figure.subplots()
    places = range(len(bars))
    axes.barh(places, [bar[2] - 1 for bar in bars], left=1, height=0.7, color=LINES, label="wall time")
    axes.barh(
        places, [bar[1] - 1 for bar in bars], left=1, height=0.35, color=COLOURS["f8fx"], label="device time"
    )
    axes.set_yticks(places, [bar[0] for bar in bars])
    axes.invert_yaxis()
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set_xlabel("times faster than the default", fontsize=8)
    axes.legend(frameon=False, fontsize=8)
    style(axes)


def draw_kernel_times(figure: Figure, result: Result) -> None:
    """Each version's step as one bar by kind of kernel, and its floors."""
    rows = result["rows"]
    figure.set_size_inches(8, 1.2 + 0.5 * len(rows))
    axes = figure.subplots()
    for index, row in enumerate(rows):
        left = 0.0
        for kind, colour in _KINDS.items():
            width = sum(kernel["us"] for kernel in row["kernels"] if kernel["kind"] == kind) / 1e3
            axes.barh(index, width, left=left, color=colour, label=kind if index == 0 else None)
            left += width
        marks = (("floor_us", "-", "floor"), ("hand_floor_us", ":", "floor, bytes by hand"))
        for key, line, label in marks:
            if row["totals"][key]:
                at = row["totals"][key] / 1e3
                ends = ([at, at], [index - 0.45, index + 0.45])
                axes.plot(*ends, line, color=INK, label=label if index == 0 else None)
    names = [f"{row['version']} {row['recipe'] if row['version'] != 'bf16' else ''}" for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlabel("ms of a step, launch gaps left out", fontsize=8)
    if rows:
        axes.legend(frameon=False, fontsize=8)
    style(axes)


def draw_training(figure: Figure, result: Result) -> None:
    """Smoothed loss of every run, and below its distance from bf16."""
    runs = train_1b.latest(result["rows"])
    figure.set_size_inches(8, 5.4)
    curves, gaps = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    steps = max((len(row["losses"]) for row in runs.values()), default=1)
    window = max(1, steps // 40)
    smoothed = {name: train_1b.smooth(row["losses"], window) for name, row in runs.items()}
    reference = smoothed.get(train_1b.REFERENCE, [])
    for name, losses in smoothed.items():
        at = range(window, window + len(losses))
        curves.plot(
            at, losses, color=_RUNS[name], linewidth=1.2, label=f"{name}, {runs[name]['steps']} steps"
        )
        if name != train_1b.REFERENCE:
            shared = min(len(losses), len(reference))
            difference = [a - b for a, b in zip(losses[:shared], reference[:shared], strict=True)]
            gaps.plot(at[:shared], difference, color=_RUNS[name], linewidth=1.0)
    gaps.axhline(0, color=INK, linewidth=0.8)
    curves.set_ylabel(f"loss (nats a byte, mean of {window})", fontsize=8)
    gaps.set_ylabel("minus bf16's", fontsize=8)
    gaps.set_xlabel("step", fontsize=8)
    if runs:
        curves.legend(frameon=False, fontsize=8)
    for axes in (curves, gaps):
        style(axes)
