"""Graphs with weights of which each half of a step has its own copy in memory.

A weight that FSDP2 gathers in two float8 formats (:mod:`f8fx.fsdp.copies`) need not be there in both of them: the
forward reads one, the backward the other. Whether a graph keeps to that is seen when it has been split
(:class:`f8fx.partition.Partitioner`): a forward that is recomputed in the backward does not. Such a graph is compiled once
more, without that check, and says at each call what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .passes.halves import Reads
from .torch_private import local_part


def positions(example_inputs: Sequence[Any]) -> list[int]:
    """Which inputs of a graph are weights whose copies take turns."""
    return [
        index for index, value in enumerate(example_inputs) if getattr(local_part(value), "alternate", False)
    ]


def saying(compiled: Callable[..., Any], weights: Sequence[int], known: Reads) -> Callable[..., Any]:
    """A compiled graph that tells its weights, when its forward and its backward begin, what they read.

    Args:
        weights: :func:`positions`.
    """
    if not weights:
        return compiled

    def run(*args: Any) -> Any:
        watched = [local_part(args[index]).copies for index in weights]
        if None in watched:
            raise RuntimeError(
                "f8fx.fsdp: a graph reads a weight through a tensor that another graph has returned (detached before a graph "
                "break, say), and nothing tells which of its float8 copies is in memory. Read the parameter itself, or use "
                'enable_float8_all_gather(..., copies="both")'
            )
        for index, copies in zip(weights, watched, strict=True):
            copies.said(known.is_early(index), known.is_late(index))
        outputs = compiled(*args)

        def begins(_: Any) -> None:
            for index, copies in zip(weights, watched, strict=True):
                copies.backward_begins(known.is_early(index))

        found = {t.grad_fn for t in outputs if isinstance(t, torch.Tensor)} - {None}
        for node in found:
            node.register_prehook(begins)  # type: ignore[union-attr]
        return outputs

    return run
