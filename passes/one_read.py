"""Pass 7b, *one read*: rows cast, and amaxes of columns taken, in one read of tensors in memory.

A tensor that one matmul takes scaled by rows and another by columns is read three times: for the amaxes of
its rows and the row-major copy, for those of its columns, and for the transposed copy. Inductor's code cannot join
the first two, since its kernels that reduce in both directions at once know sums only;
:mod:`kernels.row_cast_columns` does, and that is a read less. So each tensor's way is chosen by what reads fewer
bytes: ours wherever both are wanted of a tensor that is in memory anyway and whose rows fit on chip (weights, and what comes out
of a matmul). Where the tensor is computed in the kernels that cast it, writing it out for ours would cost more:
:mod:`passes.amax_both`, or Inductor's kernels.

Weights, and other inputs of the graph, are cast before the first of them is needed, several in a launch, as far as they are
of one width and a launch holds no more than :data:`AHEAD` bytes of memory that early. A row-major copy that only the backward
reads is left to the backward, or it would be saved. The matrices of experts, below each other, are one tensor; the columns of
each have amaxes of their own, those of the rows of their transposes, below each other. A region that checkpointing runs
again is left alone: its casts are made again, its amaxes are not.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from f8fx import ops
from f8fx.hardware import ALIGNMENT
from f8fx.kernels import row_cast_columns
from f8fx.torch_private import statically_true

from .backward import backward_nodes, is_tangent
from .elements import MOVEMENTS, base_of, is_given, readers
from .experts import stacked
from .in_memory import is_in_memory
from .marked import IN_BACKWARD
from .matmuls import FLOAT8_MATMULS
from .rewrite import one_layout

aten = torch.ops.aten

#: Float8 bytes that one launch may write before their turn; as many as Inductor's may (:mod:`f8fx.torch_private.combining`).
AHEAD = 1 << 28

_PLAIN = [1, 1]


@dataclass(frozen=True)
class _Match:
    """One tensor for the kernel.

    Attributes:
        parts: the tensors in memory whose rows, one after the other, are its rows.
        rows, columns: its amaxes.
        scale: of its rows.
        inverses: the reciprocals of that scale, which gemms read.
        cast: the ``quantize`` or ``quantize_both`` that makes the row-major copy.
        matrices: how many matrices it is, whose columns have amaxes of their own.
    """

    parts: tuple[fx.Node, ...]
    rows: fx.Node
    columns: fx.Node
    scale: fx.Node
    inverses: tuple[fx.Node, ...]
    cast: fx.Node
    matrices: int = 1

    @property
    def form(self) -> tuple[object, ...]:
        """Equal for what one launch can take."""
        value = self.parts[0].meta["val"]
        kinds = self.cast.kwargs["dtype"], self.scale.kwargs["power_of_2"]
        return (*kinds, value.device, value.dtype, value.shape[1], value.stride(0))

    @property
    def size(self) -> int:
        """Bytes of the copy."""
        return sum(part.meta["val"].numel() for part in self.parts)


class OneRead:
    """Replaces row casts, their scales and the amaxes of the columns by ``quantize_rowwise``, in place.

    Args:
        has_kernel: the devices that the kernel is for.
    """

    def __init__(self, has_kernel: Callable[[torch.device], bool]) -> None:
        self.has_kernel = has_kernel

    def __call__(self, graph: fx.Graph) -> None:
        amaxes = _row_amaxes(graph)
        if not amaxes:
            return
        backward = backward_nodes(graph)
        found = [match for rows in amaxes if (match := self._match(rows, backward)) is not None]
        for launch in _launches(found):
            kept = [_is_kept(match, backward) for match in launch]
            for columns in itertools.compress(_replace(graph, launch), kept):
                for scale in columns.users:
                    if scale.target is ops.scale and ends_in(scale, backward):
                        # made with others where it is needed, not in a launch of its own in the forward
                        scale.meta["partitioner_tag"] = IN_BACKWARD

    def _match(self, rows: fx.Node, backward: set[fx.Node]) -> _Match | None:
        """The tensor of an amax over rows, if the kernel is for it."""
        source = rows.args[0]
        assert isinstance(source, fx.Node)
        columns, matrices = _column_amax(source)
        if columns is None or len(rows.users) != 1:
            return None
        (scale,) = rows.users
        cast = next((user for user in scale.users if _is_row_cast(user, source, scale)), None)
        if (
            scale.target is not ops.scale
            or cast is None
            or any("recompute" in node.meta for node in (cast, columns))
        ):
            return None
        inverses = tuple(user for user in scale.users if user.target is aten.reciprocal.default)
        if (
            scale.kwargs["dtype"] != cast.kwargs["dtype"]
            or len(inverses) + 1 != len(scale.users)
            or not inverses
        ):
            return None
        if rows not in backward and ends_in(_row_major(cast), backward):
            return None  # made in the forward it would be kept until then
        parts = _parts(source)
        if not all(self.has_kernel(part.meta["val"].device) and is_in_memory(part) for part in parts):
            return None
        if not all(statically_true(part.meta["val"].shape[0] > 0) for part in parts):
            return None
        if row_cast_columns.why_not([part.meta["val"] for part in parts], cast.kwargs["dtype"]):  # type: ignore[arg-type]
            return None
        return _Match(tuple(parts), rows, columns, scale, inverses, cast, matrices)


def _row_amaxes(graph: fx.Graph) -> list[fx.Node]:
    amaxes = graph.find_nodes(op="call_function", target=ops.amax)
    return [node for node in amaxes if isinstance(node.args[0], fx.Node) and _is_amax(node, node.args[0], 1)]


def _column_amax(source: fx.Node) -> tuple[fx.Node | None, int]:
    """The amax of a tensor's columns, and of how many matrices those are."""
    columns = next((user for user in source.users if _is_amax(user, source, 0)), None)
    own = stacked(source)
    if columns is not None or own is None or own[1] != 2:
        return columns, 1
    matrices = own[0]
    turned = (user for user in matrices.users if user.target is aten.permute.default)
    laid_out = (user for node in turned for user in node.users)
    below = (user for node in laid_out for user in node.users if stacked(user) == (matrices, 1))
    amaxes = (user for node in below for user in node.users if _is_amax(user, node, 1))
    return next(amaxes, None), matrices.meta["val"].shape[0]


