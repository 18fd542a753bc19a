"""Numbers of rows that are known only at run time: rows chosen by a mask, rows that arrive from other ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from f8fx import ops
from f8fx.report import recording
from f8fx.torch_private import fake_tensor_mode, size_hint
from tests.helpers import Experts, bf16, compiled, randn, report_of, sqnr
from tests.long import seldom

E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def unbacked():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


class Chosen(nn.Module):
    """Layers of the rows that a mask chooses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 48, dtype=bf16), nn.Linear(48, 32, bias=False, dtype=bf16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x[mask])))


def outcome(model, call, *args):
    """Output and gradients, of weights and of the first argument."""
    model.zero_grad()
    args[0].grad = None
    y = call(*args)
    y.float().square().sum().backward()
    return [y.detach(), args[0].grad, *(p.grad.clone() for p in model.parameters())]


def first(rows, of=64):
    mask = torch.zeros(of, dtype=torch.bool)
    mask[:rows] = True
    return mask


@pytest.mark.parametrize(
    "recipe",
    [
        "tensorwise",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("rowwise", "rowwise_with_gw_hp")),
    ],
)
def test_results_are_those_of_as_many_rows(recipe):
    """To the bit, but for where rowwise scales are applied."""
    model, x = Chosen(), randn(64, 32)
    dynamic = compiled(model, fullgraph=True, recipe=recipe)
    for rows in (21, 64, 1, 0):
        found = outcome(model, dynamic, x, first(rows))
        if not rows:
            assert not any(value.any() for value in found)
            continue
        fixed = compiled(lambda x, rows=rows: model(x, slice(rows)), recipe=recipe, dynamic=False)
        wanted = outcome(model, fixed, x)
        if recipe == "tensorwise":
            assert all(map(torch.equal, wanted, found)), rows
        high = outcome(model, model, x, first(rows))
        for exact, a, b in zip(high, wanted, found, strict=True):
            assert sqnr(a, b) > sqnr(exact, a) + 6, rows


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("tensorwise", marks=pytest.mark.long)])
def test_through_inductor(recipe):
    model, x = Chosen(), randn(64, 32)
    call = compiled(model, fullgraph=True, recipe=recipe, executor="inductor")
    for rows in (21, 64, 1, 0):
        found = outcome(model, call, x, first(rows))
        for exact, value in zip(outcome(model, model, x, first(rows)), found, strict=True):
            assert sqnr(exact, value) > 20 if rows else not value.any()


def test_every_matmul_is_converted():
    for recipe, kept in (("tensorwise", 0), ("rowwise", 0), ("rowwise_with_gw_hp", 2)):
        report = report_of(Chosen(), randn(64, 32), first(21), recipe=recipe)
        assert report.converted == 6 - kept


def test_a_filter_is_given_no_rows():
    """It is not known how many there will be; other sizes are those of the layers."""
    found = set()

    def filter_fn(fqn, gemm):
        found.add((fqn, gemm.role, gemm.m, gemm.k, gemm.n))
        return True

    report_of(Chosen(), randn(64, 32), first(21), filter_fn=filter_fn)
    assert found >= {("up", "output", 0, 32, 48), ("up", "grad_weight", 48, 0, 32)}


class Cut(Chosen):
    """Layers of as many rows as a number says."""

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        rows = number.item()
        torch._check(rows >= 0)
        torch._check(rows <= x.shape[0])
        return super().forward(x, slice(rows))


def test_rows_cut_to_a_number():
    """The backward has a symbol of its own for it, which is known to be the same as the forward's."""
    model, x = Cut(), randn(64, 32)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), recording() as reports:
        found = outcome(model, compiled(model), x, torch.tensor(21))
    decided = [(d.fqn, d.role) for d in reports[0].decisions if d.converted]
    roles = ("output", "grad_input", "grad_weight")
    assert sorted(decided) == sorted(itertools.product(("up", "down"), roles))
    wanted = outcome(model, compiled(lambda x: Chosen.forward(model, x, slice(21)), dynamic=False), x)
    assert all(map(torch.equal, wanted, found))


class ChosenExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x: torch.Tensor, mask: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return self.experts(x[mask] + 1, counts)


@pytest.mark.parametrize(
    "executor", ["eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.long])]
)
def test_experts(executor):
    """The bits of as many rows; also where their number is no multiple of what grouped matmuls ask of strides."""
    model, x = ChosenExperts(), randn(64, 32)
    options = {"recipe": "rowwise", "experts": "convert", "executor": executor}
    dynamic = compiled(model, fullgraph=True, **options)
    for counts in ([16, 0, 20, 12], [1, 2, 3, 7], [0, 0, 0, 0]):
        rows, counts = sum(counts), torch.tensor(counts)
        found = outcome(model, dynamic, x, first(rows), counts)
        if not rows:
            assert not any(value.any() for value in found)
            continue
        fixed = compiled(
            lambda x, counts=counts, rows=rows: model(x, slice(rows), counts), **options, dynamic=False
        )
        wanted = outcome(model, fixed, x)
        assert all(map(torch.equal, wanted, found)), rows


def test_gemms_on_a_gpu_take_rows_that_are_contracted():
    """There torch asks of the strides of operands what it must know when it compiles."""
    with fake_tensor_mode(symbols=True) as mode:
        rows = mode.shape_env.create_unbacked_symint()
        torch._check(rows >= 0)
        grad, x = (torch.empty(rows, size, dtype=bf16, device="cuda") for size in (48, 32))
        scale = torch.empty((), device="cuda")
        left, right = (
            torch.ops.f8fx.quantize(each, scale, dtype=E4M3, transpose=True, align=[1, 16])
            for each in (grad, x)
        )
        product = torch._scaled_mm(left, right.t(), scale, scale, out_dtype=bf16)
    assert product.shape == (48, 32)


@pytest.mark.parametrize("rows", [0, 1, 16, 21])
def test_padding_goes_to_the_first_multiple_at_least(rows):
    x = randn(rows, 32, grad=False)
    args = torch.ones(()), E4M3
    padded = ops.quantize(x, args[0], dtype=E4M3, transpose=True, align=[1, 16])
    assert padded.shape == (32, 32 if rows > 16 else 16)
    assert not padded.view(torch.uint8)[:, rows:].any()


def test_a_size_that_was_found_to_be_another():
    """It has that one's value, as a gradient that comes back through collectives has."""
    with fake_tensor_mode(symbols=True) as mode:
        known = mode.from_tensor(torch.empty(48, 3), static_shapes=False).shape[0]
        found, other = (mode.shape_env.create_unbacked_symint() for _ in range(2))
        torch._check(found == known)
    assert size_hint(known) == size_hint(found) == 48
    assert size_hint(found + 1) == 49
    assert size_hint(other) is None


@pytest.mark.parametrize("choose", [lambda q, mask: q[mask], lambda q, mask: q.masked_select(mask[:, None])])
@pytest.mark.parametrize("grad", [True, *seldom(False)])
def test_rows_chosen_of_the_results_of_merged_layers(choose, grad):
    """What chooses them is not run anew for the strides of its input: it would give another number of rows."""

    def f(x, a, b, mask):
        q, k = F.linear(x, a), F.linear(x, b)
        return choose(q, mask) * 2, F.relu(k)

    args = randn(64, 32, grad=grad), randn(48, 32, grad=grad, seed=1), randn(48, 32, grad=grad, seed=2)
    mask = torch.arange(64) % 3 == 0
    report = report_of(f, *args, mask, target="h100")
    assert [d.merge for d in report.decisions if d.role == "output"]
    found = compiled(f, target="h100", recipe="rowwise")(*args, mask)
    wanted = compiled(f, target="h100", recipe="rowwise", merge="never")(*args, mask)
    assert all(map(torch.equal, found, wanted))
