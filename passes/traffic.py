"""What a graph sends over each process group: what ranks must agree on. Only looks.

A collective hangs unless every rank of its group joins in the same one. So whatever a pass decides about gathers,
it must decide alike on all ranks. :func:`traffic` writes down, for each group, the gathers of the graph as they
were and what is sent instead; :mod:`f8fx.ranks.agreement` compares it between ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import fx

from f8fx.report import Traffic
from f8fx.torch_private import c10d, group_ranks, process_group, size_hint

from .describe import kind
from .gather import all_gather

all_reduce = c10d.all_reduce.default

#: Text of the collectives sent over each group.
Sent = Mapping[Any, tuple[str, ...]]


def gathers(graph: fx.Graph) -> Sent:
    """The all-gathers over each group, and the reductions that passes inserted, in graph order.

    Shapes of gathered tensors are global: they are the same on all ranks, also where shards are not. A rank may have
    compiled for any size, and another for the one at hand; so sizes are those of the call that is compiled for.
    """
    found: dict[Any, list[str]] = defaultdict(list)
    for node in graph.nodes:
        if node.target is all_gather or (node.target is all_reduce and "f8fx" in node.meta):
            name = node.target.overloadpacket.__name__
            value = node.meta["val"]
            sizes = [size if (hint := size_hint(size)) is None else hint for size in value.shape]
            found[node.args[-1]].append(f"{name} {kind(value, sizes)}")
    return {group: tuple(texts) for group, texts in found.items()}


def traffic(before: Sent, after: Sent, training: bool, is_left: bool = False) -> list[Traffic]:
    """For each group with gathers, what was sent over it and what is.

    Args:
        is_left: gathers were to be left as they are.
    """
    return [
        Traffic(
            group_ranks(group),
            texts,
            after.get(group, ()),
            process_group(group).group_name,
            training,
            is_left,
        )
        for group, texts in before.items()
        if len(group_ranks(group)) > 1
    ]
