"""One rank's collectives, and their bytes and seconds on the wire: of graphs here, of FSDP2's hooks in
:mod:`f8fx.communication`.

**Bytes on the wire** are those of a ring of N ranks, of which each sends as much as it receives, for a tensor of B
bytes: ``B (N - 1) / N`` for an all-gather (B: what comes out) and a reduce-scatter (B: what goes in), twice that for
an all-reduce, and B for a broadcast (all but the last rank pass it on). **Seconds** are these bytes at line rate plus the hops' latency, one collective after the other: what the wire
needs at least, of which overlap with computation hides a part. Predicted, not measured; NCCL leaves rings for other
algorithms where latency counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch import fx

from .graph_bytes import nbytes
from .interconnect import Interconnect
from .report import dtype_name
from .torch_private import is_collective, process_group, tree_leaves

Op = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]

#: What a collective carries that stands in a compiled graph: an activation or its gradient, or a weight that is
#: gathered there.
IN_GRAPH = "in the graph"


_OPS: Mapping[str, Op] = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "broadcast": "broadcast",
    # of several tensors that travel together
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_reduce_coalesced": "all_reduce",
}


@dataclass(frozen=True)
class World:
    """The mesh: ranks that FSDP2 shards over, times ranks that tensor parallelism splits over, times replicas.

    Attributes:
        replicate: how many groups hold all of the model, as in HSDP; the mesh's first dimension.
    """

    fsdp: int
    tp: int = 1
    replicate: int = 1

    def __post_init__(self) -> None:
        for name, size in (("fsdp", self.fsdp), ("tp", self.tp), ("replicate", self.replicate)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"world: {name} must be a whole number of at least 1, got {size!r}")

    @property
    def size(self) -> int:
        """All ranks."""
        return self.replicate * self.fsdp * self.tp

    def __str__(self) -> str:
        dims = (("replicas", self.replicate), ("FSDP", self.fsdp), ("TP", self.tp))
        shown = [(name, str(size)) for name, size in dims if size > 1 or name == "FSDP"]
        names, sizes = (" x ".join(column) for column in zip(*shown, strict=True))
        return sizes if len(shown) == 1 else f"{sizes} ({names})"

    @staticmethod
    def parse(world: World | int | str) -> World:
        """From ``8``, ``"8"``, ``"8x4"`` or ``"replicate=2,fsdp=8,tp=4"``: its parts in any order, 1 those left out.

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
        parts = [re.fullmatch(r"(fsdp|tp|replicate)=(\d+)", part) for part in text.split(",")]
        sizes = {part[1]: int(part[2]) for part in parts if part}
        if len(sizes) == len(parts):
            return World(**{"fsdp": 1, **sizes})
        raise ValueError(
            "world must be like 8, 8x4 (FSDP x TP), fsdp=8,tp=4, replicate=2,fsdp=8 (HSDP) or replicate=8 (DDP), "
            f"got {world!r}"
        )


@dataclass(frozen=True)
class Call:
    """One collective, seen from one rank.

    Attributes:
        op: which.
        what: ``weights``, ``gradients`` or ``amaxes`` of FSDP2, or :data:`IN_GRAPH`.
        unit: the wrapped module, "" for the root.
        backward: whether it belongs to the backward.
        ranks: of its group.
        bytes: what the rank hands in, by dtype; different dtypes travel together.
        stride: between the ranks of the group: 1 where they are next to each other.
    """

    op: Op
    what: str
    unit: str
    backward: bool
    ranks: int
    bytes: Mapping[str, int]
    stride: int = 1

    def wire(self, count: float) -> float:
        """Bytes that a rank sends, and receives, in a ring, if it hands in ``count``."""
        if self.op == "all_gather":
            return count * (self.ranks - 1)
        if self.op == "broadcast":
            return count
        return count * (self.ranks - 1) / self.ranks * (2 if self.op == "all_reduce" else 1)

    def seconds(self, interconnect: Interconnect) -> float:
        """Predicted.

        As many rings as the group has GPUs in a node run side by side, each over another GPU's network port.
        """
        i = interconnect
        local = max(1, i.node // self.stride)
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


def calls_of(graph: fx.Graph, backward: bool) -> list[Call]:
    """The collectives that stand in a graph. Left out: those of a group that this process does not know.

    A size that is known when the graph runs only counts as 0.
    """
    found: list[Call] = []
    for node in graph.nodes:
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "").rstrip("_")
        if not is_collective(node) or name not in _OPS:
            continue
        group = process_group(node.args[-1])
        if group is None:
            continue
        ranks = dist.get_process_group_ranks(group)
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        what = "amaxes" if name == "all_reduce" and "f8fx" in node.meta else IN_GRAPH
        sizes: dict[str, int] = {}
        for sent in tree_leaves(node.args[0]):
            value = sent.meta["val"]
            dtype = dtype_name(value.dtype)
            sizes[dtype] = sizes.get(dtype, 0) + nbytes(value)
        found.append(Call(_OPS[name], what, "", backward, len(ranks), sizes, stride))
    return [call for call in found if call.ranks > 1]
