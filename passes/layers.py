"""Which forward matmul a gradient belongs to: part of pass 1, *find*.

A matmul of the backward shares one operand with the forward matmul it differentiates, the weight or the input, and
contracts other dimensions of the same three sizes. Where several forward matmuls fit, as of tied weights, AOTAutograd's
sequence numbers tell, else names.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from torch import fx

from f8fx.recipe import OperandKind

from . import fqn
from .gemm import Gemm
from .matmuls import sizes_of, sorted_sizes

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

    def __contains__(self, source: fx.Node) -> bool:
        """Whether a forward matmul reads a tensor."""
        return source in self._readers

    def add(self, source: fx.Node, gemm: Gemm, kind: OperandKind) -> None:
        """A forward matmul reads a tensor, as its input or its weight."""
        sizes = tuple(sorted_sizes((gemm.m, gemm.k, gemm.n)))
        fitting = self._readers[source].setdefault(sizes, _Fitting((gemm, kind)))
        if (number := gemm.node.meta.get("seq_nr")) is not None:
            fitting.by_number.setdefault(number, (gemm, kind))
        fitting.by_name.setdefault(gemm.fqn, (gemm, kind))

    def forward_of(self, node: fx.Node, source: fx.Node) -> tuple[Gemm, OperandKind] | None:
        """The forward matmul that reads a tensor and whose gradient a matmul can be, and as what it reads it."""
        fitting = self._readers.get(source, {}).get(tuple(sorted_sizes(sizes_of(node))))
        if fitting is None:
            return None
        # AOTAutograd gives a backward node the sequence number of its forward
        found = fitting.by_number.get(node.meta.get("seq_nr", -1))
        return found or fitting.by_name.get(fqn.of_node(node), fitting.first)
