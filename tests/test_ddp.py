"""DistributedDataParallel: its buckets are graphs like any other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from f8fx import recording
from tests.helpers import Block, bf16, compiled, randn


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(256, 384) for _ in range(4)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_ddp_gives_the_gradients_of_the_plain_model(one_process):
    """With buckets so small that DDPOptimizer splits the model into several graphs."""
    torch.manual_seed(0)
    model = Net().to(bf16)
    grad = randn(16, 256, grad=False, seed=1)
    compiled(model)(randn(16, 256)).backward(grad)
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    with recording() as reports:
        compiled(ddp, fullgraph=False)(randn(16, 256)).backward(grad)
    assert len(reports) > 1 and sum(r.converted for r in reports) == 36
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, want[name]), name
