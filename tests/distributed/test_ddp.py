"""DistributedDataParallel: its buckets are graphs like any other."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from f8fx import recording
from tests.distributed.harness import run_checks
from tests.distributed.models import assert_same, saved_bytes
from tests.distributed.test_fsdp_policies import Amaxes
from tests.helpers import Block, bf16, compiled, gradients, randn
from tests.long import with_long

DEPTH, HIDDEN = 2, 640


class Net(nn.Module):
    """Not ``nn.Sequential``: of a module of torch's own inside DDP, Dynamo compiles the parts one by one."""

    def __init__(self, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList([Block(256, HIDDEN) for _ in range(DEPTH)])
        self.to(bf16)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def parallel(checkpointed=False, **options):
    """With buckets so small that DDPOptimizer splits the model into several graphs."""
    model = DistributedDataParallel(Net(checkpointed), bucket_cap_mb=1)
    return model, compiled(model, fullgraph=False, **options)


#: Scales that a checkpointed block keeps: of two inputs and three weights, or of the rows of what its backward multiplies
#: again, an input of 16 rows and two weights. And amaxes of a block in a step: of two inputs, as gate and up
#: share theirs, three weights and three gradients, or of the rows and of the columns of each.
SCALES, AMAXES = {"tensorwise": 2 + 3, "rowwise": 16 + 2 * HIDDEN}, {"tensorwise": 8, "rowwise": 16}


def step(checkpointed, x, grad, **options):
    """Gradients of the first step, bytes that the second one saves, amaxes that it takes; how many graphs convert."""
    model, call = parallel(checkpointed, **options)
    with recording() as reports:
        found = gradients(model, call, x, grad)
    with Amaxes() as amaxes:
        y = call(x)
        saved = saved_bytes(y, model)
        y.backward(grad)
    converted = [report.converted for report in reports if report.converted]
    assert sum(converted) == (0 if "only_fqns" in options else 9 * DEPTH)
    found = {name.removeprefix("module."): value for name, value in found.items()}
    return found, saved, amaxes.count, len(converted)


def gradients_of_the_plain_model_and_no_more_saved_than_in_bf16():
    """With blocks that are checkpointed, too. The same data on all ranks: means are exact."""
    x, grad = randn(16, 256), randn(16, 256, grad=False, seed=1)
    bf16_saves = {
        checkpointed: step(checkpointed, x, grad, only_fqns=["none"])[1] for checkpointed in (False, True)
    }
    assert 0 < bf16_saves[True] < bf16_saves[False]
    for recipe in with_long(("rowwise",), "tensorwise"):
        model = Net()
        want = gradients(model, compiled(model, recipe=recipe), x, grad)
        found, saved, amaxes, graphs = step(False, x, grad, recipe=recipe)
        assert graphs > 1
        assert_same(want, found, recipe)
        assert 0 < saved <= bf16_saves[False], recipe
        assert amaxes == DEPTH * AMAXES[recipe], (recipe, amaxes)
        found, saved, amaxes, _ = step(True, x, grad, recipe=recipe)
        assert_same(want, found, f"{recipe}, checkpointed")
        assert saved == bf16_saves[True] + 4 * DEPTH * SCALES[recipe], (recipe, saved, bf16_saves)
        assert amaxes == DEPTH * AMAXES[recipe], (recipe, amaxes)


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


def a_module_of_torchs_own_is_to_be_compiled_first():
    """As `f8fx doctor` has it."""
    torch.manual_seed(0)
    layers, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).to(bf16), randn(16, 256)
    for wrapped, converted in (
        (compiled(DistributedDataParallel(layers), fullgraph=False), 0),
        (DistributedDataParallel(compiled(layers)), 5),
    ):
        torch.compiler.reset()
        with recording() as reports:
            wrapped(x.detach()).sum().backward()
        assert sum(report.converted for report in reports) == converted, reports


def test_two_ranks():
    run_checks(
        2,
        [
            a_module_of_torchs_own_is_to_be_compiled_first,
            gradients_of_the_plain_model_and_no_more_saved_than_in_bf16,
            *with_long((), weights_that_are_kept_have_the_same_gradients),
        ],
    )
