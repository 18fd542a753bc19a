"""What :mod:`benchmarks.traffic` counts: blocks at the widths of Llama 3 8B, on the meta device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, FFN, HEADS, KV_HEADS, HEAD = 4096, 14336, 32, 8, 128
#: Features of the layer of :class:`NormLinear`.
OUT = 8192


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]"""
        return F.rms_norm(x, (DIM,), self.weight, 1e-5)


class Mlp(nn.Module):
    """Norm, SwiGLU and residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm()
        self.gate = nn.Linear(DIM, FFN, bias=False)
        self.up = nn.Linear(DIM, FFN, bias=False)
        self.down = nn.Linear(FFN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]"""
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Attention in front of an :class:`Mlp`.

    As in a model of many blocks, the rotation of RoPE is an input. Attention is one opaque operator, the
    flash kernel that CUDA would choose; it takes grouped heads as they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm()
        self.q = nn.Linear(DIM, HEADS * HEAD, bias=False)
        self.k = nn.Linear(DIM, KV_HEADS * HEAD, bias=False)
        self.v = nn.Linear(DIM, KV_HEADS * HEAD, bias=False)
        self.o = nn.Linear(HEADS * HEAD, DIM, bias=False)
        self.mlp = Mlp()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, S, D], and twice [1, S, 1, E/2] -> [B, S, D]"""
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (-1, HEAD)) for layer in (self.q, self.k, self.v))
        heads = (t.transpose(1, 2) for t in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        mixed = torch.ops.aten._scaled_dot_product_flash_attention(*heads, 0.0, True)[0]
        return self.mlp(x + self.o(mixed.transpose(1, 2).flatten(2)))


class NormLinear(nn.Module):
    """LayerNorm, a layer with a bias, a sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(DIM), nn.Linear(DIM, OUT)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, OUT]"""
        return torch.sigmoid(self.linear(self.norm(x)))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: [B, S, H, E], and twice [1, S, 1, E/2] -> [B, S, H, E]"""
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def block(name: str, tokens: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A block in bfloat16 and its inputs, one sequence: ``llama``, ``mlp`` or ``norm_linear``."""
    kind = {"llama": Llama, "mlp": Mlp, "norm_linear": NormLinear}[name]
    with torch.device("meta"):
        model = kind().to(torch.bfloat16)
        x = torch.empty(1, tokens, DIM, dtype=torch.bfloat16, requires_grad=True)
        rotation = tuple(torch.empty(1, tokens, 1, HEAD // 2) for _ in range(2 if name == "llama" else 0))
    return model, (x, *rotation)
