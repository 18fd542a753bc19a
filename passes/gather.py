"""All-gathers and who reads them: what :mod:`passes.collectives` acts on. Only looks.

A tensor that is sharded along dimension ``d`` and gathered inside the graph arrives as ::

    gathered = wait_tensor(all_gather_into_tensor(shard, n, group))    # shards stacked along dimension 0
    whole    = cat(split(gathered, rows_of_shard), d)                  # "reassemble", only where d != 0
    tensor   = slice(whole, d, 0, size)                                # "unpad", only where n does not divide size
    operand  = view / permute / pad / cast ... (tensor)

and is read by ``f8fx.amax`` and ``f8fx.quantize``. (``dist.all_gather_into_tensor(out, shard)`` is traced as a copy of
``gathered`` to a tensor like it, which is the same.) :func:`find_readers` walks from each gather through
exactly these operators; whatever else it meets is a reader in high precision. Gathers of one value over
one group count as one, since Inductor makes them one.

A per-row or per-column scale belongs to some dimensions of the operand. :func:`shard_axes` follows them
back to the shard: are they whole dimensions there, and does the gathered dimension belong to them?
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import fx

from f8fx import ops
from f8fx.recipe import HIGH_DTYPES
from f8fx.torch_private import c10d

from .elements import CASTS, COPIES, PERMUTES, SAME_ORDER, VIEWS, argument, stays_on_device
from .operand import permutation
from .sizes import is_same, is_same_shape, shape_of

aten = torch.ops.aten

all_gather = c10d.all_gather_into_tensor.default
#: Of several tensors in one call; not looked into.
all_gather_together = c10d.all_gather_into_tensor_coalesced.default
wait_tensor = c10d.wait_tensor.default
copy = aten.copy.default

#: Not all movements: those that :func:`_step` and :func:`_reassembled` know.
_MOVEMENTS = VIEWS | COPIES | {aten.slice.Tensor, aten.split.Tensor, operator.getitem, aten.cat.default}
#: Reads no element.
SIZE = aten.sym_size.int

Kind = Literal["cast", "copy", "view", "permute", "pad", "reassemble", "unpad"]


@dataclass(frozen=True)
class Step:
    """One movement of a gathered tensor.

    Attributes:
        kind: what it does.
        nodes: in graph order; the last one is the result.
        dim: the gathered dimension, for ``reassemble`` and ``unpad``.
    """

    kind: Kind
    nodes: tuple[fx.Node, ...]
    dim: int = 0

    @property
    def result(self) -> fx.Node:
        return self.nodes[-1]


@dataclass(frozen=True)
class Reader:
    """A node of the IR that reads a gathered tensor, and what stands between."""

    node: fx.Node
    source: fx.Node
    wait: fx.Node
    steps: tuple[Step, ...]

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """What stands between, in graph order."""
        return tuple(node for step in self.steps for node in step.nodes)

    @property
    def casts(self) -> tuple[torch.dtype, ...]:
        """The roundings on the way."""
        return tuple(step.result.meta["val"].dtype for step in self.steps if step.kind == "cast")

    @property
    def gathered_dim(self) -> int:
        """The dimension of the shard that the gather makes longer."""
        return next((step.dim for step in self.steps if step.kind == "reassemble"), 0)


@dataclass
class Gathered:
    """Gathers of one value over one group.

    Attributes:
        nodes: the ``all_gather_into_tensor`` nodes, in graph order.
        shard: what the first of them sends.
        group: its last argument: a name, or a node that gives a process group.
        group_size: number of ranks.
        readers: amax and quantize nodes that read it.
        others: every other node that does.
    """

    nodes: list[fx.Node]
    shard: fx.Node
    group: Any
    group_size: int
    readers: list[Reader] = field(default_factory=list)
    others: list[fx.Node] = field(default_factory=list)


def find_gathered(graph: fx.Graph) -> list[Gathered]:
    """Every gathered tensor of the graph, in graph order, still without readers."""
    found: dict[Hashable, Gathered] = {}
    for node in graph.nodes:
        if node.target is all_gather:
            shard, size, group = node.args
            gathered = found.setdefault((_value_key(shard), size, group), Gathered([], shard, group, size))
            gathered.nodes.append(node)
    return list(found.values())


def find_readers(gathered: Gathered) -> None:
    """Fills in who reads a gathered tensor as the graph is now."""
    gathered.shard = gathered.nodes[0].args[0]  # type: ignore[assignment]
    gathered.readers, gathered.others = [], []
    for node in gathered.nodes:
        for user in node.users:
            if user.target is SIZE:
                continue  # what is gathered in float8 has it, too
            if user.target is not wait_tensor:
                gathered.others.append(user)
                continue
            known = len(gathered.readers)
            _walk(gathered, user, user, (), shape_of(gathered.shard))
            if len(gathered.readers) == known:
                gathered.others += [reader for reader in user.users if reader.target is SIZE]


def _value_key(node: Any) -> Hashable:
    """Equal for nodes that are the same views and casts of the same node."""
    if isinstance(node, (list, tuple)):
        return tuple(map(_value_key, node))
    if not isinstance(node, fx.Node):
        return type(node).__name__, node
    if is_movement(node) or node.target in (all_gather, wait_tensor):
        kwargs = tuple((name, _value_key(value)) for name, value in sorted(node.kwargs.items()))
        return node.target, _value_key(node.args), kwargs
    return node


def is_movement(node: fx.Node) -> bool:
    """Whether a node's result is elements of its input, moved or cast."""
    return node.target in _MOVEMENTS or is_padding(node)


