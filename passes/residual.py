"""Sums that a result of a matmul goes into: they stand in memory for it."""

from __future__ import annotations

import torch
from torch import fx

from f8fx import ops

from .elements import CASTS, SAME_ORDER, is_elementwise
from .experts import GROUPED_MM
from .matmuls import FLOAT8_MATMULS

aten = torch.ops.aten

_MATMULS = FLOAT8_MATMULS | {aten.mm.default, aten.addmm.default, GROUPED_MM}
#: Movement and arithmetic between a matmul and the sum, computed in whatever kernel reads the result.
_AFTER_MATMUL = SAME_ORDER | {
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.slice.Tensor,
    aten.clone.default,
    torch.ops.prims.convert_element_type.default,
    ops.rounded,
}


def is_residual_sum(node: fx.Node) -> bool:
    """Whether a node adds a matmul's result, which nothing else reads, to another tensor."""
    return any(_summands(node))


def is_sum_of_results(node: fx.Node) -> bool:
    """Whether a node adds the results of two matmuls, which nothing else reads: of the three only the sum is ever saved."""
    summands = _summands(node)
    return bool(summands) and all(summands)


def _summands(node: fx.Node) -> list[bool]:
    """Of each of two tensors that are added whether it is a matmul's result; nothing of any other node."""
    summands = [arg for arg in node.args[:2] if isinstance(arg, fx.Node)]
    is_sum = node.target is aten.add.Tensor and len(summands) == 2 and "alpha" not in node.kwargs
    if not is_sum or not is_elementwise(node) or _rank(node) < 2:
        return []
    return [*map(_is_matmul_result, summands)]


def _is_matmul_result(node: fx.Node) -> bool:
    """Whether a value comes out of a matmul, up to its bias, and nothing else reads it."""
    while node.target not in _MATMULS:
        if len(node.users) != 1 or node.target not in _AFTER_MATMUL:
            return False
        # not the bias, nor a size, nor what dropout keeps, nor the scales of an exact rowwise gemm
        sources = [
            source
            for source in node.all_input_nodes
            if _rank(source) > 1 and not _is_mask(source) and not _is_of_scales(source)
        ]
        if len(sources) != 1:
            return False
        (node,) = sources
    return len(node.users) == 1


def _is_mask(node: fx.Node) -> bool:
    """Whether a tensor is one of truth values, at most cast."""
    while node.target in CASTS:
        node = node.all_input_nodes[0]
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def _is_of_scales(node: fx.Node) -> bool:
    """Whether a tensor is the products of a matmul's scales, one of each row or column by others, or by the one of all."""
    sources = node.all_input_nodes
    return (
        "f8fx" in node.meta
        and len(sources) == 2
        and any(source.target is aten.unsqueeze.default for source in sources)
        and all(source.target is aten.unsqueeze.default or _rank(source) == 0 for source in sources)
    )


def _rank(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else 0
