"""*amax both*: of which tensors the amaxes of rows and columns are taken from what they are computed from."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import f8fx
from f8fx import ops
from f8fx.passes.amax_both import AmaxBoth
from f8fx.passes.in_memory import part_in_memory
from f8fx.passes.rewrite import Provenance
from tests.helpers import IR, randn
from tests.long import seldom
from tests.passes.test_one_read import graph_with, run_with


def args(rows=32, dim=32, hidden=48):
    return (
        randn(rows, dim),
        randn(hidden, dim, seed=1),
        randn(hidden, dim, seed=2),
        randn(dim, hidden, seed=3),
    )


def gated(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def activated(x, first, _, second, function=F.silu):
    return F.linear(function(F.linear(x, first)), second)


def lines(fn, *inputs, **options):
    """What is done with amaxes in the joint graph."""
    text = graph_with(fn, *inputs, **options)
    return [line for line in text.splitlines() if "f8fx.amax" in line]


def taken(fn, *inputs, **options):
    return sum("amax_both" in line for line in lines(fn, *inputs, **options))


class TestGraph(TestCase):
    def test_an_activation(self):
        """Its gradient is cast both ways; what it gave, by columns, for the second layer's weight."""
        self.assertExpectedInline(
            "\n".join(lines(activated, *args())),
            """\
amax: f32[32] = f8fx.amax(convert_element_type_1, 1)
amax_both: (f32[32], f32[48], f32[48]) = f8fx.amax_both(convert_element_type_6, [convert_element_type_1], [])""",
        )

    def test_a_gate(self):
        """The two gradients stand side by side where the two layers are merged."""
        self.assertExpectedInline(
            "\n".join(lines(gated, *args(64, 128, 256), target="h100")),
            """\
amax: f32[64] = f8fx.amax(mul, 1)
amax_both: (f32[64], f32[512], f32[256]) = f8fx.amax_both(concat_1, [mul], [])""",
        )


def test_it_can_be_switched_off():
    assert taken(activated, *args(), kernels="inductor") == 0


@pytest.mark.parametrize(
    "function", [F.silu, F.gelu, *seldom(F.relu, torch.tanh, lambda x: F.gelu(x, approximate="tanh"))]
)
def test_activation_functions(function):
    def f(x, first, second):
        return F.linear(function(F.linear(x, first)), second)

    x, first, _, second = args()
    assert taken(f, x, first, second) == 1
    same_with_and_without(f, x, first, second)


def test_a_fused_gate():
    """What is split from one layer's result is in memory, too."""

    def f(x, gate_up, down):
        gate, up = F.linear(x, gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, down)

    inputs = randn(32, 32), randn(96, 32, seed=1), randn(32, 48, seed=3)
    (_, both) = lines(f, *inputs)
    assert both.startswith("amax_both: (f32[32], f32[96], f32[48]) = f8fx.amax_both(concat, [mul")
    same_with_and_without(f, *inputs)


def test_constants_of_any_size():
    """On GPUs SiLU's gradient is computed with a tensor of ones."""

    def f(x, first, second):
        y = F.linear(x, first)
        return F.linear(y * (torch.full_like(y, 1.0) - torch.sigmoid(y)), second)

    x, first, _, second = args()
    assert taken(f, x, first, second) == 1


def test_numbers_that_are_drawn_are_no_constants():
    def f(x, first, second):
        return F.linear(F.dropout(F.linear(x, first), 0.5), second)

    x, first, _, second = args()
    assert taken(f, x, first, second) == 0


def test_gemms_that_are_scaled_afterwards_and_those_that_scale():
    """The scales of a gemm that does not apply them are numbers a row, but of no row at hand."""
    x, first, _, second = args(32, 48, 48)  # as many columns as rows would hide the one in the other
    for scales in ("torchao", "in_gemm", "after"):
        found = lines(lambda x, a, b: activated(x, a, None, b), x, first, second, scales=scales)
        assert sum("amax_both" in line for line in found) == 1, scales


def test_a_norm_needs_whole_rows_anyway():
    def f(x, first, second):
        return F.linear(F.rms_norm(F.linear(x, first), [48]), second)

    x, first, _, second = args()
    assert taken(f, x, first, second) == 0
    assert taken(f, x, randn(48, 48, seed=1)[:, :32].detach(), second) == 0


def biased(x, first, bias, second, function=F.silu):
    return F.linear(function(F.linear(x, first, bias)), second)


