"""Values that are not in memory any more keep the digits they had there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase

import f8fx
from f8fx import ops
from tests.helpers import compiled, graph_after, randn

M, K, N = 48, 64, 32
e4m3 = torch.float8_e4m3fn


def weights(*rows, k):
    return [randn(n, k, seed=seed + 1) for seed, n in enumerate(rows)]


def rounded(f, *args, **options):
    """The lines of a rewritten graph that round."""
    lines = graph_after(f, *args, **options).splitlines()
    return [line.partition(" = ")[2] for line in lines if "f8fx.rounded" in line]


def normalised(h):
    return h / h.abs().amax(-1, keepdim=True)


class TestGraph(TestCase):
    def test_a_result_with_a_bias(self):
        def f(x, w, b):
            h = F.linear(x, w, b)
            return torch.where(h >= h.amax(-1, keepdim=True), h, 0)

        with torch.no_grad():
            text = graph_after(f, randn(M, K), *weights(N, k=K), randn(N))
        self.assertExpectedInline(
            text[text.index("scaled_mm") :],
            """\
scaled_mm: bf16[48,32] = _scaled_mm(quantize, permute, reciprocal, reciprocal_1, None, None, bf16, True)
add: bf16[48,32] = add(scaled_mm, arg2_1)
rounded: bf16[48,32] = f8fx.rounded(add)
amax_2: bf16[48,1] = amax(rounded, [-1], True)
ge: torch.bool[48,32] = ge(rounded, amax_2)
scalar_tensor: bf16[] = scalar_tensor(0, dtype=bf16, layout=torch.strided, device=cpu)
where: bf16[48,32] = where(ge, rounded, scalar_tensor)
return [where]""",
        )

    def test_an_operand(self):
        def f(x, w):
            h = torch.tanh(x)
            return F.linear(h, w) + normalised(h)[:, :N]

        with torch.no_grad():
            text = graph_after(f, randn(M, K), *weights(N, k=K))
        self.assertExpectedInline(
            text,
            """\
