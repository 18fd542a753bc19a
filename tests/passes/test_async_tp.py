"""Async tensor parallelism: Inductor's matcher finds the float8 gathers and gemms that passes leave behind."""

from __future__ import annotations

import math

import pytest
import torch
import torch._inductor.config
from torch._guards import detect_fake_mode
from torch.distributed import _symmetric_memory as symmetric_memory

import f8fx
from f8fx.passes import collectives, describe
from f8fx.passes.async_tp import expose_gemms
from f8fx.passes.fake import set_value
from f8fx.passes.rewrite import Inserter
from tests.distributed.test_tensor_parallel import Net, parallel, tp_mesh
from tests.helpers import bf16, joint_graphs, randn
from tests.passes.gathers import c10d, four_ranks, gather, graph_of, passed, side_by_side  # noqa: F401

aten = torch.ops.aten
SENT = (c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default)
GATHER = torch.ops.symm_mem.fused_all_gather_scaled_matmul.default
SCATTER = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter.default


@pytest.fixture(autouse=True)
def symmetric(four_ranks, monkeypatch):  # noqa: F811
    """As if the group had symmetric memory."""
    monkeypatch.setattr(symmetric_memory, "is_symm_mem_enabled_for_group", lambda group: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)


def graph_after(fn, *shapes, **kwargs):
    """The graph after all passes."""
    graph = graph_of(fn, *shapes)
    passed(graph, **{"wire": "float8", **kwargs})
    return graph


def matched(fn, *shapes, **kwargs):
    """What the matcher makes of a function's graph."""
    return matches_in(graph_after(fn, *shapes, **kwargs))


def copy_of(graph):
    copied = torch.fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied


def matches_in(graph):
    """What the matcher makes of a graph, as it sees it after Inductor's other passes."""
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    view_to_reshape(module)
    micro_pipeline_tp_pass(module.graph)
    module.graph.eliminate_dead_code()
    return [node for node in module.graph.nodes if node.target in (GATHER, SCATTER)]


def column(x, w):
    """Sequence-parallel input of a column-parallel layer: gather, gemm."""
    batch, sequence, features = x.shape
    whole = side_by_side(x, 1).view(-1, features)
    return (whole @ w.t()).view(batch, 4 * sequence, -1)


def column_one(x, w):
    """The same of a batch of one, whose shards need no cutting: views alone."""
    _, sequence, features = x.shape
    whole = gather(x).view(1, 4 * sequence, features).view(-1, features)
    return (whole @ w.t()).view(1, 4 * sequence, -1)


def column_2d(x, w):
    return gather(x) @ w.t()


def row(x, w):
    """Row-parallel layer with a sequence-parallel output: gemm, reduce-scatter."""
    y = (x.view(-1, x.shape[-1]) @ w.t()).view(*x.shape[:-1], -1)
    pieces = torch.cat(torch.split(y, y.shape[1] // 4, 1))
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(pieces, "sum", 4, "0"))


def row_sliced(x, w):
    """The same as newer versions write it."""
    y = (x.view(-1, x.shape[-1]) @ w.t()).view(*x.shape[:-1], -1)
    step = y.shape[1] // 4
    pieces = torch.cat([y[:, i * step : (i + 1) * step] for i in range(4)])
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(pieces, "sum", 4, "0"))


def row_batches(x, w):
    """Sequences beside each other, of which the first dimension is scattered."""
    y = (x.view(-1, x.shape[-1]) @ w.t()).view(*x.shape[:-1], -1)
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(y, "sum", 4, "0"))


def row_stacked(x, w):
    """Sequences of a batch with two dimensions."""
    y = (x.view(-1, x.shape[-1]) @ w.t()).view(*x.shape[:-1], -1)
    pieces = torch.cat(torch.split(y, y.shape[2] // 4, 2))
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(pieces, "sum", 4, "0"))


def row_2d(x, w):
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x @ w.t(), "sum", 4, "0"))


def column_biased(x, w, bias):
    return torch.addmm(bias, gather(x), w.t())


def row_biased(x, w, bias):
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(torch.addmm(bias, x, w.t()), "sum", 4, "0"))


def run_on_paper(fused):
    """Calls a fused operator with values that have no data; it checks shapes of operands and scales."""

    def on_meta(value):
        if isinstance(value, torch.fx.Node):
            if "val" not in value.meta:  # inserted by the matcher
                set_value(value)
            return value.meta["val"].to("meta")
        return value

    result = fused.target(*torch.fx.map_arg(fused.args, on_meta))
    return result[1][0] if fused.target is GATHER else result


