"""The weights of experts under FSDP2: gathered in float8, each half of a step its own copy of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import f8fx
from f8fx.communication import Sharded, World
from f8fx.fsdp import enable_float8_all_gather
from f8fx.options import Options
from f8fx.report import log
from tests.distributed.harness import run_checks
from tests.distributed.models import OPTIONS, assert_same, whole, world_mesh
from tests.distributed.sent import Sent, collectives
from tests.helpers import BatchedExperts, Experts, bf16, randn
from tests.long import with_long

NAMES = ("gate", "up", "down")
COUNTS = torch.tensor([16, 0, 20, 12])


class Arrived(Experts):
    """Of rows whose number is known only at run time, as after an all-to-all."""

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        chosen = torch.arange(x.shape[0]) < counts.sum()
        y = super().forward(x[chosen], counts)
        return torch.zeros_like(x).masked_scatter(chosen[:, None], y)


class Net(nn.Module):
    """Layers of experts with a residual connection each."""

    says = True  # of its layout what is so

    def __init__(self, turned: bool, experts: int = 4, depth: int = 2, kind: type[Experts] = Experts) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind(experts, turned=turned) for _ in range(depth)])
        for block in self.blocks:
            block.is_transposed = turned is self.says

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x, counts)
        return x


def bytes_of(sent: Sequence[Sent], op: str) -> int:
    return sum(c.bytes for c in sent if op in c.op)


def predicted(recipe: str = "rowwise", turned: bool = False, option: str = "convert") -> list[int]:
    """What a step is said to send, from shapes alone."""
    with torch.device("meta"):
        model = Net(turned).to(bf16)
    options = Options.parse({"recipe": recipe, "experts": option, "target": "cpu"})
    calls = Sharded.of(model, World(dist.get_world_size()), options).calls(float8=True)
    found: Counter[tuple[str, bool]] = Counter()
    for call in calls:
        found[call.op, call.backward] += sum(call.bytes.values())
    return [found["all_gather", False], found["all_gather", True], found["all_reduce", False]]


def spread(model: nn.Module, mesh: DeviceMesh) -> None:
    """As expert parallelism does: every rank has some of the experts."""
    for block in model.blocks:
        for name, weight in list(block.named_parameters()):
            setattr(block, name, nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)])))


def steps(
    gathers: str | None,
    *,
    turned: bool = False,
    experts: int = 4,
    dim: int = 0,
    recipe: str = "rowwise",
    option: Any = "convert",
    dtype: torch.dtype = bf16,
    mesh: DeviceMesh | None = None,
    kind: type[Experts] = Experts,
    **shard: Any,
) -> tuple[list[list[int]], dict[str, Tensor]]:
    """Bytes gathered in forward and backward, and reduced in the forward, of three steps; and all that was computed."""
    torch.manual_seed(0)
    model = Net(turned, experts, kind=kind).to(dtype)
    if mesh is None:
        fsdp, first, count = world_mesh(), 0, experts
    else:
        spread(model, mesh["ep"])
        fsdp, count = mesh["fsdp"], experts // mesh["ep"].size()
        first = count * mesh["ep"].get_local_rank()
    if gathers is not None:
        decisions = enable_float8_all_gather(model, recipe, experts=option, copies=gathers)  # type: ignore[arg-type]
        assert len(decisions) == 6 and all(d.converted for d in decisions), decisions
    placement = {"shard_placement_fn": lambda _: Shard(dim)} if dim else {}
    for block in model.blocks:
        block.compile(backend=f8fx.f8fx, options={**OPTIONS, "recipe": recipe, "experts": option})
        fully_shard(block, mesh=fsdp, **placement, **shard)
    fully_shard(model, mesh=fsdp, **placement, **shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    counts, found = [], {}
    own = COUNTS[first : first + count]
    for step in range(3):
        x = randn(48, 32, seed=10 * step + dist.get_rank())
        with collectives() as forward:
            y = model(x, own)
        with collectives() as backward:
            y[: own.sum()].float().pow(2).mean().backward()
        counts.append(
            [bytes_of(forward, "gather"), bytes_of(backward, "gather"), bytes_of(forward, "reduce")]
        )
        found |= {f"output {step}": y.detach(), f"grad {step} x": x.grad}
        found |= {f"grad {step} {n}": whole(p.grad) for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return counts, found


def each_half_gathers_its_copy() -> None:
    cases: tuple[dict[str, Any], ...] = ({}, {"turned": True, "recipe": "rowwise_with_gw_hp"})
    for case in with_long(({"option": "with_grad_weight"},), *cases):
        (whole_step, *_), wanted = steps(None, **case)
        sent, found = steps("auto", **case)
        assert_same(wanted, found, str(case))
        half = [count // 2 for count in whole_step[:2]]
        assert whole_step == [*sent[0][:2], 0]
        assert sent[1][:2] == half  # and in one reduction the ranks settled what gathers carry
        assert sent[2] == [*half, sent[0][2]] == predicted(**case), case


def rows_that_arrive() -> None:
    """Under ``"auto"`` too, what is gathered in float8 is multiplied in float8."""
    for select in ("all", "auto"):
        with (
            torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
            mock.patch.dict(OPTIONS, select=select),
        ):
            _, found = steps("auto", kind=Arrived)
            if select == "all":
                _, wanted = steps(None, kind=Arrived)
        assert_same(wanted, found, select)


def batches_of_equal_rows() -> None:
    """In batched matmuls: what they are gathered for are the grouped ones."""
    case: dict[str, Any] = {"kind": BatchedExperts, "turned": True, "option": "with_grad_weight"}
    _, wanted = steps(None, **case)
    sent, found = steps("auto", **case)
    assert_same(wanted, found)
    assert sent[2] == predicted(turned=True)


def layouts_that_are_not_said() -> None:
    """The bits are the same, but each half finds its copy in the other's place."""
    _, wanted = steps(None)
    with mock.patch.object(Net, "says", False), mock.patch.object(log, "warning") as warning:
        (first, *others), found = steps("auto", turned=False)
    assert_same(wanted, found)
    assert [count[:2] for count in others] == [first[:2]] * 2
    assert [call.args[1] for call in warning.call_args_list] == [
        f"blocks.{i}.{n}" for i in (0, 1) for n in NAMES
    ]


