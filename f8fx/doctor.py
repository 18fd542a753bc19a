"""``f8fx doctor``: what is installed, what this machine can run, and which upstream bugs to know of.

Everything is collected as plain data first (:class:`Diagnosis`), then printed or dumped as JSON. The
known bugs are a list of :class:`KnownIssue` values: a bug is added or retired by editing data.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from f8fx import canary
from f8fx.hardware import Hardware, of_device
from f8fx.lacks import lacks
from f8fx.recipe import PRESETS, ROLES, Recipe
from f8fx.torch_private import SUPPORTED_TORCH, check_version, supports_rowwise_scaled_mm

Place = Literal["cpu", "cuda", "gloo", "any"]


def _number(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as ``2.15.0+cu132`` or ``2.14.0.dev20260729``."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found:
        raise ValueError(f"{version!r} is not a version of the form major.minor")
    return int(found[1]), int(found[2])


@dataclass(frozen=True)
class Versions:
    """A range of releases: ``since`` inclusive, ``before`` exclusive, ``None`` for an open end."""

    since: str | None = None
    before: str | None = None

    def __contains__(self, version: str) -> bool:
        number = _number(version)
        if self.since is not None and number < _number(self.since):
            return False
        return self.before is None or number < _number(self.before)

    def __str__(self) -> str:
        ends = [f">={self.since}"] if self.since else []
        ends += [f"<{self.before}"] if self.before else []
        return ", ".join(ends) or "all"


@dataclass(frozen=True)
class KnownIssue:
    """A bug or limit of the software underneath that someone who uses float8 may meet.

    Attributes:
        title: what it is, in a line.
        link: where it is discussed, empty where we know of no thread.
        torch: releases that have it.
        triton: releases that have it; ``None`` if Triton has no part in it.
        where: what it needs to show: a CPU run, an NVIDIA GPU, gloo collectives, or nothing special.
        effect: what the user sees.
        workaround: what to do.
    """

    title: str
    link: str
    torch: Versions
    effect: str
    workaround: str
    triton: Versions | None = None
    where: Place = "any"

    def applies(self, torch_version: str, triton_version: str | None, has_cuda: bool) -> bool:
        """Whether it can show with these versions on a machine with or without an NVIDIA GPU."""
        if torch_version not in self.torch or (self.where == "cuda" and not has_cuda):
            return False
        return self.triton is None or (triton_version is not None and triton_version in self.triton)

    def to_dict(self) -> dict[str, Any]:
        """The issue as plain data; ranges as text."""
        values = dataclasses.asdict(self)
        values["torch"] = str(self.torch)
        values["triton"] = None if self.triton is None else str(self.triton)
        return values


#: Ranges say in which of the supported releases an issue was found by trying it (CPU, gloo) or by
#: reading the generated code (CUDA). Where a release between two supported ones was not looked at, the
#: range includes it: a warning too many is better than one too few.
KNOWN_ISSUES: tuple[KnownIssue, ...] = (
    KnownIssue(
        title="Triton writes garbage bytes in a transposed float8 store next to a NaN-propagating min/max",
        link="https://github.com/triton-lang/triton/issues/11111",
        # TritonOverrides.maximum (torch/_inductor/codegen/triton.py) calls triton_helpers.maximum on
        # CUDA up to 2.13, and emits tl.maximum(.., tl.PropagateNan.ALL) from 2.14 on, since
        # pytorch/pytorch#186933 (nightlies of 2.14, from 2026-06-14).
        torch=Versions(since="2.14"),
        triton=Versions(),
        where="cuda",
        effect=(
            "NaN or Inf in compiled float8 backwards, flaky, since only some autotuned launch "
            "configurations are hit. Inductor emits such min/max since pytorch/pytorch#186933."
        ),
        workaround=(
            "None needed with f8fx or torchao: from their first compile on, Inductor writes min and max as "
            "tl.where in this process, with the same results."
        ),
    ),
    KnownIssue(
        title="Triton rounds float32 to float8 in two steps on Ada (sm_89)",
        link="https://github.com/triton-lang/triton/issues/11753",
        # f32 -> f16 (towards zero) -> float8 in the PTX of 3.6, one conversion in that of 3.9.
        torch=Versions(),
        triton=Versions(before="3.9"),
        where="cuda",
        effect="Some elements cast by compiled kernels on L40S and 4090 are off by one unit in the last place.",
        workaround="Upgrade to a torch whose Triton is 3.9 or newer; H100 and later are not affected.",
    ),
    KnownIssue(
        title="A rowwise float8 gemm on Ada (sm_89) clears its workspace in the default stream",
        link="https://github.com/pytorch/pytorch/issues/177651",
        # Reported, not tried: f8f8bf16_rowwise_impl_sm89 (RowwiseScaledMM.cu) gave no stream to gemm.initialize.
        torch=Versions(before="2.12"),
        where="cuda",
        effect=(
            "On L40S and 4090 rowwise recipes may hang the GPU in any other stream, such as one in which a CUDA graph is "
            "captured."
        ),
        workaround='Upgrade to torch 2.12 or newer; or recipe="tensorwise", or the default stream and no CUDA graphs.',
    ),
    KnownIssue(
        title="torch._scaled_mm on CPU takes one scale per tensor only",
        link="",
        torch=Versions(before="2.12"),
        where="cpu",
        effect="Rowwise scales raise an internal assertion on CPU.",
        workaround="f8fx emulates the rowwise gemm itself there; upgrade to torch 2.12 or newer to use PyTorch's.",
    ),
    KnownIssue(
        title="Casts to float8_e4m3fn overflow to NaN instead of saturating",
        link="https://github.com/pytorch/pytorch/pull/178817",
        torch=Versions(before="2.13"),
        effect="A value above 448 becomes NaN in eager mode and in compiled CPU code.",
        workaround="None needed for f8fx, which clamps before it casts; clamp in your own code.",
    ),
    KnownIssue(
        title="Casts to float8_e5m2 overflow to Inf instead of saturating",
        link="https://github.com/pytorch/ao/issues/1912",
        torch=Versions(),
        effect="A value above 57344 becomes Inf in eager mode and in compiled CPU code; Triton saturates.",
        workaround="None needed for f8fx, which clamps before it casts; clamp in your own code.",
    ),
    KnownIssue(
        title="Inductor's C++ code stores more bytes of a transposed float8 vector than it has",
        link="",
        # Tried with GCC 12: -O0 in 2.13 and 2.15 does, no other build; nor 2.11, whose loops are half as wide.
        torch=Versions(since="2.12"),
        where="cpu",
        effect=(
            "With AVX-512 the code shifts by more bits than a number has, which GCC makes right with optimisation. "
            "Without (aot_inductor.debug_compile), transposed copies are garbage, and so are gradients; other compilers "
            "were not tried."
        ),
        workaround='Leave optimisation on, or set options={"inductor": {"cpp.simdlen": 0}}.',
    ),
    KnownIssue(
        title="gloo rejects float8 tensors in every collective",
        link="https://github.com/pytorch/pytorch/pull/126556",
        torch=Versions(),
        where="gloo",
        effect='"Invalid scalar type", and the process group is unusable afterwards.',
        workaround="Send x.view(torch.uint8) and view it back; NCCL takes float8 as it is.",
    ),
    KnownIssue(
        title="A compile cache serves one rank the code of another where DTensors are inputs",
        link="https://github.com/pytorch/pytorch/issues/188390",
        # Tried: 2.13 and 2.15 do (2.12 and 2.14 by reading); 2.11 caches no such graph (keys came with pytorch/pytorch#173526).
        torch=Versions(since="2.12"),
        effect=(
            "The second run of ranks that share a cache directory, on one node say: wrong numbers where a tensor is "
            "sharded in the graph, an unknown process group, another rank's GPU."
        ),
        workaround=(
            "None needed for f8fx, whose keys hold a rank's place in each mesh; with other backends give each rank a "
            "TORCHINDUCTOR_CACHE_DIR of its own."
        ),
    ),
    KnownIssue(
        title="module.compile() on a built-in module is a silent no-op",
        link="https://github.com/pytorch/pytorch/pull/185722",
        # Tried: no graph reaches the backend in 2.11 to 2.13, one does in 2.14 and 2.15.
        torch=Versions(before="2.14"),
        effect=(
            "nn.Linear(...).compile() and nn.Sequential(nn.Linear(...)).compile() never call the "
            "backend: the module runs eagerly, in bf16, and f8fx logs nothing."
        ),
        workaround="Use torch.compile(module), or .compile() on a module class of your own.",
    ),
    KnownIssue(
        title="DistributedDataParallel around a built-in module is not compiled",
        link="",
        # Tried: no graph reaches any backend in 2.11 to 2.15.
        torch=Versions(),
        effect=(
            "torch.compile(DistributedDataParallel(nn.Sequential(...))) compiles modules of one's own in it one by one. "
            "PyTorch's own, such as nn.Linear, run eagerly, in bf16, and f8fx logs nothing of them."
        ),
        workaround="Compile first, DistributedDataParallel(torch.compile(module)), or wrap a module class of your own.",
    ),
)


@dataclass(frozen=True)
class Device:
    """One device and what it can run.

    Attributes:
        name: ``cpu`` or ``cuda:0`` with the GPU's name.
        hardware: its entry in the hardware table.
        float8_tensor_cores: whether float8 can be faster than bf16 on it.
        recipes: name of each preset -> ``"yes"``, ``"emulated ..."`` or ``"no: ..."``, with the reason.
        kernels: whether generated float8 kernels write the right bytes (:mod:`f8fx.canary`).
    """

    name: str
    hardware: str
    float8_tensor_cores: bool
    recipes: Mapping[str, str]
    kernels: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All that ``f8fx doctor`` found.

    Attributes:
        versions: package -> version, ``None`` where it is not installed.
        torch_supported: torch releases f8fx is tested on.
        warnings: what is wrong with this installation, in sentences; empty if nothing is.
        devices: the CPU first, then each CUDA device.
        issues: the known issues that apply.
    """

    versions: Mapping[str, str | None]
    torch_supported: tuple[str, ...]
    warnings: tuple[str, ...]
    devices: tuple[Device, ...]
    issues: tuple[KnownIssue, ...]

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as JSON-ready data."""
        return {
            "versions": dict(self.versions),
            "torch_supported": list(self.torch_supported),
            "warnings": list(self.warnings),
            "devices": [dataclasses.asdict(device) for device in self.devices],
            "known_issues": [issue.to_dict() for issue in self.issues],
        }

    def print(self, console: Console | None = None) -> None:
        """Prints tables for people."""
        console = console or Console()
        versions = Table.grid(padding=(0, 2, 0, 0))
        for package, version in self.versions.items():
            versions.add_row(package, Text(version) if version else Text("none", "dim"))
        console.print(versions)
        console.print(f"f8fx is tested on torch {', '.join(self.torch_supported)}.", highlight=False)
        for warning in self.warnings:
            console.print(_entry(Text("warning", "yellow"), warning))

        for device in self.devices:
            cores = "float8 tensor cores" if device.float8_tensor_cores else "no float8 tensor cores"
            console.print(
                f"\n[bold]{escape(device.name)}[/bold] ({device.hardware}, {cores})", highlight=False
            )
            width = 4 + max(map(len, device.recipes))
            for recipe, verdict in device.recipes.items():
                console.print(_entry(f"  {recipe}", verdict, width))
            console.print(_entry("  kernels", device.kernels, width))

        if not self.issues:
            console.print("\nNo known upstream bugs apply to these versions.")
            return
        console.print("\nKnown upstream bugs and limits of these versions")
        for issue in self.issues:
            ranges = f"torch {issue.torch}" + (f", triton {issue.triton}" if issue.triton else "")
            console.print(f"\n[bold]{issue.title}[/bold] [dim]({ranges})[/dim]", highlight=False)
            if issue.link:
                console.print(f"  {issue.link}", soft_wrap=True)
            console.print(_entry("  effect", issue.effect))
            console.print(_entry("  what to do", issue.workaround))


def _entry(label: str | Text, text: str, width: int = 12) -> Table:
    """A label and a text that wraps beside it."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(min_width=width)
    grid.add_column()
    grid.add_row(label, Text(text))
    return grid


