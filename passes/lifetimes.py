"""Which results of layers that become one outlive the forward, and which layers become one with which for it.

A slice of a merged product keeps all of the product alive. Where only some of the slices are saved for the backward
(v of q, k and v: of the others RoPE's results are), those are copied out, so that no byte more is saved. A copy costs a
read and a write. Where that is more than two gemms instead of one cost, as for blocks whose attention and feed-forward
read one norm (GPT-J, Falcon, Cohere), the layers are parted by the lifetimes of their results.

And one gemm computes all its results before the first is read. Of q, k and v, read together, that is no matter; where every block of
a decoder projects one encoder's output to keys and values (Whisper, T5), or one embedding of the time step (DiT), all blocks' would be
in memory at once, and in the backward all their gradients, where there was one's at a time. Such layers are parted into runs of
:data:`AT_ONCE` bytes (:func:`parted`).
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import fx

from f8fx.cost import CostModel
from f8fx.torch_private import size_hint

from .choice import Convert
from .elements import CASTS, MOVEMENTS, is_pointwise, readers_of_memory
from .residual import is_sum_of_results
from .strides import takes_any_strides

aten = torch.ops.aten

#: Operators whose result is laid out in memory as their first argument is, gaps and all.
_LAID_OUT_ALIKE = frozenset(
    (
        aten.slice_scatter.default,
        aten.select_scatter.default,
        aten.diagonal_scatter.default,
        aten.copy.default,
        aten.unfold.default,
    )
)
_KEPT_WHOLE = MOVEMENTS | _LAID_OUT_ALIKE
_BY_STRIDES = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)

Members = Sequence[Convert]

#: Bytes of results and float8 weights that layers become one for, though what reads the first ones' does not wait for the last ones'.
AT_ONCE = 1 << 28


def copied_out(members: Members, backward: Set[fx.Node]) -> frozenset[fx.Node]:
    """The matmuls whose slice must not be a view of the merged product.

    Args:
        members: forward matmuls that become one.
        backward: the nodes of the backward.
    """
    return _copied(members, _saved(members, backward), _returned(members))


def _saved(members: Members, backward: Set[fx.Node]) -> set[fx.Node]:
    """The matmuls whose results are kept for the backward."""
    return {conversion.gemm.node for conversion in members if _outlives(conversion, backward)}


def _returned(members: Members) -> set[fx.Node]:
    """The matmuls whose results leave the graph."""
    return {conversion.gemm.node for conversion in members if _is_returned(conversion.gemm.node)}


def _copied(members: Members, saved: Set[fx.Node], returned: Set[fx.Node]) -> frozenset[fx.Node]:
    """Those of the matmuls that are copied out of one product; none for being saved, if all of it is."""
    nodes = {conversion.gemm.node for conversion in members}
    return frozenset(nodes & returned if nodes <= saved else nodes & (returned | saved))


def copied_bytes(members: Members, copied: frozenset[fx.Node]) -> int:
    """The size of those slices."""
    gemms = [conversion.gemm for conversion in members if conversion.gemm.node in copied]
    return sum(int(size_hint(gemm.m) or 0) * int(gemm.n) * gemm.dtype.itemsize for gemm in gemms)


def parted(members: Members) -> list[Members]:
    """Layers that could be one, in runs of no more than :data:`AT_ONCE` bytes, or of twice what is needed at a time anyway."""
    if sum(map(_bytes, members)) <= AT_ONCE:
        return [members]
    together = _read_together(members)
    sizes = [sum(map(_bytes, each)) for each in together]
    most = max(AT_ONCE, 2 * max(sizes))
    runs: list[list[Convert]] = []
    room = 0
    for each, size in zip(together, sizes, strict=True):
        if not runs or size > room:
            runs.append([])
            room = most
        runs[-1] += each
        room -= size
    return list(runs)


def _bytes(conversion: Convert) -> int:
    """Of a result and a float8 weight."""
    gemm = conversion.gemm
    m, k, n = (int(size_hint(size) or 0) for size in (gemm.m, gemm.k, gemm.n))
    return m * n * gemm.dtype.itemsize + k * n


def _read_together(members: Members) -> list[list[Convert]]:
    """Parts the layers where an operator that no kernel of Inductor computes has read what comes before, but not what comes after."""
    together: list[list[Convert]] = []
    seen: set[fx.Node] = set()
    waiting: set[fx.Node] = set()
    for conversion in members:
        node = conversion.gemm.node
        todo, waiting, is_read = list(waiting), set(), not together
        while todo:
            source = todo.pop()
            for reader in readers_of_memory(source, _KEPT_WHOLE):
                if reader in seen:
                    continue
                if not reader < node:
                    waiting.add(source)
                    continue
                seen.add(reader)
                if _is_fusible(reader):
                    todo.append(reader)
                else:
                    is_read = True
        if is_read:
            together.append([])
            waiting.clear()
        together[-1].append(conversion)
        waiting.add(node)
    return together


def partitions(
    members: Members, backward: Set[fx.Node], trains: bool, model: CostModel
) -> list[list[Members]]:
    """Ways to make gemms of layers that could be one, the fastest first.

    Args:
        backward: the nodes of the backward.
        trains: whether the gradients of the layers are merged too.
        model: the cost model of what they are decided for.
    """
    outliving = _saved(members, backward)
    saved = [conversion for conversion in members if conversion.gemm.node in outliving]
    if not saved or len(saved) == len(members) or size_hint(members[0].gemm.m) is None:
        return [[members]]
    returned = _returned(members)
    saved.sort(key=lambda conversion: int(conversion.gemm.n))
    found: list[list[Members]] = [[members]]
    for number in range(1, len(saved) + 1):
        together = {conversion.gemm.node for conversion in saved[-number:]}
        rest = [conversion for conversion in members if conversion.gemm.node not in together]
        apart = [conversion for conversion in members if conversion.gemm.node in together]
        if len(rest) > 1 or len(apart) > 1:
            found.append([rest, apart])

    def seconds(groups: Sequence[Members]) -> float:
        return sum(_seconds(group, _copied(group, outliving, returned), trains, model) for group in groups)

    return sorted(found, key=seconds)


def _seconds(members: Members, copied: frozenset[fx.Node], trains: bool, model: CostModel) -> float:
    """Predicted time of the gemms of layers that become one, of what is copied out of them, and of adding up the input gradient."""
    first = members[0].gemm
    m, k, n = (
        int(size_hint(first.m) or 0),
        int(size_hint(first.k) or 0),
        sum(int(c.gemm.n) for c in members),
    )
    rowwise, exact = members[0].spec.is_rowwise, members[0].spec.scales_after_gemm
    total = model.copy_seconds(copied_bytes(members, copied))
    for sizes in ((m, k, n), (m, n, k), (n, m, k)) if trains else ((m, k, n),):
        total += model.gemm_seconds(*sizes, True, rowwise, exact)
    if trains:
        total += model.copy_seconds(m * k * first.dtype.itemsize) / 2  # read for the sum
    return total


def reads_by_strides(node: fx.Node) -> bool:
    """Whether something finds, or may find, a value's elements by where they lie in memory, not by their indices."""
    return any(
        reader.target in _BY_STRIDES
        or (reader.op == "call_function" and not takes_any_strides(reader.target))
        for reader in readers_of_memory(node, until=_BY_STRIDES)
    )