def _is_amax(node: fx.Node, source: fx.Node, dim: int) -> bool:
    return bool(node.target is ops.amax and node.args == (source, dim))


def _is_row_cast(node: fx.Node, source: fx.Node, scale: fx.Node) -> bool:
    """Whether a node makes the row-major copy of a tensor, unpadded, scaled by its rows."""
    if node.target not in (ops.quantize, ops.quantize_both) or node.args[:2] != (source, scale):
        return False
    kwargs = node.kwargs
    padded = list(kwargs["align"]) != _PLAIN  # type: ignore[arg-type]
    return bool(kwargs["dim"] == 1 and not kwargs.get("transpose") and not padded)


def _row_major(cast: fx.Node) -> fx.Node:
    """The row-major copy of a cast."""
    if cast.target is ops.quantize:
        return cast
    return next(getter for getter in cast.users if getter.args[1] == 0)


def _parts(source: fx.Node) -> list[fx.Node]:
    """The tensors whose rows, one after the other, are those of ``source``."""
    return list(source.args[0]) if source.target is ops.concat and source.args[1] == 0 else [source]  # type: ignore[arg-type]


def _launches(found: Sequence[_Match]) -> list[list[_Match]]:
    """What is cast together: tensors of one form that are there from the start, in the order in which they are needed."""
    launches: list[list[_Match]] = []
    latest: dict[tuple[object, ...], list[_Match]] = {}
    for match in sorted(found, key=lambda match: match.rows):
        if all(map(_is_early, match.parts)):
            group = latest.get(match.form, [])
            tensors = sum(len(other.parts) for other in group) + len(match.parts)
            size = sum(other.size for other in group) + match.size
            if group and tensors <= row_cast_columns.MOST and size <= AHEAD:
                group.append(match)
                continue
            latest[match.form] = group = [match]
            launches.append(group)
        else:
            launches.append([match])
    return launches


