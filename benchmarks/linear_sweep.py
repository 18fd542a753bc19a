"""One linear layer, forward and backward, by M, K and N: bf16, torchao and f8fx side by side.

The layer is the one of torchao's and TorchTitan's published float8 tables: layer norm without
parameters, linear without bias, sigmoid, in bfloat16, with x [M, K] and weight [N, K]; time is that of
the GPU for forward and backward together. ``python -m benchmarks.linear_sweep`` measures all
combinations of powers of two (hours), ``--quick`` those on which verdicts turn (minutes).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import common, running, variants
from .common import Grid, Row, console, show

NAME = "linear_sweep"
SIZES = (1024, 2048, 4096, 8192, 16384)
CASE = ("m", "k", "n", "recipe")
#: Large, the model's width, the edges of torchao's filter, and small ones that must not be converted.
QUICK = (
    (16384, 4096, 4096),
    (16384, 8192, 8192),
    (8192, 4096, 14336),
    (4096, 4096, 4096),
    (16384, 2048, 2048),
    (2048, 8192, 1024),
    (1024, 1024, 1024),
)
_SMOKE = ((32, 64, 48),)


class NormLinearSigmoid(nn.Module):
    """``sigmoid(linear(layer_norm(x)))``."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(k, elementwise_affine=False)
        self.linear = nn.Linear(k, n, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[M, K] -> [M, N]"""
        return torch.sigmoid(self.linear(self.norm(x)))


def cases(sizes: Sequence[int], quick: bool) -> list[dict[str, Any]]:
    """All cases, those of ``--quick`` first, recipe by recipe."""
    every = [QUICK, *([] if quick else [tuple(itertools.product(sizes, repeat=3))])]
    ordered = dict.fromkeys(
        (*shape, recipe) for shapes in every for recipe in variants.RECIPES for shape in shapes
    )
    return [dict(zip(CASE, case, strict=True)) for case in ordered]


def measure(m: int, k: int, n: int, recipe: str, device: str = "cuda", seconds: float = 0.6) -> Row:
    """Times all versions of one layer."""
    torch.manual_seed(0)
    place = torch.device(device)
    module = NormLinearSigmoid(k, n).to(place, torch.bfloat16)
    x = torch.randn(m, k, device=place, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(m, n, device=place, dtype=torch.bfloat16)
    smoke = place.type == "cpu"
    found = variants.compare(module, x, grad, recipe, smoke, seconds)
    return {**found.row(), "clocks": common.clocks()}


def grids(result: dict[str, Any]) -> list[Grid]:
    """One table for each recipe: times faster than bf16, and than torchao."""
    headers = (
        "M",
        "K",
        "N",
        "bf16 ms",
        "torchao / bf16",
        "f8fx / bf16",
        "f8fx / torchao",
        "auto / bf16",
        "auto",
    )
    tables = []
    for recipe in variants.RECIPES:
        rows = sorted(
            (r for r in result["rows"] if r["recipe"] == recipe), key=lambda r: (r["m"], r["k"], r["n"])
        )
        cells = [(*(str(row[key]) for key in ("m", "k", "n")), *_cells(row)) for row in rows]
        if cells:
            tables.append(Grid(f"{recipe}: speedups (above 1 is faster)", headers, tuple(cells)))
    return tables


def _cells(row: Row) -> tuple[str, ...]:
    pairs = (("torchao", "bf16"), ("f8fx", "bf16"), ("f8fx", "torchao"), ("f8fx_auto", "bf16"))
    converted = row["converted"].get("f8fx_auto")
    return (
        show(row["ms"].get("bf16"), ".3f"),
        *(show(variants.speedup(row, *pair)) for pair in pairs),
        f"{converted[0]} of {converted[1]}" if converted else "-",
    )


def summary(rows: list[Row]) -> dict[str, Any]:
    """Medians by recipe, and where ``auto`` was wrong."""
    medians = {
        recipe: {
            f"{name}/{over}": common.median(
                s
                for r in rows
                if r["recipe"] == recipe and (s := variants.speedup(r, name, over)) is not None
            )
            for name, over in (
                ("torchao", "bf16"),
                ("f8fx", "bf16"),
                ("f8fx", "torchao"),
                ("f8fx_auto", "bf16"),
            )
        }
        for recipe in variants.RECIPES
    }
    return {"median_speedup": medians, **variants.verdicts(rows, CASE)}


def print_verdicts(found: dict[str, Any]) -> None:
    """Prints where ``auto`` was wrong and what did not run."""
    slower, missed, failed = (found[key] for key in ("auto_slower_than_bf16", "auto_left_behind", "failed"))
    console.print(f'\nselect="auto" slower than bf16: {len(slower)}; speed left behind: {len(missed)}')
    for entry in [*slower, *missed, *failed]:
        console.print(f"  {entry}", markup=False)


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, smoke=True, ahead=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="values of M, K and N")
    args = parser.parse_args(argv)
    if args.cpu_smoke:
        return smoke()
    todo, every = cases(args.sizes, args.quick), cases(SIZES, args.quick)
    return running.run(args, NAME, todo, measure, summary, grids, tell=print_verdicts, every=every)


def smoke() -> int:
    """Runs one tiny shape on CPU; times mean nothing and are not kept."""
    torch.set_num_threads(1)
    rows = []
    for (m, k, n), recipe in itertools.product(_SMOKE, variants.RECIPES):
        case = {"m": m, "k": k, "n": n, "recipe": recipe}
        rows.append({**case, **measure(m, k, n, recipe, device="cpu", seconds=0.0)})
    return common.end_smoke(rows, grids({"rows": rows}))


if __name__ == "__main__":
    raise SystemExit(main())
