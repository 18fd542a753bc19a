"""Value objects: what `find` saw. Matching fills them in; rewriting only reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from f8fx.recipe import OperandKind, Role

Size = int | torch.SymInt


@dataclass(frozen=True)
class Operand:
    """One operand of a gemm, traced back to the tensor it comes from.

    Attributes:
        node: a 2-D value of the graph with the operand's elements: the operand itself, or its
            transpose. Two uses of one tensor, say in forward and in backward, have the same node.
            3-D where there is a matrix for each expert.
        transposed: whether the gemm reads ``node.T``; of experts: ``node.mT``.
        kind: the part the tensor plays in its layer.
        fused: whether the tensor comes out of a pointwise or normalisation kernel, so that an
            amax can ride in the kernel that produces it.
    """

    node: fx.Node
    transposed: bool
    kind: OperandKind
    fused: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.node.meta["val"].dtype


@dataclass(frozen=True)
class Gemm:
    """One matmul of the graph, ``[m, k] @ [k, n]``, or each of the m rows times the ``[k, n]`` of its expert, or, of the
    gradient of experts' weights, the sums over the k of each.

    Attributes:
        node: the matmul: ``mm``, ``addmm``, a ``bmm`` of batch 1 or, of experts, ``_grouped_mm``.
        role: which of a layer's three gemms it is, in torchao's words.
        fqn: name of the module whose forward called it, "" where none did.
        m, k, n: sizes; ``SymInt`` where the graph is dynamic.
        left, right: the operands.
        layer: the forward matmul this one belongs to (itself for ``output``).
        experts: how many matrices the right operand has, or the result of ``grad_weight``; 0: it is one.
    """

    node: fx.Node
    role: Role
    fqn: str
    m: Size
    k: Size
    n: Size
    left: Operand
    right: Operand
    layer: fx.Node
    experts: int = 0

    @property
    def sums_groups(self) -> bool:
        """Whether k, the rows of all experts, is summed expert by expert."""
        return self.experts > 0 and self.role == "grad_weight"

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the result."""
        return self.node.meta["val"].dtype

    @property
    def device(self) -> torch.device:
        return self.node.meta["val"].device


@dataclass(frozen=True)
class Unmatched:
    """A matmul that `find` does not hand on, and why; it stays as it is."""

    node: fx.Node
    fqn: str
    role: Role
    m: Size
    k: Size
    n: Size
    reason: str
