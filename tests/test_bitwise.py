"""The rewritten graph, run eagerly, gives the bits of torchao's eager ``Float8Linear``."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from f8fx import recording
from f8fx.passes.choice import KEPT_BY_RECIPE
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


@pytest.mark.parametrize("recipe", PARAMS)
def test_autocast_of_weights_that_are_no_bare_parameters(recipe):
    """A part of a parameter, what is computed from one, an einsum's: none is rounded to bfloat16 first."""
    weight = nn.Parameter(randn(64, 32, dtype=torch.float32, grad=False))

    def layers(x, mm):
        first = mm(x, weight[:48].t())
        second = mm(x, (weight * 0.3).t())
        return first, second

    def by_einsum(x):
        return torch.einsum("mk,nk->mn", x, weight[:48]), torch.einsum("mk,kn->mn", x, (weight * 0.3).t())

    def results(f):
        x = randn(16, 32, dtype=torch.float32)
        weight.grad = None
        with torch.autocast("cpu", bf16):
            ys = f(x)
        torch.autograd.backward(ys, [randn(*y.shape, grad=False, seed=7) for y in ys])
        return [*(y.detach() for y in ys), x.grad, weight.grad]

    want = results(lambda x: layers(x, lambda a, b: product(a.to(bf16), b, recipe)))
    for f in (lambda x: layers(x, torch.matmul), by_einsum):
        for a, b in zip(want, results(compiled(f, recipe=recipe)), strict=True):
            assert torch.equal(a, b)


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


def product(x: Tensor, w: Tensor, recipe: str) -> Tensor:
    """torchao's ``x @ w`` for [m, k] and [k, n], sizes zero-padded to multiples of 16 and the result sliced."""
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    layer = torchao_of(nn.Linear(16, 16), recipe)
    (m, k), n = x.shape, w.shape[1]
    x, w = F.pad(x, (0, -k % 16, 0, -m % 16)), F.pad(w, (0, -n % 16, 0, -k % 16))
    return matmul_with_hp_or_float8_args.apply(x, w, layer.linear_mm_config, layer.config)[:m, :n]


#: name -> shapes of the inputs, the operator, and what it is with ``product`` as its matmul
OPERATORS = {
    # alpha and beta are powers of two: a gradient has the same bits multiplied by them before or after
    # it is cast or summed
    "addmm": (
        ((48,), (32, 64), (64, 48)),
        lambda b, x, w: torch.addmm(b, x, w, alpha=0.5, beta=2),
        lambda b, x, w, mm: mm(x, w) * 0.5 + b * 2,
    ),
    "addmm of a transposed weight": (
        ((48,), (32, 64), (48, 64)),
        lambda b, x, w: torch.addmm(b, x, w.t(), beta=4),
        lambda b, x, w, mm: mm(x, w.t()) + b * 4,
    ),
    "einsum": (
        ((2, 16, 64), (48, 64)),
        lambda x, w: torch.einsum("bsk,nk->bsn", x, w),
        lambda x, w, mm: mm(x.reshape(32, 64), w.t()).reshape(2, 16, 48),
    ),
    "einsum over heads": (
        ((2, 16, 4, 32), (4, 32, 48)),
        lambda x, w: torch.einsum("bshd,hdn->bsn", x, w),
        lambda x, w, mm: mm(x.reshape(32, 128), w.reshape(128, 48)).reshape(2, 16, 48),
    ),
    "Conv1D": (
        ((2, 16, 64), (64, 48), (48,)),
        lambda x, w, b: torch.addmm(b, x.view(-1, 64), w).view(2, 16, 48),
        lambda x, w, b, mm: (mm(x.reshape(32, 64), w) + b).reshape(2, 16, 48),
    ),
    "odd K": (((32, 30), (48, 30)), F.linear, lambda x, w, mm: mm(x, w.t())),
    "odd N": (((32, 64), (20, 64)), F.linear, lambda x, w, mm: mm(x, w.t())),
    "odd M, K and N": (
        ((5, 30), (20, 30), (20,)),
        F.linear,
        lambda x, w, b, mm: mm(x, w.t()) + b,
    ),
}


@pytest.mark.parametrize("recipe", PARAMS)
def test_other_ways_to_write_a_layer(recipe):
    """All in one graph: results, and the gradients of all inputs."""
    inputs = [[randn(*s, seed=i) for i, s in enumerate(shapes)] for shapes, _, _ in OPERATORS.values()]

    def layers(inputs):
        return [f(*args) for args, (_, f, _) in zip(inputs, OPERATORS.values(), strict=True)]

    def reference(inputs):
        def mm(x, w):
            return product(x, w, recipe)

        return [r(*args, mm) for args, (_, _, r) in zip(inputs, OPERATORS.values(), strict=True)]

    def results(call):
        own = [[x.detach().clone().requires_grad_() for x in args] for args in inputs]
        ys = call(own)
        torch.autograd.backward(ys, [randn(*y.shape, grad=False, seed=7) for y in ys])
        return [[y.detach(), *(x.grad for x in args)] for y, args in zip(ys, own, strict=True)]

    with recording() as reports:
        actual = results(compiled(layers, recipe=recipe, pad="auto"))
    assert reports[0].reasons.keys() <= {KEPT_BY_RECIPE}
    for name, wants, gots in zip(OPERATORS, results(reference), actual, strict=True):
        for index, (want, got) in enumerate(zip(wants, gots, strict=True)):
            assert torch.equal(want, got), f"{name}, {'gradient of input' if index else 'result'} {index}"


@pytest.mark.parametrize("recipe", PARAMS)
def test_addmm_multiplies_the_rounded_product(recipe):
    """By an alpha that is no power of two, and its bias by such a beta."""
    b, x, w = (randn(*s, grad=False, seed=i) for i, s in enumerate([(48,), (32, 64), (64, 48)]))
    got = compiled(lambda: torch.addmm(b, x, w, alpha=0.3, beta=0.7), recipe=recipe)()
    assert torch.equal(got, product(x, w, recipe) * 0.3 + b * 0.7)


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
