"""What is really sent, and when."""

from __future__ import annotations

import copy
import gc
import weakref
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from f8fx.fsdp import enable_float8_all_gather, precompute_scales
from f8fx.fsdp.weight_scales import WeightScales
from tests.distributed.harness import run_checks
from tests.distributed.models import Setup, assert_same, batch, loss_of, train, whole, world_mesh
from tests.distributed.sent import collectives
from tests.helpers import bf16
from tests.long import with_long


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


def kept_for_the_backward(model):
    """Bytes of the weights' shapes that autograd keeps after a forward."""
    pending, seen, kept = [model(batch(0)).grad_fn], set(), []
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [source for source, _ in node.next_functions]
        if "CompiledFunction" in type(node).__name__:
            kept += [
                t.untyped_storage().size() for t in node.saved_tensors if 16 not in t.shape and t.dim() == 2
            ]
    assert len(kept) == 6
    return sum(kept)


def no_weight_outlives_its_forward():
    """What FSDP2 frees is freed: no copy made of it, transposed say, is kept for the backward."""
    for recipe, sent in with_long((("tensorwise", "auto"), ("rowwise", "auto")), ("rowwise", "both")):
        model = Setup(recipe, world_mesh(), True, enable={"copies": sent}).build()
        assert kept_for_the_backward(model) == 0
        train(model, 1)
        assert kept_for_the_backward(model) == 0  # now of gathers that carry one copy


def trained_models_are_freed():
    """Also what is on the device alone: a second model in the same process finds the memory of the first."""
    for recipe in ("tensorwise", "rowwise"):
        model = Setup(recipe, world_mesh(), True).build()
        train(model, 3)
        left = [weakref.ref(part) for part in (model, model.blocks[0], model.blocks[1].gate)]
        del model
        gc.collect()
        assert [reference() for reference in left] == [None, None, None]


def one_reduction_whatever_is_wrapped():
    """Also where the root itself holds converted weights, and with prefetching by hand."""
    usual = (True, "step"), (False, "forward")
    for prefetch, scales in with_long(usual, (False, "step"), (True, "forward")):
        enable, shard = {"scales": scales}, {"reshard_after_forward": False}
        model = Setup("tensorwise", world_mesh(), True, shard=shard, enable=enable).build()
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
    """Its first gather is before f8fx can know that a forward has begun: with "forward" that reduces twice."""
    from torch.distributed.fsdp import fully_shard

    import f8fx
    from tests.distributed.models import OPTIONS, Net

    results = []
    for scales in with_long((None, "step"), "forward"):
        torch.manual_seed(0)
        model = Net().to(bf16)
        if scales:
            assert all(d.converted for d in enable_float8_all_gather(model, scales=scales))
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
        assert counts == {None: [0, 0, 0], "step": [1, 1, 1], "forward": [2, 1, 1]}[scales], counts
    for result in results[1:]:
        assert_same(results[0], result)


def changed_in_every_way(float8, scales="step"):
    """Weights changed between forwards; each output must follow. For "forward", also without a trace."""
    model = Setup("tensorwise", world_mesh(), float8, enable={"scales": scales} if float8 else {}).build()
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
    local = model.state_dict()["blocks.0.gate.weight"].to_local()
    if scales == "forward":
        if dist.get_rank() == 0:  # one rank only: no rank may wait for another that sees no change
            weight.to_local().detach()[0].fill_(9.0)
        forward("one row on one rank")
        local.data.mul_(3)
        forward("through an alias, without a trace")
    local.mul_(3)
    forward("through an alias")
    if scales == "step":  # which has to see that they change
        torch.compile(lambda: weight.detach().lerp_(-weight.detach(), 0.75), backend="aot_eager")()
        forward("by a compiled function")
        locals_ = [weight.to_local(), model.blocks[1].gate.weight.to_local().view(-1)]
        with torch.no_grad():
            torch.compile(lambda given: torch._foreach_mul_(given, 4), backend="aot_eager")(locals_)
        forward("by a compiled function of shards")
        saved = model.state_dict()["blocks.0.gate.weight"]
        torch.compile(lambda t: t.mul_(0.25), backend="aot_eager")(saved)
        forward("by a compiled function of a state dict")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    loss_of(model(batch(1))).backward()
    optimizer.step()
    forward("fused optimizer")
    if scales == "step":
        loss_of(model(batch(1))).backward()
        torch.compile(optimizer.step, backend="aot_eager")()
        forward("compiled optimizer")
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
    for scales in with_long(("step",), "forward"):
        assert_same(changed_in_every_way(False, scales), changed_in_every_way(True, scales), scales)


