"""Pass 7, *tags*: what the partitioner may recompute.

An operand that is computed from an input which the graph overwrites is saved: the backward would compute it
anew from what came after. Without float8 the matmul's operand itself would be saved.

Checkpointing marks the nodes of a region (``recompute``, ``ac_graph_id``). Nodes inserted for a
matmul inherit its marks, or the region's casts would be saved instead of recomputed, and silently
cost the memory that checkpointing was to free. Four cases need more than a copy:

* a matmul that selective checkpointing keeps (``MUST_SAVE``): the mark belongs on the one node that
  carries its result, while its casts are recomputed like the rest of the region;
* a scale is saved, a few bytes beside its tensor: a recomputed cast then reads its source once, and not
  a first time for the amax;
* a cast shared between a region and the outside: it is made recomputable, since otherwise it is saved
  on top of its source, which is the region's input and saved anyway;
* a cast shared between regions: it belongs to none of them. The partitioner saves what a later
  region reads of an earlier one, rightly so for results, but a cast can be redone from its source.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from f8fx import ops
from f8fx.torch_private import overwritten_inputs

from .backward import has_backward
from .elements import readers_of_memory
from .rewrite import RECOMPUTED

_KEEP = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


class Tags:
    """Sets recomputation marks on inserted nodes, in place."""

    def __call__(self, graph: fx.Graph) -> None:
        kept = _keep_computed_from_overwritten(graph)
        for node in reversed(graph.nodes):
            if node.op != "call_function" or "f8fx" not in node.meta or node in kept:
                continue
            if not node.meta["f8fx"].is_result:
                _mark(node)


def _keep_computed_from_overwritten(graph: fx.Graph) -> set[fx.Node]:
    kept: set[fx.Node] = set()
    overwritten = overwritten_inputs(graph)
    if not overwritten or not has_backward(graph):
        return kept
    for source in overwritten:
        for reader in readers_of_memory(source):
            is_write = reader.target is torch.ops.aten.copy_.default
            if reader.op == "call_function" and not is_write and "recompute" not in reader.meta:
                reader.meta["recompute"] = CheckpointPolicy.MUST_SAVE
                kept.add(reader)
    return kept


def _mark(node: fx.Node) -> None:
    if _is_kept(node):
        if node.meta.get("recompute") in RECOMPUTED:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return
    marked = [user for user in node.users if user.meta.get("recompute") in (*RECOMPUTED, *_KEEP)]
    if node.meta.get("recompute") in _KEEP or (node.meta.get("recompute") is None and marked):
        node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    regions = {user.meta["ac_graph_id"] for user in marked if "ac_graph_id" in user.meta}
    if len(regions) == 1:
        node.meta["ac_graph_id"] = regions.pop()
    elif "ac_graph_id" in node.meta:
        del node.meta["ac_graph_id"]


def _is_kept(node: fx.Node) -> bool:
    """Whether a node is a scale, or an amax that another amax comes from (:mod:`passes.amaxes`)."""
    return node.target is ops.scale or (
        node.target is ops.amax and any(user.target is not ops.scale for user in node.users)
    )
