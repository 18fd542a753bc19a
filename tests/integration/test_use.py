"""A Llama of one layer the ways people use a compiled model. Eager executor, every legal matmul converted."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from f8fx.report import GraphReport, recording
from tests.helpers import compiled, sqnr
from tests.integration import training
from tests.integration.models import Batch, llama, llama_batch
from tests.long import seldom

pytest.importorskip("transformers")

LINEARS = 7 + 1
ALL = 3 * LINEARS


@pytest.fixture
def float32_model() -> nn.Module:
    torch.manual_seed(0)
    return llama(num_hidden_layers=1)


@pytest.fixture
def model(float32_model: nn.Module) -> nn.Module:
    return float32_model.to(torch.bfloat16)


@pytest.fixture
def reports() -> Iterator[list[GraphReport]]:
    with recording() as collected:
        yield collected


def batch(seed: int = 1, **sizes: int) -> Batch:
    return llama_batch(torch.Generator().manual_seed(seed), **sizes)


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


# -- options --------------------------------------------------------------------------------------


def test_backend_by_name(model: nn.Module, reports: list[GraphReport]):
    """As the README has it: no import of f8fx, a string."""
    torch._dynamo.reset()
    options = {"select": "all", "executor": "eager"}
    torch.compile(model, backend="f8fx", options=options)(**batch()).loss.backward()
    assert [(r.converted, r.skipped) for r in reports] == [(ALL, 0)]


@pytest.mark.parametrize(
    ("filters", "skipped"),
    [
        (["lm_head"], {"lm_head"}),
        (
            [".mlp.", "lm_head"],
            {*(f"model.layers.0.mlp.{p}_proj" for p in ("gate", "up", "down")), "lm_head"},
        ),
    ],
)
def test_filter_fqns(model: nn.Module, reports: list[GraphReport], filters: list[str], skipped: set[str]):
    compiled(model, filter_fqns=filters)(**batch()).loss.backward()
    (report,) = reports
    assert {(d.fqn, d.role) for d in report.decisions if not d.converted} == {
        (name, role) for name in skipped for role in training.ROLES
    }
    assert report.reasons == {"filtered": 3 * len(skipped)}


@pytest.mark.long
def test_only_fqns(model: nn.Module, reports: list[GraphReport]):
    compiled(model, only_fqns=["self_attn"])(**batch()).loss.backward()
    assert Counter(d.fqn.split(".")[-2] for d in reports[0].decisions if d.converted) == {"self_attn": 4 * 3}


@pytest.mark.long
def test_everything_filtered_is_the_model_itself(model: nn.Module):
    """Nothing converted, nothing changed: the bits of the same executor without a pass."""
    from f8fx import executor

    plain = copy.deepcopy(model)
    torch._dynamo.reset()
    other = torch.compile(plain, backend=lambda gm, inputs: executor.compile_eager(gm, inputs, None))
    a, b = compiled(model, only_fqns=["no such module"])(**batch()), other(**batch())
    assert torch.equal(a.logits, b.logits)
    a.loss.backward()
    b.loss.backward()
    assert torch.equal(gradients(model), gradients(plain))


# -- precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["tensorwise", *seldom("rowwise")])
def test_autocast_with_float32_parameters(float32_model: nn.Module, reports: list[GraphReport], recipe: str):
    model = float32_model
    reference = copy.deepcopy(model)
    forward = compiled(model, recipe=recipe)
    with torch.autocast("cpu", torch.bfloat16):
        loss, expected = forward(**batch()).loss, reference(**batch()).loss
    loss.backward()
    expected.backward()
    assert [(r.converted, r.skipped) for r in reports] == [(ALL, 0)]
    assert loss.item() == pytest.approx(expected.item(), rel=0.01)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert sqnr(gradients(reference), gradients(model)) > 15


def test_float32_is_left_alone(float32_model: nn.Module, reports: list[GraphReport]):
    with torch.no_grad():
        logits, reference = (m(**batch()).logits for m in (compiled(float32_model), float32_model))
    assert reports[0].reasons == {"float32 matmul": LINEARS}
    assert sqnr(reference, logits) > 100


# -- inference and training -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.inference_mode, *seldom(torch.no_grad)])
def test_inference(model: nn.Module, reports: list[GraphReport], mode):
    forward = compiled(model.eval())
    with mode():
        logits, reference = forward(**batch()).logits, model(**batch()).logits
    assert [(r.training, r.converted, r.skipped) for r in reports] == [(False, LINEARS, 0)]
    assert not logits.requires_grad
    assert sqnr(reference, logits) > 20


def test_train_eval_switching(reports: list[GraphReport]):
    """Dropout is on or off with the mode; going back recompiles nothing."""
    torch.manual_seed(0)
    model = llama(num_hidden_layers=1, attention_dropout=0.5).to(torch.bfloat16)
    forward = compiled(model)
    seen = []
    for training_mode in (True, False, True, False):
        model.train(training_mode)
        with nullcontext() if training_mode else torch.no_grad():
            seen.append([forward(**batch()).logits for _ in range(2)])
    assert [(r.training, r.converted) for r in reports] == [(True, ALL), (False, LINEARS)]
    assert not torch.equal(*seen[0]) and not torch.equal(*seen[2])
    assert torch.equal(*seen[1]) and torch.equal(seen[1][0], seen[3][0])


def test_inference_has_the_bits_of_training(model: nn.Module):
    forward = compiled(model)
    trained = forward(**batch()).logits
    with torch.no_grad():
        inferred = forward(**batch()).logits
    assert torch.equal(trained, inferred)


@pytest.mark.long
def test_gradient_accumulation(model: nn.Module):
    """Two forwards before two backwards give what one at a time gives."""
    forward = compiled(model)
    for seed in (1, 2):
        forward(**batch(seed)).loss.backward()
    one_by_one = gradients(model)
    model.zero_grad()
    first, second = (forward(**batch(seed)).loss for seed in (1, 2))
    first.backward()
    second.backward()
    assert torch.equal(one_by_one, gradients(model))


def test_backward_twice_with_retain_graph(model: nn.Module):
    loss = compiled(model)(**batch()).loss
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    assert torch.equal(gradients(model), 2 * once)


def test_double_compile(model: nn.Module, reports: list[GraphReport]):
    """Compiled again: with another recipe another graph, with the same one the same bits."""
    with torch.no_grad():
        tensorwise = compiled(model)(**batch()).logits
        rowwise = compiled(model, recipe="rowwise")(**batch()).logits
        twice = compiled(compiled(model))(**batch()).logits
    assert [r.recipe for r in reports] == ["tensorwise", "rowwise", "tensorwise"]
    assert not torch.equal(tensorwise, rowwise)
    assert torch.equal(tensorwise, twice)


# -- graphs ---------------------------------------------------------------------------------------


class Broken(nn.Module):
    """The model in two graphs, with Python in between."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.model.model(input_ids=input_ids).last_hidden_state
        torch._dynamo.graph_break()
        return self.model.loss_function(self.model.lm_head(hidden), labels, self.model.config.vocab_size)


