"""What a graph must look like after every pass. Runs in tests and under ``debug=True``.

A pass that breaks one of these is a bug of f8fx, found here and not three layers further down.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from .backward import backward_nodes
from .fake import result_key, set_value
from .matmuls import FLOAT8_MATMULS

aten = torch.ops.aten

#: Operators that make the host wait for the device; no pass may add one.
_SYNCHRONISING = frozenset(
    (aten.item.default, aten._local_scalar_dense.default, aten.nonzero.default, aten.is_nonzero.default)
)


class CheckError(AssertionError):
    """A pass left a graph in a state that later passes or Inductor would misread."""


#: The nodes that were found to be right, and what they were then.
Known = dict[fx.Node, tuple[Any, ...]]


def signature(graph: fx.Graph) -> list[Any]:
    """Shapes, strides and dtypes of the graph's outputs: what no pass may change.

    Strides not of gradients: autograd takes them as they are.
    """
    output, backward = next(iter(reversed(graph.nodes))), backward_nodes(graph)
    layouts = [(node in backward, _layout(node.meta.get("val"))) for node in output.all_input_nodes]
    return [
        layout[::2] if is_gradient and isinstance(layout, tuple) else layout
        for is_gradient, layout in layouts
    ]


def check(graph: fx.Graph, after: str, outputs: list[Any] | None = None, known: Known | None = None) -> None:
    """Raises :class:`CheckError` if the graph is not well formed.

    Args:
        graph: a joint or inference graph.
        after: name of the pass, for the message.
        outputs: the :func:`signature` from before the first pass.
        known: what earlier calls found to be right, to look only at what has changed since.
    """
    known = {} if known is None else known
    try:
        graph.lint()
    except Exception as error:
        raise CheckError(f"after {after}: {error}") from error
    for node in graph.nodes:
        if node.op != "call_function" or "f8fx" not in node.meta:
            continue
        state = _state(node)
        if not _is_same(known.get(node), state):
            _check_node(node, f"after {after}: {node.format_node()}")
            known[node] = state
    if outputs is not None and signature(graph) != outputs:
        raise CheckError(f"after {after}: outputs changed from {outputs} to {signature(graph)}")


def _check_node(node: fx.Node, where: str) -> None:
    if "val" not in node.meta:
        raise CheckError(f"{where}: no fake value")
    if node.target in _SYNCHRONISING:
        raise CheckError(f"{where}: makes the host wait for the device")
    if node.target in FLOAT8_MATMULS:  # first: torch's own error would not say which pass it was
        _check_scaled_mm(node, where)
    _check_value(node, where)


def _state(node: fx.Node) -> tuple[Any, ...]:
    """What the verdict on a node depends on."""
    values = (each.meta.get("val") for each in (node, *node.all_input_nodes))
    return node.target, node.args, node.kwargs, *values


def _is_same(known: tuple[Any, ...] | None, state: tuple[Any, ...]) -> bool:
    return known is not None and len(known) == len(state) and all(map(operator.is_, known, state))


def _check_value(node: fx.Node, where: str) -> None:
    """The recorded value is the one that the inputs give."""
    recorded, given = _layout(node.meta["val"]), _given(node)
    if given != recorded:
        raise CheckError(f"{where}: recorded as {recorded}, inputs give {given}")


#: Calls that were made, and the layout of what they gave. Bounded.
_GIVEN: dict[Hashable, Any] = {}
_GIVEN_KEPT = 10_000


def _given(node: fx.Node) -> Any:
    """The layout of what an operator gives for its inputs; of like calls one is made, but of matmuls, which ask for more than layouts."""
    key = None if node.target in FLOAT8_MATMULS else result_key(node)
    if key is not None and key in _GIVEN:
        return _GIVEN[key]
    recorded = node.meta["val"]
    set_value(node)
    given, node.meta["val"] = _layout(node.meta["val"]), recorded
    if key is not None:
        if len(_GIVEN) >= _GIVEN_KEPT:
            _GIVEN.clear()
        _GIVEN[key] = given
    return given


def _check_scaled_mm(node: fx.Node, where: str) -> None:
    left, right, left_scale, right_scale = (arg.meta["val"] for arg in node.args[:4])  # type: ignore
    if left.dtype.itemsize != 1 or right.dtype.itemsize != 1:
        raise CheckError(f"{where}: operands are {left.dtype} and {right.dtype}")
    if left.stride()[-1] != 1 or right.stride()[-2] != 1:
        raise CheckError(f"{where}: strides {left.stride()} and {right.stride()} are not k-innermost")
    for scale in (left_scale, right_scale):
        if scale.dtype != torch.float32:
            raise CheckError(f"{where}: a scale is {scale.dtype}")


def _layout(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # one element has no next one to be a stride away from
        strides = (
            1 if size == "1" else s for size, s in zip(map(str, value.shape), value.stride(), strict=True)
        )
        return str(tuple(value.shape)), str(tuple(strides)), value.dtype
    if isinstance(value, (tuple, list)):
        return [_layout(item) for item in value]
    return str(value)
