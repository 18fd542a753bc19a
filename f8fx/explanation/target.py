"""A graph as Dynamo would have captured it on a GPU, for :mod:`f8fx.explanation.trace`.

Most laptops have no device to trace for, so tracing happens on the CPU unless the model lies elsewhere. Two things in
a graph depend on the device and are put right: which kernel attention becomes, and which device an autocast region
speaks of.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from f8fx.torch_private import opens_autocast

aten = torch.ops.aten


def as_on_target(gm: fx.GraphModule) -> None:
    """Replaces in Dynamo's graph, and in its bodies, what would be traced otherwise on a CPU than on a GPU."""
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if node.target is F.scaled_dot_product_attention:
                node.target = _attention
            elif opens_autocast(node) and node.args[0] == "cuda":
                dtype = node.args[1] if len(node.args) > 1 else None
                node.args = ("cpu", dtype or torch.get_autocast_dtype("cuda"), *node.args[2:])
        module.recompile()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` as one fused CUDA kernel, called on fake CPU tensors.

    What it keeps for the backward is then what the target would keep: not the [S, S] scores. Flash attention takes
    values as wide as queries only, and neither kernel broadcasts.
    """

    def broadcasts() -> bool:
        batch, heads = query.shape[:2]
        other_batch = key.shape[0] != batch or value.shape[0] != batch
        return other_batch or (not enable_gqa and key.shape[1] != heads)

    if not query.dim() == key.dim() == value.dim() == 4 or broadcasts() or query.device.type != "cpu":
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    half = query.dtype in (torch.bfloat16, torch.float16)
    if attn_mask is None and half and query.shape[-1] == value.shape[-1]:
        return aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if enable_gqa:
        sharers = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(sharers, 1), value.repeat_interleave(sharers, 1)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -math.inf)
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]
