"""What the passes cost: seconds against the size of the graph, and their share of a whole compile.

Part one builds joint graphs of Llama-3-8B blocks (:mod:`benchmarks.graphs`) of up to 50,000 nodes and
runs the pipeline on each. Part two compiles a small decoder through Inductor, cold, with and without
f8fx. Goals: under 5 % of a compile, time linear in nodes, 50,000 nodes in under 10 s.

Every graph is measured in several repeats, of which the fastest counts: what else the machine does
only ever adds. Processor seconds are beside wall seconds for the same reason.
"""

from __future__ import annotations

import gc
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from f8fx.backend import f8fx
from f8fx.demo.model import Decoder, DecoderConfig
from f8fx.options import Options
from f8fx.report import recording
from f8fx.torch_private import compile_fx_module

from . import common, graphs
from .common import Grid, Row, console, show
from .variants import RECIPES

NAME = "compile_time"
NODES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
QUICK_NODES = (1_000, 5_000, 50_000)
TARGET = "h100"
PASSES = (
    "fold",
    "find",
    "select",
    "merge",
    "concatenations",
    "quantize",
    "share",
    "collectives",
    "amaxes",
    "materialize",
    "rounding",
    "tags",
    "one_read",
    "amax_both",
)
CASE = ("part", "nodes", "recipe", "select")

#: The goals of the project.
SHARE_GOAL, SECONDS_GOAL, NODES_GOAL = 0.05, 10.0, 50_000
#: time ~ nodes ** exponent; above this it is not linear any more, only noisy.
EXPONENT_GOAL = 1.15

_BLOCK: list[Any] = []


def block() -> Any:
    """The joint graph of one Llama-3-8B block at sequence 8192, traced once."""
    if not _BLOCK:
        _BLOCK.append(graphs.traced(DecoderConfig.named("llama3_8b"), 8192))
    return _BLOCK[0]


def run_pipeline(layers: int, recipe: str, select: str) -> tuple[float, float, Row]:
    """Wall seconds, processor seconds and findings of the passes on a stack of blocks."""
    options = Options.parse({"recipe": recipe, "select": select, "target": TARGET})
    pipeline = options.pipeline()
    graph = graphs.stack(block(), layers)
    before = len(graph.nodes)
    gc.collect()
    wall, processor = time.perf_counter(), time.process_time()
    report = pipeline(graph)
    processor, wall = time.process_time() - processor, time.perf_counter() - wall
    found = {
        "nodes_in": before,
        "nodes_out": len(graph.nodes),
        "converted": report.converted,
        "matmuls": report.total,
        "passes": dict(report.pass_seconds),
    }
    return wall, processor, found


def measure_passes(nodes: int, recipe: str, select: str, repeats: int = 3) -> Row:
    """The passes on a graph of about that many nodes."""
    layers = max(1, round(nodes / len(block().nodes)))
    run_pipeline(1, recipe, select)  # compiles the cost model's formulas for this recipe
    runs = [run_pipeline(layers, recipe, select) for _ in range(repeats)]
    wall, _, found = min(runs, key=lambda run: run[0])
    return {
        "layers": layers,
        **found,
        "seconds": wall,
        "cpu_seconds": min(processor for _, processor, _ in runs),
        "all_seconds": [wall for wall, _, _ in runs],
    }


# -- a whole compile ------------------------------------------------------------------------------


