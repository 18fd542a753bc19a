"""*concatenations*: what is put together for float8 matmuls alone is never written."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import nn

import f8fx
from f8fx import ops
from f8fx.passes import concatenations
from tests.helpers import compiled, graph_after, joint_graphs, randn, sqnr
from tests.long import seldom


def fused(x, gate_up, down):
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


def fused_args(hidden=48, tokens=(2, 16)):
    return randn(*tokens, 32), randn(2 * hidden, 32, seed=1), randn(32, hidden, seed=2)


def lines(fn, *inputs, **options):
    """What puts tensors together in the joint graph."""
    text = graph_after(fn, *inputs, **options)
    return [line for line in text.splitlines() if "f8fx.concat" in line or " cat(" in line]


class TestGraph(TestCase):
    def test_the_gradient_of_a_fused_layer(self):
        """Both of its matmuls read the parts."""
        self.assertExpectedInline(
            "\n".join(
                line
                for line in graph_after(fused, *fused_args()).splitlines()
                if "concat" in line or line.startswith("view_") or " cat(" in line
            ),
            """\
view_1: bf16[2,16,96] = view(scaled_mm, [2, 16, 96])
view_2: bf16[32,48] = view(mul, [32, 48])
view_3: bf16[2,16,32] = view(scaled_mm_1, [2, 16, 32])
view_4: bf16[32,32] = view(tangents_1, [32, 32])
view_5: bf16[2,16,48] = view(scaled_mm_3, [2, 16, 48])
view_6: bf16[32,48] = view(rounded_1, [-1, 48])
view_7: bf16[32,48] = view(rounded, [-1, 48])
concat: bf16[32,96] = f8fx.concat([view_6, view_7], 1)
amax_5: f32[] = f8fx.amax(concat, None)
quantize_both_1: (e5m2[32,96], e5m2[96,32]) = f8fx.quantize_both(concat, scale_5, scale_5, dtype=e5m2, align=[1, 1], align_t=[1, 1])
view_8: bf16[2,16,32] = view(scaled_mm_5, [2, 16, 32])""",
        )

    def test_projections_of_attention(self):
        def attention(x, qkv):
            q, k, v = F.linear(x, qkv).split([64, 32, 32], -1)
            return (q.sin().sum(-1, keepdim=True) * k.cos() + v.tanh()).sin()

        self.assertExpectedInline(
            "\n".join(lines(attention, randn(2, 16, 32), randn(128, 32))),
            """concat: bf16[32,128] = f8fx.concat([view_2, view_3, view_4], 1)""",
        )

    def test_an_input(self):
        def f(a, b, w):
            return F.linear(torch.cat([a.sin(), b.cos()], -1), w)

        self.assertExpectedInline(
            "\n".join(lines(f, randn(2, 16, 32), randn(2, 16, 64), randn(48, 96))),
            """concat: bf16[32,96] = f8fx.concat([view, view_1], 1)""",
        )

    def test_a_weight(self):
        def f(x, a, b):
            return F.linear(x, torch.cat([a, b])).sin()

        self.assertExpectedInline(
            "\n".join(lines(f, randn(32, 64), randn(48, 64), randn(16, 64))),
            """concat: bf16[64,64] = f8fx.concat([primals_1, primals_2], 0)""",
        )

    def test_a_fused_layer_that_is_merged_with_another(self):
        """Projections of attention beside those of an MLP, of one input: their gradients stand side by side, all five."""
        self.assertExpectedInline(
            "\n".join(lines(parallel, *parallel_args(), target="h100")),
            """\
