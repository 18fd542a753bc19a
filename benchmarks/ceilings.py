"""What this machine can do at best: TFLOP/s of every gemm of a Llama block, bytes per second, attention, a launch.

``python -m benchmarks.ceilings``. Nothing here is f8fx: gemms are cuBLAS's, through ``torch.mm`` and
``torch._scaled_mm``, each in the layout in which its role finds its operands; floors and the cost model are worked
out from these figures.

* **gemm**: bf16; float8 with one scale a tensor and with a scale a row, each with fast accumulation and without.
  Gradients are e5m2 in the tensorwise versions, as in the recipe.
* **copy**: bytes read plus bytes written per second, by ``Tensor.copy_`` and by an elementwise kernel.
* **attention**: forward and backward of the block's scaled dot product attention.
* **launch**: seconds between the starts of the smallest kernels in one CUDA graph.

Data is random: on zeros a GPU draws less power and clocks higher. Calls rotate among buffers, together
several times the L2 cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from f8fx.demo.model import DecoderConfig
from f8fx.recipe import Role

from . import common, running, shapes
from .common import Grid, Row, console, show
from .shapes import GemmShape
from .timing import Step, in_a_row, interleaved
from .variants import one_line

NAME = "ceilings"
MODELS = ("llama3_8b", "llama3_70b")
TOKENS = 8192
COPY_MIB = (256, 1024, 4096)
VERSIONS = ("bf16", "tensorwise_fast", "tensorwise_exact", "rowwise_fast", "rowwise_exact")
#: Bytes of the operands that calls rotate among, and how many sets of them at most.
ROTATED_BYTES, MOST_SETS = 256 << 20, 32
_LAUNCHES = 200

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


# -- gemms ----------------------------------------------------------------------------------------


def _operands(gemm: GemmShape, version: str, device: torch.device) -> tuple[Tensor, ...]:
    """Left [m, k], right [k, n] and for float8 their scales, as the role's gemm finds them in memory."""
    left = torch.randn(gemm.m, gemm.k, device=device, dtype=torch.bfloat16)
    right = torch.randn(gemm.n, gemm.k, device=device, dtype=torch.bfloat16)
    if version == "bf16":
        if gemm.role == "grad_weight":  # grad_output [M, N], read transposed
            left = left.t().contiguous().t()
        # weight [N, K] of the forward is read transposed, weight and input of the gradients as they lie
        return left, right.t() if gemm.role == "output" else right.t().contiguous()
    rowwise = version.startswith("rowwise")
    left_dtype = E4M3 if rowwise or gemm.role == "output" else E5M2
    if rowwise:
        scales = torch.rand(gemm.m, 1, device=device) + 0.5, torch.rand(1, gemm.n, device=device) + 0.5
    else:
        scales = torch.rand((), device=device) + 0.5, torch.rand((), device=device) + 0.5
    return left.to(left_dtype), right.to(E4M3).t(), *scales


