"""What operators write to, and whose memory their results are in: by their schemas (``OpOverload._schema``)."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from .tensors import is_higher_order, is_operator


def written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes to: by its schema, and of a collective, whose schema says nothing, the first.

    A list of tensors is one argument. (``OpOverload._schema``; ``c10d::send`` alone writes to nothing.)
    """
    if operator.namespace == "c10d":
        return [*args[:1]] if operator._opname != "send" else []
    found = []
    for index, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return found


def gives_views(operator: Any) -> bool:
    """Whether what an operator gives shares memory with an argument (``OpOverload._schema``)."""
    return any(result.alias_info is not None for result in operator._schema.returns)


def stands_for_write(node: fx.Node, value: fx.Node) -> bool:
    """Whether a node stands for an operator that writes to a value.

    It gives what is there afterwards (``auto_functionalized``, whose operator's schema says what is written,
    ``auto_functionalized_v2``, ``triton_kernel_wrapper_functional``).
    """
    from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional

    if node.target is auto_functionalized:
        targets = written(node.args[0], (), node.kwargs)
    elif node.target is auto_functionalized_v2:
        targets = [node.kwargs["_all_bases"]]
    elif node.target is triton_kernel_wrapper_functional:
        given: Any = node.kwargs["kwargs"]
        targets = [given[name] for name in node.kwargs["tensors_to_clone"]]  # type: ignore[union-attr]
    else:
        return False
    return any(value is each or (isinstance(each, (list, tuple)) and value in each) for each in targets)


def written_constants(module: fx.GraphModule) -> list[str]:
    """The names of a graph's own tensors (``get_attr``) that it writes to: directly, through views, or in bodies of operators.

    Of an operator with a body that writes to an input all tensors count that it is given.
    """
    return [*dict.fromkeys(str(node.target) for node in _written_in(module) if node.op == "get_attr")]


def _written_in(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Inputs and constants that a graph writes to."""
    for node in module.graph.nodes:
        if is_operator(node.target):
            for target in written(node.target, node.args, node.kwargs):
                for value in target if isinstance(target, (list, tuple)) else [target]:
                    yield from _roots(value)
        elif is_higher_order(node.target):
            given = {source: _body(module, source) for source in node.all_input_nodes}
            inside = [root for body in given.values() if body is not None for root in _written_in(body)]
            yield from (root for root in inside if root.op == "get_attr")
            if any(root.op == "placeholder" for root in inside):
                for source, body in given.items():
                    if body is None:
                        yield from _roots(source)


def _body(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The graph that a node of a module is; ``None`` for tensors."""
    found = attrgetter(str(node.target))(module) if node.op == "get_attr" else None
    return found if isinstance(found, fx.GraphModule) else None


def _roots(value: Any) -> Iterator[fx.Node]:
    """The input or constant that a value lies in the memory of, if there is one."""
    while isinstance(value, fx.Node) and value.op == "call_function":
        if value.target is operator.getitem:
            value = value.args[0]
        elif is_operator(value.target) and gives_views(value.target) and not _is_copy(value):
            value = _viewed(value)
        else:
            return
    if isinstance(value, fx.Node):
        yield value


def _viewed(node: fx.Node) -> Any:
    """The argument whose memory an operator's result is in."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    names = {name for result in schema.returns if result.alias_info for name in result.alias_info.before_set}
    for index, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is not None and (names & alias.before_set or not names):  # lists of views have no name
            return node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
    return None


def _is_copy(node: fx.Node) -> bool:
    """Whether a result that its operator's schema calls a view, as that of ``to`` and ``contiguous``, is none this time."""
    source = _viewed(node)
    before, after = (each.meta.get("val") if isinstance(each, fx.Node) else None for each in (source, node))
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    is_other = before.dtype != after.dtype and node.target is not torch.ops.aten.view.dtype
    is_packed = node.target is torch.ops.aten.contiguous.default and before.stride() != after.stride()
    return is_other or is_packed or before.device != after.device
