"""One gather, from high precision to float8: what :mod:`passes.collectives` does to those it moves.

The cast goes to the shard, the amax over the group's ranks, and every movement between the gather and its
readers is repeated on the float8 data. What was there is erased as far as nothing else reads it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from f8fx import ops

from . import gather
from .commute import Copy, Move, Use
from .elements import CASTS, amax_dim
from .fake import set_value_by_layout
from .gather import SIZE, Reader, Step, all_gather, is_movement, shard_axes, wait_tensor
from .in_memory import is_in_memory
from .reduction import Reduction, insert_reduction
from .rewrite import MARKS, Inserter
from .rounding import COMPUTED_AS_FLOAT32
from .sizes import shape_of

aten = torch.ops.aten
prims = torch.ops.prims


class Rewrite:
    """The nodes of one gather.

    Args:
        move: what travels.
        as_bytes: whether as a uint8 view.
    """

    def __init__(self, graph: fx.Graph, move: Move, as_bytes: bool) -> None:
        self.graph = graph
        self.gathered = move.gathered
        self.copies = move.copies
        self.as_bytes = as_bytes
        self.anchor = move.gathered.nodes[0]
        self.reductions: list[Reduction] = []
        # what takes the place of an amax; copies may share one that differ in their scales
        self.reduced: dict[fx.Node, fx.Node] = {}
        # what was gathered, at each step, and what took its place; and how the dimensions of what is gathered are ordered
        self.now: dict[fx.Node, fx.Node] = {}
        self.order = [*range(len(shape_of(self.gathered.shard)))]

    def run(self) -> list[Reduction]:
        old = self._replaced()
        for copy in self.copies:
            self._move(copy)
        for node in old & self.now.keys():
            for user in [user for user in node.users if user.target is SIZE]:
                dim = cast("int", user.args[1])
                user.args = (self.now[node], self.order.index(dim) if node in self.gathered.nodes else dim)
        while unused := [node for node in old if not node.users]:
            for node in unused:
                self.graph.erase_node(node)
                old.remove(node)
        return self.reductions

    def _replaced(self) -> set[fx.Node]:
        """What is not needed any more, if nothing else reads it."""
        old = {node for gathered in self.gathered.nodes for node in (gathered, *gathered.users)}
        for reader in self.gathered.readers:
            old |= {reader.node, *reader.nodes}
            if reader.node.target is ops.quantize_both:
                old |= {*reader.node.users}
        # what the graph makes to be written over
        into = {cast("fx.Node", node.args[0]) for node in old if node.target is gather.copy}
        old |= {node for node in into if node.op == "call_function"}
        return old.union(*(copy.scales for copy in self.copies))

    # -- on the shard

    def _move(self, copy: Copy) -> None:
        local = self._inserter(self.anchor, copy.uses[0].reader)
        source = _rounded(local, self.gathered.shard)
        for dtype in copy.casts:
            source = local(prims.convert_element_type.default, source, dtype)
        matrix, dim = self._matrix(local, source, copy)
        if copy.amax.node not in self.reduced:
            self.reduced[copy.amax.node] = self._reduce(matrix, dim, copy)
        self._hoist(copy.scale, self.reduced[copy.amax.node])
        readers_of = {scale: [*scale.users] for scale in copy.scales}
        data = self._inserter(self.anchor, copy.uses[0].reader, cast=True)(
            ops.quantize, matrix, copy.scale, dtype=copy.dtype, dim=dim, transpose=False, align=[1, 1]
        )
        for scale, reader in copy.scales.items():
            whole = copy.scale if copy.axes is None else self._whole_scale(local, copy, reader)
            for user in readers_of[scale]:
                user.replace_input_with(scale, whole)
        self._gather(local, copy, data)

    def _reduce(self, matrix: fx.Node, dim: int | None, copy: Copy) -> fx.Node:
        """Puts the amax of the shard, over all ranks where that is due, in the place of that of the whole."""
        once = self._inserter(self.anchor, copy.amax, once=True)
        amax = once(ops.amax, matrix, dim)
        if not copy.local:
            reduction = insert_reduction(once, amax, self.gathered.group)
            self.reductions.append(reduction)
            amax = reduction.result
        copy.amax.node.replace_all_uses_with(amax)
        return amax

    def _inserter(self, anchor: fx.Node, reader: Reader, once: bool = False, cast: bool = False) -> Inserter:
        """Inserts for a reader at an anchor, with the anchor's checkpointing marks: what was redone still is.

        Args:
            once: without marks: a reduction over ranks costs more than saving a number.
            cast: leave it to :mod:`passes.tags`, like any other cast.
        """
        provenance = replace(reader.node.meta["f8fx"], inserted_by="collectives", is_result=not cast)
        return Inserter(self.graph, anchor, provenance, marked=not once)

    def _order(self, copy: Copy) -> list[int] | None:
        """How the shard's dimensions are ordered on the wire, if not as in the shard: those that are scaled stand together.

        Of experts ``[e, n, k]`` the ``grad_input`` scales over ``n``. They were going to be turned after the gather. The
        first dimension stays the first, as shards are stacked along it.
        """
        if copy.axes is None:
            return None
        dims = [*range(len(shape_of(self.gathered.shard)))]
        order = sorted(dims, key=lambda dim: (dim in copy.axes) != (0 in copy.axes))  # type: ignore[operator]
        return None if order == dims else order

    def _matrix(self, insert: Inserter, source: fx.Node, copy: Copy) -> tuple[fx.Node, int | None]:
        """The shard as a matrix, and the dimension of it that the amax runs over."""
        if order := self._order(copy):
            turned = insert(aten.permute.default, source, order)
            source = insert.contiguous(turned)
        shape = shape_of(source)
        if copy.axes is None:
            if len(shape) == 2:
                return source, None
            columns = insert.size(source, len(shape) - 1)
            return insert(aten.reshape.default, source, [-1, columns]), None
        inner = 0 not in copy.axes
        if len(shape) == 2:
            return source, 1 if inner else 0
        split = len(shape) - len(copy.axes) if inner else len(copy.axes)
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
        dim = amax_dim(reader.node)
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

    def _is_matrix(self, copy: Copy) -> bool:
        """Whether all that is read of the gathered tensor is the matrix of its rows, as which it is sent then.

        Inductor's async tensor parallelism knows that form of a gemm; of three dimensions only one that the gemm's result has, too.
        """
        shape = shape_of(self.gathered.shard)
        passed = [*self.gathered.nodes]
        for use in copy.uses:
            reader = use.reader
            is_viewed = all(step.kind in ("view", "cast", "copy") for step in reader.steps)
            if not is_viewed or len(shape_of(reader.source)) != 2 or shape_of(reader.source)[1] != shape[-1]:
                return False
            passed += [reader.wait, *reader.nodes]
        has_sizes = any(user.target is SIZE for node in passed for user in node.users)
        return self._order(copy) is None and not has_sizes and all(isinstance(size, int) for size in shape)

    def _gather(self, insert: Inserter, copy: Copy, data: fx.Node) -> None:
        shape = shape_of(self.gathered.shard)
        is_matrix = self._is_matrix(copy)
        if len(shape) != 2 and not is_matrix:
            order = self._order(copy)
            sizes = [insert.size(self.gathered.shard, axis) for axis in order or range(len(shape))]
            data = insert(aten.reshape.default, data, sizes)
        if self.as_bytes:
            data = insert(aten.view.dtype, data, torch.uint8)
        data = insert(all_gather, data, self.gathered.group_size, self.gathered.group)
        self.now |= dict.fromkeys(self.gathered.nodes, data)
        self.order = self._order(copy) or [*range(len(shape))]
        waited: dict[fx.Node, fx.Node] = {}
        for use in copy.uses:
            if use.reader.wait not in waited:
                insert = self._inserter(use.reader.wait, use.reader)
                waited[use.reader.wait] = self._turned_back(insert, insert(wait_tensor, data), copy)
        for use in copy.uses:
            use.result.replace_all_uses_with(self._operand(copy, use, dict(waited), is_matrix))

    def _turned_back(self, insert: Inserter, gathered: fx.Node, copy: Copy) -> fx.Node:
        order = self._order(copy)
        if order is None:
            return gathered
        return insert(aten.permute.default, gathered, [order.index(axis) for axis in range(len(order))])

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

    def _moved(
        self, copy: Copy, reader: Reader, step: Step, node: fx.Node, now: dict[fx.Node, fx.Node]
    ) -> fx.Node:
        """The float8 data after one node of a step."""
        if step.kind == "pad":
            return self._pad(copy, reader, node, now)
        source = cast("fx.Node", node.args[step.kind == "copy"])
        is_cloned = node.target is aten.clone.default and now[source].meta["val"].is_contiguous()
        if step.kind in ("cast", "copy") or is_cloned:
            return now[source]
        args: Any = fx.map_arg(node.args, lambda n: now.get(n, n))
        return self._inserter(node, reader)(self._target(copy, node), *args, **node.kwargs)

    def _operand(self, copy: Copy, use: Use, now: dict[fx.Node, fx.Node], is_matrix: bool) -> fx.Node:
        """What a use reads now: the gathered float8 data, moved as the gathered tensor was."""
        reader = use.reader
        for step in () if is_matrix else reader.steps:
            for node in step.nodes:
                now[node] = self._moved(copy, reader, step, node, now)
        self.now |= now
        data = now[reader.wait if is_matrix else reader.source]
        insert = self._inserter(reader.node, reader, cast=True)
        if self.as_bytes:
            sizes = shape_of(data)
            if _is_left_of_gemm(use.result) and all(isinstance(size, int) for size in sizes):
                # Inductor would fuse gather and gemm, and give the fused operator bytes: it looks through the next view
                data = insert(aten._unsafe_view.default, data, [*sizes])
            data = insert(aten.view.dtype, data, copy.dtype)
        if not use.transpose and use.align == (1, 1) and data.meta["val"].is_contiguous():
            return data
        device = data.meta["val"].device
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


def _is_left_of_gemm(node: fx.Node) -> bool:
    return any(user.target is aten._scaled_mm.default and user.args[0] is node for user in node.users)


def _rounded(insert: Inserter, source: fx.Node) -> fx.Node:
    """The shard as it would have been sent: the kernel that makes it and casts it must round it in between."""
    if source.meta["val"].dtype not in COMPUTED_AS_FLOAT32 or _was_rounded(source):
        return source
    return insert(ops.rounded, source)


def _was_rounded(node: fx.Node) -> bool:
    if node.target is gather.copy:
        return _was_rounded(cast("fx.Node", node.args[1]))
    if node.target in CASTS or not is_movement(node):
        return is_in_memory(node)
    return all(map(_was_rounded, node.all_input_nodes))  # as of a shard that was itself gathered
