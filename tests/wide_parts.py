"""What models are made of, drawn at random: parts of the networks of :mod:`tests.wide_nets`.

Attention, gates, weights that are computed, reshapes, sums of experts, results that are written to.
Each takes and gives ``[..., tokens, dim]``.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    F.silu,
    F.gelu,
    lambda x: F.gelu(x, approximate="tanh"),
    lambda x: F.relu(x).square(),
    F.relu,
    torch.tanh,
    F.mish,
    F.leaky_relu,
    F.hardswish,
    lambda x: x * torch.sigmoid(1.702 * x),
)


def rotated(x: Tensor, kind: str) -> Tensor:
    """Rotary embeddings of [batch, heads, tokens, width]."""
    tokens, width = x.shape[-2:]
    place = torch.arange(tokens, dtype=torch.float32)
    angles = place[:, None] / 100 ** (torch.arange(width // 2) / (width // 2))
    if kind == "pairs":
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)
    cos, sin = (f(torch.cat([angles, angles], -1)).to(x.dtype) for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Attention(nn.Module):
    """Of one sequence, or to what another layer made of it; heads may share keys and values."""

    def __init__(self, draw: random.Random, dim: int) -> None:
        super().__init__()
        self.heads = draw.choice((2, 4))
        self.kv_heads = draw.choice((self.heads, self.heads // 2))
        self.width = draw.choice((16, 16, 32))
        self.rope = draw.choice(("none", "halves", "pairs"))
        self.fused = draw.random() < 0.4
        self.scores = draw.random() < 0.2
        self.across = draw.random() < 0.2
        q, kv = self.heads * self.width, self.kv_heads * self.width
        bias = draw.random() < 0.5
        self.sizes = [q, kv, kv]
        if self.fused:
            self.qkv = nn.Linear(dim, sum(self.sizes), bias=bias)
        else:
            self.q = nn.Linear(dim, q, bias=bias)
            self.k, self.v = (nn.Linear(dim, kv, bias=bias and draw.random() < 0.8) for _ in range(2))
        self.o = nn.Linear(q, dim, bias=draw.random() < 0.5)
        self.norms = nn.ModuleList(
            [nn.RMSNorm(self.width), nn.RMSNorm(self.width)] if draw.random() < 0.3 else []
        )
        self.gate = nn.Linear(dim, q) if draw.random() < 0.25 else None

    def forward(self, x: Tensor) -> Tensor:
        other = torch.tanh(x) if self.across else x
        if self.fused:
            q, k, v = self.qkv(x).split(self.sizes, -1)
        else:
            q, k, v = self.q(x), self.k(other), self.v(other)
        q, k, v = (each.unflatten(-1, (-1, self.width)) for each in (q, k, v))
        if len(self.norms):
            q, k = self.norms[0](q), self.norms[1](k)
        q, k, v = (each.transpose(-3, -2) for each in (q, k, v))
        if self.rope != "none":
            q, k = rotated(q, self.rope), rotated(k, self.rope)
        if self.kv_heads < self.heads:
            k, v = (each.repeat_interleave(self.heads // self.kv_heads, -3) for each in (k, v))
        if self.scores:
            y = torch.softmax(q @ k.mT * self.width**-0.5, -1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=not self.across)
        y = y.transpose(-3, -2).flatten(-2)
        if self.gate is not None:
            y = y * torch.sigmoid(self.gate(x))
        return self.o(y)


class Gated(nn.Module):
    """SwiGLU and its kin, from one layer or two, or without a gate."""

    def __init__(self, draw: random.Random, dim: int) -> None:
        super().__init__()
        hidden = draw.choice((48, 64, 96, 72))
        bias = draw.random() < 0.4
        self.kind = draw.choice(("two", "one", "one", "interleaved", "plain", "plain"))
        self.act = draw.choice(_ACTIVATIONS)
        if self.kind == "two":
            self.gate, self.up = (nn.Linear(dim, hidden, bias=bias) for _ in range(2))
        else:
            self.up = nn.Linear(dim, hidden * (1 if self.kind == "plain" else 2), bias=bias)
        self.down = nn.Linear(hidden, dim, bias=draw.random() < 0.4)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "two":
            return self.down(self.act(self.gate(x)) * self.up(x))
        up = self.up(x)
        if self.kind == "plain":
            return self.down(self.act(up))
        a, b = (up[..., ::2], up[..., 1::2]) if self.kind == "interleaved" else up.chunk(2, -1)
        return self.down(self.act(a) * b)


class Parallel(nn.Module):
    """Attention and gate of one norm."""

    def __init__(self, draw: random.Random, dim: int) -> None:
        super().__init__()
        self.a, self.b = Attention(draw, dim), Gated(draw, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


class Computed(nn.Module):
    """Weights that are computed: updated by low rank, normed, masked, cast, in parts, joined, transposed."""

    def __init__(self, draw: random.Random, dim: int) -> None:
        super().__init__()
        self.kind = draw.choice(("lora", "branch", "normed", "parts", "masked", "joined", "cast", "tied"))
        self.hidden = draw.choice((32, 64, 48))
        self.w = nn.Parameter(torch.randn(2 * self.hidden, dim) * dim**-0.5)
        self.v = nn.Parameter(torch.randn(dim, self.hidden) * self.hidden**-0.5)
        self.a, self.b = (nn.Parameter(torch.randn(*s) * 0.2) for s in ((16, dim), (2 * self.hidden, 16)))
        self.g = nn.Parameter(torch.rand(2 * self.hidden, 1) + 0.5)
        if draw.random() < 0.5 and self.kind in ("lora", "branch"):
            self.w.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "tied":
            w = self.w[: self.hidden]
            up, other = F.linear(x, w), F.linear(torch.tanh(x), w)
            return F.linear(torch.tanh(up), w.t()) + F.linear(F.silu(other), self.v)
        if self.kind == "parts":
            a, b = (F.linear(x, part) for part in self.w.chunk(2))
        else:
            both = F.linear(x, self._weight())
            if self.kind == "branch":
                both = both + F.linear(F.linear(x, self.a), self.b) * 0.25
            a, b = both.chunk(2, -1)
        return F.linear(torch.sigmoid(a) * b, self.v)

    def _weight(self) -> Tensor:
        w = self.w
        match self.kind:
            case "lora":
                return w + 0.5 * (self.b @ self.a)
            case "normed":
                return self.g * w / w.norm(dim=1, keepdim=True)
            case "masked":
                return w * (w.abs() > 0.02)
            case "cast":
                return (w.float() * 1.5).to(w.dtype)
            case "joined":
                return torch.cat([w[self.hidden :], w[: self.hidden] * 2])
        return w


class Mixed(nn.Module):
    """Layers over tokens, over groups of them, over a mean, by einsum, of columns, as ``x @ w``."""

    def __init__(self, draw: random.Random, dim: int, tokens: int) -> None:
        super().__init__()
        kinds = ["mean", "einsum", "matmul", "columns", "slices", "stacked", "tokens", "tokens"]
        self.kind = draw.choice([*kinds, "pairs"] if tokens % 2 == 0 else kinds)
        self.layer = nn.Linear(dim, dim, bias=draw.random() < 0.5)
        self.over = nn.Linear(tokens, tokens, bias=draw.random() < 0.5)
        self.pair = nn.Linear(2 * dim, 2 * dim)
        self.narrow = nn.Linear(dim // 2, dim // 2) if dim % 32 == 0 else nn.Linear(dim, dim)
        self.heads = nn.Parameter(torch.randn(2, dim, 16) * dim**-0.5)
        self.out = nn.Parameter(torch.randn(2, 16, dim) * 0.2)
        self.w = nn.Parameter(torch.randn(dim, dim) * dim**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "mean":
                mean = x.mean(-2, keepdim=True)
                return self.layer(mean).expand_as(x) * torch.sigmoid(self.layer(mean.expand_as(x)))
            case "einsum":
                heads = torch.einsum("btd,hdk->bhtk", x, self.heads)
                return torch.einsum("bhtk,hkd->btd", heads, self.out)
            case "matmul":
                return F.silu(x @ self.w) @ self.w.t()
            case "columns":
                return self.layer(torch.stack([x[..., ::2], x[..., 1::2]], -2).flatten(-2))
            case "slices":
                return self._slices(x)
            case "stacked":
                return self.layer(torch.stack([x, torch.tanh(x)], 0)).sum(0)
            case "pairs":
                return self.pair(x.reshape(x.shape[0], -1, 2 * x.shape[-1])).reshape(x.shape)
        return F.gelu(self.over(x.transpose(-1, -2))).transpose(-1, -2)

    def _slices(self, x: Tensor) -> Tensor:
        width = self.narrow.in_features
        if width == x.shape[-1]:
            return self.narrow(x.flip(-2))
        a, b = x[..., :width], x[..., width:]
        return torch.cat([self.narrow(a) * b, torch.tanh(self.narrow(b))], -1)


class Routed(nn.Module):
    """Projections that are added up, mostly by the shares that a softmax gives them."""

    def __init__(self, draw: random.Random, dim: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Linear(dim, dim, bias=draw.random() < 0.5) for _ in range(draw.choice((2, 3)))
        )
        self.router = nn.Linear(dim, len(self.experts))
        self.inplace = draw.random() < 0.5
        self.plain = draw.random() < 0.3

    def forward(self, x: Tensor) -> Tensor:
        if self.plain:
            return sum(expert(x) for expert in self.experts)
        shares = torch.softmax(self.router(x).float(), -1).to(x.dtype)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            part = expert(x) * shares[..., index, None]
            if self.inplace:
                y += part
            else:
                y = y + part
        return y


class InPlace(nn.Module):
    """Results that are written to, and a buffer."""

    mean: Tensor

    def __init__(self, draw: random.Random, dim: int) -> None:
        super().__init__()
        self.kind = draw.choice(("relu", "add", "part", "buffer", "mul"))
        self.a, self.b = nn.Linear(dim, dim, bias=draw.random() < 0.5), nn.Linear(dim, dim)
        self.register_buffer("mean", torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        match self.kind:
            case "relu":
                return self.b(F.relu_(y))
            case "add":
                y.add_(x)
                return self.b(y) + y
            case "part":
                y = torch.tanh(y).clone()
                y[..., :16] = 0.5
                return self.b(y)
            case "buffer":
                with torch.no_grad():
                    self.mean.lerp_(y.flatten(0, -2).mean(0), 0.1)
                return self.b(F.silu(y - self.mean))
        z = y.clone()
        z.mul_(torch.sigmoid(y))
        return self.b(z)
