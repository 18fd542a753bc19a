"""*one_read*: which tensors have their rows cast and their columns' amaxes taken in one read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch.utils.checkpoint import checkpoint

import f8fx
from f8fx import executor, ops
from f8fx.kernels import row_cast_columns
from f8fx.passes import one_read
from tests.helpers import joint_graphs, randn


def args(rows=16):
    return randn(rows, 32), randn(48, 32, seed=1)


def graph_with(fn, *inputs, dynamic=False, scales="torchao", **options):
    """Text of the joint graph, as if the CPU were a device that the kernel is for."""
    from f8fx.passes import describe

    texts = []
    parsed = f8fx.Options.parse({"select": "all", "recipe": "rowwise", **options})
    pipeline = parsed.pipeline(
        debug=True, rowwise_scales=lambda device: scales, kernels=lambda device: parsed.kernels == "auto"
    )

    def transform(graph):
        pipeline(graph)
        graph.eliminate_dead_code()
        texts.append(describe(graph))

    joint_graphs(fn, *inputs, transform=transform, dynamic=dynamic)
    return texts[0]


def compiled_with(pipeline, fn):
    """The function, with its graphs rewritten by the pipeline and run eagerly."""
    torch.compiler.reset()

    def backend(gm, given):
        return executor.compile_eager(gm, given, pipeline)

    return torch.compile(fn, backend=backend, fullgraph=True)


def run_with(pipeline, fn, *inputs):
    """See :func:`compiled_with`."""
    return compiled_with(pipeline, fn)(*inputs)


def taken(fn, *inputs, **options):
    """The tensors that the kernel is for."""
    text = graph_with(fn, *inputs, **options)
    return [
        line.split("quantize_rowwise([")[1].split("]")[0]
        for line in text.splitlines()
        if "quantize_rowwise([" in line
    ]


class TestGraph(TestCase):
    def test_an_output_gradient(self):
        self.assertExpectedInline(
            graph_with(F.linear, *args()),
            """\