@pytest.mark.parametrize("shape", [(32, 32), (2, 16, 32), *seldom((1, 32, 32), (2, 2, 8, 32))])
@pytest.mark.parametrize("trained", [True, False])
def test_the_gradient_of_a_bias_is_summed_in_the_same_read(shape, trained):
    x, first, _, second = args()
    inputs = x.detach().view(shape).requires_grad_(), first, randn(48, seed=5, grad=trained), second
    (_, found) = lines(biased, *inputs)
    assert found.endswith("])") and found.endswith(", [])") != trained
    same_with_and_without(biased, *inputs)


def test_the_sums_of_a_tall_tensor():
    """Inductor's kernel that reduces rows and columns of such leaves amaxes of columns out, or reads as much."""
    shapes = (8192, 32), (1024, 32), (1024,), (32, 1024)
    inputs = (torch.empty(s, dtype=torch.bfloat16, device="meta", requires_grad=True) for s in shapes)
    assert taken(biased, *inputs) == 1


def gates(x, gate, up, down, *biases):
    """Two layers, each with its bias."""
    return F.linear(F.silu(F.linear(x, gate, biases[0])) * F.linear(x, up, biases[1]), down)


def test_the_sums_of_what_stands_side_by_side():
    inputs = *args(64, 128, 256), randn(256, seed=5), randn(256, seed=6)
    (found,) = [line for line in lines(gates, *inputs, target="h100") if "amax_both" in line]
    assert re.search(r"amax_both\(concat\w*, \[\w+\], \[\w+, \w+\]\)$", found), found
    same_with_and_without(gates, *inputs, target="h100")


@pytest.mark.parametrize("summed", [None, ops.column_sums, torch.sum])
def test_a_sum_of_all_columns_needs_a_read_of_its_own_unless_it_is_taken_part_by_part(summed):
    def f(x, y):
        whole = ops.concat([x.exp(), y.exp()], 1)
        scales = [ops.scale(ops.amax(whole, dim), dtype=torch.float8_e4m3fn) for dim in (1, 0)]
        both = ops.quantize_both(whole, *scales, dtype=torch.float8_e4m3fn, dim=1, dim_t=0)
        return *both, summed(whole, *([0] if summed is torch.sum else [])) if summed else None

    graph = make_fx(f, tracing_mode="fake")(*(randn(32, 48, grad=False) for _ in "xy")).graph
    for node in graph.nodes:
        if node.target in IR:
            node.meta["f8fx"] = Provenance("mm", "", "grad_input", "quantize")
    AmaxBoth(lambda device: True)(graph)
    found = graph.find_nodes(op="call_function", target=ops.amax_both)
    assert len(found) == (summed is not torch.sum)
    if summed is ops.column_sums:
        assert not graph.find_nodes(op="call_function", target=ops.column_sums)
        (both,) = found
        assert both.args[2] == both.args[0].args[0]


def test_a_sum_that_a_part_beside_it_is_computed_from_needs_a_read_of_its_own():
    """The kernel would have to know the sum before it takes it."""

    def f(x, y):
        first = x.exp()
        whole = ops.concat([first, y.exp() * first.sum(0)], 1)
        scales = [ops.scale(ops.amax(whole, dim), dtype=torch.float8_e4m3fn) for dim in (1, 0)]
        return ops.quantize_both(whole, *scales, dtype=torch.float8_e4m3fn, dim=1, dim_t=0)

    graph = make_fx(f, tracing_mode="fake")(*(randn(32, 48, grad=False) for _ in "xy")).graph
    for node in graph.nodes:
        if node.target in IR:
            node.meta["f8fx"] = Provenance("mm", "", "grad_input", "quantize")
    AmaxBoth(lambda device: True)(graph)
    assert not graph.find_nodes(op="call_function", target=ops.amax_both)
    graph.lint()


def test_parts_in_memory_are_those_of_splits_and_slices():
    """What an operator with several results computes lies elsewhere than its input."""
    graph = make_fx(lambda x: [x.split(16, 1)[1], x.sort(1)[0], x[:, 16:]], tracing_mode="fake")(
        randn(32, 48, grad=False)
    ).graph
    (output,) = graph.find_nodes(op="output")
    assert [part_in_memory(node) is not None for node in output.args[0]] == [True, False, True]


