"""Which float8 copies the gathers of row-scaled recipes carry (:mod:`f8fx.fsdp.copies`)."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

import f8fx
from f8fx.fsdp import enable_float8_all_gather, precompute_scales
from tests.distributed.harness import run_checks
from tests.distributed.models import (
    OPTIONS,
    Net,
    Setup,
    assert_same,
    batch,
    loss_of,
    train,
    whole,
    world_mesh,
)
from tests.distributed.sent import Sent, collectives
from tests.helpers import Block, bf16
from tests.long import with_long


def gathered(sent: Sequence[Sent]) -> int:
    """Bytes of all-gathers."""
    return sum(c.bytes for c in sent if c.op == "all_gather_into_tensor")


def steps(model: nn.Module, count: int = 3) -> tuple[list[tuple[int, int]], dict[str, Tensor]]:
    """Bytes gathered by each forward and each backward, and everything that was computed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    counts, results = [], {}
    for step in range(count):
        x = batch(step, dist.get_rank()).requires_grad_()
        with collectives() as forward:
            y = model(x)
        with collectives() as backward:
            loss_of(y).backward()
        counts.append((gathered(forward), gathered(backward)))
        results[f"output {step}"] = y.detach()
        results |= {f"grad {step} {n}": whole(p.grad) for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return counts, results


def in_blocks(model: nn.Module, layer: str = "") -> int:
    """Bytes in bf16 of this rank's shards that are gathered in float8, of one layer of each block alone if it is named."""
    return sum(
        2 * p.to_local().numel()
        for name, p in model.named_parameters()
        if "blocks" in name and "norm" not in name and "bias" not in name and layer in name
    )


def each_half_gathers_its_copy() -> None:
    """From the second step on; the first carries both, as many bytes as in bf16."""
    for recipe in with_long(("rowwise",), "rowwise_with_gw_hp"):
        runs = {}
        for copies in (None, "auto", "both"):
            enable = {} if copies is None else {"copies": copies}
            model = Setup(recipe, world_mesh(), copies is not None, enable=enable).build()
            runs[copies] = steps(model)
        (forward, backward), *others = runs[None][0]
        assert others == [(forward, backward)] * 2
        weights = in_blocks(model)
        half = (forward - weights // 2, backward - weights // 2)
        assert runs["auto"][0] == [(forward, backward), half, half], recipe
        assert runs["both"][0] == runs[None][0], recipe
        assert_same(runs[None][1], runs["auto"][1], recipe)
        assert_same(runs[None][1], runs["both"][1], recipe)


def without_resharding_one_gather_serves_both() -> None:
    results = []
    for float8 in (False, True):
        shard = {"reshard_after_forward": False}
        counts, values = steps(Setup("rowwise", world_mesh(), float8, shard=shard).build())
        results.append((counts, values))
    assert results[0][0] == results[1][0]
    assert_same(results[0][1], results[1][1])
    # told so afterwards, and back
    results = []
    for float8 in (False, True):
        model = Setup("rowwise", world_mesh(), float8).build()
        values, counts = {}, []
        for reshard in (True, False, True):
            model.set_reshard_after_forward(reshard)
            counted, seen = steps(model, 2)
            counts.append(counted[1])
            values |= {f"{len(counts)} {name}": value for name, value in seen.items()}
        results.append((counts, values))
    assert_same(results[0][1], results[1][1])
    (before, kept, after), plain = results[1][0], results[0][0]
    assert before == after and kept == plain[1]
    assert before[0] < plain[0][0] and before[1] < plain[0][1]


class Checkpointed(nn.Module):
    """A block, checkpointed while ``on``."""

    on = True

    def __init__(self, block: nn.Module, reentrant: bool = False) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant) if self.on else self.block(x)


class ReadsEagerly(nn.Module):
    """What a compiled block computes, beside a product with its weights that is not compiled."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.eagerly(x)

    @torch.compiler.disable
    def eagerly(self, x: Tensor) -> Tensor:
        return self.block.down(self.block.up(x) + self.block.gate(x))


def by_f8fx(module: nn.Module) -> None:
    module.compile(backend=f8fx.f8fx, options={**OPTIONS, "recipe": "rowwise", "strict": False})


def by_another(module: nn.Module) -> None:
    module.compile(backend="aot_eager")


def for_cuda_graphs(module: nn.Module) -> None:
    options = {**OPTIONS, "recipe": "rowwise", "inductor": {"triton.cudagraphs": True}}
    module.compile(backend=f8fx.f8fx, options=options)


def by_nothing(module: nn.Module) -> None:
    pass


def build(
    copies: str,
    compiled: Callable[[nn.Module], None] = by_f8fx,
    wrap: Callable[[nn.Module], nn.Module] = lambda block: block,
    inside: bool = False,
) -> Net:
    """The net, its blocks wrapped by ``wrap``, which a compiled graph is ``inside`` of, or around."""
    torch.manual_seed(0)
    model = Net().to(bf16)
    enable_float8_all_gather(model, "rowwise", filter_fqns=["head"], copies=copies)  # type: ignore[arg-type]
    for index, block in enumerate(model.blocks):
        wrapped = wrap(block)
        compiled(block if inside else wrapped)
        fully_shard(wrapped, mesh=world_mesh())
        model.blocks[index] = wrapped
    return fully_shard(model, mesh=world_mesh())


def _reads_it_in_the_backward_too(what: str, *args: Any, but: str = "", **kwargs: Any) -> None:
    """The bits of gathers with both copies, and so they are in the backward; in the forward they carry one.

    Args:
        but: a layer whose matmul the backward does not run again, for nothing there reads its result.
    """
    models = [build(copies, *args, **kwargs) for copies in ("both", "auto")]
    (counts, both), (seen, auto) = map(steps, models)
    assert_same(both, auto, what)
    (forward, backward), *_ = counts
    assert counts == [(forward, backward)] * 3
    spared = in_blocks(models[0], but) // 2 if but else 0
    less = (forward - in_blocks(models[0]) // 2, backward - spared)
    assert seen == [(forward, backward), less, less], (what, seen, counts)


def checkpointing_reads_the_forwards_copy_again() -> None:
    """In a compiled graph, which is found when it is split, and around one, which is seen when it runs."""
    _reads_it_in_the_backward_too("in a graph", by_f8fx, Checkpointed, but="down")
    for reentrant in with_long((), False, True):
        wrap = functools.partial(Checkpointed, reentrant=reentrant)
        _reads_it_in_the_backward_too(f"around one, {reentrant=}", by_f8fx, wrap, inside=True)


def what_f8fx_did_not_compile_may_read_it_again() -> None:
    """It says nothing, so both copies are there; an eager reader beside a compiled one is noted.

    Graphs that are replayed copy all of their inputs.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of reads that round
        for compiled in with_long((by_nothing, for_cuda_graphs), by_another):
            models = [build(copies, compiled) for copies in ("both", "auto")]
            (counts, both), (seen, auto) = map(steps, models)
            assert_same(both, auto)
            assert seen == counts
        _reads_it_in_the_backward_too("both", by_f8fx, ReadsEagerly)


def a_budget_of_memory_may_read_it_again() -> None:
    """A partitioner that is to save memory recomputes what it likes."""
    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=0.0):
        _reads_it_in_the_backward_too("budget", by_f8fx, but="down")
    torch._dynamo.reset()


