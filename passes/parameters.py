"""Which inputs of a graph are parameters, or held by its module otherwise, and what is computed from these alone.

A graph does not tell parameters from other inputs; the caller can, who has Dynamo's inputs. Where nobody did, nothing
is known to be a parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import fx, nn

from f8fx.parts import is_dtensor, largest_part
from f8fx.torch_private import (
    input_position,
    is_higher_order,
    is_of_torch,
    is_operator,
    keeps_its_address,
)

from .elements import COPIES, base_of, input_of, is_given
from .sizes import is_same, is_size, shape_of

aten = torch.ops.aten

#: Keys in the metadata of inputs and constants of which is known whether they are parameters, or held otherwise.
_PARAMETER = "f8fx_parameter"
_HELD = "f8fx_held"
#: Of inputs that ranks hold unequal parts of.
_UNEVEN = "f8fx_uneven"

#: Operators that contract: what they give is a weight only as an exception (``w + b @ a``), and often data.
_CONTRACTIONS = frozenset(
    (
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot"),
        *("convolution", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "grouped_mm"),
    )
)


@dataclass(frozen=True)
class KnownInputs:
    """What is known of the inputs of a Dynamo graph.

    Attributes:
        parameters: positions of the parameters.
        held: positions of what else modules and optimizers hold: buffers, other attributes, states, gradients.
        uneven: positions of those of which ranks hold parts of unequal sizes.
    """

    parameters: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()
    uneven: frozenset[int] = frozenset()

    @staticmethod
    def of(example_inputs: Sequence[Any]) -> KnownInputs:
        """What Dynamo's inputs tell."""
        parameters = {i for i, value in enumerate(example_inputs) if isinstance(value, nn.Parameter)}
        held = {i for i, value in enumerate(example_inputs) if keeps_its_address(value)}
        uneven = {
            i for i, value in enumerate(example_inputs) if is_dtensor(value) and not largest_part(value)[1]
        }
        return KnownInputs(frozenset(parameters), frozenset(held - parameters), frozenset(uneven))

    def mark(self, graph: fx.Graph) -> None:
        """Notes it on the inputs of a graph made of the Dynamo graph; parts of a subclass are what the whole is.

        Graphs that are compiled ahead of time hold theirs as constants. Of the inputs of a branch of ``torch.cond``, or
        of a nested region, nothing is known: which of the Dynamo graph's they are is not noted there.
        """
        placeholders = graph.find_nodes(op="placeholder")
        positions = {node: input_position(node) for node in placeholders}
        are_told = any(position is not None for position in positions.values())
        for node in graph.nodes:
            if node.op == "placeholder" and are_told:
                position = positions[node]
                node.meta[_PARAMETER] = position in self.parameters
                node.meta[_HELD] = position in self.held
                node.meta[_UNEVEN] = position in self.uneven
            elif node.op == "get_attr" and isinstance(_constant(node), torch.Tensor):
                node.meta[_PARAMETER] = isinstance(_constant(node), nn.Parameter)
                node.meta[_HELD] = not node.meta[_PARAMETER]


def _constant(node: fx.Node) -> Any:
    """What the graph's module holds under a node's name."""
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value


def is_marked(node: fx.Node) -> bool:
    """Whether an input or constant is known to be a parameter."""
    return node.meta.get(_PARAMETER, False)


def is_there(node: fx.Node) -> bool:
    """Whether an input or constant is known to be held by a module or an optimizer: a parameter, or otherwise."""
    return is_marked(node) or bool(node.meta.get(_HELD, False))


def is_uneven(node: fx.Node) -> bool:
    """Whether a tensor is an input, at most moved or cast, of which ranks hold parts of unequal sizes."""
    source = input_of(node)
    return source is not None and bool(source.meta.get(_UNEVEN))


def expanded_parameter(batched: fx.Node, weights: Collection[fx.Node] = ()) -> fx.Node | None:
    """The parameter that an operand of a batched matmul is, or that weight, at most expanded, copied, and cast, on its way."""
    node = base_of(batched)
    # of `x @ w` with a matrix for each head the product of batch and heads is made by a copy
    while node.target in COPIES or node.target is aten.expand.default:
        if node in weights:  # a cast parameter is one
            break
        node = base_of(node.args[0])  # type: ignore[arg-type]
    source = input_of(node)
    if source is None and base_of(node) in weights:
        return base_of(node)
    return source if source is not None and is_marked(source) else None


def constants(graph: fx.Graph) -> set[fx.Node]:
    """The matrices among the parameters that a graph holds as constants."""
    return {n for n in graph.nodes if n.op == "get_attr" and is_marked(n) and len(shape_of(n)) == 2}


@dataclass
class OfParameters:
    """What is computed from parameters alone.

    A parameter that is repeated over a batch is none of these: it is data, as learned tokens are.

    Attributes:
        weights: parameters, and what is computed from them without a contraction: ``w * 0.5``, ``w[:48]``. The
            product of two parameters can be a weight, or the queries of learned tokens.
        all: with those.
        held: what else modules hold, and what is computed from that, or from it and parameters, alone.
        are_known: whether the caller told which inputs are parameters; there may be none.
    """

    weights: set[fx.Node] = field(default_factory=set)
    all: set[fx.Node] = field(default_factory=set)
    held: set[fx.Node] = field(default_factory=set)
    are_known: bool = False


def of_parameters(graph: fx.Graph) -> OfParameters:
    """The nodes of a graph that depend on parameters, or on what else modules hold, and on nothing else."""
    found = OfParameters()
    fixed: set[fx.Node] = set()  # computed from nothing: the triangle of ``tril``, ``eye``
    for node in graph.nodes:
        if is_given(node):
            found.are_known |= _PARAMETER in node.meta
            if is_marked(node):
                found.weights.add(node)
                found.all.add(node)
            elif node.meta.get(_HELD):
                found.held.add(node)
        elif node.op == "call_function":
            inputs = [source for source in node.all_input_nodes if not is_size(source)]
            sources = [source for source in inputs if source not in fixed]
            if not sources:
                if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
                    fixed.add(node)
            elif is_repeated(node):
                continue
            elif all(source in found.all for source in sources):
                found.all.add(node)
                contracting = contracts(node.target, custom=True)
                is_plain = sources == inputs
                if is_plain and not contracting and all(source in found.weights for source in sources):
                    found.weights.add(node)
            elif all(source in found.all or source in found.held for source in sources):
                found.held.add(node)
    return found


def is_repeated(node: fx.Node) -> bool:
    """Whether a node holds another tensor several times."""
    if node.target not in (aten.expand.default, aten.repeat.default):
        return False
    before, after = shape_of(node.args[0]), shape_of(node)  # type: ignore[arg-type]
    added = len(after) - len(before)
    return not all(map(is_same, (1,) * added + before, after))


@lru_cache(maxsize=256)
def contracts(target: Any, custom: bool) -> bool:
    """Whether an operator contracts.

    Args:
        custom: what to say of operators that are not PyTorch's own, which may.
    """
    if not is_operator(target):
        return is_higher_order(target)
    name = target.overloadpacket.__name__
    if target.namespace != "f8fx" and not is_of_torch(target):
        return custom
    return name in _CONTRACTIONS or name.startswith("_scaled_dot_product_")