primals_1: bf16[16,32]
primals_2: bf16[48,32]
tangents_1: bf16[16,48]
quantize_rowwise: (e4m3[16,32], f32[16], f32[32], e4m3[48,32], f32[48], f32[32]) = f8fx.quantize_rowwise([primals_1, primals_2], [1, 1], dtype=e4m3, power_of_2=True)
getitem: e4m3[16,32] = getitem(quantize_rowwise, 0)
getitem_1: f32[16] = getitem(quantize_rowwise, 1)
getitem_2: f32[32] = getitem(quantize_rowwise, 2)
getitem_3: e4m3[48,32] = getitem(quantize_rowwise, 3)
getitem_4: f32[48] = getitem(quantize_rowwise, 4)
getitem_5: f32[32] = getitem(quantize_rowwise, 5)
permute: e4m3[32,48] = permute(getitem_3, [1, 0])
as_strided: f32[16,1] = as_strided(getitem_1, [16, 1], [1, 1])
as_strided_1: f32[1,48] = as_strided(getitem_4, [1, 48], [48, 1])
scaled_mm: bf16[16,48] = _scaled_mm(getitem, permute, as_strided, as_strided_1, None, None, bf16, True)
quantize_rowwise_1: (e4m3[16,48], f32[16], f32[48]) = f8fx.quantize_rowwise([tangents_1], [1], dtype=e4m3, power_of_2=True)
getitem_6: e4m3[16,48] = getitem(quantize_rowwise_1, 0)
getitem_7: f32[16] = getitem(quantize_rowwise_1, 1)
getitem_8: f32[48] = getitem(quantize_rowwise_1, 2)
scale: f32[48] = f8fx.scale(getitem_8, dtype=e4m3, power_of_2=True)
quantize: e4m3[48,16] = f8fx.quantize(tangents_1, scale, dtype=e4m3, dim=0, transpose=True, align=[1, 1])
reciprocal: f32[48] = reciprocal(scale)
scale_1: f32[32] = f8fx.scale(getitem_2, dtype=e4m3, power_of_2=True)
quantize_1: e4m3[32,16] = f8fx.quantize(primals_1, scale_1, dtype=e4m3, dim=0, transpose=True, align=[1, 1])
reciprocal_1: f32[32] = reciprocal(scale_1)
permute_1: e4m3[16,32] = permute(quantize_1, [1, 0])
full: f32[] = full([], 1.0, dtype=f32, device=cpu, pin_memory=False)
scaled_mm_1: bf16[48,32] = _scaled_mm(quantize, permute_1, full, full, None, None, bf16, False)
unsqueeze: f32[48,1] = unsqueeze(reciprocal, 1)
unsqueeze_1: f32[1,32] = unsqueeze(reciprocal_1, 0)
mul: f32[48,32] = mul(unsqueeze, unsqueeze_1)
convert_element_type: f32[48,32] = prims.convert_element_type(scaled_mm_1, f32)
mul_1: f32[48,32] = mul(convert_element_type, mul)
convert_element_type_1: bf16[48,32] = prims.convert_element_type(mul_1, bf16)
rounded: bf16[48,32] = f8fx.rounded(convert_element_type_1)
permute_2: bf16[32,48] = permute(rounded, [1, 0])
scale_2: f32[32] = f8fx.scale(getitem_5, dtype=e4m3, power_of_2=True)
quantize_2: e4m3[32,48] = f8fx.quantize(primals_2, scale_2, dtype=e4m3, dim=0, transpose=True, align=[1, 1])
reciprocal_2: f32[32] = reciprocal(scale_2)
permute_3: e4m3[48,32] = permute(quantize_2, [1, 0])
scaled_mm_2: bf16[16,32] = _scaled_mm(getitem_6, permute_3, full, full, None, None, bf16, False)
unsqueeze_2: f32[16,1] = unsqueeze(getitem_7, 1)
unsqueeze_3: f32[1,32] = unsqueeze(reciprocal_2, 0)
mul_2: f32[16,32] = mul(unsqueeze_2, unsqueeze_3)
convert_element_type_2: f32[16,32] = prims.convert_element_type(scaled_mm_2, f32)
mul_3: f32[16,32] = mul(convert_element_type_2, mul_2)
convert_element_type_3: bf16[16,32] = prims.convert_element_type(mul_3, bf16)
rounded_1: bf16[16,32] = f8fx.rounded(convert_element_type_3)
permute_4: bf16[48,32] = permute(permute_2, [1, 0])
return [scaled_mm, rounded_1, permute_4]""",
        )


def test_it_can_be_switched_off():
    assert "quantize_rowwise" not in graph_with(F.linear, *args(), kernels="inductor")


@pytest.mark.parametrize("save", ["lean", "fast"])
def test_what_is_in_memory(save):
    """Input and weight, of one width, are one launch; the gradient is there later."""
    assert taken(F.linear, *args(), save=save) == ["primals_1, primals_2", "tangents_1"]


def gate_up(x, gate, up):
    h = x.sin()
    return F.silu(F.linear(h, gate)) * F.linear(h, up)


def test_weights_of_one_width_are_one_launch():
    inputs = randn(4096, 1024), randn(1024, 1024, seed=1), randn(1024, 1024, seed=2)
    merged = graph_with(gate_up, *inputs, target="h100")
    assert "f8fx.quantize_rowwise([primals_2, primals_3], [2]," in merged
    apart = graph_with(gate_up, *inputs, merge="never")
    assert "f8fx.quantize_rowwise([primals_2, primals_3], [1, 1]," in apart


def test_weights_of_other_widths_are_launches_of_their_own():
    def f(x, a, b):
        return F.linear(F.linear(x.sin(), a).sin(), b)

    inputs = randn(16, 32), randn(48, 32, seed=1), randn(32, 48, seed=2)
    assert taken(f, *inputs) == ["primals_2", "primals_3", "tangents_1"]


def test_a_launch_takes_so_many_tensors():
    def f(x, *weights):
        for weight in weights:
            x = F.linear(x.sin(), weight).sin()
        return x

    weights = [randn(32, 32, seed=seed) for seed in range(10)]
    found = taken(f, randn(16, 32), *weights)
    assert [launch.count("primals") for launch in found] == [row_cast_columns.MOST, 2]


def test_a_launch_holds_so_much_memory_early(monkeypatch):
    monkeypatch.setattr(one_read, "AHEAD", 2 * 32 * 32)

    def f(x, a, b, c):
        return F.linear(F.linear(F.linear(x.sin(), a).sin(), b).sin(), c).sin()

    weights = [randn(32, 32, seed=seed) for seed in range(3)]
    assert taken(f, randn(16, 32), *weights) == ["primals_2, primals_3", "primals_4"]


def test_checkpointed_weights_stay():
    """Their casts are made again in the backward, from scales that are saved."""

    def f(x, w):
        return checkpoint(lambda x, w: F.linear(x.sin(), w).sin(), x, w, use_reentrant=False)

    assert taken(f, *args()) == []


def test_columns_of_a_weight_that_a_checkpointed_layer_reads_stay():
    """Its rows are those of a layer that is not."""

    def f(x, w):
        x = F.linear(x.sin(), w).sin()
        return checkpoint(lambda x, w: (x @ w).sin(), x, w, use_reentrant=False)

    inputs = randn(16, 32), randn(32, 32, seed=1)
    assert taken(f, *inputs) == []
    same_with_and_without(f, *inputs)


def test_a_copy_that_only_the_backward_reads_stays_there():
    """Of ``x @ w`` the forward reads the columns' copy; the rows' copy, made early, would be saved."""

    def f(x, w):
        return (x.sin() @ w).sin()

    inputs = randn(16, 32), randn(32, 48, seed=1)
    assert taken(f, *inputs) == []
    same_with_and_without(f, *inputs)


def test_rows_whose_scales_would_not_be_aligned_are_a_launch_of_their_own():
    assert taken(F.linear, randn(17, 32), randn(48, 32, seed=1)) == ["primals_1", "primals_2", "tangents_1"]


def test_inference_needs_no_columns():
    assert taken(F.linear, randn(16, 32, grad=False), randn(48, 32, grad=False, seed=1)) == []


def test_a_gradient_that_its_casts_compute_stays():
    """Written to memory for the kernel it would cost more than the read it saves."""

    def f(x, w):
        return F.linear(x, w).sin()

    assert taken(f, *args()) == ["primals_1, primals_2"]


def test_column_scales_that_the_forward_needs():
    """A weight that is used both ways: its column scales are not left for the backward."""

    def f(x, w):
        return F.linear(F.linear(x.sin(), w).sin(), w.t()).sin()

    inputs = randn(16, 32), randn(48, 32, seed=1)
    assert taken(f, *inputs) == ["primals_2"]
    same_with_and_without(f, *inputs)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp"])
def test_other_recipes_stay(recipe):
    assert taken(F.linear, *args(), recipe=recipe) == []


def test_rows_whose_number_changes():
    """They are a launch of their own: where scales of what is below them would begin is not known."""
    x, weight = args()
    torch._dynamo.mark_dynamic(x, 0)
    assert taken(F.linear, x, weight, dynamic=None) == ["primals_2", "primals_3", "tangents_1"]


def test_rows_of_a_length_that_is_not_known_stay():
    assert taken(F.linear, *args(), dynamic=True) == []


def test_rows_of_which_there_may_be_none_stay():
    def chosen(x, weight):
        return F.linear(x[x[:, 0] > 0], weight)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert taken(chosen, *args()) == ["primals_2"]


@pytest.mark.parametrize(
    "fn", [F.linear, lambda x, weight: F.linear(F.silu(F.linear(x, weight)), weight.t())]
)
def test_a_number_of_rows_that_changes_is_not_asked_for(fn):
    """Nor compared with that of columns, which would be a graph for each side of it."""
    options = f8fx.Options.parse({"select": "all", "recipe": "rowwise"})
    results = []
    for kernels in (True, False):
        compiled = compiled_with(options.pipeline(kernels=lambda device, own=kernels: own), fn)
        x, weight = args()
        torch._dynamo.mark_dynamic(x, 0)
        compiled(x, weight)
        results.append([])
        with torch.compiler.set_stance("fail_on_recompile"):
            for rows in (32, 48, 64, 17):
                x, weight = args(rows)
                y = compiled(x, weight)
                results[-1] += [y, *torch.autograd.grad(y.square().sum(), (x, weight))]
    assert all(map(torch.equal, *results))


def test_padded_row_copies_stay():
    assert taken(F.linear, randn(16, 40), randn(24, 40, seed=1)) == []


def test_results_are_the_same_bits():
    x, _ = args(64)
    y = randn(64, 32, grad=False, seed=3)
    e4m3 = torch.float8_e4m3fn
    found = ops.quantize_rowwise([x.detach(), y, y], [2, 1], dtype=e4m3, power_of_2=True)
    for source, (data, inverse, columns) in ((torch.cat([x.detach(), y]), found[:3]), (y, found[3:])):
        rows = ops.scale(ops.amax(source, 1), dtype=e4m3, power_of_2=True)
        want = ops.quantize(source, rows, dtype=e4m3, dim=1)
        assert torch.equal(data.view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(inverse, rows.reciprocal()) and torch.equal(columns, ops.amax(source, 0))


def test_gradients_are_the_same_bits():
    same_with_and_without(gate_up, randn(64, 32), randn(48, 32, seed=1), randn(48, 32, seed=2))


def same_with_and_without(fn, *inputs):
    """The graph computes what it does without the kernel, whose definition takes its place here."""
    results = []
    for kernels in ("auto", "inductor"):
        parsed = f8fx.Options.parse({"select": "all", "recipe": "rowwise", "kernels": kernels})
        pipeline = parsed.pipeline(debug=True, kernels=lambda device, used=kernels: used == "auto")
        tensors = [x.detach().clone().requires_grad_() for x in inputs]
        y = run_with(pipeline, fn, *tensors)
        y.backward(randn(*y.shape, grad=False, seed=5))
        results.append([y.detach(), *(x.grad for x in tensors)])
    for own, other in zip(*results, strict=True):
        assert torch.equal(own, other)