arg0_1: bf16[48,64]
arg1_1: bf16[32,64]
tanh: bf16[48,64] = tanh(arg0_1)
rounded: bf16[48,64] = f8fx.rounded(tanh)
amax: f32[] = f8fx.amax(rounded, None)
scale: f32[] = f8fx.scale(amax, dtype=e4m3, power_of_2=False)
quantize: e4m3[48,64] = f8fx.quantize(rounded, scale, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale)
amax_1: f32[] = f8fx.amax(arg1_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[32,64] = f8fx.quantize(arg1_1, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal_1: f32[] = reciprocal(scale_1)
permute: e4m3[64,32] = permute(quantize_1, [1, 0])
scaled_mm: bf16[48,32] = _scaled_mm(quantize, permute, reciprocal, reciprocal_1, None, None, bf16, True)
abs: bf16[48,64] = abs(rounded)
amax_2: bf16[48,1] = amax(abs, [-1], True)
div: bf16[48,64] = div(rounded, amax_2)
slice: bf16[48,32] = slice(div, 1, 0, 32)
add: bf16[48,32] = add(scaled_mm, slice)
return [add]""",
        )


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("merge", ["auto", "never"])
def test_layers_with_biases(recipe, merge):
    def f(x, a, b, bias, other):
        return F.linear(x, a, bias) * F.linear(x, b, other)

    args = randn(M, K), *weights(N, N, k=K), randn(N), randn(N, seed=1)
    with torch.no_grad():
        assert len(rounded(f, *args, recipe=recipe, merge=merge)) == 2
        assert not rounded(f, *args, recipe=recipe, merge="never", bias="in_gemm")


@pytest.mark.parametrize("bias", ["torchao", "in_gemm"])
def test_scales_behind_the_gemm(bias):
    """Applied to the result, and then a bias: either is rounded, as it is in eager execution."""

    def f(x, w, b):
        return F.linear(x, w, b)

    rowwise = f8fx.Recipe.named("rowwise")
    exact = replace(rowwise, output=replace(rowwise.output, use_fast_accum=False))
    options = {"recipe": exact, "rowwise_scales": "torchao", "bias": bias}
    with torch.no_grad():
        assert len(rounded(f, randn(M, K), *weights(N, k=K), randn(N), **options)) == 2


def test_what_a_gemm_writes_is_not_rounded_again():
    assert not rounded(lambda x, w: normalised(F.linear(x, w)), randn(M, K), *weights(N, k=K))


@pytest.mark.parametrize("part", [lambda h: h[:, ::2], lambda h: h.chunk(2, 1)[1], lambda h: h[1:].t()])
def test_an_operand_that_is_a_part_is_rounded_as_a_whole(part):
    def f(x, w):
        h = torch.tanh(x)
        return F.linear(part(h), w).sum() + normalised(h)

    n = part(torch.empty(M, K)).shape[1]
    assert rounded(f, randn(M, K), *weights(N, k=n)) == ["f8fx.rounded(tanh)"]


def test_a_part_of_what_is_in_memory_has_its_digits():
    def f(x, w, v):
        h = F.linear(x, w)
        return F.linear(h[:, :16], v).sum() + normalised(h)

    assert not rounded(f, randn(M, K), *weights(N, k=K), *weights(N, k=16))


def test_gradients():
    """In the backward a maximum is compared with what it was taken of."""

    def f(x, w):
        h = torch.tanh(x)
        return F.linear(h, w).sum() + h.amax(-1)

    assert rounded(f, randn(M, K), *weights(N, k=K)) == ["f8fx.rounded(tanh)"]


@pytest.mark.parametrize(
    "after",
    [
        lambda h: h * (h >= h.topk(3).values[:, -1:]),
        lambda h: (h / h.sum(-1, keepdim=True)).acos(),
        lambda h: (1 - h.cumsum(-1)).sqrt(),
        lambda h: h.t().sin(),
        lambda h: h[1:].sin(),
    ],
)
def test_an_operand_that_something_else_reads(after):
    def f(x, w):
        h = torch.tanh(x)
        return F.linear(h, w).sum() + after(h)

    assert rounded(f, randn(M, K), *weights(N, k=K)) == ["f8fx.rounded(tanh)"]


def test_a_weight_that_was_gathered_in_float8_is_read_as_it_was():
    """Its float8 data, though something else reads it, too: it is not cast anew."""
    weight = randn(N, K, grad=False)
    scale = ops.scale(ops.amax(weight), dtype=e4m3)

    def f(x, data, scale):
        w = ops.dequantize(data, scale, dtype=torch.bfloat16)
        return F.linear(x, w).sum() + w.float().square().mean()

    text = graph_after(f, randn(M, K), ops.quantize(weight, scale, dtype=e4m3), scale)
    assert "f8fx.rounded" not in text
    assert not any(
        "f8fx.quantize" in line and line.partition(":")[2].startswith(f" e4m3[{N},{K}]")
        for line in text.splitlines()
    )


def test_a_residual_sum_is_written_once():
    def f(x, a, up, down):
        h = x + F.linear(torch.tanh(x), a)
        return h + F.linear(F.gelu(F.linear(h, up)), down)

    text = graph_after(f, randn(M, K), *weights(K, N, k=K), *weights(K, k=N))
    assert text.count("f8fx.materialize(add)") == 1
    assert "f8fx.rounded(add" not in text


@torch.library.custom_op("f8fx_tests::attention", mutates_args=())
def attention(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@attention.register_fake
def _(x):
    return torch.empty_like(x)


def test_what_somebody_elses_kernel_writes_is_in_memory():
    def f(x, w):
        h = attention(x)
        return F.linear(h, w), h.sin()

    assert not rounded(f, randn(M, K, grad=False), *weights(N, k=K))


def test_an_operand_that_only_matmuls_read_is_not_rounded():
    def f(x, w, v):
        h = torch.tanh(x)
        return F.linear(h, w), F.linear(h[1:], v)

    assert not rounded(f, randn(M, K, grad=False), *weights(N, N, k=K), merge="never")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_as_inductor_runs_it(recipe):
    """A bias, an operand and both gradients: NaN, and no element that is the largest, without rounding."""

    def f(x, w, b, v):
        h = F.linear(x, w, b)
        g = F.gelu(h)
        y = F.linear(g, v) + normalised(g) + normalised(h)
        return y, h >= h.amax(-1, keepdim=True), g >= g.amax(-1, keepdim=True)

    args = randn(M, K), *weights(N, k=K), randn(N), *weights(N, k=N)
    y, of_h, of_g = compiled(f, recipe=recipe, executor="inductor")(*args)
    y.sum().backward()
    assert of_h.any(-1).all() and of_g.any(-1).all()
    assert all(arg.grad.isfinite().all() for arg in args)


@pytest.mark.long
@pytest.mark.slow
def test_what_is_equal_to_its_mean_as_inductor_runs_it():
    """Rows of one number each: what rounding left of the difference would be divided by next to nothing."""

    def f(x, w, b):
        h = F.linear(x, w, b)
        return (h - h.mean(0, keepdim=True)) / (h.std(0, keepdim=True) + 1e-5), F.layer_norm(h, (N,))

    x = randn(1, K, grad=False).expand(M, K).contiguous().requires_grad_()
    rows = randn(1, K, grad=False).expand(N, K).contiguous().requires_grad_()
    by_column, by_row = compiled(f, executor="inductor")(x, rows, torch.full((N,), 2.7, dtype=x.dtype))
    assert not by_column.any() and not by_row.any()


@pytest.mark.long
@pytest.mark.slow
def test_shares_as_inductor_runs_it():
    """Of rows with one element that is not zero: its share is 1, and a digit more has no arc cosine."""

    def f(x, w):
        g = F.gelu(x)
        return F.linear(g, w), (g / g.sum(-1, keepdim=True)).acos()

    x = torch.zeros(M, K, dtype=torch.bfloat16)
    x[:, 3] = randn(M, grad=False).abs() + 0.5
    with torch.no_grad():
        _, angles = compiled(f, executor="inductor")(x, *weights(N, k=K))
    assert angles.isfinite().all()
    assert not angles[:, 3].any()
