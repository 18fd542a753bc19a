"""*merge*: whatever reads a result by its place in memory reads what it read before."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import f8fx
from f8fx import recording
from tests.helpers import Block, bf16, compiled, gradients, randn, sqnr
from tests.passes.merged import H100, K, M, gate_up, reference, trained, weights


def same_as_separate(fn, *args):
    """Outputs to the bit, since merging leaves the scales of rows as they are; gradients closely."""
    results = []
    for merge in ("auto", "never"):
        inputs = [arg.detach().clone().requires_grad_() for arg in args]
        with f8fx.recording() as reports:
            outputs = compiled(fn, recipe="rowwise_with_gw_hp", merge=merge, **H100)(*inputs)
        assert any(found.merged for found in reports[0].merges) == (merge == "auto")
        sum((y * i).sum() for i, y in enumerate(outputs, 1)).backward()
        results.append((outputs, [x.grad for x in inputs]))
    (merged, gradients), (separate, others) = results
    for one, other in zip(merged, separate, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(gradients, others, strict=True):
        assert sqnr(other, one) > 20


def test_elements_that_are_found_by_strides():
    def f(x, a, b):
        return torch.as_strided(F.linear(x, a), (32, 16), (64, 1), 32).sin(), F.linear(x, b).sin()

    same_as_separate(f, randn(M, K), *weights(64, 64))


class Restrided(torch.autograd.Function):
    """Its gradient is read from the beginning of the memory that it lies in, as for ``as_strided``."""

    @staticmethod
    def forward(ctx, weight):
        return weight * 1

    @staticmethod
    def backward(ctx, grad):
        return torch.as_strided(grad, grad.shape, grad.stride(), 0) * 2


def test_elements_of_weight_gradients_that_are_found_by_strides():
    """Each is a tensor of its own then, not the rows of a merged one."""

    results = []
    for merge in ("auto", "never"):
        parameters = [nn.Parameter(randn(64, K, grad=False, seed=i)) for i in (1, 2)]
        x = randn(M, K)

        def f(x, parameters=parameters):
            a, b = map(Restrided.apply, parameters)
            return F.linear(x, a).sin(), F.linear(x, b).cos()

        with f8fx.recording() as reports:
            outputs = compiled(f, recipe="rowwise", merge=merge, **H100)(x)
        assert any(found.merged for found in reports[0].merges) == (merge == "auto")
        sum((y * i).sum() for i, y in enumerate(outputs, 1)).backward()
        results.append([parameter.grad for parameter in parameters])
    assert all(sqnr(want, got) > 20 for got, want in zip(*results, strict=True))


def test_matmuls_that_read_each_other():
    """Merged results are operands of other matmuls, merged sums are the gradients of others, merged or not."""

    def f(x, a, b, up_a, up_b):
        y = F.linear(F.linear(x, a), up_a)
        z = F.linear(F.linear(x, b), up_b)
        return F.linear(y, a).sin() * F.linear(y, b), z.sin()

    same_as_separate(f, randn(M, K), *weights(64, 64), randn(K, 64, seed=7), randn(K, 64, seed=8))


def test_a_merged_result_that_another_family_reads():
    def f(x, a, b, c, d):
        y, z = F.linear(x, a), F.linear(x, b)
        return F.linear(y, c).sin() * F.linear(y, d), z.sin()

    same_as_separate(f, randn(M, K), *weights(K, K, K, K))


@pytest.mark.parametrize(
    "recipe",
    [
        "tensorwise",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("rowwise", "rowwise_with_gw_hp")),
    ],
)
def test_dynamic_batches(recipe):
    """The input gradient is a view of dynamic size."""

    def f(x, a, b):
        return F.silu(F.linear(x.sin(), a)) * F.linear(x.sin(), b)

    steps = [compiled(f, dynamic=True, recipe=recipe, merge=merge, **H100) for merge in ("auto", "never")]
    for batch in (2, 3):
        grads = []
        for step in steps:
            args = randn(batch, 32, K), *weights(64, 64)
            step(*args).sum().backward()
            grads.append(args[0].grad)
        assert sqnr(grads[1], grads[0]) > 20


def test_dynamic_sizes():
    step = compiled(gate_up, dynamic=True, **H100)
    for rows in (64, 96, 7):
        x, (a, b) = randn(rows, K, grad=False), weights(64, 64, grad=False)
        with torch.no_grad():
            assert sqnr(gate_up(x, a, b), step(x, a, b)) > 20


@torch.library.custom_op("f8fx_tests::doubled", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))
def doubled(x: torch.Tensor) -> torch.Tensor:
    """A kernel that is given memory and sizes."""
    return torch.as_strided(x, x.shape, (x.shape[1], 1)).clone() * 2


@doubled.register_fake
def _(x):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@pytest.mark.parametrize("executor", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_custom_operators_read_what_they_read_before(executor):
    x, a, b = randn(32, 64, grad=False), randn(64, 64, grad=False, seed=1), randn(64, 64, grad=False, seed=2)

    def f(x):
        return doubled(F.linear(x, a)), doubled(F.linear(x, b).view(32, 64))

    for want, got in zip(f(x), compiled(f, target="h100", executor=executor)(x), strict=True):
        assert sqnr(want, got) > 20


@torch.library.custom_op("f8fx_tests::columns", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))
def columns(x: torch.Tensor) -> torch.Tensor:
    """A kernel for transposed matrices, likewise."""
    return torch.as_strided(x, x.shape[::-1], (x.shape[0], 1), x.storage_offset()).t().contiguous()


@columns.register_fake
def _(x):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@pytest.mark.parametrize(
    "executor", ["eager", pytest.param("inductor", marks=(pytest.mark.slow, pytest.mark.long))]
)
def test_custom_operators_read_turned_results_as_before(executor):
    x, a, b = randn(32, 64, grad=False), randn(64, 64, grad=False, seed=1), randn(64, 64, grad=False, seed=2)

    def f(x):
        return columns(F.linear(x, a).view(32, 64).t()), F.linear(x, b).relu()

    for want, got in zip(f(x), compiled(f, target="h100", executor=executor)(x), strict=True):
        assert sqnr(want, got) > 20


def halves_turned(y):
    return y.view(2, 16, 64).permute(1, 2, 0).view(16 * 64, 2)


@pytest.mark.parametrize(
    "use",
    [
        lambda y: columns(torch.slice_scatter(y.t(), torch.zeros(8, 32, dtype=y.dtype), 0, 0, 8)),
        lambda y: columns(halves_turned(y).relu()),
    ],
    ids=["written to", "a view that reads a copy"],
)
@pytest.mark.parametrize(
    "executor", ["eager", pytest.param("inductor", marks=(pytest.mark.slow, pytest.mark.long))]
)
def test_custom_operators_read_what_is_laid_out_as_a_turned_result_as_before(use, executor):
    x, a, b = randn(32, 64, grad=False), randn(64, 64, grad=False, seed=1), randn(64, 64, grad=False, seed=2)

    def f(x):
        return use(F.linear(x, a)), F.linear(x, b).relu()

    with recording() as reports:
        found = compiled(f, target="h100", executor=executor)(x)
    assert reports[0].merges[0].merged
    for want, got in zip(f(x), found, strict=True):
        assert sqnr(want, got) > 20


def test_strides_of_what_is_computed_from_a_view_that_reads_a_copy():
    x, a, b = randn(32, 64, grad=False), randn(64, 64, grad=False, seed=1), randn(64, 64, grad=False, seed=2)

    def f(x):
        return halves_turned(F.linear(x, a)).relu(), F.linear(x, b).relu()

    assert compiled(f, target="h100")(x)[0].stride() == f(x)[0].stride()


def test_attention_that_is_a_higher_order_operator():
    """Heads are views whose strides it records; a copy of another layout at its door would not do."""
    x, ws = randn(2, 16, 32, grad=False), [randn(64, 32, grad=False, seed=i) for i in (1, 2, 3)]

    def f(x, *ws):
        q, k, v = (F.linear(x, w).view(2, 16, 4, 16).transpose(1, 2) for w in ws)
        return flex_attention(q, k, v).transpose(1, 2).flatten(2)

    with recording() as reports:
        got = compiled(f, target="h100", recipe="rowwise")(x, *ws)
    assert reports[0].merges[0].merged
    assert torch.equal(got, compiled(f, target="h100", recipe="rowwise", merge="never")(x, *ws))


def test_weights_that_two_families_share():
    """Gradients of one weight from both are summed up: the sum waits for whichever comes last."""
    x, y, ws = randn(M, K), randn(M, K, seed=1), weights(64, 64, 64)

    def f(x, y, a, b, c):
        q, qy = F.linear(x, a), F.linear(y, a)
        k, ky = F.linear(x, b), F.linear(y, b)
        v, vy = F.linear(x, c), F.linear(y, c)
        return q * k + v, qy * ky + vy

    same_as_separate(f, x, y, *ws)


def overwritten_columns(y):
    y[:, :8] = 0
    return y


def overwritten_row(y):
    y[0] = 1
    return y


def overwritten_diagonal(y):
    y.diagonal().zero_()
    return y


@pytest.mark.parametrize(
    "use",
    [
        overwritten_columns,
        overwritten_row,
        overwritten_diagonal,
        lambda y: y.unfold(1, 8, 4),
        torch.diagonal,
    ],
)
def test_outputs_lie_in_memory_as_they_did(use):
    x, a, b = randn(24, 16), randn(64, 16, seed=1), randn(64, 16, seed=2)

    def f(x, a, b):
        return use(F.linear(x, a)), F.linear(x, b).sin()

    with recording() as reports:
        got = compiled(f, target="h100")(x, a, b)[0]
    assert reports[0].merges[0].merged
    want = f(x, a, b)[0]
    assert got.stride() == want.stride()
    assert got.untyped_storage().nbytes() == want.untyped_storage().nbytes()


def test_the_sum_of_gradients_may_lie_otherwise():
    """One that began with a turned summand; autograd takes it as it is."""
    x, ws = randn(2, 2, 16, 32), [randn(32, 32, seed=i, grad=i > 1) for i in (1, 2, 3)]

    def f(x, a, b, c):
        turned = F.linear(x.transpose(0, -2), c)
        return turned, torch.matmul(x.unsqueeze(0), a.t()).squeeze(0) * F.linear(x, b)

    results = []
    for call in (f, compiled(f, target="h100", recipe="rowwise_with_gw_hp")):
        x.grad = None
        sum(y.float().square().sum() for y in call(x, *ws)).backward()
        results.append(x.grad)
    assert sqnr(*results) > 20 and results[0].stride() == results[1].stride()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_under_autocast(recipe):
    """Each layer has its own cast of the input, and the gradients are added up in float32."""
    torch.manual_seed(0)
    model = Block(128, 256)
    x, grad = randn(256, 128, dtype=torch.float32), randn(256, 128, grad=False, seed=1)
    results = []
    for merge in ("never", "auto"):
        with recording() as reports, torch.autocast("cpu", bf16):
            call = compiled(model, target="h100", recipe=recipe, merge=merge)
            results.append(gradients(model, call, x, grad.float()))
    assert [m.merged for m in reports[0].merges] == [True]
    assert reports[0].converted == 9 and reports[0].gemms == 6
    plain = gradients(model, torch.autocast("cpu", bf16)(model), x, grad.float())
    for name, exact in plain.items():
        apart, merged = (sqnr(exact, result[name]) for result in results)
        assert merged >= apart - 0.3, (name, apart, merged)


class LowRank(nn.Module):
    """Weights that merged layers compute: their gradients wait for those of the layers that read them."""

    def __init__(self):
        super().__init__()
        self.z, self.left, self.right = (nn.Parameter(randn(K, K, seed=seed) / 16) for seed in range(3))

    def forward(self, x):
        first, second = F.linear(self.z, self.left), F.linear(self.z, self.right)
        return F.linear(x, first).relu() + F.linear(x, second).sigmoid()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_weight_gradients_that_another_familys_gradients_read(recipe):
    model, x = LowRank(), randn(K, K, seed=9)
    separate = trained(model, x, recipe=recipe, merge="never")
    with recording() as reports:
        together = trained(model, x, recipe=recipe, strict=True)
    assert [merge.merged for merge in reports[0].merges] == [True, True]
    for exact, merged, alone in zip(reference(model, x), together, separate, strict=True):
        assert sqnr(exact, merged) > sqnr(exact, alone) - 1


@pytest.mark.parametrize(
    "use",
    [
        lambda y: [part.view(-1).sin() for part in y.split(M // 2)],
        lambda y: [part.view(-1).sin() for part in y.view(2, M // 2, -1).unbind(0)],
        lambda y: [y.view(8, M // 8, 1, 1, -1).flatten(1) * 2],
    ],
)
def test_parts_of_a_merged_result_that_are_viewed(use):
    """A view that its strides do not allow reads a copy."""
    args = (randn(M, K, grad=False), *weights(64, 64, grad=False))

    def f(x, a, b):
        return *use(F.linear(x, a)), F.linear(x, b) + 1

    expected, found = (
        compiled(f, strict=True, **options)(*args)
        for options in ({"merge": "never", "recipe": "rowwise"}, {"recipe": "rowwise", **H100})
    )
    assert all(map(torch.equal, expected, found))
