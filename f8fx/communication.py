"""What a training step under FSDP2 sends, from shapes alone: no GPUs, no processes, no process group.

The model is sharded as :mod:`f8fx.fsdp` documents it. Its blocks (the elements of the outermost ``ModuleList`` or
``ModuleDict``) are wrapped one by one, the rest by the root:

* every block gathers its parameters in the forward and again in the backward (``reshard_after_forward=True``); the
  root gathers once, since FSDP2 keeps what the root has gathered. Blocks before the first trained parameter have no
  backward (the last of them is gathered all the same: FSDP2 gathers ahead). A model without such a list is taken for one
  block of a larger model, as ``f8fx explain f8fx.demo.examples:llama3_8b`` means it;
* every block, and the root, reduce-scatters its gradients once, in high precision, and with replicas (HSDP) all-reduces
  its shard of them;
* with float8 gathers, one all-reduce takes the amaxes of all weights when the forward begins.

Which weights are gathered in float8 is asked of the function that ``enable_float8_all_gather`` asks. A rank holds
``ceil(rows / N)`` rows of each parameter; what is missing in the last shards travels as padding.

What bytes on the wire and seconds are, :mod:`f8fx.wire` says.

Tensor parallelism divides what FSDP2 shards. Parameters that are DTensors are taken as they are split; without a plan
every matrix is taken to be split over its rows, vectors not at all. What tensor parallelism itself sends stands in the
traced graphs, and is counted there where the model is parallelized (:mod:`f8fx.explanation.parallelized`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
from torch import nn

from .fsdp.copies import Wanted
from .fsdp.judge import GatherDecision
from .interconnect import Interconnect
from .options import Options
from .step import Sharded
from .wire import IN_GRAPH, Call, Op, Sent, World, totals

__all__ = ["Call", "Communication", "Sharded", "World", "predict"]


@dataclass(frozen=True)
class Communication:
    """What one rank sends in a step, as it is and with float8 gathers.

    Attributes:
        fsdp, tp, replicate: sizes of the mesh.
        recipe, copies: of the float8 gathers.
        training: whether there is a backward.
        interconnect: what the seconds are predicted for, "" where that is unknown.
        high, float8: by collective and dtype.
        high_seconds, float8_seconds: predicted, ``None`` where the interconnect is unknown.
        gathers: each 2-D parameter and whether it is gathered in float8; none where nothing is gathered.
        doubled: whether a gather carries two float8 copies of some weight, and with ``copies="auto"`` one.
        graphs_counted: whether the collectives that stand in graphs are among them.
    """

    fsdp: int
    tp: int
    recipe: str
    copies: str
    training: bool
    interconnect: str
    high: tuple[Sent, ...]
    float8: tuple[Sent, ...]
    high_seconds: float | None
    float8_seconds: float | None
    gathers: tuple[GatherDecision, ...]
    doubled: bool = False
    graphs_counted: bool = False
    replicate: int = 1

    @property
    def world(self) -> World:
        """The mesh."""
        return World(self.fsdp, self.tp, self.replicate)

    @property
    def high_bytes(self) -> int:
        """Bytes a rank sends as it is."""
        return sum(sent.wire_bytes for sent in self.high)

    @property
    def float8_bytes(self) -> int:
        """Bytes a rank sends with float8 gathers."""
        return sum(sent.wire_bytes for sent in self.float8)

    @property
    def converted(self) -> int:
        """Matrices that are gathered in float8."""
        return sum(gather.converted for gather in self.gathers)

    @property
    def rows(self) -> list[tuple[Op, str, str, int, int]]:
        """Collective, what, dtype, bytes on the wire as it is and with float8."""
        sides = [{(s.op, s.what, s.dtype): s.wire_bytes for s in side} for side in (self.high, self.float8)]
        keys = dict.fromkeys((*sides[0], *sides[1]))
        order = get_args(Op)
        return [
            (*key, sides[0].get(key, 0), sides[1].get(key, 0))
            for key in sorted(keys, key=lambda key: (order.index(key[0]), key[1] == IN_GRAPH))
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON-ready data."""
        own = asdict(self)
        own["totals"] = {"high_bytes": self.high_bytes, "float8_bytes": self.float8_bytes}
        return own

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Communication:
        """The inverse of :meth:`to_dict`."""
        own = {name: value for name, value in data.items() if name != "totals"}
        for side in ("high", "float8"):
            own[side] = tuple(Sent(**sent) for sent in own[side])
        own["gathers"] = tuple(GatherDecision(**{**g, "shape": tuple(g["shape"])}) for g in own["gathers"])
        return Communication(**own)


def predict(
    model: nn.Module,
    world: World | int | str,
    options: Options,
    *,
    training: bool = True,
    copies: Wanted = "auto",
    interconnect: Interconnect | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    in_graph: tuple[Sequence[Call], Sequence[Call]] | None = None,
    recomputed: Collection[str] = (),
) -> Communication:
    """What a step of a model sends under FSDP2, as it is and with float8 gathers.

    Args:
        model: may be on ``"meta"``; not sharded yet. DTensors of tensor parallelism are taken as they are split.
        world: ranks, FSDP x TP, or HSDP; see :meth:`World.parse`.
        options: of the backend: recipe, filters, target.
        training: with a backward.
        copies: of rowwise weights, as ``enable_float8_all_gather`` takes it. ``"auto"`` is a step that is not the first.
        interconnect: what to predict seconds for.
        param_dtype, reduce_dtype: FSDP2's mixed-precision policy; default: the parameters' own dtype.
        in_graph: the collectives that stand in the model's graphs, as they are and as rewritten; ``None``: unknown.
        recomputed: modules whose matmuls activation checkpointing runs again in the backward, which then gathers both
            copies.

    Raises:
        ValueError: for a world or copies that cannot be.
    """
    if copies not in ("auto", "both"):
        raise ValueError(f"copies must be 'auto' or 'both', got {copies!r}")
    world = World.parse(world)
    sharded = Sharded.of(model, world, options, param_dtype, reduce_dtype, recomputed)
    graphs = in_graph or ((), ())
    gathers = sharded.gathers if world.fsdp > 1 else ()
    twice = any(len(p.formats) > 1 for params in sharded.units.values() for p in params)
    high = [*sharded.calls(False, training), *graphs[0]]
    float8 = [*sharded.calls(True, training, copies), *graphs[1]]

    def seconds(calls: Iterable[Call]) -> float | None:
        return sum(call.seconds(interconnect) for call in calls) if interconnect else None

    return Communication(
        fsdp=world.fsdp,
        tp=world.tp,
        recipe=options.recipe.name,
        copies=copies,
        training=training,
        interconnect=interconnect.name if interconnect else "",
        high=totals(high),
        float8=totals(float8),
        high_seconds=seconds(high),
        float8_seconds=seconds(float8),
        gathers=gathers,
        graphs_counted=in_graph is not None,
        doubled=world.fsdp > 1 and copies == "both" and training and twice,
        replicate=world.replicate,
    )
