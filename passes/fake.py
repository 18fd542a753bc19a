"""Fake values of inserted nodes: what the next rewrite, the partitioner and Inductor read."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import fx

from f8fx.torch_private import detect_fake_mode, fake_like, fake_view, is_fake, schema_of, storage_key


def set_value(node: fx.Node) -> None:
    """Gives a node the fake value its target computes from its inputs' values."""

    def value(source: fx.Node) -> Any:
        return source.meta["val"]

    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value)  # type: ignore[arg-type]
    mode = detect_fake_mode([source.meta["val"] for source in node.all_input_nodes] or _some_value(node))
    if mode is None:
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
        return
    with mode:
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def view_of(value: torch.Tensor, sizes: Sequence[int | torch.SymInt]) -> torch.Tensor:
    """A fake value in the memory of another."""
    mode = detect_fake_mode([value])
    if mode is None:
        return value.view(sizes)
    with mode:
        return value.view(sizes)


class _Layout(NamedTuple):
    """What a fake tensor is beyond its identity."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Result(NamedTuple):
    """What an operator gives: a new tensor, or a view that begins at ``offset`` in its input's memory."""

    layout: _Layout
    offset: int | None = None


#: (operator, arguments with tensors as layouts) -> its result. Bounded: a model has few different layers, but a
#: process may compile many models.
_RESULTS: dict[Hashable, _Result] = {}
_RESULTS_KEPT = 10_000


def set_value_by_layout(node: fx.Node) -> None:
    """:func:`set_value`, remembering what an operator gives for inputs of the same layout.

    Calling one of our operators on fake tensors takes 180 to 310 us, making a fake tensor of known
    layout 10 (torch 2.13), and a deep model asks for the same layouts again and again. Only operators
    with one tensor as their result are remembered, new or a view of their only input, and only for static sizes.
    """
    key = result_key(node)
    if key is None:
        set_value(node)
        return
    source: torch.Tensor = node.all_input_nodes[0].meta["val"]
    value = None if (known := _RESULTS.get(key)) is None else _made_of(source, known)
    if value is not None:
        node.meta["val"] = value
        return
    set_value(node)
    result = _result_of(node.meta["val"], source if _is_view(node.target) else None)
    if result is not None:
        if len(_RESULTS) >= _RESULTS_KEPT:
            _RESULTS.clear()
        _RESULTS[key] = result


def _made_of(source: torch.Tensor, known: _Result) -> torch.Tensor | None:
    shape, stride, dtype, device = known.layout
    if known.offset is None:
        return fake_like(source, shape, stride, dtype, device)
    return fake_view(source, shape, stride, dtype, known.offset)


def _result_of(value: Any, source: torch.Tensor | None) -> _Result | None:
    """What is remembered of a value, which should lie in the memory of ``source``, if there is one."""
    layout = _layout_of(value)
    if layout is None or source is None:
        return None if layout is None else _Result(layout)
    if storage_key(value) != storage_key(source) or type(offset := value.storage_offset()) is not int:
        return None  # of another dtype, or copied: a reshape
    return _Result(layout, offset)


def result_key(node: fx.Node) -> Hashable | None:
    """Equal for calls that give tensors of one layout, in the same place of their inputs' memory if views; ``None`` where that is not known."""
    sources = node.all_input_nodes
    if not sources or not _makes_one_tensor(node.target):
        return None
    key = _key((node.args, node.kwargs))
    if key is _UNKNOWN:
        return None
    if not _is_view(node.target):
        return node.target, key
    value = sources[0].meta["val"]
    memory = value.untyped_storage().nbytes(), value.storage_offset()
    is_known = len(sources) == 1 and all(type(figure) is int for figure in memory)
    return (node.target, key, memory) if is_known else None


_UNKNOWN = object()


def _key(value: Any) -> Any:
    if isinstance(value, fx.Node):
        value = value.meta["val"]
        layout = _layout_of(value) if is_fake(value) else None
        return _UNKNOWN if layout is None else layout
    if isinstance(value, (tuple, list)):
        parts = tuple(map(_key, value))
        return _UNKNOWN if _UNKNOWN in parts else parts
    if isinstance(value, dict):
        return _key(tuple(value.items()))
    return type(value), value  # 1, 1.0 and True are equal


def _layout_of(value: Any) -> _Layout | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    layout = _Layout(tuple(value.shape), value.stride(), value.dtype, value.device)
    return layout if all(type(size) is int for size in (*layout.shape, *layout.stride)) else None


@lru_cache(maxsize=256)
def _makes_one_tensor(target: Any) -> bool:
    """Whether an operator's only effect is one tensor."""
    schema = schema_of(target)
    if schema is None or schema.is_mutable or len(schema.returns) != 1:
        return False
    return isinstance(schema.returns[0].type, torch.TensorType)


@lru_cache(maxsize=256)
def _is_view(target: Any) -> bool:
    """Whether that tensor lies, or may lie, in the memory of an input."""
    return schema_of(target).returns[0].alias_info is not None


def _some_value(node: fx.Node) -> list[Any]:
    """Values of the nodes before `node`, for the fake mode they live in, until one is a tensor."""
    for other in node.graph.nodes:
        value = other.meta.get("val")
        if isinstance(value, torch.Tensor):
            return [value]
    return []
