"""What each accelerator can do in float8, and how fast: one table, plain data.

The passes read from here which float8 dtypes exist, which granularities ``torch._scaled_mm``
takes and which operand layouts the float8 gemm wants; the cost model reads the peaks. So
``explain(..., device="h100")`` works on a laptop with no GPU.

All peaks are *dense* (no structured sparsity), in FLOP/s with one multiply-add counted as two;
bandwidths are in bytes per second. They are datasheet figures: how much of a peak a gemm of a
given shape reaches is the cost model's business.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch

Float8Format = Literal["e4m3", "e5m2"]
Granularity = Literal["tensorwise", "rowwise"]

#: (major, minor) for NVIDIA, the gcn architecture's name for AMD, ``None`` for the CPU.
Capability = tuple[int, int] | str | None

_OCP: Mapping[Float8Format, torch.dtype] = MappingProxyType(
    {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
)
# MI300 has the formats of Graphcore/AMD's proposal: no infinities, no negative zero, and a
# largest e4m3 value of 240 instead of 448 (torch: "fnuz"). MI350 (gfx950) has the OCP formats.
_FNUZ: Mapping[Float8Format, torch.dtype] = MappingProxyType(
    {"e4m3": torch.float8_e4m3fnuz, "e5m2": torch.float8_e5m2fnuz}
)
_NO_FLOAT8: Mapping[Float8Format, torch.dtype] = MappingProxyType({})

_BOTH: tuple[Granularity, ...] = ("tensorwise", "rowwise")


@dataclass(frozen=True)
class Hardware:
    """One accelerator.

    Attributes:
        name: the table's key.
        aliases: other names :func:`find` takes; a CUDA device whose name contains the key or an
            alias is this accelerator.
        capability: (major, minor) on NVIDIA, gcn architecture on AMD, ``None`` on CPU.
        float8_dtypes: format -> torch dtype that ``torch._scaled_mm`` takes here; empty where it
            takes none. The CPU has them: ``torch._scaled_mm`` emulates float8 there.
        float8_tensor_cores: whether float8 gemms can be faster than bfloat16 ones at all.
        granularities: what ``torch._scaled_mm`` takes here.
        rowwise_cuda: oldest CUDA version torch may be built with for ``"rowwise"``; ``None`` where
            any version will do. :func:`of_device` drops ``"rowwise"`` on an older build.
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

    def __hash__(self) -> int:
        return hash((self.name, self.capability, self.granularities))

    def __str__(self) -> str:
        return self.name


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


_A100 = Hardware(
    name="a100",
    aliases=("sm80", "a100 sxm", "a100 80gb", "ampere"),
    capability=(8, 0),
    float8_dtypes=_NO_FLOAT8,
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

_MI300X = Hardware(
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

_CPU = Hardware(
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
        fp8_flops="torch._scaled_mm emulates float8 on CPU, measured about 7x slower than bfloat16",
        launch_overhead="nominal",
        granularities="torch 2.13 _scaled_mm on CPU, tried (2.11 takes tensorwise only)",
        any_operand_layout="torch 2.13 _scaled_mm on CPU, tried",
    ),
)


#: The table.
HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {hw.name: hw for hw in (_A100, _L40S, _RTX4090, _H100, _H200, _B200, _RTX5090, _MI300X, _CPU)}
)


def names() -> tuple[str, ...]:
    """The names of the table, oldest GPU first."""
    return tuple(HARDWARE)


def _canonical(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _runs(name: str) -> set[str]:
    """The words of a name, and those that stand side by side joined: ``"rtx4090"`` of ``"GeForce RTX 4090"``."""
    words = re.findall("[a-z0-9]+", name.lower())
    return {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}


def find(name: str) -> Hardware:
    """The accelerator of that name or alias; case, spaces and dashes do not matter.

    A longer name that has one of them in it as words of its own will do, such as what
    ``torch.cuda.get_device_name()`` gives: ``"NVIDIA H100 80GB HBM3"``.

    Raises:
        ValueError: for an unknown name, saying which is nearest.
    """
    wanted = _canonical(name)
    known = {_canonical(n): hw for hw in HARDWARE.values() for n in (hw.name, *hw.aliases)}
    if wanted in known:
        return known[wanted]
    # a word without a number names an architecture, and GPUs of one differ: RTX PRO 6000 Blackwell is no B200
    inside = {run: known[run] for run in _runs(name) if run in known and any(c.isdigit() for c in run)}
    if len({hw.name for hw in inside.values()}) == 1:
        return next(iter(inside.values()))
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.4)
    hint = f"; did you mean {known[near[0]].name!r}?" if near else ""
    raise ValueError(f"hardware must be one of {', '.join(map(repr, names()))}, got {name!r}{hint}")


def of_device(device: torch.device) -> Hardware:
    """The accelerator behind a torch device.

    A CUDA GPU that is not in the table is described by the entry of the nearest capability not
    above its own (a GPU older than sm_89 has no float8); an AMD GPU other than MI300 likewise gets no
    float8, since the flavour of its dtypes is not known. Other accelerators (``mps``, ``xpu``) get none, since
    nothing was tried there. ``"meta"``, and ``"cuda"`` where CUDA is not available, are treated like ``"cpu"``.
    """
    if device.type not in ("cuda", "cpu", "meta"):
        return _without_float8(_CPU, device.type, device.type)
    if device.type != "cuda" or not torch.cuda.is_available():
        return _CPU
    device_name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        arch = str(getattr(torch.cuda.get_device_properties(device), "gcnArchName", "")).split(":")[0]
        return _MI300X if arch == _MI300X.capability else _without_float8(_MI300X, arch, device_name)
    major, minor = torch.cuda.get_device_capability(device)
    return _restrict_to_build(_of_capability((major, minor), device_name))


def _of_capability(capability: tuple[int, int], device_name: str) -> Hardware:
    """The table's entry for an NVIDIA GPU, by name if it has one, else the nearest by capability."""
    wanted = _canonical(device_name)
    nvidia = [(hw.capability, hw) for hw in HARDWARE.values() if isinstance(hw.capability, tuple)]
    for known, hw in nvidia:
        if known == capability and any(_canonical(n) in wanted for n in (hw.name, *hw.aliases)):
            return hw
    if capability < (8, 9):
        return _without_float8(_A100, capability, device_name)
    # Data-centre and GeForce Blackwell differ (sm_10x / sm_12x), so never round up.
    best = max(known for known, _ in nvidia if known <= capability)
    nearest = next(hw for known, hw in nvidia if known == best)
    if best == capability:
        return nearest
    return dataclasses.replace(nearest, name=f"{nearest.name}-like", capability=capability)


def _without_float8(like: Hardware, capability: Capability, device_name: str) -> Hardware:
    return dataclasses.replace(
        like,
        name=like.name if capability == like.capability else device_name or "unknown",
        aliases=(),
        capability=capability,
        float8_dtypes=_NO_FLOAT8,
        float8_tensor_cores=False,
        granularities=(),
        fp8_flops=0.0,
    )


def _restrict_to_build(hw: Hardware) -> Hardware:
    """Drops ``"rowwise"`` where torch was built with a CUDA older than the hardware's kernels need."""
    built = torch.version.cuda
    if hw.rowwise_cuda is None or built is None:
        return hw
    major, minor = (int(part) for part in built.split(".")[:2])
    if (major, minor) >= hw.rowwise_cuda:
        return hw
    kept = tuple(g for g in hw.granularities if g != "rowwise")
    return dataclasses.replace(hw, granularities=kept)
