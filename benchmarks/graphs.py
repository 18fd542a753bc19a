"""Joint graphs of any depth in a moment: one block traced by AOTAutograd, then copied.

Tracing 50,000 nodes through Dynamo and AOTAutograd takes minutes, and the passes are what is to be
measured. So one :class:`~f8fx.demo.model.DecoderBlock` is traced on fake tensors (any size, no
memory), and :func:`stack` chains copies of its forward and, in reverse, of its backward. Module
names and sequence numbers are made distinct, as a traced stack has them; ``tests/test_benchmarks.py``
compares two copies with two traced blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from f8fx import executor
from f8fx.demo.model import DecoderBlock, DecoderConfig
from f8fx.passes.backward import backward_nodes
from f8fx.torch_private import fake_tensor_mode

_STREAM_RANK = 3  # the residual stream is the only 3-D input of a block


class Blocks(nn.Module):
    """A stack of decoder blocks without embedding and output."""

    def __init__(self, config: DecoderConfig, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderBlock(config) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]"""
        for layer in self.layers:
            x = layer(x)
        return x


def traced(config: DecoderConfig, seq: int, layers: int = 1) -> fx.Graph:
    """The joint graph of a bfloat16 stack of blocks for input [1, seq, dim], traced on fake tensors."""
    graphs: list[fx.Graph] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        executor.compile_eager(gm, inputs, graphs.append)
        return gm.forward

    default = torch.get_default_dtype()
    torch.compiler.reset()
    torch.set_default_dtype(torch.bfloat16)  # fake parameters cannot be cast in place
    try:
        with fake_tensor_mode():
            model = Blocks(config, layers)
            x = torch.randn(1, seq, config.dim, requires_grad=True)
            torch.compile(model, backend=backend, fullgraph=True)(x)
    finally:
        torch.set_default_dtype(default)
        torch.compiler.reset()
    return graphs[0]


def stack(block: fx.Graph, layers: int) -> fx.Graph:
    """The joint graph of ``layers`` copies of a block's joint graph, one reading the other's output."""
    graph = fx.Graph()
    backward = backward_nodes(block)
    nodes = list(block.nodes)
    primals = [n for n in nodes if n.op == "placeholder" and n not in backward]
    (stream,) = (n for n in primals if n.meta["val"].dim() == _STREAM_RANK)
    (tangent,) = (n for n in nodes if n.op == "placeholder" and n in backward)
    (results,) = nodes[-1].args  # the block's output, then one gradient for each primal
    output, *gradients = results  # type: ignore[misc]
    body = [n for n in nodes if n.op == "call_function"]
    steps = 1 + max(n.meta.get("seq_nr", 0) for n in body)

    def placeholder(source: fx.Node, name: str) -> fx.Node:
        node = graph.placeholder(name)
        node.meta = dict(source.meta)
        return node

    first = placeholder(stream, "primals_1")
    copies: list[dict[fx.Node, fx.Node]] = []
    count = 1
    for _ in range(layers):
        copy: dict[fx.Node, fx.Node] = {}
        for primal in primals:
            if primal is not stream:
                count += 1
                copy[primal] = placeholder(primal, f"primals_{count}")
        copies.append(copy)
    incoming = placeholder(tangent, "tangents_1")

    def copy_body(layer: int, is_backward: bool) -> None:
        copy = copies[layer]
        for node in body:
            if (node in backward) is is_backward:
                new = copy[node] = graph.node_copy(node, copy.__getitem__)
                new.meta = _of_layer(node.meta, layer, steps)

    x = first
    for layer, copy in enumerate(copies):
        copy[stream] = x
        copy_body(layer, is_backward=False)
        x = copy[output]
    last, grad = x, incoming
    for layer in reversed(range(layers)):
        copies[layer][tangent] = grad
        copy_body(layer, is_backward=True)
        grad = copies[layer][gradients[primals.index(stream)]]
    grads = [copy[g] for copy in copies for p, g in zip(primals, gradients, strict=True) if p is not stream]
    graph.output((last, grad, *grads))
    return graph


def _of_layer(meta: dict[str, Any], layer: int, steps: int) -> dict[str, Any]:
    """A node's metadata as if it had been traced in another layer."""
    meta = dict(meta)
    if "seq_nr" in meta:
        meta["seq_nr"] += layer * steps
    for key in ("nn_module_stack", "fwd_nn_module_stack"):
        if key in meta:
            meta[key] = {
                name.replace("layers_0", f"layers_{layer}"): (
                    path.replace("layers.0", f"layers.{layer}"),
                    kind,
                )
                for name, (path, kind) in meta[key].items()
            }
    return meta
