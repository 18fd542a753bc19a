"""Pass 0, *fold*: batches that are multiplied by one matrix become one matmul.

PyTorch multiplies ``[b, m, k]`` by ``[k, n]`` as one ``[b * m, k]`` matrix, unless that would copy the input and the
matrix needs no gradient (``should_fold`` in ``aten/src/ATen/native/LinearAlgebra.cpp``). Then the matrix is expanded
over the batch: a frozen layer on ``x.transpose(0, 1)`` or ``x[:, 1:]`` arrives as a ``bmm``, and so does its input
gradient. A float8 cast copies its input anyway, so the reason for the ``bmm`` is gone::

    bmm(x, expand(w, [b, k, n]))   ->   view(mm(view(x, [b * m, k]), w), [b, m, n])

The matrix is a *weight*: a parameter, or computed from parameters alone; where no parameter is known, a 2-D input of
the graph. What else is expanded over a batch may be attention, the keys of one head for the queries of all.

Batches with a weight for each become grouped matmuls, if asked for (:mod:`passes.batched_experts`).

Products and sums that PyTorch has made of matmuls with one row or one column (:mod:`passes.products`) become matmuls too.

Nobody gains by this in high precision. So what there was stays in the graph, unused, until it is known which of the
new matmuls are converted; :meth:`Folded.undo` leaves the graph as it was to the node.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from f8fx.hardware import ALIGNMENT
from f8fx.recipe import Role
from f8fx.torch_private import overwritten_inputs

from . import fqn
from .backward import backward_nodes
from .batched_experts import ends_of_rows, is_of_experts
from .elements import SAME_ORDER, VIEWS, input_of, is_part_of
from .experts import Experts, is_turned
from .fake import view_of
from .operand import repeated_matrix
from .parameters import of_parameters
from .products import Product, products
from .rewrite import MARKS, Inserter, Provenance, erase_unused
from .sizes import is_same, is_same_shape, shape_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Folded:
    """One matmul in place of a batched one, or of products and sums.

    Attributes:
        old: what had the result; nothing reads it.
        matmul: the one, of experts a grouped one.
        result: what is read instead, of the shape of ``old``.
        parts: what ``old`` was computed by, if it is no matmul.
    """

    old: fx.Node
    matmul: fx.Node
    result: fx.Node
    parts: tuple[fx.Node, ...] = ()

    @property
    def is_batched(self) -> bool:
        """Whether it stands in place of a batched matmul, which *find* knows as well."""
        return not self.parts

    def undo(self) -> None:
        """What there was is read again, and the matmul is gone."""
        self.result.replace_all_uses_with(self.old)
        erase_unused(self.old.graph, self.result)

    def finish(self) -> None:
        """What there was is gone, and what expanded its weight."""
        if self.is_batched:
            _erase(self.old)
        for part in self.parts:
            if not part.users:
                part.graph.erase_node(part)


class Fold:
    """Puts matmuls in place of batched ones, and of products and sums, in place.

    Args:
        experts: whether those with a weight for each batch become grouped ones, and whether the gradients of these do.
    """

    def __init__(self, experts: Experts = "leave") -> None:
        self.experts = experts

    def __call__(self, graph: fx.Graph) -> list[Folded]:
        batched = graph.find_nodes(op="call_function", target=aten.bmm.default)
        walk = _Walk(graph, self.experts)
        folded = [walk.fold(node) for node in batched]
        # one by one: one may read another's result
        return [*filter(None, folded), *map(walk.joined, products(graph))]


class _Walk:
    def __init__(self, graph: fx.Graph, experts: Experts) -> None:
        self.graph = graph
        self.experts = experts
        # inputs as matrices: layers that read one input, or one gradient, are to be seen to
        self.flat: dict[Hashable, fx.Node] = {}
        self.ends: dict[Hashable, fx.Node] = {}
        # what the layers read that have become grouped matmuls
        self.inputs: set[fx.Node] = set()

    @cached_property
    def weights(self) -> Collection[fx.Node]:
        return of_parameters(self.graph).weights

    @cached_property
    def backward(self) -> Collection[fx.Node]:
        return backward_nodes(self.graph)

    @cached_property
    def overwritten(self) -> Collection[fx.Node]:
        return frozenset(overwritten_inputs(self.graph))

    def fold(self, bmm: fx.Node) -> Folded | None:
        if self.experts != "leave" and is_of_experts(bmm, self.weights):
            return self._grouped(bmm)
        if self.experts == "with_grad_weight" and self._is_grouped_gradient(bmm):
            return self._grouped_gradient(bmm)
        x, expanded = bmm.args
        assert isinstance(x, fx.Node) and isinstance(expanded, fx.Node)
        found = repeated_matrix(expanded)
        if is_same(shape_of(bmm)[0], 1) or found is None or not self._is_weight(found[0]):
            return None
        weight, transposed = found
        if is_part_of(weight, self.overwritten):
            return None  # the copies of it are what keeps its values for the backward
        insert = self._inserter(bmm)
        mm = insert(
            aten.mm.default,
            self._rows(insert, bmm, x),
            insert(aten.permute.default, weight, [1, 0]) if transposed else weight,
        )
        return _in_place_of(bmm, mm, insert)

    def _grouped(self, bmm: fx.Node) -> Folded:
        """The grouped matmul of all rows."""
        insert = self._inserter(bmm)
        x, matrices = bmm.args
        assert isinstance(x, fx.Node)
        if bmm not in self.backward:
            self.inputs.add(_unexpanded(x))
        ends = self._ends(insert, bmm, x)
        rows = self._rows(insert, bmm, x, whole=True)
        grouped = insert(aten._grouped_mm.default, rows, matrices, ends, None, None)
        return _in_place_of(bmm, grouped, insert)

    def _is_grouped_gradient(self, bmm: fx.Node) -> bool:
        """Whether a batched matmul sums over the rows of each batch what a layer reads times a gradient, and ``_grouped_mm`` takes it.

        A layer that is differentiated by hand may have any other product beside it.
        """
        left, right = bmm.args
        assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
        values, sizes = [node.meta["val"] for node in (bmm, left, right)], shape_of(bmm)[1:]
        read = [right, *(left.all_input_nodes if is_turned(left) else [])]
        return (
            bmm in self.backward
            and not self.inputs.isdisjoint(map(_unexpanded, read))
            and all(value.dtype == torch.bfloat16 for value in values)
            and all(isinstance(size, int) and size % ALIGNMENT == 0 for size in sizes)
        )

    def _grouped_gradient(self, bmm: fx.Node) -> Folded:
        """The sums over the rows of each batch."""
        left, right = bmm.args
        assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
        insert = self._inserter(bmm, "grad_weight")
        ends = self._ends(insert, bmm, right)
        columns = self._rows(insert, bmm, _turned(insert, left), whole=True)
        rows = self._rows(insert, bmm, right, whole=True)
        columns = insert(aten.permute.default, columns, [1, 0])
        grouped = insert(aten._grouped_mm.default, columns, rows, ends, None, None)
        grouped.meta["val"] = bmm.meta["val"]  # for what shares its memory
        bmm.replace_all_uses_with(grouped)
        return Folded(bmm, grouped, grouped)

    def _ends(self, insert: Inserter, bmm: fx.Node, x: fx.Node) -> fx.Node:
        """Where the rows of each batch end, of batches of one form once."""
        experts, rows, _ = shape_of(x)
        key = (experts, str(rows), x.meta["val"].device, *_marks(bmm))
        if key not in self.ends:
            self.ends[key] = ends_of_rows(insert, x)
        return self.ends[key]

    def _rows(self, insert: Inserter, bmm: fx.Node, x: fx.Node, whole: bool = False) -> fx.Node:
        """The rows of all batches, of one input once.

        Args:
            whole: they lie in memory one behind the other.
        """
        batch = _unexpanded(x)
        whole = whole and not _is_in_order(batch)
        key = (batch, whole, *_marks(bmm))
        if key not in self.flat:
            self.flat[key] = _as_matrix(insert, batch, whole)
        return self.flat[key]

    def joined(self, product: Product) -> Folded:
        """The matmul that is in parts."""
        old = product.result
        mm = self._inserter(old)(aten.mm.default, product.left, product.right)
        mm.meta["val"] = old.meta["val"]  # for what shares its memory
        old.replace_all_uses_with(mm)
        return Folded(old, mm, mm, product.parts)

    def _inserter(self, anchor: fx.Node, gradient: Role = "grad_input") -> Inserter:
        role: Role = gradient if anchor in self.backward else "output"
        return Inserter(self.graph, anchor, Provenance(anchor.name, fqn.of_node(anchor), role, "fold"))

    def _is_weight(self, matrix: fx.Node) -> bool:
        if self.weights:
            return matrix in self.weights
        # nobody told what is a parameter
        source = input_of(matrix)
        return source is not None and len(shape_of(source)) == 2


def _marks(bmm: fx.Node) -> tuple[Hashable, ...]:
    return tuple(bmm.meta.get(mark) for mark in MARKS)


def _in_place_of(bmm: fx.Node, matmul: fx.Node, insert: Inserter) -> Folded:
    """What reads a batched matmul reads another of all its rows."""
    # the same memory as before, which tells torch what shares it
    matmul.meta["val"] = view_of(bmm.meta["val"], matmul.meta["val"].shape)
    sizes = [insert.size(bmm.args[0], 0), insert.size(bmm.args[0], 1), insert.size(matmul, 1)]  # type: ignore[arg-type]
    result = insert(aten.view.default, matmul, sizes)
    bmm.replace_all_uses_with(result)
    return Folded(bmm, matmul, result)


def _turned(insert: Inserter, x: fx.Node) -> fx.Node:
    """Each matrix of a batch transposed: what it is the transpose of, if it is one."""
    if is_turned(x):
        return x.args[0]  # type: ignore[return-value]
    return insert(aten.permute.default, x, [0, 2, 1])


def _unexpanded(x: fx.Node) -> fx.Node:
    """What an input is before the views of its matmul, which every layer has its own of and which change nothing."""
    while x.op == "call_function" and (x.target in SAME_ORDER or x.target is aten.expand.default):
        source = x.args[0]
        assert isinstance(source, fx.Node)
        if len(shape_of(source)) != 3 or not is_same_shape(shape_of(source), shape_of(x)):
            break
        x = source
    return x


def _is_in_order(x: fx.Node) -> bool:
    """Whether the elements of ``[b, m, k]`` are known to lie in memory in their order."""
    value = x.meta["val"]
    _, rows, columns = value.shape
    return all(map(is_same, value.stride(), (rows * columns, columns, 1)))


def _as_matrix(insert: Inserter, x: fx.Node, whole: bool) -> fx.Node:
    """``[b, m, k]`` as ``[b * m, k]``; ``whole``: of a contiguous copy."""
    value = x.meta["val"]
    (batch, rows, _), strides = value.shape, value.stride()
    if whole or not (is_same(rows, 1) or is_same(strides[0], rows * strides[1])):
        x = insert.contiguous(x)
    together = batch * rows if isinstance(batch, int) and isinstance(rows, int) else -1
    return insert(aten.view.default, x, [together, insert.size(x, 2)])


def _erase(node: fx.Node) -> None:
    """Erases what nothing reads: a node, and the movements that led to it alone."""
    if node.users or node.op != "call_function":
        return
    if node.target not in VIEWS | {aten.bmm.default, aten.expand.default}:
        return
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        _erase(source)