def is_padding(node: fx.Node) -> bool:
    """Whether a node adds zeros around a tensor."""
    if node.target is not aten.constant_pad_nd.default:
        return False
    pads: Any = node.args[1]
    value: Any = node.args[2] if len(node.args) > 2 else 0
    return value == 0 and all(isinstance(pad, int) and pad >= 0 for pad in pads)


def _walk(gathered: Gathered, wait: fx.Node, node: fx.Node, steps: tuple[Step, ...], shard: tuple) -> None:
    """Collects what reads `node`, which is the gathered tensor after `steps`."""
    moved = [step.kind for step in steps if not _is_idle(step)]
    is_gathered = all(step.kind == "copy" for step in steps)
    pieces: Step | None = None
    for user in node.users:
        if user.target in ops.CASTING and user.args[0] is node and "f8fx" in user.meta:
            gathered.readers.append(Reader(user, node, wait, steps))
            continue
        if user.target is SIZE:
            continue
        step = _step(node, user)
        if step is None and is_gathered:
            step = _reassembled(node, user, gathered.group_size, shard)
            if step is not None and step.nodes[0].target is aten.slice.Tensor:
                if pieces is not None:
                    continue  # all slices of one reassembly are one step
                pieces = step
        if step is None and moved in ([], ["reassemble"]):
            step = _unpadded(user, steps)
        if step is None:
            gathered.others.append(user)
        else:
            _walk(gathered, wait, step.result, (*steps, step), shard)


def _is_idle(step: Step) -> bool:
    """Whether every element stays where it is, in a tensor of the same shape."""
    if step.kind != "view":
        return step.kind in ("cast", "copy")
    return is_same_shape(shape_of(step.result), shape_of(step.result.all_input_nodes[0]))


def _step(node: fx.Node, user: fx.Node) -> Step | None:
    if user.target in SAME_ORDER or user.target is aten.clone.default or _is_whole(node, user):
        return Step("view", (user,))
    if _is_copied(node, user):
        return Step("copy", (user,))
    if user.target in PERMUTES:
        return Step("permute", (user,))
    if is_padding(user):
        return Step("pad", (user,))
    if user.target in CASTS and stays_on_device(user):
        dtypes = {node.meta["val"].dtype, user.meta["val"].dtype}
        return Step("cast", (user,)) if dtypes.issubset(HIGH_DTYPES) else None
    return None


def _is_copied(node: fx.Node, user: fx.Node) -> bool:
    """Whether all of a tensor is written over another one like it."""
    if user.target is not copy or user.args[1] is not node or user.args[0] is node:
        return False
    before, after = node.meta["val"], user.meta["val"]
    alike = before.dtype == after.dtype and before.device == after.device
    return alike and after.is_contiguous() and is_same_shape(after.shape, before.shape)


def _is_whole(node: fx.Node, user: fx.Node) -> bool:
    """Whether a slice is all of its input, as DTensor makes them of sizes over 256: it compares sizes by ``is``."""
    return (
        user.target is aten.slice.Tensor
        and user.args[0] is node
        and is_same_shape(shape_of(user), shape_of(node))
    )


