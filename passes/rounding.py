"""Values that a kernel of Inductor computes, and that matmuls would have written or read, keep the digits they had in memory.

A kernel goes on with the float32 that it has computed, and each kernel that reads a value which no kernel has written
computes it anew. Where one of them meets what another has made of the value and rounded, digits differ that were equal: no
element is as large as the largest, whose gradient is then 0 / 0; what is equal to its mean is not; shares add up to more than 1. Two
kinds of values are not in memory any more: a result that a bias or scales are still to be applied to, and an operand that is
cast to float8 where it is computed, if something else reads it, too. They are rounded (``f8fx.rounded``), which costs no traffic.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import fx

from f8fx import ops

from .gemm import Gemm
from .in_memory import is_in_memory
from .operand import is_view
from .rewrite import Inserter, Provenance, insert_behind

#: Inductor computes on these as float32, and rounds what it writes to memory.
COMPUTED_AS_FLOAT32 = (torch.bfloat16, torch.float16)


def _is_read_by_others(value: fx.Node, matmuls: Set[fx.Node]) -> bool:
    """Whether a kernel that computes with it, or with a part of it, is no cast for a matmul."""
    for user in value.users:
        if is_view(user) or user.target is ops.concat:
            if _is_read_by_others(user, matmuls):
                return True
        elif user not in matmuls and user.target is not ops.materialize and not _is_size(user):
            return True
    return False


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def _computed(node: fx.Node) -> fx.Node:
    """What a value lies in: parts of a tensor are rounded with all of it."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _has_more_digits(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.dtype in COMPUTED_AS_FLOAT32 and not is_in_memory(node)


def as_written(insert: Inserter, result: fx.Node) -> fx.Node:
    """A result with no more digits than its dtype has, as if the matmul that it is the result of had written it."""
    return insert(ops.rounded, result) if _has_more_digits(result) else result


def round_operands(graph: fx.Graph, gemms: Sequence[Gemm]) -> dict[fx.Node, fx.Node]:
    """Rounds those operands that no kernel has to write and that others read, too, wherever they are read.

    Returns:
        What each has become.
    """
    matmuls = {gemm.node for gemm in gemms}
    sources: dict[fx.Node, Gemm] = {}
    for gemm in gemms:
        for operand in (gemm.left, gemm.right):
            parts = operand.node.args[0] if operand.node.target is ops.concat else [operand.node]
            for source in map(_computed, parts):  # type: ignore[arg-type]
                sources.setdefault(source, gemm)
    rounded: dict[fx.Node, fx.Node] = {}
    for source, gemm in sources.items():
        if _has_more_digits(source) and _is_read_by_others(source, matmuls):
            provenance = Provenance(gemm.node.name, gemm.fqn, gemm.role, "quantize", True)
            rounded[source] = insert_behind(graph, source, ops.rounded, provenance)
    return rounded