def test_sums_of_other_numbers_need_a_read_of_their_own():
    """Of the gradient in float32, which the bias is in."""

    def f(x, first, bias, second):
        return F.linear(F.silu(F.linear(x, first) + bias), second)

    x, first, _, second = args()
    assert taken(f, x, first, randn(48, seed=5), second) == 1
    # the gradient is cast before it is summed
    single = randn(48, seed=5).detach().float().requires_grad_()
    assert taken(lambda x, a, b, c: f(x, a, b.expand(32, 48).bfloat16(), c), x, first, single, second) == 0


def test_a_norm_of_a_square_tensor():
    """A number a row and a number a column are told apart by where they stand."""

    def f(x, first, second):
        return F.linear(F.rms_norm(F.linear(x, first), [32]), second)

    assert taken(f, randn(32, 32), randn(32, 32, seed=1), randn(32, 32, seed=2)) == 0


def test_elements_that_change_places():
    def f(x, first, second):
        y = F.linear(x, first)
        return F.linear(torch.cat([-y[:, 24:], y[:, :24]], 1), second)

    x, first, _, second = args()
    assert taken(f, x, first, second) == 0


def fused(x, weight, first, second, bias=None):
    """The gradient of the first layer is two results of matmuls side by side."""
    a, b = F.linear(x, weight, bias).chunk(2, -1)
    return F.linear(a, first), F.linear(b, second)


@pytest.mark.parametrize("biased", [False, True])
def test_parts_in_memory_side_by_side(biased):
    inputs = randn(2, 16, 32), randn(96, 32, seed=1), randn(64, 48, seed=2), randn(80, 48, seed=3)
    inputs += (randn(96, seed=4),) if biased else ()
    (found,) = [line for line in lines(fused, *inputs) if "amax_both" in line]
    parts = r"\w+, \w+" if biased else ""
    assert re.search(rf"amax_both\(concat, \[\], \[{parts}\]\)$", found), found
    same_with_and_without(fused, *inputs)


def of_two_widths(x, weight, first, second, function=torch.tanh):
    a, b = F.linear(x, weight).split([64, 32], -1)
    return F.linear(function(a), first), F.linear(b, second)


def test_parts_of_other_widths():
    """One of them computed, the other in memory, or both there."""
    inputs = randn(16, 32), randn(96, 32, seed=1), randn(64, 64, seed=2), randn(80, 32, seed=3)
    (found,) = [line for line in lines(of_two_widths, *inputs, scales="in_gemm") if "amax_both" in line]
    assert found.endswith("amax_both(concat, [rounded], [])")
    same_with_and_without(of_two_widths, *inputs)
    assert taken(lambda *args: of_two_widths(*args, function=lambda a: a), *inputs, scales="in_gemm") == 1


def test_a_part_that_needs_whole_rows_beside_one_that_is_computed():
    """The kernel has no words for the first, and is for the second."""

    def f(x, weight, first, second, gate=torch.tanh):
        a, b = F.linear(x, weight).split([64, 32], -1)
        a = torch.softmax(a, 1)
        return F.linear(a, first), F.linear(gate(b), second)

    inputs = randn(16, 32), randn(96, 32, seed=1), randn(64, 64, seed=2), randn(80, 32, seed=3)
    assert taken(f, *inputs, scales="in_gemm") == 1
    same_with_and_without(f, *inputs)
    assert taken(lambda *args: f(*args, gate=lambda b: b), *inputs, scales="in_gemm") == 0


def test_a_part_whose_elements_change_places_is_in_memory():
    """See `materialize`; the kernel takes it with what stands beside it."""

    def f(x, weight, first, second):
        a, b = F.linear(x, weight).split([64, 32], -1)
        return F.linear(torch.cat([-a[:, 32:], a[:, :32]], 1), first), F.linear(torch.tanh(b), second)

    inputs = randn(16, 32), randn(96, 32, seed=1), randn(64, 64, seed=2), randn(80, 32, seed=3)
    (line,) = (line for line in lines(f, *inputs, scales="in_gemm") if "amax_both" in line)
    assert "f8fx.amax_both(concat" in line
    same_with_and_without(f, *inputs)


def test_a_gradient_in_memory():
    """It is read by the kernel that casts rows too."""
    x, first, _, second = args()
    assert taken(lambda x, a, b: F.linear(F.linear(x, a), b), x, first, second, scales="in_gemm") == 0


