"""The README's results table, from committed results alone: ``python -m benchmarks.headline``.

One line for each goal: what was measured in the latest result that holds it, and in which. A figure that no result holds is "not
measured". Only results of one GPU are put together.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import common, inference, kernel_times, kernels, linear_sweep, llama_block, train_1b, variants
from .common import Grid, console, show

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Goal:
    """A figure that a result may hold.

    Attributes:
        text: what it is.
        goal: as text; "" where none was set.
        benchmark: the name of the result.
        value: the figure as text, ``None`` where the result lacks it.
    """

    text: str
    goal: str
    benchmark: str
    value: Callable[[Result], str | None]


def _block(
    model: str, recipe: str, name: str, over: str, checkpointing: bool = False
) -> Callable[[Result], str | None]:
    def value(result: Result) -> str | None:
        case = {"model": model, "recipe": recipe, "checkpointing": checkpointing}
        rows = [row for row in result["rows"] if all(row[key] == v for key, v in case.items())]
        speeds = [variants.speedup(row, name, over) for row in rows]
        return show(speeds[0]) if speeds and speeds[0] is not None else None

    return value


def _peak(model: str, recipe: str, over: str) -> Callable[[Result], str | None]:
    def value(result: Result) -> str | None:
        case = {"model": model, "recipe": recipe, "checkpointing": False}
        for row in result["rows"]:
            memory = row["memory"]
            if all(row[key] == v for key, v in case.items()) and {"f8fx", over} <= memory.keys():
                return show(memory["f8fx"]["peak"] / memory[over]["peak"])
        return None

    return value


def _floor(result: Result) -> str | None:
    for row in result["rows"]:
        least = row["totals"]["hand_floor_us"]
        if (row["version"], row["recipe"]) == ("f8fx", "tensorwise") and least:
            return show(row["totals"]["busy_us"] / least)
    return None


def _share(kernel: str) -> Callable[[Result], str | None]:
    def value(result: Result) -> str | None:
        found = result["summary"]["lowest_share"].get(kernel)
        return None if found is None else f"{100 * found:.0f} %"

    return value


def _slower(result: Result) -> str | None:
    if not result["rows"]:
        return None
    return f"{len(result['summary']['auto_slower_than_bf16'])} of {len(result['rows'])}"


def _slower_than_torchao(result: Result) -> str | None:
    """By more than the spread of both."""
    rows = [row["timings"] for row in result["rows"] if {"f8fx", "torchao"} <= row["timings"].keys()]
    slower = [times for times in rows if times["f8fx"]["low"] > times["torchao"]["high"]]
    return f"{len(slower)} of {len(rows)}" if rows else None


def _served(phase: str, tokens: int, over: str) -> Callable[[Result], str | None]:
    """Time of the GPU, without CUDA graphs."""

    def value(result: Result) -> str | None:
        case = {
            "model": "llama3_8b",
            "phase": phase,
            "tokens": tokens,
            "recipe": "rowwise",
            "cuda_graphs": False,
        }
        rows = [row for row in result["rows"] if all(row[key] == v for key, v in case.items())]
        found = variants.speedup(rows[0], "f8fx", over) if rows else None
        return None if found is None else show(found)

    return value


def _gap(recipe: str) -> Callable[[Result], str | None]:
    def value(result: Result) -> str | None:
        name = f"f8fx {recipe}"
        if name in result["summary"].get("diverged", ()):
            return "diverged"
        found = result["summary"]["gap_over_spread"].get(name)
        if found is None:
            return None
        made = result["summary"]["steps"]  # compared are those that all three have
        steps = min(made[run] for run in (name, train_1b.REFERENCE, train_1b.OTHER_SEED))
        return f"{found:.2f} ({steps} steps)"

    return value


def _tokens(recipe: str) -> Callable[[Result], str | None]:
    def value(result: Result) -> str | None:
        found = result["summary"]["speedup"].get(f"f8fx {recipe}")
        return None if found is None else show(found)

    return value


def _speeds(
    model: str, recipe: str, over_bf16: str = "", over_torchao: str = "", checkpointed: bool = False
) -> list[Goal]:
    """A block's speed over bf16 and over torchao, with the goals."""
    text = f"{_SHORT[model]} block, {recipe}{', checkpointed' if checkpointed else ''}: f8fx over"
    goals = {"bf16": over_bf16, "torchao": over_torchao}
    return [
        Goal(f"{text} {over}", goal, llama_block.NAME, _block(model, recipe, "f8fx", over, checkpointed))
        for over, goal in goals.items()
    ]