def read_again_only_later() -> None:
    """What is no longer there is an error, on every rank."""
    for inside in with_long((True,), False):
        model = build("auto", by_f8fx, Checkpointed, inside)
        for block in model.blocks:
            block.on = False
        steps(model, 2)
        for block in model.blocks:
            block.on = True
        with pytest.raises(RuntimeError, match="the forward's copy is read again in the backward"):
            loss_of(model(batch(0))).backward()


def _same_as_with_both(run: Callable[[Net], Any], wrap: Any = lambda block: block) -> None:
    """After two steps, which settle what gathers carry, what ``run`` does has the results of a run with both copies."""
    results = []
    for copies in ("both", "auto"):
        model = build(copies, wrap=wrap)
        before = steps(model, 2)[1]
        results.append(before | run(model))
    assert_same(*results)


def gathers_that_begin_early_or_late() -> None:
    """Outside of the backward that they are for, or in a backward that ends without them."""

    def by_hand(model: Net) -> dict[str, Tensor]:
        y = model(batch(0))
        model.blocks[-1].unshard()
        loss_of(y).backward()
        return {n: whole(p.grad) for n, p in model.named_parameters()}

    def for_the_forward(model: Net) -> dict[str, Tensor]:
        first, last = model.blocks
        last.set_modules_to_forward_prefetch([first])  # whose next half is its backward
        return steps(model, 2)[1]

    def not_taken(model: Net) -> dict[str, Tensor]:
        first, last = model.blocks
        last.set_modules_to_backward_prefetch([first])
        model.set_is_last_backward(False)
        x = batch(0).requires_grad_()
        loss_of(last(x)).backward()
        model.set_is_last_backward(True)
        return steps(model, 2)[1]

    for run in (by_hand, for_the_forward, not_taken):
        _same_as_with_both(run)


