"""FSDP2's own options under float8 gathers: each gives the bits it gives with high-precision gathers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import f8fx
from f8fx.fsdp import enable_float8_all_gather
from f8fx.fsdp.shard import Float8Shard
from tests.distributed.harness import run_checks
from tests.distributed.models import (
    OPTIONS,
    Net,
    Setup,
    assert_same,
    batch,
    loss_of,
    saved_bytes,
    train,
    whole,
    world_mesh,
)
from tests.distributed.sent import InGraph, collectives
from tests.helpers import Block, bf16, sqnr
from tests.long import with_long

#: For what is about numbers alone.
ONE_BLOCK = {"depth": 1}


def both(setup: Setup, run: Callable[[Net], dict[str, Any]]) -> None:
    """The same with high-precision gathers, and with gathers that carry float8."""
    results = []
    for float8 in (False, True):
        made = copy.copy(setup)
        made.float8 = float8
        with collectives() as sent:
            results.append(run(made.build()))
        assert any(call.dtype == torch.uint8 for call in sent) == float8, sent
    assert_same(*results, repr(setup))


def resharding():
    cases = ("tensorwise", True), ("rowwise", False)
    for recipe, reshard in with_long(cases, ("rowwise", True), ("tensorwise", False)):
        setup = Setup(recipe, world_mesh(), shard={"reshard_after_forward": reshard}, net=ONE_BLOCK)
        both(setup, lambda m: train(m, 2))


def mixed_precision():
    """fp32 parameters that FSDP2 rounds to bf16: the rounded weight is what is quantized, as on one device."""
    policy = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=torch.float32)
    for recipe in ("tensorwise", "rowwise"):
        setup = Setup(recipe, world_mesh(), dtype=torch.float32, shard={"mp_policy": policy}, net=ONE_BLOCK)
        both(setup, lambda m: train(m, 2, rank=dist.get_rank()))


def autocast():
    """fp32 parameters that stay so: the fp32 weight is what is quantized, as on one device."""
    for recipe in with_long(("rowwise",), "tensorwise"):
        results = []
        for mesh, float8 in ((None, False), (world_mesh(), False), (world_mesh(), True)):
            model = Setup(recipe, mesh, float8, dtype=torch.float32, net=ONE_BLOCK).build()
            # without its cache: FSDP2 would miss gradients through a cast that a step before has made
            with torch.autocast("cpu", bf16, cache_enabled=False):
                results.append(train(model, 2, dtype=torch.float32))
        assert_same(results[0], results[1], recipe)
        assert_same(results[1], results[2], recipe)


def half():
    def run(model: Net) -> dict[str, Any]:
        # not Adam: its epsilon is zero in fp16
        return train(model, 2, torch.optim.SGD(model.parameters(), lr=0.1), dtype=torch.float16)

    both(Setup("tensorwise", world_mesh(), dtype=torch.float16, net=ONE_BLOCK), run)


def accumulated(model: Net) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: dict[str, Any] = {}
    for step in range(2):
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            loss_of(model(batch(3 * step + part, dist.get_rank()))).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        seen |= {f"norm {step}": whole(norm)}
        optimizer.step()
        optimizer.zero_grad()
    return seen | {name: whole(p) for name, p in model.named_parameters()}


def accumulation_and_clipping():
    both(Setup("tensorwise", world_mesh()), accumulated)


class Headless(Net):
    """The last weights that a forward reads are gathered in float8."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Identity()


def optimizer_in_the_backward():
    """With evaluations in between: FSDP2 gathers ahead the last block of those, stepped already, and nobody reads it."""

    def run(model: Net) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step(parameter: torch.Tensor) -> None:
            seen[f"gradient {len(seen)}"] = whole(parameter.grad)
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(step)
        for number in range(4):
            with torch.no_grad():
                seen[f"evaluation {number}"] = model(batch(10 + number))
            loss_of(model(batch(number, dist.get_rank()))).backward()
        return seen | {name: whole(p) for name, p in model.named_parameters()}

    for recipe in with_long(("rowwise",), "tensorwise"):
        results = []
        for float8 in (False, True):
            torch.manual_seed(0)
            results.append(run(Setup(recipe, world_mesh(), float8).apply(Headless().to(bf16))))
        assert_same(*results, recipe)


