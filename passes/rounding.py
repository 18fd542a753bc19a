"""Pass 6c, *rounding*: values that a kernel of Inductor computes, and that matmuls would have written or read, have the digits that they had in memory.

A kernel goes on with the float32 that it has computed, and each kernel that reads a value which no kernel has written
computes it anew. Where one of them meets what another has made of the value and rounded, digits differ that were equal: no
element is as large as the largest, whose gradient is then 0 / 0; what is equal to its mean is not; shares add up to more than 1. Two
kinds of values are not in memory any more: a result that a bias or scales are still to be applied to (:func:`as_written`, of passes that
apply them), and an operand that is cast to float8 where it is computed, if something else reads it, too. They are rounded
(``f8fx.rounded``), which costs no traffic.

This comes after the passes that look at what an operand is computed by: marks of gathered weights, gathers, residual sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from f8fx import ops
from f8fx.torch_private import is_of_torch, is_operator

from .elements import is_view
from .in_memory import is_in_memory
from .rewrite import Inserter, insert_behind
from .sizes import is_size

aten = torch.ops.aten

#: Inductor computes on these as float32, and rounds what it writes to memory.
COMPUTED_AS_FLOAT32 = (torch.bfloat16, torch.float16)


class Rounding:
    """Rounds operands that no kernel has to write and that others read, too, wherever they are read, in place."""

    def __call__(self, graph: fx.Graph) -> None:
        sources: dict[fx.Node, fx.Node] = {}
        for cast in graph.nodes:
            if cast.target in ops.CASTING and "f8fx" in cast.meta:
                for source in _parts(cast.args[0]):
                    sources.setdefault(source, cast)
        for source, cast in sources.items():
            if _has_more_digits(source) and _is_computed(source.target) and _is_read_by_others(source):
                provenance = cast.meta["f8fx"]
                insert_behind(
                    graph, source, ops.rounded, replace(provenance, inserted_by="rounding", is_result=True)
                )


def as_written(insert: Inserter, result: fx.Node) -> fx.Node:
    """A result with no more digits than its dtype has, as if the matmul that it is the result of had written it."""
    return insert(ops.rounded, result) if _has_more_digits(result) else result


def _parts(source: Any) -> Iterator[fx.Node]:
    """The tensors that lie in one, side by side or as wholes that it is a part of: parts of a tensor are rounded with all of it."""
    while is_view(source):
        source = source.all_input_nodes[0]
    if source.target is ops.concat:
        for part in source.args[0]:
            yield from _parts(part)
    else:
        yield source


def _has_more_digits(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.dtype in COMPUTED_AS_FLOAT32 and not is_in_memory(node)


def _is_computed(target: Any) -> bool:
    """Whether a kernel of Inductor's may compute an operator's result: not somebody else's operator, nor a library."""
    if target in (aten.convolution.default, ops.rounded, *ops.MARKERS) or not is_operator(target):
        return False
    return is_of_torch(target) or target.namespace == "f8fx"


def _is_read_by_others(value: fx.Node) -> bool:
    """Whether a kernel that computes with it, or with a part of it, makes no float8 numbers of it."""
    return any(
        _is_read_by_others(user)
        if is_view(user) or user.target is ops.concat
        else user.target not in ops.CASTING and not is_size(user)
        for user in value.users
    )
