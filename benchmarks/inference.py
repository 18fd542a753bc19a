"""One Llama block without gradients: a prompt of 8192 tokens, and steps of decoding for many sequences.

``python -m benchmarks.inference``. bf16, torchao (dynamic activations, float8 weights) and f8fx with ``weights="cached"``, from the
same weights, with CUDA graphs and without. *Prefill* is one sequence of so many tokens; *decode* is one
token of each of so many sequences. There is no cache of keys and values: decoding attends to its own
token only, so what is compared is everything but that attention.
"""

from __future__ import annotations

import copy
import itertools
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from f8fx.backend import f8fx
from f8fx.report import GraphReport, recording

from . import common, running, variants
from .common import Grid, Row, console, show
from .llama_block import block_of
from .timing import interleaved, sustained

NAME = "inference"
CASE = ("model", "phase", "tokens", "recipe", "cuda_graphs")
SIZES = (("decode", 1), ("decode", 16), ("prefill", 8192), ("decode", 128), ("decode", 64), ("prefill", 1024))
QUICK = SIZES[:4]
RECIPES = ("tensorwise", "rowwise")
_SMOKE_SIZES = (("prefill", 32), ("decode", 16))


@dataclass
class Served:
    """A version of a block on one input."""

    model: Callable[[Tensor], Tensor]
    x: Tensor
    cuda_graphs: bool
    reports: list[GraphReport] = field(default_factory=list)
    compile_s: float = 0.0

    def step(self) -> Tensor:
        """The output; with CUDA graphs it lasts until the next step."""
        if self.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            return self.model(self.x)


def build(name: str, module: nn.Module, x: Tensor, recipe: str, cuda_graphs: bool) -> Served:
    """One version, compiled and run once; ``name`` is one of :data:`benchmarks.variants.NAMES`."""
    smoke = x.device.type == "cpu"
    module = copy.deepcopy(module)
    backend: Any = "aot_eager" if smoke else "inductor"
    inductor = {"triton.cudagraphs": True} if cuda_graphs and not smoke else {}
    options: dict[str, Any] = inductor
    if name == "torchao":
        _quantize(module, recipe)
    elif name != "bf16":
        backend = f8fx
        options = {"recipe": recipe, "weights": "cached", "strict": True, "inductor": inductor}
        options["select"] = "auto" if name == "f8fx_auto" else "all"
        if smoke:
            options["executor"] = "eager"
    compiled: Any = torch.compile(
        module, backend=backend, options=options or None, dynamic=False, fullgraph=True
    )
    served = Served(compiled, x, bool(inductor))
    start = time.perf_counter()
    with recording() as served.reports:
        served.step()
    if not smoke:
        torch.cuda.synchronize(x.device)
    served.compile_s = time.perf_counter() - start
    for _ in range(2 if inductor else 0):  # records, replays
        served.step()
    return served


