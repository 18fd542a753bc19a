"""Memory traffic and launches of a Llama-3-8B block, counted without a GPU: ``python -m benchmarks.traffic``.

One forward and backward at batch 1 and 8192 tokens, as Inductor would run it on an H100: kernels, the least bytes
they move outside the gemms, bytes saved for the backward, gemm launches; bf16 against every recipe.
Counted, not measured: times are for :mod:`benchmarks.gpu`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.codegen import generate, h100, halves
from f8fx.demo.examples import llama3_8b
from f8fx.recipe import PRESETS

#: (label, options); ``None`` is the graph without f8fx.
CASES: tuple[tuple[str, dict[str, Any] | None], ...] = (
    ("bf16", None),
    *((f"{name}, lean", {"recipe": name}) for name in PRESETS),
    *((f"{name}, fast", {"recipe": name, "save": "fast"}) for name in PRESETS),
)


def _flash(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """The causal flash kernel that CUDA would choose, as one opaque operator."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


def count(model: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any] | None) -> dict[str, Any]:
    """Kernels and bytes of forward and backward of a model on the meta device."""
    with mock.patch.object(F, "scaled_dot_product_attention", _flash):
        graphs, saved = halves(model, *args, float8=options is not None, **(options or {}))
    with h100():
        generated = [generate(graph, backward) for graph, backward in zip(graphs, (False, True), strict=True)]
    triton = [kernel for half in generated for kernel in half.triton]
    names = [kernel.name for half in generated for kernel in half.kernels]
    return {
        "triton_kernels": len(triton),
        "bytes": sum(kernel.bytes for kernel in triton),
        "saved_bytes": saved,
        "gemms": sum(name.rpartition(".")[2] in ("mm", "addmm", "_scaled_mm") for name in names),
    }


def main(argv: list[str] | None = None) -> int:
    """Prints the table; ``--json FILE`` keeps the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.traffic", description=__doc__)
    parser.add_argument("--sequence", type=int, default=8192, help="tokens (default 8192)")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args(argv)
    table = Table(title=f"Llama-3-8B block, 1 x {args.sequence} tokens, forward and backward on an H100")
    for column in ("", "Triton kernels", "least GB they move", "saved MB", "gemms"):
        table.add_column(column, justify="right" if column else "left")
    rows = {}
    for label, options in CASES:
        row = rows[label] = count(*llama3_8b(args.sequence), options)
        table.add_row(
            label,
            str(row["triton_kernels"]),
            f"{row['bytes'] / 1e9:.2f}",
            f"{row['saved_bytes'] / 1e6:.0f}",
            str(row["gemms"]),
        )
    Console().print(table)
    if args.json:
        Path(args.json).write_text(json.dumps({"sequence": args.sequence, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
