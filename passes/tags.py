"""Pass 7, *tags*: what the partitioner may recompute.

Checkpointing marks the nodes of a region (``recompute``, ``ac_graph_id``). Nodes inserted for a
matmul inherit its marks, or the region's casts would be saved instead of recomputed, and silently
cost the memory that checkpointing was to free. Two cases need more than a copy:

* a matmul that selective checkpointing keeps (``MUST_SAVE``): the mark belongs on the one node that
  carries its result, while its casts are recomputed like the rest of the region;
* a cast shared between a region and the outside: it is made recomputable, since otherwise it is saved
  on top of its source, which is the region's input and saved anyway.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

_KEEP = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_DROP = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


class Tags:
    """Sets recomputation marks on inserted nodes, in place."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in reversed(graph.nodes):
            if "f8fx" not in node.meta:
                continue
            policy = node.meta.get("recompute")
            consumers = [user for user in node.users if "f8fx" in user.meta]
            if policy in _KEEP and not node.meta["f8fx"].is_result:
                node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            elif policy is None:
                region = next((u for u in consumers if u.meta.get("recompute") in (*_DROP, *_KEEP)), None)
                if region is not None:
                    node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
                    if "ac_graph_id" in region.meta:
                        node.meta["ac_graph_id"] = region.meta["ac_graph_id"]
