"""Backwards that run more than once, although they overwrite what their forward saved.

A compiled backward may write its results into saved activations, which are *donated* to it. Under
``retain_graph=True`` that cannot be: torch compiles a backward without it if the first call asks for that, which it
knows because it compiles most backwards when they are first called. One that was compiled before, with its forward or
in another process, raises an error instead (``runtime_wrappers.py``, ``bw_donated_idxs``).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from .patch import patched_attribute


def repeatable_backwards() -> AbstractContextManager[None]:
    """A block in which AOTAutograd's backwards, compiled or loaded, can be called with ``retain_graph=True``.

    Then they overwrite copies of what was donated to them.
    """
    from torch._functorch._aot_autograd import runtime_wrappers

    owner = runtime_wrappers.AOTDispatchAutograd
    make: Callable[..., Any] = owner.post_compile
    described = getattr(runtime_wrappers, "AOTDispatchAutogradCompileSpec", None)  # not on 2.11

    def post_compile(first: Any, *rest: Any, **named: Any) -> Callable[..., Any]:
        if described is not None and isinstance(first, described):
            fields: Any = first
            backward, metadata = _repeatable(fields.compiled_bw_func, fields.fw_metadata)
            return make(dataclasses.replace(fields, compiled_bw_func=backward, fw_metadata=metadata))
        backward, metadata = _repeatable(rest[0], named["fw_metadata"])
        return make(first, backward, *rest[1:], **{**named, "fw_metadata": metadata})

    return patched_attribute(owner, "post_compile", staticmethod(post_compile))


def _repeatable(backward: Callable[..., Any] | None, metadata: Any) -> tuple[Callable[..., Any] | None, Any]:
    """A backward that may run several times, and what is to be known of it: that nothing is donated to it."""
    donated: Sequence[int] | None = metadata.bw_donated_idxs
    if backward is None or not donated:
        return backward, metadata
    metadata = copy.copy(metadata)  # what is kept in caches is the original
    metadata.bw_donated_idxs = []

    def run(args: list[Any]) -> Any:
        if torch._C._autograd._get_current_graph_task_keep_graph():
            for index in donated:
                args[index] = _copied(args[index])
        return backward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run, metadata


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """With the same strides, which compiled code relies on."""
    same = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    once = tuple(slice(None if stride else 1) for stride in tensor.stride())  # of an expanded tensor
    same[once].copy_(tensor[once])
    return same
