"""Checkpoints of a model whose weights are gathered in float8 are those of one whose weights are not."""

from __future__ import annotations

import copy
import io
import tempfile
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from f8fx.fsdp import enable_float8_all_gather
from f8fx.torch_private import storage_key
from tests.distributed.harness import run_checks
from tests.distributed.models import (
    Net,
    Setup,
    assert_same,
    batch,
    loss_of,
    train,
    whole,
    world_mesh,
)
from tests.distributed.sent import collectives
from tests.helpers import bf16
from tests.long import with_long

FULL = StateDictOptions(full_state_dict=True)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def pickled(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def state_dict_is_plain():
    """Sharded and full, before and after training: types, and the bytes of the file, are those without float8."""
    for recipe in ("tensorwise", "rowwise"):
        made = []
        for float8 in (False, True):
            model = Setup(recipe, world_mesh(), float8, net={"depth": 1}).build()
            before = copy.copy(model.state_dict())
            with collectives() as sent:
                train(model, 2)
            assert any(call.dtype == torch.uint8 for call in sent) == float8
            made.append((before, model.state_dict(), get_model_state_dict(model, options=FULL)))
        for plain, float8 in zip(*made, strict=True):
            assert list(plain) == list(float8)
            for name, tensor in float8.items():
                assert type(tensor) is type(plain[name]) and type(local(tensor)) is torch.Tensor, name
                assert tensor.requires_grad == plain[name].requires_grad
        # full: the bytes of the file; sharded: of the local tensors, since the file names process groups
        plain, float8 = made
        assert pickled(plain[2]) == pickled(float8[2])
        for index in (0, 1):
            a, b = ({name: local(t) for name, t in states[index].items()} for states in made)
            assert pickled(a) == pickled(b)


def optimizer_made_before_sharding():
    """Gets the shards of the weights it had, which it finds by their addresses: accelerate's FSDP2."""
    for recipe in ("tensorwise", "rowwise"):
        made = []
        for float8 in (False, True):
            torch.manual_seed(0)
            model = Net().to(bf16)
            if float8:
                enable_float8_all_gather(model, recipe, filter_fqns=["head"])
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            group = optimizer.param_groups[0]
            addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
            asked = [p.data_ptr() for p in group["params"]]
            Setup(recipe, world_mesh()).apply(model)
            sharded = {addresses[name]: p for name, p in model.named_parameters()}
            group["params"] = [sharded[address] for address in asked]
            assert {id(p) for p in group["params"]} == {id(p) for p in model.parameters()}
            assert len({local(p).data_ptr() for p in model.parameters()}) == len(asked)
            made.append(train(model, 2, optimizer))
        assert_same(*made, recipe)


def state_dict_before_sharding_is_plain():
    for recipe in ("tensorwise", "rowwise"):
        made = [pickled(Setup(recipe, None, float8).build().state_dict()) for float8 in (False, True)]
        assert made[0] == made[1] and b"f8fx" not in made[1]


def state_dict_shares_memory():
    """As without float8: a checkpoint that is loaded in place is in the model."""
    model = Setup("tensorwise", world_mesh(), True).build()
    state = model.state_dict()
    local(state["blocks.0.gate.weight"]).fill_(2.0)
    assert (whole(model.blocks[0].gate.weight) == 2).all()


def state_dict_of_uneven_shards_shares_memory():
    """One that was taken before the first forward, too, and before weights were loaded by copy."""
    for float8 in (False, True):
        setup = Setup("tensorwise", world_mesh(), float8, net={"dim": 64, "hidden": 80})
        model = setup.build()
        state = model.state_dict()
        train(model, 2)
        model.load_state_dict({name: value.clone() for name, value in state.items()})
        train(model, 1)
        for name, now in model.state_dict().items():
            assert torch.equal(local(state[name]), local(now)), (float8, name)
            assert storage_key(local(state[name])) == storage_key(local(now)), (float8, name)


def views_of_uneven_shards_follow_a_load():
    """Those taken after the first forward; no state dict of the model was asked for."""
    for float8 in (False, True):
        setup = Setup("tensorwise", world_mesh(), float8, net={"dim": 64, "hidden": 80})
        loaded = setup.build().state_dict()
        model = setup.build()
        train(model, 1)
        views = {name: p.detach() for name, p in model.named_parameters()}
        model.load_state_dict(loaded)
        train(model, 1)
        for name, now in model.named_parameters():
            assert torch.equal(local(views[name]), local(now)), (float8, name)


def loaded_weights_are_gathered():
    """By copy and by assignment, into a model that has run before."""
    other = Net().to(bf16)
    for assign in (False, True):
        results = []
        for float8 in (False, True):
            model = Setup("tensorwise", world_mesh(), float8).build()
            torch.manual_seed(7)
            source = Setup("tensorwise", world_mesh(), False).apply(copy.deepcopy(other))
            with torch.no_grad():
                for p in source.parameters():
                    p.mul_(3)
            if not assign:
                train(model, 1)
            model.load_state_dict(source.state_dict(), assign=assign)
            with collectives() as sent:
                results.append(train(model, 2))
            dtypes = {call.dtype for call in sent if call.op == "all_gather_into_tensor"}
            assert (torch.uint8 in dtypes) == float8, dtypes
        assert_same(*results, f"assign={assign}")


def meta_device():
    results = []
    for float8 in (False, True):
        with torch.device("meta"):
            model = Net().to(bf16)
        model = Setup("rowwise", world_mesh(), float8).apply(model)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                torch.manual_seed(index)
                parameter.normal_(0, 0.1)
        results.append(train(model, 2))
    assert_same(*results)


def set_model_state_dict_from_rank_0():
    results = []
    for float8 in (False, True):
        torch.manual_seed(5)
        full = {name: t.clone() for name, t in Net().to(bf16).state_dict().items()}
        with torch.device("meta"):
            model = Net().to(bf16)
        model = Setup("tensorwise", world_mesh(), float8).apply(model)
        model.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, full if dist.get_rank() == 0 else {}, options=options)
        results.append(train(model, 2))
    assert_same(*results)