def _is_early(node: fx.Node) -> bool:
    """Whether a tensor is there from the start, and its rows are known to end where scales of others may begin."""
    rows = node.meta["val"].shape[0]
    aligned = isinstance(rows, int) and rows % ALIGNMENT == 0
    return is_given(node) and not is_tangent(node) and aligned


def ends_in(node: fx.Node, backward: set[fx.Node]) -> bool:
    """Whether everything inserted that depends on a node ends in the backward."""
    todo, seen = [node], {node}
    while todo:
        for user in todo.pop().users:
            if user in backward or user in seen:
                continue
            if user.op == "output" or user.target in FLOAT8_MATMULS or "f8fx" not in user.meta:
                return False
            seen.add(user)
            todo.append(user)
    return True


def _is_kept(match: _Match, backward: set[fx.Node]) -> bool:
    """Whether a tensor is there in the backward for other reasons: a weight, or what other operators read.

    Of any other the transposed copy is to be saved in its place, at half the bytes.
    """
    if match.columns.meta["f8fx"].role == "grad_input":
        return True
    return all(
        any(user in backward and "f8fx" not in user.meta for user in readers(base_of(part), MOVEMENTS))
        for part in match.parts
    )


def _replace(graph: fx.Graph, launch: Sequence[_Match]) -> list[fx.Node]:
    """Returns the amaxes of columns."""
    first = min(node for match in launch for node in (match.rows, match.columns))
    leader = launch[0]
    several = {"matrices": leader.matrices} if leader.matrices > 1 else {}
    if leader.parts[0] > first:  # matrices below each other; there, their transposes are
        first.prepend(leader.parts[0])
    with graph.inserting_before(first):
        kernel = graph.call_function(
            ops.quantize_rowwise,
            ([part for match in launch for part in match.parts], [len(match.parts) for match in launch]),
            {
                "dtype": leader.cast.kwargs["dtype"],
                "power_of_2": leader.scale.kwargs["power_of_2"],
                **several,
            },
        )
        kernel.meta.update(leader.cast.meta)
        results: list[fx.Node] = []
        for match in launch:
            for like in (match.cast, match.inverses[0], match.columns):
                value = like.meta["val"]
                getter = graph.call_function(operator.getitem, (kernel, len(results)))
                getter.meta.update(
                    {**like.meta, "val": value[0] if like.target is ops.quantize_both else value}
                )
                results.append(getter)
        kernel.meta["val"] = [result.meta["val"] for result in results]
    for match, (copy, inverse, columns) in zip(
        launch, zip(results[::3], results[1::3], results[2::3], strict=True), strict=True
    ):
        source = match.cast.args[0]
        assert isinstance(source, fx.Node)
        _replace_cast(graph, match.cast, copy)
        for old, new in (*((own, inverse) for own in match.inverses), (match.columns, columns)):
            old.replace_all_uses_with(new)
            graph.erase_node(old)
        for node in (match.scale, match.rows):
            graph.erase_node(node)
        if not source.users and "f8fx" in source.meta:
            graph.erase_node(source)  # the tensors side by side
    return results[2::3]


def _replace_cast(graph: fx.Graph, cast: fx.Node, copy: fx.Node) -> None:
    """The row-major copy is the kernel's; the transposed one, if it was made with it, is made by itself."""
    if cast.target is ops.quantize:
        cast.replace_all_uses_with(copy)
        graph.erase_node(cast)
        return
    transposed = one_layout(cast, 1)
    transposed.meta.update({**cast.meta, "val": cast.meta["val"][1]})
    for getter in list(cast.users):
        getter.replace_all_uses_with(transposed if getter.args[1] else copy)
        graph.erase_node(getter)
    graph.erase_node(cast)
