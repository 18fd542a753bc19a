"""Inductor's scheduler: how far ahead of its turn a kernel may run to share a launch, in bytes of memory.

Inductor combines kernels of equal depth in a graph. Casts of weights and of tensors that are there from the start
are all of one depth: of a model of many layers those of the last layers would run, and hold memory, with those of the first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

#: Bytes that results made before the gemm in front of their turn may take at any time.
AHEAD = 1 << 28

#: A kernel may join the latest launches of its group, so many of them: earlier ones are full, or too far ahead.
_OPEN = 4
_BOUNDED = "f8fx_bounded"


def combine_within_memory() -> None:
    """Bounds what kernels of the graph being compiled that share a launch make ahead of their turn.

    ``ForeachKernelSchedulerNode.set_group_algorithm_for_combo_kernels``, which torch 2.15 asks only if it has no bound
    of its own (``combo_kernel_peak_memory_*``): that of 2.13 and 2.15 is kept by each launch, not by all of them together.
    """
    from torch._inductor.virtualized import V

    _group_within_memory()
    V.graph.__dict__[_BOUNDED] = True


@cache
def _group_within_memory() -> None:
    from torch._inductor.scheduler import ForeachKernelSchedulerNode
    from torch._inductor.virtualized import V

    default = ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels

    def group(scheduler: Any) -> list[list[Any]]:
        groups: list[list[Any]] = default(scheduler)
        if not getattr(V.graph, _BOUNDED, False):
            return groups
        groups = [ForeachKernelSchedulerNode.combinable_nodes(nodes) for nodes in groups]
        return launches(groups, scheduler.nodes, _read_from(scheduler), _bytes_made, _is_gemm)

    ForeachKernelSchedulerNode.set_group_algorithm_for_combo_kernels(group)


def launches(
    groups: Sequence[Sequence[Any]],
    order: Sequence[Any],
    read_from: Callable[[Any], Sequence[Any]],
    bytes_made: Callable[[Any], int],
    is_gemm: Callable[[Any], bool],
) -> list[list[Any]]:
    """Parts of groups, so that no kernel waits for a gemm behind it, and what is made ahead fits in :data:`AHEAD` bytes.

    Args:
        groups: kernels that could share a launch, those that are read before those that read.
        order: all kernels, in the order in which they would run by themselves.
        read_from: the kernels whose results one reads.
        bytes_made: the size of its results.
        is_gemm: between two of which the order of kernels is no matter of memory.
    """
    turn = {node: index for index, node in enumerate(order)}
    gemms = list(itertools.accumulate(map(is_gemm, order)))
    runs = {node: gemms[turn[node]] for node in order}  # after how many gemms
    ahead = [0] * (gemms[-1] + 1 if gemms else 0)
    found: list[list[Any]] = []
    for nodes in groups:
        opened: list[list[Any]] = []
        for node in sorted(nodes, key=turn.__getitem__):
            ready = max((runs[source] for source in read_from(node) if source in runs), default=0)
            size = bytes_made(node)
            for launch in reversed(opened[-_OPEN:]):
                early = slice(runs[launch[0]], runs[node])
                if ready <= early.start and all(taken + size <= AHEAD for taken in ahead[early]):
                    ahead[early] = [taken + size for taken in ahead[early]]
                    launch.append(node)
                    runs[node] = early.start
                    break
            else:
                opened.append([node])
        found.extend(opened)
    return found


def _read_from(scheduler: Any) -> Callable[[Any], list[Any]]:
    def read_from(node: Any) -> list[Any]:
        buffers = (scheduler.name_to_buf[dep.name] for dep in node.unmet_dependencies)
        return [scheduler.name_to_fused_node[buffer.defining_op_name()] for buffer in buffers]

    return read_from


def _is_gemm(node: Any) -> bool:
    """Or another kernel that is not generated from the graph."""
    return bool(node.is_extern() or node.is_template())


def _bytes_made(node: Any) -> int:
    from torch._inductor.virtualized import V

    names = node.get_buffer_names()
    return sum(
        int(V.graph.sizevars.optimization_hint(V.graph.get_numel(name), fallback=0))
        * V.graph.get_dtype(name).itemsize
        for name in names
    )
