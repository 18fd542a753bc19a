"""Float8 gathers through Inductor's own code generation."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.distributed.harness import run_checks
from tests.distributed.models import Setup, assert_same, train, world_mesh

pytestmark = pytest.mark.slow


def same_code_same_bits():
    for recipe in ("tensorwise", "rowwise"):
        results = []
        for float8 in (False, True):
            options = {"executor": "inductor"}
            model = Setup(recipe, world_mesh(), float8, options=options, net={"depth": 1}).build()
            results.append(train(model, 3, rank=dist.get_rank()))
        assert_same(*results, recipe)


def test_two_ranks():
    run_checks(2, [same_code_same_bits])
