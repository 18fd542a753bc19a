"""What each pass spares: a block compiled with one of them left out, counted: ``python -m benchmarks.leave_out``.

As :mod:`benchmarks.traffic`, of which this is a second table: one forward and backward as Inductor would run it on an H100, the
bytes that kernels other than gemms and attention move, and launches. Passes that the rest of the pipeline cannot do without
(*find*, *select*, *quantize*) and those for graphs of other kinds (*reuse*, *collectives*, *tags*) are not in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

from f8fx import passes

from . import codegen, traffic
from .common import Grid

RECIPES = ("tensorwise", "rowwise")
NOTHING = "nothing"


def _without(cls: type, result: Callable[..., Any] = lambda graph, *given: None) -> Any:
    """Leaves a pass out: what it is called with goes on as ``result`` says."""
    return mock.patch.object(cls, "__call__", lambda self, *given: result(*given))


#: By name: what is left out, as a context to count in.
LEFT_OUT: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    NOTHING: nullcontext,
    "merge": lambda: mock.patch.object(traffic, "halves", partial(codegen.halves, merge="never")),
    "concatenations": lambda: _without(passes.Concatenations, lambda graph, conversions: conversions),
    "share": lambda: _without(passes.Share),
    "amaxes": lambda: _without(passes.Amaxes),
    "materialize": lambda: _without(passes.Materialize),
    "rounding": lambda: _without(passes.Rounding),
    "one_read": lambda: _without(passes.OneRead),
    "amax_both": lambda: _without(passes.AmaxBoth),
    "Inductor's options": lambda: mock.patch.object(codegen, "tuning", lambda given: {}),
}


def measure(
    model: str, tokens: int, recipe: str, names: Sequence[str] = tuple(LEFT_OUT)
) -> dict[str, dict[str, Any]]:
    """The figures of :func:`benchmarks.traffic.count` by what is left out."""
    case = traffic.Case(recipe)
    rows = {}
    for name in names:
        with LEFT_OUT[name]():
            rows[name] = traffic.measure(model, tokens, [case])[case.label]
    return rows


def cells(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """GB, Triton kernels, gemms."""
    return format(row["est_bytes"] / 1e9, ".2f"), str(row["triton_kernels"]), str(row["gemms"])


def grid(model: str, tokens: int, found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Grid:
    """The table of what :func:`measure` gave for each recipe."""
    names = next(iter(found.values()))
    return Grid(
        f"{model}, 1 x {tokens} tokens, forward and backward on an H100",
        (
            "left out",
            *(f"{recipe}: {what}" for recipe in found for what in ("GB", "Triton kernels", "gemms")),
        ),
        tuple((name, *(cell for rows in found.values() for cell in cells(rows[name]))) for name in names),
    )


def main(argv: list[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.leave_out", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=traffic.MODELS, default="llama", help="the block (default llama)")
    parser.add_argument("--sequence", type=int, default=8192, help="tokens (default %(default)s)")
    args = parser.parse_args(argv)
    found = {recipe: measure(args.model, args.sequence, recipe) for recipe in RECIPES}
    grid(args.model, args.sequence, found).print()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
