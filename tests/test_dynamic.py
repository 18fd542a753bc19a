"""Sizes that change from step to step, and the ways a model is called in real life."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import f8fx
from f8fx import recording
from tests.helpers import bf16, compiled, randn, sqnr

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def linear(k=32, n=48):
    torch.manual_seed(0)
    return nn.Linear(k, n, dtype=bf16)


def step(model, x):
    y = model(x)
    y.backward(torch.ones_like(y))
    return y


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_last_odd_batch_does_not_crash_at_step_n(recipe):
    model = linear()
    f8 = compiled(model, recipe=recipe, dynamic=None)
    for m in (32, 32, 48, 17, 5, 2, 1, 33):
        x = randn(m, 32)
        model.zero_grad()
        step(f8, x)
        got = [x.grad.clone(), model.weight.grad.clone()]
        model.zero_grad()
        x.grad = None
        step(model, x)
        for want, value in zip([x.grad, model.weight.grad], got, strict=True):
            assert sqnr(want, value) > 20


@pytest.mark.parametrize("recipe", RECIPES)
def test_dynamic_true_gives_the_bits_of_static(recipe):
    model = linear()
    dynamic = compiled(model, recipe=recipe, dynamic=True)
    results = {}
    for m in (32, 17, 50):
        x = randn(m, 32)
        results[m] = [step(dynamic, x), x.grad]
    for m, want in results.items():
        x = randn(m, 32)
        got = [step(compiled(model, recipe=recipe), x), x.grad]
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_a_feature_size_that_a_weight_fixes():
    """It stays symbolic in the forward and is a number in the gradients."""
    weight = nn.Parameter(randn(16, 48, grad=False))
    f8 = compiled(lambda x: x[..., : x.shape[-1] // 2] @ weight, dynamic=True)
    with recording() as reports:
        f8(randn(2, 8, 32)).sum().backward()
    assert {(d.role, d.reason) for d in reports[0].decisions} == {
        (role, "converted") for role in ("output", "grad_input", "grad_weight")
    }


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_weight_that_is_cut_to_a_size_is_a_weight(dynamic):
    """Whichever side of the product it stands on: the recipe keeps its gradient in bf16."""
    table = nn.Parameter(randn(64, 64, grad=False))

    def f(h):
        return table[: h.shape[0]] @ h.T

    h, gradient = randn(32, 64), randn(32, 32, grad=False, seed=1)
    with recording() as reports:
        compiled(f, recipe="rowwise_with_gw_hp", dynamic=dynamic)(h).backward(gradient)
    assert torch.equal(table.grad[:32], gradient @ h)
    (report,) = reports
    assert {decision.role: decision.converted for decision in report.decisions} == {
        "output": True,
        "grad_input": True,
        "grad_weight": False,
    }


@pytest.mark.parametrize("dynamic", [False, True])
def test_weights_of_a_batch_that_are_cut_to_its_size(dynamic):
    table = nn.Parameter(randn(4, 64, 32, grad=False))
    with recording() as reports:
        y = compiled(lambda x: torch.bmm(x, table[: x.shape[0]]), dynamic=dynamic)(
            randn(2, 16, 64, grad=False)
        )
        y.sum().backward()
    assert [(each.role, each.reason) for each in reports[0].decisions] == [
        ("output", "batched matmul with a weight for each batch"),
        ("grad_weight", "batched matmul with a weight for each batch"),
    ]


def test_dynamic_sequence_and_batch():
    f8 = compiled(linear(), dynamic=True)
    with recording() as reports:
        for shape in ((2, 7, 32), (3, 5, 32), (4, 16, 32)):
            x = randn(*shape)
            assert step(f8, x).shape == (*shape[:2], 48)
    assert len(reports) == 1 and reports[0].converted == 3


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("k", "n"),
    [
        (30, 48),
        (32, 50),
        *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in ((7, 3), (16, 1), (1, 16))),
    ],
)
def test_padding_is_exact(recipe, k, n):
    """Zeros change no amax and add nothing: the padded gemm is the gemm of the padded operands."""
    model = linear(k, n)
    x = randn(24, k)
    y = step(compiled(model, recipe=recipe), x)
    wide = linear(32 if k < 32 else k + (-k) % 16, 48 if n < 48 else n + (-n) % 16)
    with torch.no_grad():
        wide.weight.zero_()
        wide.weight[:n, :k] = model.weight
        wide.bias.zero_()
        wide.bias[:n] = model.bias
    xw = F.pad(x.detach(), (0, wide.in_features - k)).requires_grad_()
    yw = compiled(wide, recipe=recipe)(xw)
    assert torch.equal(y, yw[:, :n])
    yw.backward(F.pad(torch.ones_like(y), (0, wide.out_features - n)))
    assert torch.equal(x.grad, xw.grad[:, :k])
    assert torch.equal(model.weight.grad, wide.weight.grad[:n, :k])


def test_empty_batch():
    f8 = compiled(linear(), dynamic=False)
    x = torch.empty(0, 32, dtype=bf16, requires_grad=True)
    y = step(f8, x)
    assert y.shape == (0, 48) and x.grad.shape == (0, 32)


def test_non_contiguous_input():
    model = linear()
    base = randn(32, 64, grad=False)
    strided, transposed = base[:, ::2], randn(32, 32, grad=False).t()
    for x in (strided, transposed):
        want = compiled(model)(x.contiguous())
        assert torch.equal(compiled(model)(x), want)


def test_several_forwards_before_a_backward_and_retain_graph():
    model = linear()
    f8 = compiled(model)
    a, b = randn(16, 32), randn(16, 32, seed=1)
    ya, yb = f8(a), f8(b)
    yb.sum().backward(retain_graph=True)
    ya.sum().backward()
    first = b.grad.clone()
    yb.sum().backward()
    assert torch.equal(b.grad, first * 2)
    again = randn(16, 32)
    f8(again).sum().backward()
    assert torch.equal(again.grad, a.grad)


def test_train_eval_no_grad_and_inference_mode():
    model = linear()
    f8 = compiled(model)
    x = randn(16, 32)
    trained = f8(x)
    with torch.no_grad():
        assert torch.equal(f8(x), trained)
    with torch.inference_mode():
        assert torch.equal(f8(x), trained)
    model.eval()
    assert torch.equal(f8(x), trained)
    model.train()
    f8(x).sum().backward()


def test_frozen_weights_that_were_made_under_inference_mode():
    """Under autocast PyTorch saves their rounding; f8fx saves them, which autograd refuses for such tensors."""

    def gradients(model):
        x = randn(16, 32, dtype=torch.float32)
        with torch.autocast("cpu", bf16):
            y = compiled(model)(x)
        y.sum().backward()
        return y.detach(), x.grad

    with torch.inference_mode():
        model = nn.Linear(32, 64).requires_grad_(False)
    ordinary = nn.Linear(32, 64).requires_grad_(False)
    ordinary.load_state_dict(model.state_dict())
    for found, wanted in zip(gradients(model), gradients(ordinary), strict=True):
        assert torch.equal(found, wanted)


def test_trained_weights_that_were_made_under_inference_mode():
    """They get the gradients that PyTorch's own compilers give them."""

    def gradients(made_under_inference_mode, **options):
        torch.manual_seed(0)
        with torch.inference_mode(made_under_inference_mode):
            first = linear(32, 64)
        model = nn.Sequential(first, nn.Tanh(), linear(64, 32))
        compiled(model, **options)(randn(16, 32, grad=False)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    for options in ({}, {"only_fqns": ["none"]}):
        for found, wanted in zip(gradients(True, **options), gradients(False, **options), strict=True):
            assert wanted.abs().sum() > 0 and torch.equal(found, wanted)


def test_double_compile():
    """Dynamo compiles through an already compiled module; the result is that of compiling once."""
    model = linear()
    want = compiled(model)(randn(16, 32))
    with recording() as reports:
        assert torch.equal(compiled(compiled(model))(randn(16, 32)), want)
    assert [r.converted for r in reports] == [3]


def test_graph_breaks_give_several_graphs():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(32, 32), linear(32, 32)

        def forward(self, x):
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x)

    with recording() as reports:
        step(compiled(Broken(), fullgraph=False), randn(16, 32))
    assert [r.converted for r in reports] == [3, 3]
    assert {d.fqn for r in reports for d in r.decisions} == {"a", "b"}


