"""How far ahead of its turn a kernel may run to share a launch."""

from __future__ import annotations

import itertools
from graphlib import TopologicalSorter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.helpers import bf16
from tests.long import seldom

pytest.importorskip("triton")
blocks = pytest.importorskip("benchmarks.blocks")
codegen = pytest.importorskip("benchmarks.codegen")

from f8fx.torch_private import combining  # noqa: E402

MIB = 1 << 20


def launches(order, groups, size, reads=None, live=()):
    """Kernels are letters, gemms capitals; ``size`` is that of their results in MiB, ``live`` what is there with each."""
    found = combining.launches(
        groups,
        order,
        lambda node: (reads or {}).get(node, ""),
        lambda node: size.get(node, 0) * MIB,
        str.isupper,
        [bytes_ * MIB for bytes_ in live],
    )
    return " ".join("".join(launch) for launch in found)


def joined(order, found, reads=None, kinds=None):
    """Kernels are letters, gemms capitals; all are of one kind but those of ``kinds``."""
    launches = combining.joined(
        found.split(),
        order,
        lambda node: (reads or {}).get(node, ""),
        str.isupper,
        lambda node: (kinds or {}).get(node, "pointwise"),
    )
    return " ".join("".join(launch) for launch in launches)


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


def test_nothing_is_made_ahead_where_the_graph_needs_most():
    sizes = dict.fromkeys("abc", 100)
    assert launches("aGbGcG", ["abc"], sizes, live=[300] * 6) == "a b c"
    # the first gemm runs with least, so what follows it can be there by then; at the second there is room for one
    assert launches("aGbGcG", ["abc"], sizes, live=[0, 0, 150, 150, 300, 300]) == "abc"
    assert launches("aGbGcG", ["abc"], sizes, live=[150, 150, 150, 150, 300, 300]) == "ab c"
    assert launches("aGbGcG", ["abc"], sizes, live=[0, 0, 300, 300, 0, 0]) == "ab c"
    # at the start most is needed: the last two are made after it, together
    assert launches("aGbGcG", ["abc"], sizes, live=[300, 300, 0, 0, 0, 0]) == "a bc"


def test_what_is_small_is_made_anywhere():
    assert launches("aGbGcG", ["abc"], dict.fromkeys("abc", 32), live=[300] * 6) == "abc"
    assert launches("aGbGcG", ["abc"], dict.fromkeys("abc", 33), live=[300] * 6) == "ab c"


def test_launches_of_different_depth_are_one_between_the_same_gemms():
    assert joined("abcG", "a c", {"c": "b"}) == "ca"
    assert joined("abGc", "a c", {"c": "b"}) == "a c"  # a gemm between them
    assert joined("abcG", "a c", {"c": "b"}, {"c": "reduction"}) == "a c"
    assert joined("abcG", "a c", {"c": "b"}, dict.fromkeys("ac")) == "a c"  # small ones go with any as it is


def test_launches_are_one_only_if_neither_waits_for_the_other():
    assert joined("abcG", "a c", {"b": "a", "c": "b"}) == "a c"
    # d was to run ahead with a, and reads what c's launch makes
    assert joined("abcGd", "ad c", {"c": "b", "d": "c"}) == "ad c"
    # through a launch of other kernels: e waits for b there, and c for e
    assert joined("abecG", "a be c", {"b": "a", "c": "e"}, {"b": "r", "e": "r"}) == "a be c"


def test_of_a_launch_those_of_a_kind_are_moved():
    assert joined("abrcG", "ab c", {"c": "r"}, {"a": "reduction"}) == "a cb"


