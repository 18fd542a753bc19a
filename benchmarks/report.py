"""Tables (Markdown) and pictures (PNG) from results: ``python -m benchmarks.report RESULT.json ...``.

Writes ``RESULT.md`` and ``RESULT.png`` beside each JSON file, or into ``--out``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import (
    ablations,
    ceilings,
    comm,
    compile_time,
    experts,
    gpu,
    inference,
    kernel_times,
    kernels,
    linear_sweep,
    llama_block,
    pictures,
    train_1b,
    variants,
)
from .common import Grid, console
from .pictures import COLOURS, INK, LABELS, PASS_COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Result = dict[str, Any]

GRIDS: dict[str, Callable[[Result], list[Grid]]] = {
    kernels.NAME: kernels.grids,
    linear_sweep.NAME: linear_sweep.grids,
    llama_block.NAME: llama_block.grids,
    experts.NAME: llama_block.grids,
    compile_time.NAME: compile_time.grids,
    comm.NAME: comm.grids,
    gpu.NAME: gpu.grids,
    ceilings.NAME: ceilings.grids,
    ablations.NAME: ablations.grids,
    inference.NAME: inference.grids,
    kernel_times.NAME: kernel_times.grids,
    train_1b.NAME: train_1b.grids,
}


def markdown(result: Result) -> str:
    """The result as a page."""
    stamp = result["stamp"]
    changed = " with uncommitted changes" if stamp["uncommitted_changes"] else ""
    versions = ", ".join(
        f"{name} {stamp[name]}" for name in ("python", "torch", "triton", "torchao", "f8fx") if stamp[name]
    )
    device = stamp["device"] + (f", driver {stamp['driver']}" if stamp["driver"] else "")
    if stamp["device_type"] == "cpu":
        device += f", {stamp['cpus']} processors"
    lines = [
        f"# {result['name']}",
        "",
        f"{stamp['date']}, {device}.",
        f"{versions}; commit {stamp['commit'][:12]}{changed}.",
    ]
    if stamp["clocks"]:
        lines.append("Clocks before: " + ", ".join(f"{k} {v}" for k, v in stamp["clocks"].items()) + ".")
    if not result["complete"]:
        lines += ["", "**Not complete**: the run ended before all cases were measured."]
    tables = [grid.markdown() for grid in GRIDS[result["name"]](result)]
    summary = ["## Summary", "", "```json", json.dumps(result["summary"], indent=1), "```"]
    return "\n".join([*lines, "", *tables, *summary]) + "\n"


def picture(result: Result, path: Path) -> bool:
    """Draws the result; false where there is nothing to draw."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    draw = _DRAW.get(result["name"])
    if draw is None or not result["rows"]:
        return False
    figure = Figure(dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure, result)
    stamp = result["stamp"]
    where = f"{result['rows'][0]['cluster']}, predicted" if result["name"] == comm.NAME else stamp["device"]
    figure.suptitle(f"{result['name']}: {where}, torch {stamp['torch']}, {stamp['date'][:10]}", fontsize=10)
    figure.savefig(path)
    return True


def _draw_sweep(figure: Figure, result: Result) -> None:
    """Speedup over bf16 by the size of the forward gemm, one panel per recipe."""
    recipes = [r for r in variants.RECIPES if any(row["recipe"] == r for row in result["rows"])]
    figure.set_size_inches(4.2 * len(recipes), 3.8)
    panels = figure.subplots(1, len(recipes), sharey=True, squeeze=False)[0]
    for axes, recipe in zip(panels, recipes, strict=True):
        rows = [row for row in result["rows"] if row["recipe"] == recipe]
        for name in ("torchao", "f8fx", "f8fx_auto"):
            points = [
                (2 * row["m"] * row["k"] * row["n"], speed)
                for row in rows
                if (speed := variants.speedup(row, name, "bf16")) is not None
            ]
            if points:
                hollow = "none" if name == "f8fx_auto" else COLOURS[name]
                axes.scatter(
                    *zip(*points, strict=True),
                    s=34 if name == "f8fx_auto" else 14,
                    facecolors=hollow,
                    edgecolors=COLOURS[name],
                    label=LABELS.get(name, name),
                )
        axes.axhline(1, color=COLOURS["bf16"], linewidth=1)
        axes.set_xscale("log")
        axes.set_xlabel("2 M K N of the forward gemm", fontsize=8)
        pictures.style(axes, recipe)
    panels[0].set_ylabel("times faster than bf16", fontsize=8)
    panels[0].legend(frameon=False, fontsize=8)


def _draw_block(figure: Figure, result: Result) -> None:
    """Speedup, saved and peak bytes of each version relative to bf16, one group per case."""
    rows = result["rows"]
    labels = [
        f"{row['model'].removeprefix('llama3_')} {row['recipe']}{', ckpt' if row['checkpointing'] else ''}"
        for row in rows
    ]
    has_memory = any(row["memory"] for row in rows)
    figure.set_size_inches(9, (2.2 + 0.42 * len(rows)) if has_memory else 3)
    panels = figure.subplots(1, 3 if has_memory else 1, sharey=True, squeeze=False)[0]

    def saved(row: Any, name: str, what: str) -> float | None:
        memory = row["memory"]
        both = name in memory and "bf16" in memory and memory["bf16"][what]
        return memory[name][what] / memory["bf16"][what] if both else None

    values: list[tuple[str, Callable[[Any, str], float | None]]] = [
        ("times faster than bf16", lambda row, name: variants.speedup(row, name, "bf16")),
        ("saved for backward / bf16", lambda row, name: saved(row, name, "saved")),
        ("peak memory / bf16", lambda row, name: saved(row, name, "peak")),
    ]
    names = ("torchao", "f8fx", "f8fx_auto")
    for axes, (title, value) in zip(panels, values[: len(panels)], strict=True):
        for offset, name in enumerate(names):
            found = [(index, v) for index, row in enumerate(rows) if (v := value(row, name)) is not None]
            axes.barh(
                [index + 0.26 * (offset - 1) for index, _ in found],
                [v for _, v in found],
                height=0.24,
                color=COLOURS[name],
                label=LABELS.get(name, name),
            )
        axes.axvline(1, color=INK, linewidth=0.8)
        pictures.style(axes, title)
    panels[0].set_yticks(range(len(rows)), labels)
    panels[0].invert_yaxis()
    panels[-1].legend(frameon=False, fontsize=8)