def frozen():
    def run(model: Net) -> dict[str, Any]:
        return train(model, 2)

    results = []
    for float8 in (False, True):
        torch.manual_seed(0)
        model = Net().to(bf16)
        model.blocks[0].gate.weight.requires_grad_(False)
        for parameter in model.blocks[1].parameters():
            parameter.requires_grad_(False)
        setup = Setup("tensorwise", world_mesh(), float8)
        results.append(run(setup.apply(model)))
    assert "grad blocks.0.gate.weight" not in results[1] and "grad blocks.0.up.weight" in results[1]
    assert_same(*results)


class Latents(nn.Module):
    """Learned tokens, the same for each of a batch, through a layer."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(1, 16, 64))
        self.layer = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.layer(self.tokens.expand(x.shape[0], -1, -1)) * x


def learned_tokens():
    """Parameters that are no weights, beside one that arrives in float8."""
    for recipe in with_long(("rowwise_with_gw_hp",), "tensorwise"):
        results = []
        for float8 in (False, True):
            torch.manual_seed(0)
            model = Latents().to(bf16)
            if float8:
                enable_float8_all_gather(model, recipe)
            torch._dynamo.reset()
            model.compile(backend=f8fx.f8fx, options={**OPTIONS, "recipe": recipe})
            fully_shard(model, mesh=world_mesh())
            with f8fx.recording() as reports:
                loss_of(model(batch(0)[:2, None])).backward()
            (report,) = reports
            assert not report.warnings, report.warnings
            results.append({name: whole(p.grad) for name, p in model.named_parameters()})
        assert_same(*results, recipe)


def not_a_number():
    """A NaN or an infinity in one rank's shard reaches what it reaches with high-precision gathers."""
    cases = (torch.nan, 0, "tensorwise"), (torch.nan, 1, "rowwise"), (torch.inf, 1, "tensorwise")
    others = (torch.nan, 1, "tensorwise"), (torch.nan, 0, "rowwise"), (torch.inf, 1, "rowwise")
    for value, owner, recipe in with_long(cases, *others):
        outputs = []
        for float8 in (False, True):
            model = Setup(recipe, world_mesh(), float8, net=ONE_BLOCK).build()
            with torch.no_grad():
                if dist.get_rank() == owner:
                    model.blocks[0].gate.weight.to_local()[3, 5] = value
                outputs.append(model.blocks[0](batch(0)).detach())
        assert outputs[0].isnan().any()
        assert torch.equal(outputs[0].isnan(), outputs[1].isnan())
        assert torch.equal(outputs[0].nan_to_num(), outputs[1].nan_to_num()), (value, recipe)
        # one NaN makes the tensorwise scale one, on every rank, whoever has it
        model.blocks[0].unshard()
        scale = model.blocks[0].gate.weight._scale_0
        assert int(scale.isnan().sum()) == int(value is torch.nan), (value, owner, scale)


def checkpointing_of_the_whole_model():
    """Its forward, hooks included, runs again in the backward; amaxes are not taken again."""
    results = []
    for float8 in (False, True):
        model = Setup("tensorwise", world_mesh(), float8).build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with collectives() as sent:
            for step in range(2):
                loss_of(checkpoint(model, batch(step), use_reentrant=False)).backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append({name: whole(p) for name, p in model.named_parameters()})
        assert sum(call.op == "all_reduce" for call in sent) == (2 if float8 else 0)
    assert_same(*results)


