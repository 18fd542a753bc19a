"""Amaxes of shards, and of the weights that they are shards of."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from f8fx.kernels import cast
from f8fx.streams import Made, current
from f8fx.torch_private import infinity_norms

from .formats import Format
from .reduce import SAME_FORWARDS, maximum

#: Where the amaxes of a weight begin, and their shape.
Place = tuple[int, tuple[int, ...]]


class Reduced:
    """Amaxes of several weights, side by side in one vector, after the all-reduce.

    FSDP2 casts what it sends on a stream of its own. That waits for the stream on which a forward begins, but after
    ``set_post_optim_event`` for the event alone, and the amaxes are taken later.
    """

    def __init__(self, vector: Tensor, places: Mapping[tuple[Hashable, int | None], Place]) -> None:
        self.vector = vector
        self.places = places
        self.taken = Made(vector.device)
        self.scaled: dict[Any, tuple[Tensor, Made]] = {}

    def scales(self, weight: Hashable, form: Format, source: torch.dtype) -> Tensor:
        """Of the shape that the format's direction gives; made for all weights of one kind at once."""
        with torch.inference_mode(False), torch.no_grad():  # a later forward may save them for its backward
            return self._scales(weight, form, source)

    def _scales(self, weight: Hashable, form: Format, source: torch.dtype) -> Tensor:
        here = current(self.vector.device)
        kind = (form.dtype, form.power_of_2, source)
        if kind not in self.scaled:
            # rounding keeps order: the amax of a rounded weight is the rounded amax
            self.taken.before(here, [self.vector])
            scaled = form.scale(self.vector.to(source).to(torch.float32))
            self.scaled[kind] = scaled, Made(scaled.device)
        scaled, made = self.scaled[kind]
        made.before(here, [scaled])
        start, shape = self.places[weight, form.dim]
        return scaled[start : start + math.prod(shape)].view(shape)


def largest(vector: Tensor, mesh: DeviceMesh, weights: int) -> None:
    """The largest of all ranks' amaxes, in place; of the floats' bits, so that a NaN wins.

    Raises:
        RuntimeError: if the collective fails.
    """
    maximum(vector.view(torch.int32), mesh.get_group(), f"the amaxes of {weights} weights", SAME_FORWARDS)


def ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    """Of a mesh of one dimension: equal for meshes made in different ways, whose groups are not."""
    return tuple(dist.get_process_group_ranks(mesh.get_group()))


def amaxes(tensors: Iterable[Tensor]) -> list[Tensor]:
    """``cast.amax(x, None)`` of many tensors at once."""
    tensors = list(tensors)
    full = [tensor for tensor in tensors if tensor.numel()]
    norms = iter(infinity_norms(full) if full else ())
    return [
        next(norms).to(torch.float32) if tensor.numel() else cast.amax(tensor, None) for tensor in tensors
    ]
