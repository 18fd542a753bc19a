"""torchrun --nproc-per-node 8 fsdp2.py"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from f8fx.fsdp import enable_float8_all_gather

device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


model = nn.Sequential(*(Block() for _ in range(2))).to(device, torch.bfloat16)

enable_float8_all_gather(model, recipe="tensorwise")  # before fully_shard
for block in model:
    block.compile(backend="f8fx", options={"recipe": "tensorwise"})
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    x = torch.randn(64, 256, device=device, dtype=torch.bfloat16)
    loss = (model(x) - x.roll(1, dims=-1)).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
