"""GPUs themselves."""

from __future__ import annotations

import torch


def is_present(device: torch.device) -> bool:
    """Whether a GPU is really there, not only in the shapes of fake tensors (``torch._C._cuda_getDeviceCount``)."""
    count = getattr(torch._C, "_cuda_getDeviceCount", None)  # missing in builds for the CPU
    return count is not None and count() > (device.index or 0)


def busy_wait(cycles: int) -> None:
    """Keeps the current stream busy for so many clock cycles (``torch.cuda._sleep``, which torch's own tests use)."""
    torch.cuda._sleep(cycles)
