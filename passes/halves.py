"""What a split graph reads of weights whose float8 copies are in memory in their own half of a step only.

``f8fx::dequantize_both(..., alternate=True)`` marks such a weight: its first copy is there in the forward, the second
in the backward. A partitioner that has the backward recompute a part of the forward, as activation
checkpointing asks, makes the backward read the first copy, too.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import cast

from torch import fx

from f8fx import ops
from f8fx.torch_private import input_position, is_higher_order

from .elements import base_of

#: ``meta`` of a copy: whose it is.
HALF = "f8fx_half"


class Half(enum.Enum):
    """Of a training step."""

    FORWARD = enum.auto()
    BACKWARD = enum.auto()


#: Positions among the inputs of Dynamo's graph, in order; ``None``: all of them.
Positions = tuple[int, ...] | None


@dataclass(frozen=True)
class Reads:
    """What a graph reads beyond the copy of each half.

    Attributes:
        early: the weights of which the backward reads the forward's copy.
        late: those of which the forward reads the backward's.
    """

    early: Positions = ()
    late: Positions = ()

    def __bool__(self) -> bool:
        return self != NOTHING

    def is_early(self, position: int) -> bool:
        """Whether the backward reads the forward's copy of an input."""
        return self.early is None or position in self.early

    def is_late(self, position: int) -> bool:
        """Whether the forward reads the backward's copy of an input."""
        return self.late is None or position in self.late


NOTHING = Reads()
ANYTHING = Reads(None, None)


class ReadsOther(Exception):
    """A half of a graph reads a copy of the other half's."""

    def __init__(self, reads: Reads) -> None:
        super().__init__(reads)
        self.reads = reads

    @staticmethod
    def within(error: BaseException | None) -> ReadsOther | None:
        """The one that an error comes from, if any."""
        while error is not None and not isinstance(error, ReadsOther):
            error = error.__cause__ or error.__context__
        return error


def mark(graph: fx.Graph) -> None:
    """Says of the inputs that hold a weight's two copies which is whose."""
    for node in graph.nodes:
        if node.target is ops.dequantize_both and node.kwargs.get("alternate"):
            base_of(node.args[0]).meta[HALF] = Half.FORWARD
            base_of(node.args[2]).meta[HALF] = Half.BACKWARD


def reads(joint: fx.Graph, forward: fx.Graph, backward: fx.Graph) -> Reads:
    """What the halves of a joint graph read, one that :func:`mark` has seen."""
    marked = [node for node in joint.nodes if HALF in node.meta]
    if not marked:
        return NOTHING
    if any(node.op != "placeholder" for node in marked):
        return ANYTHING  # saved under another name, perhaps
    copies = {node.name: base for node in joint.nodes if HALF in (base := base_of(node)).meta}
    for node in joint.nodes:
        if node.name in copies and any(is_higher_order(user.target) for user in node.users):
            return ANYTHING  # where its body reads it is not to be seen here
    early, late = (
        {
            input_position(copies[node.name])
            for node in graph.nodes
            if node.op == "placeholder"
            and node.name in copies
            and copies[node.name].meta[HALF] is half
            and _is_read(node)
        }
        for graph, half in ((backward, Half.FORWARD), (forward, Half.BACKWARD))
    )
    return Reads(_in_order(early), _in_order(late))


def _in_order(positions: set[int | None]) -> Positions:
    return None if None in positions else tuple(sorted(cast("set[int]", positions)))


def _is_read(node: fx.Node) -> bool:
    """Whether anything but views, and the output, takes a value."""
    return any(_reads(user, node) for user in node.users)


def _reads(user: fx.Node, node: fx.Node) -> bool:
    if user.op == "output":
        return False
    if user.target is ops.dequantize_both:
        return node in user.args[:2]  # the other copy is there for those who fold the mark
    return base_of(user) is user or _is_read(user)
