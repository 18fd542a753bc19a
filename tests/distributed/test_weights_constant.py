"""``weights="constant"``: the float8 copies of DTensors are kept, and made anew after what can be seen to write to them."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import f8fx
from f8fx import recording
from f8fx.torch_private import local_part
from f8fx.weights.copies import Copies
from f8fx.weights.watch import WATCHES
from tests.distributed.harness import checks_of, name_of, outcome_fixture
from tests.distributed.simple_fsdp import simple_fsdp
from tests.distributed.test_tensor_parallel import Net, WithHead, parallel, tp_mesh
from tests.helpers import compiled, randn


def given():
    """A model that is split, one plain layer in it, and this rank's part of a sequence."""
    return parallel(WithHead(depth=1), tp_mesh()), randn(2, 16, 64, grad=False, seed=dist.get_rank())


def infer(call, x):
    with torch.no_grad():
        return call(x)


def casts_of(call, x) -> int:
    """How many weights a call quantizes outside of its graph."""
    with mock.patch.object(Copies, "_renew", autospec=True, side_effect=Copies._renew) as renew:
        infer(call, x)
    return renew.call_count


def kept(model, x, **options):
    """The compiled model, called until nothing is cast anew."""
    call = compiled(model, weights="constant", **options)
    for _ in range(2):
        infer(call, x)
    return call


def split(model):
    return [p for p in model.parameters() if isinstance(p, DTensor)]


def check_bits():
    """Those of quantizing in each call; a second call quantizes no weight."""
    for recipe in ("tensorwise", "rowwise"):
        model, x = given()
        with recording() as reports:
            call = kept(model, x, recipe=recipe)
        assert [report.reused_weights for report in reports] == [4]
        assert casts_of(call, x) == 0
        assert torch.equal(infer(call, x), infer(compiled(model, recipe=recipe), x))


Change = Callable[[nn.Module, Callable[..., Tensor]], None]


def in_place(write: Callable[[nn.Parameter], object]) -> Change:
    def change(model: nn.Module, _: object) -> None:
        with torch.no_grad():
            write(model.layers[0].down.weight)

    return change


def step(**options) -> Change:
    def change(model: nn.Module, _: object) -> None:
        for parameter in split(model):
            parameter.grad = parameter.detach().clone()
        torch.optim.SGD(split(model), lr=0.5, **options).step()

    return change


def trained(model: nn.Module, call: Callable[..., Tensor]) -> None:
    """By a graph of ours and an optimizer that is not torch's, which writes without a trace."""
    model.zero_grad()
    call(randn(2, 16, 64, seed=5)).sum().backward()
    torch._foreach_add_([p.data for p in split(model)], [p.grad for p in split(model)])


def reloaded(assign: bool) -> Change:
    def change(model: nn.Module, _: object) -> None:
        state = {name: value.detach() * 3 for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=assign)

    return change


#: The last one puts other parameters in the place of those that others write to.
SEEN = {
    "in place": in_place(lambda w: w.mul_(2)),
    "copied": in_place(lambda w: w.copy_(w * 2)),
    "through a view": in_place(lambda w: w.detach()[:16].mul_(2)),
    "this rank's part": in_place(lambda w: w.to_local().mul_(2)),
    "initialised": in_place(lambda w: nn.init.normal_(w)),
    "under inference_mode": torch.inference_mode()(in_place(lambda w: w.mul_(2))),
    "an optimizer": step(foreach=False),
    "a foreach optimizer": step(foreach=True),
    "a training graph, and any optimizer": trained,
    "load_state_dict": reloaded(assign=False),
    "load_state_dict, assigned": reloaded(assign=True),
}


def check_what_is_seen():
    model, x = given()
    dynamic, call = compiled(model), kept(model, x)
    for name, change in SEEN.items():
        before = infer(call, x)
        assert torch.equal(before, infer(call, x)) and casts_of(call, x) == 0
        change(model, call)
        after = infer(call, x)
        assert torch.equal(after, infer(dynamic, x)), name
        assert not torch.equal(after, before), name


def check_a_model_that_is_cast_and_back():
    """Which torch does by swapping the parameters with others, if nothing refers to them weakly.

    Graphs that were traced do, as long as they are not collected; what torch 2.15 keeps of them for a backend that is not called by
    its name does so, too.
    """
    model, x = given()
    torch._dynamo.reset()
    options = {"select": "all", "executor": "eager", "weights": "constant"}
    call = torch.compile(model, backend="f8fx", options=options)
    with recording() as reports:
        for _ in range(2):
            infer(call, x)
    assert [report.reused_weights for report in reports] == [4]
    before = infer(call, x)
    gc.collect()
    model.double().bfloat16()
    assert torch.equal(infer(call, x), before)
    in_place(lambda w: w.mul_(2))(model, call)
    assert not torch.equal(infer(call, x), before)