_SHORT = {"llama3_8b": "8B", "llama3_70b": "70B"}
GOALS = (
    *_speeds("llama3_8b", "tensorwise", ">= 1.40", ">= 1.10"),
    Goal(
        "8B block, tensorwise: memory at the peak of a step, f8fx over torchao",
        "",
        llama_block.NAME,
        _peak("llama3_8b", "tensorwise", "torchao"),
    ),
    *_speeds("llama3_8b", "tensorwise", checkpointed=True),
    *_speeds("llama3_8b", "rowwise", "", ">= 1.25"),
    *_speeds("llama3_8b", "rowwise_with_gw_hp"),
    *_speeds("llama3_70b", "tensorwise", ">= 1.50"),
    *_speeds("llama3_70b", "rowwise"),
    *(
        Goal(
            f"8B block, rowwise, no gradients, {phase} {tokens}: f8fx over {over}",
            "",
            inference.NAME,
            _served(phase, tokens, over),
        )
        for phase, tokens in (("prefill", 8192), ("decode", 1), ("decode", 16), ("decode", 128))
        for over in ("bf16", "torchao")
    ),
    Goal("8B block, tensorwise: kernels over their floor", "<= 1.10", kernel_times.NAME, _floor),
    Goal("cast, share of copy bandwidth", ">= 90 %", kernels.NAME, _share("cast")),
    Goal("cast + transpose, share of copy bandwidth", ">= 80 %", kernels.NAME, _share("cast + transpose")),
    Goal('linear layers where `select="auto"` is slower than bf16', "none", linear_sweep.NAME, _slower),
    Goal(
        "linear layers where f8fx is slower than torchao, beyond noise",
        "none",
        linear_sweep.NAME,
        _slower_than_torchao,
    ),
    Goal(
        "1 B parameters, tensorwise: loss gap over the spread of seeds", "", train_1b.NAME, _gap("tensorwise")
    ),
    Goal("1 B parameters, rowwise: loss gap over the spread of seeds", "", train_1b.NAME, _gap("rowwise")),
    Goal("1 B parameters, tensorwise: tokens/s over bf16", "", train_1b.NAME, _tokens("tensorwise")),
)


def gpu_results(folder: Path, device: str | None = None) -> list[Result]:
    """Results measured on a GPU, the latest last; of one device (its name's slug), where one is named."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    found = [r for r in results if r["stamp"]["device_type"] == "cuda"]
    found.sort(key=lambda result: result["stamp"]["date"])
    return [r for r in found if device is None or common.slug(r["stamp"]["device"]) == device]


def table(results: Sequence[Result]) -> Grid:
    """One line for each goal."""
    lines = []
    for goal in GOALS:
        value, source = None, "-"
        for result in results:
            if result["name"] == goal.benchmark and (found := goal.value(result)) is not None:
                stamp = result["stamp"]
                value, source = found, f"{stamp['date'][:10]}, {stamp['commit'][:12]}, torch {stamp['torch']}"
        lines.append((goal.text, goal.goal or "-", value or "not measured", source))
    devices = {result["stamp"]["device"] for result in results}
    return Grid(", ".join(sorted(devices)) or "No GPU", ("", "goal", "measured", "result"), tuple(lines))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.headline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results", type=Path, default=common.RESULTS, help="folder of results (%(default)s)"
    )
    parser.add_argument("--device", help="only results of this device, such as nvidia-h200")
    args = parser.parse_args(argv)
    results = gpu_results(args.results, args.device)
    devices = {result["stamp"]["device"] for result in results}
    if len(devices) > 1:
        console.print(
            f"Results of several GPUs: name one with --device ({', '.join(sorted(map(common.slug, devices)))})"
        )
        return 2
    if not results:
        console.print(
            "No GPU measurements are committed, so there is no table: python -m benchmarks.gpu measures."
        )
        return 0
    print(table(results).markdown())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
