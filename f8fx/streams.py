"""Tensors that one stream of a GPU computes and others read.

A stream runs its kernels in order and knows nothing of other streams. Tensors that f8fx keeps from call to call (cached
weights, scales of gathered ones) may be read on another stream than the one they were made on, and the user, who sees
none of them, cannot order the two.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def current(device: torch.device) -> torch.Stream | None:
    """The stream that runs what is called now; ``None`` on a CPU, which has none, and for tensors without data."""
    return None if device.type in ("cpu", "meta") else torch.accelerator.current_stream(device)


def capturing() -> bool:
    """Whether what is called now is captured into a CUDA graph: kernels run at every replay, Python at none."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _event(device: torch.device) -> torch.Event:
    return torch.Event(device)


class Made:
    """What the current stream of a device has been given to do until now."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.Event | None = None
        self._after: set[int] = set()  # streams on which it is done before what is called from now on
        stream = current(device)
        if stream is not None:
            self._event = _event(device)
            self._event.record(stream)
            self._after.add(stream.stream_id)

    def before(self, stream: torch.Stream | None, tensors: Iterable[Tensor]) -> None:
        """Has it done before what a stream of this device does from now on, which may read these tensors."""
        if self._event is None or stream is None or stream.stream_id in self._after:
            return
        stream.wait_event(self._event)
        for tensor in tensors:
            tensor.record_stream(stream)  # its memory may not be given away before that stream has read it
        self._after.add(stream.stream_id)