def _is_returned(node: fx.Node) -> bool:
    read_by = readers_of_memory(node, _KEPT_WHOLE)
    return any(reader.op == "output" for reader in read_by) or reads_by_strides(node)


def _outlives(conversion: Convert, backward: Set[fx.Node]) -> bool:
    """Whether a result of the forward is kept for the backward, which reads it, or computes anew what it reads.

    What is computed of a result one element at a time is computed anew (``silu(gate)``), unless something reads it
    that no kernel of Inductor computes: that has it in memory already, as attention has RoPE's results. For the same
    reason a result that attention reads after a bias was added to it is a tensor of its own. The sum of two results is kept instead
    of both, and what is smaller than what it is computed from (the mask of a ``where``) instead of that. Of a checkpointed region the
    policy says what is kept, and that is whole results of matmuls or none.
    """
    node = conversion.gemm.node
    if not backward or "recompute" in node.meta:
        return False
    has_bias = node.target is aten.addmm.default and not conversion.adds_bias
    if has_bias and not _is_computed_anew(node, backward):
        return False
    seen, todo = {node}, [node]
    while todo:
        for reader in readers_of_memory(todo.pop(), _KEPT_WHOLE):
            if reader in backward:
                return True
            if reader in seen or is_sum_of_results(reader) or _is_smaller(reader, node):
                continue
            if _is_fusible(reader) and _is_computed_anew(reader, backward):
                seen.add(reader)
                todo.append(reader)
    return False


def _is_smaller(node: fx.Node, result: fx.Node) -> bool:
    """Whether a tensor has fewer elements than one that it is computed from, or smaller ones than the result."""
    own, read = _elements(node), [size for source in node.all_input_nodes if (size := _elements(source))]
    if not own or not read:
        return False
    return own < max(read) or node.meta["val"].dtype.itemsize < result.meta["val"].dtype.itemsize


def _elements(node: fx.Node) -> int:
    """How many elements a tensor has, by the hints of sizes that are not known; 0 without one, and for anything else."""
    value = node.meta.get("val")
    return int(size_hint(value.numel()) or 0) if isinstance(value, torch.Tensor) else 0


def _is_computed_anew(node: fx.Node, backward: Set[fx.Node]) -> bool:
    return all(_is_fusible(reader) for reader in readers_of_memory(node, MOVEMENTS) if reader not in backward)


def _is_fusible(node: fx.Node) -> bool:
    is_reduction = torch.Tag.reduction in getattr(node.target, "tags", ())
    return is_pointwise(node) or is_reduction or node.target in CASTS
