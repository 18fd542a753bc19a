"""Activation checkpointing frees as much memory with float8 as without, but for the scales: they are saved,
4 bytes for a tensor or a row of it, so that what is cast again is not also reduced again."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import f8fx
from f8fx import ops
from tests.helpers import Block, bf16, compiled, joint_graphs, randn
from tests.long import seldom


def is_scale(node: fx.Node) -> bool:
    """Whether a node is a scale that a pass computed, or the reciprocal of one, which the gemms take."""
    if node.target is torch.ops.aten.reciprocal.default:
        (node,) = node.all_input_nodes
    return node.target is ops.scale and "f8fx" in node.meta


def _save_matmuls(ctx, op, *args, **kwargs):
    save = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


class Net(nn.Module):
    def __init__(self, mode, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList([Block(64, 128, bias=False) for _ in range(depth)])
        self.mode = mode

    def forward(self, x):
        for block in self.blocks:
            if self.mode == "full":
                x = checkpoint(block, x, use_reentrant=False)
            elif self.mode == "selective":
                contexts = functools.partial(create_selective_checkpoint_contexts, _save_matmuls)
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            else:
                x = block(x)
        return x


@functools.cache
def saved(
    mode: str,
    recipe: str | None,
    budget: float = 1.0,
    save: str = "lean",
    model: type[nn.Module] | None = None,
    rowwise_scales: str = "torchao",
    scales: bool = False,
) -> dict[str, int]:
    """Tensors kept between forward and backward that are no inputs: name -> bytes; scales, or all others."""
    result: dict[str, int] = {}

    def on_partition(forward, backward):
        # under a budget the partitioner weighs amaxes as it weighs everything else
        twice = {n.name for n in forward.graph.nodes if n.target is ops.amax and mode != "none"}
        assert not twice & {n.name for n in backward.graph.nodes}, "an amax is computed again"
        inputs = set(forward.graph.find_nodes(op="placeholder"))
        (output,) = forward.graph.find_nodes(op="output")
        for node in output.args[0][1:]:
            value = node.meta["val"] if isinstance(node, fx.Node) else None
            if node not in inputs and isinstance(value, torch.Tensor) and is_scale(node) == scales:
                result[node.name] = value.numel() * value.dtype.itemsize

    def transform(graph):
        if recipe is not None:
            parsed = f8fx.Options.parse({"recipe": recipe, "select": "all", "save": save})
            report = parsed.pipeline(debug=True, rowwise_scales=lambda device: rowwise_scales)(graph)
            assert report.converted > 0

    torch.manual_seed(0)
    network = (model or Net)(mode).to(bf16)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        joint_graphs(network, randn(8, 16, 64), transform=transform, on_partition=on_partition, save=save)
    return result


every_recipe = pytest.mark.parametrize(
    "recipe", ["tensorwise", "rowwise", pytest.param("rowwise_with_gw_hp", marks=pytest.mark.long)]
)


@every_recipe
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointing_saves_no_more_bytes_than_bf16(mode, recipe):
    high, float8 = saved(mode, None), saved(mode, recipe)
    assert sum(float8.values()) <= sum(high.values()), float8
    assert sum(high.values()) < sum(saved("none", None).values())


@pytest.mark.parametrize("recipe", ["rowwise", *seldom("tensorwise", "rowwise_with_gw_hp")])
def test_checkpointing_saves_scales(recipe):
    """The forward's seven or so operands of each block: 4 bytes for a tensor, or for each row of it."""
    found = saved("full", recipe, scales=True)
    assert found, "no scale is saved, so amaxes are computed again"
    assert all(size == 4 if recipe == "tensorwise" else size <= 4 * 128 for size in found.values()), found


