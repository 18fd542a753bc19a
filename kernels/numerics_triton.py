"""Arithmetic that the Triton kernels share. Imports Triton: only to be imported through :mod:`kernels.launch`.

Each function gives the bits of its definition in :mod:`kernels.cast`, by other means:

* an amax is a maximum of integers: with the sign bit cleared, float32 values are ordered like their
  bits, and every NaN is above infinity, so NaN wins as it must. Warps reduce integers in one
  instruction;
* a scale is one float32 division. The definition divides in float64 and rounds the quotient to
  float32; for two float32 operands that double rounding changes nothing, since 53 >= 2 * 24 + 2 bits
  (Figueroa, "When is double rounding innocuous?", 1995), and no quotient here is subnormal. Float64
  is 64 times slower than float32 on many GPUs;
* rounding down to a power of two works on the exponent bits.

Saturation is two ``where``, never ``tl.clamp``, ``tl.minimum`` or ``tl.maximum`` on floats: these drop NaN,
or, asked to keep it, are miscompiled next to a transposed 1-byte store
(https://github.com/triton-lang/triton/issues/11111, open as of Triton 3.9).
"""

from __future__ import annotations

import triton
import triton.language as tl

# log2(e) / 2**24: what log2 loses per float32 step below a power of two
_LOG2_STEP = tl.constexpr(1.4426950408889634 / 16777216.0)


@triton.jit
def magnitude_bits(x):
    """Bits of ``abs(x)`` in float32 as int32: ordered like the magnitudes, NaN above all."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of_amax(amax, LIMIT: tl.constexpr, EPS: tl.constexpr, POWER_OF_2: tl.constexpr):
    """``kernels.cast.scale``: float32 amaxes (a block) to float32 scales.

    Args:
        LIMIT: largest number of the float8 type.
        EPS: smallest amax that counts. No float32 lies between it and its own float32 rounding, so
            ``amax <= EPS`` in float32 decides as the definition does in float64.
    """
    scale = tl.div_rn(tl.full(amax.shape, LIMIT, tl.float32), amax)
    scale = tl.where(amax <= EPS, LIMIT / EPS, scale)
    if POWER_OF_2:
        scale = _power_of_2_below(scale)
    return scale


@triton.jit
def _power_of_2_below(scale):
    """``exp2(floor(log2(scale)))`` as float32 arithmetic gives it; 0 and NaN stay.

    Not quite the exponent bits: ``log2`` of a number a few steps below a power of two rounds up to
    that power's exponent, and then so does the definition. That rounding is repeated here.
    """
    bits = scale.to(tl.int32, bitcast=True)
    exponent = bits >> 23
    steps_below = 0x800000 - (bits & 0x7FFFFF)
    above = (exponent - 126).to(tl.float32)
    rounded_up = above - steps_below.to(tl.float32) * _LOG2_STEP == above
    exponent = tl.where(rounded_up, exponent + 1, exponent)
    return tl.where(scale > 0, (exponent << 23).to(tl.float32, bitcast=True), scale)


@triton.jit
def to_float8(
    x, scale, inside, dtype: tl.constexpr, LIMIT: tl.constexpr, PADDED: tl.constexpr, CLAMP: tl.constexpr
):
    """``kernels.cast.quantize`` of a block.

    Args:
        inside: which elements belong to the source, used only if ``PADDED``: the others become zero
            bytes, whatever the scale (0 * NaN is no zero).
        CLAMP: False leaves saturation to the conversion. NVIDIA's from sm_89 on does it
            (``cvt.rn.satfinite``) with the same result, NaN included.
    """
    value = x.to(tl.float32) * scale
    if PADDED:
        value = tl.where(inside, value, 0.0)
    if CLAMP:
        value = tl.where(value > LIMIT, LIMIT, value)
        value = tl.where(value < -LIMIT, -LIMIT, value)
    return value.to(dtype)
