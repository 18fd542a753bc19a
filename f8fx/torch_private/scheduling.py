"""Inductor's scheduler: which operations share a kernel, and which kernels share a launch.

Both hooks are process-wide, and do nothing to a graph in which nothing was marked.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

from .versions import release

#: A kernel over fewer elements costs its launch and little else; beside one over more, a launch costs nothing.
_SMALL, _LARGE = 1 << 20, 51_200_000
#: So many kernels of a launch are tuned for the sizes of their tiles, each by itself.
_FEW = 4
_LABELS, _TUNED = "f8fx_labels", "f8fx_tuned"


@contextlib.contextmanager
def fused_only_with(label: str, first: bool = False) -> Iterator[None]:
    """Operations lowered in the block are fused only with each other and with others of that label.

    ``V.graph``; ``InductorChoices.can_fuse``, which decides on what may be fused.

    Args:
        first: of a reduction in two stages only the first is meant.
    """
    from torch._inductor.virtualized import V

    _keep_labels_apart()
    before = len(V.graph.buffers)
    yield
    labels = V.graph.__dict__.setdefault(_LABELS, {})
    made = V.graph.buffers[before:]
    labels.update((buffer.get_name(), label) for buffer in (made[:1] if first else made))


@cache
def _keep_labels_apart() -> None:
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    decide = InductorChoices.can_fuse

    def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        labels = getattr(V.graph, _LABELS, None)
        if labels:
            found = [{labels.get(name) for name in node.get_buffer_names()} for node in (node1, node2)]
            if found[0] != found[1]:
                return False
        return decide(scheduler, node1, node2, shared_data_score)

    setattr(InductorChoices, "can_fuse", staticmethod(can_fuse))  # noqa: B010


def sums_both_ways(rows: int, columns: int) -> bool:
    """Whether a kernel that reduces a tensor's rows, and casts nothing, takes the sums of its columns along.

    ``MixOrderReduction.can_fuse``, whose conditions on sizes are repeated here; torch 2.15 has dropped the first.
    """
    from torch._inductor import config

    tall = rows >= 2 * columns or release() >= (2, 15)
    fits = rows >= 4096 and rows * columns >= 5 << 20 and columns <= 1 << 14
    return tall and fits and config.triton.mix_order_reduction


def combine_by_kind(own_blocks: bool) -> None:
    """Decides which kernels of the graph being compiled share a launch, where Inductor combines them.

    With one block size for all parts of a launch, reductions along rows and along columns must not share one:
    where the first read side by side, the second would read one element of each row. Inductor separates
    them by their lengths only.

    With own blocks, parts share but the number of warps, and more of them can be one launch than Inductor, which
    separates long reductions, short ones, pointwise kernels and large ones, makes of them. Only those stay
    separate that would cost each other more than a launch: reductions and pointwise kernels, and beside large
    reductions along rows those along columns.

    ``torch._inductor.codegen.triton_combo_kernel``.

    Args:
        own_blocks: whether each part of a launch has a block size of its own (``combo_kernel_per_subkernel_blocks``).
    """
    from torch._inductor.virtualized import V

    _partition_by_kind()
    _tune_tiles()
    V.graph.__dict__[_TUNED] = own_blocks


@cache
def _tune_tiles() -> None:
    """Kernels over tiles that share a launch are tuned as those that have one to themselves.

    Inductor tries six shapes of tiles for the latter, and for a launch takes the smallest, 32 x 32: 83 % of a copy's
    bandwidth on an H100 where float8 is stored transposed (``benchmarks/results``). Kernels with blocks of their own it
    tunes one after the other, and compiles the launch for each trial; where they are many that takes minutes, and is not done.

    ``ComboKernel.jit_line``, the text of a launch's decorator; ``ComboKernel.sub_kernels``.
    """
    from torch._inductor.codegen.triton_combo_kernel import ComboKernel
    from torch._inductor.virtualized import V

    write = ComboKernel.jit_line

    def jit_line(self: Any, *args: Any, **kwargs: Any) -> str:
        line = write(self, *args, **kwargs)
        own_blocks = getattr(V.graph, _TUNED, None)
        if own_blocks is None or (own_blocks and len(self.sub_kernels) > _FEW):
            return line
        return line.replace("TileHint.SQUARE", "TileHint.DEFAULT")

    ComboKernel.jit_line = jit_line  # type: ignore[method-assign]


@cache
def _partition_by_kind() -> None:
    from torch._inductor.codegen import triton_combo_kernel
    from torch._inductor.virtualized import V

    default = triton_combo_kernel._custom_combo_kernel_horizontal_partition_algorithm

    def partition(nodes: list[Any], scheduling: Any, info: Any) -> list[list[Any]]:
        own_blocks = getattr(V.graph, _TUNED, None)
        if own_blocks is None:
            return default(nodes, scheduling, info)
        alone = [node for node in nodes if _cannot_be_combined(node, info[node])]
        nodes = [node for node in nodes if node not in alone]
        groups: list[list[Any]] = []
        if own_blocks:
            by_tiling: dict[int, list[Any]] = defaultdict(list)
            for node in nodes:
                by_tiling[len(info[node].tiling)].append(node)
            groups = [group for alike in by_tiling.values() for group in _launches(alike)]
        elif nodes:
            groups = [part for group in default(nodes, scheduling, info) for part in _along_and_across(group)]
        return [*groups, *([node] for node in alone)]

    triton_combo_kernel.set_custom_combo_kernel_horizontal_partition(partition)


def _launches(nodes: list[Any]) -> list[list[Any]]:
    """Nodes of one tiling, by the launch they are to be in; small ones go with any."""
    groups: dict[str, list[Any]] = defaultdict(list)
    for node in nodes:
        groups[kind_of(node)].append(node)
    small = groups.pop("small", [])
    inner, outer = groups.get("inner", []), groups.get("outer", [])
    if inner and outer and max(map(_elements, (*inner, *outer))) <= _LARGE:
        inner += groups.pop("outer")
    if not groups:
        return [small]
    next(iter(groups.values())).extend(small)
    return list(groups.values())


def _along_and_across(nodes: list[Any]) -> list[list[Any]]:
    """Nodes that share a launch, without those that reduce along columns among those that reduce along rows."""
    across = [node for node in nodes if node.is_reduction() and _direction(node) == "outer"]
    along = [node for node in nodes if node not in across]
    return [part for part in (along, across) if part]


def _cannot_be_combined(node: Any, info: Any) -> bool:
    """A reduction of which one block holds all elements, as many as there are at run time: an error before torch 2.14."""
    *_, length = node.group[1]
    return release() < (2, 14) and info.is_persistent_reduction and not _is_number(length)


def kind_of(node: Any) -> str:
    """How a kernel goes over its elements: "inner" and "outer" reductions, "pointwise", or "small", as small as does not matter."""
    if _elements(node) <= _SMALL:
        return "small"
    return _direction(node) if node.is_reduction() else "pointwise"


def _direction(node: Any) -> str:
    from torch._inductor.runtime.hints import ReductionHint

    parts = [part.node.data for part in node.get_nodes() if part.is_reduction()]
    hints = {getattr(data, "reduction_hint", None) for data in parts}
    return "inner" if hints == {ReductionHint.INNER} else "outer"


def _elements(node: Any) -> int:
    """Elements that a scheduler node goes over; many if that is not known."""
    _, sizes = node.group
    total = 1
    for size in sizes:
        if not _is_number(size):
            return _SMALL + 1
        total *= int(size)
    return total


def _is_number(size: Any) -> bool:
    return isinstance(size, int) or getattr(size, "is_number", False)
