"""Which float8 copies of a weight a recipe needs, and where a shard lies in its weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from f8fx.hardware import Hardware
from f8fx.kernels import cast
from f8fx.recipe import QuantSpec, Recipe


@dataclass(frozen=True)
class Format:
    """A float8 copy of a weight ``[n, k]``, up to its layout.

    Attributes:
        dtype: the float8 dtype.
        dim: the dimension an amax runs over: ``None`` for one scale, 1 for ``[n]``, 0 for ``[k]`` scales.
        power_of_2: whether scales are rounded down to powers of two.
    """

    dtype: torch.dtype
    dim: int | None
    power_of_2: bool

    def scale(self, amax: Tensor) -> Tensor:
        """Scales, float32, for amaxes of any shape."""
        return cast.scale(amax, self.dtype, self.power_of_2)

    def quantize(self, x: Tensor, scale: Tensor) -> Tensor:
        """``[rows, columns]`` in float8; ``scale`` belongs to these rows and columns."""
        return cast.quantize(x, scale, self.dtype, self.dim, False, [1, 1])


def formats_of(recipe: Recipe, hardware: Hardware) -> tuple[Format, ...]:
    """What the gemms of a layer read its weight in: one format, or the forward's and the backward's.

    Tensorwise, forward and backward read the same numbers, once transposed. Rowwise, the scales run along
    the contracted dimension, which is ``k`` forward and ``n`` backward: two copies, and neither can be made
    from the other without rounding twice.

    Raises:
        ValueError: where a gemm that reads the weight stays in high precision or the hardware lacks a
            format, saying which.
    """
    wanted: list[Format] = []
    for role, dim in (("output", 1), ("grad_input", 0)):
        spec = recipe.operand(role, "weight")  # type: ignore[arg-type]
        if spec is None:
            raise ValueError(f"kept in high precision by the recipe: {role} reads the weight")
        made = _format(spec, dim, hardware)
        if made not in wanted:
            wanted.append(made)
    return tuple(wanted)


def _format(spec: QuantSpec, dim: int, hardware: Hardware) -> Format:
    if spec.dtype not in hardware.float8_dtypes:
        raise ValueError(f"no {spec.dtype} on {hardware.name}")
    if spec.granularity not in hardware.granularities:
        raise ValueError(f"no {spec.granularity} float8 gemm on {hardware.name}")
    return Format(
        hardware.float8_dtypes[spec.dtype],
        None if spec.granularity == "tensorwise" else dim,
        spec.power_of_2_scale,
    )


class Layout:
    """Where a shard lies in its weight ``[n, k]``; FSDP2 splits like ``torch.chunk``.

    Attributes:
        is_whole: it is the weight: nothing is sent.
    """

    def __init__(self, shard: Tensor, outer_size: tuple[int, ...], mesh: DeviceMesh) -> None:
        n, k = outer_size
        # a group of one, or the mesh of FSDP2's `replicate`, where every rank holds the whole weight
        self.is_whole = tuple(shard.shape) == tuple(outer_size)
        world, rank = (1, 0) if self.is_whole else (mesh.size(), mesh.get_local_rank())
        self.shape = shard.shape
        self.dim = 1 if shard.shape[1] != k and shard.numel() else 0
        chunk = -(-outer_size[self.dim] // world)
        self.offset = min(rank * chunk, outer_size[self.dim])
        self.padded_rows = chunk if self.dim == 0 else n

    def local(self, scale: Tensor, dim: int | None) -> Tensor:
        """The scales of this shard's rows or columns, from those of the weight."""
        if dim is None or 1 - dim != self.dim:
            return scale
        return scale.narrow(0, self.offset, self.shape[self.dim])

    def spread(self, amax: Tensor, dim: int | None, outer_size: tuple[int, ...]) -> Tensor:
        """This shard's amaxes at their places among those of the weight, zero elsewhere; 1-D."""
        if dim is None or 1 - dim != self.dim:
            return amax.reshape(-1)
        full = amax.new_zeros(outer_size[self.dim])
        full[self.offset : self.offset + self.shape[self.dim]] = amax
        return full
