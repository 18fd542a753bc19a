"""Which forward matmul a gradient belongs to: part of pass 1, *find*.

A matmul of the backward shares one operand with the forward matmul it differentiates, the weight or the input, and
contracts other dimensions of the same three sizes. Where several forward matmuls fit, as of tied weights, AOTAutograd's
sequence numbers tell, else names. The gradients of functions that are differentiated by hand have other numbers: there
:func:`distributed` tells those of weights apart by the gradient they read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from f8fx.recipe import OperandKind
from f8fx.torch_private import size_hint, statically_true

from . import fqn
from .experts import GROUPED_MM
from .gemm import Gemm, Size
from .matmuls import sizes_of
from .sizes import is_same

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
        sizes = self._sorted((gemm.m, gemm.k, gemm.n), gemm.experts > 0)
        fitting = self._readers[source].setdefault(sizes, _Fitting((gemm, kind)))
        if (number := gemm.node.meta.get("seq_nr")) is not None:
            fitting.by_number.setdefault(number, (gemm, kind))
        fitting.by_name.setdefault(gemm.fqn, (gemm, kind))

    def forward_of(self, node: fx.Node, source: fx.Node) -> tuple[Gemm, OperandKind] | None:
        """The forward matmul that reads a tensor and whose gradient a matmul can be, and as what it reads it."""
        fitting = self._readers.get(source, {}).get(self._sorted(sizes_of(node), node.target is GROUPED_MM))
        if fitting is None:
            return None
        # AOTAutograd gives a backward node the sequence number of its forward
        found = fitting.by_number.get(node.meta.get("seq_nr", -1))
        return found or fitting.by_name.get(fqn.of_node(node), fitting.first)

    def _sorted(self, sizes: Sequence[Size], of_experts: bool) -> tuple[str, ...]:
        """Sizes in an order, symbolic ones as they are now: one that a guard has fixed may be a number elsewhere.

        A layer of experts and another one that read one input may have the same.
        """
        return (*sorted(map(self._text, sizes)), *(["experts"] if of_experts else []))

    def _text(self, size: Size) -> str:
        """The same for sizes that are the same; of those found out at run time the backward may have symbols of its own."""
        if (hint := size_hint(size)) is not None:
            return str(hint)
        known = next((other for other in self._unknown if statically_true(size == other)), None)
        if known is None:
            self._unknown.append(size)
        return str(size if known is None else known)


def distributed(gemms: Sequence[Gemm]) -> list[Gemm]:
    """The matmuls; of several ``grad_weight`` of one layer each goes to the layer whose ``grad_input`` reads the same gradient."""
    mine: dict[fx.Node, list[Gemm]] = defaultdict(list)
    layers_of: dict[fx.Node, set[fx.Node]] = defaultdict(set)
    for gemm in gemms:
        if gemm.role == "grad_weight":
            mine[gemm.layer].append(gemm)
        elif gemm.role == "grad_input":
            layers_of[_gradient_of(gemm)].add(gemm.layer)
    outputs = {gemm.node: gemm for gemm in gemms if gemm.role == "output"}
    moved: dict[fx.Node, Gemm] = {}
    for node, of_one in mine.items():
        if len(of_one) < 2 or node not in outputs:
            continue
        free = {node, *(other for other in outputs if other not in mine)}
        for gemm in of_one:
            readers = layers_of[_gradient_of(gemm)] & free
            alike = [outputs[other] for other in readers if _is_alike(outputs[other], outputs[node])]
            if len(alike) == 1:
                moved[gemm.node] = replace(gemm, layer=alike[0].node, fqn=alike[0].fqn or gemm.fqn)
    return [moved.get(gemm.node, gemm) for gemm in gemms]


def _gradient_of(gemm: Gemm) -> fx.Node:
    return gemm.left.node if gemm.left.kind == "grad_output" else gemm.right.node


def _is_alike(one: Gemm, other: Gemm) -> bool:
    """Whether two layers read the same input and have the same sizes, so that only gradients tell theirs apart."""
    same = zip((one.m, one.k, one.n), (other.m, other.k, other.n), strict=True)
    return one.left.node is other.left.node and all(is_same(a, b) for a, b in same)
