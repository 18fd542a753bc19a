"""Which generated kernels share a launch, and what may be fused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sympy
import torch
from torch import nn

from tests.helpers import bf16

pytest.importorskip("triton")
codegen = pytest.importorskip("benchmarks.codegen")
hints = pytest.importorskip("torch._inductor.runtime.hints")

from f8fx.torch_private import scheduling  # noqa: E402

MEDIUM, LARGE = 1 << 24, 1 << 26


def node(name: str, elements: int, hint: str | None = None) -> SimpleNamespace:
    """What is looked at of a node of the scheduler; without a hint it is pointwise."""
    data = SimpleNamespace(reduction_hint=hint and hints.ReductionHint[hint])
    part = SimpleNamespace(node=SimpleNamespace(data=data), is_reduction=lambda: hint is not None)
    return SimpleNamespace(
        name=name,
        group=("cuda", (elements, 1)),
        is_reduction=lambda: hint is not None,
        get_nodes=lambda: [part],
    )


def launches(*nodes: SimpleNamespace) -> set[str]:
    return {" ".join(sorted(each.name for each in group)) for group in scheduling._launches(list(nodes))}


def test_small_kernels_go_with_any():
    assert launches(node("a", 64), node("b", 64, "INNER"), node("c", 64, "OUTER")) == {"a b c"}
    assert launches(node("cast", LARGE), node("scale", 64, "INNER")) == {"cast scale"}


def test_large_casts_are_one_launch():
    assert launches(node("a", LARGE), node("b", LARGE), node("c", MEDIUM)) == {"a b c"}


def test_reductions_and_casts_are_not():
    assert launches(node("cast", MEDIUM), node("amax", MEDIUM, "INNER")) == {"amax", "cast"}


def test_rows_and_columns_share_a_launch_unless_they_are_large():
    for hint in ("OUTER", "DEFAULT"):
        assert launches(node("rows", MEDIUM, "INNER"), node("columns", MEDIUM, hint)) == {"columns rows"}
        assert launches(node("rows", LARGE, "INNER"), node("columns", MEDIUM, hint)) == {"columns", "rows"}
        assert launches(node("rows", MEDIUM, "INNER"), node("columns", LARGE, hint)) == {"columns", "rows"}


def test_with_one_block_size_rows_and_columns_never_share_a_launch():
    nodes = [
        node("rows", 64, "INNER"),
        node("columns", 64, "OUTER"),
        node("cast", 64),
        node("sums", 64, "OUTER"),
    ]
    groups = [[each.name for each in group] for group in scheduling._along_and_across(nodes)]
    assert groups == [["rows", "cast"], ["columns", "sums"]]


@pytest.mark.parametrize("own_blocks", [False, True])
def test_rows_of_which_one_block_holds_any_number_of_elements_are_launched_alone(own_blocks, monkeypatch):
    """Combined, Inductor cannot generate code for them; before torch 2.14."""
    from torch._inductor.codegen import triton_combo_kernel as combo
    from torch._inductor.virtualized import V

    known, open_ = (node(name, 64, "INNER") for name in ("known", "open"))
    open_.group = ("cuda", (sympy.Integer(64), sympy.Symbol("s0", integer=True)))
    looped = node("looped", 64, "INNER")
    looped.group = open_.group
    monkeypatch.setattr(
        combo, "_custom_combo_kernel_horizontal_partition_algorithm", lambda nodes, *_: [list(nodes)]
    )
    scheduling._partition_by_kind.cache_clear()
    try:
        scheduling._partition_by_kind()
        nodes = Nodes((known, open_, looped))
        with V.set_graph_handler(SimpleNamespace()):
            V.graph.__dict__[scheduling._TUNED] = own_blocks
            partition = combo._custom_combo_kernel_horizontal_partition_algorithm
            groups = partition(nodes, None, nodes)
    finally:
        scheduling._partition_by_kind.cache_clear()
    found = {" ".join(sorted(each.name for each in group)) for group in groups}
    together = {"known looped open"} if scheduling.release() >= (2, 14) else {"known looped", "open"}
    assert found == together


class Nodes(list):
    """Nodes of a scheduler, and what a partition is told of each."""

    def __getitem__(self, node):
        return SimpleNamespace(tiling=("x", "r"), is_persistent_reduction=node.name != "looped")


class GateUp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(256, 512, bias=False) for _ in range(2))

    def forward(self, x):
        return torch.nn.functional.silu(self.gate(x)) * self.up(x)


@pytest.mark.parametrize("own_blocks", [False, True])
def test_in_generated_code(own_blocks, monkeypatch):
    """Amaxes of rows and of columns, Inductor's, are ready together: one launch only with blocks of their own."""
    if own_blocks and not hasattr(torch._inductor.config, "combo_kernel_autotune_grouping"):
        pytest.skip("this torch does not tune blocks of their own")
    monkeypatch.setattr(
        codegen,
        "tuning",
        lambda given: {"combo_kernels": True, "combo_kernel_per_subkernel_blocks": own_blocks},
    )
    with torch.device("meta"):
        model, x = GateUp().to(bf16), torch.empty(4096, 256, dtype=bf16, requires_grad=True)
    (_, backward), _ = codegen.halves(model, x, recipe="rowwise", kernels="inductor")
    mixed = []
    decide = scheduling._partition_by_kind
    decide()
    from torch._inductor.codegen import triton_combo_kernel as combo

    partition = combo._custom_combo_kernel_horizontal_partition_algorithm

    def watched(nodes, *args):
        groups = partition(nodes, *args)
        for group in groups:
            mixed.append(len({scheduling._direction(each) for each in group if each.is_reduction()}) > 1)
        return groups

    monkeypatch.setattr(combo, "_custom_combo_kernel_horizontal_partition_algorithm", watched)
    with codegen.h100():
        codegen.generate(backward, True)
    assert mixed and (own_blocks or not any(mixed))
    if torch.__version__.startswith("2.13"):  # what is ready together is a release's own
        assert any(mixed) == own_blocks


