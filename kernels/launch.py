"""What every Triton kernel needs on the host: whether it can run here, its tile, its launch.

Triton is imported on the first launch, not before: this package also works where it is not
installed.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

log = logging.getLogger("f8fx.kernels")

#: Names of float8 types in Triton.
TRITON_FLOAT8: Mapping[torch.dtype, str] = {
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.float8_e4m3fnuz: "fp8e4b8",
    torch.float8_e5m2fnuz: "fp8e5b16",
}

#: What the kernels read.
SOURCES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Tile:
    """Shape of what one program handles, in elements of the source, and the warps that share it."""

    rows: int
    columns: int
    warps: int


#: A tile, or ``"auto"``: measure all candidates once per number of columns, types and options; ``None``: the
#: starting tile.
TileChoice = Tile | Literal["auto"] | None


def kernels(name: str) -> Any:
    """The module ``kernels.<name>_triton``.

    Raises:
        ImportError: Triton is not installed.
    """
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise ImportError(
            "f8fx's fused kernels need Triton, which is not installed; it comes with CUDA and ROCm builds of "
            "torch, or with `pip install triton`"
        ) from error
    return importlib.import_module(f"{__package__}.{name}_triton")


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not(x: Tensor, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels cannot make a ``dtype`` copy of ``x``, in one sentence; ``None`` where they can."""
    if x.dim() != 2:
        return f"the kernels take 2-D tensors, and this one has {x.dim()} dimensions"
    if x.dtype not in SOURCES:
        return f"the kernels read bfloat16, float16 and float32, not {x.dtype}"
    if dtype not in TRITON_FLOAT8:
        return f"the kernels write float8, not {dtype}"
    if interpreted():
        return None
    if x.device.type != "cuda":
        return f"Triton has no kernels for device {x.device.type!r}"
    return _unsupported(x.device, dtype)


@cache
def _unsupported(device: torch.device, dtype: torch.dtype) -> str | None:
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 9):
        return f"{torch.cuda.get_device_name(device)} has no conversions to float8"
    kernels("numerics")
    from triton.runtime import driver

    with torch.cuda.device(device):
        return unsupported_by_target(driver.active.get_current_target(), dtype)


def unsupported_by_target(target: Any, dtype: torch.dtype) -> str | None:
    """Why Triton cannot write ``dtype``, rightly rounded, on a ``GPUTarget``; ``None`` where it can.

    The ``fnuz`` types exist on AMD GPUs only. On sm_89, Triton before 3.9 takes float32 to float8 by way of
    float16: what lies just above the middle of two float8 numbers is rounded to the middle first, and
    then down (https://github.com/triton-lang/triton/pull/11753; this check can go with Triton 3.8).
    """
    import triton
    from triton.compiler.compiler import make_backend

    if TRITON_FLOAT8[dtype] not in make_backend(target).parse_options({}).supported_fp8_dtypes:
        return f"Triton has no {dtype} on {target.backend}:{target.arch}"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if target.backend == "cuda" and target.arch < 90 and version < (3, 9):
        return (
            f"Triton {triton.__version__} rounds twice on the way to float8 on {target.backend}:{target.arch}"
        )
    return None


@cache
def say_fallback(reason: str) -> None:
    """Logs, once per reason, that the definition runs instead of a kernel."""
    log.info("the definition runs in place of a fused kernel: %s", reason)


def on(device: torch.device) -> AbstractContextManager[None]:
    """Makes ``device`` the current one, on which Triton launches; nothing for the interpreter."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors; a small number for the interpreter."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is not below ``value``; at least 1."""
    return 1 << max(value - 1, 0).bit_length()


def ceil_div(value: int, divisor: int) -> int:
    """How many times ``divisor`` it takes to cover ``value``."""
    return -(-value // divisor)
