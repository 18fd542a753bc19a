"""*by_rank*: rows of a gemm in the order of the ranks that they are sent to."""

from __future__ import annotations

import pytest
import torch
from expecttest import TestCase
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from f8fx.passes import async_tp, describe
from f8fx.passes.by_rank import sent_by
from tests.helpers import randn
from tests.passes.gathers import c10d, four_ranks, gather, graph_of, passed  # noqa: F401
from tests.passes.test_async_tp import row, row_sliced, row_stacked

aten = torch.ops.aten


class TestGraph(TestCase):
    @pytest.fixture(autouse=True)
    def ranks(self, four_ranks):  # noqa: F811
        pass

    def test_rowwise(self):
        """Each rank gets 2 rows of both sequences; the bf16 result is neither split nor stacked."""
        graph = graph_of(row, (2, 8, 32), (48, 32))
        passed(graph, recipe="rowwise")
        self.assertExpectedInline(
            describe(graph),
            """\
x_1: bf16[2,8,32]
w_1: bf16[48,32]
view: bf16[16,32] = view(x_1, [-1, 32])
t: bf16[32,48] = t(w_1)
amax: f32[16] = f8fx.amax(view, 1)
scale: f32[16] = f8fx.scale(amax, dtype=e4m3, power_of_2=True)
quantize: e4m3[16,32] = f8fx.quantize(view, scale, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal: f32[16] = reciprocal(scale)
amax_1: f32[48] = f8fx.amax(w_1, 1)
scale_1: f32[48] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=True)
quantize_1: e4m3[48,32] = f8fx.quantize(w_1, scale_1, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_1: f32[48] = reciprocal(scale_1)
permute: e4m3[32,48] = permute(quantize_1, [1, 0])
as_strided: f32[16,1] = as_strided(reciprocal, [16, 1], [1, 1])
as_strided_1: f32[1,48] = as_strided(reciprocal_1, [1, 48], [48, 1])
view_1: e4m3[2,4,2,32] = view(quantize, [2, 4, 2, 32])
permute_1: e4m3[4,2,2,32] = permute(view_1, [1, 0, 2, 3])
clone: e4m3[4,2,2,32] = clone(permute_1, memory_format=torch.contiguous_format)
unsafe_view: e4m3[16,32] = _unsafe_view(clone, [16, 32])
view_2: f32[2,4,2,1] = view(as_strided, [2, 4, 2, 1])
permute_2: f32[4,2,2,1] = permute(view_2, [1, 0, 2, 3])
clone_1: f32[4,2,2,1] = clone(permute_2, memory_format=torch.contiguous_format)
unsafe_view_1: f32[16,1] = _unsafe_view(clone_1, [16, 1])
as_strided_2: f32[16,1] = as_strided(unsafe_view_1, [16, 1], [1, 1])
scaled_mm: bf16[16,48] = _scaled_mm(unsafe_view, permute, as_strided_2, as_strided_1, None, None, bf16, True)
reduce_scatter_tensor: bf16[4,48] = _c10d_functional.reduce_scatter_tensor(scaled_mm, sum, 4, 0)
wait_tensor: bf16[4,48] = _c10d_functional.wait_tensor(reduce_scatter_tensor)
view_3: bf16[2,2,48] = view(wait_tensor, [2, 2, 48])
return view_3""",
        )


def computed(fn, shapes, args, **kwargs):
    """A function's rewritten graph on numbers, where all four ranks have the same and this is the second."""

    class Interpreter(fx.Interpreter):
        def call_function(self, target, args, kwargs):
            if target is c10d.reduce_scatter_tensor.default:
                return 4 * args[0].chunk(4)[1]
            if target is c10d.wait_tensor.default:
                return args[0]
            if target is aten._scaled_mm.default:  # of rows and columns not on every torch
                a, b, a_scale, b_scale = args[:4]
                return ((a.float() * a_scale) @ (b.float() * b_scale)).to(args[6])
            return super().call_function(target, args, kwargs)

    graph = graph_of(fn, *shapes)
    passed(graph, **kwargs)
    return graph, Interpreter(fx.GraphModule(torch.nn.Module(), graph)).run(*args)


def turned(graph):
    """Whether a gemm's rows were put into another order."""
    permutes = graph.find_nodes(op="call_function", target=aten.permute.default)
    return any(node.args[1] == [1, 0, 2, 3] for node in permutes)


