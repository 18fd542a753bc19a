"""Whether a gather can carry float8, and what it then carries: :func:`decide` returns a ``Move`` or a ``Stay``.

Only looks; :mod:`passes.collectives` says why these are the rules and acts on them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Set
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx

from f8fx import ops
from f8fx.recipe import HIGH_DTYPES
from f8fx.torch_private import c10d, size_hint

from .elements import COPIES, amax_dim
from .gather import Gathered, Reader, Step, is_padding, shard_axes
from .matmuls import FLOAT8_MATMULS
from .origins import is_of_gather
from .rewrite import RECOMPUTED
from .sizes import shape_of

aten = torch.ops.aten

#: What stands between an amax that this pass has reduced over ranks and its scale.
_REDUCTION = frozenset(
    (
        aten.view.dtype,
        aten.bitwise_and.Scalar,
        c10d.all_reduce.default,
        c10d.wait_tensor.default,
    )
)
#: An all-reduce sends each byte twice: once to be reduced, once as a result.
_ALL_REDUCE_COST = 2


@dataclass(frozen=True)
class Use:
    """One float8 copy that a reader makes of the gathered tensor."""

    reader: Reader
    result: fx.Node
    transpose: bool
    align: tuple[int, int]


@dataclass
class Copy:
    """The float8 copy that travels, and what is made of it.

    Attributes:
        scales: the nodes that give its scale, each with the reader it comes from. More than one where the tensor
            is gathered more than once.
        dtype: float8 dtype.
        casts: roundings of the source on the way to the amax, done on the shard instead.
        axes: dimensions of the shard that a scale is taken over; ``None``: all, one scale.
        local: whether a shard has whole groups of them, so that scales need not be compared with other ranks'.
        uses: the copies that readers make.
    """

    scales: dict[fx.Node, Reader]
    dtype: torch.dtype
    casts: tuple[torch.dtype, ...]
    axes: frozenset[int] | None
    local: bool
    uses: list[Use] = field(default_factory=list)

    @property
    def scale(self) -> fx.Node:
        return next(iter(self.scales))

    @property
    def amax(self) -> Reader:
        return self.scales[self.scale]

    @property
    def format(self) -> Hashable:
        """Equal for copies of one tensor that hold the same bytes."""
        kwargs = tuple(sorted(self.scale.kwargs.items()))
        return self.dtype, self.casts, self.axes, self.local, kwargs, _reductions(self.scale)


@dataclass(frozen=True)
class Move:
    """A gather that is to carry float8."""

    gathered: Gathered
    copies: list[Copy]
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Stay:
    """A gather to leave as it is, and why."""

    gathered: Gathered
    reason: str
    detail: str = ""


#: Gives the calling process's rank within the group of a gather, ``None`` where there is none.
RankIn = Callable[[Any], "int | None"]


class _Refused(Exception):
    """The reason, and the same with names or numbers."""


def decide(gathered: Gathered, rank_in: RankIn, backward: Set[fx.Node]) -> Move | Stay:
    """Whether float8 can travel instead, exactly and with fewer bytes.

    Args:
        rank_in: gives this process's rank in a group.
        backward: the nodes that depend on gradients.
    """
    try:
        return _decide(gathered, rank_in, backward)
    except _Refused as refused:
        return Stay(gathered, *refused.args)


def _decide(gathered: Gathered, rank_in: RankIn, backward: Set[fx.Node]) -> Move:
    quantized = [reader for reader in gathered.readers if reader.node.target is not ops.amax]
    others = ", ".join(sorted({_name(node) for node in gathered.others}))
    if gathered.shard.meta["val"].dtype not in HIGH_DTYPES:
        dtype = gathered.shard.meta["val"].dtype
        if dtype.is_floating_point:
            raise _Refused("already float8" if dtype.itemsize == 1 else "not bf16, fp16 or fp32")
        raise _Refused("no floating-point tensor")
    if not quantized:
        raise _Refused("no float8 matmul reads it", others)
    if others:
        raise _Refused("also read in high precision", others)
    for reader in gathered.readers:
        for step in reader.steps:
            if step.kind == "unpad":
                _check_padding(gathered, step, rank_in)
    copies: dict[Hashable, Copy] = {}
    for reader in quantized:
        for scale, dim, use in _uses(reader):
            made = _copy(gathered, reader, scale, dim)
            copy = copies.setdefault(made.format, made)
            copy.scales.update(made.scales)
            copy.uses.append(use)
    if any(len(copy.scales) > 1 and _reductions(copy.scale) for copy in copies.values()):
        raise _Refused("gathered over another group more than once")
    amaxes = {amax.node for copy in copies.values() for amax in copy.scales.values()}
    for reader in gathered.readers:
        if reader.node.target is ops.amax and reader.node not in amaxes:
            raise _Refused("an amax of it is no scale of its copy", reader.node.name)
    if gathered.group_size == 1:
        raise _Refused("would save no bytes", "one rank has all of it")
    before, after = _bytes(gathered, list(copies.values()), backward)
    if after >= before and len(copies) > 1:
        raise _Refused("its readers need different float8 copies", _difference(list(copies.values())))
    if after >= before:
        raise _Refused("would save no bytes", f"{before} as it is, {after} in float8")
    return Move(gathered, list(copies.values()), before, after)


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet).removeprefix("aten.") if packet is not None else str(node.target)


# -- padding


_CUT = "the end of it is dropped, and may be more than padding"


def _check_padding(gathered: Gathered, step: Step, rank_in: RankIn) -> None:
    """What an uneven shard is padded with may not count in its amax: it has to be zeros.

    Shards are padded to the size of the largest: what cuts more off is no unpadding, on any rank. Beyond that each
    rank vouches for its own shard. That all ranks come to the same decision is checked elsewhere
    (:mod:`f8fx.ranks.agreement`).
    """
    length, end = shape_of(gathered.shard)[step.dim], shape_of(step.result)[step.dim]
    rank = rank_in(gathered.group)
    if rank is None or not isinstance(length, int) or not isinstance(end, int):
        raise _Refused(_CUT)
    whole = gathered.group_size * length
    if -(-end // gathered.group_size) != length:
        raise _Refused(_CUT, f"{whole - end} of {whole} rows")
    dropped = min(max((rank + 1) * length - end, 0), length)
    node, padded = gathered.shard, 0
    while node.op == "call_function":
        if is_padding(node):
            before_last = 2 * (len(shape_of(node)) - 1 - step.dim)
            pads = node.args[1]
            padded += pads[before_last + 1] if before_last < len(pads) else 0  # type: ignore
        elif node.target not in COPIES:
            break
        node = node.args[0]  # type: ignore[assignment]
    if dropped > padded:
        raise _Refused(_CUT, f"{dropped} of {length} rows")


# -- copies


def _uses(reader: Reader) -> list[tuple[fx.Node, int | None, Use]]:
    """The scale, the reduced dimension of the operand and the use for each copy that a reader makes."""
    node = reader.node
    kwargs: dict[str, Any] = {"align": (1, 1), "align_t": (1, 1), **node.kwargs}
    scales: tuple[Any, ...] = node.args[1:]
    dim, dim_t = kwargs.get("dim"), kwargs.get("dim_t")
    align, align_t = tuple(kwargs["align"]), tuple(kwargs["align_t"])
    if node.target is ops.quantize:
        return [(scales[0], dim, Use(reader, node, kwargs.get("transpose", False), align))]
    found: list[tuple[fx.Node, int | None, Use]] = []
    for item in node.users:
        if item.args[1] == 0:
            found.append((scales[0], dim, Use(reader, item, False, align)))
        else:
            found.append((scales[1], dim_t, Use(reader, item, True, align_t)))
    return found


def _copy(gathered: Gathered, reader: Reader, scale: fx.Node, dim: int | None) -> Copy:
    amax = _amax_of(gathered, scale)
    dtype: torch.dtype = reader.node.kwargs["dtype"]  # type: ignore[assignment]
    if amax is None or amax.casts != reader.casts or amax_dim(amax.node) != dim:
        raise _Refused("scale is not the amax of the gathered tensor", scale.name)
    if dim is None:
        return Copy({scale: amax}, dtype, amax.casts, None, False)
    if amax.source is not reader.source:
        raise _Refused("scale is not the amax of the gathered tensor", scale.name)
    if any(step.kind == "pad" for step in amax.steps):
        raise _Refused("padded after the gather, with rowwise scales")
    if is_of_gather(gathered.shard) and any(step.kind == "unpad" for step in amax.steps):
        # DTensor pads what the other gather gives on the ranks of the last shards alone, and there it would stay as it is
        raise _Refused("uneven over two dimensions of a mesh, with rowwise scales")
    per_step, shape = shard_axes(amax, dim), shape_of(gathered.shard)
    passed = (gathered.shard, *(step.result for step in amax.steps))
    if not all(isinstance(size, int) for node in passed for size in shape_of(node)):
        raise _Refused("rowwise scales of dynamic sizes")
    if per_step is None:
        raise _Refused("a view cuts across the dimension that is scaled")
    axes = per_step[0]
    if len(axes) == len(shape):
        raise _Refused("one row that is all of the shard")
    return Copy({scale: amax}, dtype, amax.casts, axes, amax.gathered_dim not in axes)


def _amax_of(gathered: Gathered, scale: fx.Node) -> Reader | None:
    """The reader that a scale is computed from, at most reduced over other ranks in between."""
    if scale.target is not ops.scale:
        return None
    node = scale.args[0]
    while isinstance(node, fx.Node) and node.target in _REDUCTION:
        node = node.args[0]
    return next(
        (reader for reader in gathered.readers if reader.node is node and node.target is ops.amax), None
    )


def _reductions(scale: fx.Node) -> tuple[Hashable, ...]:
    """The groups that the amax of a scale has already been reduced over."""
    groups: list[Any] = []
    node = scale.args[0]
    while isinstance(node, fx.Node) and node.target in _REDUCTION:
        groups += [node.args[2]] if node.target is c10d.all_reduce.default else []
        node = node.args[0]
    return tuple(groups)


def _difference(copies: list[Copy]) -> str:
    parts: dict[str, set[Any]] = defaultdict(set)
    for copy in copies:
        parts["dtypes"].add(copy.dtype)
        parts["roundings"].add(copy.casts)
        parts["granularities"].add(copy.axes)
    return ", ".join(name for name, values in parts.items() if len(values) > 1) or "scales"


# -- what it costs


def _bytes(gathered: Gathered, copies: list[Copy], backward: Set[fx.Node]) -> tuple[int, int]:
    """Bytes gathered in a step as it is and in float8, scales included.

    A gather that checkpointing redoes in the backward, as FSDP does to free the weights in between, counts
    twice if both halves read it.
    """
    shard = gathered.shard.meta["val"]
    sizes = [size_hint(size) or 1 for size in shard.shape]
    elements = prod(sizes) * gathered.group_size
    redone = gathered.nodes[0].meta.get("recompute") in RECOMPUTED

    def times(uses: list[Use]) -> int:
        halves = {half for use in uses for half in _halves(use.result, backward)}
        return max(len(halves), 1) if redone else 1

    after = 0
    for copy in copies:
        groups = prod(
            size for axis, size in enumerate(sizes) if copy.axes is not None and axis not in copy.axes
        )
        if copy.local:
            after += times(copy.uses) * (elements + 4 * groups * gathered.group_size)
        else:
            after += times(copy.uses) * elements + _ALL_REDUCE_COST * 4 * groups
    before = times([use for copy in copies for use in copy.uses]) * elements * shard.dtype.itemsize
    return before, after


def _halves(node: fx.Node, backward: Set[fx.Node]) -> set[bool]:
    """Whether the backward (True) and the forward (False) compute with a value."""
    found: set[bool] = set()
    for user in node.users:
        if user in backward:
            found.add(True)
        elif user.target in FLOAT8_MATMULS:
            found |= {False, _is_redone(user, backward)}
        else:
            found |= _halves(user, backward)
    return found


def _is_redone(gemm: fx.Node, backward: Set[fx.Node]) -> bool:
    """Whether checkpointing runs a gemm of the forward again: the backward needs what its region computes of it."""
    region, seen, todo = gemm.meta.get("ac_graph_id"), {gemm}, [gemm]
    while todo:
        node = todo.pop()
        if node.meta.get("recompute") not in RECOMPUTED or node.meta.get("ac_graph_id") != region:
            continue
        if any(user in backward for user in node.users if user.op != "output"):
            return True
        todo += [user for user in node.users if user not in seen]
        seen.update(node.users)
    return False