class Breaking(nn.Module):
    """Breaks the graph in the middle of a call of its own."""

    def __init__(self):
        super().__init__()
        self.a = linear(32, 32)

    def forward(self, x):
        x = self.a(x)
        torch._dynamo.graph_break()
        return x.tanh()


class Headed(nn.Module):
    """Its head is on Python's stack while its backbone runs, and so is a block that an index gives."""

    def __init__(self):
        super().__init__()
        self.backbone, self.heads = Breaking(), nn.ModuleDict({"lm_head": linear(32, 48)})
        self.blocks = nn.ModuleList([linear(32, 32)])

    def forward(self, x):
        x = self.blocks[0](self.backbone(x))
        return self.heads["lm_head"](self.backbone(x))


def test_modules_that_wait_for_the_break_keep_their_names():
    model, x = Headed(), randn(16, 32)
    with recording() as reports:
        step(compiled(model, fullgraph=False, filter_fqns=["lm_head"]), x)
    reasons = {(d.fqn, d.reason) for r in reports for d in r.decisions}
    assert {fqn for fqn, reason in reasons if reason == "filtered"} == {"heads.lm_head"}
    assert "blocks.0" not in {fqn for fqn, _ in reasons}  # could be the graph of all blocks
    rows = f8fx.explain(model, x, select="all", filter_fqns=["lm_head"]).rows
    assert {row.fqn for row in rows if row.reason == "filtered"} == {"heads.lm_head"}


