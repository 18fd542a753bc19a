"""The least bytes that the kernels around the gemms of a block can move, by hand: one line per kernel.

What is assumed:

* gemms and attention are as they are; everything between two of them is one kernel, which reads its inputs
  once and writes what others need, as long as it needs no statistic of a whole tensor;
* a **tensorwise** operand is read twice, for its amax and for its cast, unless the kernel that writes it in
  bfloat16 anyway takes the amax along; instead of reading a product such as SwiGLU's, it is computed twice;
* a **rowwise** operand is read once, since a row of it fits on chip. Its transposed copy has scales along
  the other dimension, whose amaxes ride in the same kernel: it is cast in a second reading;
* float8 gemms are merged: one gradient comes back from q, k and v, and one from gate and up, where in
  bfloat16 three and two do;
* **lean**: transposed copies of weights and activations are made in the backward; the activations' in the
  kernels of the backward that read their sources anyway. **fast**: those of weights, and of the attention's
  output, are made in the forward by the kernel that casts them for the first gemm, and saved;
* ``rowwise_with_gw_hp`` computes ``grad_weight`` in bfloat16: no transposed activations and gradients, but the
  bfloat16 operands themselves;
* scales, norm weights and biases, and their gradients, are nothing beside the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .blocks import DIM, FFN, HEAD, HEADS, KV_HEADS, OUT

Save = Literal["lean", "fast"]

_QKV = (HEADS + 2 * KV_HEADS) * HEAD
_ROTATED = (HEADS + KV_HEADS) * HEAD


@dataclass(frozen=True)
class Line:
    """A kernel: bytes read and written."""

    phase: Literal["forward", "backward"]
    name: str
    read: int
    written: int


def lines(model: str, tokens: int, recipe: str | None, save: Save = "lean") -> list[Line]:
    """The kernels of a block, forward and backward.

    Args:
        model: as for :func:`benchmarks.blocks.block`.
        recipe: a preset; ``None`` for bfloat16.
    """
    hand = _Hand(tokens, recipe, save)
    if model == "norm_linear":
        hand.norm_linear()
    else:
        hand.block(attention=model == "llama")
    return hand.lines


def total(model: str, tokens: int, recipe: str | None, save: Save = "lean") -> int:
    """Bytes of all kernels together."""
    return sum(line.read + line.written for line in lines(model, tokens, recipe, save))


class _Hand:
    """Sizes below are in elements of bfloat16 (2 bytes, ``2 *``) and of float8 (1 byte)."""

    def __init__(self, tokens: int, recipe: str | None, save: Save) -> None:
        self.tokens = tokens
        self.float8 = recipe is not None
        self.fast = save == "fast"
        self.tensorwise = recipe == "tensorwise"
        self.high_precision = recipe == "rowwise_with_gw_hp"
        #: whether weight gradients are float8, from transposed copies
        self.transposed = self.float8 and not self.high_precision
        self.lines: list[Line] = []

    def forward(self, name: str, read: int, written: int) -> None:
        self.lines.append(Line("forward", name, read, written))

    def backward(self, name: str, read: int, written: int) -> None:
        self.lines.append(Line("backward", name, read, written))

    def norm_linear(self) -> None:
        x, y = self.tokens * DIM, self.tokens * OUT
        self.weights(DIM * OUT)
        self.operand("norm", 2 * x, x)
        self.forward("sigmoid", 2 * y, 2 * y)
        self.gradient("sigmoid backward", 4 * y, y)
        self.backward("norm backward", 4 * x, 2 * x + (x if self.transposed else 0))

    def block(self, attention: bool) -> None:
        x, h = self.tokens * DIM, self.tokens * FFN
        qkv, rotated = self.tokens * _QKV, self.tokens * _ROTATED
        rotation = 4 * self.tokens * HEAD  # cosine and sine in float32
        own = _QKV * DIM + HEADS * HEAD * DIM if attention else 0
        self.weights(own + 3 * DIM * FFN)
        if attention:
            self.operand("norm of x", 2 * x, x)
            self.forward("RoPE", 2 * rotated + rotation, 2 * rotated)
            if self.float8:
                self.attention_output(x)
        # the second norm reads a sum of two, and writes it for the residual
        self.operand("residual and norm" if attention else "norm", (4 if attention else 2) * x, x, attention)
        self.operand("SwiGLU", 4 * h, h)
        self.forward("residual", 4 * x, 2 * x)

        if self.float8:
            self.gradient("gradient of the output", 2 * x, x, exists=True)
        self.swiglu_backward(h)
        norm = x if self.transposed else 0
        # the row-wise cast of the attention layer's gradient rides along
        rides = x if self.high_precision and attention else 0
        separate = 0 if self.float8 else 2 * x  # the gradient of another layer that read the norm
        self.backward("norm backward", 6 * x + separate, 2 * x + norm + rides)
        if attention:
            if self.transposed:
                # its amax rode in the norm's backward: one reading
                self.backward("cast of the attention layer's gradient", 2 * x, 2 * x)
                if not self.fast:
                    self.backward("transposed cast of the attention's output", 2 * x, x)
            self.rope_backward(qkv, rotated, rotation)
            self.backward("norm backward of x", 6 * x + 2 * separate, 2 * x + norm)

    def weights(self, elements: int) -> None:
        if not self.float8:
            return
        if self.tensorwise:
            self.forward("amaxes of weights", 2 * elements, 0)
        if not self.fast:
            self.forward("casts of weights", 2 * elements, elements)
            self.backward("transposed casts of weights", 2 * elements, elements)
        elif self.tensorwise:
            self.forward("casts of weights, both layouts", 2 * elements, 2 * elements)
        else:  # the transposed copy's scales come out of the first reading
            self.forward("casts of weights", 2 * elements, elements)
            self.forward("transposed casts of weights", 2 * elements, elements)

    def operand(self, name: str, read: int, size: int, keeps: bool = False) -> None:
        """A forward operand, from the kernel that produces it; ``keeps``: with the residual sum it is made of."""
        sum_, again = (2 * size, 2 * size) if keeps else (0, read)
        if not self.float8:
            self.forward(name, read, sum_ + 2 * size)
        elif self.tensorwise:
            self.forward(f"{name}: amax", read, sum_)
            self.forward(f"{name}: cast", again, size)
        else:
            self.forward(f"{name} and cast", read, sum_ + size + (2 * size if self.high_precision else 0))

    def attention_output(self, x: int) -> None:
        early = x if self.fast and self.transposed else 0
        if self.tensorwise:
            self.forward("attention's output: amax", 2 * x, 0)
            self.forward("attention's output: cast", 2 * x, x + early)
        else:
            self.forward("attention's output: cast", 2 * x, x)
            if early:
                self.forward("attention's output: transposed cast", 2 * x, x)

    def gradient(self, name: str, read: int, size: int, exists: bool = False) -> None:
        """A gradient that a gemm reads, from what it is computed of; ``exists``: it is in memory already."""
        if not self.float8:
            self.backward(name, read, 2 * size)
        elif self.tensorwise:
            self.backward(f"{name}: amax", read, 0)
            self.backward(f"{name}: casts", read, 2 * size)
        elif self.high_precision:
            self.backward(f"{name}: cast", read, size + (0 if exists else 2 * size))
        else:
            self.backward(f"{name}: cast", read, size)
            self.backward(f"{name}: transposed cast", read, size)

    def swiglu_backward(self, h: int) -> None:
        if not self.transposed:
            self.backward("SwiGLU backward", 6 * h, 4 * h + (2 * h if self.high_precision else 0))
        elif self.tensorwise:
            self.backward("SwiGLU backward: amax", 6 * h, 0)
            self.backward("SwiGLU backward: casts, and SwiGLU transposed", 6 * h, 5 * h)
        else:
            self.backward("SwiGLU backward: casts", 6 * h, 2 * h)
            self.backward("SwiGLU backward: transposed casts, and SwiGLU's", 6 * h, 3 * h)

    def rope_backward(self, qkv: int, rotated: int, rotation: int) -> None:
        if not self.float8:
            self.backward("RoPE backward", 2 * rotated + rotation, 2 * rotated)
        elif self.high_precision:
            self.backward("RoPE backward: cast", 2 * qkv + rotation, qkv + 2 * rotated)
        else:
            first = 0 if self.tensorwise else qkv
            self.backward("RoPE backward: amaxes", 2 * qkv + rotation, first)
            self.backward("RoPE backward: casts", 2 * qkv + rotation, 2 * qkv - first)
