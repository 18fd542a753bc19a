"""What each accelerator can do in float8, and how fast: one table, plain data.

The passes read from here which float8 dtypes exist and which granularities ``torch._scaled_mm``
takes; the cost model reads the peaks. So ``explain(..., target="h100")`` works on a laptop with no GPU.
The figures are in :mod:`f8fx.hardware_table`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re

import torch

from .accelerator import Capability, Hardware
from .hardware_table import A100, CPU, HARDWARE, MI300X, NO_FLOAT8

__all__ = ["ALIGNMENT", "HARDWARE", "Capability", "Hardware", "aligned", "find", "names", "of_device"]

#: Both contracted and trailing sizes of a float8 gemm must be multiples of this (``_scaled_mm``).
ALIGNMENT = 16


def aligned(size: int) -> int:
    """The smallest multiple of :data:`ALIGNMENT` that is not below a size."""
    return -(-size // ALIGNMENT) * ALIGNMENT


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
    inside = {
        run: hw for run, hw in inside.items() if not any(run in other for other in inside if run != other)
    }
    if len({hw.name for hw in inside.values()}) == 1:
        return next(iter(inside.values()))
    gpus = [n for n, hw in known.items() if hw.name != "cpu"]  # which is near to "gpu"
    near = difflib.get_close_matches(wanted, gpus, n=1, cutoff=0.4)
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
        return _without_float8(CPU, device.type, device.type)
    if device.type != "cuda" or not torch.cuda.is_available():
        return CPU
    device_name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        arch = str(getattr(torch.cuda.get_device_properties(device), "gcnArchName", "")).split(":")[0]
        return MI300X if arch == MI300X.capability else _without_float8(MI300X, arch, device_name)
    major, minor = torch.cuda.get_device_capability(device)
    return _restrict_to_build(_of_capability((major, minor), device_name))


def _of_capability(capability: tuple[int, int], device_name: str) -> Hardware:
    """The table's entry for an NVIDIA GPU, by name if it has one, else the nearest by capability."""
    wanted = _canonical(device_name)
    nvidia = [(hw.capability, hw) for hw in HARDWARE.values() if isinstance(hw.capability, tuple)]
    named = [
        (len(name), hw)
        for known, hw in nvidia
        if known == capability
        for name in map(_canonical, (hw.name, *hw.aliases))
        if name in wanted
    ]
    if named:  # "H100 PCIe" and "H100", of "H200" and "H20"
        return max(named, key=lambda pair: pair[0])[1]
    if capability < (8, 9):
        return _without_float8(A100, capability, device_name)
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
        float8_dtypes=NO_FLOAT8,
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