def gemm_results(fn, *shapes, **kwargs):
    """dtype and shape of what fused operators compute."""
    found = [run_on_paper(fused) for fused in matched(fn, *shapes, **kwargs)]
    return [(value.dtype, tuple(value.shape)) for value in found]


def argument(node, name):
    """An argument of an operator, by its name in the schema."""
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)).get(name)


def test_gather_and_gemm_tensorwise():
    assert gemm_results(column, (2, 16, 64), (96, 64)) == [(bf16, (2, 64, 96))]
    assert gemm_results(column_2d, (32, 64), (96, 64)) == [(bf16, (128, 96))]
    assert gemm_results(column_one, (1, 32, 64), (96, 64)) == [(bf16, (128, 96))]


def test_gather_and_gemm_rowwise():
    """With all scales beside each rank's gemm: "rowwise replicated"."""
    for fn, shape in ((column_2d, (32, 64)), (column_one, (1, 32, 64))):
        assert gemm_results(fn, shape, (96, 64), recipe="rowwise") == [(bf16, (128, 96))]


def test_gather_and_gemm_rowwise_of_a_batch_is_not_matched():
    """The fused operator would raise on the scales, which are a vector: so the gather stays by itself, in float8."""
    assert gemm_results(column, (2, 16, 64), (96, 64), recipe="rowwise") == []


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_gemm_and_scatter(recipe):
    assert gemm_results(row, (1, 64, 32), (96, 32), recipe=recipe) == [(bf16, (1, 16, 96))]
    assert gemm_results(row_batches, (64, 2, 32), (96, 32), recipe=recipe) == [(bf16, (16, 2, 96))]
    assert gemm_results(row_2d, (128, 32), (96, 32), recipe=recipe) == [(bf16, (32, 96))]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="the matcher of torch 2.11 knows split, not slices")
def test_gemm_and_scatter_by_slices():
    assert gemm_results(row_sliced, (1, 64, 32), (96, 32)) == [(bf16, (1, 16, 96))]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_gemm_and_scatter_of_several_sequences(recipe):
    """The gemm's rows are put into the order in which they are sent."""
    for fn in (row, row_sliced):
        assert gemm_results(fn, (2, 64, 32), (96, 32), recipe=recipe) == [(bf16, (32, 96))]
    assert gemm_results(row_stacked, (2, 2, 32, 32), (96, 32), recipe=recipe) == [(bf16, (32, 96))]


#: Of a layer that makes less than it reads.
NARROW = (2, 64, 128), (32, 128)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("fn", [row, row_sliced])
def test_a_scatter_of_several_sequences_in_their_own_order_is_not_matched(fn, recipe, monkeypatch):
    """The fused operator would send the wrong rows: :func:`test_numbers_of_gemm_and_scatter` would fail."""
    assert gemm_results(fn, *NARROW, recipe=recipe) == []
    text = describe(graph_after(fn, *NARROW, recipe=recipe))
    monkeypatch.setattr(collectives, "expose_gemms", lambda graph: None)
    assert text == describe(graph_after(fn, *NARROW, recipe=recipe))


@pytest.mark.parametrize("is_turned", [False, True])
def test_nor_behind_a_view(is_turned):
    """Or behind a reshape that has to copy, which is a copy and a view then."""
    graph = graph_after(row, *NARROW)
    (gemm,) = [node for node in graph.nodes if node.target is aten._scaled_mm.default]
    insert = Inserter(graph, gemm, gemm.meta["f8fx"])
    left = gemm.args[0]
    apart = insert(aten.view.default, left, [2, 64, 128])
    if is_turned:
        apart = insert(aten.permute.default, apart, [1, 0, 2])
    gemm.replace_input_with(left, insert(aten.reshape.default, apart, [128, 128]))
    assert matches_in(copy_of(graph))
    expose_gemms(graph)
    assert not matches_in(copy_of(graph))
    value = torch.arange(128 * 128).view(128, 128)
    moved = value.view(2, 64, 128).permute(1, 0, 2).reshape(128, 128) if is_turned else value
    assert torch.equal(computed_from(left, gemm.args[0], value), moved)


def computed_from(source, node, value):
    """A node's value, from that of one it depends on by operators of one argument that is a node."""
    if node is source:
        return value
    before = computed_from(source, node.args[0], value)
    return node.target(before, *node.args[1:], **node.kwargs)


