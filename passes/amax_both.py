"""Pass 7c, *amax both*: amaxes of rows and of columns of a computed tensor, in one read of what it is computed from.

A gradient that comes out of an activation function is not in memory: each kernel that needs it computes it from the
function's inputs. With a rowwise recipe that is three kernels, the first for the rows' amaxes and the row-major copy,
the second for the columns' amaxes, the third for the transposed copy. :mod:`kernels.computed_amaxes` takes all amaxes in
one, and then one of Inductor's tiled kernels makes both copies: a read less. What the function gave, of which the backward
needs a copy scaled by columns, is computed from the same inputs, and its amaxes are taken along. So are the sums of a
gradient's columns, which are the gradient of a bias: Inductor would read everything once more for them. (Of tall
tensors it can reduce rows and sum columns in one kernel; with amaxes of columns among the sums torch 2.15 does, and reads as
much as ours, 2.11 and 2.13 do not.)

The same goes for a gradient whose parts stand side by side, and are in memory each (of q, k and v, as attention gave them): for
a row of all of them Inductor would read them twice. Parts of several widths (of merged layers) are a kernel for each; what
there is none for, beside a part that is computed, has its amaxes taken by Inductor's.

Where whole rows have to be in a kernel anyway (a norm's gradient: it needs sums over the row) that is no read less: these stay as
they are. What moves elements about on its way (RoPE) the kernel has no words for; :mod:`passes.materialize` has written it.
Other tensors in memory are :mod:`passes.one_read`'s, which runs before.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from f8fx import ops
from f8fx.torch_private import statically_true

from .backward import backward_nodes
from .columns import column_sums, inputs_of, is_over_rows, side_by_side
from .elements import SAME_ORDER, flat_base, readers
from .in_memory import is_in_memory
from .one_read import ends_in
from .rewrite import users_between
from .sizes import is_same_shape, shape_of

aten = torch.ops.aten


class AmaxBoth:
    """Replaces the amaxes of tensors cast by ``quantize_both`` by one ``amax_both`` each, in place.

    Args:
        has_kernel: the devices that the kernel is for.
    """

    def __init__(self, has_kernel: Callable[[torch.device], bool]) -> None:
        self.has_kernel = has_kernel

    def __call__(self, graph: fx.Graph) -> None:
        casts = graph.find_nodes(op="call_function", target=ops.quantize_both)
        found = [match for node in casts if (match := self._match(node)) is not None]
        others = _columns_only(graph, {match.columns for match in found}) if found else {}
        backward = backward_nodes(graph) if found else set()
        for match in found:
            if match.rows in backward:
                match.others = _others(match, others, backward)
            _join(graph, match)

    def _match(self, both: fx.Node) -> _Match | None:
        source, *scales = cast("tuple[fx.Node, ...]", both.args[:3])
        if "recompute" in both.meta or not self.has_kernel(both.meta["val"][0].device):
            return None
        rows, columns = (_amax_of(scale, source, dim) for scale, dim in zip(scales, (1, 0), strict=True))
        if rows is None or columns is None:
            return None
        parts = side_by_side(source)
        if not all(_has_rows_of_known_length(part) for part in parts):
            return None
        inputs = [None if len(parts) == 1 and is_in_memory(part) else inputs_of(part) for part in parts]
        known = [(part, own) for part, own in zip(parts, inputs, strict=True) if own is not None]
        # what the kernel has no words for is read by others, and a part in memory is beside it
        if not known or (len(known) < len(parts) and all(is_in_memory(part) for part, _ in known)):
            return None
        sums = _sums(source, parts, min(rows, columns))
        if sums is None:
            return None
        return _Match(source, known, rows, columns, sums)


@dataclass
class _Match:
    """A computed tensor.

    Attributes:
        parts: those that stand side by side in it and for which there is a kernel, and what each is computed from.
        rows, columns: its amaxes.
        sums: of its parts' columns, each with the part, or with all of them.
        others: amaxes of the columns of other tensors of that shape that are computed from nothing else.
    """

    source: fx.Node
    parts: list[tuple[fx.Node, set[Hashable]]]
    rows: fx.Node
    columns: fx.Node
    sums: dict[fx.Node, list[fx.Node]]
    others: list[fx.Node] = field(default_factory=list)

    def inputs(self, shape: Sequence[int | torch.SymInt] | None = None) -> set[Hashable]:
        """What the parts, or those of one shape, are computed from."""
        return set().union(
            *(own for part, own in self.parts if shape is None or is_same_shape(shape_of(part), shape))
        )


def _has_rows_of_known_length(node: fx.Node) -> bool:
    rows, columns = shape_of(node)
    return statically_true(rows > 0) and type(columns) is int and columns > 0


def _amax_of(scale: fx.Node, source: fx.Node, dim: int) -> fx.Node | None:
    """The amax of the source's rows or columns that a scale comes from."""
    amax = scale.args[0] if scale.target is ops.scale else None
    if isinstance(amax, fx.Node) and amax.target is ops.amax and amax.args == (source, dim):
        return amax
    return None


