"""Maxima over the ranks of a group: how one is taken, and how many become one.

Each gather that :mod:`passes.collectives` moves puts a reduction of its own into the graph. A reduction of
four bytes costs a round trip and no bandwidth, so those of one group whose inputs are there before the
first result is needed are done together, as one vector. For weights that is all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from f8fx import ops
from f8fx.torch_private import c10d

from .backward import backward_nodes
from .gather import is_movement
from .rewrite import Inserter, hoist
from .sizes import shape_of

aten = torch.ops.aten

#: All bits of a float32 but its sign.
_MAGNITUDE = 0x7FFFFFFF


@dataclass
class Reduction:
    """One maximum over ranks.

    Attributes:
        nodes: in graph order; the first reads the amax of this rank, the last is ``result``.
        group: last argument of the collective.
        insert: inserts with this reduction's provenance.
    """

    nodes: tuple[fx.Node, ...]
    group: Any
    insert: Inserter

    @property
    def amax(self) -> fx.Node:
        return self.nodes[0].args[0]  # type: ignore[return-value]

    @property
    def result(self) -> fx.Node:
        return self.nodes[-1]


def insert_reduction(insert: Inserter, amax: fx.Node, group: Any) -> Reduction:
    """The largest of all ranks' ``amax``, element by element; NaN if any is NaN.

    Compared as integers: see :mod:`passes.collectives`. The sign is cleared because a NaN may have one.
    """
    bits = insert(aten.view.dtype, amax, torch.int32)
    magnitude = insert(aten.bitwise_and.Scalar, bits, _MAGNITUDE)
    reduced = insert(c10d.all_reduce.default, magnitude, "max", group)
    waited = insert(c10d.wait_tensor.default, reduced)
    result = insert(aten.view.dtype, waited, torch.float32)
    return Reduction((bits, magnitude, reduced, waited, result), group, insert)


def combine(graph: fx.Graph, reductions: Sequence[Reduction]) -> None:
    """Reductions of one group whose inputs are ready together become one, in place.

    Of weights that are sharded over two dimensions of a mesh the reductions over one group read those over the other. So groups
    follow each other.
    """
    groups: dict[Any, list[Reduction]] = defaultdict(list)
    for reduction in sorted(reductions, key=_first):
        groups[reduction.group].append(reduction)
    for of_group in groups.values():
        _combine(graph, of_group)


def _combine(graph: fx.Graph, reductions: Sequence[Reduction]) -> None:
    backward = backward_nodes(graph)
    buckets: dict[bool, list[list[Reduction]]] = defaultdict(list)
    for reduction in sorted(reductions, key=_first):
        # a tangent is an input of the joint graph, but is not there before the forward has run
        mine = buckets[reduction.amax in backward]
        # the last bucket only: ranks must agree on the order of collectives, and this keeps it
        if mine and _hoistable(reduction.amax, _first(mine[-1][0])):
            mine[-1].append(reduction)
        else:
            mine.append([reduction])
    for bucket in sorted((b for bs in buckets.values() for b in bs), key=lambda bucket: _first(bucket[0])):
        if len(bucket) > 1:
            _merge(graph, bucket)


def _first(reduction: Reduction) -> fx.Node:
    return reduction.nodes[0]


def _hoistable(node: fx.Node, anchor: fx.Node) -> bool:
    """Whether a value is there before `anchor`, or follows from what is by casts, views and an amax."""
    if node < anchor:
        return True
    can_move = is_movement(node) or node.target in (ops.amax, ops.rounded)
    return can_move and all(_hoistable(source, anchor) for source in node.all_input_nodes)


def _merge(graph: fx.Graph, bucket: list[Reduction]) -> None:
    anchor = bucket[0].nodes[0]
    for reduction in bucket[1:]:
        hoist(reduction.amax, anchor)
    insert = Inserter(graph, anchor, bucket[0].insert.provenance, marked=False)
    lengths = [shape_of(reduction.amax) for reduction in bucket]
    vectors = [
        reduction.amax if shape else insert(aten.reshape.default, reduction.amax, [1])
        for reduction, shape in zip(bucket, lengths, strict=True)
    ]
    whole = insert_reduction(insert, insert(aten.cat.default, vectors), bucket[0].group).result
    start = 0
    for reduction, shape in zip(bucket, lengths, strict=True):
        length = shape[0] if shape else 1
        part = insert(aten.slice.Tensor, whole, 0, start, start + length)
        start += length
        if not shape:
            part = insert(aten.reshape.default, part, [])
        reduction.result.replace_all_uses_with(part)
    for reduction in bucket:
        for node in reversed(reduction.nodes):
            graph.erase_node(node)
