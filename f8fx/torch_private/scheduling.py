"""Inductor's scheduler: which operations share a kernel, and which kernels share a launch.

Both hooks are process-wide, and do nothing to a graph in which nothing was marked.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

#: A kernel over fewer elements costs its launch and little else.
_SMALL = 1 << 20
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


def combine_more() -> None:
    """Lets more of the kernels of the graph being compiled share a launch than Inductor would.

    Inductor launches long reductions, short ones, pointwise kernels and large ones separately, which was decided
    when all parts of a launch had one block size. Here they have their own (``combo_kernel_per_subkernel_blocks``), so only
    those are kept separate whose registers would cost each other occupancy: large reductions and large pointwise kernels.

    ``torch._inductor.codegen.triton_combo_kernel``.
    """
    from torch._inductor.virtualized import V

    _partition_by_size()
    V.graph.__dict__[_TUNED] = True


@cache
def _partition_by_size() -> None:
    from torch._inductor.codegen import triton_combo_kernel
    from torch._inductor.virtualized import V

    default = triton_combo_kernel._default_custom_combo_kernel_horizontal_partition

    def partition(nodes: list[Any], scheduling: Any, info: Any) -> list[list[Any]]:
        if not getattr(V.graph, _TUNED, False):
            return default(nodes, scheduling, info)
        groups: dict[tuple[int, bool], list[Any]] = defaultdict(list)
        small = []
        for node in nodes:
            dimensions = len(info[node].tiling)
            if _elements(node) <= _SMALL:
                small.append((dimensions, node))
            else:
                groups[dimensions, bool(node.is_reduction())].append(node)
        for dimensions, node in small:
            kinds = [is_reduction for is_reduction in (True, False) if (dimensions, is_reduction) in groups]
            groups[dimensions, kinds[0] if kinds else True].append(node)
        return list(groups.values())

    triton_combo_kernel.set_custom_combo_kernel_horizontal_partition(partition)


def _elements(node: Any) -> int:
    """Elements that a scheduler node goes over; many if that is not known."""
    _, sizes = node.group
    total = 1
    for size in sizes:
        if not isinstance(size, int) and not getattr(size, "is_number", False):
            return _SMALL + 1
        total *= int(size)
    return total
