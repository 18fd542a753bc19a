"""Graphs that come to the passes once more: halves of a nested region, which Inductor splits after them, and backwards in compiled autograd's."""

from __future__ import annotations

from torch import fx

from f8fx import ops

from .matmuls import COMPUTE

_MARK = "f8fx_decided"
#: Compiled autograd traces anew what it inlines, and the operators are all that is left of the notes on nodes. Those
#: that mark a tensor as float8 come with FSDP2's weights, too.
_CASTS = ops.CASTING | {ops.quantize_rowwise}


def mark_decided(graph: fx.Graph) -> None:
    """Notes on the matmuls of a graph that the passes have seen it; copies of the nodes keep the note."""
    for node in graph.nodes:
        if node.target in COMPUTE:
            node.meta[_MARK] = True


def is_decided(graph: fx.Graph) -> bool:
    """Whether a graph has nodes that the passes made, or none but matmuls they have left as they were."""
    matmuls = [node for node in graph.nodes if node.target in COMPUTE]
    rewritten = any("f8fx" in node.meta or node.target in _CASTS for node in graph.nodes)
    return rewritten or (bool(matmuls) and all(_MARK in node.meta for node in matmuls))
