"""What is said of an accelerator in the hardware table (:mod:`f8fx.hardware`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .recipe import Float8Format, Granularity

#: (major, minor) for NVIDIA, the gcn architecture's name for AMD, ``None`` for the CPU.
Capability = tuple[int, int] | str | None


@dataclass(frozen=True)
class Hardware:
    """One accelerator.

    Attributes:
        name: the table's key.
        aliases: other names :func:`f8fx.hardware.find` takes; a CUDA device whose name contains the key or an
            alias is this accelerator (the longest such name counts).
        capability: (major, minor) on NVIDIA, gcn architecture on AMD, ``None`` on CPU.
        float8_dtypes: format -> torch dtype that ``torch._scaled_mm`` takes here; empty where it
            takes none. The CPU has them: ``torch._scaled_mm`` emulates float8 there.
        float8_tensor_cores: whether float8 gemms can be faster than bfloat16 ones at all.
        granularities: what ``torch._scaled_mm`` takes here.
        rowwise_cuda: oldest CUDA version torch may be built with for ``"rowwise"``; ``None`` where
            any version will do. :func:`f8fx.hardware.of_device` drops ``"rowwise"`` on an older build.
        any_operand_layout: whether the *hardware's* float8 gemm takes every operand layout, or only
            both operands K-major ("NT": row-major left, column-major right). Note that the fake
            kernel of ``aten._scaled_mm`` (``torch._meta_registrations.meta_scaled_mm``, 2.13) asks
            for NT on every device but the CPU, whatever the hardware can do; so the passes make the
            transposed copies everywhere, and the cost model counts them.
        bf16_flops, fp8_flops: dense peaks with float32 accumulation, FLOP/s; ``fp8_flops`` is 0
            where there is no float8.
        memory_bandwidth: bytes/s.
        launch_overhead: seconds that the smallest kernel takes on the device.
        l2_bytes: size of the last cache shared by all multiprocessors.
        sms: streaming multiprocessors (NVIDIA), compute units (AMD), cores (CPU, nominal).
        sources: figure -> where it comes from.

    Raises:
        ValueError: for a figure that no time can be computed from.
    """

    name: str
    aliases: tuple[str, ...]
    capability: Capability
    float8_dtypes: Mapping[Float8Format, torch.dtype]
    float8_tensor_cores: bool
    granularities: tuple[Granularity, ...]
    any_operand_layout: bool
    bf16_flops: float
    fp8_flops: float
    memory_bandwidth: float
    launch_overhead: float
    l2_bytes: int
    sms: int
    rowwise_cuda: tuple[int, int] | None = None
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        rates = ["bf16_flops", "memory_bandwidth", *(["fp8_flops"] if self.float8_tensor_cores else [])]
        for figure in (*rates, "launch_overhead", "sms"):
            value, may_be_zero = getattr(self, figure), figure not in rates
            is_number = isinstance(value, (int, float)) and math.isfinite(value)
            if not is_number or value < 0 or (value == 0 and not may_be_zero):
                least = "a number that is not negative" if may_be_zero else "a positive number"
                raise ValueError(f"Hardware.{figure} must be {least}, got {value!r}")
        if not isinstance(self.granularities, tuple):
            raise ValueError(f"Hardware.granularities must be a tuple, got {self.granularities!r}")

    @property
    def grouped_gemm(self) -> bool:
        """Whether ``torch._scaled_grouped_mm`` takes float8 with float32 scales here.

        torch compiles that kernel for Hopper alone (pytorch aten/src/ATen/native/cuda/ScaledGroupMM.cu; pull request
        188063 would add Blackwell). On a CPU f8fx has a definition of its own (:mod:`kernels.grouped`).
        """
        return self.capability in ((9, 0), None)

    def __getstate__(self) -> dict[str, Any]:
        # the table's are views of dicts, which cannot be pickled
        return {**vars(self), "float8_dtypes": dict(self.float8_dtypes), "sources": dict(self.sources)}

    def __hash__(self) -> int:
        return hash((self.name, self.capability, self.granularities))

    def __str__(self) -> str:
        return self.name