def scattered(y, dim=1):
    pieces = torch.cat(torch.split(y, y.shape[dim] // 4, dim))
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(pieces, "sum", 4, "0"))


def features(x, w):
    """[2, 64, 16], gathered along the features: what comes before the gemm is a view of what was gathered."""
    return scattered((side_by_side(x, 2).view(-1, 64) @ w.t()).view(2, 64, -1))


def wide(x, w):
    """[8, 32, 64], read as rows of 512."""
    return scattered((gather(x).view(2, 64, 512).view(-1, 512) @ w.t()).view(2, 64, -1))


def viewed_again(x, w):
    """DTensor views results and operands as they are."""
    flat = side_by_side(x, 2).view(2, 64, 64).view(-1, 64)
    return scattered((flat.view(128, 64) @ w.t()).view(2, 64, -1).view(2, 64, -1))


def without_idle_views(graph):
    """As Inductor's joint passes leave it."""
    for node in [*graph.nodes]:
        if node.target is aten.view.default and node.meta["val"].shape == node.args[0].meta["val"].shape:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    return graph


@pytest.mark.parametrize(
    ("fn", "shape", "k", "wire"),
    [
        (features, (2, 64, 16), 64, "float8"),
        (viewed_again, (2, 64, 16), 64, "float8"),
        (wide, (8, 32, 64), 512, "float8"),
        (wide, (8, 32, 64), 512, "off"),
    ],
)
def test_nor_where_a_gather_puts_a_view_in_front_of_the_gemm(fn, shape, k, wire):
    """What was gathered is in memory as it is; an operand that is wider than the result takes longer to turn than that."""
    graph = graph_after(fn, shape, (96, k), wire=wire)
    assert not [node for node in matches_in(without_idle_views(graph)) if node.target is SCATTER]


def test_results_that_are_viewed_otherwise_are_left():
    """By heads, say: the matcher wants the gemm's own columns."""

    def viewed(shape, dim):
        return lambda x, w: scattered((x @ w.t()).view(shape), dim)

    for shape, dim in (((64, 4, 16), 0), ((1, 64, 4, 16), 1), ((128, 32), 0), ((64 * 64,), 0)):
        assert matched(viewed(shape, dim), (64, 64), (64, 64)) == []


def test_what_is_no_gemms_result_is_left():
    def f(x, w, a, b):
        pieces = torch.cat([a, b])
        return x @ w.t(), c10d.wait_tensor(c10d.reduce_scatter_tensor(pieces, "sum", 4, "0"))

    assert matched(f, (16, 64), (32, 64), (16, 8), (16, 8)) == []


CASES = {
    "one sequence": (row, (1, 64, 32)),
    "sequence first": (row_batches, (64, 2, 32)),
    "rows": (row_2d, (128, 32)),
}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(("fn", "shape"), CASES.values(), ids=CASES)
def test_numbers_of_gemm_and_scatter(fn, shape, recipe, monkeypatch):
    """What the fused operator computes on a GPU from the arguments it gets, where all ranks have the same operands."""

    def exchanged(produce, output, group):
        mine = torch.empty_like(output.chunk(4)[0])
        produce(1, mine)  # by each of the four, for this one
        for chunk in output.chunk(4):
            chunk.copy_(mine)

    def gemm(a, b, scale_a, out, scale_b):
        out.copy_((a.float() * scale_a) @ (b.float() * scale_b))

    monkeypatch.setattr(symmetric_memory, "_pipelined_produce_and_all2all", exchanged)
    (fused,) = matched(fn, shape, (96, 32), recipe=recipe)
    sizes, dim = [*argument(fused, "output_shape")], argument(fused, "orig_scatter_dim")
    e4m3, rows = torch.float8_e4m3fn, math.prod(sizes[:-1])
    a, b = randn(rows, 32, grad=False).to(e4m3), randn(96, 32, grad=False, seed=1).to(e4m3).t()
    scale = torch.arange(1.0, rows + 1)[:, None] if recipe == "rowwise" else torch.tensor(2.0)
    found = symmetric_memory._fused_scaled_matmul_reduce_scatter_impl(
        mm_out_op=gemm,
        A=a,
        B=b,
        A_scale=scale,
        kwargs={"scale_b": torch.tensor(3.0)},
        out_dtype=torch.float32,
        reduce_op=argument(fused, "reduce_op"),
        orig_scatter_dim=dim,
        scatter_dim_after_maybe_reshape=argument(fused, "scatter_dim_after_maybe_reshape"),
        group_name="0",
        output_shape=sizes,
    )
    whole = torch.empty(rows, 96)
    gemm(a, b, scale, whole, torch.tensor(3.0))
    torch.testing.assert_close(found, 4 * whole.view(argument(fused, "output_shape")).chunk(4, dim)[1])


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("bias", ["torchao", "in_gemm"])
def test_biases(recipe, bias):
    """A bias in the gemm goes into the fused operator; one that is added to the result of a gemm keeps it from its scatter."""
    options = {"recipe": recipe, "bias": bias}
    (gathered,) = matched(column_biased, (32, 64), (96, 64), (96,), **options)
    assert [value is not None for value in argument(gathered, "biases")] == [bias == "in_gemm"]
    assert run_on_paper(gathered).shape == (128, 96)
    scattered = matched(row_biased, (128, 32), (96, 32), (96,), **options)
    assert [argument(fused, "bias") is not None for fused in scattered] == [True] * (bias == "in_gemm")


def test_high_precision_gathers_are_not_matched():
    """What moving the cast is for: with a bf16 gather there is nothing to fuse."""
    assert gemm_results(column, (2, 16, 64), (96, 64), wire="off") == []


def test_bytes_on_the_wire_are_not_matched():
    for fn, shape in ((column, (2, 16, 64)), (column_one, (1, 32, 64)), (column_2d, (32, 64))):
        assert gemm_results(fn, shape, (96, 64), wire="uint8") == []


# -- training graphs of `parallelize_module`


def after_inductors_passes(half):
    """What fused operators compute, the collectives that stay beside them, and how many matmuls do."""
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.virtualized import V

    view_to_reshape(half)
    mode = detect_fake_mode([node.meta["val"] for node in half.graph.nodes if "val" in node.meta])
    with V.set_fake_mode(mode), torch._inductor.config.patch(_micro_pipeline_tp=True):
        post_grad_passes(half, is_inference=False)
    nodes = half.graph.nodes
    fused = [run_on_paper(node) for node in nodes if node.target in (GATHER, SCATTER)]
    left = [(node.target, node.args[0].meta["val"].dtype) for node in nodes if node.target in SENT]
    matmuls = [node for node in nodes if node.target is torch.ops.aten._scaled_mm.default]
    return [(value.dtype, tuple(value.shape)) for value in fused], left, len(matmuls)


def halves(recipe, rowwise_scales="torchao", batch=1):
    """Of one layer, two columnwise matmuls and a rowwise one, with sequences of 4 * 16 tokens."""
    found = []
    options = f8fx.Options.parse({"select": "all", "recipe": recipe, "rowwise_scales": rowwise_scales})
    joint_graphs(
        parallel(Net(depth=1), tp_mesh()),
        randn(batch, 16, 64),
        transform=options.pipeline(debug=True),
        on_partition=lambda *graphs: found.extend(map(after_inductors_passes, graphs)),
    )
    return found


#: Of this rank; what is scattered for a gradient is like the latter.
HIDDEN, OUTPUT = (bf16, (64, 32)), (bf16, (1, 16, 64))


def test_training_tensorwise_overlaps_every_gather_and_every_scatter():
    """The gathered input is read by two matmuls, of which each has a gradient to scatter; the weights' are not sent."""
    assert halves("tensorwise") == [
        ([HIDDEN, OUTPUT], [], 0),
        ([HIDDEN, OUTPUT, OUTPUT], [], 3),
    ]


def test_training_with_several_sequences_overlaps_every_gather_and_every_scatter():
    hidden, output = (bf16, (2, 64, 32)), (bf16, (32, 64))
    assert halves("tensorwise", batch=2) == [
        ([hidden, output], [], 0),
        ([hidden, output, output], [], 3),
    ]


def test_training_rowwise_overlaps_every_scatter():
    """Gathers carry bf16, as forward and backward would need two copies."""
    gather = (c10d.all_gather_into_tensor.default, bf16)
    assert halves("rowwise", "in_gemm") == [
        ([OUTPUT], [gather], 2),
        ([OUTPUT, OUTPUT], [gather], 4),
    ]


def test_training_rowwise_with_torchaos_arithmetic_overlaps_no_scatter_of_a_gradient():
    """There the scales are applied by a kernel of its own, to what the gemm gives: that is what is sent."""
    gather, scatter = ((target, bf16) for target in SENT)
    assert halves("rowwise", "torchao") == [
        ([OUTPUT], [gather], 2),
        ([], [gather, scatter, scatter], 6),
    ]
