"""A Llama-style decoder in plain PyTorch: what the demo trains, and what tests and benchmarks measure.

RMSNorm, rotary position embedding (RoPE), grouped-query attention (GQA) through
``F.scaled_dot_product_attention``, SwiGLU. There is nothing of f8fx in it: it is the model a user
would bring. It has no buffers, so its ``state_dict`` is its parameters and it can be built on
``device="meta"``.

Letters used for shapes: B batch, S sequence, D ``dim``, H ``heads``, K ``kv_heads``, E ``head_dim``
(= D / H), F ``ffn_dim``, V ``vocab``.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DecoderConfig:
    """The sizes of a decoder.

    Attributes:
        vocab: number of tokens; 256 for bytes.
        dim: width of the residual stream.
        layers: number of blocks.
        heads: query heads; ``dim / heads`` is the width of a head and must be even (RoPE).
        kv_heads: key and value heads, each shared by ``heads / kv_heads`` query heads.
        ffn_dim: width inside the SwiGLU feed-forward.
        max_seq: longest sequence :meth:`Decoder.forward` takes.
        rope_theta: base of RoPE's frequencies.
        norm_eps: added to the mean square in RMSNorm.
        tied: the output projection uses the embedding's weight.

    Raises:
        ValueError: for sizes that do not fit each other.
    """

    vocab: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    ffn_dim: int = 352
    max_seq: int = 256
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = False

    def __post_init__(self) -> None:
        for field in ("vocab", "dim", "layers", "heads", "kv_heads", "ffn_dim", "max_seq"):
            if getattr(self, field) < 1:
                raise ValueError(f"DecoderConfig.{field} must be at least 1, got {getattr(self, field)}")
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"DecoderConfig: dim / heads must be an even integer (RoPE turns pairs), "
                f"got {self.dim} / {self.heads}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"DecoderConfig: heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @property
    def parameters(self) -> int:
        """Number of parameters of ``Decoder(self)``."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * self.head_dim
        block = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        embeddings = self.vocab * self.dim * (1 if self.tied else 2)
        return self.layers * block + embeddings + self.dim

    def replace(self, **changes: Any) -> DecoderConfig:
        """A copy with some sizes changed, checked like a new one."""
        return dataclasses.replace(self, **changes)

    @staticmethod
    def named(name: str) -> DecoderConfig:
        """The preset of that name.

        Raises:
            ValueError: for an unknown name, naming the nearest one.
        """
        if name not in PRESETS:
            near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"model must be one of {', '.join(map(repr, PRESETS))}, got {name!r}{hint}")
        return PRESETS[name]


#: Sizes by name. ``tiny`` is for tests, ``small`` trains on a laptop's CPU, ``1b`` has about 1e9
#: parameters in five blocks of Llama-3-8B's widths, so that each matmul is one float8 is meant for.
#: The last three are the published shapes; benchmarks build one :class:`DecoderBlock` of them.
PRESETS: Mapping[str, DecoderConfig] = MappingProxyType(
    {
        "tiny": DecoderConfig(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=176, max_seq=64),
        "small": DecoderConfig(dim=128, layers=4, heads=4, kv_heads=2, ffn_dim=352, max_seq=256),
        "1b": DecoderConfig(dim=4096, layers=5, heads=32, kv_heads=8, ffn_dim=14336, max_seq=2048),
        "llama3_8b": DecoderConfig(
            vocab=128_256,
            dim=4096,
            layers=32,
            heads=32,
            kv_heads=8,
            ffn_dim=14336,
            max_seq=8192,
            rope_theta=500_000.0,
        ),
        "llama3_70b": DecoderConfig(
            vocab=128_256,
            dim=8192,
            layers=80,
            heads=64,
            kv_heads=8,
            ffn_dim=28672,
            max_seq=8192,
            rope_theta=500_000.0,
        ),
        "llama3_405b": DecoderConfig(
            vocab=128_256,
            dim=16384,
            layers=126,
            heads=128,
            kv_heads=8,
            ffn_dim=53248,
            max_seq=8192,
            rope_theta=500_000.0,
        ),
    }
)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]"""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


Rotation = tuple[Tensor, Tensor]


def rotation(seq: int, head_dim: int, theta: float, device: torch.device) -> Rotation:
    """Cosine and sine of RoPE's angles for positions 0 .. seq-1, each [S, E/2] in float32."""
    pair = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    position = torch.arange(seq, device=device, dtype=torch.float32)
    angle = position[:, None] * theta ** (-pair / head_dim)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Turns the pairs (x[e], x[e + E/2]) of [B, heads, S, E] by their position's angles."""
    cos, sin = by
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query self-attention with RoPE."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        kv_dim = config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, by: Rotation) -> Tensor:
        """[B, S, D] -> [B, S, D]"""
        batch, seq, dim = x.shape

        def split(projected: Tensor, heads: int) -> Tensor:
            return projected.view(batch, seq, heads, -1).transpose(1, 2)

        q = rotate(split(self.q_proj(x), self.heads), by)
        k = rotate(split(self.k_proj(x), self.kv_heads), by)
        v = split(self.v_proj(x), self.kv_heads)
        grouped = self.heads != self.kv_heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, seq, dim))


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]"""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderBlock(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and beside a residual.

    Usable alone: without ``by`` it computes its own rotation for positions 0 .. S-1.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim, self.rope_theta = config.head_dim, config.rope_theta
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, by: Rotation | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]"""
        if by is None:
            by = rotation(x.shape[1], self.head_dim, self.rope_theta, x.device)
        x = x + self.attention(self.attention_norm(x), by)
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    """Embedding, blocks, norm, output projection.

    Weights start from a normal distribution of standard deviation 0.02; the projections that write
    to the residual stream (``o_proj``, ``down_proj``) from one smaller by sqrt(2 * layers), as in
    GPT-2, so that the stream's variance does not grow with depth. Embeddings start from one of 1, as in TorchTitan's
    Llama, unless they are the output projection too: the first norms amplify the gradients of a stream as
    small as 0.02, and the rounding errors in them, fifty times.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(DecoderBlock(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / (2 * config.layers) ** 0.5 if into_stream else 0.02
                nn.init.normal_(weight, std=std)
        if config.tied:
            self.output.weight = self.embedding.weight
        else:
            nn.init.normal_(self.embedding.weight)

    def forward(self, tokens: Tensor, by: Rotation | None = None) -> Tensor:
        """Token numbers [B, S] -> logits [B, S, V] of each next token.

        Args:
            by: RoPE's tables, where they are at hand; otherwise they are computed.

        Raises:
            ValueError: if S is larger than the config's ``max_seq``.
        """
        config = self.config
        if tokens.shape[1] > config.max_seq:
            raise ValueError(f"sequence of {tokens.shape[1]} tokens, but max_seq is {config.max_seq}")
        x = self.embedding(tokens)
        if by is None:
            by = rotation(tokens.shape[1], config.head_dim, config.rope_theta, tokens.device)
        for block in self.blocks:
            x = block(x, by)
        return self.output(self.norm(x))
