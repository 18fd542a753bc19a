"""Whether layers that read one input can be one, with their gradients (:mod:`passes.siblings`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import fx

from f8fx.recipe import Role

from .choice import Convert
from .fqn import short_names
from .gemm import Gemm, Operand
from .lifetimes import Members, copied_out
from .rewrite import users_between
from .sizes import is_same
from .sums import Sum, sum_of

aten = torch.ops.aten

GRADIENTS: tuple[Role, ...] = ("grad_input", "grad_weight")


@dataclass(frozen=True)
class Family:
    """Layers of one input that can be merged.

    Attributes:
        members: for every role that is merged its conversions, in the order of the parts.
        grads: the output gradients of the layers, in the same order; empty without a backward.
        sum: how the gradients of the input are used, if they are merged.
        kept: the ``grad_weight`` matmuls that the recipe keeps in high precision, if they can be one too.
        copied: the forward matmuls whose results are copied out of the merged product.
    """

    members: dict[Role, tuple[Convert, ...]]
    grads: tuple[Operand, ...] = ()
    sum: Sum | None = None
    kept: tuple[Gemm, ...] = ()
    copied: frozenset[fx.Node] = frozenset()

    @property
    def layers(self) -> tuple[Gemm, ...]:
        """The forward matmuls, in the order of the parts."""
        return gemms(self.members["output"])


@dataclass(frozen=True)
class Apart:
    """Layers that stay as they are though others read their input too.

    Attributes:
        layers: their forward matmuls.
        reason: why, in a few words that recur and can be counted.
        detail: the same with names or numbers, or "".
    """

    layers: tuple[Gemm, ...]
    reason: str
    detail: str = ""


#: The gradients' conversions of each layer.
Gradients = Mapping[tuple[fx.Node, Role], Sequence[Convert]]
#: The ``grad_weight`` matmuls of each layer that the recipe keeps in high precision.
Kept = Mapping[fx.Node, Sequence[Gemm]]


def family_of(members: Members, gradients: Gradients, kept: Kept, backward: Set[fx.Node]) -> Family | Apart:
    """All matmuls of layers, those of each role as one, if they can be that."""
    roles: dict[Role, tuple[Convert, ...]] = {"output": tuple(members)}
    for role in GRADIENTS:
        found = [gradients.get((conversion.gemm.node, role), ()) for conversion in members]
        if any(len(conversions) > 1 for conversions in found):
            return apart(members, f"a layer has more than one {role}")
        if all(found):
            roles[role] = tuple(conversions[0] for conversions in found)
        elif any(found):
            names = short_names([conversion.gemm.fqn for conversion in members])
            lacking = [name for name, conversions in zip(names, found, strict=True) if not conversions]
            return apart(members, f"{role} of only some is in float8", _listed("not", lacking))
    grad_inputs, grad_weights = gemms(roles.get("grad_input", ())), gemms(roles.get("grad_weight", ()))
    grads = tuple(gemm.left for gemm in grad_weights or grad_inputs)
    total = sum_of([gemm.node for gemm in grad_inputs]) if grad_inputs else None
    reason = (
        _why_not_grad_input(grad_inputs, gemms(members), total)
        or _why_not_grad_weight(grad_weights, grad_inputs, members[0].gemm.left.node)
        or _why_not_together(roles, grads)
    )
    if reason:
        return apart(members, reason)
    return Family(roles, grads, total, _kept(members, kept, grads), copied_out(members, backward))


def _why_not_grad_input(own: Sequence[Gemm], outputs: Sequence[Gemm], total: Sum | None) -> str:
    """Why the ``grad_input`` of layers cannot be one; "" if they can, or are not converted."""
    if not own:
        return ""
    if any(gemm.right.kind == "grad_output" for gemm in own):
        return "the input is transposed in memory, and so is its gradient"
    if not all(map(_differentiates, own, outputs)):
        return "grad_input is no plain matmul with the same weight"
    return "input gradients are not only added up" if total is None else ""


def _why_not_grad_weight(own: Sequence[Gemm], grad_inputs: Sequence[Gemm], source: fx.Node) -> str:
    """The same of ``grad_weight``.

    Args:
        source: the input of the layers.
    """
    if not own:
        return ""
    if all(gemm.right.kind == "grad_output" for gemm in own):
        return "weight gradients are x.T @ dy, not dy.T @ x"
    if not _are_plain(own, source):
        return "grad_weight is no plain matmul with the same input"
    if any(a.left.node is not b.left.node for a, b in zip(own, grad_inputs, strict=False)):
        return "grad_input and grad_weight read different gradients"
    return "" if _can_wait(own) else "one weight gradient depends on another"


def _why_not_together(roles: Mapping[Role, Sequence[Convert]], grads: Sequence[Operand]) -> str:
    """Why layers cannot be one of which the matmuls of each role could be; "" if they can."""
    if len({grad.node for grad in grads}) != len(grads):
        return "the outputs are added up, so their gradients are one tensor"
    for role, conversions in roles.items():
        formats = {(c.left_dtype, c.right_dtype, c.pad_k, c.gemm.dtype) for c in conversions}
        if len(formats) != 1:
            return f"{role} is converted differently"
    return ""


def _kept(members: Sequence[Convert], kept: Kept, grads: Sequence[Operand]) -> tuple[Gemm, ...]:
    """The high-precision ``grad_weight`` of all layers, if one gemm can compute them; else none."""
    found = [kept.get(conversion.gemm.node, ()) for conversion in members]
    if not grads or any(len(gemms) != 1 for gemms in found):
        return ()
    matmuls = tuple(own[0] for own in found)
    fits = _are_plain(matmuls, members[0].gemm.left.node) and _can_wait(matmuls)
    return matmuls if fits and [gemm.left.node for gemm in matmuls] == [grad.node for grad in grads] else ()


def gemms(conversions: Iterable[Convert]) -> tuple[Gemm, ...]:
    """What is converted."""
    return tuple(conversion.gemm for conversion in conversions)


def apart(members: Iterable[Convert], reason: str, detail: str = "") -> Apart:
    return Apart(gemms(members), reason, detail)


def _listed(what: str, names: Sequence[str]) -> str:
    return f"{what} {', '.join(names)}" if all(names) else ""


def _are_plain(grad_weights: Sequence[Gemm], source: fx.Node) -> bool:
    """Whether matmuls are ``dy.T @ x`` for the input `x`."""
    return all(
        gemm.left.transposed
        and gemm.left.kind == "grad_output"
        and gemm.node.target is aten.mm.default
        and gemm.right.node is source
        and not gemm.right.transposed
        for gemm in grad_weights
    )


def _differentiates(grad: Gemm, output: Gemm) -> bool:
    """Whether a matmul is ``dy @ w`` for the weight of an ``output``."""
    weight = grad.right.node is output.right.node
    # a square one can be multiplied the other way round, in a backward that is written by hand
    turned = grad.right.transposed == output.right.transposed and is_same(output.k, output.n)
    is_plain = grad.node.target is aten.mm.default and not grad.left.transposed
    return is_plain and grad.left.kind == "grad_output" and weight and not turned


def _can_wait(members: Sequence[Gemm]) -> bool:
    """Whether nothing that the last of the matmuls needs depends on an earlier one."""
    nodes = {gemm.node for gemm in members}
    dependent = nodes.union(users_between(nodes, max(nodes)))
    return not any(source in dependent for node in nodes for source in node.all_input_nodes)