def captured_into_a_cuda_graph():
    """What is captured has not run: the next forward takes amaxes of its own."""
    model = Setup("tensorwise", world_mesh(), True).build()
    with torch.no_grad():
        want = model(batch(0))
        for parameter in model.blocks.parameters():
            parameter.mul_(1)
        with mock.patch("f8fx.fsdp.scales.capturing", lambda: True):
            model(batch(0))
        with collectives() as sent:
            assert torch.equal(model(batch(0)), want)
    assert [call.op for call in sent].count("all_reduce") == 1


def changed_before_the_backward():
    """The backward would gather new weights with old scales; also after an evaluation with other weights."""
    for scales in ("step", "forward"):
        model = Setup("tensorwise", world_mesh(), True, enable={"scales": scales}).build()
        weight = model.blocks[1].gate.weight
        loss = loss_of(model(batch(0)))
        with torch.no_grad():
            weight.mul_(3)
            model(batch(1))
            weight.div_(3)
        _raises("was changed between a forward and a backward", loss.backward)
    model = Setup("tensorwise", world_mesh(), True).build()
    loss = loss_of(model(batch(0)))
    with torch.no_grad():
        model(batch(1))  # an evaluation with the same weights is no matter
    loss.backward()


def changed_within_a_forward():
    """By the block before, say; what no rank has reduced since."""

    @torch.compiler.disable  # hooks of a compiled block are compiled with it
    def halve(*_):
        with torch.no_grad():
            model.blocks[1].gate.weight.mul_(0.5)

    model = Setup("tensorwise", world_mesh(), True).build()
    model.blocks[0].register_forward_hook(halve)
    _raises("Change weights before a forward begins", lambda: model(batch(0)))


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


def one_reduction_a_step():
    """However many forwards there are, with nothing to call, whoever changed the weights."""
    rank, results = dist.get_rank(), []
    for float8 in (False, True):
        model = Setup("tensorwise", world_mesh(), float8).build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        counts = []
        for step in range(3):
            with collectives() as sent:
                for part in range(2):
                    loss_of(model(batch(2 * step + part, rank))).backward()
                with torch.no_grad():
                    model(batch(7))
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                model.load_state_dict({n: t * 0.5 for n, t in model.state_dict().items()})
            counts.append(sum(c.op == "all_reduce" for c in sent))
        # the optimizer's own step, in fused form, is seen by no version counter
        assert counts == [int(float8)] * 3, counts
        with torch.no_grad():
            results.append({"after a load": model(batch(0)).detach()})
        results[-1] |= {name: whole(p) for name, p in model.named_parameters()}
        # an average of weights, swapped in for an evaluation and out again
        averaged = {name: p.detach().clone() * 0.75 for name, p in model.named_parameters()}
        with torch.no_grad(), collectives() as sent:
            for name, parameter in model.named_parameters():
                kept = parameter.detach().clone()
                parameter.copy_(averaged[name])
                averaged[name] = kept
            results[-1]["averaged"] = torch.stack([model(batch(part)) for part in range(3)])
            for name, parameter in model.named_parameters():
                parameter.data.copy_(averaged[name])
            results[-1]["back"] = model(batch(0))
        assert sum(c.op == "all_reduce" for c in sent) == 2 * int(float8)
    assert_same(*results)


def other_optimizers_are_no_matter():
    """One that holds none of the weights steps on one rank alone: no rank reduces for it."""
    model = Setup("tensorwise", world_mesh(), True).build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = torch.nn.Parameter(torch.ones(2))
    counts = []
    for step in range(3):
        with collectives() as sent:
            loss_of(model(batch(step))).backward()
            if dist.get_rank() == 0:
                probe.grad = torch.ones(2)
                torch.optim.SGD([probe], lr=0.1).step()
            loss_of(model(batch(step))).backward()
        optimizer.step()
        counts.append(sum(c.op == "all_reduce" for c in sent))
    assert counts == [1, 1, 1], counts


