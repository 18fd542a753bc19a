"""Models to be explained."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from f8fx.demo.model import Decoder, DecoderConfig


class Mlp(nn.Module):
    """Two linear layers without bias and a relu between them."""

    def __init__(self, width: int = 2048, hidden: int = 4096) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


def meta_mlp(**sizes: int) -> Mlp:
    with torch.device("meta"):
        return Mlp(**sizes).bfloat16()


def meta_input(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def tiny_decoder() -> tuple[Decoder, Tensor]:
    return Decoder(DecoderConfig.named("tiny")).bfloat16(), torch.zeros(2, 16, dtype=torch.long)
