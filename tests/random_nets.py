"""Random small networks: layers of one input, with and without biases, and elementwise functions of what they give.

What the tests of single passes do not think of: two expressions that are equal, a part that is read by two layers, a gradient
that is a sum of many, an activation that nothing of the forward reads.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import bf16

_UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    F.silu,
    F.gelu,
    lambda x: F.gelu(x, approximate="tanh"),
    F.softplus,
    F.elu,
    F.relu,
    torch.tanh,
    torch.sigmoid,
    torch.neg,
    torch.abs,
    lambda x: x * 0.5,
    lambda x: x.clamp(-0.5, 0.5),
    lambda x: (x * x).clamp(max=4),
    lambda x: torch.exp(x.clamp(max=1)),
    lambda x: (x.float().sin() * 1.5).to(x.dtype),
)
_BINARY: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    torch.add,
    torch.sub,
    torch.mul,
    torch.maximum,
    lambda x, y: x + x * y,
    lambda x, y: torch.where(x > 0, y, x * 0.5),
)


class RandomNet(nn.Module):
    """One or two blocks: a norm perhaps, layers that read it, functions of their results, a layer back, a residual perhaps.

    Args:
        draw: what it is drawn with.
    """

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.draw = draw
        self.layers = nn.ModuleList()
        self.steps: list[tuple[Callable[..., Tensor], tuple[int, ...]]] = []
        self.dim = draw.choice((32, 48, 64, 80))
        self.widths = [self.dim]
        for _ in range(draw.choice((1, 2))):
            self._block()
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for function, places in self.steps:
            values.append(function(*(values[place] for place in places)))
        return values[-1]

    def _step(self, function: Callable[..., Tensor], *places: int, width: int) -> int:
        self.steps.append((function, places))
        self.widths.append(width)
        return len(self.widths) - 1

    def _module(self, module: nn.Module, place: int, width: int) -> int:
        self.layers.append(module)
        return self._step(module, place, width=width)

    def _linear(self, place: int, width: int) -> int:
        layer = nn.Linear(self.widths[place], width, bias=self.draw.random() < 0.6)
        return self._module(layer, place, width)

    def _block(self) -> None:
        draw, place = self.draw, len(self.widths) - 1
        if draw.random() < 0.5:
            norm = draw.choice((nn.LayerNorm, nn.RMSNorm))
            place = self._module(norm(self.dim), place, self.dim)
        width = draw.choice((32, 48, 64, 96))
        found = [
            self._linear(place, draw.choice((width, width, width, 32, 192)))
            for _ in range(draw.randint(1, 4))
        ]
        if draw.random() < 0.4:
            self._parts(found)
        for _ in range(draw.randint(2, 6)):
            self._function(found)
        y, *others = (self._linear(each, self.dim) for each in found[-draw.choice((1, 1, 2)) :])
        for other in (*others, *([0] if draw.random() < 0.6 else [])):
            y = self._step(torch.add, y, other, width=self.dim)

    def _parts(self, found: list[int]) -> None:
        """One of the values in two halves instead."""
        whole = self.draw.choice(found)
        half = self.widths[whole] // 2
        if half % 16:
            return
        found.remove(whole)
        takes_slices = self.draw.random() < 0.5
        for index in (0, 1):

            def part(x: Tensor, index: int = index) -> Tensor:
                return x[..., index * half :][..., :half] if takes_slices else x.chunk(2, -1)[index]

            found.append(self._step(part, whole, width=half))

    def _function(self, found: list[int]) -> None:
        draw = self.draw
        place = draw.choice(found)
        width = self.widths[place]
        alike = [other for other in found if self.widths[other] == width]
        kind = draw.random()
        if kind < 0.45:
            found.append(self._step(draw.choice(_UNARY), place, width=width))
        elif kind < 0.9:
            found.append(self._step(draw.choice(_BINARY), place, draw.choice(alike), width=width))
        elif width + self.widths[found[-1]] <= 256:
            both = width + self.widths[found[-1]]
            found.append(self._step(lambda *parts: torch.cat(parts, -1), place, found[-1], width=both))


def random_case(seed: int) -> tuple[RandomNet, Tensor, dict[str, Any]]:
    """A network, its input, and options to compile it with."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    net = RandomNet(draw).to(bf16)
    shape = draw.choice(((48,), (3, 16), (37,), (2, 25), (1,), (130,)))
    x = torch.randn(*shape, net.dim, dtype=bf16, requires_grad=draw.random() < 0.85)
    options = {
        "recipe": draw.choice(("rowwise", "rowwise", "rowwise", "tensorwise", "rowwise_with_gw_hp")),
        "bias": draw.choice(("torchao", "in_gemm")),
        "save": draw.choice(("lean", "lean", "fast")),
        "merge": draw.choice(("auto", "auto", "never")),
        "rowwise_scales": draw.choice(("in_gemm", "in_gemm", "torchao")),
    }
    return net, x, options
