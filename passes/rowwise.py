"""Where the scales of rowwise gemms with exact accumulation are applied."""

from __future__ import annotations

from collections.abc import Callable

import torch

from f8fx.cost import CostModel
from f8fx.hardware import Hardware, of_device
from f8fx.torch_private import size_hint, supports_rowwise_scaled_mm

from .gemm import Gemm
from .quantize import DeviceScales, RowwiseScales

#: The oldest CUDA with whose cuBLASLt torch runs rowwise gemms on Hopper.
_CUBLASLT = (12, 9)


def best_rowwise_scales(device: torch.device) -> DeviceScales:
    """Where this torch applies them best on a device. The CPU's gemm is for tests: it does as torchao does, to the bit."""
    if device.type == "cpu":
        return "torchao" if supports_rowwise_scaled_mm("cpu") else "after"
    return rowwise_scales_on(of_device(device), torch.version.cuda)


def rowwise_scales_on(hardware: Hardware, cuda: str | None = None) -> DeviceScales:
    """In the gemm, where that is not slower for it; else as torchao does it everywhere, by a kernel of its own.

    - Hopper: in the gemm with cuBLASLt, where that is not slow for the size of its operands, as on an H100
      (``Calibration.exact_rowwise_bytes``); with an older CUDA torch takes a CUTLASS kernel that with exact accumulation
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
    return "torchao" if too_old else "by_size"


class ScalesOf:
    """Where the scales of a gemm are applied.

    Args:
        on: where a device applies them.
        model_of: what a gemm costs on a device, which decides where the device leaves it to the size.
    """

    def __init__(
        self,
        on: Callable[[torch.device], DeviceScales],
        model_of: Callable[[torch.device], CostModel],
    ) -> None:
        self.on, self.model_of = on, model_of

    def __call__(self, gemm: Gemm) -> RowwiseScales:
        """By the sizes the gemm was traced with, where they are dynamic."""
        where = self.on(gemm.device)
        if where != "by_size":
            return where
        m, k, n = (size_hint(size) for size in (gemm.m, gemm.k, gemm.n))
        if m is None or k is None or n is None:
            return "torchao"
        return "torchao" if self.model_of(gemm.device).scales_after(m, k, n) else "in_gemm"
