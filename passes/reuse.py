"""Pass 4b, *reuse*: weight casts that were made before, read instead of made again.

`quantize` casts every weight in the graph. Where the caller keeps float8 copies of parameters from
call to call (:mod:`f8fx.weights`), the graph has further inputs, behind its own: the scales of those
casts, then their float8 data. Here every ``scale(amax(w))`` and ``quantize(w, ...)`` of the same
format becomes such an input, and the parameter is no longer read.

Which casts a graph wants is known only to the passes. So they run twice: first on a graph without
further inputs, where this pass only notes what it could have replaced (:attr:`Reuse.seen`), then on
the one with them. Where layers were merged, what is cast is parameters side by side, and so are the copies.

Graph inputs are told apart by their position in Dynamo's graph, which AOTAutograd notes: it adds some (effect tokens),
gives several for one (those of a tensor subclass) or one for several (views of one tensor that is written to). A weight that is not an
input as it came is cast in the graph, as always.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import fx

from f8fx import ops
from f8fx.torch_private import input_position

from .backward import is_tangent
from .elements import amax_dim
from .experts import stacked
from .rewrite import erase_unused


@dataclass(frozen=True)
class ScaleFormat:
    """What determines the scales of a parameter.

    Attributes:
        dtype: the float8 type they scale to.
        dim: the dimension of the amax; see :mod:`f8fx.ops`.
        power_of_2: whether they are rounded down to powers of two.
    """

    dtype: torch.dtype
    dim: int | None
    power_of_2: bool


@dataclass(frozen=True)
class CastFormat:
    """What determines a float8 copy of a parameter: the arguments of ``f8fx.quantize``."""

    scale: ScaleFormat
    transpose: bool = False
    align: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class Weight:
    """A parameter among the inputs of a graph, of which copies may be inputs too.

    Attributes:
        position: its index among the graph's inputs.
        shape, dtype: as in the graph, to be sure it is the same input; a matrix, or one for each expert.
    """

    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Place(NamedTuple):
    """What is cast: a parameter, or several side by side.

    Attributes:
        positions: their indices among the graph's inputs.
        dim: the dimension along which they stand side by side; 0 for one. Of one with a matrix for each expert, which
            are cast below each other, the dimension that becomes the columns.
    """

    positions: tuple[int, ...]
    dim: int = 0


@dataclass(frozen=True)
class Copies:
    """The copies of one parameter, or of several side by side, that are inputs of a graph.

    Attributes:
        place: what they are copies of.
        casts: the formats of the float8 copies.
    """

    place: Place
    casts: tuple[CastFormat, ...]

    @property
    def scales(self) -> tuple[ScaleFormat, ...]:
        """The formats of the scales that the copies were made with."""
        return tuple(dict.fromkeys(cast.scale for cast in self.casts))

    @property
    def formats(self) -> tuple[ScaleFormat | CastFormat, ...]:
        """What stands for them among the inputs, in order."""
        return (*self.scales, *self.casts)


@dataclass(frozen=True)
class WeightInputs:
    """The inputs of a graph: its own, then the scales and float8 copies of parameters.

    Attributes:
        own: how many the graph has of its own.
        weights: the parameters that may be cast elsewhere.
        copies: what is.
        last: whether copies last from step to step in training too: their casts cost nothing.
        promised: nothing writes to the parameters without a trace, or is followed by a call that tells: ``weights="constant"``.
    """

    own: int
    weights: tuple[Weight, ...] = ()
    copies: tuple[Copies, ...] = ()
    last: bool = False
    promised: bool = False

    @property
    def total(self) -> int:
        """How many inputs the graph has."""
        return self.own + sum(len(copies.formats) for copies in self.copies)

    def with_casts(self, seen: Mapping[Place, Sequence[CastFormat]]) -> WeightInputs:
        """The inputs of a graph whose casts are those that were seen."""
        copies = (Copies(place, tuple(dict.fromkeys(casts))) for place, casts in seen.items())
        return replace(self, copies=tuple(copies))


@dataclass
class Reuse:
    """Replaces casts of parameters by graph inputs, in place.

    Attributes:
        inputs: what the graph's inputs are.
        seen: the casts that no input was there for.
        taken: positions of the parameters whose casts were.
    """

    inputs: WeightInputs
    seen: dict[Place, list[CastFormat]] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)

    def __call__(self, graph: fx.Graph) -> None:
        inputs = _by_position(graph)
        parameters = self._parameters(inputs)
        given: dict[tuple[Place, ScaleFormat | CastFormat], fx.Node] = {}
        rest = itertools.count(self.inputs.own)
        for copies in self.inputs.copies if parameters else ():
            for wanted in copies.formats:
                given[copies.place, wanted] = inputs[next(rest)]
        for node in list(graph.nodes):
            if node.target is not ops.quantize or "f8fx" not in node.meta:
                continue
            source, scale = node.args
            assert isinstance(source, fx.Node) and isinstance(scale, fx.Node)
            form = _format_of(node)
            place = _place(source, parameters)
            if place is None or form is None:
                continue
            data = given.get((place, form))
            if data is None:
                self.seen.setdefault(place, []).append(form)
                continue
            self.taken.update(place.positions)
            node.replace_all_uses_with(data)
            graph.erase_node(node)
            scale.replace_all_uses_with(given[place, form.scale])
            erase_unused(graph, scale)

    def cached(self, graph: fx.Graph, training: bool) -> set[fx.Node]:
        """The parameters of a graph whose casts cost it nothing."""
        if training and not self.inputs.last:
            return set()
        return set(self._parameters(_by_position(graph)))

    def _parameters(self, inputs: Mapping[int, fx.Node]) -> Mapping[fx.Node, int]:
        if not inputs.keys() >= set(range(self.inputs.own, self.inputs.total)):
            return {}  # the graph of a branch or loop, say
        nodes = {inputs[w.position]: w for w in self.inputs.weights if w.position in inputs}
        for node, weight in nodes.items():
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor) or value.dtype != weight.dtype:
                return {}
            if tuple(map(str, value.shape)) != tuple(map(str, weight.shape)):
                return {}
        return {node: weight.position for node, weight in nodes.items()}


def _place(source: fx.Node, parameters: Mapping[fx.Node, int]) -> Place | None:
    if source in parameters:
        return Place((parameters[source],))
    if (found := stacked(source)) is not None:
        matrices, columns = found
        return Place((parameters[matrices],), columns) if matrices in parameters else None
    if source.target is not ops.concat:
        return None
    parts, dim = source.args
    positions = [parameters.get(part) for part in parts]  # type: ignore[union-attr, arg-type, call-overload]
    if any(position is None for position in positions):
        return None
    return Place(tuple(positions), dim)  # type: ignore[arg-type]


def _by_position(graph: fx.Graph) -> dict[int, fx.Node]:
    """The inputs of the forward that are an input of the Dynamo graph as it came, or the one tensor that it consists of.

    A DTensor consists of a mesh, too.
    """
    found: dict[int | None, list[fx.Node]] = {}
    for node in graph.find_nodes(op="placeholder"):
        position = input_position(node)
        if not is_tangent(node) and (position not in found or isinstance(node.meta.get("val"), torch.Tensor)):
            found.setdefault(position, []).append(node)
    return {
        position: nodes[0] for position, nodes in found.items() if position is not None and len(nodes) == 1
    }


def _format_of(quantize: fx.Node) -> CastFormat | None:
    """The format of a cast, if its scale comes from the very tensor it casts."""
    source, scale = quantize.args
    assert isinstance(scale, fx.Node)
    amax = scale.args[0] if scale.target is ops.scale else None
    if not isinstance(amax, fx.Node) or amax.target is not ops.amax or amax.args[0] is not source:
        return None
    dim = amax_dim(amax)
    kwargs = quantize.kwargs
    if dim != kwargs.get("dim") or scale.kwargs["dtype"] != kwargs["dtype"]:
        return None
    form = ScaleFormat(kwargs["dtype"], dim, bool(scale.kwargs.get("power_of_2", False)))  # type: ignore[arg-type]
    rows, columns = kwargs.get("align", (1, 1))  # type: ignore[misc]
    return CastFormat(form, bool(kwargs.get("transpose", False)), (int(rows), int(columns)))  # type: ignore[arg-type]