def version_of(package: str) -> str | None:
    """The installed version of a distribution, or ``None``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpp_compiler() -> str | None:
    """The C++ compiler Inductor would find on this machine's path, or ``None``."""
    for candidate in (os.environ.get("CXX"), "g++", "clang++", "cl"):
        if candidate and (found := shutil.which(candidate)):
            return found
    return None


def runs(recipe: Recipe, device_type: str, hardware: Hardware) -> str:
    """Whether a recipe runs on a device: ``"yes"``, ``"emulated ..."`` or ``"no: ..."``."""
    if not hardware.float8_dtypes:
        return "no: the hardware has no float8 gemms, so nothing is converted"
    specs = [
        spec for role in ROLES if (gemm := recipe.gemm(role)) is not None for spec in (gemm.left, gemm.right)
    ]
    for spec in specs:
        if missing := lacks(hardware, spec):
            by_build = device_type == "cuda" and spec.dtype in hardware.float8_dtypes
            return f"no: {missing}" + (
                f" with a torch built for CUDA {torch.version.cuda}" if by_build else ""
            )
    if hardware.float8_tensor_cores:
        return "yes"
    rowwise = any(spec.granularity == "rowwise" for spec in specs)
    by = "f8fx" if rowwise and not supports_rowwise_scaled_mm(device_type) else "PyTorch"
    return f'emulated by {by} with select="all", for its numerics; "auto" converts nothing'


