"""Values that a kernel of Inductor computes, and that matmuls would have written or read, keep the digits they had in memory.

A kernel goes on with the float32 that it has computed, and each kernel that reads a value which no kernel has written
computes it anew. Where one of them meets what another has made of the value and rounded, digits differ that were equal: no
element is as large as the largest, whose gradient is then 0 / 0; what is equal to its mean is not; shares add up to more than 1. Two
kinds of values are not in memory any more. A result that a bias or scales are still to be applied to is always rounded
(``f8fx.rounded``), which costs no traffic; an operand that is cast to float8 where it is computed, if elements are chosen from it or compared with it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from f8fx import ops

from .gemm import Gemm
from .in_memory import is_in_memory
from .operand import base_of, is_view
from .rewrite import Inserter, Provenance, insert_behind

aten = torch.ops.aten

#: Inductor computes on these as float32, and rounds what it writes to memory.
COMPUTED_AS_FLOAT32 = (torch.bfloat16, torch.float16)

#: They tell two values apart that differ in one digit.
_COMPARING = frozenset(
    (
        *(getattr(aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge")),
        *(aten.searchsorted.Tensor, aten.bucketize.Tensor, aten.isin.Tensor_Tensor),
    )
)
#: They give elements that they have chosen, and write them to memory.
_CHOOSING = frozenset(
    (
        *(
            aten.amax.default,
            aten.amin.default,
            aten.max.default,
            aten.min.default,
            aten.max.dim,
            aten.min.dim,
        ),
        *(aten.sort.default, aten.sort.stable, aten.topk.default, aten.kthvalue.default, aten.median.default),
        *(
            aten.median.dim,
            aten.nanmedian.default,
            aten.nanmedian.dim,
            aten.mode.default,
            aten.aminmax.default,
        ),
        *(aten.cummax.default, aten.cummin.default, aten.cumsum.default),
        *(aten.gather.default, aten.index.Tensor, aten.index_select.default),
    )
)


def _compared(graph: fx.Graph) -> set[fx.Node]:
    """The values of which elements are chosen or compared with each other, and those they are computed from.

    What is chosen may be compared, or it is subtracted, and a root or a logarithm taken of what cannot be negative.
    """
    found: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "call_function":
            sources = [source for source in node.all_input_nodes if _is_float(source)]
            if node.target in _CHOOSING or (node.target in _COMPARING and len(sources) > 1):
                found += sources
    values: set[fx.Node] = set()
    while found:
        node = found.pop()
        if node not in values and _is_float(node):
            values.add(node)
            if not _is_written(node):
                found += node.all_input_nodes
    return values


def _is_written(node: fx.Node) -> bool:
    return base_of(node) is node and is_in_memory(node)


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return any(isinstance(each, torch.Tensor) and each.dtype.is_floating_point for each in values)


def _computed(node: fx.Node) -> fx.Node:
    """What a value lies in: parts of a tensor are rounded with all of it."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def as_written(insert: Inserter, result: fx.Node) -> fx.Node:
    """A result with no more digits than its dtype has, as if the matmul that it is the result of had written it."""
    has_more = result.meta["val"].dtype in COMPUTED_AS_FLOAT32 and not is_in_memory(result)
    return insert(ops.rounded, result) if has_more else result


def round_operands(graph: fx.Graph, gemms: Iterable[Gemm]) -> dict[fx.Node, fx.Node]:
    """Rounds those operands, wherever they are read, that are compared and that no kernel has to write.

    Returns:
        What each has become.
    """
    values = _compared(graph)
    rounded: dict[fx.Node, fx.Node] = {}
    if not values:
        return rounded
    for gemm in gemms:
        for operand in (gemm.left, gemm.right):
            parts = operand.node.args[0] if operand.node.target is ops.concat else [operand.node]
            for source in map(_computed, parts):  # type: ignore[arg-type]
                if source not in values or source in rounded or is_in_memory(source):
                    continue
                value = source.meta["val"]
                if isinstance(value, torch.Tensor) and value.dtype in COMPUTED_AS_FLOAT32:
                    provenance = Provenance(gemm.node.name, gemm.fqn, gemm.role, "quantize", True)
                    rounded[source] = insert_behind(graph, source, ops.rounded, provenance)
    return rounded