def saved_tensors_that_are_copied() -> None:
    """Hooks read what a graph saves, the backward's copy among it, when its forward ends."""
    results = []
    for copies in ("both", "auto"):
        model = build(copies)
        copied = torch.autograd.graph.saved_tensors_hooks(lambda t: torch.empty_like(t).copy_(t), lambda t: t)
        with copied:
            counts, values = steps(model)
        results.append(values)
    assert_same(*results)
    assert counts[0][0] == counts[2][0] and counts[0][1] > counts[2][1]
    model = build("auto")
    steps(model, 2)
    with copied, pytest.raises(RuntimeError, match="the backward's copy is read in the forward"):
        model(batch(0))


def reads_that_no_backward_follows() -> None:
    """An eager forward, a look at a gathered weight, an evaluation in inference mode: nothing to complain about."""

    def look(model: Net) -> dict[str, Tensor]:
        block = model.blocks[0]
        block.unshard()
        seen = {"seen": block.up.weight.detach().float()}
        block.reshard()
        with torch.compiler.set_stance("force_eager"):
            seen["eagerly"] = model(batch(0)).detach()
        return seen | steps(model, 1)[1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of reads that round
        _same_as_with_both(look)


class Routed(nn.Module):
    """Two frozen blocks, one of which runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False)
        self.experts = nn.ModuleList([Block(64, 96), Block(64, 96)]).requires_grad_(False)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.experts[which](self.first(x))


def ranks_that_read_different_weights() -> None:
    """What a rank has not seen read is not settled; nor do ranks reduce for different weights."""
    rank, results = dist.get_rank(), []
    for copies in ("both", "auto"):
        for which in (lambda step: rank, lambda step: rank if step % 2 == 0 else step // 2 % 2):
            torch.manual_seed(0)
            model = Routed().to(bf16)
            enable_float8_all_gather(model, "rowwise", only_fqns=["experts"], copies=copies)  # type: ignore[arg-type]
            for expert in model.experts:
                by_f8fx(expert)
            fully_shard([*model.experts], mesh=world_mesh())
            fully_shard(model, mesh=world_mesh())
            for step in range(6):
                loss = loss_of(model(batch(step, rank), which(step)))
                loss.backward()
                results.append({"loss": loss.detach()})
    half = len(results) // 2
    for both, auto in zip(results[:half], results[half:], strict=True):
        assert_same(both, auto)


def kept_after_the_backward() -> None:
    """As gradient accumulation may: the next forward gathers its own copy, also of a block that is called by itself."""
    results = []
    for float8 in (False, True):
        model = Setup("rowwise", world_mesh(), float8, net={"depth": 1}).build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, last in enumerate((True, False, False, True, False, True)):
            model.set_reshard_after_backward(last)
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            loss_of(model(batch(step, dist.get_rank()))).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        results.append({name: whole(p) for name, p in model.named_parameters()})
        model.set_reshard_after_backward(False)
        loss_of(model(batch(6))).backward()
        with torch.no_grad():
            results[-1]["evaluated"] = model(batch(7))
        loss_of(model(batch(6))).backward()
        results[-1]["by itself"] = model.blocks[0](batch(0)).detach()
    assert_same(*results)


def kept_across_a_step() -> None:
    """FSDP2 would go on with the weights of before; float8 data of before are not to be read with scales of after."""
    for recipe, scales in (
        ("tensorwise", "step"),
        ("rowwise", "step"),
        ("tensorwise", "forward"),
        ("tensorwise", "manual"),
    ):
        results = []
        for reshard in (True, False):
            model = Setup(recipe, world_mesh(), True, net={"depth": 1}, enable={"scales": scales}).build()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            outputs = {}
            for step, changes in enumerate((True, True, False, True, False)):
                for block in model.blocks:  # the root has nothing in float8, and stays behind
                    block.set_reshard_after_backward(step == 0)
                    if reshard:
                        block.reshard()
                if scales == "manual":
                    precompute_scales(model)
                outputs[f"output {step}"] = (y := model(batch(step, dist.get_rank()))).detach()
                loss_of(y).backward()
                if changes:
                    optimizer.step()
                    optimizer.zero_grad()
            for block in model.blocks:
                block.reshard()
            results.append({**outputs, **{name: whole(p) for name, p in model.named_parameters()}})
        assert_same(*results)


def kept_for_good():
    """What the backward gathered, by FSDP2's settings for both halves: a block by itself has no forward's copy."""
    for reshard in (True, False):
        model = Setup("rowwise", world_mesh(), True, net={"depth": 1}).build()
        for step in range(2):
            loss_of(model(batch(step))).backward()
        model.set_reshard_after_backward(False)
        loss_of(model(batch(2))).backward()
        model.set_reshard_after_forward(False)
        if reshard:
            model.blocks[0].reshard()
            model.blocks[0](batch(0))
        else:
            with pytest.raises(RuntimeError, match="is not in memory"):
                model.blocks[0](batch(0))


class _Fails(torch.autograd.Function):
    """In the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("out of memory")


def after_a_backward_that_failed() -> None:
    """FSDP2 has to be told; then all is as with gathers in bf16."""
    results = []
    for float8 in (False, True):
        model = Setup("rowwise", world_mesh(), float8).build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, 2, optimizer)
        handle = model.blocks[0].register_forward_hook(
            torch.compiler.disable(lambda module, inputs, output: _Fails.apply(output))
        )
        with pytest.raises(RuntimeError, match="out of memory"):
            loss_of(model(batch(5))).backward()
        handle.remove()
        optimizer.zero_grad()
        if float8:
            with pytest.raises(RuntimeError, match="the last backward ended in an exception"):
                model(batch(5))
        if hasattr(model, "reset_iter_state"):  # since torch 2.13
            model.reset_iter_state()
            results.append(train(model, 2, optimizer))
    if results:
        assert_same(*results)


