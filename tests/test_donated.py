"""``retain_graph=True`` where a backward was compiled before it first ran, and may overwrite what was saved."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from f8fx.torch_private.donated import _copied, _repeatable
from tests.helpers import bf16, randn
from tests.processes import printed_by


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 64, bias=False, dtype=bf16)
        self.second = nn.Linear(64, 32, bias=False, dtype=bf16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.gelu(self.first(x)))


def of_three_backwards(model: nn.Module, x: torch.Tensor) -> list[list[torch.Tensor]]:
    loss = model(x).float().square().mean()
    return [
        list(torch.autograd.grad(loss, list(model.parameters()), retain_graph=retain))
        for retain in (True, True, False)
    ]


@pytest.mark.parametrize(
    "executor", ["eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.long])]
)
@pytest.mark.parametrize("select", ["all", "auto"])  # in bf16 on a CPU
@pytest.mark.parametrize("strict", [False, True])
def test_a_backward_runs_again(executor: str, select: str, strict: bool) -> None:
    model, x = Net(), randn(2, 16, 32)
    options = {"executor": executor, "select": select, "strict": strict}
    for grads in zip(
        *of_three_backwards(torch.compile(model, backend="f8fx", options=options), x), strict=True
    ):
        assert grads[0].abs().sum() > 0
        assert all(torch.equal(grads[0], other) for other in grads[1:])


@pytest.mark.parametrize("strict", [False, True])
def test_a_backward_runs_again_after_others_did_not(strict: bool) -> None:
    model, x = Net(), randn(2, 16, 32)
    options = {"executor": "eager", "select": "all", "strict": strict}
    compiled = torch.compile(model, backend="f8fx", options=options)
    compiled(x).sum().backward()
    first, *others = of_three_backwards(compiled, x)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_dynamic_sizes() -> None:
    """Torch compiles such backwards with their forwards."""
    model = Net()
    options = {"executor": "eager", "select": "all", "strict": True}
    compiled = torch.compile(model, backend="f8fx", options=options, dynamic=True)
    for rows in (16, 48):
        first, *others = of_three_backwards(compiled, randn(rows, 32))
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


FROM_THE_CACHE = """
import torch
from tests.test_donated import Net, of_three_backwards, randn
model = torch.compile(Net(), backend="f8fx", options={"select": "all"})
x = randn(2, 16, 32)
model(x).sum().backward()
first, *others = of_three_backwards(model, x)
equal = all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
print(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"], equal)
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_backward_from_the_cache_runs_again(tmp_path: Path) -> None:
    found = [printed_by(FROM_THE_CACHE, caches=tmp_path).splitlines()[-1] for _ in range(2)]
    assert found == ["0 True", "1 True"]


def test_what_is_donated_is_copied_with_its_strides() -> None:
    """And only if the backward runs again: the copy costs memory."""
    seen: list[torch.Tensor] = []

    def overwriting(args: list[torch.Tensor]) -> torch.Tensor:
        seen.append(args[0])
        return args[0].mul_(args[1])

    run, metadata = _repeatable(overwriting, SimpleNamespace(bw_donated_idxs=[0]))
    assert run is not None and metadata.bw_donated_idxs == []

    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, saved):
            ctx.saved = saved
            return x * saved

        @staticmethod
        def backward(ctx, grad):
            return run([ctx.saved, grad]), None

    saved = torch.randn(8, 6).t()[::2]  # neither contiguous nor dense
    x = torch.randn(3, 8, requires_grad=True)
    want = saved.clone()
    y = Multiply.apply(x, saved)
    (grad,) = torch.autograd.grad(y, x, torch.full_like(y, 2.0), retain_graph=True)
    assert torch.equal(grad, 2 * want) and torch.equal(saved, want)
    assert seen[0].stride() == saved.stride() and seen[0].data_ptr() != saved.data_ptr()
    (grad,) = torch.autograd.grad(y, x, torch.full_like(y, 2.0))
    assert torch.equal(grad, 2 * want) and seen[1] is saved


@pytest.mark.parametrize("shape", [(2, 1, 16), (1, 3, 1), (0, 1), (1,), ()])
def test_an_expanded_tensor_is_copied_as_one(shape: tuple[int, ...]) -> None:
    """Two elements of a copy at one place in memory cannot be written."""
    small = torch.randn(shape)
    large = small.expand(tuple(5 if size == 1 else size for size in shape))
    copy = _copied(large)
    assert torch.equal(copy, large) and copy.stride() == large.stride()
    assert copy.untyped_storage().data_ptr() != large.untyped_storage().data_ptr() or not large.numel()


def test_a_backward_that_is_given_an_expanded_tensor_runs_again() -> None:
    """A head of keys and values for two of queries, which attention saves as it gets it."""

    class Attention(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query = self.first(x).unflatten(-1, (2, 32)).transpose(1, 2)
            key = F.linear(x, self.second.weight.t())[..., :32].unsqueeze(1).expand(-1, 2, -1, -1)
            return F.scaled_dot_product_attention(query, key, key)

    model = Attention()
    compiled = torch.compile(
        model, backend="f8fx", options={"executor": "eager", "select": "all", "strict": True}
    )
    first, *others = of_three_backwards(compiled, randn(2, 16, 32))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("donated", [None, []])
def test_a_backward_without_donations_is_left_alone(donated: list[int] | None) -> None:
    metadata = SimpleNamespace(bw_donated_idxs=donated)
    assert _repeatable(len, metadata) == (len, metadata)
    assert _repeatable(None, SimpleNamespace(bw_donated_idxs=[0]))[0] is None