class Tied(nn.Module):
    """Two linear layers of one weight, and an embedding tied to a third."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        self.a, self.b, self.c = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.b.weight = self.a.weight
        self.c.weight = self.embedding.weight

    def forward(self, tokens):
        return self.c(self.b(torch.relu(self.a(self.embedding(tokens)))))


def tied():
    tokens = torch.arange(32)
    results = []
    for float8 in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Tied().to(bf16)
        if float8:
            decided = {d.fqn: d.reason for d in enable_float8_all_gather(model)}
            assert decided == {
                "embedding.weight": "shared with a module that is no linear layer",
                "a.weight": "converted",
            }
            assert model.a.weight is model.b.weight
        fully_shard(model, mesh=world_mesh())
        call = torch.compile(model, backend=f8fx.f8fx, options=OPTIONS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            y = call(tokens)
            loss_of(y).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append({"y": y.detach()} | {name: whole(p) for name, p in model.named_parameters()})
    assert_same(*results)


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def checkpointed(float8: bool, inside: bool | None, recipe: str = "tensorwise", **options: Any) -> Net:
    """The net with checkpointed blocks, inside the compiled graphs or around them, or (``None``) not."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Net().to(bf16)
    options["recipe"] = recipe
    if float8:
        enable_float8_all_gather(model, recipe, filter_fqns=["head"])
    for index, block in enumerate(model.blocks):
        wrapped = block if inside is None else Checkpointed(block)
        (wrapped if inside else block).compile(backend=f8fx.f8fx, options={**OPTIONS, **options})
        fully_shard(wrapped, mesh=world_mesh())
        model.blocks[index] = wrapped
    return fully_shard(model, mesh=world_mesh())


def checkpointing():
    """Inside the compiled graph, and around it; each with one amax reduction a forward."""
    for inside in (True, False):
        results = []
        for float8 in (False, True):
            model = checkpointed(float8, inside)
            with collectives() as sent:
                results.append(train(model, 3))
            reductions = [call for call in sent if call.op == "all_reduce"]
            assert len(reductions) == (3 if float8 else 0), (inside, reductions)
        assert_same(*results, f"inside={inside}")


