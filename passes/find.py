"""Pass 1, *find*: every matmul of the graph becomes a :class:`~passes.gemm.Gemm`. Only looks.

A joint graph knows no layers: ``F.linear``, ``einsum``, ``@`` and HF's ``Conv1D`` all arrive as
``mm``, ``addmm`` or ``bmm`` on views and permutes, and their gradients as more of the same. What a
recipe needs to know is recovered here:

* **operands**: traced through movement operators to the tensor they come from, so that all uses of
  one tensor are seen as one (:mod:`passes.traced`). A *weight* is also traced through the cast
  that autocast puts between a float32 parameter and its matmul: the recipe quantizes the
  parameter, or what is computed from it, not the bfloat16 rounding (torchao does the same). The weight
  is what is computed from parameters alone (:mod:`passes.parameters`); where no parameter is known, an
  input of the graph; the right operand where that does not tell. A matmul of two activations is left
  (:mod:`passes.activations`);
* **role**: a matmul that does not depend on the tangents computes an ``output``. One that does
  shares its other operand with the forward matmul it differentiates: if that is the forward's
  weight it computes ``grad_input``, if it is the input, ``grad_weight``;
* **name**: the module's FQN, in backward too.

Gradients that a model takes inside its own graph (``torch.func.grad``) carry no tangents and no mark, and
count as ``output``. Their structure does not tell: ``tanh(x @ w) @ w.T`` is the forward of a tied autoencoder
just as it can be a gradient of ``x``, and an e5m2 cast in a forward is worse than an e4m3 one in a gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import fx

from f8fx.recipe import OperandKind, Role
from f8fx.report import dtype_name
from f8fx.torch_private import statically_true

from . import batched, fqn
from .activations import Activations, is_added_to_norms
from .backward import depending_on_tangents
from .choice import EMPTY
from .elements import input_of, is_part_of_input
from .experts import GROUPED_MM, Experts, contracts_rows, why_no_layer
from .gemm import Gemm, Operand, Unmatched
from .layers import Layers, distributed
from .left import (
    BATCHED,
    BATCHED_GRADIENT,
    BATCHED_WEIGHT,
    BATCHED_WEIGHT_GRADIENT,
    DISTANCES,
    GROUPED_ACTIVATIONS,
    GROUPED_MATRIX,
    LEFT,
)
from .matmuls import GEMMS, is_fused, operands_of, seen_sizes, sizes_of
from .operand import repeated_matrix
from .parameters import is_repeated, of_parameters
from .sizes import is_same, shape_of
from .traced import Traced, Tracer

aten = torch.ops.aten

_NO_FORWARD = "no forward matmul it is the gradient of"


@dataclass
class Found:
    """What `find` saw, in graph order.

    Attributes:
        gemms: the matmuls a recipe can speak of.
        unmatched: all others, each with its reason.
    """

    gemms: list[Gemm] = field(default_factory=list)
    unmatched: list[Unmatched] = field(default_factory=list)


class Find:
    """Collects the matmuls of a joint or inference graph.

    Args:
        leave_activations: whether those of two activations (:mod:`passes.activations`) are left.
        experts: whether grouped ones are collected, and those that are gradients of weights (:mod:`passes.experts`); else they are
            left.
    """

    def __init__(self, leave_activations: bool = True, experts: Experts = "leave") -> None:
        self.leave_activations = leave_activations
        self.experts = experts

    def __call__(
        self,
        graph: fx.Graph,
        done: Collection[fx.Node] = (),
        layers: Mapping[fx.Node, Gemm] = MappingProxyType({}),
    ) -> Found:
        """The matmuls.

        Args:
            done: batched matmuls, or what has the result of matmuls in parts, that are dealt with: another stands in
                their place (:mod:`passes.fold`), or did and was taken back.
            layers: those of forwards that were seen as one and are left: they are not collected again, but their
                gradients are known by them.
        """
        return _Walk(graph, done, layers, self.leave_activations, self.experts).run()


class _Walk:
    def __init__(
        self,
        graph: fx.Graph,
        done: Collection[fx.Node],
        layers: Mapping[fx.Node, Gemm],
        leave_activations: bool,
        experts: Experts,
    ) -> None:
        self.graph = graph
        self.experts = experts
        self.done = done
        self.layers = layers
        self.backward = depending_on_tangents(graph)
        self.of_parameters = of_parameters(graph)
        self.activations = Activations(graph, self.of_parameters) if leave_activations else None
        self.tracer = Tracer(graph, self.of_parameters)
        self.found = Found()
        self.known = Layers()
        # why matmuls are left, by the number they share with their gradients
        self.batched: dict[int, str] = {}
        self.no_layers: dict[int, str] = {}
        # batched layers that are left, by the same
        self.left_experts: dict[int, Gemm] = {}

    def run(self) -> Found:
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            if node in self.done:
                if node.target is aten.bmm.default:
                    self.batched[node.meta.get("seq_nr", -1)] = batched.why_gradient_is_left(node)
            elif node in self.layers:
                self._left_layer(self.layers[node])
            elif node.target is GROUPED_MM and self.experts != "leave":
                self._grouped(node)
            elif node.target in LEFT:
                self._leave(node, self._why_left(node))
            elif node.target in GEMMS:
                if node.target is aten.bmm.default and not is_same(shape_of(node)[0], 1):
                    self._leave(node, self._batched(node))
                elif self._is_backward(node):
                    self._backward_gemm(node)
                else:
                    self._forward_gemm(node)
        self.found.gemms = distributed(self.found.gemms)
        return self.found

    def _why_left(self, node: fx.Node) -> str:
        reason = LEFT[node.target]
        return self._batched(node) if reason == BATCHED else reason

    def _forward_gemm(self, node: fx.Node) -> None:
        left, right = (self.tracer.trace(operand) for operand in operands_of(node))
        if self._is_the_weight(left.node, right.node):
            kinds: tuple[OperandKind, OperandKind] = ("weight", "input")
            left = self.tracer.through_cast(left)
        else:
            kinds = ("input", "weight")
            right = self.tracer.through_cast(right)
        if node.target is aten.bmm.default and not any(map(self._is_weight, (left.node, right.node))):
            # what is left of attention when batch times heads is 1; an einsum has a weight
            self._leave(node, BATCHED)
            return
        if reason := self._why_no_layer(node, left, right):
            self._leave(node, reason)
            self.no_layers[node.meta.get("seq_nr", -1)] = reason
            return
        gemm = self._gemm(node, "output", fqn.of_node(node), left, right, kinds, node)
        self.known.add(gemm.left.node, gemm, kinds[0])
        self.known.add(gemm.right.node, gemm, kinds[1])

    def _grouped(self, node: fx.Node) -> None:
        if self.experts == "with_grad_weight" and contracts_rows(node):
            self._grouped_gradient(node)
            return
        if reason := why_no_layer(node):
            self._leave(node, reason)
            return
        rows, matrices = operands_of(node)
        right = self.tracer.matrices(matrices)
        if is_repeated(right.node) or not self._is_of_experts(right.node):
            self._leave(node, GROUPED_MATRIX if is_repeated(right.node) else GROUPED_ACTIVATIONS)
            return
        left, experts = self.tracer.trace(rows), shape_of(matrices)[0]
        if not self._is_backward(node):
            name = fqn.of_node(node)
            gemm = self._gemm(node, "output", name, left, right, ("input", "weight"), node, experts)
            self.known.add(right.node, gemm, "weight")
            self.known.add(left.node, gemm, "input")
            return
        match = self.known.forward_of(node, right.node)
        if match is None:
            self._leave(node, _NO_FORWARD)
            return
        name = match[0].fqn or fqn.of_node(node)
        self._gemm(node, "grad_input", name, left, right, ("grad_output", "weight"), match[0].node, experts)

    def _grouped_gradient(self, node: fx.Node) -> None:
        """Of the weights of experts: one operand is a gradient, the other what their layer reads."""
        sides = operands_of(node)
        left, right = (self.tracer.trace(side) for side in sides)
        is_grad = [side in self.backward for side in sides]
        layer = self.left_experts.get(node.meta.get("seq_nr", -1))
        if is_grad[0] != is_grad[1]:
            match = self.known.forward_of(node, (right if is_grad[0] else left).node)
            layer = match[0] if match is not None else layer
        if layer is None:
            self._leave(node, _NO_FORWARD)
            return
        name = layer.fqn or fqn.of_node(node)
        kinds: tuple[OperandKind, OperandKind] = ("input", "grad_output")
        if is_grad[0]:
            kinds = ("grad_output", "input")
        self._gemm(node, "grad_weight", name, left, right, kinds, layer.node, layer.experts)

    def _is_of_experts(self, matrices: fx.Node) -> bool:
        """Whether 3-D matrices may be weights."""
        if matrices in self.backward:
            return False
        if self.activations is not None and self.of_parameters.are_known:
            return matrices not in self.activations.found
        return matrices in self.of_parameters.all or input_of(matrices) is not None

    def _left_layer(self, gemm: Gemm) -> None:
        """What the gradients of a layer that is left are known by: of a batched matmul with one matrix that matrix."""
        if gemm.node.target is not aten.bmm.default:
            for operand in (gemm.left, gemm.right):
                self.known.add(self.tracer.trace(operand.node).node, gemm, operand.kind)
            return
        if gemm.experts:
            self.known.add(self.tracer.of_experts(gemm.right.node), gemm, "weight")
            self.left_experts[gemm.node.meta.get("seq_nr", -1)] = gemm
        else:
            found = repeated_matrix(gemm.node.args[1])  # type: ignore[arg-type]
            assert found is not None
            matrix = self.tracer.through_cast(self.tracer.trace(found[0]))
            self.known.add(matrix.node, gemm, "weight")
        self.batched[gemm.node.meta.get("seq_nr", -1)] = batched.why_gradient_is_left(gemm.node)

    def _is_the_weight(self, left: fx.Node, right: fx.Node) -> bool:
        """Whether the left operand is, and not the right one."""
        parameters = self.of_parameters.all
        for there in (parameters, self.of_parameters.held):
            if left in there or right in there:
                return right not in there
        # where parameters are known, any other input is data
        return not parameters and input_of(left) is not None and not is_part_of_input(right)

    def _why_no_layer(self, node: fx.Node, left: Traced, right: Traced) -> str:
        """Why a matmul is no layer, nor a gradient that the model takes itself; "" if it may be."""
        if self.activations is not None and is_added_to_norms(node, left.node, right.node):
            return DISTANCES
        if node.target is aten.bmm.default:  # an einsum's
            return ""
        reason = self.activations.reason(left.node, right.node) if self.activations is not None else ""
        is_gradient = reason and any(self.known.forward_of(node, side.node) for side in (left, right))
        return "" if is_gradient else reason

    def _is_weight(self, node: fx.Node) -> bool:
        return node in self.of_parameters.weights or input_of(node) is not None

    def _batched(self, node: fx.Node) -> str:
        """Why a batched matmul is left: a gradient as the forward matmul whose sequence number it has."""
        layer = node.meta.get("seq_nr")
        if layer in self.batched and self._is_backward(node):
            return self.batched[layer]
        reason = batched.why_left(node, self.of_parameters.weights)
        if layer is not None:
            self.batched[layer] = reason
        return reason

    def _is_backward(self, node: fx.Node) -> bool:
        if node in self.backward:
            return True
        # gradients taken inside a graph, or in the body of a higher-order operator, have no tangents; a
        # forward that such a body runs again is tagged as one
        tag = node.meta.get("partitioner_tag")
        return tag == "is_backward" if tag else bool(node.meta.get("autograd_backward"))

    def _is_read_forward(self, side: Traced) -> bool:
        """Whether a forward matmul reads a tensor, or what it is a cast of."""
        return side.node in self.known or self.tracer.through_cast(side).node in self.known

    def _backward_gemm(self, node: fx.Node) -> None:
        sides = operands_of(node)
        is_grad = [side in self.backward for side in sides]
        if not any(is_grad):  # told by its mark alone: the side that no forward matmul reads
            is_grad = [not self._is_read_forward(self.tracer.trace(side)) for side in sides]
            if is_grad[0] == is_grad[1]:
                self._leave(node, _NO_FORWARD)
                return
        if all(is_grad):
            self._leave(node, "both operands are gradients")
            return
        traced = [self.tracer.trace(side) for side in sides]
        other = is_grad.index(False)
        match = self.known.forward_of(node, traced[other].node)
        if match is None:
            # the weight may have been read through its cast
            through = self.tracer.through_cast(traced[other])
            match = self.known.forward_of(node, through.node)
            traced[other] = through
        number = node.meta.get("seq_nr")
        if match is not None and number in self.no_layers and match[0].node.meta.get("seq_nr") != number:
            match = None  # a matmul that is no layer has read what a layer reads
        if match is None:
            self._leave(node, self._not_matched(node))
            return
        forward, kind = match
        role: Role = "grad_input" if kind == "weight" else "grad_weight"
        kinds: list[OperandKind] = ["grad_output", "grad_output"]
        kinds[other] = kind
        name = forward.fqn or fqn.of_node(node)
        self._gemm(node, role, name, traced[0], traced[1], (kinds[0], kinds[1]), forward.node)

    def _not_matched(self, node: fx.Node) -> str:
        """Why a gradient is left that belongs to no layer."""
        if any(statically_true(size == 0) for size in sizes_of(node)):
            return EMPTY  # the forward of no rows is no matmul
        if (dtype := node.meta["val"].dtype).is_complex:  # it reads the conjugate of what the forward reads
            return f"{dtype_name(dtype)} matmul"
        reason = self.no_layers.get(node.meta.get("seq_nr", -1), _NO_FORWARD)
        return self._batched(node) if reason == _NO_FORWARD and node.target is aten.bmm.default else reason

    def _gemm(
        self,
        node: fx.Node,
        role: Role,
        name: str,
        left: Traced,
        right: Traced,
        kinds: tuple[OperandKind, OperandKind],
        layer: fx.Node,
        experts: int = 0,
    ) -> Gemm:
        m, k, n = sizes_of(node)
        gemm = Gemm(
            node,
            role,
            name,
            m,
            k,
            n,
            Operand(left.node, left.transposed, kinds[0], is_fused(left.node)),
            Operand(right.node, right.transposed, kinds[1], is_fused(right.node)),
            layer,
            experts,
        )
        self.found.gemms.append(gemm)
        return gemm

    def _leave(self, node: fx.Node, reason: str) -> None:
        role: Role = "grad_input" if self._is_backward(node) else "output"
        no_weight = reason == BATCHED_WEIGHT and not batched.parameters_of(node, self.of_parameters.weights)
        of_experts = node.target is GROUPED_MM and contracts_rows(node)
        if reason in (BATCHED_GRADIENT, BATCHED_WEIGHT_GRADIENT) or (
            role == "grad_input" and (no_weight or of_experts)
        ):
            role = "grad_weight"
        m, k, n = seen_sizes(node)
        self.found.unmatched.append(Unmatched(node, fqn.of_node(node), role, m, k, n, reason))
