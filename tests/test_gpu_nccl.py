"""On a GPU, with NCCL. One rank sends nothing, but runs on all of FSDP2's streams: what gloo on CPUs cannot show.

``pytest -m gpu`` runs it; skipped everywhere else.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from f8fx import f8fx
from f8fx.fsdp import enable_float8_all_gather
from f8fx.hardware import of_device
from tests.helpers import Block, bf16

HAVE_GPU = torch.cuda.is_available() and of_device(torch.device("cuda")).float8_tensor_cores
HAVE_NCCL = dist.is_available() and dist.is_nccl_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (HAVE_GPU and HAVE_NCCL), reason="no GPU with float8 tensor cores, or no NCCL"),
]

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
OPTIONS: dict[str, Any] = {"select": "all", "strict": True, "merge": "never"}


def blocks(device: str, dtype: torch.dtype) -> nn.Sequential:
    """The same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(256, 512) for _ in range(3))).to(device, dtype)


def steps(model: nn.Module, device: str, count: int = 4) -> dict[str, Tensor]:
    """Outputs, and the weights after the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda")
    found = {}
    for step in range(count):
        x = torch.randn(128, 256, generator=torch.Generator().manual_seed(step)).to(device, bf16)
        y = model(x)
        y.float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"output {step}"] = y.detach().clone()
    return found | {name: whole(p) for name, p in model.named_parameters()}


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def gathered(
    recipe: str, mesh: DeviceMesh, device: str, float8: bool, dtype: torch.dtype
) -> dict[str, Tensor]:
    """FSDP2, of float32 weights with a policy that rounds them."""
    policy = MixedPrecisionPolicy(param_dtype=bf16) if dtype != bf16 else MixedPrecisionPolicy()
    torch._dynamo.reset()
    model = blocks(device, dtype)
    if float8:
        enable_float8_all_gather(model, recipe)
    for block in model:
        block.compile(backend=f8fx, options={**OPTIONS, "executor": "eager", "recipe": recipe})
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return steps(fully_shard(model, mesh=mesh, mp_policy=policy), device)


def carries_float8(device: str) -> None:
    """As it is, without a view of other bytes."""
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        sent = torch.arange(256, device=device).to(torch.uint8).view(dtype)
        received = torch.empty_like(sent)
        dist.all_gather_into_tensor(received, sent)
        in_graphs = all_gather_tensor(sent, 0, dist.group.WORLD)
        for tensor in (received, in_graphs.clone()):
            assert torch.equal(tensor.view(torch.uint8), sent.view(torch.uint8)), dtype


def one_rank(_: int, folder: str, backend: str, device: str) -> None:
    """FSDP2's float8 gathers have the bits of high-precision ones. In a graph of one rank there are none."""
    store = dist.FileStore(f"{folder}/store", 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    mesh = init_device_mesh(device, (1,))
    if backend == "nccl":
        carries_float8(device)
    for recipe in RECIPES:
        for dtype in (bf16, torch.float32):
            want, found = (gathered(recipe, mesh, device, float8, dtype) for float8 in (False, True))
            different = [name for name, value in want.items() if not torch.equal(value, found[name])]
            assert not different, (recipe, dtype, different)
    dist.destroy_process_group()


def test_one_rank(tmp_path):
    torch.multiprocessing.spawn(one_rank, (str(tmp_path), "nccl", "cuda"), nprocs=1)