def _sums(source: fx.Node, parts: list[fx.Node], place: fx.Node) -> dict[fx.Node, list[fx.Node]] | None:
    """The sums of the columns of a tensor's parts, with the parts; ``None`` if one of them needs a read of its own."""
    found = {}
    for tensor in dict.fromkeys([*parts, source]):
        same = readers(flat_base(tensor), SAME_ORDER)
        for user in column_sums(tensor):
            part_by_part = user.target is ops.column_sums
            if tensor not in parts and not part_by_part:
                return None  # of all parts together
            if user not in same or user.meta["val"].dtype != tensor.meta["val"].dtype:
                return None  # of other numbers than are cast
            if not (part_by_part or is_over_rows(user)) or source in users_between({user}, place):
                return None
            found[user] = [tensor] if tensor in parts else parts
    return found


@dataclass(frozen=True)
class _Columns:
    """The amax of the columns of a computed tensor, and what that is computed from."""

    amax: fx.Node
    inputs: set[Hashable]

    @property
    def source(self) -> fx.Node:
        return cast("fx.Node", self.amax.args[0])


def _columns_only(graph: fx.Graph, own: set[fx.Node]) -> dict[Hashable, list[_Columns]]:
    """Amaxes of columns of computed tensors, but for a gradient's own, each under one of its inputs."""
    found: dict[Hashable, list[_Columns]] = defaultdict(list)
    for amax in graph.find_nodes(op="call_function", target=ops.amax):
        source = cast("fx.Node", amax.args[0])
        if amax in own or amax.args[1:] != (0,) or "recompute" in amax.meta or is_in_memory(source):
            continue
        inputs = inputs_of(source)
        if inputs:
            found[min(inputs, key=str)].append(_Columns(amax, inputs))
    return found


def _others(
    match: _Match, candidates: dict[Hashable, list[_Columns]], backward: set[fx.Node]
) -> list[fx.Node]:
    """Amaxes of columns that can be taken along: nothing but the backward reads them."""
    place = min(match.rows, match.columns)
    taken = []
    for candidate in [found for key in match.inputs() for found in candidates.get(key, ())]:
        if not candidate.inputs <= match.inputs(shape_of(candidate.source)):
            continue
        # what stands before the kernel and reads this amax moves behind it
        needed = match.source in users_between({candidate.amax}, place)
        if candidate.source < place and not needed and ends_in(candidate.amax, backward):
            taken.append(candidate)
    for candidate in taken:
        candidates[min(candidate.inputs, key=str)].remove(candidate)
    return sorted(candidate.amax for candidate in taken)


def _join(graph: fx.Graph, match: _Match) -> None:
    """Puts ``amax_both`` in the place of the amaxes and the sums."""
    place = min(match.rows, match.columns)
    amaxes = [match.rows, match.columns, *match.others]
    summed = list(dict.fromkeys(itertools.chain(*match.sums.values())))
    values = [*(amax.meta["val"] for amax in amaxes), *(part.meta["val"][0] for part in summed)]
    provenance = match.rows.meta["f8fx"]

    def add(target: Callable[..., Any], args: tuple[Any, ...], value: Any, like: fx.Node) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta.update({**like.meta, "val": value, "f8fx": provenance})
        return node

    with graph.inserting_before(place):
        others = [other.args[0] for other in match.others]
        both = add(ops.amax_both, (match.source, others, summed), values, match.rows)
        items = [
            add(operator.getitem, (both, index), value, like)
            for index, (value, like) in enumerate(zip(values, [*amaxes, *summed], strict=True))
        ]
        news = dict(zip(amaxes, items, strict=False))
        of_parts = dict(zip(summed, items[len(amaxes) :], strict=True))
        for old, parts in match.sums.items():
            value = old.meta["val"]
            totals = [of_parts[part] for part in parts]
            total = add(aten.cat.default, (totals,), value.flatten(), old) if len(parts) > 1 else totals[0]
            if total.meta["val"].shape != value.shape:
                total = add(aten.view.default, (total, [*value.shape]), value, old)
            news[old] = total
    for node in reversed(users_between({*match.others, *match.sums}, both)):
        max(news.values()).append(node)
    for old, new in news.items():
        old.replace_all_uses_with(new)
        graph.erase_node(old)
