"""What a graph must look like after every pass. Runs in tests and under ``debug=True``.

A pass that breaks one of these is a bug of f8fx, found here and not three layers further down.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from f8fx import ops

from .rewrite import set_value

aten = torch.ops.aten

#: Operators that make the host wait for the device; no pass may add one.
_SYNCHRONISING = frozenset(
    (aten.item.default, aten._local_scalar_dense.default, aten.nonzero.default, aten.is_nonzero.default)
)


class CheckError(AssertionError):
    """A pass left a graph in a state that later passes or Inductor would misread."""


def signature(graph: fx.Graph) -> list[Any]:
    """Shapes, strides and dtypes of the graph's outputs: what no pass may change."""
    output = next(iter(reversed(graph.nodes)))
    return [_layout(node.meta.get("val")) for node in output.all_input_nodes]


def check(graph: fx.Graph, after: str, outputs: list[Any] | None = None) -> None:
    """Raises :class:`CheckError` if the graph is not well formed.

    Args:
        graph: a joint or inference graph.
        after: name of the pass, for the message.
        outputs: the :func:`signature` from before the first pass.
    """
    try:
        graph.lint()
    except Exception as error:
        raise CheckError(f"after {after}: {error}") from error
    for node in graph.nodes:
        if "f8fx" not in node.meta:
            continue
        where = f"after {after}: {node.format_node()}"
        if "val" not in node.meta:
            raise CheckError(f"{where}: no fake value")
        if node.target in _SYNCHRONISING:
            raise CheckError(f"{where}: makes the host wait for the device")
        _check_value(node, where)
        if node.target is aten._scaled_mm.default:
            _check_scaled_mm(node, where)
    if outputs is not None and signature(graph) != outputs:
        raise CheckError(f"after {after}: outputs changed from {outputs} to {signature(graph)}")


def _check_value(node: fx.Node, where: str) -> None:
    """The recorded value is the one that the inputs give."""
    recorded = node.meta["val"]
    set_value(node)
    fresh, node.meta["val"] = node.meta["val"], recorded
    if _layout(fresh) != _layout(recorded):
        raise CheckError(f"{where}: recorded as {_layout(recorded)}, inputs give {_layout(fresh)}")


def _check_scaled_mm(node: fx.Node, where: str) -> None:
    left, right, left_scale, right_scale = (arg.meta["val"] for arg in node.args[:4])  # type: ignore
    if left.dtype.itemsize != 1 or right.dtype.itemsize != 1:
        raise CheckError(f"{where}: operands are {left.dtype} and {right.dtype}")
    if left.stride()[1] != 1 or right.stride()[0] != 1:
        raise CheckError(f"{where}: strides {left.stride()} and {right.stride()} are not k-innermost")
    for scale in (left_scale, right_scale):
        if scale.dtype != torch.float32:
            raise CheckError(f"{where}: a scale is {scale.dtype}")


def _layout(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(tuple(value.shape)), str(value.stride()), value.dtype
    if isinstance(value, (tuple, list)):
        return [_layout(item) for item in value]
    return str(value)


def describe(graph: fx.Graph) -> str:
    """The graph as text, one line a node, for logs and expected-graph tests.

    ``name: dtype[sizes] = operator(arguments)``; movement to and from memory is all that is shown.
    """
    return "\n".join(line for node in graph.nodes if (line := _line(node)))


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_arguments(node.args[0])}"
    if node.op not in ("call_function", "placeholder", "get_attr"):
        return ""
    kind = _kind(node.meta.get("val"))
    if node.op != "call_function":
        return f"{node.name}: {kind}"
    arguments = [_arguments(arg) for arg in node.args]
    arguments += [f"{name}={_arguments(value)}" for name, value in node.kwargs.items() if value is not None]
    return f"{node.name}: {kind} = {_target(node)}({', '.join(arguments)})"


def _target(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        packet = str(node.target.overloadpacket)
        return packet if node.target in ops.ALL or "aten" not in packet else packet.removeprefix("aten.")
    return getattr(node.target, "__name__", str(node.target))


_SHORT = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2fnuz: "e5m2fnuz",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int64: "i64",
}


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{_SHORT.get(value.dtype, str(value.dtype))}{[*value.shape]}".replace(" ", "")
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_kind(item) for item in value) + ")"
    return str(value)


def _arguments(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_arguments(item) for item in value) + "]"
    if isinstance(value, torch.dtype):
        return _SHORT.get(value, str(value))
    return str(value)
