"""Where the time of a Llama block goes: every kernel against its floor, the most lost first.

``python -m benchmarks.kernel_times``. One step is profiled, forward and backward. The floor of a kernel is

* a **gemm**: the fastest that cuBLAS runs this shape in this precision on this machine, measured here;
* an Inductor kernel: the bytes it has to move (:mod:`benchmarks.codegen`), at the bandwidth of a copy, measured here;
* **attention**: what it takes; nothing here makes it faster;
* a copy or a fill: its bytes at that bandwidth; anything else: nothing, since nothing says that it has to be there.

``busy`` is the sum of all kernels, ``device`` a step without launch gaps, ``wall`` a step among steps: what ``wall`` has over
``busy`` is launch gaps. The **hand floor** is that of :mod:`benchmarks.floor` in place of the bytes of the kernels
that were generated: the goal is a total within 1.10 of it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from f8fx.torch_private import inductor_config

from . import ceilings, common, floor, running, variants
from .codegen import Lowered, watched
from .common import Grid, Row, console, show
from .llama_block import SEQ, block_of
from .shapes import GemmShape
from .timeline import Launch, idle_us, launches, traced
from .timing import interleaved, sustained, synchronize

NAME = "kernel_times"
CASE = ("model", "recipe", "version")
PHASES = ("forward", "backward")
GOAL = 1.10
_STEPS = 3
_SMOKE_SEQ = 32

GemmFloor = Callable[[tuple[int, int, int], bool], float | None]


@dataclass(frozen=True)
class Entry:
    """All launches of one kernel in one step.

    Attributes:
        count: how many.
        us: together.
        floor_us: at least, together; ``None`` where nothing is known of it.
    """

    phase: str
    kind: str
    name: str
    count: float
    us: float
    floor_us: float | None

    @property
    def lost_us(self) -> float:
        return self.us - (self.floor_us or 0.0)


def kind_of(launch: Launch) -> str:
    """``gemm``, ``attention``, ``triton``, ``copy`` or ``other``."""
    if launch.gemm is not None:
        return "gemm"
    # named after the operators it came from, attention among them, or one of ours
    if launch.name.startswith(("triton_", "row_cast_columns", "computed_amaxes")):
        return "triton"
    if "attention" in launch.op or any(word in launch.name for word in ("flash", "fmha", "sdpa")):
        return "attention"
    return "copy" if launch.bytes else "other"


def entries(
    found: Sequence[Launch],
    lowered: Sequence[Lowered],
    gemm_floor: GemmFloor,
    bandwidth: float,
    steps: int = 1,
) -> list[Entry]:
    """What ran in a step, the most lost first.

    Args:
        found: launches of ``steps`` steps.
        lowered: what Inductor generated for them.
        gemm_floor: milliseconds of a gemm (m, k, n), in float8 or not.
        bandwidth: bytes per second.
    """
    generated = {
        ("backward" if graph.is_backward else "forward", name): kernel
        for graph in lowered
        for name, kernel in graph.kernels.items()
    }

    def least(launch: Launch, kind: str) -> float | None:
        """Microseconds of one launch; a gemm's are counted once for all its kernels."""
        if kind == "gemm":
            assert launch.gemm is not None
            ms = gemm_floor(launch.gemm, launch.is_float8)
            return None if ms is None else 1e3 * ms
        if kind == "attention":
            return launch.us
        if kind == "triton":
            kernel = generated.get((launch.phase, launch.name))
            return None if kernel is None else 1e6 * kernel.bytes / bandwidth
        if kind == "copy":  # reads and writes; a fill only writes
            return 1e6 * (1 if launch.is_fill else 2) * launch.bytes / bandwidth
        return None

    groups: dict[tuple[str, str, str], list[Launch]] = {}
    for launch in found:
        kind = kind_of(launch)
        name = launch.name
        if launch.gemm is not None:
            name = f"{launch.op.removeprefix('aten::')} {' x '.join(map(str, launch.gemm))}"
        groups.setdefault((launch.phase, kind, name), []).append(launch)
    result = []
    for (phase, kind, name), group in groups.items():
        floors = [least(launch, kind) for launch in group]
        if kind == "gemm":
            floors = floors[: _calls(group)]
        known = [value for value in floors if value is not None]
        lowest = sum(known) / steps if len(known) == len(floors) else None
        count = (_calls(group) if kind == "gemm" else len(group)) / steps
        result.append(Entry(phase, kind, name, count, sum(x.us for x in group) / steps, lowest))
    return sorted(result, key=lambda entry: -entry.lost_us)


