"""Inductor's decision what is written to memory rather than computed again by each of its readers.

Process-wide, and without effect on a graph in which nothing was marked.
"""

from __future__ import annotations

from functools import cache
from typing import Any

_MARK = "f8fx_one_large_read"


def compute_again_what_reads_one_tensor() -> None:
    """In the graph being compiled, what reads one tensor of its size and else little is not written to memory.

    Inductor counts every tensor (``realize_reads_threshold``), numbers and vectors too. The gradient of a cross-entropy
    reads the logits and five of those: written out and read again it is twice the traffic of reading the logits twice.

    ``StorageBox.should_realize_on_reuse``, ``IRNode.get_reads``; ``V.graph``.
    """
    from torch._inductor.virtualized import V

    _look_at_sizes()
    V.graph.__dict__[_MARK] = True


@cache
def _look_at_sizes() -> None:
    from torch._inductor.ir import StorageBox, is_cpu
    from torch._inductor.virtualized import V

    decide = StorageBox.should_realize_on_reuse

    def should_realize_on_reuse(self: Any, users: int, **others: Any) -> bool:
        decision = decide(self, users, **others)
        if (
            not decision
            or not getattr(V.graph, _MARK, False)
            or is_cpu(self.data)
            or self.has_large_inner_fn()
        ):
            return decision
        return _large_reads(self.data) > 1

    StorageBox.should_realize_on_reuse = should_realize_on_reuse  # type: ignore[method-assign]


def _large_reads(data: Any) -> int:
    """Tensors of which a computation reads half as many elements as it makes, or more, or an unknown number."""
    from torch._inductor.virtualized import V

    made = V.graph.sizevars.optimization_hint(data.get_numel(), fallback=0)
    # 0: not known
    return len(
        {read.name for read in data.get_reads() if not made or 2 * (read.numel_hint() or made) >= made}
    )
