"""How far ahead of its turn a kernel may run to share a launch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.helpers import bf16

pytest.importorskip("triton")
codegen = pytest.importorskip("benchmarks.codegen")

from f8fx.torch_private import combining  # noqa: E402

MIB = 1 << 20


def launches(order, groups, size, reads=None):
    """Kernels are letters, gemms capitals; ``size`` is that of their results in MiB."""
    found = combining.launches(
        groups,
        order,
        lambda node: (reads or {}).get(node, ""),
        lambda node: size.get(node, 0) * MIB,
        str.isupper,
    )
    return " ".join("".join(launch) for launch in found)


def test_what_fits_is_one_launch():
    assert launches("aGbGcG", ["abc"], {"a": 900, "b": 128, "c": 128}) == "abc"
    assert launches("aGbGcG", ["abc"], {"a": 900, "b": 128, "c": 129}) == "ab c"


def test_the_bound_is_for_all_launches_of_a_graph_together():
    """Each holds less than it may."""
    assert launches("abGcdG", ["ac", "bd"], dict.fromkeys("abcd", 200)) == "ac b d"
    assert launches("aGcGbGdG", ["ac", "bd"], dict.fromkeys("abcd", 200)) == "ac bd"  # at different times


def test_layers_share_launches_with_their_neighbours_only():
    found = launches("aGbGcGdGeGfG", ["abcdef"], dict.fromkeys("abcdef", 100))
    assert found == "abc def"


def test_between_two_gemms_any_size_is_made_together():
    assert launches("GabcG", ["abc"], dict.fromkeys("abc", 500)) == "abc"


def test_small_ones_are_made_together_from_anywhere():
    assert launches("aGbGcGdG", ["abcd"], {"a": 0, "b": 300, "c": 0, "d": 0}) == "a bcd"
    assert launches("aGbGcGdG", ["abcd"], {"a": 0, "b": 200, "c": 100, "d": 0}) == "ab cd"


def test_nothing_waits_for_what_comes_later():
    """c reads a result that is there a gemm later than a: a, and all that reads it, would wait."""
    assert launches("aGbcG", ["ac"], {}, {"c": "b"}) == "a c"
    assert launches("aGcG", ["ac"], {}, {"c": "G"}) == "a c"
    assert launches("abGcG", ["ac"], {}, {"c": "b"}) == "ac"
    # d is there early, as it is made in a's launch
    assert launches("abGdGcG", ["ad", "bc"], {}, {"b": "a", "c": "d"}) == "ad bc"


@given(st.data())
def test_bound_and_order_hold(data):
    kernels = data.draw(st.lists(st.sampled_from([0, 1, 60, 130, 300, None]), max_size=40))  # None: a gemm
    order = list(range(len(kernels)))
    reads = {node: data.draw(st.lists(st.integers(0, node - 1), max_size=2)) for node in order if node}
    depth: dict[int, int] = {}
    for node in order:
        depth[node] = 1 + max((depth[source] for source in reads.get(node, ())), default=0)
    groups = [
        [n for n in order if depth[n] == d and kernels[n] is not None] for d in sorted(set(depth.values()))
    ]
    found = combining.launches(
        groups, order, lambda n: reads.get(n, []), lambda n: kernels[n] * MIB, lambda n: kernels[n] is None
    )
    assert sorted(n for launch in found for n in launch) == [n for n in order if kernels[n] is not None]
    runs = {n: launch[0] for launch in found for n in launch}
    gemms = [n for n in order if kernels[n] is None]
    for n in order:
        for source in reads.get(n, ()):
            start, made = runs.get(n, n), runs.get(source, source)
            assert made <= start or not any(start < gemm <= made for gemm in gemms)
    for gemm in gemms:
        assert sum(kernels[n] for n, start in runs.items() if start < gemm < n) * MIB <= combining.AHEAD


class Layers(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(number))

    def forward(self, x):
        for layer in self.layers:
            x = torch.sin(layer(x))
        return x


@pytest.mark.parametrize("ahead", [1, 3])
def test_casts_of_weights_in_generated_code(ahead, monkeypatch):
    """Of a model of many layers, each launch takes those of the next, not of all."""
    monkeypatch.setattr(combining, "AHEAD", ahead * 512 * 512)
    with torch.device("meta"):
        model, x = Layers(8).to(bf16), torch.empty(4096, 512, dtype=bf16, requires_grad=True)
    (_, backward), _ = codegen.halves(model, x, recipe="tensorwise")
    with codegen.h100():
        found = codegen.generate(backward, True)
    casts = [kernel.bytes for kernel in found.triton if kernel.name == "triton_quantize"]  # of weights alone
    read_and_written = 3 * 512 * 512
    assert read_and_written < max(casts) <= (ahead + 1) * read_and_written + 1024


def test_graphs_of_others_are_grouped_as_they_were():
    from torch._inductor.scheduler import ForeachKernelSchedulerNode as Combo
    from torch._inductor.virtualized import V

    before = Combo.group_algorithm_for_combo_kernels
    combining._group_within_memory.cache_clear()
    try:
        Combo.set_group_algorithm_for_combo_kernels(lambda scheduler: [["own"]])
        combining._group_within_memory()
        with V.set_graph_handler(SimpleNamespace()):
            assert Combo.group_nodes_for_combo_kernels(None) == [["own"]]
    finally:
        Combo.set_group_algorithm_for_combo_kernels(before)
        combining._group_within_memory.cache_clear()