concat: bf16[224,64] = f8fx.concat([primals_2, primals_3], 0)
cat: bf16[2,16,112] = cat([view_4, mul_1], -1)
concat_1: bf16[32,224] = f8fx.concat([view_7, view_8, view_9, view_10, view_11], 1)""",
        )


def parallel(x, qkv, gate_up, bias=None):
    q, k, v = F.linear(x, qkv, bias).split([64, 32, 32], -1)
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    attention = q.sin().unflatten(-1, (2, 32)) * k.cos().unsqueeze(-2) + v.tanh().unsqueeze(-2)
    return torch.cat([attention.flatten(-2), F.silu(gate) * up], -1)


def parallel_args():
    return randn(2, 16, 64), randn(128, 64, seed=1), randn(2 * 48, 64, seed=2)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("biased", [False, True])
def test_bits_of_a_fused_layer_that_is_merged_with_another(recipe, biased, monkeypatch):
    """Sums for the gradient of a bias included, which are taken part by part."""
    results = []
    for flatten in (concatenations._flatten, lambda *_: None):
        monkeypatch.setattr(concatenations, "_flatten", flatten)
        inputs = (*parallel_args(), randn(128, seed=3))[: 3 + biased]
        result = compiled(parallel, recipe=recipe, target="h100")(*inputs)
        result.sin().sum().backward()
        results.append([result, *(x.grad for x in inputs)])
    for ours, reference in zip(*results, strict=True):
        assert torch.equal(ours, reference)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_parts_that_are_turned(recipe):
    """Their matrices are copies: no view has the rows in order."""

    def f(a, b, w):
        return F.linear(torch.cat([a.sin().transpose(0, 1), b.cos().transpose(0, 1)], -1), w)

    inputs = randn(4, 8, 32), randn(4, 8, 64, seed=1), randn(48, 96, seed=2)
    assert "concat" in "".join(lines(f, *inputs, recipe=recipe))
    results = []
    for call in (f, compiled(f, recipe=recipe)):
        tensors = [x.detach().clone().requires_grad_() for x in inputs]
        y = call(*tensors)
        y.backward(randn(8, 4, 48, grad=False, seed=3))
        results.append([y, *(x.grad for x in tensors)])
    assert all(sqnr(want, got) > 20 for want, got in zip(*results, strict=True))


def test_a_fused_gradient_that_is_read_as_a_whole_stays_one_part():
    """The gradients of the weights are in high precision there."""
    found = lines(parallel, *parallel_args(), target="h100", recipe="rowwise_with_gw_hp")
    assert [line.count("view") for line in found if " f8fx.concat" in line] == [0, 2]
    assert sum(" cat(" in line for line in found) == 3


@pytest.mark.parametrize(
    ("recipe", "tokens"), [("tensorwise", (2, 16)), ("rowwise", (1, 5)), ("rowwise_with_gw_hp", (2, 16))]
)
def test_bits_are_those_of_separate_tensors(recipe, tokens, monkeypatch):
    """With the pass and without, and the pass does run."""
    results, seen = [], []
    original = f8fx.passes.Concatenations.__call__

    def counted(self, graph, conversions):
        result = original(self, graph, conversions)
        seen.append(len(graph.find_nodes(op="call_function", target=ops.concat)))
        return result

    for call in (counted, lambda self, graph, conversions: list(conversions)):
        monkeypatch.setattr(f8fx.passes.Concatenations, "__call__", call)
        inputs = fused_args(tokens=tokens)
        result = compiled(fused, recipe=recipe)(*inputs)
        result.sin().sum().backward()
        results.append([result, *(x.grad for x in inputs)])
    # a gradient of the weight in high precision reads the tensor, so that is written
    assert seen == [0 if recipe == "rowwise_with_gw_hp" else 1]
    for ours, reference in zip(*results, strict=True):
        assert torch.equal(ours, reference)


def test_dynamic_tokens():
    assert len(lines(fused, *fused_args(), dynamic=True)) == 1
    grads = []
    for dynamic, calls in ((True, [(2, 16), (3, 7)]), (False, [(3, 7)])):
        f = compiled(fused, dynamic=dynamic)
        for tokens in calls:
            inputs = fused_args(tokens=tokens)
            f(*inputs).sum().backward()
        grads.append([x.grad for x in inputs])
    assert all(map(torch.equal, *grads))


def test_dead_nodes_are_gone():
    """What was put together is not left for Inductor to write."""
    graphs = []

    def transform(graph):
        f8fx.Options.parse({"select": "all"}).pipeline(debug=True)(graph)

    joint_graphs(
        fused,
        *fused_args(),
        transform=transform,
        on_partition=lambda forward, backward: graphs.append((forward, backward)),
    )
    ((_, backward),) = graphs
    assert backward.graph.find_nodes(op="call_function", target=ops.concat)
    assert not backward.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)


# -- what stays


def stays(fn, *inputs, **options):
    found = lines(fn, *inputs, **options)
    return len(found) == 1 and " cat(" in found[0]


@pytest.mark.parametrize("dim", [None, -1])
def test_another_sum_needs_the_whole(dim):
    def summed(x, w):
        both = torch.cat([x.tanh(), x.sin()], -1)
        return F.linear(both, w) + both.sum(dim=dim, keepdim=True)[:, :1]

    assert stays(summed, randn(16, 64), randn(64, 128, seed=1))


@pytest.mark.parametrize("shape", [(64, 32), (1, 64, 32)])
@pytest.mark.parametrize("options", [{"recipe": "tensorwise"}, {"recipe": "rowwise"}], ids=str)
def test_the_sum_of_a_square_transpose_is_another(shape, options):
    """It has as many numbers as that of the columns."""

    def f(a, b, w):
        both = torch.cat([a.tanh(), b.sin()], -1)
        return F.linear(both, w), both.mT.sum(dim=tuple(range(both.dim() - 1)))

    inputs = randn(*shape, grad=False), randn(*shape, seed=2, grad=False), randn(64, 64, seed=1, grad=False)
    assert stays(f, *inputs, **options)
    assert torch.equal(compiled(f, **options)(*inputs)[1], f(*inputs)[1])


@pytest.mark.parametrize("shape", [(64, 64), (1, 64, 64)])
def test_the_gradient_of_a_bias_of_mixed_tokens(shape):
    """As many tokens as there are columns, and a gate behind."""

    def mixed(x, w, b):
        gate, up = F.linear(x.mT, w / 8, b).mT.chunk(2, -1)
        return gate.tanh() * up

    inputs = randn(*shape, grad=False), randn(64, 64, seed=1), randn(64, seed=2)
    found = []
    for call in (mixed, compiled(mixed, recipe="rowwise")):
        inputs[2].grad = None
        y = call(*inputs)
        y.backward(randn(*y.shape, grad=False, seed=3))
        found.append(inputs[2].grad)
    assert sqnr(*found) > 20


def biased(x, w, b):
    gate, up = F.linear(x, w, b).chunk(2, -1)
    return F.silu(gate) * up


def attention(x, w, b):
    """The gradients that are put together are in memory, as attention wrote them."""
    q, k, v = (y.unflatten(-1, (2, 16)).transpose(1, 2) for y in F.linear(x, w, b).split(32, -1))
    return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("recipe", ["rowwise", *seldom("tensorwise")])
@pytest.mark.parametrize("fn", [biased, attention])
@pytest.mark.parametrize("trained", [True, False])
def test_the_gradient_of_a_bias_is_summed_part_by_part(fn, trained, recipe, monkeypatch):
    inputs = randn(2, 16, 32), randn(96, 32, seed=1), randn(96, seed=2, grad=trained)
    text = graph_after(fn, *inputs, recipe=recipe)
    assert len(re.findall(r"column_sums\(concat\w*\)", text)) == trained
    assert len(re.findall(r"concat\(", text)) == (trained or fn is biased or recipe == "rowwise")
    grads = []
    for call in (f8fx.passes.Concatenations.__call__, lambda self, graph, conversions: list(conversions)):
        monkeypatch.setattr(f8fx.passes.Concatenations, "__call__", call)
        tensors = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        result = compiled(fn, recipe=recipe)(*tensors)
        result.sin().sum().backward()
        grads.append([result, *(x.grad for x in tensors if x.requires_grad)])
    assert all(map(torch.equal, *grads))


def test_other_sums_read_the_whole():
    """Over the rows, over everything, in another dtype, and of a tensor whose parts stand one below the other."""
    for total in (
        lambda x: x.sum(-1),
        lambda x: x.sum(),
        lambda x: x.sum((0, 1), dtype=torch.float32),
        lambda x: x.view(-1, 16).sum(0),
    ):

        def f(a, b, w, total=total):
            x = torch.cat([a.sin(), b.cos()], -1)
            return F.linear(x, w), total(x)

        assert stays(f, *(randn(2, 16, 32, grad=False) for _ in "ab"), randn(32, 64, grad=False))

    def below(a, b, w):
        x = torch.cat([a.sin(), b.cos()], 0)
        return F.linear(x, w), x.sum(0)

    assert stays(below, *(randn(16, 32, grad=False) for _ in "ab"), randn(32, 32, grad=False))


def test_another_reader():
    def f(a, b, w):
        x = torch.cat([a.sin(), b.cos()], -1)
        return F.linear(x, w), x.exp()

    assert stays(f, *(randn(16, 32, grad=False) for _ in "ab"), randn(32, 64, grad=False))


def test_a_matmul_that_is_skipped():
    inputs = fused_args()
    assert stays(fused, *inputs, filter_fn=lambda fqn, gemm: gemm.role != "grad_weight")


def test_a_matmul_that_reads_it_in_another_shape():
    def f(a, b, w, v):
        x = torch.cat([a.sin(), b.cos()], -1)
        return F.linear(x, w), F.linear(x.view(32, 32), v)

    inputs = (randn(16, 32), randn(16, 32), randn(32, 64), randn(32, 32))
    assert stays(f, *(x.detach() for x in inputs))


@pytest.mark.parametrize("sizes", [(40, 24), (16,) * 5, (64,)], ids=["ragged", "many", "one"])
def test_parts_that_cannot_or_need_not_be_written_side_by_side(sizes):
    def f(w, *parts):
        return F.linear(torch.cat([part.sin() for part in parts], -1), w)

    found = lines(f, randn(32, sum(sizes), grad=False), *(randn(16, size, grad=False) for size in sizes))
    assert not any("concat" in line for line in found)


def test_along_another_dimension():
    def f(a, b, w):
        return F.linear(torch.cat([a.sin(), b.cos()], 1), w)

    assert stays(f, *(randn(2, 16, 32, grad=False) for _ in "ab"), randn(32, 32, grad=False))


def test_a_part_of_another_dtype():
    def f(a, b, w):
        return F.linear(torch.cat([a.sin(), b.int()], -1), w)

    assert stays(f, *(randn(16, 32, grad=False) for _ in "ab"), randn(32, 64, grad=False))


def test_parts_in_memory():
    """Whether columns lie there one by one or in one tensor: each is read as often as a whole would be."""

    def inputs_of_the_graph(a, b, w):
        return F.linear(torch.cat([a, b.view(16, 32)], -1), w)

    def slices(x, v, w):
        y = F.linear(x, v)
        return F.linear(torch.cat([y[:, 32:], y[:, :32]], -1), w)

    def split(x, v, w):
        return F.linear(torch.cat(F.linear(x, v).split(32, -1)[::-1], -1), w)

    a, w = randn(16, 32, grad=False), randn(32, 64, grad=False)
    assert stays(inputs_of_the_graph, a, randn(4, 4, 32, grad=False), w)
    for f in (slices, split):
        assert stays(f, a, randn(64, 32, grad=False), w)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_parts_in_memory_of_which_rows_and_columns_are_scaled(recipe):
    """For the two sets of scales Inductor reads what is written side by side three times, the parts twice."""

    def f(x, weight, first, second):
        a, b = F.linear(x, weight).chunk(2, -1)
        return F.linear(a, first), F.linear(b, second)

    inputs = randn(16, 32), randn(96, 32, seed=1), randn(64, 48, seed=2), randn(80, 48, seed=3)
    assert stays(f, *inputs, recipe=recipe) == (recipe == "tensorwise")
    assert stays(f, inputs[0].detach(), *inputs[1:], recipe=recipe)  # its own gradient needs columns only


@pytest.mark.parametrize("widths", [(32, 32), (48, 16)])
def test_inputs_in_memory_of_which_rows_and_columns_are_scaled(widths):
    """Rows in the forward, columns in the backward. Of other widths they are not read in one launch there."""

    def f(a, b, w):
        return F.linear(torch.cat([a, b], -1), w)

    inputs = *(randn(16, width, grad=False) for width in widths), randn(32, 64)
    assert stays(f, *inputs, recipe="rowwise") == (widths != (32, 32))


def test_weights_in_memory_of_which_rows_and_columns_are_scaled():
    """In the forward alone, of what is saved: more would be read."""

    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Parameter(randn(32, 32, seed=seed, grad=False)) for seed in (0, 1))

        def forward(self, x):
            return F.linear(x.sin(), torch.cat([self.a, self.b], -1))

    assert stays(Joined(), randn(16, 64), recipe="rowwise")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_scales_of_an_input_alone_count(recipe):
    """Not those of its weights, which are stored with scales of rows: under ``tensorwise`` the input has one."""

    def f(a, b, v, w, s):
        x = torch.cat([a, b], -1)
        return [F.linear(x, (each.float() * s).to(torch.bfloat16)) for each in (v, w)]

    a, b = randn(16, 32, grad=False), randn(16, 32, grad=False, seed=1)
    v, w = (randn(48, 64, grad=False, seed=i).to(torch.float8_e4m3fn) for i in (2, 3))
    text = graph_after(f, a, b, v, w, torch.ones(48, 1), recipe=recipe)
    assert ("f8fx.concat" in text) is (recipe == "rowwise")
