"""Async tensor parallelism: Inductor's matcher finds the float8 gathers and gemms that passes leave behind."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config
from torch._guards import detect_fake_mode
from torch.distributed import _symmetric_memory as symmetric_memory

import f8fx
from f8fx.passes.fake import set_value
from tests.distributed.test_tensor_parallel import Net, parallel, tp_mesh
from tests.helpers import bf16, joint_graphs, randn
from tests.passes.test_collectives import c10d, four_ranks, gather, graph_of, passed, side_by_side  # noqa: F401

SENT = (c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default)
GATHER = torch.ops.symm_mem.fused_all_gather_scaled_matmul.default
SCATTER = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter.default


@pytest.fixture(autouse=True)
def symmetric(four_ranks, monkeypatch):  # noqa: F811
    """As if the group had symmetric memory."""
    monkeypatch.setattr(symmetric_memory, "is_symm_mem_enabled_for_group", lambda group: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)


def matched(fn, *shapes, **kwargs):
    """What the matcher makes of a graph, as it sees it after Inductor's other passes."""
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    graph = graph_of(fn, *shapes)
    passed(graph, **{"wire": "float8", **kwargs})
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


def test_gather_and_gemm_rowwise():
    """With all scales beside each rank's gemm: "rowwise replicated"."""
    assert gemm_results(column_2d, (32, 64), (96, 64), recipe="rowwise") == [(bf16, (128, 96))]


def test_gather_and_gemm_rowwise_of_a_batch_is_not_matched():
    """The fused operator would raise on the scales, which are a vector: so the gather stays by itself, in float8."""
    assert gemm_results(column, (2, 16, 64), (96, 64), recipe="rowwise") == []


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_gemm_and_scatter(recipe):
    assert gemm_results(row, (2, 64, 32), (96, 32), recipe=recipe) == [(bf16, (2, 16, 96))]
    assert gemm_results(row_2d, (128, 32), (96, 32), recipe=recipe) == [(bf16, (32, 96))]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="the matcher of torch 2.11 knows split, not slices")
def test_gemm_and_scatter_by_slices():
    assert gemm_results(row_sliced, (2, 64, 32), (96, 32)) == [(bf16, (2, 16, 96))]


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
    assert gemm_results(column, (2, 16, 64), (96, 64), wire="uint8") == []


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


def halves(recipe, rowwise_scales="torchao"):
    """Of one layer, two columnwise matmuls and a rowwise one, with sequences of 4 * 16 tokens and batches of two."""
    found = []
    options = f8fx.Options.parse({"select": "all", "recipe": recipe, "rowwise_scales": rowwise_scales})
    joint_graphs(
        parallel(Net(depth=1), tp_mesh()),
        randn(2, 16, 64),
        transform=options.pipeline(debug=True),
        on_partition=lambda *graphs: found.extend(map(after_inductors_passes, graphs)),
    )
    return found


HIDDEN, OUTPUT = (bf16, (2, 64, 32)), (bf16, (2, 16, 64))  # of this rank; gradients have the same shapes


def test_training_tensorwise_overlaps_every_gather_and_every_scatter():
    """The gathered input is read by two matmuls, of which each has a gradient to scatter; the weights' are not sent."""
    assert halves("tensorwise") == [
        ([HIDDEN, OUTPUT], [], 0),
        ([HIDDEN, OUTPUT, OUTPUT], [], 3),
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