def load_checkpoint(model: nn.Module, _: object) -> None:
    with TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        doubled = {name: value.detach() * 2 for name, value in model.state_dict().items()}
        checkpoint.save(doubled, checkpoint_id=folders[0])
        checkpoint.load(model.state_dict(), checkpoint_id=folders[0])
        dist.barrier()


UNSEEN = {
    "a checkpoint": load_checkpoint,
    "a part of an alias": in_place(lambda w: w.detach().to_local().mul_(2)),
    "through .data": in_place(lambda w: w.data.mul_(2)),
    "all at once": in_place(lambda w: torch._foreach_mul_([w], 2.0)),
}


def check_what_takes_a_word():
    model, x = given()
    dynamic, call = compiled(model), kept(model, x)
    for name, change in UNSEEN.items():
        change(model, call)
        assert casts_of(call, x) <= 1, name  # of the plain layer
        f8fx.refresh_weights(model)
        assert torch.equal(infer(call, x), infer(dynamic, x)), name
        infer(call, x)


def check_two_wholes_of_one_part():
    """Their counts may come to be equal."""
    model, x = given()
    dynamic, call = compiled(model), kept(model, x)
    layer = model.layers[0].down
    weight, other = layer.weight, copy.copy(layer.weight)
    assert local_part(weight) is local_part(other)
    with torch.no_grad():
        for _ in range(weight._version - other._version):
            other.mul_(1)
        for written in (other, weight, other):
            written.mul_(2)
            for parameter in (written, weight, other):
                layer.weight = parameter
                assert torch.equal(infer(call, x), infer(dynamic, x))


def check_frozen_weights_in_training():
    """Those of a model that is adapted: kept from step to step."""
    model, x = given()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    call, dynamic = compiled(model, weights="constant"), compiled(model)
    for _ in range(2):
        found, wanted = (
            torch.autograd.grad(fn(x).float().pow(2).sum(), model.layers[0].norm.weight)[0]
            for fn in (call, dynamic)
        )
        assert torch.equal(found.full_tensor(), wanted.full_tensor())
    with mock.patch.object(Copies, "_renew", autospec=True, side_effect=Copies._renew) as renew:
        call(x).sum().backward()
    assert renew.call_count == 0


def check_they_go_with_the_model():
    """And nothing holds the parameters but the model."""
    model, x = given()
    call = kept(model, x)
    assert WATCHES
    del model, call
    torch._dynamo.reset()
    gc.collect()
    assert not WATCHES


def check_gathered_weights_stay_in_the_graph():
    """Weights that are gathered in it, whole on no rank."""
    mesh = tp_mesh()
    model, x = simple_fsdp(Net(depth=1), mesh), randn(2, 16, 64, grad=False)
    with recording() as reports:
        call = kept(model, x)
    assert [report.reused_weights for report in reports] == [0]
    assert torch.equal(infer(call, x), infer(compiled(model), x))


def check_generate_of_transformers():
    """``tp_plan="auto"`` makes weights DTensors; tokens are those of quantizing them in each call."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    with TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        if dist.get_rank() == 0:
            transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        dist.barrier()
        ranks = {"RANK": str(dist.get_rank()), "WORLD_SIZE": "2", "LOCAL_RANK": str(dist.get_rank())}
        with mock.patch.dict(os.environ, ranks):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folders[0], tp_plan="auto", dtype=torch.bfloat16
            ).eval()
        dist.barrier()
    assert len(split(model)) == 9
    plain, tokens = model.forward, torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(1))
    found = {}
    for weights in ("dynamic", "constant"):
        model.forward = compiled(plain, recipe="rowwise", weights=weights, fullgraph=False)
        with recording() as reports:
            found[weights] = model.generate(
                tokens, max_new_tokens=4, do_sample=False, cache_implementation="static"
            )
    assert {report.reused_weights for report in reports} == {8}
    assert torch.equal(found["dynamic"], found["constant"])


CHECKS = checks_of(
    dict(globals()),
    check_a_model_that_is_cast_and_back,
    check_frozen_weights_in_training,
    check_gathered_weights_stay_in_the_graph,
    check_two_wholes_of_one_part,
    check_generate_of_transformers,
    check_they_go_with_the_model,
)
outcome = outcome_fixture(2, CHECKS)


@pytest.mark.parametrize("check", list(map(name_of, CHECKS)))
def test_two_ranks(outcome, check):
    assert check not in outcome, outcome[check]