def test_transposed_casts_of_one_source_are_one_kernel_and_not_that_which_reduces_rows():
    with torch.device("meta"):
        model, x = GateUp().to(bf16), torch.empty(4096, 256, dtype=bf16, requires_grad=True)
    (_, backward), _ = codegen.halves(model, x, recipe="rowwise", kernels="inductor")
    with codegen.h100():
        found = codegen.generate(backward, True)
    assert sum(kernel.strided for kernel in found.triton) == 0
    assert "TileHint.SQUARE" not in found.code
    # the gradients of gate and up are read by it once, and by the kernels of their amaxes
    copies = [k for k in found.triton if "quantize" in k.name and k.bytes >= 3 * 4096 * 512 * 2]
    assert copies and all(kernel.reread == 0 for kernel in copies)


def test_tiles_of_a_launch_are_tuned_in_rewritten_graphs_alone(monkeypatch):
    from torch._inductor.codegen.triton_combo_kernel import ComboKernel
    from torch._inductor.virtualized import V

    monkeypatch.setattr(ComboKernel, "jit_line", lambda self, hint: f"tile_hint=TileHint.{hint},")
    scheduling._tune_tiles.cache_clear()
    try:
        scheduling._tune_tiles()
        few, many = (SimpleNamespace(sub_kernels=[None] * count) for count in (4, 5))
        with V.set_graph_handler(SimpleNamespace()):
            for own_blocks, tuned in ((None, ()), (False, (few, many)), (True, (few,))):
                if own_blocks is not None:
                    V.graph.__dict__[scheduling._TUNED] = own_blocks
                for launch in (few, many):
                    hint = "DEFAULT" if launch in tuned else "SQUARE"
                    assert ComboKernel.jit_line(launch, "SQUARE") == f"tile_hint=TileHint.{hint},"
    finally:
        scheduling._tune_tiles.cache_clear()


def test_the_users_partition_of_graphs_that_are_not_rewritten():
    from torch._inductor.codegen import triton_combo_kernel as combo
    from torch._inductor.virtualized import V

    calls = []

    def own(nodes, *args):
        calls.append(len(nodes))
        return [nodes]

    before = combo._custom_combo_kernel_horizontal_partition_algorithm
    scheduling._partition_by_kind.cache_clear()
    try:
        combo.set_custom_combo_kernel_horizontal_partition(own)
        scheduling._partition_by_kind()
        partition = combo._custom_combo_kernel_horizontal_partition_algorithm
        assert partition is not own
        with V.set_graph_handler(SimpleNamespace()):
            assert partition([1, 2], None, None) == [[1, 2]]
        assert calls[-1] == 2
    finally:
        combo.set_custom_combo_kernel_horizontal_partition(before)
        scheduling._partition_by_kind.cache_clear()
