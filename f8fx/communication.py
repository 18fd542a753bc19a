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

**Bytes on the wire** are those of a ring of N ranks, of which each sends as much as it receives, for a tensor of B
bytes: ``B (N - 1) / N`` for an all-gather (B: what comes out) and a reduce-scatter (B: what goes in), twice that for
an all-reduce. **Seconds** are these bytes at line rate plus the hops' latency, one collective after the other: what the wire
needs at least, of which overlap with computation hides a part. Predicted, not measured; NCCL leaves rings for other
algorithms where latency counts.

Tensor parallelism divides what FSDP2 shards: every matrix is taken to be split over its rows, vectors not at all. What
tensor parallelism itself sends depends on its plan and is not counted here.
"""

from __future__ import annotations

import math
import re
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

Op = Literal["all_gather", "reduce_scatter", "all_reduce"]
Copies = Literal["both", "alternate"]


@dataclass(frozen=True)
class World:
    """The mesh: ranks that FSDP2 shards over, times ranks that tensor parallelism splits over."""

    fsdp: int
    tp: int = 1

    def __post_init__(self) -> None:
        for name, size in (("fsdp", self.fsdp), ("tp", self.tp)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"world: {name} must be a whole number of at least 1, got {size!r}")

    @property
    def size(self) -> int:
        """All ranks."""
        return self.fsdp * self.tp

    def __str__(self) -> str:
        return f"{self.fsdp} x {self.tp} (FSDP x TP)" if self.tp > 1 else str(self.fsdp)

    @staticmethod
    def parse(world: World | int | str) -> World:
        """From ``8``, ``"8"``, ``"8x4"`` or ``"fsdp=8,tp=4"``.

        Raises:
            ValueError: for anything else.
        """
        if isinstance(world, World):
            return world
        if isinstance(world, int):
            return World(world)
        text = str(world).replace(" ", "")
        if found := re.fullmatch(r"(\d+)(?:x(\d+))?", text):
            return World(int(found[1]), int(found[2] or 1))
        if found := re.fullmatch(r"fsdp=(\d+)(?:,tp=(\d+))?", text):
            return World(int(found[1]), int(found[2] or 1))
        raise ValueError(f"world must be like 8, 8x4 (FSDP x TP) or fsdp=8,tp=4, got {world!r}")


@dataclass(frozen=True)
class Call:
    """One collective, seen from one rank.

    Attributes:
        op: which.
        what: ``weights``, ``gradients`` or ``amaxes``.
        unit: the wrapped module, "" for the root.
        backward: whether it belongs to the backward.
        ranks: of its group.
        bytes: what the rank hands in, by dtype; different dtypes travel together.
    """

    op: Op
    what: str
    unit: str
    backward: bool
    ranks: int
    bytes: Mapping[str, int]

    def wire(self, count: float) -> float:
        """Bytes that a rank sends, and receives, in a ring, if it hands in ``count``."""
        if self.op == "all_gather":
            return count * (self.ranks - 1)
        return count * (self.ranks - 1) / self.ranks * (2 if self.op == "all_reduce" else 1)

    def seconds(self, interconnect: Interconnect, tp: int = 1) -> float:
        """Predicted, with the ranks of tensor parallelism next to each other in a node.

        As many rings as the group has GPUs in a node run side by side, each over another GPU's network port.
        """
        i = interconnect
        local = max(1, i.node // tp)
        nodes = math.ceil(self.ranks / local)
        bandwidth = i.link_bandwidth
        if nodes > 1:
            across = local * i.network_bandwidth
            bandwidth = across if local == 1 else min(across, bandwidth)
        hops = i.network_latency * (nodes - 1) + i.link_latency * (self.ranks - nodes)
        rounds = 2 if self.op == "all_reduce" else 1
        return i.launch + rounds * hops + self.wire(sum(self.bytes.values())) / bandwidth


@dataclass(frozen=True)
class Sent:
    """All that one rank sends in a step by one collective in one dtype.

    Attributes:
        op, what, dtype: which.
        calls: collectives that carry it; one carries several dtypes where FSDP2 packs them together.
        input_bytes: what the rank hands to the collectives.
        wire_bytes: what it sends, and receives, in a ring.
    """

    op: Op
    what: str
    dtype: str
    calls: int
    input_bytes: int
    wire_bytes: int


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
        order = ("all_gather", "reduce_scatter", "all_reduce")
        return [
            (*key, sides[0].get(key, 0), sides[1].get(key, 0))
            for key in sorted(keys, key=lambda key: order.index(key[0]))
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
        ranks = self.world.fsdp
        if ranks == 1:
            return []
        found: list[Call] = []
        if float8 and (amaxes := sum(map(_amaxes, self._converted()))):
            found.append(Call("all_reduce", "amaxes", "", False, ranks, {"float32": 4 * amaxes}))
        for unit, params in self.units.items():
            if not params:
                continue
            again = bool(unit) or self.root_resharded
            for backward in (False, True)[: 1 + (training and again)]:
                content = int(backward) if copies == "alternate" and again else None
                sizes = _summed(self._gathered(p, content if float8 else None, float8) for p in params)
                found.append(Call("all_gather", "weights", unit, backward, ranks, sizes))
            reduced = _summed(
                [(_name(p.reduce_dtype), ranks * p.shard(ranks) * p.reduce_dtype.itemsize)]
                for p in params
                if p.trained and training
            )
            if reduced:
                found.append(Call("reduce_scatter", "gradients", unit, True, ranks, reduced))
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

    Raises:
        ValueError: for a world or copies that cannot be.
    """
    if copies not in ("both", "alternate"):
        raise ValueError(f"copies must be 'both' or 'alternate', got {copies!r}")
    world = World.parse(world)
    sharded = Sharded.of(model, world, options, param_dtype, reduce_dtype)
    high, float8 = sharded.calls(False, training), sharded.calls(True, training, copies)

    def seconds(calls: Iterable[Call]) -> float | None:
        return sum(call.seconds(interconnect, world.tp) for call in calls) if interconnect else None

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
        doubled=copies == "both" and any(len(p.formats) > 1 for ps in sharded.units.values() for p in ps),
    )


def totals(calls: Iterable[Call]) -> tuple[Sent, ...]:
    """The calls' bytes by collective and dtype, in the order of their first appearance."""
    found: dict[tuple[Op, str, str], list[float]] = {}
    for call in calls:
        for dtype, count in call.bytes.items():
            row = found.setdefault((call.op, call.what, dtype), [0, 0, 0.0])
            row[0] += 1
            row[1] += count
            row[2] += call.wire(count)
    return tuple(Sent(*key, int(row[0]), int(row[1]), round(row[2])) for key, row in found.items())


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
