"""Inserting nodes so that everything downstream still finds what it reads in them.

Inductor's partitioner, checkpointing, DTensor and the profiler all read node metadata. A node
without a ``val`` breaks the next rewrite; one without ``recompute`` silently defeats activation
checkpointing. So a pass inserts through :class:`Inserter`, or, where it replaces a node, hands on its metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from f8fx import ops

from .elements import is_view
from .fake import set_value_by_layout
from .sizes import is_same, is_same_shape

#: Checkpointing's: whether a node is recomputed, and with which region.
MARKS = ("recompute", "ac_graph_id")
#: Values of the first that drop what a node gives after the forward.
RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)

#: Copied from the matmul a new node serves: where it comes from, where it runs and whether it is recomputed
#: (:mod:`passes.tags` refines the last).
_PROVENANCE = (
    "nn_module_stack",
    "fwd_nn_module_stack",
    "seq_nr",
    "stack_trace",
    "custom",
    "source_fn_stack",
    "original_aten",
    "from_node",
    "partitioner_tag",
    "autograd_backward",
    *MARKS,
    "memory_budget",
)


@dataclass(frozen=True)
class Provenance:
    """What ``node.meta["f8fx"]`` of an inserted node holds.

    Attributes:
        gemm: name of the matmul the node was first inserted for.
        fqn, role: its module and role.
        inserted_by: the pass.
        is_result: whether the node carries the matmul's result, as opposed to preparing it.
    """

    gemm: str
    fqn: str
    role: str
    inserted_by: str
    is_result: bool = False


class Inserter:
    """Inserts nodes before one anchor, each with a fake value and the anchor's metadata.

    Args:
        provenance: what the new nodes have as ``meta["f8fx"]``.
        marked: whether new nodes take over the anchor's checkpointing marks too.
    """

    def __init__(self, graph: fx.Graph, anchor: fx.Node, provenance: Provenance, marked: bool = True) -> None:
        self.graph = graph
        self.anchor = anchor
        self.provenance = provenance
        self.keys = _PROVENANCE if marked else tuple(key for key in _PROVENANCE if key not in MARKS)

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """The new node ``target(*args, **kwargs)``."""
        with self.graph.inserting_before(self.anchor):
            node = self.graph.create_node("call_function", target, name=_name(target))
        # not above: torch 2.13 looks for symbols in every argument there, which takes longer than all else
        node.args, node.kwargs = args, kwargs
        for key in self.keys:
            if key in self.anchor.meta:
                node.meta[key] = self.anchor.meta[key]
        node.meta["f8fx"] = self.provenance
        set_value_by_layout(node)
        return node

    def contiguous(self, node: fx.Node) -> fx.Node:
        """A copy of a node's value whose elements lie in memory in their order."""
        return self(torch.ops.aten.clone.default, node, memory_format=torch.contiguous_format)

    def size(self, node: fx.Node, dim: int) -> int | fx.Node:
        """Size ``dim`` of a node: a number, or where it is symbolic a node that computes it."""
        size = node.meta["val"].shape[dim]
        if isinstance(size, int):
            return size
        return self(torch.ops.aten.sym_size.int, node, dim)


def insert_behind(
    graph: fx.Graph, node: fx.Node, target: Callable[..., Any], provenance: Provenance, **kwargs: Any
) -> fx.Node:
    """Lets all that read a node read ``target(node, **kwargs)``, which has its elements and its metadata, but for fake value and provenance."""
    behind = Inserter(graph, node.next, provenance)(target, node, **kwargs)
    # a size that first appears in a node's result is not defined again by its copy
    own = {key: behind.meta[key] for key in ("val", "f8fx")}
    behind.meta = {key: node.meta[key] for key in node.meta if key != "unbacked_bindings"} | own
    node.replace_all_uses_with(behind, lambda user: user is not behind)
    refresh_views(behind)  # they lie in its memory now
    return behind


def take_over(old: fx.Node, new: fx.Node) -> None:
    """All that read a node read another with the same elements, and its views are views of that.

    torch asks fake values which nodes share memory, to keep outputs apart and to reuse memory.
    """
    old.replace_all_uses_with(new)
    if is_view(new) or not _is_alike(old, new):
        refresh_views(new)
    else:
        new.meta["val"] = old.meta["val"]


def refresh_views(node: fx.Node) -> None:
    """Computes the fake values of all views of a node anew."""
    for user in node.users:
        if is_view(user):
            set_value_by_layout(user)
            refresh_views(user)


def _is_alike(old: fx.Node, new: fx.Node) -> bool:
    a, b = old.meta["val"], new.meta["val"]
    return (
        a.dtype == b.dtype and is_same_shape(a.shape, b.shape) and all(map(is_same, a.stride(), b.stride()))
    )


def erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erases a node that nothing reads, and what was inserted for it alone: its scale and amax, and the marker."""
    if node.users or not ("f8fx" in node.meta or node.target in ops.MARKERS):
        return
    sources = node.all_input_nodes
    graph.erase_node(node)
    for source in sources:
        erase_unused(graph, source)


def users_between(nodes: Set[fx.Node], last: fx.Node) -> list[fx.Node]:
    """Everything that depends on the nodes and stands before the node `last`, in graph order."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        for user in todo.pop().users:
            if user not in found and user not in nodes and user < last:
                found.add(user)
                todo.append(user)
    return sorted(found)


def hoist(node: fx.Node, anchor: fx.Node) -> None:
    """Moves a node in front of another, and with it what it is computed from, as far as that stands behind the other."""
    if not anchor < node:
        return
    for source in node.all_input_nodes:
        hoist(source, anchor)
    anchor.prepend(node)


def one_layout(both: fx.Node, index: int) -> fx.Node:
    """The ``quantize`` that makes one of the two layouts of a ``quantize_both``, in front of it, without metadata."""
    dim, align = ("dim_t", "align_t") if index else ("dim", "align")
    with both.graph.inserting_before(both):
        return both.graph.call_function(
            ops.quantize,
            (both.args[0], both.args[1 + index]),
            {
                "dtype": both.kwargs["dtype"],
                "dim": both.kwargs[dim],
                "transpose": bool(index),
                "align": both.kwargs[align],
            },
        )


def _name(target: Callable[..., Any]) -> str:
    """A short name for a node: ``quantize``, not ``quantize_default_1``."""
    packet = getattr(target, "overloadpacket", target)
    return getattr(packet, "__name__", "node").strip("_")
