"""Pass 6, *collectives*: float8 travels, not the tensor it is a copy of.

With sharded weights (DTensor parameters that are gathered where they are used, as in TorchTitan's
SimpleFSDP) or sequence-parallel activations, the graph gathers a tensor in high precision and every
rank quantizes all of it::

    whole = wait_tensor(all_gather_into_tensor(shard, n, group))
    scale = f8fx.scale(f8fx.amax(whole))
    data  = f8fx.quantize(whole, scale)

A cast acts on each element by itself and a gather moves elements, so the two commute; only the amax
has to be taken over all ranks::

    amax  = all_reduce(f8fx.amax(shard), "max", group)
    scale = f8fx.scale(amax)
    data  = wait_tensor(all_gather_into_tensor(f8fx.quantize(shard, scale), n, group))

Half the bytes travel (a quarter for float32), each rank casts only its own shard, and the bits are the same.

What makes it exact
    * A maximum does not depend on the order it is taken in, and all ranks get the same one. It is reduced
      as *int32*: for floats without sign, the bits compare like the numbers, and NaN above all of them. What a
      floating-point maximum does with NaN is left to the backend; it may be dropped.
    * Movement operators (:mod:`passes.gather` lists them) act on float8 as they do on anything else. A
      rounding cast among them is done to the shard, first.
    * A transposed or padded copy is made after the gather, from the float8 data: ``f8fx.quantize`` of a
      float8 tensor with scale one changes no element.
    * The padding of uneven shards is zeros, which change no amax.

Rowwise scales
    Where a shard holds whole rows (the gathered dimension is not the one the scale is taken over), its
    scales are computed there and gathered beside the data. Otherwise the vector of amaxes is reduced over ranks.

When it is not done
    Only if *every* reader of the gathered tensor takes the same (data, scale) does the tensor itself no longer
    travel. A row-major and a transposed copy with one scale are the same; copies with row scales and with column
    scales are not: a rowwise recipe needs the first in the forward and the second in the backward, which is as
    many bytes as bf16. Where the gather is redone in the backward (FSDP that frees weights in between), bf16 travels
    twice, and each half gets its own float8 copy instead. Everything that stays is reported with its reason
    (:class:`f8fx.report.GatherDecision`). Gradients are reduced in high precision.

On the wire
    NCCL takes float8; gloo rejects it, so there the data is viewed as bytes. By default the group's backend
    decides. Native float8 keeps the shapes that Inductor's async tensor parallelism matches (:mod:`passes.async_tp`
    adds what is missing for reduce-scatters). The new gathers are ordinary ``all_gather_into_tensor`` nodes that
    Inductor's bucketing and overlap passes treat like any other. All amax reductions of a group whose inputs are
    there together become one (:mod:`passes.reduction`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import fx

from f8fx import ops
from f8fx.report import GatherDecision
from f8fx.torch_private import group_backend, group_rank

from . import fqn
from .async_tp import expose_gemms
from .commute import Copy, Move, Stay, Use, decide, reduced_dim
from .fake import set_value_by_layout
from .find import backward_nodes
from .gather import (
    Gathered,
    Reader,
    all_gather,
    find_gathered,
    find_readers,
    is_movement,
    shard_axes,
    wait_tensor,
)
from .operand import shape_of
from .reduction import Reduction, combine, insert_reduction
from .rewrite import MARKS, Inserter
from .share import Share

aten = torch.ops.aten
prims = torch.ops.prims

Wire = Literal["auto", "float8", "uint8", "off"]

#: Backends that send float8 tensors.
_SENDS_FLOAT8 = ("nccl", "fake")


class Collectives:
    """Moves casts above gathers, in place.

    Args:
        wire: dtype in which float8 travels; ``"auto"``: as the group's backend can; ``"off"``: gathers stay as
            they are.
    """

    def __init__(self, wire: Wire = "auto") -> None:
        self.wire = wire

    def __call__(self, graph: fx.Graph) -> list[GatherDecision]:
        """Rewrites the graph and says what became of each gather."""
        _erase_dead(graph)
        decisions = []
        reductions: list[Reduction] = []
        backward = backward_nodes(graph)
        # last to first: a tensor sharded over two dimensions of a mesh is gathered twice, and the first
        # gather can move only after the second
        for gathered in reversed(find_gathered(graph)):
            find_readers(gathered)
            decision: Move | Stay
            if self.wire == "off":
                decision = Stay(gathered, 'wire="off"')
            elif self.wire == "float8" and _backend(gathered) == "gloo":
                decision = Stay(
                    gathered, "gloo sends no float8", 'wire="float8"; "auto" and "uint8" send it as bytes'
                )
            else:
                decision = decide(gathered, group_rank, backward)
            decisions.append(_report(decision, gathered, gathered.nodes[0] in backward))
            if isinstance(decision, Move):
                reductions += _Rewrite(graph, decision, self._sends_bytes(gathered)).run()
        if reductions:
            combine(graph, reductions)
        if any(decision.moved for decision in decisions):
            Share()(graph)
        if self.wire != "off":
            expose_gemms(graph)
        return decisions[::-1]

    def _sends_bytes(self, gathered: Gathered) -> bool:
        if self.wire != "auto":
            return self.wire == "uint8"
        return _backend(gathered) not in _SENDS_FLOAT8


def _backend(gathered: Gathered) -> str | None:
    return group_backend(gathered.group, gathered.shard.meta["val"].device)


def _erase_dead(graph: fx.Graph) -> None:
    """Erases movements that nothing reads; `quantize` leaves those of the operands it replaced."""
    for node in [*reversed(graph.nodes)]:
        if not node.users and is_movement(node):
            graph.erase_node(node)


def _report(decision: Move | Stay, gathered: Gathered, backward: bool) -> GatherDecision:
    value = gathered.nodes[0].meta["val"]
    common: dict[str, Any] = {
        "fqn": fqn.of_node(gathered.nodes[0]),
        "shape": tuple(size if isinstance(size, int) else str(size) for size in value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
        "group_size": gathered.group_size,
        "backward": backward,
    }
    if isinstance(decision, Stay):
        return GatherDecision(**common, moved=False, reason=decision.reason, detail=decision.detail)
    detail = f"{decision.bytes_before} bytes become {decision.bytes_after}"
    return GatherDecision(**common, moved=True, reason="moved", detail=detail)


class _Rewrite:
    """One gather, from high precision to float8."""

    def __init__(self, graph: fx.Graph, move: Move, as_bytes: bool) -> None:
        self.graph = graph
        self.gathered = move.gathered
        self.copies = move.copies
        self.as_bytes = as_bytes
        self.anchor = move.gathered.nodes[0]
        self.reductions: list[Reduction] = []

    def run(self) -> list[Reduction]:
        old = {node for gathered in self.gathered.nodes for node in (gathered, *gathered.users)}
        for reader in self.gathered.readers:
            old |= {reader.node, *(node for step in reader.steps for node in step.nodes)}
            if reader.node.target is ops.quantize_both:
                old |= {*reader.node.users}
        for copy in self.copies:
            old |= {*copy.scales}
            self._move(copy)
        while unused := [node for node in old if not node.users]:
            for node in unused:
                self.graph.erase_node(node)
                old.remove(node)
        return self.reductions

    # -- on the shard

    def _move(self, copy: Copy) -> None:
        local = self._inserter(self.anchor, copy.uses[0].reader)
        source = self.gathered.shard
        for dtype in copy.casts:
            source = local(prims.convert_element_type.default, source, dtype)
        matrix, dim = self._matrix(local, source, copy)
        once = self._inserter(self.anchor, copy.amax, once=True)
        amax = once(ops.amax, matrix, dim)
        if not copy.local:
            reduction = insert_reduction(once, amax, self.gathered.group)
            self.reductions.append(reduction)
            amax = reduction.result
        copy.amax.node.replace_all_uses_with(amax)
        self._hoist(copy.scale, amax)
        readers_of = {scale: [*scale.users] for scale in copy.scales}
        data = self._inserter(self.anchor, copy.uses[0].reader, cast=True)(
            ops.quantize, matrix, copy.scale, dtype=copy.dtype, dim=dim, transpose=False, align=[1, 1]
        )
        for scale, reader in copy.scales.items():
            whole = copy.scale if copy.axes is None else self._whole_scale(local, copy, reader)
            for user in readers_of[scale]:
                user.replace_input_with(scale, whole)
        self._gather(local, copy, data)

    def _inserter(self, anchor: fx.Node, reader: Reader, once: bool = False, cast: bool = False) -> Inserter:
        """Inserts for a reader at an anchor, with the anchor's checkpointing marks: what was redone still is.

        Args:
            once: without marks: a reduction over ranks costs more than saving a number.
            cast: leave it to :mod:`passes.tags`, like any other cast.
        """
        provenance = replace(reader.node.meta["f8fx"], inserted_by="collectives", is_result=not cast)
        return Inserter(self.graph, anchor, provenance, marked=not once)

    def _matrix(self, insert: Inserter, source: fx.Node, copy: Copy) -> tuple[fx.Node, int | None]:
        """The shard as a matrix, and the dimension of it that the amax runs over."""
        shape = shape_of(source)
        if copy.axes is None:
            if len(shape) == 2:
                return source, None
            columns = insert.size(source, len(shape) - 1)
            return insert(aten.reshape.default, source, [-1, columns]), None
        inner = 0 not in copy.axes
        if len(shape) == 2:
            return source, 1 if inner else 0
        split = min(copy.axes) if inner else len(copy.axes)
        columns = 1
        for size in shape[split:]:
            columns *= size
        return insert(aten.reshape.default, source, [-1, columns]), 1 if inner else 0

    def _hoist(self, scale: fx.Node, amax: fx.Node) -> None:
        """Moves a scale, and what it takes to get there from the amax, to where the shard is cast."""
        chain = [scale]
        while (source := chain[-1].all_input_nodes[0]) is not amax:
            chain.append(source)
        for node in reversed(chain):
            self.anchor.prepend(node)
            set_value_by_layout(node)
            for mark in MARKS:
                node.meta.pop(mark, None)
            node.meta["f8fx"] = replace(node.meta["f8fx"], is_result=True)

    # -- after the gather

    def _whole_scale(self, insert: Inserter, copy: Copy, reader: Reader) -> fx.Node:
        """The scales of all ranks in the order of the rows or columns of what a reader reads."""
        dim = reduced_dim(reader)
        assert copy.axes is not None and dim is not None
        per_step = shard_axes(reader, dim)
        assert per_step is not None
        shape = [1 if axis in copy.axes else size for axis, size in enumerate(shape_of(self.gathered.shard))]
        scale = copy.scale
        if copy.local:
            scale = insert(aten.reshape.default, scale, shape)
            scale = insert(all_gather, scale, self.gathered.group_size, self.gathered.group)
            scale = insert(wait_tensor, scale)
            scale = self._side_by_side(insert, scale, shape[0], reader.gathered_dim)
        else:
            scale = insert(aten.reshape.default, scale, shape)
        for step, axes in zip(reader.steps, per_step[1:], strict=True):
            call = cast("Callable[..., Any]", step.result.target)
            if step.kind == "permute":
                scale = insert(call, scale, *step.result.args[1:])
            elif step.kind == "view":
                sizes = [1 if axis in axes else size for axis, size in enumerate(shape_of(step.result))]
                scale = insert(aten.reshape.default, scale, sizes)
            elif step.kind == "unpad" and step.dim not in axes:
                scale = insert(call, scale, *step.result.args[1:])
        return insert(aten.reshape.default, scale, [-1])

    def _side_by_side(self, insert: Inserter, stacked: fx.Node, rows: int, dim: int) -> fx.Node:
        if dim == 0:
            return stacked
        split = insert(aten.split.Tensor, stacked, rows)
        pieces = [insert(operator.getitem, split, i) for i in range(self.gathered.group_size)]
        return insert(aten.cat.default, pieces, dim)

    def _gather(self, insert: Inserter, copy: Copy, data: fx.Node) -> None:
        shape = shape_of(self.gathered.shard)
        if len(shape) != 2:
            sizes = [insert.size(self.gathered.shard, axis) for axis in range(len(shape))]
            data = insert(aten.reshape.default, data, sizes)
        if self.as_bytes:
            data = insert(aten.view.dtype, data, torch.uint8)
        data = insert(all_gather, data, self.gathered.group_size, self.gathered.group)
        waited: dict[fx.Node, fx.Node] = {}
        for use in copy.uses:
            if use.reader.wait not in waited:
                waited[use.reader.wait] = self._inserter(use.reader.wait, use.reader)(wait_tensor, data)
        for use in copy.uses:
            use.result.replace_all_uses_with(self._operand(copy, use, dict(waited)))

    def _target(self, copy: Copy, node: fx.Node) -> Any:
        """The operator of a movement, for the float8 copy."""
        # Inductor would fuse gather and gemm, and then reject the scales: the fused operator takes a vector of them
        # only beside a gathered matrix (`_check_and_verify_fp8_all_gather_scale_mode`, torch 2.11 to 2.15).
        # It looks for `view`; this one is the same
        stacked = copy.axes is not None and len(shape_of(self.gathered.shard)) > 2
        return aten._unsafe_view.default if stacked and node.target is aten.view.default else node.target

    def _pad(self, copy: Copy, reader: Reader, node: fx.Node, now: dict[fx.Node, fx.Node]) -> fx.Node:
        """Zeros around the float8 copy: bytes, as float8 has no such operator everywhere, and a zero byte is +0."""
        insert = self._inserter(node, reader)
        data = now[node.args[0]]  # type: ignore[index]
        if self.as_bytes:
            return insert(aten.constant_pad_nd.default, data, node.args[1], 0)
        padded = insert(
            aten.constant_pad_nd.default, insert(aten.view.dtype, data, torch.uint8), node.args[1], 0
        )
        return insert(aten.view.dtype, padded, copy.dtype)

    def _operand(self, copy: Copy, use: Use, now: dict[fx.Node, fx.Node]) -> fx.Node:
        """What a use reads now: the gathered float8 data, moved as the gathered tensor was."""
        reader = use.reader
        current = reader.wait
        for step in reader.steps:
            if step.kind == "cast":
                now[step.result] = now[step.nodes[0].args[0]]  # type: ignore[index]
            elif step.kind == "pad":
                now[step.result] = self._pad(copy, reader, step.result, now)
            else:
                for node in step.nodes:
                    insert = self._inserter(node, reader)
                    args = fx.map_arg(node.args, lambda n: now.get(n, n))
                    now[node] = insert(self._target(copy, node), *args, **node.kwargs)  # type: ignore
            current = step.result
        data = now[current]
        insert = self._inserter(reader.node, reader)
        if self.as_bytes:
            data = insert(aten.view.dtype, data, copy.dtype)
        if not use.transpose and use.align == (1, 1) and data.meta["val"].is_contiguous():
            return data
        device = data.meta["val"].device
        insert = self._inserter(reader.node, reader, cast=True)
        one = insert(aten.full.default, [], 1.0, dtype=torch.float32, device=device, pin_memory=False)
        return insert(
            ops.quantize,
            data,
            one,
            dtype=copy.dtype,
            dim=None,
            transpose=use.transpose,
            align=list(use.align),
        )