def _calls(group: Sequence[Launch]) -> int:
    """How often a gemm ran: one call may launch several kernels (split k), each as often as the call."""
    per_kernel: dict[str, int] = {}
    for launch in group:
        per_kernel[launch.name] = per_kernel.get(launch.name, 0) + 1
    return max(per_kernel.values())


def totals(found: Sequence[Entry], hand_bytes: int | None, bandwidth: float) -> dict[str, float | None]:
    """Microseconds by kind and together: busy, floor, and the floor with bytes counted by hand."""

    def over(kinds: Sequence[str], what: Callable[[Entry], float]) -> float:
        return sum(what(entry) for entry in found if entry.kind in kinds)

    library = over(("gemm", "attention"), lambda e: e.floor_us or 0.0)
    return {
        "busy_us": sum(e.us for e in found),
        **{f"{kind}_us": over((kind,), lambda e: e.us) for kind in ("gemm", "attention", "triton")},
        "other_us": over(("copy", "other"), lambda e: e.us),
        "floor_us": sum(e.floor_us or 0.0 for e in found),
        "hand_floor_us": None if hand_bytes is None else library + 1e6 * hand_bytes / bandwidth,
        "unknown_us": sum(e.us for e in found if e.floor_us is None),
    }


# -- measuring ------------------------------------------------------------------------------------


class Machine:
    """Ceilings, measured when first asked for."""

    def __init__(self, device: str, seconds: float) -> None:
        self.device, self.seconds = device, seconds
        self.gemms: dict[tuple[tuple[int, int, int], bool], float | None] = {}
        mib = 1024 if device == "cuda" else 1
        row = ceilings.measure_copy(mib, device, seconds)
        self.bandwidth = 1e9 * max(row["gb_s"].values())

    def gemm(self, shape: tuple[int, int, int], float8: bool) -> float | None:
        """Milliseconds of the fastest version; bf16 in the fastest of the layouts that layers have."""
        if (shape, float8) not in self.gemms:
            names: tuple[str, ...] = ceilings.VERSIONS[:1]
            if float8:  # emulated without a GPU, and slow
                names = ceilings.VERSIONS[1:] if self.device == "cuda" else ceilings.VERSIONS[1:2]
            roles = ("output",) if float8 else ("output", "grad_input", "grad_weight")
            rows = [
                ceilings.measure_gemm(
                    *(gemm.role, gemm.m, gemm.k, gemm.n), self.device, self.seconds, versions=names
                )
                for gemm in (GemmShape(role, *shape) for role in roles)  # type: ignore[arg-type]
            ]
            found = [ms for row in rows for ms in row["ms"].values()]
            self.gemms[shape, float8] = min(found, default=None)
        return self.gemms[shape, float8]


def measure(
    model: str,
    recipe: str,
    version: str,
    device: str = "cuda",
    seq: int = SEQ,
    seconds: float = 0.6,
    machine: Machine | None = None,
) -> Row:
    """Compiles a version, times it, profiles it, and compares every kernel with its floor."""
    block, x, grad = block_of(model, device, seq)
    smoke = x.device.type == "cpu"
    torch.compiler.reset()
    # without caches, since what was generated is to be counted
    with inductor_config().patch(force_disable_caches=True), watched() as lowered:
        variant = variants.build(version, block, x, grad, recipe, smoke)
    steps = {version: variant.step}
    timing = interleaved(steps, x.device, seconds)[version]
    wall = sustained(steps, x.device, seconds)[version]

    count = 1 if smoke else _STEPS

    def profiled() -> None:
        for _ in range(count):
            with torch.profiler.record_function(PHASES[0]):
                output = variant.model(x)
                synchronize(x.device)
            with torch.profiler.record_function(PHASES[1]):
                torch.autograd.grad(output, [x, *variant.parameters], grad)
                synchronize(x.device)

    traced(variant.step, x.device)  # the profiler's own start
    ran = launches(traced(profiled, x.device), PHASES, on_cpu=smoke)
    machine = machine or Machine(device, min(seconds, 0.25))
    found = entries(ran, lowered, machine.gemm, machine.bandwidth, count)
    hand = None
    if model == "llama3_8b":
        hand = floor.total("llama", seq, None if version == "bf16" else recipe)
    return {
        "ms": {version: timing.ms},
        "timings": {version: timing.to_dict()},
        "wall_ms": wall,
        "idle_us": idle_us(ran) / count,
        "launches": sum(entry.count for entry in found),
        "bandwidth": machine.bandwidth,
        "totals": totals(found, hand, machine.bandwidth),
        "kernels": [asdict(entry) for entry in found],
        "lowered": [len(graph.kernels) for graph in lowered],
        "seq": seq,
        "errors": {},
        "clocks": common.clocks(),
    }


