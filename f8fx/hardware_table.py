"""The figures of the hardware table (:mod:`f8fx.hardware`), each with its source.

All peaks are *dense* (no structured sparsity), in FLOP/s with one multiply-add counted as two;
bandwidths are in bytes per second. They are datasheet figures: how much of a peak a gemm of a
given shape reaches is the cost model's business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import torch

from .accelerator import Hardware
from .recipe import Float8Format, Granularity

_OCP: Mapping[Float8Format, torch.dtype] = MappingProxyType(
    {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
)
# MI300 has the formats of Graphcore/AMD's proposal: no infinities, no negative zero, and a
# largest e4m3 value of 240 instead of 448 (torch: "fnuz"). MI350 (gfx950) has the OCP formats.
_FNUZ: Mapping[Float8Format, torch.dtype] = MappingProxyType(
    {"e4m3": torch.float8_e4m3fnuz, "e5m2": torch.float8_e5m2fnuz}
)
NO_FLOAT8: Mapping[Float8Format, torch.dtype] = MappingProxyType({})

_BOTH: tuple[Granularity, ...] = ("tensorwise", "rowwise")

_MIB = 1 << 20

# torchao times a Triton kernel that reads and writes one element at 2 us on an H100
# (torchao/testing/training/roofline_utils.py, KERNEL_LAUNCH_OVERHEAD_SEC). Nobody publishes the
# figure for other GPUs, so it is used for all of them.
_LAUNCH = 2e-6
_LAUNCH_SOURCE = "torchao roofline_utils.KERNEL_LAUNCH_OVERHEAD_SEC, measured on H100"

# Where torch says which granularities _scaled_mm takes: aten/src/ATen/native/cuda/
# RowwiseScaledMM.cu, dispatch_fp8_rowwise_kernel_on_sm, has kernels for sm_89, sm_9x, sm_10x and
# sm_12x (pytorch PRs 144348 for sm_89, 155991 for sm_12x). On sm_90 CUDA >= 12.9 goes to cuBLASLt.
_ROWWISE = "pytorch aten/src/ATen/native/cuda/RowwiseScaledMM.cu, dispatch_fp8_rowwise_kernel_on_sm"
# cuBLAS documentation, cublasLtMatmul, FP8: "A must be transposed and B non-transposed (the TN
# format) on Ada (8.9), Hopper (9.0) and Blackwell GeForce (12.x)". cuBLAS is column-major: its TN
# is the row-major x column-major pair that everybody else here calls NT.
_LAYOUT = "cuBLAS documentation, cublasLtMatmul, FP8 requirements"


def _sources(datasheet: str, **others: str) -> Mapping[str, str]:
    figures = ("bf16_flops", "fp8_flops", "memory_bandwidth", "l2_bytes", "sms")
    return MappingProxyType(
        dict.fromkeys(figures, datasheet)
        | {"launch_overhead": _LAUNCH_SOURCE, "granularities": _ROWWISE, "any_operand_layout": _LAYOUT}
        | others
    )


A100 = Hardware(
    name="a100",
    aliases=("sm80", "a100 sxm", "a100 80gb", "ampere"),
    capability=(8, 0),
    float8_dtypes=NO_FLOAT8,
    float8_tensor_cores=False,
    granularities=(),
    any_operand_layout=False,
    bf16_flops=312e12,
    fp8_flops=0.0,
    memory_bandwidth=2.039e12,
    launch_overhead=_LAUNCH,
    l2_bytes=40 * _MIB,
    sms=108,
    sources=_sources("NVIDIA A100 Tensor Core GPU datasheet (80 GB SXM); A100 whitepaper"),
)

_L40S = Hardware(
    name="l40s",
    aliases=("sm89", "ada"),
    capability=(8, 9),
    float8_dtypes=_OCP,
    float8_tensor_cores=True,
    granularities=_BOTH,
    any_operand_layout=False,
    bf16_flops=362.05e12,
    fp8_flops=733e12,
    memory_bandwidth=864e9,
    launch_overhead=_LAUNCH,
    l2_bytes=96 * _MIB,
    sms=142,
    rowwise_cuda=(12, 0),
    sources=_sources("NVIDIA L40S datasheet; Ada GPU architecture whitepaper (AD102)"),
)

_RTX4090 = Hardware(
    name="rtx4090",
    aliases=("4090", "geforce rtx 4090"),
    capability=(8, 9),
    float8_dtypes=_OCP,
    float8_tensor_cores=True,
    granularities=_BOTH,
    any_operand_layout=False,
    bf16_flops=165.2e12,
    fp8_flops=330.3e12,
    memory_bandwidth=1.008e12,
    launch_overhead=_LAUNCH,
    l2_bytes=72 * _MIB,
    sms=128,
    rowwise_cuda=(12, 0),
    sources=_sources(
        "NVIDIA Ada GPU architecture whitepaper, appendix A",
        fp8_flops="same, FP8 with FP32 accumulate (FP16 accumulate would be 660.6e12)",
    ),
)

_H100 = Hardware(
    name="h100",
    aliases=("sm90", "h100 sxm", "h800", "hopper"),
    capability=(9, 0),
    float8_dtypes=_OCP,
    float8_tensor_cores=True,
    granularities=_BOTH,
    any_operand_layout=False,
    bf16_flops=989.4e12,
    fp8_flops=1978.9e12,
    memory_bandwidth=3.35e12,
    launch_overhead=_LAUNCH,
    l2_bytes=50 * _MIB,
    sms=132,
    rowwise_cuda=(12, 0),
    sources=_sources("NVIDIA H100 Tensor Core GPU architecture whitepaper and datasheet (SXM5)"),
)

_H200 = dataclasses.replace(
    _H100,
    name="h200",
    aliases=("h200 sxm", "gh200"),
    memory_bandwidth=4.8e12,
    sources=_sources("NVIDIA H200 Tensor Core GPU datasheet (SXM)", l2_bytes="as H100", sms="as H100"),
)

_H100_PCIE = dataclasses.replace(
    _H100,
    name="h100-pcie",
    aliases=(),
    bf16_flops=756e12,
    fp8_flops=1513e12,
    memory_bandwidth=2.039e12,
    sms=114,
    sources=_sources("NVIDIA H100 PCIe GPU product brief and datasheet (80 GB)", l2_bytes="as H100"),
)

_H100_NVL = dataclasses.replace(
    _H100,
    name="h100-nvl",
    aliases=(),
    bf16_flops=835e12,
    fp8_flops=1671e12,
    memory_bandwidth=3.938e12,
    sources=_sources(
        "NVIDIA H100 NVL GPU product brief and datasheet (94 GB)", l2_bytes="as H100", sms="as H100"
    ),
)

_H200_NVL = dataclasses.replace(
    _H200,
    name="h200-nvl",
    aliases=(),
    bf16_flops=835e12,
    fp8_flops=1671e12,
    sources=_sources("NVIDIA H200 Tensor Core GPU datasheet (NVL)", l2_bytes="as H100", sms="as H100"),
)

_H20 = dataclasses.replace(
    _H100,
    name="h20",
    aliases=(),
    bf16_flops=148e12,
    fp8_flops=296e12,
    memory_bandwidth=4.0e12,
    l2_bytes=60 * _MIB,
    sms=78,
    sources=_sources("as commonly reported of the NVIDIA H20 (96 GB); there is no public datasheet"),
)

_B200 = Hardware(
    name="b200",
    aliases=("sm100", "gb200", "blackwell"),
    capability=(10, 0),
    float8_dtypes=_OCP,
    float8_tensor_cores=True,
    granularities=_BOTH,
    any_operand_layout=True,
    bf16_flops=2.25e15,
    fp8_flops=4.5e15,
    memory_bandwidth=7.672e12,
    launch_overhead=_LAUNCH,
    l2_bytes=126 * _MIB,
    sms=148,
    rowwise_cuda=(12, 8),
    sources=_sources(
        "NVIDIA Blackwell architecture technical brief, dense figures of one GPU",
        memory_bandwidth="torchao roofline_utils: 7680-bit bus as CUDA 13 reports it (datasheet: 8e12)",
        l2_bytes="CUDA Blackwell tuning guide",
        sms="cudaDeviceProp.multiProcessorCount as commonly reported; not in the brief",
    ),
)

_RTX5090 = Hardware(
    name="rtx5090",
    aliases=("sm120", "5090", "geforce rtx 5090"),
    capability=(12, 0),
    float8_dtypes=_OCP,
    float8_tensor_cores=True,
    granularities=_BOTH,
    any_operand_layout=False,
    bf16_flops=209.5e12,
    fp8_flops=419e12,
    memory_bandwidth=1.792e12,
    launch_overhead=_LAUNCH,
    l2_bytes=96 * _MIB,
    sms=170,
    rowwise_cuda=(12, 8),
    sources=_sources(
        "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A (FP32 accumulate)",
        granularities=_ROWWISE
        + "; but pytorch issue 192707 reports rowwise failing in cuBLASLt on sm_120 with 2.10.0+cu130",
    ),
)

MI300X = Hardware(
    name="mi300x",
    aliases=("mi300", "gfx942", "instinct mi300x"),
    capability="gfx942",
    float8_dtypes=_FNUZ,
    float8_tensor_cores=True,
    granularities=_BOTH,
    any_operand_layout=False,
    bf16_flops=1307.4e12,
    fp8_flops=2614.9e12,
    memory_bandwidth=5.3e12,
    launch_overhead=_LAUNCH,
    l2_bytes=256 * _MIB,
    sms=304,
    sources=_sources(
        "AMD Instinct MI300X datasheet",
        l2_bytes="AMD CDNA 3 whitepaper: the 256 MB Infinity Cache (L2 proper is 4 MB a die)",
        granularities="hipBLASLt outer-vector scaling; torchao trains rowwise on MI300X",
        any_operand_layout="torch's own check: _scaled_mm asks for NT on ROCm too",
    ),
)

CPU = Hardware(
    name="cpu",
    aliases=("host", "x86"),
    capability=None,
    float8_dtypes=_OCP,
    float8_tensor_cores=False,
    granularities=_BOTH,
    any_operand_layout=True,
    bf16_flops=1e12,
    fp8_flops=1e12 / 7,
    memory_bandwidth=50e9,
    launch_overhead=1e-6,
    l2_bytes=32 * _MIB,
    sms=8,
    sources=_sources(
        "nominal: any CPU, only so that times are finite",
        fp8_flops="torch._scaled_mm emulates float8 on CPU: on one with bfloat16 instructions about 7x slower than bfloat16",
        launch_overhead="nominal",
        granularities="torch 2.12 _scaled_mm on CPU, tried (2.11 takes tensorwise only)",
        any_operand_layout="torch 2.13 _scaled_mm on CPU, tried",
    ),
)


_ALL = (
    *(A100, _L40S, _RTX4090, _H100, _H100_PCIE, _H100_NVL, _H20, _H200, _H200_NVL),
    *(_B200, _RTX5090, MI300X, CPU),
)

#: The table, oldest GPU first.
HARDWARE: Mapping[str, Hardware] = MappingProxyType({hw.name: hw for hw in _ALL})
