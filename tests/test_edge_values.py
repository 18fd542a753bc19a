"""Values at the edge: what torchao does with them, to the bit, and what must never be hidden."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from f8fx.kernels import cast
from f8fx.recipe import EPS
from f8fx.torch_private import supports_rowwise_scaled_mm
from tests.helpers import bf16, compiled, randn, sqnr
from tests.long import seldom

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


@pytest.mark.parametrize("weights", ["dynamic", "cached"])
@pytest.mark.parametrize("recipe", ["rowwise", *seldom("rowwise_with_gw_hp")])
def test_a_row_scaled_by_itself_does_not_depend_on_the_others(recipe, weights):
    """What else is in a batch, padding say, is seen by one scale for all rows, in the forward and in the input's gradient."""
    k, n = 20, 36  # padded
    model = nn.Sequential(nn.Linear(k, n), nn.GELU(), nn.Linear(n, k)).to(bf16)
    call = compiled(model, recipe=recipe, weights=weights)
    found = []
    for rest in (1, 1000):
        x, grad = randn(16, k, grad=False), randn(16, k, grad=False, seed=1)
        x[4:] *= rest
        grad[4:] *= rest
        with torch.no_grad():
            alone = call(x)
        y = call(x.requires_grad_())
        y.backward(grad)
        found.append((alone[:4], y[:4].detach(), x.grad[:4]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_subnormals_do_not_overflow_the_scale(recipe):
    """1e-38 is subnormal in bfloat16 and far below EPS, which keeps the scale finite; so it becomes zero."""
    x = torch.full((16, 32), 1e-38, dtype=bf16)
    scale = cast.scale(cast.amax(x, None), torch.float8_e4m3fn, False)
    assert scale.item() == pytest.approx(448 / EPS)
    y = linear(x, randn(48, 32, grad=False), recipe)
    assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.parametrize("recipe", RECIPES)
def test_subnormals_above_eps_do_not_vanish(recipe):
    """float16's subnormals are 6e-8 and more: to float8 they are numbers as good as any."""
    x = (randn(16, 32, grad=False, dtype=torch.float16).clamp(-3, 3) * 2**-16).requires_grad_(False)
    assert x.abs().max() < torch.finfo(torch.float16).smallest_normal
    w = randn(48, 32, grad=False, dtype=torch.float16, seed=1) * 2**10
    assert sqnr(x.double() @ w.double().t(), linear(x, w, recipe)) > 20


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


# -- against torchao


class Linears(nn.Module):
    """One layer for each pair of an input and a weight."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for weight in weights:
            layer = nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
            layer.weight = nn.Parameter(weight)
            self.layers.append(layer)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        """[m, k] each -> [m, n] each."""
        return [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]


#: The largest finite numbers that every step of a CPU gemm still takes, and a subnormal, of each dtype.
LARGEST = {bf16: 1e30, torch.float16: 65504.0}
#: With which some CPUs' gemms overflow between the first scale and the second: then torchao's does, too.
OUT_OF_RANGE = {bf16: 1e38, torch.float16: 65504.0}
SUBNORMAL = {bf16: 1e-38, torch.float16: 1e-5}
EDGES = {
    "plain": lambda t, _: t,
    "zeros": lambda t, _: t * 0.0,
    "zero row": lambda t, _: t.index_fill(0, torch.tensor(3), 0.0),
    "zero column": lambda t, _: t.index_fill(1, torch.tensor(3), 0.0),
    "nan": lambda t, _: t.index_put(SPOT, torch.tensor(torch.nan, dtype=t.dtype)),
    "inf": lambda t, _: t.index_put(SPOT, torch.tensor(torch.inf, dtype=t.dtype)),
    "-inf": lambda t, _: t.index_put(SPOT, torch.tensor(-torch.inf, dtype=t.dtype)),
    "about EPS": lambda t, _: t * EPS,
    "subnormals": lambda t, dtype: (t.sign().double() * SUBNORMAL[dtype]).to(dtype),
    "large": lambda t, dtype: (t.double() / t.abs().max() * LARGEST[dtype]).to(dtype),
    "1e38": lambda t, dtype: (t.double() / t.abs().max() * OUT_OF_RANGE[dtype]).to(dtype),
    "outlier channel": lambda t, _: t * torch.ones(t.shape[1]).index_fill(0, torch.tensor(7), 1e3).to(t),
    "outlier row": lambda t, _: t * torch.ones(t.shape[0], 1).index_fill(0, torch.tensor(7), 1e3).to(t),
}
SPOT = (torch.tensor(3), torch.tensor(5))
#: The part of a layer -> the edges it is given, one at a time.
GIVEN = {
    "input": tuple(EDGES),
    "weight": ("zeros", "zero row", "nan", "large", "1e38"),
    "incoming gradient": ("zeros", "zero row", "nan", "inf", "about EPS", "large", "1e38"),
}


def bits(x: Tensor) -> Tensor:
    """The bits of a 2-byte tensor, signs of zeros included, with one NaN for all."""
    return torch.where(x.isnan(), torch.tensor(torch.nan, dtype=x.dtype), x).view(torch.int16)


@pytest.mark.parametrize("dtype", [bf16, *seldom(torch.float16)], ids=["bf16", "fp16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bits_of_torchao(recipe, dtype):
    """Every edge in turn in the input, in the weight and in the incoming gradient, of layers in one graph."""
    from tests.test_bitwise import torchao_of

    if recipe != "tensorwise" and not supports_rowwise_scaled_mm("cpu"):
        pytest.skip("this torch's CPU _scaled_mm takes per-tensor scales only, so torchao cannot run")
    names, tensors = [], []
    for index, (part, edges) in enumerate(GIVEN.items()):
        for edge in edges:
            parts = [
                randn(*s, dtype=dtype, grad=False, seed=i)
                for i, s in enumerate([(16, 32), (48, 32), (16, 48)])
            ]
            parts[1] = parts[1] * 0.1  # large values times plain ones stay in the dtype's range
            parts[index] = EDGES[edge](parts[index], dtype)
            names.append(f"{edge} in the {part}")
            tensors.append(parts)
    inputs, weights, grads = zip(*tensors, strict=True)

    def run(model, call):
        xs = [x.clone().requires_grad_() for x in inputs]
        ys = call(*xs)
        torch.autograd.backward(ys, grads)
        return zip(ys, [x.grad for x in xs], [p.grad for p in model.parameters()], strict=True)

    model = Linears(weights)
    reference = torchao_of(model, recipe)
    expected, actual = run(reference, reference), run(model, compiled(model, recipe=recipe, debug=False))
    for name, wants, gots in zip(names, expected, actual, strict=True):
        for what, want, got in zip(("output", "grad_input", "grad_weight"), wants, gots, strict=True):
            assert torch.equal(bits(want), bits(got)), f"{what}, {name}"
