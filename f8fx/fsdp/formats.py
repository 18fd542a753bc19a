"""Which float8 copies of a weight a recipe needs, and where a shard lies in its weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from f8fx.hardware import Hardware
from f8fx.kernels import cast
from f8fx.lacks import lacks
from f8fx.recipe import QuantSpec, Recipe


@dataclass(frozen=True)
class Format:
    """A float8 copy of a weight ``[n, k]``, or of those of all experts ``[experts, n, k]``, up to its layout.

    Attributes:
        dtype: the float8 dtype.
        dim: the dimension an amax runs over, ``None`` for one scale: the scales are of the weight's other sizes.
        power_of_2: whether scales are rounded down to powers of two.
    """

    dtype: torch.dtype
    dim: int | None
    power_of_2: bool

    def scale(self, amax: Tensor) -> Tensor:
        """Scales, float32, for amaxes of any shape."""
        return cast.scale(amax, self.dtype, self.power_of_2)

    def quantize(self, x: Tensor, scale: Tensor) -> Tensor:
        """``x`` in float8; ``scale`` is that of this part of the weight."""
        return cast.quantize(x, scale, self.dtype, self.dim, False, [1, 1])


def formats_of(recipe: Recipe, hardware: Hardware, contracted: tuple[int, int]) -> tuple[Format, ...]:
    """What the gemms of a layer read its weight in: one format, or the forward's and the backward's.

    Tensorwise, forward and backward read the same numbers, once transposed. Rowwise, the scales run along
    the contracted dimension, which is ``k`` forward and ``n`` backward: two copies, and neither can be made
    from the other without rounding twice.

    Args:
        contracted: dimensions of the weight that the gemms of the forward and of the backward contract.

    Raises:
        ValueError: where a gemm that reads the weight stays in high precision or the hardware lacks a
            format, saying which.
    """
    wanted: list[Format] = []
    for role, dim in zip(("output", "grad_input"), contracted, strict=True):
        spec = recipe.operand(role, "weight")  # type: ignore[arg-type]
        if spec is None:
            raise ValueError(f"kept in high precision by the recipe: {role} reads the weight")
        made = _format(spec, dim, hardware)
        if made not in wanted:
            wanted.append(made)
    return tuple(wanted)


def _format(spec: QuantSpec, dim: int, hardware: Hardware) -> Format:
    if missing := lacks(hardware, spec):
        raise ValueError(missing)
    return Format(
        hardware.float8_dtypes[spec.dtype],
        None if spec.granularity == "tensorwise" else dim,
        spec.power_of_2_scale,
    )


class Layout:
    """Where a shard lies in its weight; FSDP2 splits like ``torch.chunk``.

    Args:
        sharded: whether FSDP2 splits the weight at all, as far as is known.

    Attributes:
        is_whole: it is the weight: nothing is sent.
        padded_rows: the first size of what a rank sends.
    """

    def __init__(
        self, shard: Tensor, outer_size: tuple[int, ...], mesh: DeviceMesh, sharded: bool = False
    ) -> None:
        # a group of one, or the mesh of FSDP2's `replicate`, where every rank holds the whole weight; of one row, though,
        # one rank holds the whole and the others nothing
        self.is_whole = tuple(shard.shape) == outer_size and (mesh.size() == 1 or not sharded)
        world, rank = (1, 0) if self.is_whole else (mesh.size(), mesh.get_local_rank())
        self.outer_size = outer_size
        split = (d for d in range(1, shard.dim()) if shard.shape[d] != outer_size[d])
        self.dim = next(split, 0) if shard.numel() else 0
        chunk = -(-outer_size[self.dim] // world)
        self.offset = min(rank * chunk, outer_size[self.dim])
        self.size = shard.shape[self.dim]
        self.padded_rows = chunk if self.dim == 0 else outer_size[0]

    def local(self, scale: Tensor, dim: int | None) -> Tensor:
        """The scales of this shard, from those of the weight."""
        if dim is None or dim == self.dim:
            return scale
        return scale.narrow(self._axis(dim), self.offset, self.size)

    def spread(self, amax: Tensor, dim: int | None) -> Tensor:
        """This shard's amaxes at their places among those of the weight, zero elsewhere; 1-D."""
        if dim is None or dim == self.dim:
            return amax.reshape(-1)
        full = amax.new_zeros(scale_shape(self.outer_size, dim))
        full.narrow(self._axis(dim), self.offset, self.size).copy_(amax)
        return full.view(-1)

    def _axis(self, dim: int) -> int:
        """Of the scales, which have one dimension less, that along which the weight is split."""
        return self.dim - (dim < self.dim)


def scale_shape(size: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
    """Of the scales of a weight whose amaxes run over ``dim``."""
    return () if dim is None else size[:dim] + size[dim + 1 :]