def _calls(gemm: GemmShape, version: str, device: torch.device, sets: int) -> list[Step]:
    run: Any = torch.mm
    if version != "bf16":
        fast = version.endswith("fast")
        run = functools.partial(torch.ops.aten._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return [functools.partial(run, *_operands(gemm, version, device)) for _ in range(sets)]


def measure_gemm(
    role: Role,
    m: int,
    k: int,
    n: int,
    device: str = "cuda",
    seconds: float = 0.35,
    versions: tuple[str, ...] = VERSIONS,
) -> Row:
    """TFLOP/s of a gemm in every version, interleaved."""
    gemm, place = GemmShape(role, m, k, n), torch.device(device)
    torch.manual_seed(0)
    size = 2 * (m * k + k * n + m * n)
    # without a GPU there is nothing to measure, only to try
    sets = max(2, min(MOST_SETS, -(-ROTATED_BYTES // size))) if place.type == "cuda" else 1
    calls = {}
    errors: dict[str, str] = {}
    for version in versions:
        try:
            found = _calls(gemm, version, place, sets)
            found[0]()
        except Exception as error:  # a version that this build lacks
            errors[version] = one_line(error)
            continue
        calls[version] = found
    steps = {name: functools.partial(in_a_row, found) for name, found in calls.items()}
    timings = interleaved(steps, place, seconds) if steps else {}
    ms = {name: timing.ms / sets for name, timing in timings.items()}
    return {
        "ms": ms,
        "tflops": {name: gemm.flops / value / 1e9 for name, value in ms.items()},
        "timings": {name: timing.to_dict() for name, timing in timings.items()},
        "calls": sets,
        "errors": errors,
        "clocks": common.clocks(),
    }


# -- the others -----------------------------------------------------------------------------------


def measure_copy(mib: int, device: str = "cuda", seconds: float = 0.4) -> Row:
    """GB/s of copies of that many MiB, bytes read plus bytes written."""
    count = mib << 19  # elements of two bytes
    pairs = []
    for _ in range(2):
        source = torch.randn(count, device=device, dtype=torch.bfloat16)
        pairs.append((torch.empty_like(source), source))
    calls: dict[str, list[Step]] = {
        "copy": [functools.partial(target.copy_, source) for target, source in pairs],
        "elementwise": [functools.partial(torch.neg, source, out=target) for target, source in pairs],
    }
    steps = {name: functools.partial(in_a_row, found) for name, found in calls.items()}
    timings = interleaved(steps, torch.device(device), seconds)
    moved = 2 * 2 * (mib << 20)  # read and written, two calls
    return {
        "gb_s": {name: moved / timing.ms / 1e6 for name, timing in timings.items()},
        "timings": {name: timing.to_dict() for name, timing in timings.items()},
        "clocks": common.clocks(),
    }


def measure_attention(model: str, device: str = "cuda", tokens: int = TOKENS, seconds: float = 0.6) -> Row:
    """Milliseconds of causal attention, forward and backward, one sequence."""
    config, place = DecoderConfig.named(model), torch.device(device)
    torch.manual_seed(0)

    def heads(count: int) -> Tensor:
        shape = (1, tokens, count, config.head_dim)
        return torch.randn(shape, device=place, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()

    query, key, value = heads(config.heads), heads(config.kv_heads), heads(config.kv_heads)
    grouped = config.heads != config.kv_heads

    def attention() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)

    output = attention()
    grad = torch.randn_like(output)
    steps: dict[str, Step] = {
        "forward": attention,
        "backward": lambda: torch.autograd.grad(output, (query, key, value), grad, retain_graph=True),
    }
    timings = interleaved(steps, place, seconds)
    ms = {name: timing.ms for name, timing in timings.items()}
    flops = 4 * config.heads * config.head_dim * tokens * tokens / 2  # causal: half of the products
    return {
        "ms": ms,
        "tflops": {"forward": flops / ms["forward"] / 1e9, "backward": 2.5 * flops / ms["backward"] / 1e9},
        "timings": {name: timing.to_dict() for name, timing in timings.items()},
        "clocks": common.clocks(),
    }


def measure_launch(device: str = "cuda", seconds: float = 0.2) -> Row:
    """Microseconds that the smallest kernel takes between others, in one CUDA graph."""
    place = torch.device(device)
    x = torch.ones(32, device=place)

    def many() -> None:
        for _ in range(_LAUNCHES):
            x.add_(1)

    if place.type == "cuda":
        many()
        torch.cuda.synchronize(place)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            many()
        timings = interleaved({"graph": graph.replay}, place, seconds)
    else:
        timings = interleaved({"graph": many}, place, seconds)
    return {"us": 1e3 * timings["graph"].ms / _LAUNCHES, "clocks": common.clocks()}


MEASURES: Mapping[str, Callable[..., Row]] = {
    "gemm": measure_gemm,
    "copy": measure_copy,
    "attention": measure_attention,
    "launch": measure_launch,
}


def measure(kind: str, **case: Any) -> Row:
    """One row of any kind."""
    return MEASURES[kind](**case)


# -- what is asked of a result --------------------------------------------------------------------


def cases(quick: bool) -> list[dict[str, Any]]:
    """Bandwidth, a launch, attention, then gemms: those of the 8B block, probes, those of the 70B block."""
    found: list[dict[str, Any]] = [{"kind": "copy", "mib": mib} for mib in COPY_MIB]
    found.append({"kind": "launch"})
    found += [{"kind": "attention", "model": model} for model in MODELS]
    small, large = (shapes.distinct([DecoderConfig.named(model)], TOKENS) for model in MODELS)
    probes = [GemmShape("output", *probe) for probe in shapes.PROBES]
    if quick:
        large = list(dict.fromkeys(shapes.of_block(DecoderConfig.named(MODELS[1]), TOKENS, merged=True)))
    for gemm in dict.fromkeys((*small, *probes, *large)):
        found.append({"kind": "gemm", "role": gemm.role, "m": gemm.m, "k": gemm.k, "n": gemm.n})
    return found


def bandwidth(rows: list[Row]) -> float | None:
    """Bytes per second of the fastest copy."""
    return max((1e9 * v for r in rows if r["kind"] == "copy" for v in r["gb_s"].values()), default=None)


def best_ms(row: Row, float8: bool) -> float | None:
    """Milliseconds of a gemm's fastest version in one of the precisions."""
    found = [ms for name, ms in row["ms"].items() if (name != "bf16") == float8]
    return min(found, default=None)


def grids(result: dict[str, Any]) -> list[Grid]:
    """Bandwidth and the rest, then TFLOP/s of each gemm."""
    rows = result["rows"]
    others = [
        (
            f"copy of {r['mib']} MiB",
            "GB/s",
            *(show(r["gb_s"][name], ".0f") for name in ("copy", "elementwise")),
        )
        for r in rows
        if r["kind"] == "copy"
    ]
    others += [
        (f"attention, {r['model']}", "ms", *(show(r["ms"][name], ".3f") for name in ("forward", "backward")))
        for r in rows
        if r["kind"] == "attention"
    ]
    others += [("smallest kernel", "us", show(r["us"]), "") for r in rows if r["kind"] == "launch"]
    headers = ("", "unit", "copy / forward", "elementwise / backward")
    tables = [Grid("Bandwidth, attention, launches", headers, tuple(others))]
    gemms = tuple(
        (
            f"{r['role']} {r['m']} x {r['k']} x {r['n']}",
            *(show(r["tflops"].get(version), ".0f") for version in VERSIONS),
            show(_ratio(r)),
        )
        for r in rows
        if r["kind"] == "gemm"
    )
    if gemms:
        titles = ("M x K x N", *VERSIONS, "best float8 / bf16")
        tables.append(Grid("TFLOP/s of cuBLAS", titles, gemms))
    return tables


def _ratio(row: Row) -> float | None:
    high, low = best_ms(row, False), best_ms(row, True)
    return high / low if high and low else None


def summary(rows: list[Row]) -> dict[str, Any]:
    """The ceilings in one line each, and what did not run."""
    gemms = [row for row in rows if row["kind"] == "gemm"]
    found = bandwidth(rows)
    return {
        "bandwidth_gb_s": found and found / 1e9,
        "launch_us": next((row["us"] for row in rows if row["kind"] == "launch"), None),
        "best_tflops": {
            version: max((r["tflops"][version] for r in gemms if version in r["tflops"]), default=None)
            for version in VERSIONS
        },
        "failed": [
            {key: row[key] for key in ("role", "m", "k", "n")} | {"errors": row["errors"]}
            for row in gemms
            if row["errors"]
        ],
    }


def main(argv: list[str] | None = None) -> int:
    args = common.parser(__doc__, smoke=True).parse_args(argv)
    if args.cpu_smoke:
        return smoke()
    return running.run(args, NAME, cases(args.quick), measure, summary, grids, {"tokens": TOKENS})


def smoke() -> int:
    """Every kind on tiny sizes on CPU; times mean nothing and are not kept."""
    where: dict[str, Any] = {"device": "cpu", "seconds": 0.0}
    todo: list[dict[str, Any]] = [{"kind": "copy", "mib": 1}, {"kind": "launch"}]
    todo.append({"kind": "attention", "model": "tiny", "tokens": 32})
    todo += [
        {"kind": "gemm", "role": g.role, "m": g.m, "k": g.k, "n": g.n} for g in shapes.of_layer(32, 64, 48)
    ]
    rows = [{**case, **measure(**case, **where)} for case in todo]
    console.print(common.SMOKE)
    for grid in grids({"rows": rows}):
        grid.print()
    found = summary(rows)["failed"]
    for failure in found:
        console.print(str(failure), markup=False)
    # torch 2.11 has no rowwise float8 on CPU
    return 1 if any(set(f["errors"]) - {"rowwise_fast", "rowwise_exact"} for f in found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
