"""Inductor's scheduler: how many bytes a graph's own tensors take while each of its kernels runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

#: Inputs that whoever calls a graph holds on to, by the beginnings of their names (``is_nonfreeable_buffers``).
_HELD = ("primals_", "arg", "fwd_rng_state", "bwd_rng_state", "tangents")


def live_bytes(scheduler: Any) -> list[int]:
    """At each of the scheduler's nodes, in its order: inputs that are freed on the way, results, and what is between.

    Inductor's own (``estimate_peak_memory``) takes an input of which half is read for half as large, and what is
    concatenated in place for two tensors. Once code is generated it is known what no kernel writes after all
    (``removed_buffers``), and what is written over something else (``wrapper_code.reuses``).
    """
    from torch._inductor.virtualized import V

    held = {name for name in V.graph.graph_inputs if name.startswith(_HELD)}
    first = {_memory_of(scheduler, name): 0 for name in V.graph.graph_inputs if name not in held}
    last = dict(first)
    for index, node in enumerate(scheduler.nodes):
        for name in _made_by(node):
            made = _memory_of(scheduler, name)
            first.setdefault(made, index)
            last[made] = index
        for dep in node.read_writes.reads:
            last[_memory_of(scheduler, dep.name)] = index
    for name in first:
        first[name] = min(first[name], first.get(_source(scheduler, name), first[name]))
    last.update((_memory_of(scheduler, name), len(scheduler.nodes)) for name in V.graph.get_output_names())
    change = [0] * (len(scheduler.nodes) + 2)
    for name, start in first.items():
        size = 0 if name in V.graph.removed_buffers else bytes_of(name)
        change[start] += size
        change[last[name] + 1] -= size
    return list(itertools.accumulate(change))[: len(scheduler.nodes)]


def bytes_of(name: str) -> int:
    """The size of a buffer or input by the sizes Inductor goes by; 0 of what is no tensor."""
    from torch._inductor.virtualized import V

    try:
        numel, dtype = V.graph.get_numel(name), V.graph.get_dtype(name)
    except (KeyError, NotImplementedError, AttributeError):  # several results in one, no result, an object
        return 0
    return int(V.graph.sizevars.optimization_hint(numel, fallback=0)) * int(dtype.itemsize)


def _made_by(node: Any) -> Iterator[str]:
    return (buffer.get_name() for buffer in node.get_outputs())


def _memory_of(scheduler: Any, name: str) -> str:
    """The buffer in whose memory one lies: that it writes over, or that it is a part of."""
    from torch._inductor.ir import NonOwningLayout
    from torch._inductor.virtualized import V

    name = scheduler.mutation_real_name.get(name, name)
    written_over = getattr(V.graph.wrapper_code, "reuses", {}).get(name)
    if written_over is not None:
        return _memory_of(scheduler, written_over)
    buffer = scheduler.name_to_buf.get(name)
    layout = getattr(buffer.node, "layout", None) if buffer is not None else None
    return _memory_of(scheduler, layout.view.get_name()) if isinstance(layout, NonOwningLayout) else name


def _source(scheduler: Any, name: str) -> str:
    """Of one of several results that are made at once: the name of all of them together."""
    from torch._inductor.ir import MultiOutput

    buffer = scheduler.name_to_buf.get(name)
    is_one = buffer is not None and isinstance(buffer.node, MultiOutput)
    return str(buffer.node.inputs[0].get_name()) if is_one else name
