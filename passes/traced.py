"""Which tensor an operand comes from, with one node for all that are the same tensor: part of pass 1, *find*."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import fx

from f8fx.torch_private import overwritten_inputs

from .elements import CASTS, input_of, is_part_of, stays_on_device
from .experts import trace_matrices
from .identity import identity
from .operand import trace
from .parameters import OfParameters
from .sizes import is_same, shape_of


@dataclass(frozen=True)
class Traced:
    """An operand's tensor, and whether the operand is its transpose."""

    node: fx.Node
    transposed: bool


class Tracer:
    """Traces the operands of a graph's matmuls.

    Args:
        of_parameters: what of the graph is computed from parameters.
    """

    def __init__(self, graph: fx.Graph, of_parameters: OfParameters) -> None:
        self.of_parameters = of_parameters
        self.overwritten = frozenset(overwritten_inputs(graph))
        # one node stands for all 2-D views of the same elements
        self.representatives: dict[Hashable, fx.Node] = {}

    def trace(self, node: fx.Node) -> Traced:
        """The matrix that an operand is a view or the transpose of."""
        source, transposed = trace(node)
        shape = shape_of(source)
        key = (identity(source), str(shape[-2]), str(shape[-1]), len(shape))
        return Traced(self.representatives.setdefault(key, source), transposed)

    def through_cast(self, traced: Traced) -> Traced:
        """A weight, traced on through the cast from the float32 tensor it is a rounding of."""
        node = traced.node
        if node.target not in CASTS or not isinstance(node.args[0], fx.Node) or not stays_on_device(node):
            return traced
        source = node.args[0]
        *batch, _, _ = shape_of(source)  # an einsum's has size-1 dimensions in front
        if not all(is_same(size, 1) for size in batch) or not self._quantizes(source):
            return traced
        inner = self.trace(source)
        return Traced(inner.node, inner.transposed ^ traced.transposed)

    def matrices(self, node: fx.Node) -> Traced:
        """The matrices of experts that an operand is a view or the transposes of, or the rounding."""
        source, transposed = trace_matrices(node, self._quantizes)
        return Traced(self.of_experts(source), transposed)

    def of_experts(self, matrices: fx.Node) -> fx.Node:
        """The node that stands for all that are the same matrices."""
        return self.representatives.setdefault(("experts", identity(matrices)), matrices)

    def _quantizes(self, source: fx.Node) -> bool:
        """Whether a recipe quantizes a tensor, not the rounding that a matmul reads: it is a float32 weight."""
        if source.meta["val"].dtype != torch.float32:
            return False
        if source not in self.of_parameters.all and input_of(source) is None:
            return False
        # else the cast is what keeps its values for the backward
        return not is_part_of(source, self.overwritten)
