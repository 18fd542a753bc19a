"""What is really sent under FSDP2 is what :mod:`f8fx.communication` predicts: every byte of every collective, in its dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from f8fx.communication import Sharded, World
from f8fx.options import Options
from tests.distributed.harness import run_checks
from tests.distributed.models import Net, Setup, batch, loss_of, world_mesh
from tests.distributed.sent import collectives
from tests.helpers import bf16
from tests.long import with_long

NAMES = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}


def measured(setup: Setup, dtype: torch.dtype = bf16) -> Counter[tuple[str, str, int]]:
    """Collective, dtype and bytes that this rank hands in, of a step when it is settled what gathers carry."""
    model = setup.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(3):
        with collectives() as sent:
            loss_of(model(batch(step, grad=False).to(dtype))).backward()
            optimizer.step()
            optimizer.zero_grad()
    names = [NAMES.get(c.op, c.op).replace("_into_tensor", "") for c in sent]
    dtypes = [str(c.dtype).removeprefix("torch.") for c in sent]
    return Counter(zip(names, dtypes, [c.bytes for c in sent], strict=True))


def on_gloo(dtypes: Collection[str]) -> str:
    """What these travel as: float8 as bytes, and what FSDP2 packs together, too."""
    (first, *others) = dtypes
    return "uint8" if others or first.startswith("float8") else first


def predicted(
    setup: Setup, float8: bool, world: World | None = None, **policy: torch.dtype
) -> Counter[tuple[str, str, int]]:
    """The same, from shapes."""
    world = world or World(dist.get_world_size())
    with torch.device("meta"):
        model = Net(**setup.net).to(setup.dtype)
    options = Options.parse({"recipe": setup.recipe, "filter_fqns": ["head"], "target": "cpu"})
    calls = Sharded.of(model, world, options, **policy).calls(
        float8, copies=setup.enable.get("copies", "auto")
    )
    return Counter((call.op, on_gloo(call.bytes), sum(call.bytes.values())) for call in calls)


def compare(
    recipe: str, dtype: torch.dtype = bf16, enable=None, shard=None, plain: bool = True, **policy: torch.dtype
) -> None:
    """With float8 gathers, and without, which is the same for all recipes."""
    for float8 in (False, True) if plain else (True,):
        setup = Setup(
            recipe, world_mesh(), float8, dtype, shard=shard or {}, enable=(enable or {}) if float8 else {}
        )
        real, model = measured(setup, dtype), predicted(setup, float8, **policy)
        assert real == model, (recipe, enable, float8, real - model, model - real)
        assert sum(real.values()) == 2 * 2 + 1 + 3 + float8


def tensorwise():
    compare("tensorwise")


def rowwise():
    compare("rowwise", plain=False)
    for recipe in with_long((), "rowwise_with_gw_hp"):
        compare(recipe, plain=False)
    compare("rowwise", enable={"copies": "both"}, plain=False)


def frozen_blocks():
    """One, so that FSDP2 gathers it for a backward that it has not; two, of which that happens to one; all."""
    for frozen in with_long((2,), 1, 3):
        for float8 in (False, True):
            setup = Setup("rowwise", world_mesh(), float8, net={"depth": 3, "frozen": frozen})
            real, model = measured(setup), predicted(setup, float8)
            assert real == model, (frozen, float8, real - model, model - real)


def mixed_precision():
    policy = {"param_dtype": bf16, "reduce_dtype": torch.float32}
    compare("tensorwise", torch.float32, shard={"mp_policy": MixedPrecisionPolicy(**policy)}, **policy)


def replicas():
    """HSDP on four ranks; the numbers of its groups are all even."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for recipe in ("tensorwise", "rowwise"):
        for float8 in (False, True):
            setup = Setup(recipe, mesh, float8)
            real, model = measured(setup), predicted(setup, float8, World(2, replicate=2))
            assert real == model, (recipe, float8, real - model, model - real)


@pytest.mark.long
def test_replicas():
    run_checks(4, [replicas])


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
def test_the_prediction_is_exact(world: int):
    """On 3 ranks no size divides evenly, so padding travels too."""
    run_checks(world, [rowwise, *with_long((), tensorwise, frozen_blocks, mixed_precision)])