@given(st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_numbers(data):
    fn = data.draw(st.sampled_from([row, row_sliced, row_stacked]))
    sizes = [data.draw(st.integers(1, 3)) for _ in range(3 if fn is row_stacked else 2)]
    sizes[-1] *= 4
    k, n = data.draw(st.sampled_from([(16, 48), (32, 16)]))
    recipe = data.draw(st.sampled_from(["tensorwise", "rowwise"]))
    shapes = (*sizes, k), (n, k)
    args = [randn(*shape, grad=False, seed=seed) for seed, shape in enumerate(shapes)]
    graph, found = computed(fn, shapes, args, recipe=recipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_tp, "reorder", lambda *args: False)
        before, wanted = computed(fn, shapes, args, recipe=recipe)
    assert torch.equal(found, wanted)
    assert turned(graph) == any(size > 1 for size in sizes[:-1]) and not turned(before)


def stays(fn, *shapes, **kwargs):
    """Whether what is sent is cut and stacked, as it was."""
    graph = graph_of(fn, *shapes)
    passed(graph, **kwargs)
    (sent,) = graph.find_nodes(op="call_function", target=c10d.reduce_scatter_tensor.default)
    return not turned(graph) and sent.args[0].target is aten.cat.default


def scattered(y, pieces=None, op="sum"):
    pieces = torch.split(y, y.shape[1] // 4, 1) if pieces is None else pieces
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(torch.cat(pieces), op, 4, "0"))


def layer(x, w):
    return (x.view(-1, x.shape[-1]) @ w.t()).view(*x.shape[:-1], -1)


def read_twice(x, w):
    y = layer(x, w)
    return scattered(y), y.sum()


def piece_read_twice(x, w):
    pieces = torch.split(layer(x, w), x.shape[1] // 4, 1)
    return scattered(None, pieces), pieces[0].sum()


def in_another_order(x, w):
    return scattered(None, torch.split(layer(x, w), x.shape[1] // 4, 1)[::-1])


def one_piece_twice(x, w):
    first, second, _, last = torch.split(layer(x, w), x.shape[1] // 4, 1)
    return scattered(None, (first, second, second, last))


def of_slices_that_overlap(x, w):
    y = layer(x, w)
    return scattered(None, [y[:, start : start + 2] for start in (0, 2, 3, 6)])


def of_slices_before_the_end(x, w):
    y = layer(x, w)
    return scattered(None, [y[:, start : start + 1] for start in range(4)])


def of_slices_without_an_end(x, w):
    y = layer(x, w)
    return scattered(None, [aten.slice.Tensor(y, 1)] * 4)


def of_pieces_of_pieces(x, w):
    """Eight of them, for four ranks."""
    return scattered(None, torch.split(layer(x, w), x.shape[1] // 8, 1))


def along_the_features(x, w):
    y = layer(x, w)
    return scattered(None, torch.split(y, y.shape[2] // 4, 2))


def by_heads(x, w):
    """The last dimension is not that of the gemm."""
    return scattered(layer(x, w).view(2, 8, 4, -1))


def largest(x, w):
    return scattered(layer(x, w), op="max")


def gathered(x, w):
    """Of which the operand is gathered in float8."""
    whole = torch.cat(torch.split(gather(x), x.shape[0]), 1)
    return scattered(layer(whole, w))


def not_waited_for(x, w):
    y = layer(x, w)
    return c10d.reduce_scatter_tensor(torch.cat(torch.split(y, y.shape[1] // 4, 1)), "sum", 4, "0")


@pytest.mark.parametrize(
    "fn",
    [
        not_waited_for,
        read_twice,
        piece_read_twice,
        in_another_order,
        one_piece_twice,
        of_slices_that_overlap,
        of_slices_before_the_end,
        of_slices_without_an_end,
        of_pieces_of_pieces,
        along_the_features,
        by_heads,
        largest,
    ],
)
def test_stays(fn):
    assert not stays(lambda x, w: scattered(layer(x, w)), (2, 8, 32), (48, 32))
    assert stays(fn, (2, 8, 32), (48, 32))


def test_pieces_that_are_computed_are_sent_themselves():
    def f(x, w):
        y = layer(x, w)
        return scattered(None, [y.sin(), y.sin()])

    (scatter,) = graph_of(f, (2, 8, 32), (48, 32)).find_nodes(
        op="call_function", target=c10d.reduce_scatter_tensor.default
    )
    assert sent_by(scatter) == (scatter.args[0], 0, ())


def test_pieces_side_by_side_stay():
    """That is the result again, of which each rank is sent whole sequences."""

    def f(x, w):
        whole = torch.cat(torch.split(layer(x, w), 2, 1), 1)
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(whole, "sum", 4, "0"))

    assert stays(f, (4, 8, 32), (48, 32))


def test_rows_that_are_in_order_are_sent_as_they_are():
    graph = graph_of(row_stacked, (1, 1, 8, 32), (48, 32))
    passed(graph)
    assert not turned(graph) and not graph.find_nodes(op="call_function", target=aten.cat.default)


def test_what_was_gathered_stays():
    shapes = (2, 16, 64), (96, 64)
    assert stays(gathered, *shapes, wire="float8")
    assert not stays(gathered, *shapes, wire="off")


def test_an_operand_that_is_wider_than_the_result_stays():
    """In bytes: copied are 96 of float8 instead of 48 of bfloat16."""
    assert not stays(row, (2, 8, 96), (48, 96))
    assert stays(row, (2, 8, 112), (48, 112))


def test_one_sequence_stays():
    assert stays(row, (1, 8, 32), (48, 32))


def test_the_operand_is_recomputed_where_its_cast_is():
    """A policy that keeps results of matmuls keeps them alone."""
    graph = graph_of(row, (2, 8, 32), (48, 32))
    for node in graph.find_nodes(op="call_function", target=aten.mm.default):
        node.meta |= {"recompute": CheckpointPolicy.MUST_SAVE, "ac_graph_id": 1}
    passed(graph)
    assert turned(graph)
    (clone,) = graph.find_nodes(op="call_function", target=aten.clone.default)
    (cast,) = [node for node in graph.nodes if node.name == "quantize"]
    marks = [node.meta.get("recompute") for node in (clone, cast)]
    assert marks == [CheckpointPolicy.PREFER_RECOMPUTE] * 2
