"""A graph as text: one line a node, for logs and expected-graph tests.

``name: dtype[sizes] = operator(arguments)``. Nodes are numbered afresh in graph order, so that the
text of equal graphs is equal, whatever was inserted and erased on the way.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

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
    torch.int32: "i32",
    torch.uint8: "u8",
}
_NUMBER = re.compile(r"(_default)?(_\d+)?$")


def describe(graph: fx.Graph) -> str:
    """The text of a graph whose nodes have fake values."""
    names: dict[fx.Node, str] = {}
    seen: Counter[str] = Counter()
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = node.name
        else:
            stem = _NUMBER.sub("", node.name)
            names[node] = stem if not seen[stem] else f"{stem}_{seen[stem]}"
            seen[stem] += 1
        lines.append(_line(node, names))
    return "\n".join(line for line in lines if line)


def _line(node: fx.Node, names: dict[fx.Node, str]) -> str:
    if node.op == "output":
        return f"return {_text(node.args[0], names)}"
    value = kind(node.meta.get("val"))
    if node.op != "call_function":
        return f"{names[node]}: {value}"
    arguments = [_text(arg, names) for arg in node.args]
    arguments += [f"{name}={_text(value, names)}" for name, value in node.kwargs.items() if value is not None]
    return f"{names[node]}: {value} = {_target(node)}({', '.join(arguments)})"


def _target(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    if packet is not None:
        return str(packet).removeprefix("aten.")
    return getattr(node.target, "__name__", str(node.target))


def kind(value: Any, sizes: Sequence[Any] | None = None) -> str:
    """dtype and sizes of a value: ``bf16[16,64]``; of a tensor by others than it has, if given."""
    if isinstance(value, torch.Tensor):
        shown = [*value.shape] if sizes is None else [*sizes]
        return f"{_SHORT.get(value.dtype, str(value.dtype))}{shown}".replace(" ", "")
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(kind(item) for item in value) + ")"
    return str(value)


def _text(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_text(item, names) for item in value) + "]"
    if isinstance(value, torch.dtype):
        return _SHORT.get(value, str(value))
    return str(value)
