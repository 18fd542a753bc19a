"""Where the scales of rowwise gemms with exact accumulation are applied."""

from __future__ import annotations

import torch

from f8fx.hardware import Hardware, of_device
from f8fx.torch_private import supports_rowwise_scaled_mm

from .quantize import RowwiseScales

#: The oldest CUDA with whose cuBLASLt torch runs rowwise gemms on Hopper.
_CUBLASLT = (12, 9)


def best_rowwise_scales(device: torch.device) -> RowwiseScales:
    """Where this torch applies them best on a device. The CPU's gemm is for tests: it does as torchao does, to the bit."""
    if device.type == "cpu":
        return "torchao" if supports_rowwise_scaled_mm("cpu") else "after"
    return rowwise_scales_on(of_device(device), torch.version.cuda)


def rowwise_scales_on(hardware: Hardware, cuda: str | None = None) -> RowwiseScales:
    """In the gemm, where that is not slower for it; else as torchao does it everywhere, by a kernel of its own.

    - Hopper: in the gemm with cuBLASLt; with an older CUDA torch takes a CUTLASS kernel that with exact accumulation
      is too slow, as torchao found.
    - Blackwell: torch takes a CUTLASS kernel for all rowwise gemms, and it is one for either accumulation
      (pytorch aten/src/ATen/native/cuda/RowwiseScaledMM.cu, ``f8f8bf16_rowwise_impl_sm100_sm120``).
    - Ada: a CUTLASS kernel, and another one for exact accumulation; nobody has measured it.
    - AMD: in the gemm (hipBLASLt).

    Args:
        cuda: the version torch is built with, ``"13.0"``; default: a recent one.
    """
    if not isinstance(hardware.capability, tuple) or hardware.capability[0] > 9:
        return "in_gemm"
    if hardware.capability[0] < 9:
        return "torchao"
    too_old = cuda is not None and tuple(map(int, cuda.split(".")[:2])) < _CUBLASLT
    return "torchao" if too_old else "in_gemm"
