"""Models to ask ``f8fx explain`` about: ``f8fx explain f8fx.demo.examples:llama3_8b --target h100``.

They live on the meta device, so they take no memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .model import DecoderBlock, DecoderConfig


def llama3_8b(sequence: int = 8192) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """One block of Llama 3 8B, with an input of one sequence."""
    return _block("llama3_8b", sequence)


def llama3_70b(sequence: int = 8192) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """One block of Llama 3 70B, with an input of one sequence."""
    return _block("llama3_70b", sequence)


def _block(name: str, sequence: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = DecoderConfig.named(name)
    with torch.device("meta"):
        block = DecoderBlock(config).to(torch.bfloat16)
        x = torch.empty(1, sequence, config.dim, dtype=torch.bfloat16, requires_grad=True)
    return block, (x,)