def test_checkpointed_regions():
    """The amaxes of what the function gave are taken once, in the backward."""

    def f(x, first, second):
        return checkpoint(lambda x: activated(x, first, None, second), x, use_reentrant=False)

    x, first, _, second = args()
    assert taken(f, x, first, second) == 1
    same_with_and_without(f, x, first, second)


def test_rows_whose_number_changes():
    x, *weights = args()
    torch._dynamo.mark_dynamic(x, 0)
    (found,) = [line for line in lines(activated, x, *weights, dynamic=None) if "amax_both" in line]
    assert re.fullmatch(r"amax_both: \(f32\[s\d+\], f32\[48\], f32\[48\]\) = .*", found)


def test_rows_of_which_there_may_be_none():
    def chosen(x, *weights):
        return activated(x[x[:, 0] > 0], *weights)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert taken(chosen, *args()) == 0


def test_rows_of_a_length_that_is_not_known():
    assert taken(activated, *args(), dynamic=True) == 0


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp"])
def test_other_recipes(recipe):
    assert taken(activated, *args(), recipe=recipe) == 0


def test_column_amaxes_that_the_forward_needs_stay_there():
    """``h`` is cast by columns in the forward, too."""

    def f(x, first, second, third):
        h = F.silu(F.linear(x, first))
        return F.linear(h, second), h.t() @ third

    x, first, _, second = args()
    third = randn(32, 64, seed=4)
    found = [line for line in lines(f, x, first, second, third, scales="in_gemm") if "amax_both" in line]
    assert found and all(line.endswith(", [], [])") for line in found)
    same_with_and_without(f, x, first, second, third)


def test_what_the_gradient_depends_on_is_not_taken_along():
    """Two functions of one tensor are multiplied: the scales of each by columns go into the other's gradient."""

    def f(x, first):
        y = F.linear(x, first)
        return F.linear(F.silu(y), torch.tanh(y))

    x, first, _, _ = args()
    (found,) = [line for line in lines(f, x, first, scales="in_gemm") if "amax_both" in line]
    assert found.endswith(", [], [])")
    same_with_and_without(f, x, first)


def test_what_is_computed_later_is_not_taken_along():
    """The other gate's input is trained, this one's is not: its gradient, cast by columns only, comes after the amaxes."""

    def f(x, z, gate, up, down):
        return F.linear(F.silu(F.linear(x, gate)) * F.silu(F.linear(z, up)), down)

    z, gate, up, down = args()
    x = randn(32, 32, grad=False, seed=7)
    assert taken(f, x, z, gate, up, down) == 1
    same_with_and_without(f, x, z, gate, up, down)


def test_gradients_of_the_same_inputs():
    """Of two gates' gradients neither is taken along with the other: each is cast by rows, too."""
    x, gate, up, down = args()
    assert taken(gated, x, gate, up, down, merge="never") == 2
    same_with_and_without(gated, x, gate, up, down, merge="never")


def test_a_gate_has_the_same_bits():
    same_with_and_without(gated, *args())
    same_with_and_without(gated, *args(64, 128, 256), target="h100")


def test_the_operator_gives_the_amaxes_and_the_sums():
    x, y = randn(33, 17, grad=False), randn(33, 17, grad=False, seed=1)
    y[3, 4] = torch.nan
    found = ops.amax_both(x, [y], [y, x])
    want = [ops.amax(x, 1), ops.amax(x, 0), ops.amax(y, 0), y.sum(0), x.sum(0)]
    for own, other in zip(found, want, strict=True):
        assert torch.equal(own.nan_to_num(-1), other.nan_to_num(-1))


def same_with_and_without(fn, *inputs, **options):
    """The graph computes what it does without the kernel, whose definition takes its place here."""
    results = []
    for kernels in ("auto", "inductor"):
        parsed = f8fx.Options.parse({"select": "all", "recipe": "rowwise", "kernels": kernels, **options})
        pipeline = parsed.pipeline(debug=True, kernels=lambda device, used=kernels: used == "auto")
        tensors = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        ys = run_with(pipeline, fn, *tensors)
        ys = ys if isinstance(ys, tuple) else (ys,)
        sum((y * randn(*y.shape, grad=False, seed=5)).sum() for y in ys).backward()
        results.append([*(y.detach() for y in ys), *(x.grad for x in tensors if x.requires_grad)])
    for own, other in zip(*results, strict=True):
        assert torch.equal(own, other)