def _reassembled(gathered: fx.Node, user: fx.Node, size: int, shard: tuple) -> Step | None:
    """The step from shards stacked along dimension 0 to shards side by side along another one."""
    if user.target is aten.split.Tensor:
        chunk: Any = user.args[1]
        chunk = chunk.meta["val"] if isinstance(chunk, fx.Node) else chunk
        dim = argument(user, 2, "dim", 0)
        if dim != 0 or not is_same(chunk, shard[0]):
            return None
        pieces = sorted(user.users, key=lambda n: cast("int", n.args[1]))  # all are `getitem`
        if [n.args[1] for n in pieces] != list(range(size)):
            return None
        head: tuple[fx.Node, ...] = (user,)
    elif user.target is aten.slice.Tensor:
        slices = [n for n in gathered.users if n.target is aten.slice.Tensor]
        if not all(
            isinstance(start, int) for start in (shard[0], *(n.args[2] for n in slices if len(n.args) > 2))
        ):
            return None
        pieces = sorted(slices, key=lambda n: n.args[2:3])
        starts = [shard[0] * i for i in range(size)]
        expected = [(0, start, start + shard[0]) for start in starts]
        if [tuple(n.args[1:4]) for n in pieces] != expected or any(len(n.args) > 4 for n in pieces):
            return None
        head = ()
    else:
        return None
    return _joined(head, pieces)


def _joined(head: tuple[fx.Node, ...], pieces: Sequence[fx.Node]) -> Step | None:
    """The step that ends in the one ``cat`` of all pieces in order."""
    users = {user for piece in pieces for user in piece.users}
    if len(users) != 1:
        return None
    cat = users.pop()
    if cat.target is not aten.cat.default or list(cat.args[0]) != list(pieces):  # type: ignore[arg-type]
        return None
    dim = argument(cat, 1, "dim", 0)
    assert isinstance(dim, int)
    rank = len(shape_of(cat))
    return Step("reassemble", (*head, *pieces, cat), dim % rank)


def _unpadded(user: fx.Node, steps: tuple[Step, ...]) -> Step | None:
    """The step that drops the end of the gathered dimension."""
    dim = next((step.dim for step in steps if step.kind == "reassemble"), 0)
    if user.target is not aten.slice.Tensor or len(user.args) > 4 or user.kwargs:
        return None
    given: tuple[Any, ...] = user.args[1:]
    defaults: tuple[Any, ...] = (0, 0, None)
    slice_dim, start, end = given + defaults[len(given) :]
    if slice_dim != dim or start != 0 or not isinstance(end, int):
        return None
    return Step("unpad", (user,), dim)


# -- dimensions


def shard_axes(reader: Reader, dim: int) -> list[frozenset[int]] | None:
    """The dimensions that ``dim`` of the operand comes from, after each step and, first, in the shard.

    ``None`` where a view cuts across them.
    """
    axes: frozenset[int] = frozenset((dim,))
    found = [axes]
    for step in reversed(reader.steps):
        node = step.result
        before = shape_of(node.all_input_nodes[0]) if step.kind in ("view", "permute") else ()
        if step.kind == "permute":
            order = permutation(node)
            axes = frozenset(order[axis] for axis in axes)
        elif step.kind == "view":
            mapped = _through_view(axes, before, shape_of(node))
            if mapped is None:
                return None
            axes = mapped
        found.append(axes)
    return found[::-1]


def _through_view(axes: frozenset[int], before: tuple, after: tuple) -> frozenset[int] | None:
    """The dimensions of the input that are those of the output, or None if they are not whole ones."""
    if is_same_shape(before, after):
        return axes
    covered: set[int] = set()
    sources: set[int] = set()
    for left, right in _segments(before, after):
        if left is None:
            return None
        inside = axes.intersection(right)
        if inside:
            if inside != right:
                return None
            sources |= left
            covered |= inside
    return frozenset(sources) if covered == axes else None


def _segments(before: tuple, after: tuple) -> Iterator[tuple[frozenset[int] | None, frozenset[int]]]:
    """Smallest groups of dimensions with equal numbers of elements; (None, ...) where sizes are unknown."""
    ins = [i for i, size in enumerate(before) if not is_same(size, 1)]
    outs = [i for i, size in enumerate(after) if not is_same(size, 1)]
    i = j = 0
    while i < len(ins) and j < len(outs):
        left, right = [ins[i]], [outs[j]]
        a, b = before[ins[i]], after[outs[j]]
        i, j = i + 1, j + 1
        while not is_same(a, b):
            if not (isinstance(a, int) and isinstance(b, int)):
                yield None, frozenset(right)
                return
            if a < b and i < len(ins):
                a *= before[ins[i]]
                left.append(ins[i])
                i += 1
            elif b < a and j < len(outs):
                b *= after[outs[j]]
                right.append(outs[j])
                j += 1
            else:
                yield None, frozenset(right)
                return
        yield frozenset(left), frozenset(right)
