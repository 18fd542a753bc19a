"""A stand-in for an H100, for which Inductor generates code where there is none.

Private interfaces of torch 2.11 to 2.15, see :mod:`benchmarks.codegen`.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from .rereads import L2_BYTES, PROCESSORS

_H100 = types.SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=PROCESSORS,
    total_memory=80 << 30,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    warp_size=32,
    max_threads_per_block=1024,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    shared_memory_per_block=49152,
    L2_cache_size=L2_BYTES,
    is_integrated=0,
    is_multi_gpu_board=0,
    gcnArchName="",
    uuid="stand-in",
)


@contextlib.contextmanager
def h100() -> Iterator[None]:
    """Lets Inductor believe that there is one H100, for code generation only."""
    import torch._inductor.scheduler as scheduler
    import torch._subclasses.fake_tensor as fake_tensor
    from torch._dynamo.device_interface import CudaInterface
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", 90, 32)
    active = types.SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_current_stream=lambda device=None: 0,
    )
    properties: Callable[..., Any] = lambda device=None: _H100  # noqa: E731
    stand_ins: dict[str, Any] = {
        "get_device_properties": properties,
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": lambda device=None: None,
    }
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any, create: bool = False) -> None:
            stack.enter_context(mock.patch.object(owner, name, value, create=create))

        for name, value in stand_ins.items():
            replace(torch.cuda, name, value)
            replace(CudaInterface, name, staticmethod(value))
        replace(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        replace(torch.cuda, "_lazy_init", lambda: None)
        replace(fake_tensor, "init_gpu_context", lambda device=None: None)
        # what the gradient of a slice becomes asks for one; autograd's guard of devices has none to switch to
        replace(fake_tensor.FakeTensor, "copy_", lambda tensor, *_, **__: tensor, create=True)
        # asked of a mask that chooses rows; as a method it looks for a device
        nonzero = torch.ops.aten.nonzero.default
        replace(fake_tensor.FakeTensor, "nonzero", lambda tensor: nonzero(tensor), create=True)
        replace(torch.cuda, "device", lambda device: contextlib.nullcontext())
        replace(torch.cuda, "_DeviceGuard", lambda index: contextlib.nullcontext())
        replace(CudaInterface, "get_compute_capability", staticmethod(lambda device=None: 90))
        replace(CudaInterface.Worker, "get_device_properties", staticmethod(properties))
        replace(CudaInterface.Worker, "current_device", staticmethod(lambda: 0))
        replace(scheduler, "has_triton", lambda *_: True)
        replace(driver, "_active" if hasattr(driver, "_active") else "active", active)
        yield