def other_shards() -> None:
    """Ranks that have unequal numbers of experts, or none, and a part of every expert; float32 weights."""
    policy = MixedPrecisionPolicy(param_dtype=bf16)
    for case in (
        {"experts": 3, "dtype": torch.float32, "mp_policy": policy},
        {"dim": 1},
        {"dim": 2, "turned": True, "reshard_after_forward": False},
    ):
        compare(case)


def some_have_none() -> None:
    compare({"turned": True})  # four experts on three ranks: 2, 2, 0
    compare({"experts": 2})


def compare(case: dict[str, Any]) -> None:
    _, wanted = steps(None, **case)
    _, found = steps("auto", **case)
    assert_same(wanted, found, str(case))


def of_expert_parallel_ranks() -> None:
    """Experts spread over ranks, and the shards of each rank's over others."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    for case in ({}, {"turned": True}, {"experts": 2}):  # of one expert, which one rank of two holds
        _, wanted = steps(None, mesh=mesh, **case)
        _, found = steps("auto", mesh=mesh, **case)
        assert_same(wanted, found, str(case))


def test_fsdp_experts() -> None:
    run_checks(
        2,
        [
            each_half_gathers_its_copy,
            *with_long((), rows_that_arrive, batches_of_equal_rows, other_shards, layouts_that_are_not_said),
        ],
    )


@pytest.mark.long
def test_fsdp_experts_on_three_ranks() -> None:
    run_checks(3, [some_have_none])


@pytest.mark.long
def test_fsdp_experts_that_are_spread() -> None:
    run_checks(4, [of_expert_parallel_ranks])