def test_a_joined_launch_holds_no_more_kernels_than_one():
    few, most = "abcdefgh", "abcdefghijklmno"
    assert joined(few + "xyG", f"{few} y", {"y": "x"}) == f"y{few}"
    assert joined(most + "xyzG", f"{most} yz", {"y": "x"}) == f"{most} yz"


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
    kinds = {n: data.draw(st.sampled_from([None, "one", "other"])) for n in order}
    by_depth = len(found)
    found = combining.joined(
        found, order, lambda n: reads.get(n, []), lambda n: kernels[n] is None, kinds.__getitem__
    )
    assert len(found) <= by_depth
    assert sorted(n for launch in found for n in launch) == [n for n in order if kernels[n] is not None]
    gemms = dict(zip(order, itertools.accumulate(kernels[n] is None for n in order), strict=True))
    launch_of = {n: tuple(launch) for launch in found for n in launch}
    units = {n: launch_of.get(n, (n,)) for n in order}
    runs = {n: min(gemms[member] for member in units[n]) for n in order}
    waits_for: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for n in order:
        assert all(runs[source] <= runs[n] for source in reads.get(n, ()))
        waits_for.setdefault(units[n], set()).update(units[source] for source in reads.get(n, ()))
    list(TopologicalSorter(waits_for).static_order())  # no launch waits for itself
    for ahead_of in range(max(gemms.values(), default=0)):
        ahead = [kernels[n] for n in launch_of if runs[n] <= ahead_of < gemms[n]]
        assert sum(ahead) * MIB <= combining.AHEAD
    for launch in found:
        assert len(launch) <= 16 or len({depth[n] for n in launch}) == 1


class Layers(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(number))

    def forward(self, x):
        for layer in self.layers:
            x = torch.sin(layer(x))
        return x


@pytest.mark.parametrize("ahead", [3, *seldom(1)])
def test_casts_of_weights_in_generated_code(ahead, monkeypatch):
    """Of a model of many layers, each launch takes those of the next, not of all."""
    monkeypatch.setattr(combining, "AHEAD", ahead * 512 * 512)
    monkeypatch.setattr(combining, "HIGHER", 0)
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

    before = Combo._default_group_nodes_for_combo_kernels
    combining._group_within_memory.cache_clear()
    try:
        Combo.set_group_algorithm_for_combo_kernels(lambda scheduler: [["own"]])
        combining._group_within_memory()
        with V.set_graph_handler(SimpleNamespace()):
            assert Combo.group_nodes_for_combo_kernels(None) == [["own"]]
    finally:
        Combo.set_group_algorithm_for_combo_kernels(before)
        combining._group_within_memory.cache_clear()


def there_with_each_kernel(model, *args, monkeypatch, is_backward=True):
    """MiB that are there while each kernel runs, and that it makes."""
    found = []

    def record(groups, order, read_from, bytes_made, is_gemm, live):
        found.extend((there / MIB, bytes_made(node) / MIB) for there, node in zip(live, order, strict=True))
        return [nodes for nodes in groups if nodes]

    monkeypatch.setattr(combining, "launches", record)
    halves, _ = codegen.halves(model, *args, recipe="tensorwise")
    with codegen.h100():
        codegen.generate(halves[is_backward], is_backward)
    return found


def test_bytes_that_are_there_with_each_kernel(monkeypatch):
    """A layer's backward: its output is saved (4 MiB), and freed when its gradient has become float8 twice (2 and 2).

    Beside them the input in float8 (2), a column of partial amaxes, the weight in float8 (1/4), and the gradients of
    weight (1/2) and input (4).
    """
    with torch.device("meta"):
        model, x = Layers(1).to(bf16), torch.empty(4096, 512, dtype=bf16, requires_grad=True)
    found = there_with_each_kernel(model, x, monkeypatch=monkeypatch)
    there = [there - found[0][1] if index < 2 else there for index, (there, _) in enumerate(found)]
    want = [4 + 2, 4 + 2, 4 + 2 + 4, 2 + 4 + 0.5, 0.5 + 2 + 0.25, 0.5 + 2 + 0.25 + 4]
    assert there == pytest.approx(want, abs=1e-3)
    assert [round(made, 2) for _, made in found] == [0.02, 0, 4, 0.5, 0.25, 4]


def test_parts_of_one_tensor_are_not_counted_beside_it(monkeypatch):
    """Gate and up are saved side by side (448 MiB), and so are both float8 copies of their gradients made (224 each)."""
    layers, args = blocks.block("mlp", 8192)
    found = there_with_each_kernel(layers, *args, monkeypatch=monkeypatch)
    gradient_of_product, product, gradient = 224, 112, 32  # of both the copies for the weight's gradient
    most = max(there for there, _ in found)
    assert most == pytest.approx(448 + gradient_of_product + 2 * 224 + product + gradient, abs=1)
