"""The rewritten graph, run eagerly, gives the bits of torchao's eager ``Float8Linear``."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from f8fx.torch_private import supports_rowwise_scaled_mm
from tests.helpers import bf16, compiled, randn

torchao = pytest.importorskip("torchao.float8")

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
#: torch 2.11 cannot run torchao's rowwise recipes on CPU, so there is nothing to compare with
needs_rowwise = pytest.mark.skipif(
    not supports_rowwise_scaled_mm("cpu"), reason="this torch's CPU _scaled_mm takes per-tensor scales only"
)
PARAMS = [pytest.param(r, marks=[needs_rowwise] if r != "tensorwise" else [], id=r) for r in RECIPES]


def torchao_of(model: nn.Module, recipe: str) -> nn.Module:
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torchao.convert_to_float8_training(copy.deepcopy(model), config=config)


def run(model, x, grad, autocast=False):
    x = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", dtype=bf16, enabled=autocast):
        y = model(x)
    y.backward(grad.to(y.dtype))
    return [y.detach(), x.grad]


def assert_bitwise(model: nn.Module, recipe: str, shape: tuple[int, ...], **options):
    """Output, input gradient and all parameter gradients equal torchao's, bit for bit."""
    dtype = next(model.parameters()).dtype
    x = randn(*shape, dtype=dtype, grad=False, seed=1)
    with torch.no_grad():
        grad = randn(*model(x).shape, dtype=dtype, grad=False, seed=2)
    reference = torchao_of(model, recipe)
    expected = run(reference, x, grad)
    expected += [p.grad for p in reference.parameters()]
    actual = run(compiled(model, recipe=recipe, **options), x, grad)
    actual += [p.grad for p in model.parameters()]
    names = ["output", "grad of input", *(f"grad of {n}" for n, _ in model.named_parameters())]
    for name, want, got in zip(names, expected, actual, strict=True):
        assert want.dtype == got.dtype, name
        assert torch.equal(want, got), f"{name}: differs by up to {(want - got).abs().max()}"


@pytest.mark.parametrize("recipe", PARAMS)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [bf16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", [(32, 64), (2, 16, 64), (2, 2, 16, 64)], ids=["2d", "3d", "4d"])
def test_linear(recipe, bias, dtype, shape):
    torch.manual_seed(0)
    assert_bitwise(nn.Linear(64, 96, bias=bias, dtype=dtype), recipe, shape)


@pytest.mark.parametrize("recipe", PARAMS)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_autocast_with_float32_parameters(recipe, bias):
    """torchao's autocast branch asks for CUDA's autocast, so its one line is done here by hand."""

    class CastsInput(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x.to(bf16))

    torch.manual_seed(0)
    model = nn.Linear(64, 96, bias=bias)
    reference = CastsInput(torchao_of(model, recipe))
    x = randn(2, 16, 64, dtype=torch.float32, grad=False)
    grad = randn(2, 16, 96, grad=False, seed=2)
    expected = run(reference, x, grad) + [p.grad for p in reference.parameters()]
    actual = run(compiled(model, recipe=recipe), x, grad, autocast=True)
    actual += [p.grad for p in model.parameters()]
    for want, got in zip(expected, actual, strict=True):
        assert want.dtype == got.dtype and torch.equal(want, got)


class Mlp(nn.Module):
    """Two layers that share their input, one that reads their product; norm and residual around."""

    def __init__(self, dim: int = 64, hidden: int = 96) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


@pytest.mark.parametrize("recipe", PARAMS)
def test_shared_casts_change_no_bit(recipe):
    torch.manual_seed(0)
    assert_bitwise(Mlp().to(bf16), recipe, (2, 24, 64))


@pytest.mark.parametrize("recipe", PARAMS)
def test_one_module_used_three_times(recipe):
    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64, dtype=bf16)

        def forward(self, x):
            for _ in range(3):
                x = torch.tanh(self.layer(x))
            return x

    torch.manual_seed(0)
    assert_bitwise(Repeated(), recipe, (2, 16, 64))


@needs_rowwise
@pytest.mark.parametrize("recipe", RECIPES)
def test_custom_torchao_configs(recipe):
    """Recipes made from a config, with e4m3 gradients, fast accumulation or power-of-two scales."""
    import dataclasses

    from f8fx import Recipe

    base = torchao.Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(
        base,
        gemm_config_grad_input=torchao.config.Float8GemmConfig(use_fast_accum=True),
        round_scales_to_power_of_2=not base.round_scales_to_power_of_2,
    )
    torch.manual_seed(0)
    model = nn.Linear(64, 96, dtype=bf16)
    reference = torchao.convert_to_float8_training(nn.Sequential(copy.deepcopy(model)), config=config)
    x, grad = randn(32, 64, grad=False), randn(32, 96, grad=False, seed=2)
    expected = run(reference, x, grad) + [p.grad for p in reference.parameters()]
    actual = run(compiled(model, recipe=Recipe.from_torchao(config)), x, grad)
    actual += [p.grad for p in model.parameters()]
    for want, got in zip(expected, actual, strict=True):
        assert torch.equal(want, got)
