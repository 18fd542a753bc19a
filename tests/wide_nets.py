"""Random networks of the forms that models have: parts, norms around them, residuals, checkpoints.

Where :mod:`tests.random_nets` draws functions between layers, this draws what stands around them
(:mod:`tests.wide_parts`), recipes of one's own, and inputs that are not dense.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from f8fx.recipe import GemmSpec, QuantSpec, Recipe
from tests.helpers import bf16
from tests.wide_parts import Attention, Computed, Gated, InPlace, Mixed, Parallel, Routed


class Residual(nn.Module):
    """Norms around a part, perhaps checkpointed, and what it is added to.

    Args:
        ranks: of the input; attention is of three.
    """

    def __init__(self, draw: random.Random, dim: int, tokens: int, ranks: int) -> None:
        super().__init__()
        kinds: list[Callable[[], nn.Module]] = [
            lambda: Gated(draw, dim),
            lambda: Computed(draw, dim),
            lambda: Routed(draw, dim),
            lambda: InPlace(draw, dim),
        ]
        if ranks == 3:
            kinds += [lambda: Attention(draw, dim)] * 2
            kinds += [lambda: Parallel(draw, dim), lambda: Mixed(draw, dim, tokens)]
        self.part = draw.choice(kinds)()
        norms: list[Callable[[], nn.Module]] = [
            nn.Identity,
            lambda: nn.RMSNorm(dim),
            lambda: nn.LayerNorm(dim),
            lambda: nn.LayerNorm(dim, elementwise_affine=False),
            lambda: nn.RMSNorm(dim, elementwise_affine=False),
            lambda: nn.LayerNorm(dim, bias=False),
        ]
        self.before, self.after = draw.choice(norms)(), draw.choice([nn.Identity, *norms])()
        self.adds = draw.random() < 0.8
        self.scale = nn.Parameter(torch.rand(dim)) if draw.random() < 0.2 else None
        self.checkpointed = draw.random() < 0.2
        if self.checkpointed:  # attention as one operator would have the state of random numbers restored
            for module in self.modules():
                if isinstance(module, Attention):
                    module.scores = True

    def _forward(self, x: Tensor) -> Tensor:
        return self.after(self.part(self.before(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            y = checkpoint(self._forward, x, use_reentrant=False, preserve_rng_state=False)
        else:
            y = self._forward(x)
        if self.scale is not None:
            y = y * self.scale
        return x + y if self.adds else y


class WideNet(nn.Module):
    """A way in, one to three residual parts, and some of several results."""

    def __init__(self, draw: random.Random, shape: tuple[int, ...]) -> None:
        super().__init__()
        tokens, dim = shape[-2:]
        self.entry = draw.choice(("none", "none", "none", "linear", "turned", "permuted", "flip"))
        if len(shape) == 2 and self.entry == "permuted":
            self.entry = "linear"
        self.first = nn.Linear(dim, dim)
        self.parts = nn.ModuleList(
            Residual(draw, dim, tokens, len(shape)) for _ in range(draw.choice((1, 1, 2, 3)))
        )
        self.results = draw.choice(("one", "one", "hidden", "views", "input", "softmax", "logits", "sum"))
        self.head = nn.Linear(dim, draw.choice((32, 50, 128)), bias=draw.random() < 0.3)

    def forward(self, x: Tensor) -> Any:
        given = x
        if self.entry == "linear":
            x = self.first(x)
        elif self.entry == "turned":
            x = torch.tanh(x.mT.contiguous()).mT
        elif self.entry == "permuted":
            x = self.first(x.permute(1, 0, 2)).permute(1, 0, 2)
        elif self.entry == "flip":
            x = x.flip(0)
        hidden = [x := part(x) for part in self.parts]
        match self.results:
            case "hidden":
                return x, hidden[0], F.silu(hidden[0])
            case "views":
                return x, x.flatten(0, -2), x[..., :16]
            case "input":
                return x, given, given.flatten()
            case "softmax":
                return torch.softmax(self.head(x), -1)
            case "logits":
                return self.head(x[..., -1:, :]).float(), x
            case "sum":
                return self.head(x).float().logsumexp(-1).sum()
        return x


_ROW, _ROW_E5 = (QuantSpec(name, granularity="rowwise", power_of_2_scale=True) for name in ("e4m3", "e5m2"))
_ROW_ANY = QuantSpec("e4m3", granularity="rowwise")
_ALL, _ALL_E5, _ALL_2 = QuantSpec("e4m3"), QuantSpec("e5m2"), QuantSpec("e4m3", power_of_2_scale=True)
_ANY, _FAST = GemmSpec(_ROW_ANY, _ROW_ANY), GemmSpec(_ROW, _ROW, use_fast_accum=True)

#: Granularities and types that differ from operand to operand, and gemms that stay as they are.
RECIPES = (
    Recipe("any scale by rows", _ANY, _ANY, _ANY),
    Recipe("fast accumulation", _FAST, _FAST, _FAST),
    Recipe("e5m2 gradients", GemmSpec(_ROW, _ROW), GemmSpec(_ROW_E5, _ROW), GemmSpec(_ROW_E5, _ROW)),
    Recipe("whole gradients", GemmSpec(_ROW, _ROW, True), GemmSpec(_ALL_E5, _ALL), None),
    Recipe("whole output", GemmSpec(_ALL, _ALL), GemmSpec(_ROW_ANY, _ROW), GemmSpec(_ROW, _ROW)),
    Recipe("whole weights", GemmSpec(_ROW, _ALL), GemmSpec(_ROW, _ALL), GemmSpec(_ALL, _ROW)),
    Recipe("weights by rows", GemmSpec(_ALL, _ROW), GemmSpec(_ALL_E5, _ROW), GemmSpec(_ROW_E5, _ALL)),
    Recipe(
        "whole, powers of 2", GemmSpec(_ALL_2, _ALL_2), GemmSpec(_ALL_E5, _ALL_2), GemmSpec(_ALL_E5, _ALL_2)
    ),
    Recipe("e5m2 input", GemmSpec(_ROW_E5, _ROW), GemmSpec(_ROW, _ROW), GemmSpec(_ROW, _ROW_E5)),
    Recipe("output alone", GemmSpec(_ROW, _ROW), None, None),
    Recipe("gradients alone", None, GemmSpec(_ROW, _ROW), GemmSpec(_ROW_E5, _ROW_ANY)),
)
_PRESETS = ("rowwise",) * 7 + ("tensorwise",) * 4 + ("rowwise_with_gw_hp",) * 4


def _input(draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Transposed or a part of a wider tensor at times."""
    *batch, tokens, dim = shape
    x, way = torch.randn(shape, dtype=dtype), draw.random()
    if way < 0.1:
        x = torch.randn(*batch, dim, tokens, dtype=dtype).mT
    elif way < 0.2:
        x = torch.randn(*batch, tokens, 2 * dim, dtype=dtype)[..., :dim]
    return x.requires_grad_(draw.random() < 0.85)


def wide_case(seed: int) -> tuple[WideNet, Tensor, dict[str, Any]]:
    """A network, its input, and options to compile it with."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    dim = draw.choice((32, 64, 64, 80, 72))
    rows = draw.choice(((2, 16), (3, 17), (1, 32), (2, 24), (48,), (37,), (1,)))
    dtype = draw.choice((bf16, bf16, bf16, bf16, torch.float16))
    net = WideNet(draw, (*rows, dim)).to(dtype)
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
        if draw.random() < 0.05:
            parameter.requires_grad_(False)
    x = _input(draw, (*rows, dim), dtype)
    options = {
        "recipe": draw.choice((*_PRESETS, *RECIPES)),
        "bias": draw.choice(("torchao", "in_gemm")),
        "save": draw.choice(("lean", "lean", "fast")),
        "merge": draw.choice(("auto", "auto", "never")),
        "rowwise_scales": draw.choice(("in_gemm", "in_gemm", "torchao")),
        "pad": draw.choice(("auto", "auto", "never")),
        "kernels": draw.choice(("auto", "auto", "auto", "inductor")),
        "activations": draw.choice(("leave", "leave", "convert")),
    }
    return net, x, options
