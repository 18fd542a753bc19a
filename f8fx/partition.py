"""What is saved between forward and backward.

The backward's ``grad_weight`` gemms read transposed float8 copies of the forward's inputs. Such a copy
can be made in the forward and saved, one byte an element, or in the backward, from a source that is
saved anyway or recomputed. Inductor's partitioner decides such things by a minimum cut; all it has to know is
that casts and amaxes may be recomputed. Scales always are saved: they are small and dear.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import fx

from . import ops
from .passes.halves import ReadsOther, reads
from .passes.rewrite import one_layout
from .torch_private import CustomPartitionerFn, min_cut_partition

Save = Literal["lean", "fast"]

#: What the partitioner may recompute. Both layouts at once are only made where both are wanted: of a gradient,
#: in the backward, or with ``save="fast"`` of a weight, in the forward (:mod:`passes.share`).
_RECOMPUTABLE = frozenset(
    op.overloadpacket for op in (ops.amax, ops.amax_both, ops.quantize, ops.concat, ops.rounded)
)
_RECOMPUTABLE_LEAN = _RECOMPUTABLE | {op.overloadpacket for op in (ops.quantize_both, ops.relayout)}


class Partitioner(CustomPartitionerFn):
    """Inductor's min-cut partitioner, told about our operators.

    Args:
        save: ``"lean"``: casts may be recomputed, so that no more is saved than the sources;
            ``"fast"``: the transposed copies of weights, made in the forward with the others, are saved; not where
            one read gave the amaxes of rows and columns (:mod:`passes.one_read`), since that would spare nothing.
        keep_to_halves: refuse a split in which one half reads a copy of a weight that is the other half's
            (:mod:`passes.halves`).

    Raises:
        ReadsOther: when called, for such a split.
    """

    def __init__(self, save: Save, keep_to_halves: bool = False) -> None:
        self.save = save
        self.keep_to_halves = keep_to_halves

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        recomputable = _RECOMPUTABLE_LEAN if self.save == "lean" else _RECOMPUTABLE
        forward, backward = min_cut_partition(gm, joint_inputs, recomputable, **kwargs)
        if self.keep_to_halves and (found := reads(gm.graph, forward.graph, backward.graph)):
            raise ReadsOther(found)
        for half in (forward, backward):
            _erase_unread_gathers(half)
            _erase_unread_layouts(half)
        return forward, backward

    def uuid(self) -> Any:
        """The code's hash is part of the pass's key."""
        return f"f8fx {self.save}{' halves' if self.keep_to_halves else ''}"


def _erase_unread_gathers(half: fx.GraphModule) -> None:
    """Erases float8 gathers that the other half reads: waiting counts as an effect, so that nobody else does.

    With its own copy for each half (:mod:`passes.commute`), the backward's would be gathered in the forward too.
    """
    erased = False
    for node in reversed(list(half.graph.nodes)):
        if node.op == "call_function" and not node.users and "f8fx" in node.meta:
            half.graph.erase_node(node)
            erased = True
    if erased:
        half.recompile()


def _erase_unread_layouts(half: fx.GraphModule) -> None:
    """Makes one layout where the half reads only one of both: with checkpointing the backward makes its own anew."""
    for both in half.graph.find_nodes(op="call_function", target=ops.quantize_both):
        read = {int(item.args[1]): item for item in both.users if item.users}
        if len(read) != 1:
            continue
        ((index, item),) = read.items()
        one = one_layout(both, index)
        one.meta.update(item.meta)
        item.replace_all_uses_with(one)
        for node in (*both.users, both):
            half.graph.erase_node(node)
        half.recompile()