class Detached(nn.Module):
    """Reads a weight of one graph in another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight.detach()
        y = self.layer(x)
        torch._dynamo.graph_break()
        return y + F.linear(x, weight)


def weights_that_graphs_hand_on():
    """Nobody knows of the second graph's tensor which gather it came from."""
    results = []
    for copies in (None, "both", "auto"):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = nn.Sequential(Detached()).to(bf16)
        if copies is not None:
            enable_float8_all_gather(model, "rowwise", copies=copies)
        model[0].compile(backend=f8fx.f8fx, options={**OPTIONS, "recipe": "rowwise"})
        fully_shard(model[0], mesh=world_mesh())
        fully_shard(model, mesh=world_mesh())
        if copies == "auto":
            with pytest.raises(RuntimeError, match='copies="both"'):
                model(batch(0))
        else:
            results.append(train(model, 2))
    assert_same(*results)


class Encoder(Net):
    def encode(self, x: Tensor) -> Tensor:
        return self.forward(x)


def models_that_are_not_called_themselves() -> None:
    """But through a method, or their parts one by one."""
    for method in (True, False):
        torch.manual_seed(0)
        # the block that is called is a root for FSDP2, which by default does not reshard those
        setup = Setup("rowwise", world_mesh(), True, shard={"reshard_after_forward": True})
        model = setup.apply(Encoder(depth=1).to(bf16))
        register_fsdp_forward_method(model, "encode")
        call = model.encode if method else model.blocks[0]
        counts = []
        for step in range(3):
            with collectives() as sent:
                loss_of(call(batch(step))).backward()
            counts.append(gathered(sent))
        assert counts[0] - counts[1] == in_blocks(model), (method, counts)
        assert counts[1] == counts[2]


def test_two_ranks():
    run_checks(
        2,
        [
            each_half_gathers_its_copy,
            without_resharding_one_gather_serves_both,
            checkpointing_reads_the_forwards_copy_again,
            kept_for_good,
            after_a_backward_that_failed,
            *with_long(
                (),
                read_again_only_later,
                ranks_that_read_different_weights,
                kept_across_a_step,
                models_that_are_not_called_themselves,
                gathers_that_begin_early_or_late,
                what_f8fx_did_not_compile_may_read_it_again,
                a_budget_of_memory_may_read_it_again,
                saved_tensors_that_are_copied,
                reads_that_no_backward_follows,
                kept_after_the_backward,
                weights_that_graphs_hand_on,
            ),
        ],
    )
