"""Pass 6b, *materialize*: a residual sum that several kernels read is written to memory once.

``h = x + attention_output`` is read by the norm that follows, once for its amax and once for its
cast, by the next residual sum, and by the norm's backward. Inductor inlines a sum of two tensors into
each of its readers, which then read both; only the matmul's result is saved for the backward, and ``h`` is
summed again there. Written once, ``h`` costs one write and saves a read in every reader.

Only sums are marked whose one summand is the result of a matmul and used nowhere else: saving ``h`` for the
backward then stands in for saving that result, and no byte more is saved.
"""

from __future__ import annotations

import torch
from torch import fx

from f8fx import ops

from .fqn import of_node
from .operand import CASTS, SAME_ORDER, is_elementwise, readers
from .rewrite import Inserter, Provenance

aten = torch.ops.aten

_MATMULS = frozenset((aten._scaled_mm.default, aten.mm.default, aten.addmm.default))
#: Movement and arithmetic between a matmul and the sum, computed in whatever kernel reads the result.
_AFTER_MATMUL = SAME_ORDER | {
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.slice.Tensor,
    aten.clone.default,
    torch.ops.prims.convert_element_type.default,
}


class Materialize:
    """Marks residual sums, in place."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
            # with one reader there is nothing to spare
            if _is_residual_sum(node) and len(readers(node, SAME_ORDER)) > 1:
                after = node.next
                insert = Inserter(
                    graph, after, Provenance(node.name, of_node(node), "output", "materialize", True)
                )
                written = insert(ops.materialize, node)
                written.meta.update({key: node.meta[key] for key in node.meta if key not in ("val", "f8fx")})
                node.replace_all_uses_with(written, lambda user, own=written: user is not own)


def _is_residual_sum(node: fx.Node) -> bool:
    summands = [arg for arg in node.args[:2] if isinstance(arg, fx.Node)]
    if len(summands) != 2 or "alpha" in node.kwargs or not is_elementwise(node):
        return False
    return _rank(node) > 1 and any(map(_is_matmul_result, summands))


def _is_matmul_result(node: fx.Node) -> bool:
    """Whether a value comes out of a matmul, up to its bias, and nothing else reads it."""
    while node.target not in _MATMULS:
        if len(node.users) != 1 or node.target not in _AFTER_MATMUL:
            return False
        # not the bias, nor a size, nor what dropout keeps
        sources = [source for source in node.all_input_nodes if _rank(source) > 1 and not _is_mask(source)]
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


def _rank(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else 0
