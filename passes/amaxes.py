"""Pass 6a, *amaxes*: the largest magnitude of a tensor is the largest of those of its rows.

A recipe may scale a tensor by rows for one matmul and as a whole for another (``rowwise_with_gw_hp`` does so
with weights: by rows in the forward, as a whole in the backward). The amaxes of the rows are there already, a few
kilobytes, so the tensor is not read again. A maximum does not round: the result is the same to the bit,
NaN included.

Runs behind *collectives*, which know how the amax of a gathered tensor follows from those of its shards.
"""

from __future__ import annotations

import torch
from torch import fx

from f8fx import ops

from .rewrite import Inserter, Provenance


class Amaxes:
    """Replaces ``amax`` of a whole tensor where its rows' or columns' amaxes exist, in place."""

    def __call__(self, graph: fx.Graph) -> None:
        order = {node: index for index, node in enumerate(graph.nodes)}
        vectors: dict[fx.Node, fx.Node] = {}
        wholes: list[fx.Node] = []
        for node in order:
            if node.target is ops.amax and "f8fx" in node.meta:
                if _dim(node) is None:
                    wholes.append(node)
                else:
                    vectors.setdefault(_source(node), node)
        for whole in wholes:
            vector = vectors.get(_source(whole))
            if vector is None:
                continue
            if order[vector] > order[whole]:
                if _is_forward(vector) != _is_forward(whole):
                    continue  # made in the forward, it would have to be kept for the backward
                whole.prepend(vector)  # all it reads is what `whole` reads
            _derive(graph, whole, vector)


def _source(amax: fx.Node) -> fx.Node:
    source = amax.args[0]
    assert isinstance(source, fx.Node)
    return source


def _dim(amax: fx.Node) -> object:
    return amax.args[1] if len(amax.args) > 1 else amax.kwargs.get("dim")


def _is_forward(node: fx.Node) -> bool:
    return node.meta["f8fx"].role == "output"


def _derive(graph: fx.Graph, whole: fx.Node, vector: fx.Node) -> None:
    """Makes `whole` read the amaxes of the rows instead of the tensor."""
    own: Provenance = whole.meta["f8fx"]
    insert = Inserter(graph, whole, Provenance(own.gemm, own.fqn, own.role, "amaxes"))
    whole.args = (insert(torch.ops.aten.unsqueeze.default, vector, 0), None)
