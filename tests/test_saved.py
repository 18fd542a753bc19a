"""What is saved for the backward, against compiled torchao: no tensor more, and scales beside them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from tests.long import seldom

pytest.importorskip("triton")
codegen = pytest.importorskip("benchmarks.codegen")

TOKENS, DIM, HIDDEN = 4096, 512, 2048


class Residual(nn.Module):
    """The second layer reads a sum that its own residual keeps as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.first(x)
        return h + self.second(h)


MODELS = {
    "layers": lambda: nn.Sequential(nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)),
    "gelu": lambda: nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM)),
    "norm": lambda: nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Sigmoid()),
    "residual": Residual,
}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", *seldom("rowwise_with_gw_hp")])
@pytest.mark.parametrize("name", MODELS)
def test_lean_saves_no_tensor_more_than_torchao(name, recipe):
    with torch.device("meta"):
        model = MODELS[name]().to(torch.bfloat16)
        x = torch.empty(TOKENS, DIM, dtype=torch.bfloat16, requires_grad=True)
    torchao = convert_to_float8_training(
        copy.deepcopy(model), config=Float8LinearConfig.from_recipe_name(recipe)
    )
    _, ours = codegen.halves(model, x, recipe=recipe)
    _, theirs = codegen.halves(torchao, x, float8=False)
    # of each layer at most two with their reciprocals: numbers, or one for each row and column of its weight
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    scales = sum(4 * (4 if recipe == "tensorwise" else 2 * sum(layer.weight.shape)) for layer in layers)
    assert ours <= theirs + scales
    assert scales < TOKENS * DIM // 16  # a tensor more would show


class Attention(nn.Module):
    """Biased projections, but for the keys (Whisper's have no bias).

    Args:
        late: the bias of the values is computed after the queries.
    """

    def __init__(self, bias: bool, late: bool) -> None:
        super().__init__()
        self.late = late
        self.q, self.v, self.o = (nn.Linear(256, 256) for _ in range(3))
        self.k = nn.Linear(256, 256, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        bias = self.v.bias + x.flatten(0, 1).mean(0) if self.late else self.v.bias
        v = F.linear(x, self.v.weight, bias)
        q, k, v = (part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in (q, k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("bias", "late"), [(True, False), pytest.param(False, False, marks=pytest.mark.long), (False, True)]
)
def test_biases_in_gemms_save_no_more(bias, late):
    """Which results are kept, and so copied out of a merged one, is decided by where the biases are added."""
    model = Attention(bias, late).to(torch.bfloat16)
    x = torch.empty(2, 512, 256, dtype=torch.bfloat16, requires_grad=True)
    inside, after = (codegen.halves(model, x, bias=where)[1] for where in ("in_gemm", "torchao"))
    assert inside <= after
