"""One Llama block of the 8B and 70B shapes at sequence 8192: time, peak memory, bytes saved for backward.

bf16, torchao and f8fx from the same weights, forward and backward, with and without activation
checkpointing of the whole block. The block is :class:`f8fx.demo.model.DecoderBlock`; RoPE's tables are given to it, as in
Llama's own code: a block that computes them takes as long for that as for a gemm, since Inductor does it for every element.
Attention is what PyTorch takes by itself (on Hopper cuDNN's, as of torch 2.11).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from f8fx.demo.model import DecoderBlock, DecoderConfig, rotation

from . import common, running, variants
from .common import Grid, Row, console, show
from .linear_sweep import print_verdicts
from .variants import Variant

NAME = "llama_block"
CASE = ("model", "recipe", "checkpointing")
MODELS = ("llama3_8b", "llama3_70b")
SEQ = 8192
_SMOKE_SEQ = 32


class Checkpointed(nn.Module):
    """A module whose activations are computed again in the backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """The inner module's output."""
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[return-value]


class Placed(nn.Module):
    """A block with RoPE's tables for positions 0 .. seq-1."""

    cos: Tensor
    sin: Tensor

    def __init__(self, block: DecoderBlock, seq: int, device: torch.device) -> None:
        super().__init__()
        self.block = block
        for name, table in zip(
            ("cos", "sin"), rotation(seq, block.head_dim, block.rope_theta, device), strict=True
        ):
            self.register_buffer(name, table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]"""
        seq = x.shape[1]
        return self.block(x, (self.cos[:seq], self.sin[:seq]))  # type: ignore[no-any-return]


def cases(quick: bool) -> list[dict[str, Any]]:
    """What says most first; ``--quick`` leaves out what the rest predicts."""
    small, large = MODELS
    first, second, third = variants.RECIPES
    every = [
        *((small, recipe, False) for recipe in (first, second)),
        *((large, recipe, False) for recipe in (first, second)),
        (small, third, False),
        *((model, first, True) for model in MODELS),
    ]
    if not quick:
        every += itertools.product(MODELS, variants.RECIPES, (False, True))
    return [dict(zip(CASE, case, strict=True)) for case in dict.fromkeys(every)]


def block_of(model: str, device: str, seq: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A block in bfloat16, its input [1, seq, D], and a gradient of its output; the same ones every time."""
    torch.manual_seed(0)
    config = DecoderConfig.named(model)
    with torch.device(device):
        block = DecoderBlock(config).to(torch.bfloat16)
        x = torch.randn(1, seq, config.dim, dtype=torch.bfloat16)
    return Placed(block, seq, x.device), x.requires_grad_(), torch.randn_like(x)


def measure(
    model: str, recipe: str, checkpointing: bool, device: str = "cuda", seq: int = SEQ, seconds: float = 2.0
) -> Row:
    """Times all versions of one block, then looks at the memory of each."""
    block, x, grad = block_of(model, device, seq)
    if checkpointing:
        block = Checkpointed(block)
    smoke = x.device.type == "cpu"
    found = variants.compare(block, x, grad, recipe, smoke, seconds)
    memory = {name: memory_of(variant) for name, variant in found.variants.items()} if not smoke else {}
    return {**found.row(), "memory": memory, "seq": seq, "clocks": common.clocks()}


def memory_of(variant: Variant) -> dict[str, int]:
    """Bytes on the GPU beyond weights and input.

    Returns:
        ``saved``: held from forward to backward, without the output; ``peak``: most at any time in one
        step, gradients and output included.
    """
    device = variant.x.device
    torch.cuda.synchronize(device)
    start = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    output = variant.model(variant.x)
    torch.cuda.synchronize(device)
    saved = torch.cuda.memory_allocated(device) - start - output.untyped_storage().nbytes()
    gradients = torch.autograd.grad(output, [variant.x, *variant.parameters], variant.grad)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - start
    del output, gradients
    return {"saved": saved, "peak": peak}


def grids(result: dict[str, Any]) -> list[Grid]:
    """Speedups, and memory."""
    rows = sorted(result["rows"], key=lambda r: (r["checkpointing"], r["model"], r["recipe"]))
    labels = [f"{r['model']} {r['recipe']}" + (", checkpointed" if r["checkpointing"] else "") for r in rows]
    speed = tuple(
        (
            case,
            *(show(row["ms"].get(name)) for name in variants.NAMES),
            *(
                show(variants.speedup(row, *pair))
                for pair in (
                    ("torchao", "bf16"),
                    ("f8fx", "bf16"),
                    ("f8fx", "torchao"),
                    ("f8fx_auto", "bf16"),
                )
            ),
        )
        for case, row in zip(labels, rows, strict=True)
    )
    headers = ("", *(f"{name} ms" for name in variants.NAMES))
    ratios = ("torchao / bf16", "f8fx / bf16", "f8fx / torchao", "auto / bf16")
    tables = [
        Grid("Forward and backward of one block; speedups (above 1 is faster)", (*headers, *ratios), speed)
    ]
    memory = tuple(
        (case, *(_mib(row, name, what) for what in ("saved", "peak") for name in variants.NAMES))
        for case, row in zip(labels, rows, strict=True)
        if row["memory"]
    )
    if memory:
        titles = tuple(f"{name} {what}" for what in ("saved", "peak") for name in variants.NAMES)
        tables.append(Grid("MiB saved for backward, and at the peak of a step", ("", *titles), memory))
    return tables


def _mib(row: Row, name: str, what: str) -> str:
    found = row["memory"].get(name)
    return show(found[what] / 2**20 if found else None, ",.0f")


def summary(rows: list[Row]) -> dict[str, Any]:
    """Where ``auto`` was wrong, and where f8fx saved more than bf16 under checkpointing."""
    more = [
        {**{key: row[key] for key in CASE}, "bf16": memory["bf16"]["saved"], name: memory[name]["saved"]}
        for row in rows
        if row["checkpointing"] and "bf16" in (memory := row["memory"])
        for name in ("f8fx", "f8fx_auto")
        if name in memory and memory[name]["saved"] > memory["bf16"]["saved"]
    ]
    return {**variants.verdicts(rows, CASE), "checkpointing_saves_more_than_bf16": more}


def main(argv: list[str] | None = None) -> int:
    args = common.parser(__doc__, smoke=True, ahead=True).parse_args(argv)
    if args.cpu_smoke:
        return smoke()
    return running.run(args, NAME, cases(args.quick), measure, summary, grids, {"seq": SEQ}, _tell)


def _tell(found: dict[str, Any]) -> None:
    print_verdicts(found)
    for entry in found["checkpointing_saves_more_than_bf16"]:
        console.print(f"  saves more than bf16 under checkpointing: {entry}", markup=False)


def smoke() -> int:
    """Runs a tiny block on CPU, plain and checkpointed; times mean nothing and are not kept."""
    torch.set_num_threads(1)
    rows = []
    for checkpointing in (False, True):
        case: dict[str, Any] = dict(zip(CASE, ("tiny", "tensorwise", checkpointing), strict=True))
        rows.append({**case, **measure(**case, device="cpu", seq=_SMOKE_SEQ, seconds=0.0)})
    return common.end_smoke(rows, grids({"rows": rows}))


if __name__ == "__main__":
    raise SystemExit(main())
