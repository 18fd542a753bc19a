"""What each choice is worth: a Llama block with one thing changed, beside the block as f8fx compiles it by default.

``python -m benchmarks.ablations``. Every experiment compiles its versions and the default again (out of Inductor's cache, where
that has it) and times them interleaved, forward and backward at sequence 8192: device time without launch gaps
(:func:`benchmarks.timing.interleaved`) and time a step takes where steps follow each other (``wall``), which has them.

A change to a default is kept only with its row in a result.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from f8fx.tuning import TUNING, tuning

from . import common, running, variants
from .common import Grid, Row, console, show
from .llama_block import SEQ, block_of, memory_of
from .timing import interleaved, sustained
from .variants import Variant

NAME = "ablations"
CASE = ("model", "recipe", "experiment")
DEFAULT = "default"
_SMOKE_SEQ = 32


@dataclass(frozen=True)
class Version:
    """How one version is compiled.

    Attributes:
        base: of :data:`benchmarks.variants.NAMES`.
        options: of f8fx.
        inductor: Inductor's options.
    """

    base: str = "f8fx"
    options: Mapping[str, Any] = field(default_factory=dict)
    inductor: Mapping[str, Any] = field(default_factory=dict)


_GRAPHS = {"triton.cudagraphs": True}  # what mode="reduce-overhead" sets

#: By name, the likeliest to matter first: versions that are compared with the default.
EXPERIMENTS: Mapping[str, Mapping[str, Version]] = {
    "merge": {"never": Version(options={"merge": "never"})},
    "rowwise_scales": {
        "in_gemm": Version(options={"rowwise_scales": "in_gemm"}),
        "torchao": Version(options={"rowwise_scales": "torchao"}),
    },
    "save": {"fast": Version(options={"save": "fast"})},
    "kernels": {"inductor": Version(options={"kernels": "inductor"})},
    "cuda_graphs": {
        "bf16": Version("bf16"),
        "bf16, graphs": Version("bf16", inductor=_GRAPHS),
        "torchao, graphs": Version("torchao", inductor=_GRAPHS),
        "f8fx, graphs": Version(inductor=_GRAPHS),
    },
    # what of the gain over the two is Inductor's options, and not the passes
    "inductor_options": {
        "bf16": Version("bf16"),
        "bf16, f8fx's options": Version("bf16", inductor=tuning({})),
        "torchao": Version("torchao"),
        "torchao, f8fx's options": Version("torchao", inductor=tuning({})),
    },
    "combo_kernels": {"without": Version(inductor={"combo_kernels": False})},
    "combo_kernel_per_subkernel_blocks": {
        "without": Version(inductor={"combo_kernel_per_subkernel_blocks": False})
    },
    "realize_opcount_threshold": {"30": Version(inductor={"realize_opcount_threshold": 30})},
    "mix_order_reduction": {"without": Version(inductor={"triton.mix_order_reduction": False})},
    "coordinate_descent_tuning": {"with": Version(inductor={"coordinate_descent_tuning": True})},
}
#: Experiments that say nothing of recipes whose scales are all per tensor.
_ROWWISE_ONLY = ("rowwise_scales", "kernels")


def cases(quick: bool, only: Collection[str] = EXPERIMENTS) -> list[dict[str, Any]]:
    """8B before 70B, experiment by experiment; ``--quick`` is the 8B block without the third recipe."""
    models = ("llama3_8b",) if quick else ("llama3_8b", "llama3_70b")
    recipes = variants.RECIPES[:2] if quick else variants.RECIPES
    idle = TUNING.keys() - tuning({}).keys()  # the default is without them
    every = [
        (model, recipe, experiment)
        for model, experiment, recipe in itertools.product(models, EXPERIMENTS, recipes)
        if experiment in only
        and experiment not in idle
        and (recipe != "tensorwise" or experiment not in _ROWWISE_ONLY)
    ]
    return [dict(zip(CASE, case, strict=True)) for case in every]


def measure(
    model: str, recipe: str, experiment: str, device: str = "cuda", seq: int = SEQ, seconds: float = 1.2
) -> Row:
    """Times the versions of an experiment beside the default."""
    block, x, grad = block_of(model, device, seq)
    smoke = x.device.type == "cpu"
    torch.compiler.reset()
    built: dict[str, Variant] = {}
    errors: dict[str, str] = {}
    noise: dict[str, float | None] = {}
    reference: tuple[torch.Tensor, ...] = ()
    for name, version in {DEFAULT: Version(), **EXPERIMENTS[experiment]}.items():
        try:
            variant = variants.build(
                version.base, block, x, grad, recipe, smoke, version.options, version.inductor
            )
            for _ in range(3 if variant.cuda_graphs else 1):  # warms up, records, replays
                results = tuple(value.detach().clone() for value in variant.step()[:2])
        except Exception as error:  # one version that cannot run must not hide the others
            errors[name] = variants.one_line(error)
            continue
        built[name] = variant
        reference = reference or results
        noise[name] = variants.finite(variants.decibels(reference[0], results[0]))
    del reference
    steps = {name: variant.step for name, variant in built.items()}
    timings = interleaved(steps, x.device, seconds) if steps else {}
    return {
        "ms": {name: timing.ms for name, timing in timings.items()},
        "wall_ms": sustained(steps, x.device, seconds) if steps else {},
        "timings": {name: timing.to_dict() for name, timing in timings.items()},
        "compile_s": {name: variant.compile_s for name, variant in built.items()},
        "compile_cached": {name: variant.cached for name, variant in built.items()},
        # a pool of CUDA graphs holds its memory from step to step
        "memory": {} if smoke else {n: memory_of(v) for n, v in built.items() if not v.cuda_graphs},
        "output_db": noise,
        "seq": seq,
        "errors": errors,
        "clocks": common.clocks(),
    }


def grids(result: dict[str, Any]) -> list[Grid]:
    """One line for each version: times, what it gains over the default, the time to compile, memory."""
    headers = (
        "",
        "device ms",
        "wall ms",
        "default / it, device",
        "default / it, wall",
        "spread %",
        "compile s",
        "peak MiB",
    )
    tables = []
    for model, recipe in dict.fromkeys((row["model"], row["recipe"]) for row in result["rows"]):
        rows = [row for row in result["rows"] if (row["model"], row["recipe"]) == (model, recipe)]
        cells = tuple(_cells(row, name) for row in rows for name in row["ms"])
        tables.append(Grid(f"{model}, {recipe}: f8fx with one thing changed", headers, cells))
    return tables


def _cells(row: Row, name: str) -> tuple[str, ...]:
    def gain(what: str) -> str:
        times = row[what]
        return show(times[DEFAULT] / times[name] if DEFAULT in times else None, ".3f")

    compiled = row["compile_s"].get(name)
    memory = row["memory"].get(name)
    return (
        f"{row['experiment']}: {name}",
        show(row["ms"][name], ".3f"),
        show(row["wall_ms"].get(name), ".3f"),
        gain("ms"),
        gain("wall_ms"),
        show(100 * variants.noise(row, name), ".1f"),
        show(compiled, ".1f") + (" cached" if row["compile_cached"].get(name) else ""),
        show(memory["peak"] / 2**20 if memory else None, ",.0f"),
    )


def summary(rows: list[Row]) -> dict[str, Any]:
    """Versions of f8fx that were faster than the default beyond noise, and what did not run."""
    better = []
    for row in rows:
        for name, version in EXPERIMENTS[row["experiment"]].items():
            if version.base != "f8fx" or DEFAULT not in row["ms"] or name not in row["ms"]:
                continue
            gains = {what: row[what][DEFAULT] / row[what][name] for what in ("ms", "wall_ms")}
            # graphs exist to close the gaps that device time leaves out
            gain = gains["wall_ms"] if version.inductor is _GRAPHS else gains["ms"]
            if gain > 1 + max(variants.TOLERANCE, variants.noise(row, DEFAULT, name)):
                better.append({**{key: row[key] for key in CASE}, "version": name, **gains})
    failed = [{**{key: row[key] for key in CASE}, "errors": row["errors"]} for row in rows if row["errors"]]
    return {"better_than_the_default": better, "failed": failed}


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, smoke=True, ahead=True)
    parser.add_argument(
        "--only", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS), help="experiments"
    )
    args = parser.parse_args(argv)
    if args.cpu_smoke:
        return smoke(args.only)
    todo, every = cases(args.quick, args.only), cases(args.quick)
    return running.run(args, NAME, todo, measure, summary, grids, {"seq": SEQ}, running.tell_all, every=every)


def smoke(only: Collection[str]) -> int:
    """Experiments on a tiny block on CPU, without code generation; times mean nothing and are not kept."""
    torch.set_num_threads(1)
    rows = []
    for experiment in only:
        recipe = "rowwise" if experiment in _ROWWISE_ONLY else "tensorwise"
        case = {"model": "tiny", "recipe": recipe, "experiment": experiment}
        rows.append({**case, **measure(**case, device="cpu", seq=_SMOKE_SEQ, seconds=0.0)})
    console.print(common.SMOKE)
    for grid in grids({"rows": rows}):
        grid.print()
    failed = summary(rows)["failed"]
    for entry in failed:
        console.print(f"  {entry}", markup=False)
    return int(any(not name.startswith("torchao") for entry in failed for name in entry["errors"]))


if __name__ == "__main__":
    raise SystemExit(main())
