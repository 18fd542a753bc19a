"""The functions that :mod:`f8fx.canary` compiles, and the data it runs them on.

Each is as small as can be and still gives a kernel of the shape that has been compiled wrongly: a
minimum or maximum in the kernel of a transposed float8 store, a row amax in one kernel with a column sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from . import ops

Kind = Literal["cast", "transpose", "reduction", "one read", "groups"]

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass(frozen=True)
class Case:
    """A small function whose kernels are of one kind; run eagerly, it is its own definition.

    Attributes:
        run: of two tensors. What it does to them before a cast is exact, so that it does not matter
            that Inductor keeps float32 where eager PyTorch rounds.
        shape: on a CPU.
        gpu_shape: on a GPU: several blocks, ragged.
        dtype: of the tensors.
        gpu_only: not worth its time on a CPU.
    """

    name: str
    kind: Kind
    run: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
    shape: tuple[int, int]
    gpu_shape: tuple[int, int]
    dtype: torch.dtype = torch.bfloat16
    gpu_only: bool = False


def cases(
    device: torch.device, e4m3: torch.dtype, e5m2: torch.dtype, grouped_gemm: bool = True
) -> tuple[Case, ...]:
    """The functions, for the float8 types of a device and, if it has a gemm that reads them, groups.

    On GPUs stores are checked with float32 sources too, which weights under autocast and FSDP2 are: how a
    tile is spread over threads, and so how it is turned, depends on the widths of both.
    """

    def cast(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        scale = aten.full.default([], 100.0, dtype=torch.float32, device=device)
        larger = aten.maximum.default(x, y)
        return tuple(
            ops.quantize(larger, scale, dtype=dtype, align=align)
            for dtype, align in ((e4m3, [1, 1]), (e5m2, [16, 16]))
        )

    def transposed(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        scale = aten.full.default([], 100.0, dtype=torch.float32, device=device)
        larger = aten.maximum.default(aten.relu.default(x), y)
        return (ops.quantize(larger, scale, dtype=e4m3, transpose=True, align=[16, 16]),)

    def together(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        scale = aten.full.default([], 100.0, dtype=torch.float32, device=device)
        return tuple(
            ops.quantize(aten.relu.default(source), scale, dtype=dtype, transpose=transpose)
            for transpose in (True, False)
            for source, dtype in ((x, e4m3), (y, e5m2))
        )

    def both(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        scale = aten.full.default([], 100.0, dtype=torch.float32, device=device)
        smaller = aten.minimum.default(x, y)
        return _two(ops.quantize_both(smaller, scale, scale, dtype=e5m2))

    def tensorwise(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        larger = aten.maximum.default(x, y)
        scale = ops.scale(ops.amax(larger), dtype=e4m3)
        return (scale, *_two(ops.quantize_both(larger, scale, scale, dtype=e4m3)))

    def rowwise(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        larger = aten.maximum.default(x, y)
        rows = ops.scale(ops.amax(larger, 1), dtype=e4m3, power_of_2=True)
        columns = ops.scale(ops.amax(larger, 0), dtype=e4m3, power_of_2=True)
        both = ops.quantize_both(larger, rows, columns, dtype=e4m3, dim=1, dim_t=0)
        return (rows, columns, *_two(both))

    def mixed(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        larger = aten.maximum.default(x, y)
        rows = ops.scale(ops.amax(larger, 1), dtype=e4m3, power_of_2=True)
        # whole numbers, whose sum is exact in any order
        positive = prims.convert_element_type.default(aten.gt.Scalar(larger, 0), torch.float32)
        columns = aten.sum.dim_IntList(positive, [0])
        return (rows, columns, ops.quantize(larger, rows, dtype=e4m3, dim=1))

    def one_read(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        found = ops.quantize_rowwise([x, y, y], [2, 1], dtype=e4m3, power_of_2=True)
        # as gemms read them
        scales = [
            aten.as_strided.default(scale, [scale.shape[0], 1], [1, 1]) for scale in (found[1], found[4])
        ]
        half = aten.slice.Tensor(y, 0, 0, y.shape[0] // 2 * 2)
        each = ops.quantize_rowwise([half], [1], dtype=e4m3, power_of_2=True, matrices=2)
        return found[0], scales[0], found[2], found[3], scales[1], found[5], each[0], each[1], each[2]

    def computed(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        is_larger = aten.gt.Tensor(x, y)
        larger = aten.where.self(is_larger, x, y)
        # whole numbers again
        ones = prims.convert_element_type.default(is_larger, x.dtype)
        side_by_side = ops.concat([larger, ones], 1)
        found = ops.amax_both(side_by_side, [aten.mul.Tensor(aten.neg.default(x), 2.0)], [ones])
        return found[0], found[1], found[2], found[3]

    def groups(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        rows = x.shape[0]
        # of three groups the second has no rows, and the last rows are of none
        offsets = aten.cat.default(
            [
                aten.full.default([1], end, dtype=torch.int32, device=device)
                for end in (rows // 3, rows // 3, rows - 5)
            ]
        )
        scale = ops.scale(ops.amax_groups(x, offsets), dtype=e4m3, power_of_2=True)
        ends = ops.padded_ends(offsets)
        return scale, ends, ops.quantize_groups(x, scale, offsets, ends, dtype=e4m3)

    stores = (
        Case("cast", "cast", cast, (20, 33), (520, 777)),
        Case("transposed cast", "transpose", transposed, (20, 33), (520, 777)),
        Case("both casts", "transpose", both, (20, 33), (520, 777)),
    )
    wide = [
        replace(case, name=f"{case.name} of float32", dtype=torch.float32, gpu_only=True) for case in stores
    ]
    of_groups = Case("columns of groups of rows", "groups", groups, (33, 20), (777, 520), gpu_only=True)
    return (
        *stores,
        *wide,
        Case("casts in one launch", "transpose", together, (20, 33), (520, 777), gpu_only=True),
        Case("tensorwise", "reduction", tensorwise, (20, 33), (520, 777)),
        Case("rowwise", "reduction", rowwise, (33, 20), (777, 520)),
        # as in a norm's backward: large and tall enough for Inductor to reduce rows and columns in one kernel
        Case("row amax and column sum", "reduction", mixed, (33, 20), (16400, 325)),
        Case("row cast and column amax", "one read", one_read, (33, 20), (777, 520)),
        Case("amaxes of a computed tensor", "one read", computed, (33, 20), (777, 520)),
        *([of_groups] if grouped_gemm else []),
    )


def _two(pair: Any) -> tuple[Any, Any]:
    """A pair of values, or of what stands for them while a function is traced."""
    return pair[0], pair[1]


def data(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Two tensors over many binades, zeros of both signs, infinities and NaN among them.

    Each row and column has one largest magnitude, 3 times a power of two: no scale then is near a power of two,
    where a last bit of a logarithm would decide.
    """
    generator = torch.Generator().manual_seed(0)
    rows, columns = shape
    x = torch.randn(shape, generator=generator, device="cpu")
    x *= torch.exp2(torch.randint(-12, 1, shape, generator=generator, device="cpu").float())
    x.clamp_(-2, 2)
    y = x.flip(0).roll(1, 1).contiguous()
    for index in range(max(rows, columns)):
        x[index % rows, index % columns] = y[index % rows, index % columns] = 3.0
    # not both signs at one place: which of two equal zeros is the larger is each kernel's own affair, and differs on GPUs
    x[rows // 2, 0] = y[rows // 2, 0] = 0.0
    x[rows // 2, 1], y[rows // 2, 1] = 1.0, -0.0
    return x.to(device, dtype), y.to(device, dtype)


def special(x: Tensor) -> Tensor:
    """The tensor with an infinity and a NaN in it."""
    x = x.clone()
    x[1, 2], x[-2, 3] = float("inf"), float("nan")
    return x
