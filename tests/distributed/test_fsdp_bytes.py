"""What is really sent, and when."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from f8fx.fsdp import enable_float8_all_gather, precompute_scales
from tests.distributed.harness import run_checks
from tests.distributed.models import Setup, assert_same, batch, collectives, loss_of, train, whole, world_mesh
from tests.helpers import bf16


def step_of(model):
    """Collectives of one training step that is not the first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        with collectives() as sent:
            loss_of(model(batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return sent


def numel_of(model, converted):
    """Elements of this rank's shards that are, or are not, gathered in float8."""
    names = [
        n for n, _ in model.named_parameters() if ("blocks" in n and "norm" not in n and "bias" not in n)
    ]
    return sum(p.to_local().numel() for n, p in model.named_parameters() if (n in names) == converted)


def gathers_take_half_the_bytes():
    """Every weight travels twice a step, forward and backward; the root's once."""
    plain = step_of(Setup("tensorwise", world_mesh()).build())
    model = Setup("tensorwise", world_mesh(), True).build()
    sent = step_of(model)
    gathers = [[c for c in calls if c.op == "all_gather_into_tensor"] for calls in (plain, sent)]
    assert len(gathers[0]) == len(gathers[1]) == 2 * 2 + 1
    weights, rest = numel_of(model, True), numel_of(model, False)
    head = model.head.weight.to_local().numel()
    in_bf16 = 2 * (2 * weights + 2 * (rest - head) + head)
    assert sum(c.bytes for c in gathers[0]) == in_bf16
    assert sum(c.bytes for c in gathers[1]) == in_bf16 - 2 * weights
    # what goes with the converted weights: biases and norms, as bytes
    assert {c.dtype for c in gathers[1]} == {torch.uint8, bf16}
    reductions = [c for c in sent if c.op == "all_reduce"]
    assert [(c.numel, c.dtype) for c in reductions] == [(6, torch.int32)]
    assert not [c for c in plain if c.op == "all_reduce"]
    others = [
        [c for c in calls if c.op not in ("all_gather_into_tensor", "all_reduce")] for calls in (plain, sent)
    ]
    assert others[0] == others[1]  # gradients travel as they did


def one_reduction_a_forward_whatever_is_wrapped():
    """Also where the root itself holds converted weights, and with prefetching by hand."""
    for prefetch in (False, True):
        torch._dynamo.reset()
        model = Setup("tensorwise", world_mesh(), True, shard={"reshard_after_forward": False}).build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        counts = []
        for step in range(3):
            with collectives() as sent:
                if prefetch:
                    model.unshard()  # FSDP2's way to gather the root's own weights early: none is converted
                loss_of(model(batch(step))).backward()
                optimizer.step()
            counts.append(sum(c.op == "all_reduce" for c in sent))
        assert counts == [1, 1, 1], counts


def root_holds_converted_weights():
    """The first forward reduces twice: until its hook has run, f8fx cannot know that a forward has begun."""
    from torch.distributed.fsdp import fully_shard

    import f8fx
    from tests.distributed.models import OPTIONS, Net

    results = []
    for float8 in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Net().to(bf16)
        if float8:
            assert all(d.converted for d in enable_float8_all_gather(model))
        fully_shard(model, mesh=world_mesh())
        call = torch.compile(model, backend=f8fx.f8fx, options=OPTIONS)
        counts, seen = [], {}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            with collectives() as sent:
                y = call(batch(step))
                loss_of(y).backward()
                optimizer.step()
                optimizer.zero_grad()
            seen[f"output {step}"] = y.detach()
            counts.append(sum(c.op == "all_reduce" for c in sent))
        results.append(seen | {name: whole(p) for name, p in model.named_parameters()})
        assert counts == ([2, 1, 1] if float8 else [0, 0, 0]), counts
    assert_same(*results)


def changed_in_every_way(float8):
    """Weights changed by hand between forwards, in ways that leave no trace; each output must follow."""
    model = Setup("tensorwise", world_mesh(), float8).build()
    weight = model.blocks[0].gate.weight
    outputs = {}

    def forward(name):
        with torch.no_grad():
            outputs[name] = model(batch(0)).detach()

    forward("start")
    with torch.no_grad():
        weight.mul_(2)
    forward("in place")
    weight.data.add_(0.5)
    forward("through .data")
    if dist.get_rank() == 0:  # one rank only: no rank may wait for another that sees no change
        weight.to_local().detach()[0].fill_(9.0)
    forward("one row on one rank")
    local = model.state_dict()["blocks.0.gate.weight"].to_local()
    local.data.mul_(3)
    forward("through an alias")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    loss_of(model(batch(1))).backward()
    optimizer.step()
    forward("fused optimizer")
    model.load_state_dict({n: t * 0.5 for n, t in model.state_dict().items()})
    forward("loaded")
    model.unshard()
    model.reshard()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    outputs["a block called alone"] = model.blocks[0](batch(0)).detach()
    assert len({tuple(o.flatten()[:64].tolist()) for o in outputs.values()}) == len(outputs)
    return outputs


def scales_are_never_stale():
    assert_same(changed_in_every_way(False), changed_in_every_way(True))


def manual_scales():
    """One reduction for several forwards, and an error, not a stale scale, where the call was forgotten."""
    rank, results = dist.get_rank(), []
    for float8 in (False, True):
        model = Setup(
            "tensorwise", world_mesh(), float8, enable={"scales": "manual"} if float8 else {}
        ).build()
        if float8:
            _raises("has no scale yet", lambda model=model: model(batch(0)))
            model = Setup("tensorwise", world_mesh(), True, enable={"scales": "manual"}).build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with collectives() as sent:
                if float8:
                    precompute_scales(model)
                for part in range(2):
                    loss_of(model(batch(part, rank))).backward()
            assert sum(c.op == "all_reduce" for c in sent) == int(float8)
            optimizer.step()
            optimizer.zero_grad()
        results.append({name: whole(p) for name, p in model.named_parameters()})
        if float8:
            _raises("was changed since its scale was computed", lambda model=model: model(batch(0)))
    assert_same(*results)


def _raises(text, call):
    try:
        call()
    except RuntimeError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no error with {text!r}")


def ranks_that_differ_all_raise():
    """A filter on one rank only: an error everywhere at once, and no rank waits."""
    from tests.distributed.models import Net

    model = Net().to(bf16)
    before = copy.copy(dict(model.named_parameters()))
    _raises(
        "ranks would gather different weights",
        lambda: enable_float8_all_gather(model, filter_fqns=["gate"] if dist.get_rank() else []),
    )
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before)  # and nothing was changed


def optimizers_and_copies_are_plain():
    model = Setup("tensorwise", world_mesh(), True).build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, 1, optimizer)
    for state in optimizer.state.values():
        for value in state.values():
            assert type(value.to_local() if isinstance(value, DTensor) else value) is torch.Tensor
    weight = model.blocks[0].gate.weight
    for made in (weight + 0, torch.zeros_like(weight), weight.full_tensor(), weight.float() + 1):
        assert type(made.to_local() if isinstance(made, DTensor) else made) is torch.Tensor


def test_two_ranks():
    run_checks(
        2,
        [
            gathers_take_half_the_bytes,
            one_reduction_a_forward_whatever_is_wrapped,
            root_holds_converted_weights,
            scales_are_never_stale,
            manual_scales,
            ranks_that_differ_all_raise,
            optimizers_and_copies_are_plain,
        ],
    )
