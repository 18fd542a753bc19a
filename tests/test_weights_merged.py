"""Kept copies of merged weights, and of frozen weights in training."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from f8fx import recording, refresh_weights, reuse_weights
from f8fx.weights import watch as weight_watch
from tests.helpers import bf16, compiled, randn
from tests.long import seldom

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
#: The cost model is asked about a GPU, so that gemms are merged.
H100 = {"target": "h100"}
K = 128


class Block(nn.Module):
    """Three projections of one input, and one of their sum; gate and up are merged too."""

    def __init__(self, biased=False):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(K, n, bias=biased, dtype=bf16) for n in (128, 64, 64))
        self.o = nn.Linear(128, K, bias=biased, dtype=bf16)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.o(F.silu(q) * torch.cat([k, v.sin()], -1))


class LowRank(nn.Module):
    """A frozen block with an adapter on each of its projections."""

    def __init__(self):
        super().__init__()
        self.block = Block().requires_grad_(False)
        self.down, self.up = (
            nn.Linear(K, 16, bias=False, dtype=bf16),
            nn.Linear(16, K, bias=False, dtype=bf16),
        )

    def forward(self, x):
        return self.block(x + self.up(self.down(x)))


@pytest.fixture(autouse=True)
def _no_leftovers():
    yield
    torch._dynamo.reset()
    gc.collect()


def x64(grad=False):
    return randn(64, K, grad=grad)


def infer(model, x):
    with torch.no_grad():
        return model(x)


def warm(model, x, **options):
    """Compiled and called; once more, since compiling reads ``.data``, after which a weight is cast again."""
    f8 = compiled(model, weights="cached", **options, **H100)
    for _ in range(2):
        infer(f8, x)
    return f8


# -- inference


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("biased", [*seldom(False), True])
def test_the_bits_of_casting_merged_weights_in_every_call(recipe, biased, casts):
    model, x = Block(biased), x64()
    want = infer(compiled(model, recipe=recipe, **H100), x)
    with recording() as reports:
        kept = warm(model, x, recipe=recipe)
    (report,) = reports
    assert [found.layers for found in report.merges if found.merged] == [("q", "k", "v")]
    assert report.reused_weights == 4
    casts.clear()
    assert torch.equal(infer(kept, x), want)
    assert casts == [(64, K), (64, 128)]  # the inputs of both gemms


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param(name, change, marks=() if name == "v" else pytest.mark.long)
        for name in ("q", "k", "v", "o")
        for change in ("in place", "data", "load", "refresh")
    ],
)
def test_a_change_of_any_part_is_seen(name, change):
    model, x = Block(), x64()
    kept = compiled(model, weights="cached", **H100)
    infer(kept, x)
    layer = getattr(model, name)
    if change == "in place":
        with torch.no_grad():
            layer.weight.mul_(2)
    elif change == "data":
        layer.weight.data = layer.weight.data * 2
    elif change == "load":
        layer.load_state_dict({"weight": layer.weight.detach() * 2})
    else:
        torch._C.TensorBase.data.__get__(layer.weight).mul_(2)  # unseen
        refresh_weights(layer)
    got = infer(kept, x)
    assert torch.equal(got, infer(compiled(model, **H100), x))


def test_merged_copies_keep_their_address_and_go_with_any_of_their_parameters():
    model, x = Block(), x64()
    kept = compiled(model, weights="cached", **H100)
    infer(kept, x)
    parts = [model.q.weight, model.k.weight, model.v.weight]
    watches = tuple(map(weight_watch.watch_of, parts))
    (copies,) = (found for found in watches[0].copies.values())
    addresses = [tensor.data_ptr() for tensor in copies.tensors.values()]
    with torch.no_grad():
        model.k.weight.mul_(2)
    infer(kept, x)
    assert [tensor.data_ptr() for tensor in copies.tensors.values()] == addresses
    dropped = weakref.ref(copies)
    del copies, watches, kept
    torch._dynamo.reset()
    model.k.weight = nn.Parameter(torch.zeros_like(model.k.weight))
    del parts
    gc.collect()
    assert dropped() is None


def test_another_family_of_the_same_weights_has_copies_of_its_own():
    """Of tied weights one may be merged in one graph and alone in another."""
    model, x = Block(), x64()

    def layer(y):
        return F.linear(y, model.q.weight).sin()

    # all before any is called: to compile anything else forgets graphs, and with them their copies
    pairs = [
        [compiled(f, weights=weights, **H100) for weights in ("cached", "dynamic")] for f in (model, layer)
    ]
    for _ in range(4):
        for kept, plain in pairs:
            assert torch.equal(infer(kept, x), infer(plain, x))
        with torch.no_grad():
            model.q.weight.mul_(2)


def test_microbatches_of_merged_layers(casts):
    model, x = Block(), x64(grad=True)
    want = compiled(model, **H100)
    results = []
    for f8 in (want, compiled(model, weights="reused", **H100)):
        model.zero_grad()
        with reuse_weights(model) if f8 is not want else torch.enable_grad():
            casts.clear()
            for _ in range(2):
                f8(x).sum().backward()
        results.append([p.grad for p in model.parameters()])
        weights = [shape for shape in casts if shape in ((256, K), (K, 128))]
        assert len(weights) == (8 if f8 is want else 4)  # both layouts of both gemms' weights
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


# -- training


@pytest.mark.parametrize("recipe", ["rowwise", *seldom("tensorwise", "rowwise_with_gw_hp")])
def test_frozen_weights_are_cast_once_in_training(recipe, casts):
    """The adapter's own change from step to step, and are cast."""
    model = LowRank()
    results = []
    for choice in ("dynamic", "cached"):
        f8 = compiled(model, recipe=recipe, weights=choice, **H100)
        seen = []
        for seed in (1, 2, 3):
            model.zero_grad()
            x = randn(64, K, seed=seed)
            casts.clear()
            y = f8(x)
            y.sin().sum().backward()
            seen += [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]
        frozen = [shape for shape in casts if shape in ((256, K), (K, 128))]
        assert bool(frozen) is (choice == "dynamic")
        assert [shape for shape in casts if shape in ((16, K), (K, 16))]
        results.append(seen)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_an_optimizer_step_does_not_cast_frozen_weights_again(casts):
    model = LowRank()
    f8 = compiled(model, weights="cached", **H100)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    for step in range(3):
        casts.clear()
        f8(x64()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert any(shape == (256, K) for shape in casts) is (step == 0)


def test_a_frozen_weight_that_changes_between_steps():
    model, x = LowRank(), x64(grad=True)
    f8 = compiled(model, weights="cached", **H100)
    f8(x).sum().backward()
    with torch.no_grad():
        model.block.k.weight.mul_(2)
    got, want = f8(x), compiled(model, **H100)(x)
    assert torch.equal(got, want)
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (got, want)]
    assert torch.equal(*gradients)


