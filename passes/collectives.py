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
    * A shard that was rounded when it was written to be sent is rounded where it is cast now (``f8fx.rounded``), in the
      kernel that computes it.
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
    (:class:`f8fx.report.CollectiveDecision`). Gradients are reduced in high precision.

On the wire
    NCCL takes float8; gloo rejects it, so there the data is viewed as bytes. By default the group's backend
    decides. Native float8 keeps the shapes that Inductor's async tensor parallelism matches (:mod:`passes.async_tp`
    adds what is missing for reduce-scatters). The new gathers are ordinary ``all_gather_into_tensor`` nodes that
    Inductor's bucketing and overlap passes treat like any other. All amax reductions of a group whose inputs are
    there together become one (:mod:`passes.reduction`).
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Literal

from torch import Tensor, fx

from f8fx.report import CollectiveDecision, dtype_name
from f8fx.torch_private import carries_float8, group_backend, group_rank

from . import fqn
from .async_tp import expose_gemms
from .backward import backward_nodes
from .commute import Move, Stay, decide
from .gather import (
    Gathered,
    all_gather_together,
    find_gathered,
    find_readers,
    is_movement,
)
from .reduction import Reduction, combine
from .regather import Rewrite
from .share import Share

Wire = Literal["auto", "float8", "uint8", "off"]


class Collectives:
    """Moves casts above gathers, in place.

    Args:
        wire: dtype in which float8 travels; ``"auto"``: as the group's backend can; ``"off"``: gathers stay as
            they are.
    """

    def __init__(self, wire: Wire = "auto") -> None:
        self.wire = wire

    def __call__(self, graph: fx.Graph) -> list[CollectiveDecision]:
        """Rewrites the graph and says what became of each gather."""
        found = find_gathered(graph)
        if found and self.wire != "off":
            _erase_dead(graph)
        decisions = []
        reductions: list[Reduction] = []
        backward = backward_nodes(graph)
        # last to first: a tensor sharded over two dimensions of a mesh is gathered twice, and the first
        # gather can move only after the second
        for gathered in reversed(found):
            find_readers(gathered)
            decision: Move | Stay
            if self.wire == "off":
                decision = Stay(gathered, 'wire="off"')
            elif (
                self.wire == "float8"
                and group_backend(gathered.group, gathered.shard.meta["val"].device) == "gloo"
            ):
                decision = Stay(
                    gathered, "gloo sends no float8", 'wire="float8"; "auto" and "uint8" send it as bytes'
                )
            else:
                decision = decide(gathered, group_rank, backward)
            decisions.append(_report(decision, gathered, gathered.nodes[0] in backward))
            if isinstance(decision, Move):
                reductions += Rewrite(graph, decision, self._sends_bytes(gathered)).run()
        if reductions:
            combine(graph, reductions)
        if any(decision.moved for decision in decisions):
            Share()(graph)
        expose_gemms(graph)
        return decisions[::-1] + _together(graph, backward)

    def _sends_bytes(self, gathered: Gathered) -> bool:
        if self.wire != "auto":
            return self.wire == "uint8"
        return not carries_float8(gathered.group, gathered.shard.meta["val"].device)


def _erase_dead(graph: fx.Graph) -> None:
    """Erases movements that nothing reads; `quantize` leaves those of the operands it replaced."""
    for node in [*reversed(graph.nodes)]:
        if not node.users and is_movement(node):
            graph.erase_node(node)


def _report(decision: Move | Stay, gathered: Gathered, backward: bool) -> CollectiveDecision:
    node = gathered.nodes[0]
    described = _described(node, node.meta["val"], gathered.group_size, backward)
    if isinstance(decision, Stay):
        return CollectiveDecision(**described, moved=False, reason=decision.reason, detail=decision.detail)
    detail = f"{decision.bytes_before} bytes become {decision.bytes_after}"
    return CollectiveDecision(**described, moved=True, reason="moved", detail=detail)


def _together(graph: fx.Graph, backward: Set[fx.Node]) -> list[CollectiveDecision]:
    """One decision for each tensor that is gathered in one call with others."""
    reason = "gathered in one call with others"
    return [
        CollectiveDecision(
            **_described(node, value, node.args[1], node in backward), moved=False, reason=reason
        )
        for node in graph.nodes
        if node.target is all_gather_together
        for value in node.meta["val"]
    ]


def _described(node: fx.Node, value: Tensor, group_size: int, backward: bool) -> dict[str, Any]:
    return {
        "fqn": fqn.of_node(node),
        "shape": tuple(size if isinstance(size, int) else str(size) for size in value.shape),
        "dtype": dtype_name(value.dtype),
        "group_size": group_size,
        "backward": backward,
    }
