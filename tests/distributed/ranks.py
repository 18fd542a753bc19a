"""Running checks on several ranks: gloo, one process a rank, started once for a file of tests.

A *check* is a function without arguments that asserts. Every rank runs all checks of a file in order; a
test then asks for the outcome of one of them.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

Check = Callable[[], None]


def outcomes(world_size: int, checks: Sequence[Check], folder: Path) -> dict[str, str]:
    """Runs the checks on new processes; what went wrong on any rank, by name of the check."""
    context = multiprocessing.spawn(_run, (world_size, list(checks), str(folder)), world_size, join=False)
    context.join(timeout=300)
    found: dict[str, str] = {}
    for rank in range(world_size):
        path = folder / f"outcome{rank}"
        of_rank = torch.load(path) if path.exists() else {check.__name__: "did not end" for check in checks}
        for name, error in of_rank.items():
            if error:
                found[name] = found.get(name, "") + f"rank {rank}:\n{error}\n"
    for process in context.processes:
        process.kill()
    return found


def _run(rank: int, world_size: int, checks: list[Check], folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    found = {}
    for check in checks:
        try:
            check()
            found[check.__name__] = ""
        except Exception:
            found[check.__name__] = traceback.format_exc()
        torch.save(found, f"{folder}/outcome{rank}")
        dist.barrier()
    dist.destroy_process_group()


def outcome_fixture(world_size: int, checks: Sequence[Check]):
    """A fixture that runs the checks, when the first test of the file asks for it."""

    @pytest.fixture(scope="module")
    def outcome(tmp_path_factory):
        return outcomes(world_size, checks, tmp_path_factory.mktemp("ranks"))

    return outcome


def simple_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    placements: Sequence[Placement] = (Shard(0),),
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Shards every parameter and gathers it where it is read, as TorchTitan's SimpleFSDP does.

    Parameters become DTensors; reading one redistributes it, in the graph. In place.
    """
    replicate = [Replicate()] * mesh.ndim
    average = [Partial("avg")] * mesh.ndim

    def gathered(name: str) -> property:
        def read(module: nn.Module) -> torch.Tensor:
            whole = module._parameters[name].redistribute(
                placements=replicate, forward_dtype=param_dtype, backward_dtype=reduce_dtype
            )
            return whole.to_local(grad_placements=average)

        return property(read)

    for module in model.modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if not names:
            continue
        for name in names:
            sharded = distribute_tensor(module._parameters[name].data, mesh, list(placements))
            module._parameters[name] = nn.Parameter(sharded)
        kind = type(module)
        module.__class__ = type(f"SimpleFSDP{kind.__name__}", (kind,), {n: gathered(n) for n in names})
    return model


class Sent(TorchDispatchMode):
    """Counts what collectives are given, by operator and dtype: calls and bytes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple[str, torch.dtype], int] = {}
        self.bytes: dict[tuple[str, torch.dtype], int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket)
        if name.startswith("_c10d_functional.") and "wait" not in name:
            key = (name.removeprefix("_c10d_functional."), args[0].dtype)
            self.calls[key] = self.calls.get(key, 0) + 1
            self.bytes[key] = self.bytes.get(key, 0) + result.numel() * result.element_size()
        return result
