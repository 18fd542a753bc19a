"""What a training step under FSDP2 sends, from shapes alone: no GPUs, no processes, no process group.

The model is sharded as :mod:`f8fx.fsdp` documents it. Its blocks (the elements of the outermost ``ModuleList`` or
``ModuleDict``) are wrapped one by one, the rest by the root:

* every block gathers its parameters in the forward and again in the backward (``reshard_after_forward=True``); the
  root gathers once, since FSDP2 keeps what the root has gathered. A model without such a list is taken for one block
  of a larger model, as ``f8fx explain f8fx.demo.examples:llama3_8b`` means it;
* every block, and the root, reduce-scatters its gradients once, in high precision;
* with float8 gathers, one all-reduce takes the amaxes of all weights when the forward begins.

Which weights are gathered in float8 is asked of the function that ``enable_float8_all_gather`` asks. A rank holds
``ceil(rows / N)`` rows of each parameter; what is missing in the last shards travels as padding.

What bytes on the wire and seconds are, :mod:`f8fx.wire` says.

Tensor parallelism divides what FSDP2 shards. Parameters that are DTensors are taken as they are split; without a plan
every matrix is taken to be split over its rows, vectors not at all. What tensor parallelism itself sends stands in the
traced graphs, and is counted there where the model is parallelized (:mod:`f8fx.parallelized`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .fsdp.enable import GatherDecision, judge
from .fsdp.formats import Format
from .hardware import Interconnect
from .options import Options
from .torch_private import local_tensor
from .wire import IN_GRAPH, Call, Op, Sent, World, totals

__all__ = ["Call", "Communication", "Sharded", "World", "predict"]

Copies = Literal["both", "alternate"]


@dataclass(frozen=True)
class Communication:
    """What one rank sends in a step, as it is and with float8 gathers.

    Attributes:
        fsdp, tp: sizes of the mesh.
        recipe, copies: of the float8 gathers.
        training: whether there is a backward.
        interconnect: what the seconds are predicted for, "" where that is unknown.
        high, float8: by collective and dtype.
        high_seconds, float8_seconds: predicted, ``None`` where the interconnect is unknown.
        gathers: each 2-D parameter and whether it is gathered in float8.
        doubled: whether a gather carries two float8 copies of some weight.
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

    @property
    def world(self) -> World:
        """The mesh."""
        return World(self.fsdp, self.tp)

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
        order = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
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


