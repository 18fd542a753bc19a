"""Devices themselves."""

from __future__ import annotations

import torch


def is_present(device: torch.device) -> bool:
    """Whether a GPU is really there, not only in the shapes of fake tensors (``torch._C._cuda_getDeviceCount``)."""
    count = getattr(torch._C, "_cuda_getDeviceCount", None)  # missing in builds for the CPU
    return count is not None and count() > (device.index or 0)


def busy_wait(cycles: int) -> None:
    """Keeps the current stream busy for so many clock cycles (``torch.cuda._sleep``, which torch's own tests use)."""
    torch.cuda._sleep(cycles)


def multiplies_float8_slowly() -> bool:
    """Whether the CPU is one whose float8 gemms oneDNN takes over without a fast kernel for them.

    That is asked for AMX with int8 and needs AMX with float16 (``torch.cpu._is_amx_tile_supported``,
    ``_is_amx_fp16_supported``; torch 2.13: 1024 x 128 x 384 takes 1 s there, and 2 ms without oneDNN).
    """
    has = [getattr(torch.cpu, f"_is_amx_{kind}_supported", None) for kind in ("tile", "fp16")]
    return bool(has[0] is not None and has[0]() and not (has[1] is not None and has[1]()))