def test_a_frozen_weight_that_changes_before_the_backward_is_an_error_as_in_high_precision():
    model, x = LowRank(), x64(grad=True)
    for f8 in (model, compiled(model, weights="cached", **H100)):
        y = f8(x)
        with torch.no_grad():
            model.block.k.weight.mul_(2)
        f8(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_an_optimizer_that_holds_frozen_weights_does_not_write_to_them(casts):
    model = LowRank()
    f8 = compiled(model, weights="cached", **H100)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(3):
        casts.clear()
        f8(x64()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert any(shape == (256, K) for shape in casts) is (step == 0)


@pytest.mark.parametrize(
    ("trained", "sign"),
    [
        pytest.param(True, "none", marks=pytest.mark.long),
        (True, "data is read"),
        pytest.param(True, "another optimizer steps", marks=pytest.mark.long),
        (False, "moved to where it is"),
    ],
)
def test_signs_between_two_forwards_and_their_backward(trained, sign, casts):
    """A weight that may have changed, and has not, is written by nobody: both forwards find their copies."""
    model, head = LowRank().requires_grad_(trained), nn.Linear(K, 8, dtype=bf16)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    results = []
    for choice in ("dynamic", "cached"):
        f8 = compiled(model, weights=choice, **H100)
        if trained:  # once, and frozen from then on
            infer(f8, x64())
            model.requires_grad_(True)
            f8(x64()).sum().backward()
            model.requires_grad_(False)
        x, other = x64(grad=True), x64(grad=True)
        y = f8(x)
        if sign == "data is read":
            model.block.k.weight.data.norm()
        elif sign == "moved to where it is":
            model.to("cpu")
        elif sign == "another optimizer steps":
            head(y.detach().new_ones(1, K)).sum().backward()
            optimizer.step()
        casts.clear()
        z = f8(other)
        if choice == "cached" and sign == "none":
            assert (256, K) not in casts
        (y.sum() + z.sin().sum()).backward()
        results.append((y, z, x.grad, other.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_weight_that_is_frozen_later():
    model, x = LowRank().requires_grad_(True), x64(grad=True)
    f8 = compiled(model, weights="cached", **H100)
    f8(x).sum().backward()
    model.block.requires_grad_(False)
    with torch.no_grad():
        model.block.q.weight.mul_(2)
    assert torch.equal(f8(x), compiled(model, **H100)(x))


def test_trainable_weights_are_cast_in_every_step(casts):
    model, x = Block(), x64(grad=True)
    f8 = compiled(model, weights="cached", **H100)
    for _ in range(2):
        casts.clear()
        f8(x).sum().backward()
        assert any(shape == (256, K) for shape in casts)


def test_inference_inside_a_training_process_keeps_all_of_them(casts):
    """A graph whose inputs may need gradients and whose outputs do not is no training graph."""
    model, x = Block(), x64(grad=True)

    def f(x):
        with torch.no_grad():
            return model(x)

    f8 = warm(f, x)
    casts.clear()
    f8(x)
    assert casts == [(64, K), (64, 128)]


def test_one_that_other_processes_can_write_is_enough_to_keep_none_of_them():
    model, x = Block().requires_grad_(False), x64()
    f8 = warm(model, x)
    model.k.weight.share_memory_()
    infer(f8, x)
    torch._C.TensorBase.data.__get__(model.k.weight).mul_(2)  # nothing here sees it
    assert torch.equal(infer(f8, x), infer(compiled(model, **H100), x))


def test_replaced_weights_leave_nothing_behind():
    model, x = Block().requires_grad_(False), randn(64, K, grad=False)
    f8 = compiled(model, weights="cached", **H100)
    alive = []
    for _ in range(4):
        model.k.weight = nn.Parameter(torch.randn_like(model.k.weight), requires_grad=False)
        f8(x)
        gc.collect()
        alive.append(sum(type(found) is weight_watch.Watch for found in gc.get_objects()))
    assert alive[-1] == alive[0]
    keepers = [watch.keepers for watch in weight_watch.WATCHES.values()]
    assert all(keeper in weight_watch.WATCHES.values() for found in keepers for keeper in found)