def cases(quick: bool) -> list[dict[str, Any]]:
    """f8fx first, then what it is compared with."""
    every: list[tuple[str, str, str]] = [
        ("llama3_8b", recipe, version)
        for version, recipe in itertools.product(("f8fx", "torchao"), variants.RECIPES[:2])
    ]
    every.insert(2, ("llama3_8b", "tensorwise", "bf16"))
    if not quick:
        every += [("llama3_8b", "rowwise_with_gw_hp", version) for version in ("f8fx", "torchao")]
        every += [("llama3_70b", "tensorwise", version) for version in ("f8fx", "torchao", "bf16")]
    return [dict(zip(CASE, case, strict=True)) for case in every]


# -- what came out --------------------------------------------------------------------------------


def grids(result: dict[str, Any], most: int = 25) -> list[Grid]:
    """Totals of all versions, then the kernels of each that lose most."""
    rows = result["rows"]
    if not rows:
        return []
    headers = (
        *("", "wall ms", "device ms", "busy ms", "floor ms", "busy / floor", "hand floor ms"),
        *("busy / hand floor", "gaps ms", "launches", "gemm ms", "attention ms", "Triton ms"),
    )
    cells = tuple((_label(row), *_totals(row)) for row in rows)
    tables = [Grid("Forward and backward of one block against its floor", headers, cells)]
    for row in rows:
        lines = tuple(_line(kernel) for kernel in row["kernels"][:most])
        titles = ("kernel", "phase", "kind", "count", "us", "floor us", "lost us", "% of floor's rate")
        tables.append(Grid(f"{_label(row)}: what loses most", titles, lines))
    return tables


def _label(row: Row) -> str:
    return f"{row['model']} " + (
        row["version"] if row["version"] == "bf16" else f"{row['version']} {row['recipe']}"
    )


def _totals(row: Row) -> tuple[str, ...]:
    found = row["totals"]

    def ms(key: str) -> str:
        return show(None if found[key] is None else found[key] / 1e3, ".3f")

    def ratio(key: str) -> str:
        return show(found["busy_us"] / found[key] if found[key] else None)

    (device,) = row["ms"].values()
    gaps = row["wall_ms"] - found["busy_us"] / 1e3
    return (
        *(show(value, ".3f") for value in (row["wall_ms"], device)),
        *(ms("busy_us"), ms("floor_us"), ratio("floor_us"), ms("hand_floor_us"), ratio("hand_floor_us")),
        show(gaps, ".3f"),
        show(row["launches"], ".0f"),
        *(ms(key) for key in ("gemm_us", "attention_us", "triton_us")),
    )


def _line(kernel: Mapping[str, Any]) -> tuple[str, ...]:
    least = kernel["floor_us"]
    lost = kernel["us"] - (least or 0.0)
    rate = 100 * least / kernel["us"] if least is not None and kernel["us"] else None
    return (
        kernel["name"][:70],
        kernel["phase"],
        kernel["kind"],
        show(kernel["count"], ".0f"),
        *(show(value, ".1f") for value in (kernel["us"], least, lost)),
        show(rate, ".0f"),
    )


def summary(rows: list[Row]) -> dict[str, Any]:
    """Total over the hand floor by version, and whether f8fx meets the goal."""
    ratios = {
        _label(row): row["totals"]["busy_us"] / row["totals"]["hand_floor_us"]
        for row in rows
        if row["totals"]["hand_floor_us"]
    }
    own = {label: ratio for label, ratio in ratios.items() if "f8fx" in label}
    return {"busy_over_hand_floor": ratios, "goal": GOAL, "met": {k: v <= GOAL for k, v in own.items()}}


def main(argv: list[str] | None = None) -> int:
    args = common.parser(__doc__, smoke=True).parse_args(argv)
    if args.cpu_smoke:
        return smoke()
    machine = functools.cache(lambda: Machine("cuda", 0.25))

    def measured(**case: Any) -> Row:
        return measure(**case, machine=machine())

    return running.run(args, NAME, cases(args.quick), measured, summary, grids, {"seq": SEQ})


def smoke() -> int:
    """Profiles a tiny block on CPU, where only gemm operators are seen; times mean nothing and are not kept."""
    torch.set_num_threads(1)
    case: dict[str, Any] = {"model": "tiny", "recipe": "tensorwise", "version": "f8fx"}
    rows = [{**case, **measure(**case, device="cpu", seq=_SMOKE_SEQ, seconds=0.0)}]
    console.print(common.SMOKE)
    for grid in grids({"rows": rows}):
        grid.print()
    gemms = [sum(k["count"] for k in row["kernels"] if k["kind"] == "gemm") for row in rows]
    return 0 if all(gemms) else 1


if __name__ == "__main__":
    raise SystemExit(main())
