"""Weights that FSDP2 gathers in float8: half the bytes, the same bits.

    from f8fx.fsdp import enable_float8_all_gather

    enable_float8_all_gather(model, recipe="tensorwise")     # before fully_shard
    for block in model.layers:
        block.compile(backend="f8fx", options={"recipe": "tensorwise"})
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

FSDP2's all-gather runs in hooks that no graph sees, so no pass can move a cast across it. What FSDP2
offers is an extension of the *parameter*: a tensor subclass on the local shard that says what is sent
and what is made of what arrives. Here

* :class:`~f8fx.fsdp.shard.Float8Shard` is the local shard. It casts itself, with a scale from the amax of
  the *whole* weight, and sends one byte an element;
* :class:`~f8fx.fsdp.scales.Scales` finds those amaxes for all weights with one all-reduce when the first
  forward after a change of the weights begins;
* :class:`~f8fx.fsdp.copies.Copies` says which of a weight's copies a gather carries, where forward and backward read
  different ones;
* :class:`~f8fx.fsdp.weight.Float8Weight` is what the layers see: float8 data and scales. A compiled graph
  gets them as inputs, marked by ``f8fx::dequantize``, and the pass *share* folds the marks, in forward
  and backward, so that no weight is cast again.

No module is swapped, and ``state_dict`` holds plain tensors.
"""

from .enable import enable_float8_all_gather, precompute_scales
from .judge import GatherDecision

__all__ = ["GatherDecision", "enable_float8_all_gather", "precompute_scales"]