def measure_compile(model: str, recipe: str, device: torch.device) -> Row:
    """A cold compile of forward and backward with f8fx and without, and where the time went."""
    config = DecoderConfig.named(model)
    torch.manual_seed(0)
    with device:
        decoder = Decoder(config).to(torch.bfloat16)
    tokens = torch.randint(config.vocab, (2, config.max_seq), device=device)

    def step(compiled: Callable[..., Any]) -> float:
        start = time.perf_counter()
        loss = F.cross_entropy(compiled(tokens).float().flatten(0, 1), tokens.flatten())
        torch.autograd.grad(loss, list(decoder.parameters()))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    def cold(backend: Any, **options: Any) -> float:
        torch.compiler.reset()
        with _empty_caches():
            compiled: Any = torch.compile(decoder, backend=backend, options=options or None, dynamic=False)
            return step(compiled) - step(compiled)

    def product(x: torch.Tensor) -> torch.Tensor:
        return x.sin() @ x

    warm_up: Any = torch.compile(product, backend="inductor")
    warm_up(torch.ones(16, 16, device=device))  # imports, and the C++ compiler's probes
    plain = cold("inductor")
    watch = _Watch()
    with recording() as reports:
        total = cold(watch, recipe=recipe, select="all", strict=True)
    passes = sum(sum(report.pass_seconds.values()) for report in reports)
    return {
        "device_type": device.type,
        "seconds": total,
        "plain_seconds": plain,
        "pass_seconds": passes,
        "f8fx_seconds": watch.outer - watch.inner + passes,
        "share": (watch.outer - watch.inner + passes) / total,
        "converted": sum(report.converted for report in reports),
        "matmuls": sum(report.total for report in reports),
    }


class _Watch:
    """The backend, timed: ``outer`` is all of it, ``inner`` what Inductor took, passes included."""

    def __init__(self) -> None:
        self.outer = self.inner = 0.0

    def __call__(self, gm: Any, inputs: Any, **kwargs: Any) -> Any:
        module = compile_fx_module()
        original = module.compile_fx

        def timed(*args: Any, **kwargs: Any) -> Any:
            module.compile_fx = original  # it calls itself, through this name
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.inner += time.perf_counter() - start
                module.compile_fx = timed

        start = time.perf_counter()
        module.compile_fx = timed
        try:
            return f8fx(gm, inputs, **kwargs)
        finally:
            module.compile_fx = original
            self.outer += time.perf_counter() - start


