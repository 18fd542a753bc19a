"""Which forward matmul a gradient belongs to: part of pass 1, *find*.

A matmul of the backward shares one operand with the forward matmul it differentiates, the weight or the input, and
contracts other dimensions of the same three sizes. Where several forward matmuls fit, as of tied weights, AOTAutograd's
sequence numbers tell, else names.
"""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from f8fx.recipe import OperandKind

from . import fqn
from .gemm import Gemm
from .matmuls import sizes_of, sorted_sizes


class Layers:
    """The forward matmuls of a graph, by what they read."""

    def __init__(self) -> None:
        self._readers: dict[fx.Node, list[tuple[Gemm, OperandKind]]] = defaultdict(list)

    def __contains__(self, source: fx.Node) -> bool:
        """Whether a forward matmul reads a tensor."""
        return source in self._readers

    def add(self, source: fx.Node, gemm: Gemm, kind: OperandKind) -> None:
        """A forward matmul reads a tensor, as its input or its weight."""
        self._readers[source].append((gemm, kind))

    def forward_of(self, node: fx.Node, source: fx.Node) -> tuple[Gemm, OperandKind] | None:
        """The forward matmul that reads a tensor and whose gradient a matmul can be, and as what it reads it."""
        sizes = sorted_sizes(sizes_of(node))
        fits = [
            (gemm, kind)
            for gemm, kind in self._readers.get(source, ())
            if sorted_sizes((gemm.m, gemm.k, gemm.n)) == sizes
        ]
        for gemm, kind in fits:
            # AOTAutograd gives a backward node the sequence number of its forward
            if "seq_nr" in node.meta and gemm.node.meta.get("seq_nr") == node.meta["seq_nr"]:
                return gemm, kind
        name = fqn.of_node(node)
        for gemm, kind in fits:
            if gemm.fqn == name:
                return gemm, kind
        return fits[0] if fits else None