def test_graph_break(model: nn.Module, reports: list[GraphReport]):
    compiled(Broken(model), fullgraph=False)(**batch()).backward()
    parted = gradients(model)
    parts = sorted((r.converted, r.skipped) for r in reports if r.total)
    assert parts == [(3, 0), (ALL - 3, 0)]
    named = {d.fqn for r in reports for d in r.decisions}
    assert named == {f"model.{name}" for name in training.linear_names(model)}
    model.zero_grad()
    compiled(model)(**batch()).loss.backward()
    assert torch.equal(parted, gradients(model))


def test_per_layer_compile(reports: list[GraphReport]):
    """One backend object for equal blocks: few compiles, and names are local to the block."""
    model = copy.deepcopy(training.initial("llama"))
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend="f8fx", options={"select": "all", "executor": "eager", "strict": True})
    model(**batch()).loss.backward()
    assert {r.converted for r in reports} == {21} and len(reports) <= 2
    assert {d.fqn for r in reports for d in r.decisions} == {
        name.removeprefix("model.layers.0.")
        for name in training.linear_names(model)
        if name.startswith("model.layers.0.")
    }


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "sizes", "graphs"),
    [
        # Dynamo makes a graph of its own for batch 1
        ("tensorwise", [(2, 16), (3, 5), (4, 7), (1, 9), (1, 16)], 2),
        ("rowwise", [(2, 16), (3, 5)], 1),
    ],
)
def test_dynamic_batch_and_length(
    model: nn.Module, reports: list[GraphReport], recipe: str, sizes: list[tuple[int, int]], graphs: int
):
    """Few graphs whatever the sizes, odd ones too: that is what a weight's gradient contracts over."""
    reference = copy.deepcopy(model)
    forward = compiled(model, recipe=recipe, dynamic=True)
    for size in sizes:
        inputs = batch(batch=size[0], length=size[1])
        logits, expected = forward(**inputs).logits, reference(**inputs).logits
        assert sqnr(expected.detach(), logits.detach()) > 20, size
        for m, output in ((model, logits), (reference, expected)):
            m.zero_grad()
            output.float().square().mean().backward()
        assert sqnr(gradients(reference), gradients(model)) > 15, size
    assert all(d.converted for r in reports for d in r.decisions)
    assert len(reports) == graphs


@pytest.mark.long
def test_recompiles_for_another_size(model: nn.Module, reports: list[GraphReport]):
    """Without ``dynamic=True``: static first, then dynamic, as Dynamo does by default."""
    forward = compiled(model, dynamic=None)
    for length in (16, 17, 24, 31):
        forward(**batch(length=length)).loss.backward()
    assert [r.converted for r in reports] == [ALL, ALL]
    (m,) = {d.m for d in reports[0].decisions if d.role == "output"}
    assert m == 32
    assert all(isinstance(d.m, str) for d in reports[1].decisions if d.role == "output")
