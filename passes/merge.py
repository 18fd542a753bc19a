"""Pass 3, *merge*: matmuls that read one input become one (q, k and v; gate and up).

Layers ``y_i = x @ w_i`` that share their input are three times as many gemms as they need to be. Side
by side, with ``w = concat(w_1, w_2, ...)``:

* ``output``: ``concat(y_i) = x @ w``, whose columns are read where they lie;
* ``grad_input``: the gradients of the one input are added up, ``sum_i dy_i @ w_i.T = concat(dy_i) @ w.T``,
  now inside the accumulator of one gemm instead of in rounded sums;
* ``grad_weight``: ``concat(dw_i) = concat(dy_i).T @ x``, whose rows are the gradients of weights ``[n, k]``.

Every weight and gradient is quantized anyway, so nothing is copied to stand side by side: the kernels
that quantize the parts write into one buffer (``f8fx.concat`` is never in memory). Where the recipe keeps
``grad_weight`` in high precision, the kernels that compute the gradients write them side by side; what no
kernel of Inductor computes (attention's) is copied, which the cost model charges.

What changes: a tensorwise operand has one scale for all parts instead of one for each; rowwise scales
stay the same in the forward and for ``grad_weight``, while a row of ``concat(dy_i)`` has one scale for
all parts. And ``grad_input`` is rounded once where it was rounded for each summand.

A family is merged in all its float8 roles or not at all, so that a weight has one scale in forward and
backward. It must be the same computation, or it stays as it is:

* the layers read the very same input, are converted in the same way, and need no padding;
* all weights are known before the first of the matmuls, and none is gathered for it;
* the gradients of the input are only used in one sum (behind casts to float32, under autocast), those of the
  weights after the last of them;
* activation checkpointing treats them alike.

What is not merged though it reads an input that others read is reported with its reason
(:class:`f8fx.report.MergeDecision`).

A column slice that has to outlive the forward would keep the whole product alive (:mod:`passes.lifetimes`), one that
leaves the graph would have strides no matmul gives, and one that ``as_strided`` or a custom operator reads would be
read at wrong places: those are copied out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx

from f8fx import ops
from f8fx.cost import CostModel
from f8fx.report import MergeDecision

from .backward import backward_nodes
from .bias import concatenated_biases
from .choice import Choice, Convert, current, reading
from .elements import CASTS, SAME_ORDER
from .family import Apart, Family, gemms
from .gemm import Gemm
from .lifetimes import Members, parted, partitions, reads_by_strides
from .merge_worth import Paying, judged, merge_decision, noted
from .rewrite import Inserter, Provenance, users_between
from .rounding import as_written
from .siblings import families
from .sizes import shape_of
from .strides import replace_laid_out

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass(frozen=True)
class Merged:
    """What the pass did.

    Attributes:
        conversions: all of them, with those of each merged family replaced by the merged ones.
        choices: those it was given, with what became of each (``Convert.merge``) and what it gains.
        decisions: one for each set of layers that read one input, in graph order.
    """

    conversions: list[Convert]
    choices: list[Choice]
    decisions: list[MergeDecision]


class Merge:
    """Merges families of matmuls, in place.

    Args:
        mode: ``"auto"``: where the cost model says that it pays; ``"never"``.
        model_of: the cost model of what a matmul on a device is decided for.
    """

    def __init__(self, mode: Literal["auto", "never"], model_of: Callable[[torch.device], CostModel]) -> None:
        self.mode = mode
        self.model_of = model_of

    def __call__(self, graph: fx.Graph, choices: Sequence[Choice]) -> Merged:
        """Merges what can be and pays; skips among the choices only explain why others are not merged."""
        outcomes = [self._outcome(found) for found in self._families(graph, choices)]
        conversions = [choice for choice in choices if isinstance(choice, Convert)]
        paying = [outcome.family for outcome in outcomes if isinstance(outcome, Paying)]
        in_order = sorted(outcomes, key=_first)  # now: rewriting erases nodes
        return Merged(
            self._rewritten(graph, conversions, paying) if paying else conversions,
            noted(choices, outcomes),
            [merge_decision(outcome) for outcome in in_order],
        )

    def _families(self, graph: fx.Graph, choices: Sequence[Choice]) -> list[Family | Apart]:
        backward = {node for node in backward_nodes(graph) if node.op != "output"}

        def runs(members: Members) -> Sequence[Members]:
            return parted(members) if self.mode == "auto" else [members]

        def ways(members: Members, trains: bool) -> Sequence[Sequence[Members]]:
            model = self.model_of(members[0].gemm.device)
            return partitions(members, backward, trains, model) if self.mode == "auto" else [[members]]

        return families(choices, backward, runs, ways)

    def _outcome(self, found: Family | Apart) -> Paying | Apart:
        if isinstance(found, Apart):
            return found
        if self.mode == "never":
            return Apart(found.layers, "switched off")
        return judged(found, self.model_of(found.layers[0].device))

    def _rewritten(
        self,
        graph: fx.Graph,
        conversions: Sequence[Convert],
        found: Sequence[Family],
    ) -> list[Convert]:
        merged: dict[fx.Node, Convert] = {}
        gone: dict[fx.Node, None] = {}
        replaced: dict[fx.Node, fx.Node] = {}
        for family in found:
            for new, old in _Rewrite(graph, family, replaced).run():
                if new is not None:
                    merged[old[0].node] = new
                gone.update(dict.fromkeys(gemm.node for gemm in old))
        for node in gone:
            _erase_unused(graph, node)
        return [
            reading(merged.get(conversion.gemm.node, conversion), replaced)
            for conversion in conversions
            if conversion.gemm.node in merged or conversion.gemm.node not in gone
        ]


def _first(outcome: Paying | Apart) -> fx.Node:
    layers = outcome.layers if isinstance(outcome, Apart) else outcome.family.layers
    return layers[0].node


class _Rewrite:
    """The merged matmuls of one family, in high precision: `quantize` does the rest.

    Args:
        replaced: what was replaced by what, in this family and in those before it: one layer may read
            another's result, or be the gradient of a merged sum.
    """

    def __init__(
        self,
        graph: fx.Graph,
        family: Family,
        replaced: dict[fx.Node, fx.Node],
    ) -> None:
        self.graph = graph
        self.family = family
        self.replaced = replaced

    def run(self) -> list[tuple[Convert | None, tuple[Gemm, ...]]]:
        """The new conversions, each with the matmuls it replaces; ``None`` for one in high precision."""
        members = self.family.members
        output, weight = self._output(members["output"])
        result: list[tuple[Convert | None, tuple[Gemm, ...]]] = [(output, self.family.layers)]
        layer = output.gemm.node
        if self.family.grads:
            grad = self._grad()
            if "grad_input" in members:
                grad_input = members["grad_input"]
                result.append((self._grad_input(grad_input, layer, grad, weight), gemms(grad_input)))
            if "grad_weight" in members:
                grad_weight = members["grad_weight"]
                merged = self._grad_weight(gemms(grad_weight), layer, grad)
                result.append((replace(grad_weight[0], gemm=merged), gemms(grad_weight)))
        if self.family.kept:
            self._grad_weight(self.family.kept, layer, grad)
            result.append((None, self.family.kept))
        return result

    def _output(self, members: tuple[Convert, ...]) -> tuple[Convert, fx.Node]:
        """``concat(y_i) = x @ concat(w_i)``, and the concatenated weights."""
        first = members[0].gemm
        insert = self._before(first)
        transposed = first.right.transposed
        weight = insert(ops.concat, [self._now(c.gemm.right.node) for c in members], 0 if transposed else 1)
        right = _as_operand(insert, weight, transposed, first.dtype)
        left = first.node.args[1 if first.node.target is aten.addmm.default else 0]
        bias = concatenated_biases(members, insert)
        if bias is None:
            product = insert(aten.mm.default, left, right)
        else:
            product = insert(aten.addmm.default, bias, left, right)
        end = 0
        for conversion in members:
            node = conversion.gemm.node
            start, end = end, end + int(conversion.gemm.n)
            part = insert(aten.slice.Tensor, product, 1, start, end)
            is_copied, insert_here = node in self.family.copied, insert
            if node.target is aten.addmm.default and bias is None:
                insert_here = self._before(conversion.gemm)
                part = as_written(insert_here, insert_here(aten.add.Tensor, part, node.args[0]))
            elif is_copied:
                part = insert.contiguous(part)
            if is_copied:  # in memory, so that it is saved, and not the product to copy it from again
                part = insert_here(ops.materialize, part)
            self._replace(node, part)
        gemm = replace(
            first,
            node=product,
            fqn=_names(self.family.layers),
            n=end,
            right=replace(first.right, node=weight),
            layer=product,
        )
        return replace(members[0], gemm=gemm, adds_bias=bias is not None), weight

    def _grad(self) -> fx.Node:
        """``concat(dy_i)``, before the first of the merged gradient matmuls."""
        members = self.family.members
        merged = [gemms(conversions) for role, conversions in members.items() if role != "output"]
        lasts = [self._last(each) for each in (*merged, self.family.kept) if each]
        insert = self._before(min(lasts, key=lambda gemm: gemm.node))
        parts = []
        for grad in self.family.grads:
            node = self._now(grad.node)
            rank = len(shape_of(node))
            parts.append(node if rank == 2 else insert(aten.squeeze.dims, node, list(range(rank - 2))))
        whole = insert(ops.concat, parts, 1)
        return insert(ops.materialize, whole) if self.family.kept else whole

    def _grad_input(
        self, members: tuple[Convert, ...], layer: fx.Node, grad: fx.Node, weight: fx.Node
    ) -> Convert:
        """``sum_i dy_i @ w_i.T = concat(dy_i) @ concat(w_i).T``, in place of the sum."""
        total = self.family.sum
        assert total is not None
        first = members[0].gemm
        insert = self._before(self._last(gemms(members)))
        right = _as_operand(insert, weight, first.right.transposed, first.dtype)
        product = insert(aten.mm.default, grad, right)
        insert = Inserter(self.graph, total.root, insert.provenance)
        value = product
        for view in _views(first.node, total.summand):
            assert not isinstance(view.target, str)
            value = insert(view.target, value, *view.args[1:], **view.kwargs)
        for other in total.others:
            value = insert(aten.add.Tensor, value, self._now(other))
        self._replace(total.root, value)
        gemm = replace(
            first,
            node=product,
            fqn=_names(gemms(members)),
            k=sum(int(c.gemm.k) for c in members),
            left=replace(first.left, node=grad),
            right=replace(first.right, node=weight),
            layer=layer,
        )
        return replace(members[0], gemm=gemm)

    def _grad_weight(self, members: tuple[Gemm, ...], layer: fx.Node, grad: fx.Node) -> Gemm:
        """``concat(dw_i) = concat(dy_i).T @ x``, after the last of the gradients."""
        nodes = {gemm.node for gemm in members}
        last = self._last(members)
        waiting = users_between(nodes, last.node)
        insert = self._before(last)
        transposed = insert(aten.permute.default, grad, [1, 0])
        product = insert(aten.mm.default, transposed, last.node.args[1])
        end = 0
        for gemm in members:
            start, end = end, end + int(gemm.m)
            part = insert(aten.slice.Tensor, product, 0, start, end)
            if reads_by_strides(gemm.node):
                part = insert.contiguous(part)
            self._replace(gemm.node, part)
        for node in waiting:
            if (
                node < last.node
            ):  # not if another family's gradients, which it sums up with these, moved it on
                last.node.prepend(node)
        left = replace(members[0].left, node=grad)
        return replace(members[0], node=product, fqn=_names(members), m=end, left=left, layer=layer)

    def _last(self, members: Sequence[Gemm]) -> Gemm:
        return max(members, key=lambda gemm: gemm.node)

    def _now(self, node: fx.Node) -> fx.Node:
        return current(node, self.replaced)

    def _replace(self, old: fx.Node, new: fx.Node) -> None:
        replace_laid_out(old, new)
        self.replaced[old] = new

    def _before(self, gemm: Gemm) -> Inserter:
        return Inserter(self.graph, gemm.node, Provenance(gemm.node.name, gemm.fqn, gemm.role, "merge"))


def _as_operand(insert: Inserter, node: fx.Node, transposed: bool, dtype: torch.dtype) -> fx.Node:
    if node.meta["val"].dtype != dtype:
        node = insert(prims.convert_element_type.default, node, dtype)
    return insert(aten.permute.default, node, [1, 0]) if transposed else node


def _views(node: fx.Node, last: fx.Node) -> list[fx.Node]:
    """The views of a matmul up to the one that is summed up: the merged product is of the same shape."""
    views: list[fx.Node] = []
    while last is not node:
        views.insert(0, last)
        last = last.args[0]  # type: ignore[assignment]
    return views


def _names(members: Sequence[Gemm]) -> str:
    return " + ".join(dict.fromkeys(gemm.fqn for gemm in members))


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Takes a replaced matmul out, with the views, casts and sums that read it and are read by nothing now."""
    for user in list(node.users):
        is_its_own = user.target in SAME_ORDER or user.target in CASTS or user.target is aten.add.Tensor
        assert is_its_own, f"{node} is still read by {user}"
        _erase_unused(graph, user)
    graph.erase_node(node)
