"""Values at the edge: what torchao does with them, to the bit, and what must never be hidden."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from f8fx.kernels import cast
from f8fx.torch_private import supports_rowwise_scaled_mm
from tests.helpers import bf16, compiled, randn, sqnr

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def linear(x, w, recipe):
    return compiled(F.linear, recipe=recipe)(x, w)


@pytest.mark.parametrize("recipe", RECIPES)
def test_zero_tensor_gives_zeros(recipe):
    x = torch.zeros(16, 32, dtype=bf16, requires_grad=True)
    w = randn(48, 32)
    y = linear(x, w, recipe)
    y.backward(torch.zeros_like(y))
    for value in (y, x.grad, w.grad):
        assert torch.equal(value, torch.zeros_like(value))


@pytest.mark.parametrize("recipe", RECIPES)
def test_zero_row_gives_a_zero_row(recipe):
    x = randn(16, 32, grad=False)
    x[3] = 0
    y = linear(x, randn(48, 32, grad=False), recipe)
    assert torch.equal(y[3], torch.zeros_like(y[3]))
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_reach_the_output(recipe, bad):
    x = randn(16, 32, grad=False)
    x[3, 5] = bad
    y = linear(x, randn(48, 32, grad=False), recipe)
    assert not torch.isfinite(y[3]).any()
    if recipe != "tensorwise":  # a row's scale is its own: the others are not touched
        assert torch.isfinite(y[:3]).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_subnormals_neither_overflow_the_scale_nor_vanish(recipe):
    """1e-38 is subnormal in bfloat16's float32 range; EPS keeps the scale finite."""
    x = torch.full((16, 32), 1e-38, dtype=bf16)
    y = linear(x, randn(48, 32, grad=False), recipe)
    assert torch.isfinite(y).all()
    scale = cast.scale(cast.amax(x, None), torch.float8_e4m3fn, False)
    assert torch.isfinite(scale) and scale > 0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_tiny_float16_amax_does_not_overflow_the_scale(dtype):
    """The smallest float16 would want a scale of 7.5e9, far beyond float16: scales are float32."""
    tiny = torch.full((4, 4), torch.finfo(torch.float16).smallest_normal / 1024, dtype=torch.float16)
    scale = cast.scale(cast.amax(tiny, None), dtype, False)
    assert scale.dtype == torch.float32 and torch.isfinite(scale)
    data = cast.quantize(tiny, scale, dtype, None, False, [1, 1])
    assert torch.equal(data.float(), torch.full((4, 4), torch.finfo(dtype).max))


@pytest.mark.parametrize("recipe", RECIPES)
def test_large_values_saturate_instead_of_overflowing(recipe):
    """Up to 1e30; beyond 1e34 some gemms for CPUs overflow between the first scale and the second."""
    x = randn(16, 32, grad=False) * 1e30
    y = linear(x, randn(48, 32, grad=False) * 0.01, recipe)
    assert torch.isfinite(y).all()
    assert sqnr(x.double() @ (randn(48, 32, grad=False) * 0.01).double().t(), y) > 20


def test_the_largest_values_have_finite_copies():
    x = randn(16, 32, grad=False) * 8e37
    for dim in (None, 0, 1):
        scale = cast.scale(cast.amax(x, dim), torch.float8_e4m3fn, False)
        data = cast.quantize(x, scale, torch.float8_e4m3fn, dim, False, [1, 1])
        assert torch.isfinite(scale).all() and (scale > 0).all()
        assert data.float().abs().max() == 448 and sqnr(x, data.float() / cast.broadcast(scale, dim)) > 20


def test_one_outlier_channel_costs_tensorwise_more_than_rowwise():
    """What rowwise scales are for: an outlier row takes the precision of its own row only."""
    x = randn(64, 128, grad=False)
    x[7] *= 1e6
    w = randn(48, 128, grad=False, seed=1)
    exact = x.double() @ w.double().t()
    others = [i for i in range(64) if i != 7]
    tensorwise = sqnr(exact[others], linear(x, w, "tensorwise")[others])
    rowwise = sqnr(exact[others], linear(x, w, "rowwise")[others])
    assert rowwise > 25 and rowwise > tensorwise + 10


def test_casts_saturate():
    x = torch.tensor([[1e9, -1e9, 448.0, 449.0]])
    one = torch.ones(())
    data = cast.quantize(x, one, torch.float8_e4m3fn, None, False, [1, 1])
    assert data.float().tolist() == [[448.0, -448.0, 448.0, 448.0]]


def test_power_of_two_scales_are_rounded_down():
    amax = torch.tensor([1.0, 3.0, 448.0, 500.0])
    scale = cast.scale(amax, torch.float8_e4m3fn, True)
    assert scale.tolist() == [256.0, 128.0, 1.0, 0.5]


def test_amax_of_nothing_is_zero():
    empty = torch.empty(0, 5)
    assert cast.amax(empty, None).item() == 0
    assert cast.amax(empty, 0).tolist() == [0] * 5
    assert cast.amax(empty, 1).shape == (0,)


def test_rowwise_support_is_what_this_torch_does():
    """The one place that says so is right about the installed version."""
    a = torch.ones(16, 16).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(a, a.t(), torch.ones(16, 1), torch.ones(1, 16), out_dtype=bf16)
        works = True
    except RuntimeError:
        works = False
    assert supports_rowwise_scaled_mm("cpu") == works