def steps(model: nn.Module, optimizer: Any, which: range) -> dict[str, torch.Tensor]:
    for step in which:
        loss_of(model(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(p) for name, p in model.named_parameters()}


def save(folder: str) -> None:
    model = Setup("tensorwise", world_mesh(), True).build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer, range(2))
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    for tensor in torch.utils._pytree.tree_leaves(state):
        assert not isinstance(tensor, torch.Tensor) or type(local(tensor)) is torch.Tensor
    dcp.save(state, checkpoint_id=folder)
    end = steps(model, optimizer, range(2, 4))
    if dist.get_rank() == 0:
        torch.save(end, f"{folder}/end.pt")


def resume(folder: str, float8: bool = True) -> dict[str, torch.Tensor]:
    model = Setup("tensorwise", world_mesh(), float8).build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer, range(7, 8))  # from elsewhere
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return steps(model, optimizer, range(2, 4))


def checkpoint_is_resumed():
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    save(folder[0])
    dist.barrier()
    end = torch.load(f"{folder[0]}/end.pt")
    assert_same(resume(folder[0]), end)
    assert_same(resume(folder[0], float8=False), end, "without float8 gathers")


def resumed_by_others(folder: str):
    float8 = resume(folder)
    assert_same(float8, resume(folder, float8=False), "without float8 gathers")
    if dist.get_world_size() == 1:
        # with three ranks the sum of three equal bf16 gradients rounds
        assert_same(float8, torch.load(f"{folder}/end.pt"))


def test_two_ranks():
    run_checks(
        2,
        [
            state_dict_is_plain,
            state_dict_before_sharding_is_plain,
            optimizer_made_before_sharding,
            state_dict_shares_memory,
            loaded_weights_are_gathered,
            meta_device,
            set_model_state_dict_from_rank_0,
            checkpoint_is_resumed,
        ],
    )


def test_another_world_size_resumes(tmp_path):
    """Saved by two ranks, resumed by three and by one: shards of other sizes, the same weights."""
    run_checks(2, [partial(save, str(tmp_path))])
    run_checks(
        3,
        [
            partial(resumed_by_others, str(tmp_path)),
            *with_long((), state_dict_of_uneven_shards_shares_memory, views_of_uneven_shards_follow_a_load),
        ],
    )
    run_checks(1, [partial(resumed_by_others, str(tmp_path))])
