"""What is really sent: by hooks outside of any graph (:func:`collectives`), or in graphs (:class:`InGraph`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Sent:
    """One collective call: its name, and what this rank put in."""

    op: str
    dtype: torch.dtype
    numel: int

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize


#: torch 2.13 has new names for the first two
_COLLECTIVES = {
    "all_gather_single": 1,
    "all_gather_into_tensor": 1,
    "reduce_scatter_single": 1,
    "reduce_scatter_tensor": 1,
    "all_reduce": 0,
}


@contextmanager
def collectives() -> Iterator[list[Sent]]:
    """What is really handed to torch.distributed inside the block, in order."""
    seen: list[Sent] = []
    inside: list[str] = []

    def watched(name: str, call: Any, position: int) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not inside:
                tensor = (
                    args[position]
                    if len(args) > position
                    else kwargs.get("input_tensor", kwargs.get("input"))
                )
                seen.append(Sent(name.replace("single", "into_tensor"), tensor.dtype, tensor.numel()))
            inside.append(name)
            try:
                return call(*args, **kwargs)
            finally:
                inside.pop()

        return wrapper

    with ExitStack() as stack:
        for name, position in _COLLECTIVES.items():
            call = getattr(dist, name, None)
            if call is not None:
                stack.enter_context(mock.patch.object(dist, name, watched(name, call, position)))
        yield seen


class InGraph(TorchDispatchMode):
    """Counts what collectives are given, by operator and dtype: calls and bytes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple[str, torch.dtype], int] = {}
        self.bytes: dict[tuple[str, torch.dtype], int] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled code runs under such a mode; under others it is compiled anew, which Dynamo refuses."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket)
        if name.startswith("_c10d_functional.") and "wait" not in name:
            # Inductor reduces in place
            key = (name.removeprefix("_c10d_functional.").removesuffix("_"), args[0].dtype)
            self.calls[key] = self.calls.get(key, 0) + 1
            self.bytes[key] = self.bytes.get(key, 0) + result.numel() * result.element_size()
        return result