class Amaxes(InGraph):
    """Counts amaxes that graphs take."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.f8fx.amax.default
        return func(*args, **(kwargs or {}))


def checkpointing_saves_what_bf16_saves():
    """No more bytes than bf16's graph, but for scales; amaxes are taken once.

    Of each weight the inverses of its scales are kept: to the partitioner as dear as the scales, which it could have
    for nothing. Of a block's two inputs of gemms, scale and inverse. Rowwise scales are those of 96 and 64 rows and
    columns of a weight, and of the 16 rows of an input.
    """
    recipes = with_long(("rowwise",), "tensorwise")
    saved, amaxes = {}, {}
    for inside in (True, None):
        model = checkpointed(False, inside, only_fqns=["none"])
        saved["bf16", inside] = saved_bytes(model(batch(0)), model)
        for recipe in recipes:
            model = checkpointed(True, inside, recipe)
            y = model(batch(0))
            saved[recipe, inside] = saved_bytes(y, model)
            loss_of(y).backward()
            with Amaxes() as counted:
                loss_of(model(batch(0))).backward()
            amaxes[recipe, inside] = counted.count
    assert saved["bf16", True] < saved["bf16", None]
    for recipe in recipes:
        weight, row = {"tensorwise": (1, 1), "rowwise": (96 + 64, 16)}[recipe]
        assert saved[recipe, True] <= saved["bf16", True] + 4 * 2 * (3 * weight + 2 * 2 * row), saved
        assert saved[recipe, None] < saved["bf16", None], saved
        # two inputs and three gradients a block, gate and up share theirs; rowwise by rows and by columns
        assert amaxes[recipe, None] == amaxes[recipe, True] == 2 * 5 * (1 + (recipe == "rowwise")), amaxes


def evaluated_in_inference_mode():
    """Between a step and the next forward: the scales taken for it serve the training forward, too."""
    for recipe in with_long(("rowwise",), "tensorwise"):
        results = []
        for float8 in (False, True):
            model = Setup(recipe, world_mesh(), float8, net=ONE_BLOCK).build()
            results.append({})
            for round_ in range(2):
                results[-1] |= {f"{round_} {name}": value for name, value in train(model, 1).items()}
                with torch.inference_mode():
                    results[-1][f"{round_} evaluated"] = model(batch(7))
        assert_same(*results, recipe)


def dtype_of_gradients():
    """That a parameter was told to have its gradients in, which FSDP2 heeds since torch 2.15."""
    results = []
    for float8 in (False, True):
        torch.manual_seed(0)
        model = Net(**ONE_BLOCK).to(bf16)
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
        Setup("rowwise", world_mesh(), float8).apply(model)
        for step in range(2):
            loss_of(model(batch(step))).backward()
        results.append({name: whole(parameter.grad) for name, parameter in model.named_parameters()})
    dtypes = [{name: grad.dtype for name, grad in result.items()} for result in results]
    assert dtypes[0] == dtypes[1], dtypes
    assert_same(*results)


def enabled_after_fully_shard():
    """Blocks one after the other, each before it is sharded: an optimizer would hold what FSDP2 knows nothing of."""
    model = nn.Sequential(Block(), Block()).to(bf16)
    fully_shard(model[0])
    try:
        enable_float8_all_gather(model)
    except ValueError as error:
        assert "comes before fully_shard, which '0.gate.weight' has been through" in str(error)
    else:
        raise AssertionError("nothing was raised")
    assert not any(isinstance(parameter, Float8Shard) for parameter in model.parameters())
    assert any(decision.reason == "converted" for decision in enable_float8_all_gather(model[1]))


def enabled_on_a_part_after_fully_shard():
    model = nn.Sequential(Block(), Block()).to(bf16)
    fully_shard(model)
    try:
        enable_float8_all_gather(model[0])
    except ValueError as error:
        assert "comes before fully_shard, which 'gate.weight' has been through" in str(error)
    else:
        raise AssertionError("nothing was raised")


def weights_are_found_in_one_search():
    """FSDP2 is asked for all that it holds once, not once for each weight."""
    searches = []
    search = f8fx.fsdp.copies.fsdp_parameters
    f8fx.fsdp.copies.fsdp_parameters = lambda: searches.append(1) or search()
    try:
        model = nn.Sequential(*(Block() for _ in range(3))).to(bf16)
        enable_float8_all_gather(model, "rowwise")
        for block in model:
            fully_shard(block)
        fully_shard(model)
        loss_of(model(batch(0))).backward()
    finally:
        f8fx.fsdp.copies.fsdp_parameters = search
    assert len(searches) == 1, searches


def read_in_frames_that_dynamo_skips():
    """``torch.nn``'s own: what they call runs inside a compiled call, and was compiled, the weight's own code with it."""
    results = []
    for float8 in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True).to(bf16)
        if float8:
            enable_float8_all_gather(layer)
        layer.compile(backend=f8fx.f8fx, options=OPTIONS)
        fully_shard(layer, mesh=world_mesh())
        loss_of(layer(batch(0)[None])).backward()
        layer.eval()
        with torch.no_grad():
            results.append(layer(batch(1)[None]))
    assert sqnr(results[0], results[1]) > 20


def test_two_ranks():
    run_checks(
        2,
        [
            enabled_after_fully_shard,
            enabled_on_a_part_after_fully_shard,
            weights_are_found_in_one_search,
            resharding,
            mixed_precision,
            accumulation_and_clipping,
            frozen,
            tied,
            checkpointing_saves_what_bf16_saves,
            not_a_number,
            learned_tokens,
            *with_long(
                (),
                checkpointing_of_the_whole_model,
                read_in_frames_that_dynamo_skips,
                autocast,
                checkpointing,
                evaluated_in_inference_mode,
                half,
                optimizer_in_the_backward,
                dtype_of_gradients,
            ),
        ],
    )
