"""Memory traffic and launches of a block, counted without a GPU: ``python -m benchmarks.traffic``.

One forward and backward at batch 1 and 8192 tokens, as Inductor would run it on an H100; bf16 against every recipe, by
torchao and by f8fx.
Of the kernels beside the gemms: how many, the bytes they move when every tensor is read once (``GB``) and with
what looped reductions read again (``est GB``, :mod:`benchmarks.rereads`), bytes that reductions store
transposed (``strided``), and the floor worked out by hand (:mod:`benchmarks.floor`). Then bytes saved for the
backward, the most that a half's own tensors take at once, parameters not counted, and gemm launches.
Counted, not measured: times are for :mod:`benchmarks.gpu`.

Models are on the meta device, for which operators decompose as for CUDA in a CUDA build of torch. (A CPU build has no kernel for
SiLU's gradient on CUDA and takes its arithmetic in bf16 apart instead: on fake CUDA tensors torchao's rowwise is 9.93 GB.)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from f8fx.doctor import version_of
from f8fx.recipe import PRESETS

from . import floor
from .blocks import block
from .codegen import generate, halves, of_any_size
from .common import Grid
from .floor import Save
from .stand_in import h100

MODELS = ("llama", "mlp", "norm_linear")
SAVES: tuple[Save, ...] = ("lean", "fast")


@dataclass(frozen=True)
class Case:
    """A recipe (``None``: bf16), who applies it, and what f8fx saves."""

    recipe: str | None
    save: Save = "lean"
    by: Literal["f8fx", "torchao"] = "f8fx"

    @property
    def label(self) -> str:
        if self.recipe is None:
            return "bf16"
        return f"{self.recipe}, {self.save if self.by == 'f8fx' else self.by}"


CASES = (
    Case(None),
    *(Case(recipe, by="torchao") for recipe in PRESETS),
    *(Case(recipe, save) for save in SAVES for recipe in PRESETS),
)

#: What the Llama block is to reach at 8192 tokens, each at most: est bytes, kernels, saved bytes, gemms.
GOALS: dict[str, dict[str, float]] = {
    "tensorwise, lean": {"est_bytes": 7.4e9, "triton_kernels": 30, "saved_bytes": 777.2e6, "gemms": 12},
    "tensorwise, fast": {"est_bytes": 6.9e9, "saved_bytes": 1000e6, "gemms": 12},
    "rowwise, lean": {"est_bytes": 7.4e9, "triton_kernels": 30, "saved_bytes": 777.2e6, "gemms": 12},
    "rowwise, fast": {"est_bytes": 6.9e9, "triton_kernels": 30, "gemms": 12},
    "rowwise_with_gw_hp, lean": {
        "est_bytes": 5.6e9,
        "triton_kernels": 25,
        "saved_bytes": 1146.2e6,
        "gemms": 12,
    },
}
_GOAL_TOKENS = 8192
_GEMMS = frozenset(("mm", "addmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"))


def count(model: nn.Module, args: tuple[Tensor, ...], case: Case) -> dict[str, int]:
    """Kernels and bytes of forward and backward of a model on the meta device, whose layers torchao replaces."""
    options: dict[str, Any] = {"float8": False}
    if case.by == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(case.recipe))
    elif case.recipe is not None:
        options = {"recipe": case.recipe, "save": case.save}
    graphs, saved = halves(model, *args, **options)
    with h100():
        generated = [generate(graph, backward) for graph, backward in zip(graphs, (False, True), strict=True)]
    triton = [kernel for half in generated for kernel in half.triton]
    names = [kernel.name for half in generated for kernel in half.kernels]
    least = sum(kernel.bytes for kernel in triton)
    return {
        "triton_kernels": len(triton),
        "bytes": least,
        "est_bytes": least + sum(kernel.reread for kernel in triton),
        "strided_bytes": sum(kernel.strided for kernel in triton),
        "saved_bytes": saved,
        "peak_bytes": max(half.peak for half in generated),
        "gemms": sum(name.rpartition(".")[2] in _GEMMS for name in names),
    }


def measure(
    model: str, tokens: int, cases: Sequence[Case] = CASES, dynamic: bool = False
) -> dict[str, dict[str, Any]]:
    """The figures of every case, by its label, with floor and goals.

    Args:
        dynamic: of code that is for sequences of any length; goals are for one length.
    """
    rows: dict[str, dict[str, Any]] = {}
    for case in cases:
        layers, args = block(model, tokens)
        if dynamic:
            of_any_size(args, 1)
        rows[case.label] = {
            **count(layers, args, case),
            "floor_bytes": floor.total(model, tokens, case.recipe, case.save),
            "goals": {} if dynamic else goals(model, tokens, case),
        }
    return rows


def goals(model: str, tokens: int, case: Case) -> dict[str, float]:
    """What a case is to reach; empty where nothing was set."""
    return GOALS.get(case.label, {}) if (model, tokens) == ("llama", _GOAL_TOKENS) else {}


def grid(model: str, tokens: int, rows: dict[str, dict[str, Any]]) -> Grid:
    """The table; behind a figure its goal."""
    columns = (
        ("Triton kernels", "triton_kernels", 1, "d"),
        ("GB", "bytes", 1e9, ".2f"),
        ("est GB", "est_bytes", 1e9, ".2f"),
        ("strided GB", "strided_bytes", 1e9, ".2f"),
        ("floor GB", "floor_bytes", 1e9, ".2f"),
        ("saved MB", "saved_bytes", 1e6, ".0f"),
        ("peak MB", "peak_bytes", 1e6, ".0f"),
        ("gemms", "gemms", 1, "d"),
    )

    def cell(row: dict[str, Any], key: str, unit: float, spec: str) -> str:
        def show(value: float) -> str:
            return format(value if spec == "d" else value / unit, spec)

        goal = row["goals"].get(key)
        return show(row[key]) + (f" (<= {show(goal)})" if goal is not None else "")

    return Grid(
        f"{model}, 1 x {tokens} tokens, forward and backward on an H100 (<= goal)",
        ("", *(column[0] for column in columns)),
        tuple((label, *(cell(row, *column[1:]) for column in columns)) for label, row in rows.items()),
    )


def main(argv: list[str] | None = None) -> int:
    """Prints the table; ``--json FILE`` keeps the figures."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.traffic", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="llama", help="the block (default llama)")
    parser.add_argument("--sequence", type=int, default=_GOAL_TOKENS, help="tokens (default %(default)s)")
    parser.add_argument("--dynamic", action="store_true", help="of code for sequences of any length")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures as JSON")
    args = parser.parse_args(argv)
    rows = measure(args.model, args.sequence, dynamic=args.dynamic)
    grid(args.model, args.sequence, rows).print()
    if args.json:
        result = {
            "model": args.model,
            "sequence": args.sequence,
            "dynamic": args.dynamic,
            "torch": str(torch.__version__),
            "f8fx": version_of("f8fx"),
            "rows": rows,
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