class Reused(nn.Module):
    """One block run in three checkpointed regions: its weights' casts belong to none of them."""

    def __init__(self, mode):
        super().__init__()
        self.block = Block(64, 128, bias=False)

    def forward(self, x):
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize(
    ("recipe", "rowwise_scales"),
    [
        pytest.param("tensorwise", "in_gemm", marks=pytest.mark.long),  # it has none
        ("rowwise", "in_gemm"),
        ("rowwise", "torchao"),
        pytest.param("rowwise", "after", marks=pytest.mark.long),
        pytest.param("rowwise_with_gw_hp", "in_gemm", marks=pytest.mark.long),
        pytest.param("rowwise_with_gw_hp", "torchao", marks=pytest.mark.long),
        pytest.param("rowwise_with_gw_hp", "after", marks=pytest.mark.long),
    ],
)
def test_casts_shared_between_regions_are_not_saved(recipe, rowwise_scales):
    high = saved("full", None, model=Reused)
    float8 = saved("full", recipe, model=Reused, rowwise_scales=rowwise_scales)
    assert sum(float8.values()) <= sum(high.values()), float8


@every_recipe
def test_selective_checkpointing_saves_the_matmuls_results_and_no_casts(recipe):
    names = saved("selective", recipe)
    assert any("scaled_mm" in name for name in names), names
    assert all("quantize" not in name and "amax" not in name for name in names)


@pytest.mark.parametrize("recipe", ["tensorwise", *seldom("rowwise", "rowwise_with_gw_hp")])
@pytest.mark.parametrize("budget", [*seldom(0.0), 0.5])
def test_memory_budget_is_kept(budget, recipe):
    """The budget is a share of what is saved without one; float8 stays below that of bf16."""
    full = sum(saved("none", None).values())
    assert sum(saved("none", recipe, budget).values()) <= max(
        budget * full, sum(saved("none", None, budget).values())
    )


@pytest.mark.parametrize("recipe", ["rowwise", *seldom("tensorwise")])
def test_without_checkpointing_float8_saves_less_than_bf16(recipe):
    assert sum(saved("none", recipe).values()) < sum(saved("none", None).values())


@pytest.mark.parametrize("recipe", ["tensorwise", *seldom("rowwise")])
def test_lean_saves_no_copy_of_what_the_backward_can_rebuild(recipe):
    """Norm and SwiGLU outputs are rebuilt from what is saved anyway; "fast" keeps copies of weights that have one scale."""
    lean, fast = saved("none", recipe), saved("none", recipe, save="fast")
    more = sum(fast.values()) - sum(lean.values())
    assert more > 0 if recipe == "tensorwise" else more == 0
    assert not [name for name, size in lean.items() if "quantize" in name and size > 64 * 128]


def test_no_half_makes_a_layout_that_it_does_not_read():
    """Copies of weights that are made anew in the backward are not written in the forward, nor the other way round."""
    found = {}

    def on_partition(*halves):
        for name, half in zip(("forward", "backward"), halves, strict=True):
            casts = half.graph.find_nodes(op="call_function", target=ops.quantize_both)
            found[name] = [len([item for item in cast.users if item.users]) for cast in casts]

    def transform(graph):
        f8fx.Options.parse({"select": "all", "save": "fast"}).pipeline(debug=True)(graph)

    torch.manual_seed(0)
    joint_graphs(
        Net("full").to(bf16),
        randn(8, 16, 64),
        transform=transform,
        on_partition=on_partition,
        save="fast",
    )
    assert not found["forward"] and set(found["backward"]) == {2}, found


@pytest.mark.parametrize(
    ("mode", "save"),
    [
        ("full", "lean"),
        pytest.param("full", "fast", marks=pytest.mark.long),
        pytest.param("selective", "lean", marks=pytest.mark.long),
        pytest.param("selective", "fast", marks=pytest.mark.long),
    ],
)
@every_recipe
def test_checkpointed_gradients_are_those_without(mode, recipe, save):
    torch.manual_seed(0)
    plain, checkpointed = Net("none").to(bf16), Net(mode).to(bf16)
    checkpointed.load_state_dict(plain.state_dict())
    results = []
    for model in (plain, checkpointed):
        x = randn(8, 16, 64)
        y = compiled(model, recipe=recipe, save=save)(x)
        y.backward(randn(8, 16, 64, grad=False, seed=1))
        results.append([y, x.grad, *(p.grad for p in model.parameters())])
    for want, got in zip(*results, strict=True):
        assert torch.equal(want, got)