# -- the calls of a step --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Parameter:
    """One parameter as a rank of the tensor-parallel group holds it."""

    shape: tuple[int, ...]
    gather_dtype: torch.dtype
    reduce_dtype: torch.dtype
    trained: bool
    formats: tuple[Format, ...]

    def shard(self, ranks: int) -> int:
        """Elements of a shard, padding included."""
        return -(-self.shape[0] // ranks) * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Sharded:
    """The parameters of a model, by the module that FSDP2 wraps, and what is decided about them.

    Attributes:
        units: fqn of a wrapped module, "" for the root -> its parameters.
        root_resharded: the root is gathered again in the backward: it is a block of a larger model.
        gathers: each 2-D parameter and whether it is gathered in float8.
    """

    world: World
    units: Mapping[str, Sequence[_Parameter]]
    root_resharded: bool
    gathers: tuple[GatherDecision, ...]

    @staticmethod
    def of(
        model: nn.Module,
        world: World,
        options: Options,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> Sharded:
        """Only looks at the model, which may be on ``"meta"``.

        Args:
            options: recipe, filters and target.
            param_dtype, reduce_dtype: FSDP2's mixed-precision policy.
        """
        verdicts = judge(model, options, world.tp)
        formats = {id(verdict.candidate.param): verdict.formats for verdict in verdicts}
        blocks = _blocks(model)
        units: dict[str, list[_Parameter]] = {name: [] for name in (*blocks, "")}
        seen: set[int] = set()
        for unit in units:
            for param in model.get_submodule(unit).parameters():
                if id(param) in seen:
                    continue
                seen.add(id(param))
                gathered = param_dtype or param.dtype
                units[unit].append(
                    _Parameter(
                        _local_shape(param, world.tp),
                        gathered,
                        reduce_dtype or gathered,
                        param.requires_grad,
                        formats.get(id(param), ()),
                    )
                )
        gathers = tuple(verdict.decision for verdict in verdicts)
        return Sharded(world, units, not blocks, gathers)

    def calls(self, float8: bool, training: bool = True, copies: Copies = "both") -> list[Call]:
        """The collectives of one step."""
        ranks, stride = self.world.fsdp, self.world.tp
        if ranks == 1:
            return []
        found: list[Call] = []
        if float8 and (amaxes := sum(map(_amaxes, self._converted()))):
            found.append(Call("all_reduce", "amaxes", "", False, ranks, {"float32": 4 * amaxes}, stride))
        for unit, params in self.units.items():
            if not params:
                continue
            again = bool(unit) or self.root_resharded
            for backward in (False, True)[: 1 + (training and again)]:
                content = int(backward) if copies == "alternate" and again else None
                sizes = _summed(self._gathered(p, content if float8 else None, float8) for p in params)
                found.append(Call("all_gather", "weights", unit, backward, ranks, sizes, stride))
            reduced = _summed(
                [(_name(p.reduce_dtype), ranks * p.shard(ranks) * p.reduce_dtype.itemsize)]
                for p in params
                if p.trained and training
            )
            if reduced:
                found.append(Call("reduce_scatter", "gradients", unit, True, ranks, reduced, stride))
        return found

    def _converted(self) -> list[_Parameter]:
        return [p for params in self.units.values() for p in params if p.formats]

    def _gathered(self, p: _Parameter, content: int | None, float8: bool) -> list[tuple[str, int]]:
        """dtype and bytes that a gather of a parameter takes from a rank."""
        elements = p.shard(self.world.fsdp)
        if not float8 or not p.formats:
            return [(_name(p.gather_dtype), elements * p.gather_dtype.itemsize)]
        sent = p.formats if content is None or len(p.formats) == 1 else p.formats[content : content + 1]
        return [(_name(form.dtype), elements * form.dtype.itemsize) for form in sent]


def predict(
    model: nn.Module,
    world: World | int | str,
    options: Options,
    *,
    training: bool = True,
    copies: Copies = "both",
    interconnect: Interconnect | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    in_graph: tuple[Sequence[Call], Sequence[Call]] | None = None,
) -> Communication:
    """What a step of a model sends under FSDP2, as it is and with float8 gathers.

    Args:
        model: may be on ``"meta"``; not sharded yet. DTensors of tensor parallelism are taken as they are split.
        world: ranks, or FSDP x TP; see :meth:`World.parse`.
        options: of the backend: recipe, filters, target.
        training: with a backward.
        copies: of rowwise weights, as ``enable_float8_all_gather`` takes it.
        interconnect: what to predict seconds for.
        param_dtype, reduce_dtype: FSDP2's mixed-precision policy; default: the parameters' own dtype.
        in_graph: the collectives that stand in the model's graphs, as they are and as rewritten; ``None``: unknown.

    Raises:
        ValueError: for a world or copies that cannot be.
    """
    if copies not in ("both", "alternate"):
        raise ValueError(f"copies must be 'both' or 'alternate', got {copies!r}")
    world = World.parse(world)
    sharded = Sharded.of(model, world, options, param_dtype, reduce_dtype)
    graphs = in_graph or ((), ())
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
        gathers=sharded.gathers,
        graphs_counted=in_graph is not None,
        doubled=copies == "both" and any(len(p.formats) > 1 for ps in sharded.units.values() for p in ps),
    )


def _blocks(model: nn.Module) -> list[str]:
    """The elements of the outermost lists of modules that hold parameters."""
    found: list[str] = []

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            fqn = f"{prefix}{name}"
            if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                found.extend([fqn] if next(child.parameters(), None) is not None else [])
            else:
                visit(child, f"{fqn}.")

    visit(model, "")
    return found


def _local_shape(param: nn.Parameter, tp: int) -> tuple[int, ...]:
    if isinstance(param, DTensor):
        return tuple(local_tensor(param).shape)
    shape = tuple(param.shape)
    return (-(-shape[0] // tp), *shape[1:]) if len(shape) > 1 else shape


def _amaxes(p: _Parameter) -> int:
    """Numbers that the all-reduce of the amaxes holds for a weight ``[n, k]``."""
    sizes = {None: 1, 0: p.shape[1], 1: p.shape[0]}
    return sum(sizes[dim] for dim in {form.dim for form in p.formats})


def _summed(parts: Iterable[Iterable[tuple[str, int]]]) -> dict[str, int]:
    result: dict[str, int] = {}
    for part in parts:
        for dtype, count in part:
            result[dtype] = result.get(dtype, 0) + count
    return result


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
