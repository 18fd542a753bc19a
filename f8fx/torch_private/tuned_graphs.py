"""Inductor options that come into force for graphs with certain operators, before the first of their nodes is lowered."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import fx

from .combining import combine_within_memory
from .inductor import inductor_config
from .realizing import compute_again_what_reads_one_tensor
from .scheduling import combine_by_kind

#: Devices that the options of a pass are for.
TUNED_DEVICES = frozenset(("cuda", "xpu"))


@cache
def tune_graphs_of(namespace: str) -> None:
    """Graphs with operators of a namespace are lowered with the options that Inductor's custom pass carries (``tuning``).

    Process-wide, and without effect on other graphs. ``compile_fx`` restores the options afterwards: they are among
    those that it was given for this compile.

    ``GraphLowering.run``, ``config.joint_custom_pre_pass``.
    """
    from torch._inductor.graph import GraphLowering

    run = GraphLowering.run

    def run_tuned(self: Any, *args: Any) -> Any:
        if any(getattr(node.target, "namespace", "") == namespace for node in self.graph.nodes):
            _tune(self.graph)
        return run(self, *args)

    GraphLowering.run = run_tuned  # type: ignore[method-assign]


def _tune(graph: fx.Graph) -> None:
    config = inductor_config()
    tuning = getattr(config.joint_custom_pre_pass, "tuning", None)
    if not tuning or TUNED_DEVICES.isdisjoint(_devices(graph)):
        return
    for key, value in tuning.items():
        if getattr(config, key) != value:
            setattr(config, key, value)
    if "realize_reads_threshold" in tuning:
        compute_again_what_reads_one_tensor()
    if config.combo_kernels:
        combine_within_memory()
        combine_by_kind(config.combo_kernel_per_subkernel_blocks)


def _devices(graph: fx.Graph) -> set[str]:
    values = (node.meta.get("val") for node in graph.nodes)
    return {value.device.type for value in values if isinstance(value, torch.Tensor)}