def steps_that_fail_and_steps_that_run_forwards():
    """Half a step changes weights, and one with a closure changes them after its forwards, too."""
    outputs = []
    for float8 in (False, True):
        model = Setup("tensorwise", world_mesh(), float8).build()

        def closure(model=model):
            model.zero_grad()
            loss = loss_of(model(batch(0)))
            loss.backward()
            return loss

        torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3).step(closure)
        seen = {"closure": model(batch(1)).detach()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

        def half(*_, model=model, optimizer=optimizer):
            type(optimizer).step.__wrapped__(optimizer)
            raise RuntimeError("out of memory")

        closure()
        with mock.patch.object(optimizer, "step", torch.optim.Optimizer.profile_hook_step(half)):
            try:
                optimizer.step(optimizer)
            except RuntimeError:
                seen["half a step"] = model(batch(1)).detach()
        outputs.append(seen)
    assert set(outputs[0]) == {"closure", "half a step"}
    assert_same(*outputs)


def interrupted(float8: bool, scales: str, evaluate: bool) -> dict[str, torch.Tensor]:
    """Ctrl-C ends a forward without its hooks; then weights change, and there is a step, or an evaluation."""
    model = Setup("tensorwise", world_mesh(), float8, enable={"scales": scales} if float8 else {}).build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model(batch(0))).backward()

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.head.register_forward_pre_hook(interrupt)
    try:
        model(batch(1))
    except KeyboardInterrupt:
        handle.remove()
    if evaluate:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4)
            return {"evaluated": model(batch(1))}
    optimizer.step()
    y = model(batch(1))
    loss_of(y).backward()
    return {"y": y.detach(), **{name: whole(p.grad) for name, p in model.named_parameters()}}


def interrupted_forwards():
    """The next step and forward are as ever."""
    for scales in ("step", "forward"):
        for evaluate in (False, True):
            found = [interrupted(float8, scales, evaluate) for float8 in (False, True)]
            assert_same(*found, f"{scales}, {evaluate}")


def gathers_outside_a_forward_look_at_their_own_weights():
    """Each at its own: with many weights all at each gather would take longer than the forward."""
    model = Setup("tensorwise", world_mesh(), True, net={"depth": 4}).build()
    with torch.no_grad():
        model(batch(0))
        with mock.patch.object(WeightScales, "changed", autospec=True, return_value=False) as looked:
            x = batch(0)
            for block in model.blocks:
                x = block(x)
        assert looked.call_count == 3 * 4, looked.call_count


def _raises(text, call):
    try:
        call()
    except Exception as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no error with {text!r}")


def ranks_that_differ_all_raise():
    """An argument of one rank only: an error everywhere at once, and no rank waits."""
    from tests.distributed.models import Net

    for other in (
        {"filter_fqns": ["gate"]},
        {"recipe": "tensorwise"},
        {"copies": "both"},
        {"scales": "forward"},
        {"wire": "uint8"},
    ):
        model = Net().to(bf16)
        before = copy.copy(dict(model.named_parameters()))
        arguments = {"recipe": "rowwise", **(other if dist.get_rank() else {})}
        _raises(
            "ranks would gather different weights in float8, or in different ways",
            lambda model=model, arguments=arguments: enable_float8_all_gather(model, **arguments),
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
    copied = copy.deepcopy(optimizer).param_groups[0]["params"]
    for original, made in zip(model.parameters(), copied, strict=True):
        assert type(made.to_local()) is torch.Tensor and made.requires_grad
        assert torch.equal(made.to_local(), original.to_local())
    train(model, 1, optimizer)


def test_two_ranks():
    run_checks(
        2,
        [
            gathers_take_half_the_bytes,
            no_weight_outlives_its_forward,
            one_reduction_whatever_is_wrapped,
            root_holds_converted_weights,
            scales_are_never_stale,
            captured_into_a_cuda_graph,
            changed_before_the_backward,
            changed_within_a_forward,
            manual_scales,
            one_reduction_a_step,
            other_optimizers_are_no_matter,
            gathers_outside_a_forward_look_at_their_own_weights,
            ranks_that_differ_all_raise,
            optimizers_and_copies_are_plain,
            *with_long(
                (),
                interrupted_forwards,
                steps_that_fail_and_steps_that_run_forwards,
                trained_models_are_freed,
            ),
        ],
    )