def _draw_compile(figure: Figure, result: Result) -> None:
    """Processor seconds against nodes, and where the time goes in the largest graphs."""
    rows = [row for row in result["rows"] if row["part"] == "passes"]
    figure.set_size_inches(9, 3.8)
    lines, bars = figure.subplots(1, 2)
    kinds = list(dict.fromkeys((row["recipe"], row["select"]) for row in rows))
    for recipe, select in kinds:
        points = sorted(
            (row["nodes_in"], row["seconds"])
            for row in rows
            if (row["recipe"], row["select"]) == (recipe, select)
        )
        style = "-" if select == "all" else "--"
        lines.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=f"{recipe}, {select}")
    if rows:
        nodes = sorted({row["nodes_in"] for row in rows})
        slope = [compile_time.SECONDS_GOAL * n / compile_time.NODES_GOAL for n in nodes]
        lines.plot(nodes, slope, color=COLOURS["bf16"], linewidth=1, linestyle=":", label="goal, linear")
    lines.set_xscale("log")
    lines.set_yscale("log")
    lines.set_xlabel("nodes of the joint graph", fontsize=8)
    lines.set_ylabel("seconds in all passes", fontsize=8)
    lines.legend(frameon=False, fontsize=7)
    pictures.style(lines)
    largest = max((row["nodes"] for row in rows), default=0)
    shown = [row for row in rows if row["nodes"] == largest]
    for index, row in enumerate(shown):
        left = 0.0
        for name, colour in zip(compile_time.PASSES, PASS_COLOURS, strict=True):
            width = row["passes"].get(name, 0.0)
            bars.barh(index, width, left=left, color=colour, label=name if index == 0 else None)
            left += width
    bars.set_yticks(range(len(shown)), [f"{row['recipe']}, {row['select']}" for row in shown])
    bars.invert_yaxis()
    bars.set_xlabel("seconds", fontsize=8)
    bars.legend(frameon=False, fontsize=7)
    pictures.style(bars, f"{largest:,} nodes")


def _draw_comm(figure: Figure, result: Result) -> None:
    """Gigabytes a rank sends and predicted seconds against ranks, one column per model."""
    models = [name for name in comm.MODELS if any(row["model_name"] == name for row in result["rows"])]
    figure.set_size_inches(3.6 * len(models), 5.6)
    panels = figure.subplots(2, len(models), sharex=True, squeeze=False)
    styles = {"tensorwise": (COLOURS["f8fx"], "-"), "rowwise": (COLOURS["f8fx_auto"], "--")}
    for column, name in enumerate(models):
        rows = [row for row in result["rows"] if row["model_name"] == name]
        for axes, what, scale in ((panels[0][column], "bytes", 1e-9), (panels[1][column], "seconds", 1.0)):
            recipes = list(dict.fromkeys(row["recipe"] for row in rows))
            for recipe in recipes:
                points = sorted(
                    (row["world"], row[what]["bf16"] * scale, row[what]["float8"] * scale)
                    for row in rows
                    if row["recipe"] == recipe
                )
                worlds, bf16, float8 = zip(*points, strict=True)
                if recipe == recipes[0]:
                    axes.plot(worlds, bf16, color=COLOURS["bf16"], marker="o", markersize=3, label="bf16")
                colour, line = styles[recipe]
                axes.plot(
                    worlds, float8, line, color=colour, marker="o", markersize=3, label=f"float8, {recipe}"
                )
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
            pictures.style(axes, name if what == "bytes" else "")
        panels[1][column].set_xlabel("ranks", fontsize=8)
    panels[0][0].set_ylabel("GB each rank sends in a step", fontsize=8)
    panels[1][0].set_ylabel("predicted seconds on the wire", fontsize=8)
    panels[0][0].legend(frameon=False, fontsize=7)


_DRAW: dict[str, Callable[[Figure, Result], None]] = {
    linear_sweep.NAME: _draw_sweep,
    llama_block.NAME: _draw_block,
    experts.NAME: _draw_block,
    compile_time.NAME: _draw_compile,
    comm.NAME: _draw_comm,
    ceilings.NAME: pictures.draw_ceilings,
    ablations.NAME: pictures.draw_ablations,
    kernel_times.NAME: pictures.draw_kernel_times,
    train_1b.NAME: pictures.draw_training,
}


def write(path: Path, out: Path | None = None) -> list[Path]:
    """Writes the page and the picture of one result; the files written."""
    result = json.loads(path.read_text())
    folder = out or path.parent
    folder.mkdir(parents=True, exist_ok=True)
    page, image = folder / f"{path.stem}.md", folder / f"{path.stem}.png"
    drawn = picture(result, image)
    text = markdown(result)
    if drawn:
        text += f"\n![{result['name']}]({image.name})\n"
    page.write_text(text)
    return [page, *([image] if drawn else [])]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of benchmarks/results")
    parser.add_argument("--out", type=Path, help="folder for the files (default: beside the result)")
    args = parser.parse_args(argv)
    for path in args.results:
        for written in write(path, args.out):
            console.print(f"Written to {written}", markup=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
