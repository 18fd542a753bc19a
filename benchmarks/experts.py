"""The SwiGLU experts of four mixtures, 8192 tokens: time, peak memory, bytes saved for backward.

``python -m benchmarks.experts``. bf16, torchao (its prototype for grouped matmuls, rowwise, the gradients of weights among them) and
f8fx with the option that ``--experts`` names, from the same weights, forward and backward. Rows are sorted by expert, as routing leaves them, and
their numbers are uneven; torchao wants multiples of 16, so all get those. Llama 4's experts each get all tokens, in batched matmuls
(Transformers multiplies those of no expert by zero), of which torchao has none. ``--quick`` leaves out torchao, whose kernels are
tuned for minutes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection
from typing import Any, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from f8fx.passes.experts import Experts as Option

from . import common, running, variants
from .common import Row
from .linear_sweep import print_verdicts
from .llama_block import CASE, grids, memory_of

NAME = "experts"
TOKENS = 8192
RECIPES = ("rowwise", "rowwise_with_gw_hp")
_GROUP = 16


class Mixture(NamedTuple):
    """The sizes of a mixture of experts.

    Attributes:
        chosen: how many experts a token goes to.
        batched: each gets as many rows, in one batched matmul.
    """

    experts: int
    chosen: int
    dim: int
    hidden: int
    batched: bool = False


MODELS = {
    "mixtral_8x7b": Mixture(8, 2, 4096, 14336),
    "deepseek_v2_lite": Mixture(64, 6, 2048, 1408),
    "qwen3_30b_a3b": Mixture(128, 8, 2048, 768),
    "llama4_scout": Mixture(16, 16, 5120, 8192, batched=True),
}
_TINY = {"tiny": Mixture(4, 2, 32, 48), "tiny, batched": Mixture(4, 4, 32, 48, batched=True)}


class Experts(nn.Module):
    """All experts of a layer, in bfloat16.

    Args:
        offsets: where the rows of each expert end.
    """

    offsets: Tensor

    def __init__(self, size: Mixture, offsets: Tensor) -> None:
        super().__init__()
        inward = size.experts, size.hidden, size.dim
        outward = size.experts, size.dim, size.hidden
        self.gate, self.up, self.down = (
            nn.Parameter(torch.randn(*shape, dtype=torch.bfloat16) / shape[-1] ** 0.5)
            for shape in (inward, inward, outward)
        )
        self.register_buffer("offsets", offsets)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, dim] -> [rows, dim]"""
        hidden = F.silu(self._layer(x, self.gate)) * self._layer(x, self.up)
        return self._layer(hidden, self.down)

    def _layer(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.grouped_mm(x, weight.mT, offs=self.offsets)


class BatchedExperts(nn.Module):
    """The same of as many rows each, gate and up in one matmul, weights as Transformers' Llama 4 has them."""

    def __init__(self, size: Mixture) -> None:
        super().__init__()
        inward = size.experts, size.dim, 2 * size.hidden
        outward = size.experts, size.hidden, size.dim
        self.gate_up, self.down = (
            nn.Parameter(torch.randn(*shape, dtype=torch.bfloat16) / shape[-2] ** 0.5)
            for shape in (inward, outward)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[rows, dim] -> [rows, dim]"""
        each = x.view(len(self.gate_up), -1, x.shape[-1])
        gate, up = torch.bmm(each, self.gate_up).chunk(2, -1)
        return torch.bmm(F.silu(gate) * up, self.down).view_as(x)


def experts_of(size: Mixture, device: str, tokens: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Experts, their input [rows, D], and a gradient of their output; the same ones every time."""
    torch.manual_seed(0)
    rows = tokens * size.chosen
    shares = torch.rand(size.experts) + 0.5
    ends = (torch.cumsum(shares / shares.sum(), 0) * (rows // _GROUP)).round().to(torch.int32) * _GROUP
    ends[-1] = rows
    with torch.device(device):
        module = BatchedExperts(size) if size.batched else Experts(size, ends.to(device))
        x = torch.randn(rows, size.dim, dtype=torch.bfloat16)
    return module, x.requires_grad_(), torch.randn_like(x)


def to_torchao(module: nn.Module, recipe: str) -> nn.Module:
    """The module with its weights wrapped by torchao's prototype, which knows one recipe."""
    if isinstance(module, BatchedExperts):
        raise NotImplementedError("torchao has no batched experts")
    if recipe != "rowwise":
        raise NotImplementedError(f"torchao has no {recipe} experts")
    from torchao.prototype.moe_training.config import Float8TrainingOpConfig, Float8TrainingRecipe
    from torchao.quantization import quantize_

    config = Float8TrainingOpConfig.from_recipe(Float8TrainingRecipe.FP8_ROWWISE)
    quantize_(module, config, filter_fn=lambda child, fqn: child is module)
    return module


def cases(quick: bool) -> list[dict[str, Any]]:
    """``rowwise`` first, which is all with ``--quick``."""
    recipes = RECIPES[:1] if quick else RECIPES
    return [
        {"model": model, "recipe": recipe, "checkpointing": False} for recipe in recipes for model in MODELS
    ]


def measure(
    model: str,
    recipe: str,
    checkpointing: bool = False,
    device: str = "cuda",
    tokens: int = TOKENS,
    seconds: float = 2.0,
    without: Collection[str] = (),
    experts: Option = "convert",
) -> Row:
    """Times all versions, then looks at the memory of each; those in ``without`` are left out."""
    module, x, grad = experts_of((MODELS | _TINY)[model], device, tokens)
    smoke = x.device.type == "cpu"
    found = variants.compare(
        module, x, grad, recipe, smoke, seconds, {"experts": experts}, to_torchao, without
    )
    memory = {name: memory_of(variant) for name, variant in found.variants.items()} if not smoke else {}
    return {**found.row(), "memory": memory, "tokens": tokens, "clocks": common.clocks()}


def summary(rows: list[Row]) -> dict[str, Any]:
    """Which versions were slower than which."""
    return variants.verdicts(rows, CASE)


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, smoke=True, ahead=True)
    choices = get_args(Option)[1:]
    parser.add_argument("--experts", choices=choices, default=choices[0], help="f8fx's option (%(default)s)")
    args = parser.parse_args(argv)
    if args.cpu_smoke:
        return smoke(args.experts)
    without = ["torchao"] if args.quick else []
    settings = {"tokens": TOKENS, "without": without, "experts": args.experts}
    call = functools.partial(measure, without=without, experts=args.experts)
    return running.run(args, NAME, cases(args.quick), call, summary, grids, settings, print_verdicts)


def smoke(experts: Option) -> int:
    """Runs tiny experts on CPU; times mean nothing and are not kept."""
    torch.set_num_threads(1)
    rows = []
    for model, recipe in itertools.product(_TINY, RECIPES):
        case: dict[str, Any] = {"model": model, "recipe": recipe, "checkpointing": False}
        rows.append({**case, **measure(**case, device="cpu", tokens=32, seconds=0.0, experts=experts)})
    return common.end_smoke(rows, grids({"rows": rows}))


if __name__ == "__main__":
    raise SystemExit(main())