def _quantize(module: nn.Module, recipe: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.quantization import (
            Float8DynamicActivationFloat8WeightConfig,
            PerRow,
            PerTensor,
            quantize_,
        )

        granularity: Any = PerTensor() if recipe == "tensorwise" else PerRow()
        # which would otherwise set Inductor's options for the whole process, and for the other versions
        config = Float8DynamicActivationFloat8WeightConfig(granularity=granularity, set_inductor_config=False)
        quantize_(module, config)


def cases(quick: bool) -> list[dict[str, Any]]:
    """With and without CUDA graphs side by side, 8B before 70B."""
    models = ("llama3_8b",) if quick else ("llama3_8b", "llama3_70b")
    sizes, recipes = (QUICK, RECIPES[1:]) if quick else (SIZES, RECIPES)
    every = itertools.product(models, recipes, sizes, (True, False))
    return [dict(zip(CASE, (m, *size, recipe, graphs), strict=True)) for m, recipe, size, graphs in every]


def measure(
    model: str,
    phase: str,
    tokens: int,
    recipe: str,
    cuda_graphs: bool,
    device: str = "cuda",
    seconds: float = 0.6,
) -> Row:
    """Times all versions of one block on one input."""
    block, x, _ = block_of(model, device, tokens)
    block.requires_grad_(False)
    x = (x if phase == "prefill" else x.transpose(0, 1).contiguous()).detach()
    torch.compiler.reset()
    built: dict[str, Served] = {}
    errors: dict[str, str] = {}
    noise: dict[str, float | None] = {}
    reference: Tensor | None = None
    for name in variants.NAMES:
        try:
            served = build(name, block, x, recipe, cuda_graphs)
            output = served.step().clone()
        except Exception as error:  # one version that cannot run must not hide the others
            errors[name] = variants.one_line(error)
            continue
        built[name] = served
        if name == "bf16":
            reference = output
        elif reference is not None:
            noise[name] = variants.finite(variants.decibels(reference, output))
    steps = {name: served.step for name, served in built.items()}
    timings = interleaved(steps, x.device, seconds) if steps else {}
    return {
        "ms": {name: timing.ms for name, timing in timings.items()},
        "wall_ms": sustained(steps, x.device, seconds) if steps else {},
        "timings": {name: timing.to_dict() for name, timing in timings.items()},
        "compile_s": {name: served.compile_s for name, served in built.items()},
        "sqnr_db": noise,
        "converted": {
            name: [sum(r.converted for r in s.reports), sum(r.total for r in s.reports)]
            for name, s in built.items()
            if name.startswith("f8fx")
        },
        # a pool of CUDA graphs holds its memory from step to step
        "peak": {n: _peak(served) for n, served in built.items() if x.is_cuda and not served.cuda_graphs},
        "errors": errors,
        "clocks": common.clocks(),
    }


def _peak(served: Served) -> int:
    """Bytes at the peak of a step, beyond those that were allocated before it."""
    device = served.x.device
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    served.step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def grids(result: dict[str, Any]) -> list[Grid]:
    """Milliseconds and speedups; with CUDA graphs those of wall time, which they are for, and no memory."""
    tables = []
    for graphs in (False, True):
        what = "wall_ms" if graphs else "ms"
        rows = [row for row in result["rows"] if row["cuda_graphs"] == graphs]
        cells = tuple(
            (
                f"{row['model']} {row['recipe']}, {row['phase']} {row['tokens']}",
                *(show(row[what].get(name), ".3f") for name in variants.NAMES),
                *(
                    show(row[what][over] / row[what][name] if {name, over} <= set(row[what]) else None)
                    for name, over in (("torchao", "bf16"), ("f8fx", "bf16"), ("f8fx", "torchao"))
                ),
                *(() if graphs else (_peak_mib(row),)),
            )
            for row in rows
        )
        if cells:
            title = "wall time with CUDA graphs" if graphs else "device time without CUDA graphs"
            headers = (
                *("", *(f"{name} ms" for name in variants.NAMES)),
                *("torchao / bf16", "f8fx / bf16", "f8fx / torchao"),
                *(() if graphs else ("f8fx peak MiB",)),
            )
            tables.append(Grid(f"No gradients, weights cached: {title}", headers, cells))
    return tables


def _peak_mib(row: Row) -> str:
    return show(row["peak"]["f8fx"] / 2**20 if "f8fx" in row["peak"] else None, ",.0f")


def summary(rows: list[Row]) -> dict[str, Any]:
    """Where ``auto`` was slower than bf16 beyond noise, and what did not run."""
    slower, failed = [], []
    for row in rows:
        label = {key: row[key] for key in CASE}
        if row["errors"]:
            failed.append({**label, "errors": row["errors"]})
        if {"bf16", "f8fx_auto"} <= set(row["ms"]):
            gain = row["ms"]["bf16"] / row["ms"]["f8fx_auto"]
            if gain * (1 + max(variants.TOLERANCE, variants.noise(row, "bf16", "f8fx_auto"))) < 1:
                slower.append({**label, "speedup": gain})
    return {"auto_slower_than_bf16": slower, "failed": failed}


def main(argv: list[str] | None = None) -> int:
    args = common.parser(__doc__, smoke=True, ahead=True).parse_args(argv)
    if args.cpu_smoke:
        return smoke()
    return running.run(args, NAME, cases(args.quick), measure, summary, grids, tell=running.tell_all)


def smoke() -> int:
    """Tiny blocks on CPU, without code generation; times mean nothing and are not kept."""
    torch.set_num_threads(1)
    rows = []
    for phase, tokens in _SMOKE_SIZES:
        case: dict[str, Any] = dict(zip(CASE, ("tiny", phase, tokens, "tensorwise", False), strict=True))
        rows.append({**case, **measure(**case, device="cpu", seconds=0.0)})
    console.print(common.SMOKE)
    for grid in grids({"rows": rows}):
        grid.print()
    failed = summary(rows)["failed"]
    for entry in failed:
        console.print(f"  {entry}", markup=False)
    return 1 if any(set(entry["errors"]) - {"torchao"} for entry in failed) else 0


if __name__ == "__main__":
    raise SystemExit(main())
