"""FSDP2 with float8 gathers: the bits of FSDP2 with high-precision gathers, and of one process."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.distributed.harness import run_checks
from tests.distributed.models import RECIPES, Setup, assert_same, train, world_mesh


def same_as_one_process():
    """All ranks see the same data, so that the mean of their gradients is the gradient of one."""
    for recipe in RECIPES:
        one = train(Setup(recipe).build())
        plain = train(Setup(recipe, world_mesh()).build())
        float8 = train(Setup(recipe, world_mesh(), float8=True).build())
        assert_same(one, plain, f"{recipe}: one process, FSDP2")
        assert_same(plain, float8, f"{recipe}: FSDP2, float8 gathers")


def same_with_different_data_and_sgd():
    rank = dist.get_rank()
    for recipe in RECIPES:
        results = []
        for float8 in (False, True):
            model = Setup(recipe, world_mesh(), float8).build()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            results.append(train(model, optimizer=optimizer, rank=rank))
        assert_same(*results, recipe)


def test_two_ranks():
    run_checks(2, [same_as_one_process, same_with_different_data_and_sgd])
