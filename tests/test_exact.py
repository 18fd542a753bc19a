"""Random networks whose rewritten graphs, run with float8 numbers that do not round, compute what the networks do."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from f8fx import recording
from f8fx.options import Options
from tests.exact import exact
from tests.helpers import compiled, sqnr
from tests.long import with_long
from tests.random_nets import random_case
from tests.wide_nets import wide_case

SCALED_MM = torch.ops.aten._scaled_mm.default
#: dB, of float32 networks.
CLOSE = 80
#: Such as the gradient of a bias of keys, which softmax does not see.
NOTHING = 1e-4


def results(function: Any, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Outputs, and the gradients of the input and of all parameters."""
    torch.manual_seed(1)
    outputs = [each for each in tree_leaves(function(x)) if isinstance(each, Tensor)]
    found = {f"output {i}": each.detach() for i, each in enumerate(outputs)}
    to_train = [each for each in outputs if each.requires_grad]
    if to_train:
        torch.autograd.backward(to_train, [torch.randn_like(each) for each in to_train])
    leaves = {"input": x, **dict(model.named_parameters())}
    return found | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def compare(model: nn.Module, x: Tensor, **options: Any) -> None:
    model, x = model.float(), x.detach().float().requires_grad_(x.requires_grad)
    recipe = replace(Options.parse(options).recipe, convert_dtypes=(torch.float32,))
    twin = copy.deepcopy(model), x.detach().clone().requires_grad_(x.requires_grad)
    want = results(twin[0], *twin)
    with exact() as replaced, recording() as reports:
        got = results(compiled(model, **{**options, "recipe": recipe}), model, x)
    assert (SCALED_MM in replaced) == any(report.converted for report in reports)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].shape == value.shape and got[name].dtype == value.dtype
        if value.norm() + got[name].norm() > NOTHING:
            assert sqnr(value, got[name]) > CLOSE, (name, sqnr(value, got[name]), options)


@pytest.mark.parametrize("case", [random_case, wide_case])
@pytest.mark.parametrize("seed", with_long(range(2), *range(2, 100)))
def test_random_networks(case, seed):
    for recipe in (None, "tensorwise"):
        model, x, options = case(seed)
        compare(model, x, **options | ({"recipe": recipe} if recipe else {}))