def _kernels(device: torch.device, hardware: Hardware, on_cpu: bool) -> str:
    if not hardware.float8_dtypes:
        return "none in float8"
    if device.type == "cpu" and not on_cpu:
        return "not checked (f8fx doctor --canaries does it)"
    return str(canary.verdict_on(device))


def diagnose(canaries: bool = False) -> Diagnosis:
    """Looks at this installation and this machine.

    Args:
        canaries: check the kernels that Inductor generates on the CPU as well; those on GPUs always are.
    """
    triton = canary.triton_version()
    torch_version = str(torch.__version__)
    versions = {
        "python": platform.python_version(),
        "f8fx": version_of("f8fx"),
        "torch": torch_version,
        "CUDA of torch": torch.version.cuda,
        "ROCm of torch": torch.version.hip,
        "triton": triton,
        "torchao": version_of("torchao"),
        "C++ compiler": cpp_compiler(),
    }
    warnings = []
    if unsupported := check_version():
        warnings.append(unsupported)
    if versions["f8fx"] is None:
        warnings.append('f8fx is not installed, so the name backend="f8fx" is unknown: pip install it')
    if versions["C++ compiler"] is None:
        warnings.append(
            "no C++ compiler found: Inductor needs one to compile for CPU (set CXX, or install g++)"
        )
    if torch.cuda.is_available() and triton is None:
        warnings.append("Triton is not installed: Inductor needs it to compile for this GPU")
    places = [("cpu", torch.device("cpu"))] + [
        (f"cuda:{index} {torch.cuda.get_device_name(index)}", torch.device("cuda", index))
        for index in range(torch.cuda.device_count())
    ]
    devices = []
    for name, device in places:
        hardware = of_device(device)
        verdicts = {preset: runs(recipe, device.type, hardware) for preset, recipe in PRESETS.items()}
        kernels = _kernels(device, hardware, canaries)
        devices.append(Device(name, hardware.name, hardware.float8_tensor_cores, verdicts, kernels))
    has_cuda = torch.cuda.is_available() and torch.version.hip is None
    issues = tuple(i for i in KNOWN_ISSUES if i.applies(torch_version, triton, has_cuda))
    return Diagnosis(versions, SUPPORTED_TORCH, tuple(warnings), tuple(devices), issues)
