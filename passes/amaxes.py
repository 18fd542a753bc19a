"""Pass 6a, *amaxes*: the largest magnitude of a tensor is the largest of those of its rows, or of its columns.

A recipe may scale a tensor by rows for one matmul and as a whole for another (``rowwise_with_gw_hp`` does so
with weights: by rows in the forward, as a whole in the backward). The amaxes of the rows are there already, a few
kilobytes, so the tensor is not read again. A maximum does not round: the result is the same to the bit,
NaN included.

Where there are none, rows are what a whole amax is taken of (:mod:`f8fx.lowerings`), in the kernel that computes them. But a
gradient of a layer with a bias is also summed, along its columns, and Inductor's kernels reduce in one direction: all that the
gradient is computed from would be read for its rows, and again for its columns. The amaxes of its columns ride in the
kernel of the sums. Tensors that are tall are left to Inductor, which has a kernel for sums of columns and amaxes of rows.
Where rows have to be in a kernel anyway (a norm's gradient), their amaxes ride there.

Runs behind *collectives*, which know how the amax of a gathered tensor follows from those of its shards.
"""

from __future__ import annotations

import torch
from torch import fx

from f8fx import ops
from f8fx.torch_private import sums_both_ways

from .backward import backward_nodes
from .columns import column_sums, inputs_of, is_over_rows, side_by_side
from .elements import amax_dim
from .in_memory import is_in_memory
from .rewrite import Inserter, Provenance
from .sizes import shape_of

#: A tensor of at most so many bytes is still in the cache when it is read again: half of an H100's.
CACHED = 25 << 20


class Amaxes:
    """Replaces ``amax`` of a whole tensor where its rows' or columns' amaxes exist or cost no read, in place."""

    def __call__(self, graph: fx.Graph) -> None:
        vectors: dict[fx.Node, fx.Node] = {}
        wholes: list[fx.Node] = []
        for node in graph.nodes:
            if node.target is ops.amax and "f8fx" in node.meta:
                if amax_dim(node) is None:
                    wholes.append(node)
                else:
                    vectors.setdefault(_source(node), node)
        backward = backward_nodes(graph) if wholes else set()
        for whole in wholes:
            vector = vectors.get(_source(whole))
            if vector is None:
                if whole in backward and _is_summed(_source(whole), backward):
                    _derive(graph, whole, _inserter(graph, whole)(ops.amax, _source(whole), 0))
                continue
            if whole < vector:
                if _is_forward(vector) != _is_forward(whole):
                    continue  # made in the forward, it would have to be kept for the backward
                whole.prepend(vector)  # all it reads is what `whole` reads
            _derive(graph, whole, vector)


def _source(amax: fx.Node) -> fx.Node:
    source = amax.args[0]
    assert isinstance(source, fx.Node)
    return source


def _is_forward(node: fx.Node) -> bool:
    return node.meta["f8fx"].role == "output"


def _is_summed(source: fx.Node, backward: set[fx.Node]) -> bool:
    """Whether sums of a tensor's columns read all of it, in a kernel of their own that can take amaxes along."""
    sizes = shape_of(source)
    if not all(type(size) is int for size in sizes) or not any(
        user in backward and (user.target is ops.column_sums or is_over_rows(user))
        for tensor in {*side_by_side(source), source}
        for user in column_sums(tensor)
    ):
        return False
    for part in side_by_side(source):
        value = part.meta["val"]
        if value.numel() * value.element_size() <= CACHED or sums_both_ways(*value.shape):
            return False
        if not is_in_memory(part) and inputs_of(part) is None:
            return False
    return True


def _inserter(graph: fx.Graph, whole: fx.Node) -> Inserter:
    own: Provenance = whole.meta["f8fx"]
    return Inserter(graph, whole, Provenance(own.gemm, own.fqn, own.role, "amaxes"))


def _derive(graph: fx.Graph, whole: fx.Node, vector: fx.Node) -> None:
    """Makes `whole` read the amaxes of rows or columns instead of the tensor."""
    whole.args = (_inserter(graph, whole)(torch.ops.aten.unsqueeze.default, vector, 0), None)