class Policy(nn.Module):
    """One graph serves both heads: they are equal, and wait on Python's stack for the same break."""

    def __init__(self):
        super().__init__()
        self.backbone, self.policy, self.value = Breaking(), nn.Sequential(linear()), nn.Sequential(linear())
        self.other = nn.Sequential(linear(32, 64))

    def run(self, head, x):
        return head(self.backbone(x))

    def forward(self, x):
        return self.run(self.policy, x), self.run(self.value, x)


@pytest.mark.parametrize("name", ["policy", "value"])
def test_a_graph_of_two_modules_has_the_names_of_both(name):
    with recording() as reports, torch.no_grad():
        compiled(Policy(), fullgraph=False, filter_fqns=[name])(randn(16, 32, grad=False))
    (found,) = {(d.fqn, d.reason) for r in reports for d in r.decisions if d.fqn not in ("a", "backbone.a")}
    assert found == ("policy|value.0", "filtered")


def test_compiler_reset_recompiles():
    model = linear()
    f8 = compiled(model)
    with recording() as reports:
        f8(randn(16, 32))
        torch.compiler.reset()
        f8(randn(16, 32))
    assert len(reports) == 2


def test_lora_frozen_weight():
    class Lora(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = linear(32, 48).requires_grad_(False)
            self.a = nn.Linear(32, 16, bias=False, dtype=bf16)
            self.b = nn.Linear(16, 48, bias=False, dtype=bf16)

        def forward(self, x):
            return self.base(x) + self.b(self.a(x))

    model = Lora()
    with recording() as reports:
        step(compiled(model), randn(16, 32))
    roles = {(d.fqn, d.role) for d in reports[0].decisions if d.converted}
    assert ("base", "grad_weight") not in roles and ("base", "grad_input") in roles
    assert {r for f, r in roles if f == "a"} == {"output", "grad_input", "grad_weight"}
    assert model.base.weight.grad is None and model.a.weight.grad is not None


def test_chained_matmuls():
    """The result of one converted matmul is the operand of the next."""
    a, b, c = randn(16, 32), randn(32, 48, seed=1), randn(48, 64, seed=2)
    with recording() as reports:
        y = compiled(lambda a, b, c: a @ b @ c)(a, b, c)
        y.backward(torch.ones_like(y))
    assert reports[0].converted == 6
    assert sqnr(a.detach() @ b.detach() @ c.detach(), y.detach()) > 20


def test_double_backward_is_refused_or_right():
    """What plain AOTAutograd says of it is what f8fx says of it."""
    x = randn(16, 32)
    (gradient,) = torch.autograd.grad(compiled(linear())(x).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()