@contextmanager
def _empty_caches() -> Iterator[None]:
    """Inductor's and Triton's caches in a new folder, dropped at the end."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    previous = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            os.environ.update({name: str(Path(folder) / name.lower()) for name in names})
            yield
        finally:
            for name, value in previous.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


# -- what came out --------------------------------------------------------------------------------


def exponent(rows: Sequence[Row], seconds: str) -> float | None:
    """b of ``seconds = a * nodes ** b``, by least squares of the logarithms, from 5,000 nodes up."""
    points = [(math.log(r["nodes_in"]), math.log(r[seconds])) for r in rows if r["nodes"] >= 5_000]
    if len({x for x, _ in points}) < 2:
        return None
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    above = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return above / sum((x - mean_x) ** 2 for x, _ in points)


def summary(rows: list[Row]) -> dict[str, Any]:
    """The figures that the goals are about."""
    passes = [row for row in rows if row["part"] == "passes"]
    compiles = [row for row in rows if row["part"] == "compile"]
    kinds = dict.fromkeys((row["recipe"], row["select"]) for row in passes)
    rows_of = {kind: [row for row in passes if (row["recipe"], row["select"]) == kind] for kind in kinds}
    exponents = {" ".join(kind): exponent(found, "cpu_seconds") for kind, found in rows_of.items()}
    large = [row["seconds"] for row in passes if row["nodes"] == NODES_GOAL]
    shares = [row["share"] for row in compiles]
    known = [value for value in exponents.values() if value is not None]
    return {
        "seconds_at_50k_nodes": max(large, default=None),
        "exponents": exponents,
        "largest_share_of_compile": max(shares, default=None),
        "goals": {
            "50,000 nodes in under 10 s": max(large) < SECONDS_GOAL if large else None,
            "linear in nodes": max(known) <= EXPONENT_GOAL if known else None,
            "under 5 % of a compile": max(shares) < SHARE_GOAL if shares else None,
        },
    }


def grids(result: dict[str, Any]) -> list[Grid]:
    """The passes together by nodes; each of them on the largest graph; shares of whole compiles."""
    passes = [row for row in result["rows"] if row["part"] == "passes"]
    rows = tuple(
        (
            f"{row['recipe']} {row['select']}",
            f"{row['nodes_in']:,}",
            f"{row['nodes_out']:,}",
            f"{row['converted']} of {row['matmuls']}",
            show(row["seconds"], ".3f"),
            show(row["cpu_seconds"], ".3f"),
            show(1e6 * row["cpu_seconds"] / row["nodes_in"], ".0f"),
        )
        for row in passes
    )
    headers = ("", "nodes", "after", "converted", "total s", "CPU s", "us/node")
    tables = [Grid("Seconds of the passes on stacks of Llama-3-8B blocks", headers, rows)] if rows else []
    if passes:
        tables.append(_by_pass(passes))
    compiles = tuple(
        (
            f"{row['model']} {row['recipe']}, {row['device_type']}",
            f"{row['converted']} of {row['matmuls']}",
            show(row["plain_seconds"], ".1f"),
            show(row["seconds"], ".1f"),
            show(row["pass_seconds"], ".3f"),
            show(row["f8fx_seconds"], ".3f"),
            show(100 * row["share"], ".2f") + " %",
            show(100 * row["f8fx_seconds"] / row["plain_seconds"], ".2f") + " %",
        )
        for row in result["rows"]
        if row["part"] == "compile"
    )
    compile_headers = (
        "",
        "converted",
        "bf16 compile s",
        "f8fx compile s",
        "passes s",
        "all of f8fx s",
        "share",
        "of bf16",
    )
    if compiles:
        tables.append(Grid("Share of a cold compile, forward and backward", compile_headers, compiles))
    return tables


def _by_pass(rows: Sequence[Row]) -> Grid:
    """Where the time of the largest graph goes: one line a pass."""
    nodes = max(row["nodes_in"] for row in rows)
    largest = [row for row in rows if row["nodes_in"] == nodes]
    headers = ("", *(f"{row['recipe']} {row['select']}" for row in largest))
    lines = tuple((name, *(show(row["passes"].get(name), ".3f") for row in largest)) for name in PASSES)
    return Grid(f"Seconds of each pass on {nodes:,} nodes", headers, lines)


def print_goals(found: dict[str, Any]) -> None:
    """Prints each goal and whether it was met."""
    words = {True: "met", False: "MISSED", None: "not measured"}
    console.print()
    for goal, met in found["goals"].items():
        console.print(f"{goal}: {words[met]}")
    for kind, value in found["exponents"].items():
        if value is not None:
            console.print(f"  {kind}: CPU time ~ nodes ** {value:.2f}")


def cases(nodes: Sequence[int], quick: bool) -> list[dict[str, Any]]:
    """All cases, the smallest graphs first."""
    recipes = ("tensorwise", "rowwise") if quick else RECIPES
    selects = ("all",) if quick else ("all", "auto")
    every: list[dict[str, Any]] = [
        {"part": "passes", "nodes": n, "recipe": recipe, "select": select}
        for n in nodes
        for recipe in recipes
        for select in selects
    ]
    models = ("tiny",) if quick else ("tiny", "small")
    return every + [{"part": "compile", "model": model, "recipe": "tensorwise"} for model in models]


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", help="sizes of the graphs (default: up to 50,000)")
    parser.add_argument("--repeats", type=int, default=3, help="of each graph (%(default)s)")
    parser.add_argument("--no-compile", action="store_true", help="leave out the whole compiles")
    args = parser.parse_args(argv)
    standard = QUICK_NODES if args.quick else NODES
    nodes = args.nodes or standard
    device = torch.device("cpu")
    if torch.cuda.is_available():  # with its number, as graphs know it: else canaries run in measured time
        device = torch.device("cuda", torch.cuda.current_device())
    recorder = common.Recorder(
        NAME, common.stamp(device), {"target": TARGET, "repeats": args.repeats}, args.results, args.fresh
    )

    def measure(part: str, **case: Any) -> Row:
        if part == "passes":
            return measure_passes(**case, repeats=args.repeats)
        return measure_compile(**case, device=device)

    todo = [case for case in cases(nodes, args.quick) if not (args.no_compile and case["part"] == "compile")]
    common.run_cases(todo, recorder, common.Budget(args.budget_s), measure)
    result, path = recorder.finish(
        summary(recorder.rows), complete=recorder.has_all(cases(standard, args.quick))
    )
    for grid in grids(result):
        grid.print()
    print_goals(result["summary"])
    console.print(f"Written to {path}")
    return int(recorder.failed)


if __name__ == "__main__":
    raise SystemExit(main())
