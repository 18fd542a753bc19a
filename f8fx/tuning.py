"""Inductor options that rewritten graphs are compiled with, unless the user has set them.

They come into force before the first node of a graph with one of our operators is lowered; a graph in which nothing was
converted is compiled as by plain Inductor. Only on GPUs; options that the running torch does not have are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from .torch_private import differs_from_default, inductor_config

#: Option -> value. Counted for a Llama-3-8B block, forward and backward, at 8192 tokens (``benchmarks.traffic``).
TUNING: Mapping[str, Any] = {
    # kernels of equal depth become one launch: the casts of all weights, their amaxes, all scales
    "combo_kernels": True,
    "combo_kernel_max_num_nodes": 16,
    # column amaxes want tall blocks, row amaxes wide ones; only where Inductor tunes them in groups (from torch 2.13 on)
    "combo_kernel_per_subkernel_blocks": True,
    # a weight may be quantized before its turn to be in that launch, for at most so much memory as
    # f8fx.torch_private.combining allows to all launches of a graph together; these bound each of them
    "combo_kernel_peak_memory_pct_threshold": None,
    "combo_kernel_peak_memory_increase_gb": None,
    # RoPE's backward (about 40 operations) is computed for the amax and again for the cast; at Inductor's
    # threshold (30) it is written out in bfloat16 in between, which is more traffic
    "realize_opcount_threshold": 50,
    # a LayerNorm's output is computed from five tensors, and again for each cast; at Inductor's threshold (4) it is
    # written out in between. With one more, Llama's block moves more. What reads only one tensor of its size never is
    "realize_reads_threshold": 5,
}


def tuning(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options to set, given those the user passes with the compile; what ``torch._inductor.config`` has otherwise stays."""
    config = inductor_config()
    known = {key for key in TUNING if hasattr(config, key)}
    if not hasattr(config, "combo_kernel_autotune_grouping"):
        known.discard("combo_kernel_per_subkernel_blocks")
    return {
        key: value
        for key, value in TUNING.items()
        if key in known and not (key in given or differs_from_default(key))
    }


class Tuned(Protocol):
    """What stands in the place of Inductor's custom pass, and carries options for the graphs that are lowered with it."""

    tuning: Mapping[str, Any]


def patches_for(carrier: Tuned) -> dict[str, Any]:
    """Config patches under which graphs with our operators are lowered with ``carrier.tuning``.

    The options themselves are patched to what they are: lowering changes them
    (:func:`f8fx.torch_private.tune_graphs_of`), and Inductor sets them back after the compile.
    """
    config = inductor_config()
    return {"joint_custom_pre_pass": carrier} | {key: getattr(config, key) for key in carrier.tuning}
