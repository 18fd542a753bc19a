"""A model, its sharding and a few training steps, for the FSDP2 tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import f8fx
from f8fx.fsdp import enable_float8_all_gather
from f8fx.torch_private import storage_key
from tests.helpers import Block, bf16

DIM, HIDDEN = 64, 96
OPTIONS = {"executor": "eager", "select": "all", "strict": True}
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


class Net(nn.Module):
    """Blocks, of which the first may be frozen, and a head that is compiled with nothing and stays in high precision."""

    def __init__(self, dim: int = DIM, hidden: int = HIDDEN, depth: int = 2, frozen: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(dim, hidden) for _ in range(depth)])
        self.head = nn.Linear(dim, 32, bias=False)
        self.blocks[:frozen].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class Setup:
    """How a model is built; the defaults are those of one process."""

    recipe: str = "tensorwise"
    mesh: DeviceMesh | None = None
    float8: bool = False
    dtype: torch.dtype = bf16
    shard: dict[str, Any] = field(default_factory=dict)
    enable: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    net: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Net:
        """The same weights for every setup of the same sizes."""
        torch.manual_seed(0)
        model = Net(**self.net).to(self.dtype)
        return self.apply(model)

    def apply(self, model: Net) -> Net:
        """Float8 gathers, compile and sharding, in the order the documentation gives."""
        if self.float8:
            enable_float8_all_gather(model, self.recipe, filter_fqns=["head"], **self.enable)
        for block in model.blocks:
            block.compile(backend=f8fx.f8fx, options={**OPTIONS, "recipe": self.recipe, **self.options})
            if self.mesh is not None:
                fully_shard(block, mesh=self.mesh, **self.shard)
        if self.mesh is not None:
            fully_shard(model, mesh=self.mesh, **self.shard)
        return model


def world_mesh() -> DeviceMesh:
    """All ranks in one dimension."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def batch(step: int, rank: int = 0, rows: int = 16, grad: bool = True) -> Tensor:
    """[rows, DIM], its own for each step and rank.

    Args:
        grad: it wants a gradient, as what the blocks behind the first one read does: all blocks are then one graph.
    """
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(rows, DIM, generator=generator).to(bf16).requires_grad_(grad)


def loss_of(y: Tensor) -> Tensor:
    """A scalar with gradients everywhere."""
    return y.float().pow(2).mean()


def whole(tensor: Tensor) -> Tensor:
    """A copy of the tensor without its sharding."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def train(
    model: nn.Module, steps: int = 5, optimizer: Any = None, rank: int = 0, dtype: torch.dtype = bf16
) -> dict[str, Tensor]:
    """Outputs of every step, gradients of the first, weights after the last."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: dict[str, Tensor] = {}
    for step in range(steps):
        y = model(batch(step, rank).to(dtype))
        loss_of(y).backward()
        seen[f"output {step}"] = y.detach()
        if step == 0:
            seen |= {f"grad {n}": whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return seen | {f"weight {n}": whole(p) for n, p in model.named_parameters()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], what: str = "") -> None:
    """Every tensor has the same bits, and is finite: a NaN would hide what came before it."""
    for name, tensor in (*a.items(), *b.items()):
        assert tensor.isfinite().all(), (what, name)
    assert a.keys() == b.keys(), (what, a.keys() ^ b.keys())
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, f"{what}: {different}"


def names(decisions: Sequence[Any]) -> dict[str, str]:
    """fqn -> reason."""
    return {decision.fqn: decision.reason for decision in decisions}


def saved_bytes(y: Tensor, model: nn.Module) -> int:
    """Bytes that compiled graphs keep for the backward, beside parameters and what FSDP2 has freed."""
    own = {storage_key(_local(parameter)) for parameter in model.parameters()}
    pending, seen, kept = [y.grad_fn], set(), {}
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [source for source, _ in node.next_functions]
        for tensor in node.saved_tensors if "CompiledFunction" in type(node).__name__ else ():
            if storage_key(tensor) not in own:
                kept[storage_key(tensor)] = tensor.untyped_storage().size()
    return sum(kept.values())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
