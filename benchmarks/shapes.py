"""The gemms of a Llama block, forward and backward: shapes to measure and to predict.

A layer with input [M, K] and weight [N, K] has three gemms ``[m, k] x [k, n]``: ``output`` [M, K] x [K, N],
``grad_input`` [M, N] x [N, K] and ``grad_weight`` [N, M] x [M, K]. Layers that read one input (q, k and v; gate and up) may
run as one, whose N is the sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from f8fx.demo.model import DecoderConfig
from f8fx.recipe import ROLES, Role

#: Square gemms, thin ones and small ones, which tell a cost model's constants apart.
PROBES = (
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (16384, 16384, 4096),
    (8192, 1024, 8192),
    (8192, 8192, 1024),
    (1024, 8192, 8192),
    (128, 4096, 4096),
    (16, 8192, 8192),
)


@dataclass(frozen=True)
class GemmShape:
    """A gemm [m, k] x [k, n] and what it is to its layer, which says how its operands lie in memory."""

    role: Role
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        """Two for each multiply-add."""
        return 2 * self.m * self.k * self.n


def layers(config: DecoderConfig, merged: bool) -> dict[str, tuple[int, int]]:
    """(K, N) of each layer of a block, by name."""
    dim, ffn, kv = config.dim, config.ffn_dim, config.kv_heads * config.head_dim
    rest = {"o": (dim, dim), "down": (ffn, dim)}
    if merged:
        return {"qkv": (dim, dim + 2 * kv), "gate_up": (dim, 2 * ffn), **rest}
    return {"q": (dim, dim), "k": (dim, kv), "v": (dim, kv), "gate": (dim, ffn), "up": (dim, ffn), **rest}


def of_layer(tokens: int, k: int, n: int) -> list[GemmShape]:
    """The three gemms of a layer."""
    shapes = {"output": (tokens, k, n), "grad_input": (tokens, n, k), "grad_weight": (n, tokens, k)}
    return [GemmShape(role, *shapes[role]) for role in ROLES]


def of_block(config: DecoderConfig, tokens: int, merged: bool) -> list[GemmShape]:
    """All gemms of a block, layer by layer; equal ones as often as they run."""
    return [gemm for k, n in layers(config, merged).values() for gemm in of_layer(tokens, k, n)]


def distinct(configs: Iterable[DecoderConfig], tokens: int) -> list[GemmShape]:
    """The gemms of several blocks, merged and not, each once."""
    every = [g for c in configs for merged in (True, False) for g in of_block(c, tokens, merged)]
    return list(dict.fromkeys(every))
