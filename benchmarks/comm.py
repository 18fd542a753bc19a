"""What FSDP2 sends in a training step, 8 to 4096 ranks, bf16 against float8 gathers: ``python -m benchmarks.comm``.

Llama 3 in bf16 parameters, its output projection kept in bf16, each block wrapped and resharded after its forward.
Everything is predicted, from shapes and line rates (:mod:`f8fx.communication`), so it runs anywhere in seconds; that the
bytes are those of real runs is what ``tests/distributed/test_communication.py`` is for. Rowwise gathers send the
forward's copy in the forward and the backward's in the backward.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from f8fx.communication import World, predict
from f8fx.demo.model import Decoder, DecoderConfig
from f8fx.interconnect import INTERCONNECTS
from f8fx.options import Options

from . import common
from .common import Grid, Row, console, show

NAME = "comm"
MODELS = ("llama3_8b", "llama3_70b", "llama3_405b")
WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
QUICK_WORLDS = (8, 64, 512, 4096)
RECIPES = ("tensorwise", "rowwise")
KEPT = ("output",)


@cache
def model(name: str) -> Decoder:
    """A whole decoder in bf16, without memory."""
    with torch.device("meta"):
        return Decoder(DecoderConfig.named(name)).to(torch.bfloat16)


def measure(model_name: str, recipe: str, world: int, cluster: str) -> Row:
    """Bytes each rank sends in a step and predicted seconds, as it is and with float8 gathers."""
    options = Options.parse({"recipe": recipe, "filter_fqns": list(KEPT), "target": "h100"})
    c = predict(model(model_name), World(world), options, interconnect=INTERCONNECTS[cluster])
    gathered = [sum(s.wire_bytes for s in side if s.op == "all_gather") for side in (c.high, c.float8)]
    return {
        "bytes": {"bf16": c.high_bytes, "float8": c.float8_bytes},
        "gathered": {"bf16": gathered[0], "float8": gathered[1]},
        "seconds": {"bf16": c.high_seconds, "float8": c.float8_seconds},
        "converted": [c.converted, len(c.gathers)],
        "sent": [list(row) for row in c.rows],
    }


def cases(quick: bool, cluster: str) -> list[dict[str, Any]]:
    """All cases, the smallest model first."""
    return [
        {"model_name": name, "recipe": recipe, "world": world, "cluster": cluster}
        for name in MODELS
        for recipe in RECIPES
        for world in (QUICK_WORLDS if quick else WORLDS)
    ]


def summary(rows: list[Row]) -> dict[str, Any]:
    """Bytes and seconds with float8 gathers relative to bf16: least and most over the world sizes."""
    result: dict[str, Any] = {}
    for row in rows:
        kind = f"{row['model_name']} {row['recipe']}"
        for what in ("gathered", "bytes", "seconds"):
            ratio = round(row[what]["float8"] / row[what]["bf16"], 4)
            low, high = result.setdefault(kind, {}).get(what, (ratio, ratio))
            result[kind][what] = (min(low, ratio), max(high, ratio))
    return result


def grids(result: dict[str, Any]) -> list[Grid]:
    """One table for each model: gigabytes a rank sends in a step, and predicted seconds."""
    tables: list[Grid] = []
    for name in MODELS:
        rows = [row for row in result["rows"] if row["model_name"] == name]
        cells: list[tuple[str, ...]] = []
        for world in dict.fromkeys(row["world"] for row in rows):
            of_world = {row["recipe"]: row for row in rows if row["world"] == world}
            plain = next(iter(of_world.values()))
            cells.append(
                (
                    str(world),
                    show(plain["gathered"]["bf16"] / 1e9),
                    *(_of(of_world, recipe, "gathered", 1e-9) for recipe in RECIPES),
                    show(plain["bytes"]["bf16"] / 1e9),
                    *(_of(of_world, recipe, "bytes", 1e-9) for recipe in RECIPES),
                    show(plain["seconds"]["bf16"], ".3f"),
                    *(_of(of_world, recipe, "seconds", 1, ".3f") for recipe in RECIPES),
                )
            )
        headers = ["ranks"]
        for what in ("gathers GB", "all GB", "predicted s"):
            headers += [f"{what}, bf16", *RECIPES]
        if cells:
            cluster = rows[0]["cluster"]
            tables.append(
                Grid(
                    f"{name}, each rank, a step, {cluster} nodes of 8; predicted",
                    tuple(headers),
                    tuple(cells),
                )
            )
    return tables


def _of(rows: dict[str, Row], recipe: str, what: str, scale: float, spec: str = ".2f") -> str:
    return show(rows[recipe][what]["float8"] * scale, spec) if recipe in rows else "-"


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--cluster", choices=tuple(INTERCONNECTS), default="h100", help="what joins the GPUs (%(default)s)"
    )
    args = parser.parse_args(argv)
    settings = {"kept": list(KEPT), "sources": dict(INTERCONNECTS[args.cluster].sources)}
    # nothing runs on a device, whatever there is
    stamp = common.stamp(torch.device("cpu"))
    recorder = common.Recorder(NAME, stamp, settings, args.results, args.fresh)
    complete = common.run_cases(
        cases(args.quick, args.cluster), recorder, common.Budget(args.budget_s), measure
    )
    result, path = recorder.finish(summary(recorder.rows), complete)
    for grid in grids(result):
        grid.print()
    console.print(f"Written to {path}")
    return int(recorder.failed)


if __name__ == "__main__":
    raise SystemExit(main())
