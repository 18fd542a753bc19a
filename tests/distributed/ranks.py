"""Running checks on several ranks: gloo, one process a rank, started once for a file of tests.

A *check* is a function without arguments that asserts. Every rank runs all checks of a file in order; a
test then asks for the outcome of one of them.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.multiprocessing.spawn import ProcessException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Check = Callable[[], None]


def outcomes(world_size: int, checks: Sequence[Check], folder: Path) -> dict[str, str]:
    """Runs the checks on new processes; what went wrong on any rank, by name of the check."""
    context = multiprocessing.spawn(_run, (world_size, list(checks), str(folder)), world_size, join=False)
    # a process that ends early leaves no outcome of its later checks, and that is what is reported
    with contextlib.suppress(ProcessException):
        while not context.join(timeout=300):
            pass
    found: dict[str, str] = {}
    for rank in range(world_size):
        path = folder / f"outcome{rank}"
        of_rank = {check.__name__: "did not end" for check in checks}
        of_rank |= torch.load(path) if path.exists() else {}
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
    dim: int = 0,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard: bool = False,
) -> nn.Module:
    """Shards every parameter and gathers it where it is read, as TorchTitan's SimpleFSDP does.

    Parameters become DTensors; reading one redistributes it, in the graph. In place.

    Args:
        dim: the sharded dimension.
        param_dtype, reduce_dtype: what parameters are gathered and gradients reduced in.
        reshard: gathers are redone in the backward, by checkpointing.
    """
    replicate = [Replicate()] * mesh.ndim
    average = [Partial("avg")] * mesh.ndim

    def gathered(name: str) -> property:
        def whole(parameter: DTensor) -> torch.Tensor:
            found = parameter.redistribute(
                placements=replicate, forward_dtype=param_dtype, backward_dtype=reduce_dtype
            )
            return found.to_local(grad_placements=average)

        def read(module: nn.Module) -> torch.Tensor:
            parameter = module._parameters[name]
            if not reshard:
                return whole(parameter)
            return checkpoint(whole, parameter, use_reentrant=False, context_fn=_redo_gathers)

        return property(read)

    for module in model.modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if not names:
            continue
        for name in names:
            data = module._parameters[name].data
            placements = [Shard(dim % data.dim())] * mesh.ndim
            module._parameters[name] = nn.Parameter(distribute_tensor(data, mesh, placements))
        kind = type(module)
        module.__class__ = type(f"SimpleFSDP{kind.__name__}", (kind,), {n: gathered(n) for n in names})
    return model


def _redo_gathers():
    redone = (
        torch.ops._c10d_functional.all_gather_into_tensor.default,
        torch.ops._c10d_functional.wait_tensor.default,
        torch.ops.aten._to_copy.default,
    )

    def policy(context, func, *args, **kwargs):
        return CheckpointPolicy.MUST_RECOMPUTE if func in redone else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Sent(TorchDispatchMode):
    """Counts what collectives are given, by operator and dtype: calls and bytes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple[str, torch.dtype], int] = {}
        self.bytes: dict[tuple[str, torch.dtype], int] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled code runs under such a mode; under others it is compiled anew, which Dynamo refuses."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket)
        if name.startswith("_c10d_functional.") and "wait" not in name:
            # Inductor reduces in place
            key = (name.removeprefix("_c10d_functional.").removesuffix("_"), args[0].dtype)
            self.calls[key] = self.calls.get(key, 0) + 1
            self.bytes[key] = self.bytes.get(key, 0) + result.numel() * result.element_size()
        return result
