"""Pass 6b, *materialize*: what several kernels would compute again is written to memory once.

*Residual sums.* ``h = x + attention_output`` is read by the norm that follows, once for its amax and once for its
cast, by the next residual sum, and by the norm's backward. Inductor inlines a sum of two tensors into
each of its readers, which then read both; only the matmul's result is saved for the backward, and ``h`` is
summed again there. Written once, ``h`` costs one write and saves a read in every reader.

Only sums are marked whose one summand is the result of a matmul and used nowhere else: saving ``h`` for the
backward then stands in for saving that result, and no byte more is saved.

*Gradients of norms of a matmul's parts*, as of the heads of q and k. The norm's backward sums over rows of 128, say, and
the matmul casts rows of 4096: no kernel that has the sums at hand can take the amax and cast. Inductor writes something in
between, of its own choosing: a tensor or two in float32. The gradient itself, rounded as it is in eager execution, is less.

*Gradients whose elements are moved about*, as by RoPE's, scaled by rows and by columns. Inductor computes them again for each amax and
each copy, and where columns are reduced it reads what they are computed from against its order in memory, 16 times the bytes of
it (on an H100 the amaxes of a Llama block's q and k took 0.90 ms so, and the launch with both copies 0.39). In memory they are read in order, and
there are kernels for their amaxes (:mod:`passes.one_read`, :mod:`passes.amax_both`).

*Gradients that a grouped matmul in high precision reads*, that of experts' weights, or the casts of groups of rows that it reads in
float8. They read memory, so Inductor writes a copy for them, in an order of its own choosing that the matmul may reject, and computes
the gradient again for the other casts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from f8fx import ops

from .backward import backward_nodes
from .columns import side_by_side
from .elements import CASTS, MOVEMENTS, SAME_ORDER, base_of, is_pointwise, readers
from .experts import GROUPED_MM
from .fqn import of_node
from .in_memory import is_in_memory
from .residual import is_residual_sum
from .rewrite import Provenance, insert_behind

aten = torch.ops.aten

_KEEPING = MOVEMENTS | CASTS
#: What takes an element from another place, and is computed by every kernel that reads its result.
_MOVING = frozenset(
    (
        aten.cat.default,
        aten.constant_pad_nd.default,
        aten.slice_scatter.default,
        aten.select_scatter.default,
        aten.flip.default,
        aten.roll.default,
        aten.index.Tensor,
        aten.gather.default,
    )
)


class Materialize:
    """Marks tensors, in place."""

    def __call__(self, graph: fx.Graph) -> None:
        _mark_residual_sums(graph)
        backward = backward_nodes(graph)
        _mark_gradients_of_norms(graph, backward)
        _mark_moved_gradients(graph, backward)
        _mark_for_grouped_matmuls(graph, backward)


def _mark_residual_sums(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        # with one reader there is nothing to spare
        if is_residual_sum(node) and len(readers(node, SAME_ORDER)) > 1:
            _mark(graph, node, "output")


def _mark_gradients_of_norms(graph: fx.Graph, backward: set[fx.Node]) -> None:
    for node in [n for n in graph.nodes if n in backward and n.target not in SAME_ORDER]:
        if is_pointwise(node) and _is_cast_in_other_rows(node) and _is_gradient_of_norm(node, backward):
            _mark(graph, node, "grad_input")


def _mark_moved_gradients(graph: fx.Graph, backward: set[fx.Node]) -> None:
    moved = _moved(graph, backward)
    for both in graph.find_nodes(op="call_function", target=ops.quantize_both):
        source: Any = both.args[0]
        if (both.kwargs["dim"], both.kwargs["dim_t"]) != (1, 0):
            continue
        role = both.meta["f8fx"].role
        parts = side_by_side(source)
        own = moved.intersection(parts)
        if own and all(part in own or is_in_memory(part) for part in parts):
            _mark(graph, source, role, whole=True)
            continue
        # those that are computed where they lie stay as they are
        for part in filter(own.__contains__, parts):
            _mark(graph, part, role)


def _mark_for_grouped_matmuls(graph: fx.Graph, backward: set[fx.Node]) -> None:
    read: list[Any] = []
    for target, number in ((GROUPED_MM, 2), (ops.amax_groups, 1)):
        for node in graph.find_nodes(op="call_function", target=target):
            read += node.args[:number]
    for source in dict.fromkeys(map(base_of, read)):
        if source in backward and not is_in_memory(source) and any(_cast_matrices(source)):
            _mark(graph, source, "grad_weight")


def _mark(graph: fx.Graph, node: fx.Node, role: str, **options: bool) -> None:
    insert_behind(
        graph,
        node,
        ops.materialize,
        Provenance(node.name, of_node(node), role, "materialize", True),
        **options,
    )


def _is_cast_in_other_rows(node: fx.Node) -> bool:
    """Whether a tensor is cast to float8 as a matrix whose rows are not its own."""
    columns = _columns(node)
    return columns is not None and any(_columns(matrix) != columns for matrix in _cast_matrices(node))


def _cast_matrices(node: fx.Node) -> Iterator[fx.Node]:
    """The views of a tensor that float8 casts read."""
    for user in node.users:
        if user.target in ops.CASTING or user.target is ops.concat:
            yield node
        elif user.target in SAME_ORDER:
            yield from _cast_matrices(user)


def _is_gradient_of_norm(node: fx.Node, backward: set[fx.Node]) -> bool:
    """Whether a tensor is computed, element by element, from sums over its own rows."""
    columns = _columns(node)
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        current = todo.pop()
        if current in seen or current not in backward:
            continue
        seen.add(current)
        if current.target is aten.sum.dim_IntList:
            if _columns(current) == 1 and _columns(current.all_input_nodes[0]) == columns:
                return True
        elif is_pointwise(current) or current.target in (*SAME_ORDER, aten.expand.default):
            todo.extend(current.all_input_nodes)
    return False


def _moved(graph: fx.Graph, backward: set[fx.Node]) -> set[fx.Node]:
    """Gradients that are computed from tensors in memory by moving their elements, too."""
    moved: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in backward or is_in_memory(node):
            continue
        keeps = node.target in _KEEPING or is_pointwise(node)
        if node.target in _MOVING or (keeps and not moved.isdisjoint(node.all_input_nodes)):
            moved.add(node)
    return moved


def _columns(node: fx.Node) -> int | None:
    """The last size of a tensor that has rows; none where it is dynamic."""
    value: Any = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return None
    return value.shape[-1] if isinstance(value.shape[-1], int) else None
