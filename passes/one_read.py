"""Pass 7b, *one read*: rows cast, and amaxes of columns taken, in one read of a tensor in memory.

A tensor that one matmul takes scaled by rows and another by columns is read three times: for the amaxes of
its rows and the row-major copy, for those of its columns, and for the transposed copy. Inductor's code cannot join
the first two, since its kernels that reduce in both directions at once know sums only;
:mod:`kernels.row_cast_columns` does. That saves a read, so it is taken wherever it applies: both copies are made
in one half of the graph (``quantize_both``), from a tensor that is in memory anyway, with rows that fit on chip. A tensor
that is computed in the kernels that cast it stays with Inductor: writing it out for ours would cost more.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from f8fx import ops
from f8fx.kernels import row_cast_columns

from .operand import base_of

aten = torch.ops.aten

#: Operators whose result is written to memory by a kernel that nothing is fused into.
_WRITTEN = frozenset(
    (
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten._scaled_mm.default,
        ops.materialize,
        torch.ops._c10d_functional.wait_tensor.default,
    )
)
_PLAIN = [1, 1]


class OneRead:
    """Replaces both casts of a tensor, and their scales, by ``quantize_rowwise``, in place.

    Args:
        has_kernel: the devices that the kernel is for.
    """

    def __init__(self, has_kernel: Callable[[torch.device], bool]) -> None:
        self.has_kernel = has_kernel

    def __call__(self, graph: fx.Graph) -> None:
        order: dict[fx.Node, int] | None = None
        for both in graph.find_nodes(op="call_function", target=ops.quantize_both):
            found = self._match(both)
            if found is not None:
                order = order or {node: index for index, node in enumerate(graph.nodes)}
                _replace(graph, both, *found, order)

    def _match(self, both: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """The amaxes of rows and columns that only these casts' scales read; ``None`` where the kernel is not for."""
        source, scale, scale_t = both.args
        assert isinstance(source, fx.Node) and isinstance(scale, fx.Node) and isinstance(scale_t, fx.Node)
        kwargs = both.kwargs
        if (kwargs["dim"], kwargs["dim_t"]) != (1, 0) or list(kwargs["align"]) != _PLAIN:  # type: ignore[arg-type]
            return None
        rows, columns = _amax_of(scale, source, 1), _amax_of(scale_t, source, 0)
        if rows is None or columns is None:
            return None
        if scale.kwargs["dtype"] != kwargs["dtype"] or scale_t.kwargs["dtype"] != kwargs["dtype"]:
            return None
        parts = _parts(source)
        if not all(self.has_kernel(part.meta["val"].device) and _in_memory(part) for part in parts):
            return None
        if row_cast_columns.why_not([part.meta["val"] for part in parts], kwargs["dtype"]):  # type: ignore[arg-type]
            return None
        return rows, columns


def _amax_of(scale: fx.Node, source: fx.Node, dim: int) -> fx.Node | None:
    """The amax that a scale comes from, if it is of ``source`` over ``dim`` and read by that scale only."""
    amax = scale.args[0] if scale.target is ops.scale else None
    if not isinstance(amax, fx.Node) or amax.target is not ops.amax or amax.args != (source, dim):
        return None
    return amax if len(amax.users) == 1 else None


def _parts(source: fx.Node) -> list[fx.Node]:
    """The tensors whose rows, one after the other, are those of ``source``."""
    return list(source.args[0]) if source.target is ops.concat and source.args[1] == 0 else [source]  # type: ignore[arg-type]


def _in_memory(node: fx.Node) -> bool:
    base = base_of(node)
    target = base.args[0].target if base.target is operator.getitem else base.target  # type: ignore[union-attr]
    return base.op == "placeholder" or target in _WRITTEN or "scaled_dot_product" in str(target)


def _replace(
    graph: fx.Graph, both: fx.Node, rows: fx.Node, columns: fx.Node, order: dict[fx.Node, int]
) -> None:
    source, scale, scale_t = both.args
    assert isinstance(source, fx.Node) and isinstance(scale, fx.Node) and isinstance(scale_t, fx.Node)
    copy, transposed = both.meta["val"]
    results = ((both, copy), (scale, scale.meta["val"]), (both, transposed), (scale_t, scale_t.meta["val"]))
    with graph.inserting_before(min(rows, columns, key=order.__getitem__)):
        kernel = graph.call_function(
            ops.quantize_rowwise,
            (_parts(source),),
            {
                "dtype": both.kwargs["dtype"],
                "power_of_2": scale.kwargs["power_of_2"],
                "power_of_2_t": scale_t.kwargs["power_of_2"],
                "align_t": both.kwargs["align_t"],
            },
        )
        kernel.meta.update({**both.meta, "val": tuple(value for _, value in results)})
        getters = []
        for index, (like, value) in enumerate(results):
            getters.append(graph.call_function(operator.getitem, (kernel, index)))
            getters[-1].meta.update({**like.meta, "val": value})
    for getter in list(both.users):
        getter.replace_all_uses_with(getters[2 if getter.args[1] else 0])
        graph.erase_node(getter)
    graph.erase_node(both)
    for old, new in ((scale, getters[1]), (scale_t, getters[3])):
        old.replace_all_uses_with(new)
        graph.erase_node(old)
    for node in (rows, columns):
        graph.erase_node(node)
    if not source.users and "f8fx" in source.meta:
        graph.erase_node(source)  # the tensors side by side
