"""What the demo shows: an introduction, a table, a picture of both loss curves, and the numbers as JSON."""

from __future__ import annotations

import json
import math
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from f8fx.demo.data import Corpus

if TYPE_CHECKING:
    from f8fx.demo.plan import Plan
    from f8fx.demo.train import Run

_BF16, _FLOAT8, _INK, _GRID = "#3b6fb6", "#e07b1a", "#333333", "#e4e4e4"


def largest_difference(bf16: Run, float8: Run) -> tuple[float, int]:
    """Largest |float8 loss - bf16 loss| over the steps, NaN above all, and the step where it is."""
    gaps = [abs(a - b) for a, b in zip(bf16.losses, float8.losses, strict=True)]
    worst = max(range(len(gaps)), key=lambda step: math.inf if math.isnan(gaps[step]) else gaps[step])
    return gaps[worst], worst


def introduce(plan: Plan, corpus: Corpus, note: str, console: Console) -> None:
    """Says what is about to be trained, on what, and where."""
    config = plan.config
    console.print(
        f"[bold]f8fx demo[/bold]: a Llama-style decoder, {_count(config.parameters)} parameters "
        f"({config.layers} blocks, dim {config.dim}), learns to write Python's standard library"
    )
    console.print(
        f"Text: {corpus.files} files, {len(corpus) / 1e6:.1f} MB, from {corpus.root}; "
        f"{plan.steps} steps of {plan.ranks * plan.batch} x {plan.seq} bytes, twice",
        highlight=False,
        markup=False,
    )
    console.print(note, style="yellow", highlight=False, markup=False)


def table(bf16: Run, float8: Run, console: Console) -> None:
    """Prints the comparison."""
    shown = Table(title=None, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for header in ("", "bf16", "float8", "float8 / bf16"):
        shown.add_column(header, justify="left" if not header else "right")

    def row(label: str, values: tuple[float, float], text: str, scale: float = 1.0) -> None:
        left, right = (format(value / scale, text) for value in values)
        shown.add_row(label, left, right, f"{values[1] / values[0]:.2f}")

    shown.add_row("final loss (nats/byte)", f"{bf16.final_loss:.4f}", f"{float8.final_loss:.4f}", "")
    row("ms/step (median)", (bf16.median_ms, float8.median_ms), ".1f")
    row("tokens/s", (bf16.tokens_per_second, float8.tokens_per_second), ",.0f")
    if bf16.peak_bytes and float8.peak_bytes:
        row("peak memory (GiB)", (bf16.peak_bytes, float8.peak_bytes), ".2f", 2**30)
    if bf16.gathered_bytes and float8.gathered_bytes:
        row("gathered (MB/step/rank)", (bf16.gathered_bytes, float8.gathered_bytes), ".3f", 1e6)
    gap, step = largest_difference(bf16, float8)
    console.print()
    console.print(shown)
    console.print(f"\nLargest difference of the losses: {gap:.4f}, at step {step}", highlight=False)
    shared = "" if float8.gathered_bytes is None else " of the graph that all blocks share"
    console.print(f"Matmuls in float8: {float8.converted} of {float8.total}{shared}", highlight=False)
    for reason, count in sorted(float8.reasons.items(), key=lambda item: -item[1]):
        console.print(f"  {count:4d} skipped: {reason}", highlight=False, markup=False)


def results(plan: Plan, corpus: Corpus, bf16: Run, float8: Run) -> dict[str, Any]:
    """Everything that was set and measured, as JSON-ready data."""
    gap, step = largest_difference(bf16, float8)
    on_cuda = plan.device.type == "cuda"
    return {
        "machine": {
            "device": torch.cuda.get_device_name(plan.device) if on_cuda else platform.machine(),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        },
        "plan": {
            "parameters": plan.config.parameters,
            "dim": plan.config.dim,
            "layers": plan.config.layers,
            "steps": plan.steps,
            "batch": plan.batch,
            "seq": plan.seq,
            "recipe": plan.recipe,
            "select": plan.select,
            "executor": plan.executor,
            "seed": plan.seed,
            "ranks": plan.ranks,
        },
        "text": {"files": corpus.files, "bytes": len(corpus), "root": str(corpus.root)},
        "largest_difference": {"value": gap, "step": step},
        "bf16": bf16.to_dict(),
        "float8": float8.to_dict(),
    }


def json_text(results: dict[str, Any]) -> str:
    """The results as JSON; a number that is not finite, of which JSON has none, is null."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [finite(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(results), indent=2, allow_nan=False)


def picture(plan: Plan, bf16: Run, float8: Run, path: Path) -> None:
    """Writes a PNG: both loss curves, and below them their difference on its own scale."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    curves, gaps = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = range(1, len(bf16.losses) + 1)
    curves.plot(steps, bf16.losses, color=_BF16, linewidth=3.0, alpha=0.55, label="bf16")
    curves.plot(steps, float8.losses, color=_FLOAT8, linewidth=1.3, label=f"float8 ({plan.recipe})")
    curves.set_ylabel("loss (nats per byte)")
    curves.legend(frameon=False, loc="upper right")
    gaps.axhline(0, color=_INK, linewidth=0.8)
    difference = [b - a for a, b in zip(bf16.losses, float8.losses, strict=True)]
    gaps.plot(steps, difference, color=_FLOAT8, linewidth=1.3)
    bound = 1.15 * max((abs(gap) for gap in difference if math.isfinite(gap)), default=0.0) or 1e-3
    gaps.set_ylim(-bound, bound)
    gaps.set_ylabel("float8 - bf16")
    gaps.set_xlabel("step")
    gaps.set_xlim(1, max(2, len(bf16.losses)))
    for axes in (curves, gaps):
        axes.grid(color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=_INK)
    figure.align_ylabels([curves, gaps])
    figure.suptitle(
        f"Llama-style decoder, {_count(plan.config.parameters)} parameters, same weights and batches: "
        f"{float8.converted} of {float8.total} matmuls in float8",
        fontsize=10,
        color=_INK,
    )
    figure.savefig(path)


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"
