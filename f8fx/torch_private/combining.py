"""Inductor's scheduler: which kernels share a launch, and how far ahead of its turn one may run for it, in bytes of memory.

Inductor combines kernels of equal depth in a graph. Casts of weights and of tensors that are there from the start
are all of one depth: of a model of many layers those of the last layers would run, and hold memory, with those of the first.
And of what runs between the same two gemms, it leaves apart what is of another depth.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache
from typing import Any

from .live_bytes import bytes_of, live_bytes
from .scheduling import kind_of

#: Bytes that results made before the gemm in front of their turn may take at any time.
AHEAD = 1 << 28

#: And by how many they may raise the most that is there at a time.
HIGHER = 1 << 26

#: A kernel may join the latest launches of its group, so many of them: earlier ones are full, or too far ahead.
_OPEN = 4

#: So many launches between two gemms are looked at for some to join, and so many kernels may be in one.
_FEW, _MOST = 64, 16
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
        reads = _read_from(scheduler)
        order = scheduler.nodes
        found = launches(groups, order, reads, _bytes_made, _is_gemm, live_bytes(scheduler))
        return joined(found, order, reads, _is_gemm, _kind(scheduler))

    ForeachKernelSchedulerNode.set_group_algorithm_for_combo_kernels(group)


def launches(
    groups: Sequence[Sequence[Any]],
    order: Sequence[Any],
    read_from: Callable[[Any], Sequence[Any]],
    bytes_made: Callable[[Any], int],
    is_gemm: Callable[[Any], bool],
    live: Sequence[int] = (),
) -> list[list[Any]]:
    """Parts of groups, so that no kernel waits for a gemm behind it, and what is made ahead of its turn finds room.

    That is :data:`AHEAD` bytes, and less where the graph needs most: it needs no more than :data:`HIGHER` bytes more than
    with each kernel in its turn.

    Args:
        groups: kernels that could share a launch, those that are read before those that read.
        order: all kernels, in the order in which they would run by themselves.
        read_from: the kernels whose results one reads.
        bytes_made: the size of its results.
        is_gemm: between two of which the order of kernels is no matter of memory.
        live: the bytes that are there while each kernel of ``order`` runs.
    """
    turn = {node: index for index, node in enumerate(order)}
    runs = _gemms_before(order, is_gemm)
    room = _room(order, runs, is_gemm, live)
    found: list[list[Any]] = []
    for nodes in groups:
        opened: list[list[Any]] = []
        for node in sorted(nodes, key=turn.__getitem__):
            ready = max((runs[source] for source in read_from(node) if source in runs), default=0)
            size = bytes_made(node)
            for launch in reversed(opened[-_OPEN:]):
                early = slice(runs[launch[0]], runs[node])
                if ready <= early.start and all(left >= size for left in room[early]):
                    room[early] = [left - size for left in room[early]]
                    launch.append(node)
                    runs[node] = early.start
                    break
            else:
                opened.append([node])
        found.extend(opened)
    return found


def _gemms_before(order: Sequence[Any], is_gemm: Callable[[Any], bool]) -> dict[Any, int]:
    """After how many gemms each kernel has run; a gemm is one of them itself."""
    return dict(zip(order, itertools.accumulate(map(is_gemm, order)), strict=True))


def _room(
    order: Sequence[Any], runs: dict[Any, int], is_gemm: Callable[[Any], bool], live: Sequence[int]
) -> list[int]:
    """Bytes for results that are made ahead, after each number of gemms."""
    most = [0] * (max(runs.values(), default=0) + 1)
    for node, there in zip(order, live, strict=False):
        index = runs[node] - is_gemm(node)
        most[index] = max(most[index], there)
    peak = max(most)
    return [max(min(AHEAD, peak - there), HIGHER) if live else AHEAD for there in most]


def joined(
    found: Sequence[Sequence[Any]],
    order: Sequence[Any],
    read_from: Callable[[Any], Iterable[Any]],
    is_gemm: Callable[[Any], bool],
    kind: Callable[[Any], Hashable],
) -> list[list[Any]]:
    """Launches of different depths become one, where they run between the same gemms and neither waits for the other.

    Args:
        found: launches of kernels; of equal depth.
        order: all kernels, in the order in which they would run by themselves.
        read_from: the kernels whose results one reads.
        is_gemm: what no kernel may be moved across.
        kind: what kernels must have in common for one launch; ``None`` of those that are left where they are.
    """
    turn = {node: index for index, node in enumerate(order)}
    runs = _gemms_before(order, is_gemm)
    readers = defaultdict(list)
    for node in order:
        for source in read_from(node):
            readers[source].append(node)
    units = [sorted(launch, key=turn.__getitem__) for launch in found]
    between = defaultdict(list)  # the same two gemms
    for unit in sorted(units, key=lambda unit: turn[unit[0]]):
        between[min(runs[node] for node in unit)].append(unit)
    unit_of = {node: unit for unit in units for node in unit}

    def behind(nodes: Sequence[Any], gemms: int) -> set[Any]:
        """Kernels that have to wait for these, as far as the next gemm."""
        seen, open_ = set(nodes), list(nodes)
        while open_:
            for node in readers[open_.pop()]:
                unit = unit_of.get(node, [node])
                if node not in seen and min(runs[member] for member in unit) == gemms:
                    seen.update(unit)
                    open_.extend(unit)
        return seen - set(nodes)

    for gemms, nearby in between.items():
        if len(nearby) > _FEW:
            continue
        for index, early in enumerate(nearby):
            for late in nearby[index + 1 :]:
                kinds = {kind(node) for node in late} - {None}
                moved = [node for node in early if kind(node) in kinds]
                if not moved or len(moved) + len(late) > _MOST:
                    continue
                if behind(moved, gemms).isdisjoint(late) and behind(late, gemms).isdisjoint(moved):
                    early[:] = [node for node in early if node not in moved]
                    late.extend(moved)
                    unit_of.update(dict.fromkeys(moved, late))
    return [unit for unit in units if unit]


def _read_from(scheduler: Any) -> Callable[[Any], list[Any]]:
    def read_from(node: Any) -> list[Any]:
        buffers = (scheduler.name_to_buf[dep.name] for dep in node.unmet_dependencies)
        return [scheduler.name_to_fused_node[buffer.defining_op_name()] for buffer in buffers]

    return read_from


def _is_gemm(node: Any) -> bool:
    """Or another kernel that is not generated from the graph."""
    return bool(node.is_extern() or node.is_template())


def _bytes_made(node: Any) -> int:
    return sum(map(bytes_of, node.get_buffer_names()))


def _kind(scheduler: Any) -> Callable[[Any], Hashable]:
    """Where a kernel runs, and in which of Inductor's loops."""

    def kind(node: Any) -> Hashable:
        loop = kind_of(node)
        places = (getattr(scheduler, name, {}).get(node) for name in ("node_to_stream", "node_to_mempool"))
        return None if loop == "small" else (loop, node.get_device(), *places)

    return kind
