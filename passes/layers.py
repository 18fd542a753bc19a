"""Which forward matmul a gradient belongs to: part of pass 1, *find*.

A matmul of the backward shares one operand with the forward matmul it differentiates, the weight or the input, and
contracts other dimensions of the same three sizes. Where several forward matmuls fit, as of tied weights, AOTAutograd's
sequence numbers tell, else names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from f8fx.recipe import OperandKind
from f8fx.torch_private import size_hint, statically_true

from . import fqn
from .gemm import Gemm, Size
from .matmuls import sizes_of

_Reader = tuple[Gemm, OperandKind]


@dataclass(slots=True)
class _Fitting:
    """Forward matmuls that read one tensor and have the same three sizes, in graph order."""

    first: _Reader
    by_number: dict[int, _Reader] = field(default_factory=dict)
    by_name: dict[str, _Reader] = field(default_factory=dict)


class Layers:
    """The forward matmuls of a graph, by what they read."""

    def __init__(self) -> None:
        self._readers: dict[fx.Node, dict[tuple[str, ...], _Fitting]] = defaultdict(dict)
        self._unknown: list[Size] = []

    def __contains__(self, source: fx.Node) -> bool:
        """Whether a forward matmul reads a tensor."""
        return source in self._readers

    def add(self, source: fx.Node, gemm: Gemm, kind: OperandKind) -> None:
        """A forward matmul reads a tensor, as its input or its weight."""
        sizes = self._sorted((gemm.m, gemm.k, gemm.n))
        fitting = self._readers[source].setdefault(sizes, _Fitting((gemm, kind)))
        if (number := gemm.node.meta.get("seq_nr")) is not None:
            fitting.by_number.setdefault(number, (gemm, kind))
        fitting.by_name.setdefault(gemm.fqn, (gemm, kind))

    def forward_of(self, node: fx.Node, source: fx.Node) -> tuple[Gemm, OperandKind] | None:
        """The forward matmul that reads a tensor and whose gradient a matmul can be, and as what it reads it."""
        fitting = self._readers.get(source, {}).get(self._sorted(sizes_of(node)))
        if fitting is None:
            return None
        # AOTAutograd gives a backward node the sequence number of its forward
        found = fitting.by_number.get(node.meta.get("seq_nr", -1))
        return found or fitting.by_name.get(fqn.of_node(node), fitting.first)

    def _sorted(self, sizes: Sequence[Size]) -> tuple[str, ...]:
        """Sizes in an order, symbolic ones as they are now: one that a guard has fixed may be a number elsewhere."""
        return tuple(sorted(map(self._text, sizes)))

    def _text(self, size: Size) -> str:
        """The same for sizes that are the same; of those found out at run time the backward may have symbols of its own."""
        if (hint := size_hint(size)) is not None:
            return str(hint)
        known = next((other for other in self._unknown if statically_true(size == other)), None)
        if known is None:
            self._unknown.append(size)
        return str(size if known is None else known)
