"""DistributedDataParallel: its buckets are graphs like any other."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from f8fx import recording
from tests.distributed.harness import run_checks
from tests.distributed.models import assert_same, saved_bytes
from tests.helpers import Block, bf16, compiled, gradients, randn


class Net(nn.Module):
    """Not ``nn.Sequential``: of a module of torch's own inside DDP, Dynamo compiles the parts one by one."""

    def __init__(self, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList([Block(256, 384) for _ in range(3)])
        self.to(bf16)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def parallel(checkpointed=False, **options):
    """With buckets so small that DDPOptimizer splits the model into several graphs."""
    model = DistributedDataParallel(Net(checkpointed), bucket_cap_mb=1)
    return model, compiled(model, fullgraph=False, **options)


def gradients_of_the_plain_model_and_no_more_saved_than_in_bf16():
    """The same data on all ranks: means are exact."""
    x, grad = randn(16, 256), randn(16, 256, grad=False, seed=1)
    model = Net()
    want = gradients(model, compiled(model), x, grad)
    model, call = parallel()
    with recording() as reports:
        found = gradients(model, call, x, grad)
    assert len(reports) > 1 and sum(r.converted for r in reports) == 27
    assert_same(want, {name.removeprefix("module."): value for name, value in found.items()})
    saved = saved_bytes(call(x), model)
    model, call = parallel(only_fqns=["none"])
    assert 0 < saved <= saved_bytes(call(x), model)


def weights_that_are_kept_have_the_same_gradients():
    """DDPOptimizer calls each part that it has compiled with fake tensors, to know what the next one is given."""
    x, grad = randn(16, 256), randn(16, 256, grad=False, seed=1)
    model, call = parallel()
    want = gradients(model, call, x, grad)
    with torch.no_grad():
        output = call(x)
    model, call = parallel(weights="reused")
    for _ in range(2):
        assert_same(want, gradients(model, call, x, grad))
    model, call = parallel(weights="cached")
    with torch.no_grad():
        assert torch.equal(call(x), output) and torch.equal(call(x), output)


def checkpointed_blocks_save_what_they_save_in_bf16_and_scales():
    x, grad = randn(16, 256), randn(16, 256, grad=False, seed=1)
    model = Net()
    want = gradients(model, compiled(model), x, grad)
    model, call = parallel(checkpointed=True)
    with recording() as reports:
        found = gradients(model, call, x, grad)
    assert sum(r.converted for r in reports) == 27
    assert_same(want, {name.removeprefix("module."): value for name, value in found.items()})
    saved = saved_bytes(call(x), model)
    model, call = parallel(checkpointed=True, only_fqns=["none"])
    scales = 3 * (2 + 3)  # of a block: two inputs and three weights, 4 bytes each
    assert saved == saved_bytes(call(x), model) + 4 * scales


def test_two_ranks():
    run_checks(
        2,
        [
            gradients_of_the_plain_model_and_no_more_saved_than_in_bf16,
            weights_that_are_kept_have_the_same_gradients,
            checkpointed_blocks_save_what_they_save_in_bf16_and_scales,
        ],
    )
