"""What Inductor would run on an H100, as expected text; needs no GPU."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import nn

from benchmarks.blocks import rotate
from benchmarks.rereads import inlined
from f8fx import ops
from f8fx.tuning import tuning
from tests.helpers import bf16
from tests.kernels.test_compile import Case
from tests.long import seldom

pytest.importorskip("triton")
codegen = pytest.importorskip("benchmarks.codegen")

#: kernel lists are those of one release; elsewhere code is generated and looked at, not listed
LISTED = torch.__version__.startswith("2.13")


class NormLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(4096), nn.Linear(4096, 4096, bias=False)

    def forward(self, x):
        return self.linear(self.norm(x))


class SwiGlu(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Linear(4096, 4096, bias=False)

    def forward(self, gate, up):
        return self.down(F.silu(gate) * up)


class NormLinearSigmoid(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4096), nn.Linear(4096, 4096)

    def forward(self, x):
        return torch.sigmoid(self.linear(self.norm(x)))


class GateUp(nn.Module):
    """Two layers that read one input; at 64 tokens their weights are the largest tensors."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(4096, 8192, bias=False) for _ in range(2))

    def forward(self, x):
        return F.silu(self.gate(x)) * self.up(x)


class QueryKeyValue(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4096, n, bias=False) for n in (4096, 1024, 1024))

    def forward(self, x):
        return F.silu(self.q(x)), F.silu(self.k(x)), F.silu(self.v(x))


class Matmuls(nn.Module):
    """With reductions of equal depth, which combo kernels would make fewer launches of."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))

    def forward(self, x):
        return [torch.tanh(layer(x)).amax(-1) * layer.weight.amax() for layer in self.layers]


def traced(module, *shapes, **options):
    with torch.device("meta"):
        model = module().to(bf16)
        inputs = [torch.empty(*shape, dtype=bf16, requires_grad=True) for shape in shapes]
    return codegen.halves(model, *inputs, **options)


def generated(module, *shapes, **options):
    return lowered(traced(module, *shapes, **options)[0])


def lowered(graphs):
    """What is generated for both halves; of whatever graph, no cast computes its scale again for each element."""
    with codegen.h100():
        halves = [codegen.generate(g, backward) for g, backward in zip(graphs, (False, True), strict=True)]
    repeated = [name for half in halves for name, source in sources_of(half) if repeats_scales(source)]
    assert not repeated, repeated
    return halves


def sources_of(half):
    """The names and texts of the kernels that Inductor generated, the parts of combined ones in their places."""
    found = re.findall(
        r"^(triton_\w+) = async_compile.triton\('\w+', '{3}\n(.*?)^'{3}", half.code, re.M | re.S
    )
    return [(name, inlined(source)) for name, source in found]


def repeats_scales(source):
    """Whether the arithmetic of scales, the only one in float64, is done for each element: where elements are cast.

    In a kernel that reduces rows it is done once a row, between the loops over its elements.
    """
    for part in re.split(r"\n    (?:el)?if pid < |\n    else", source):
        if "r0_numel" not in part and "tl.float64" in part and ".to(tl.float8" in part:
            return True
    loops = re.findall(r"^( +)for r0_offset in .*\n((?:\1 +.*\n|\s*\n)*)", source, re.M)
    return any("tl.float64" in body for _, body in loops)


def weights_of(module):
    """Elements of all weights of a module's layers."""
    with torch.device("meta"):
        return sum(layer.weight.numel() for layer in module().children())


def weight_loads(graph, half):
    """How often each weight is read by the text of the kernels that are launched."""
    given = graph.graph.find_nodes(op="placeholder")
    weights = [node.name for node in given if is_weight(node.meta["val"])]
    sources = dict(sources_of(half))
    counted = dict.fromkeys(weights, 0)
    for kernel, arguments in re.findall(r"^ +(triton_\w+)\.run\((.*?), stream=", half.code, re.M):
        parameters = re.search(r"^def \w+\(([^)]*)\)", sources[kernel], re.M)[1].split(", ")
        for parameter, argument in zip(parameters, arguments.split(", "), strict=False):
            if argument in counted:
                counted[argument] += len(re.findall(rf"tl\.load\({parameter} \+", sources[kernel]))
    return list(counted.values())


def is_weight(value):
    return value.dtype == bf16 and value.dim() == 2 and value.shape[0] > 64 and value.shape[1] == 4096


def listed(halves):
    """Kernels of forward and backward with the megabytes they move, what they read again too; tiny ones without."""
    lines = []
    for name, half in zip(("forward", "backward"), halves, strict=True):
        lines.append(f"{name}:")
        for kernel in half.kernels:
            moved = kernel.bytes + kernel.reread
            size = f"{moved / 1e6:6.1f} MB" if moved > 1e5 else "     tiny"
            lines.append(f"  {size}  {kernel.name}")
    return "\n".join(lines)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_code_for_hopper_is_generated_for_every_recipe(recipe):
    forward, backward = generated(NormLinear, (8192, 4096), recipe=recipe)
    for half in (forward, backward):
        assert "float8_e4m3fn" in half.code and "_scaled_mm(" in half.code
        # saturation by `where`: the other form is miscompiled next to a transposed 1-byte store
        assert "PropagateNan" not in half.code and "triton_helpers.minimum" not in half.code
    # no copy of a float8 tensor only to change its layout
    names = [kernel.name for half in (forward, backward) for kernel in half.kernels]
    assert not [name for name in names if name in ("triton_clone", "triton_permute", "triton_")]


@pytest.mark.parametrize(
    ("module", "recipe"),
    [
        (NormLinearSigmoid, "tensorwise"),
        pytest.param(GateUp, "rowwise_with_gw_hp", marks=pytest.mark.long),
        pytest.param(GateUp, "rowwise", marks=pytest.mark.long),
        pytest.param(QueryKeyValue, "rowwise", marks=pytest.mark.long),
    ],
)
def test_code_for_hopper_is_generated_for_sizes_that_change(module, recipe):
    halves = generated(module, (2, 250, 4096), recipe=recipe, dynamic=True)
    for half in halves:
        assert "_scaled_mm(" in half.code
        assert re.search(r"empty_strided_cuda\(\(\w*s\d+", half.code)
    launched = {kernel.name for half in halves for kernel in half.kernels}
    assert ("triton_row_cast_columns_kernel" in launched) == (recipe == "rowwise")
    has_parts = recipe == "rowwise" and module in (GateUp, QueryKeyValue)
    assert ("triton_computed_amaxes_kernel" in launched) == has_parts


def test_every_kernel_that_is_launched_is_counted_under_the_name_that_a_profile_shows():
    with codegen.watched() as seen:
        halves = generated(NormLinear, (8192, 4096), recipe="rowwise")
    assert [graph.is_backward for graph in seen] == [False, True]
    for graph, half in zip(seen, halves, strict=True):
        launched = re.findall(r"^ +(\w+)\.run\(", half.code, re.M)
        # a kernel of ours has no number in a profile
        launched = [re.sub(r"^(row_cast_columns_kernel)_\d+$", r"\1", name) for name in launched]
        assert set(launched) == set(half.named) == set(graph.kernels)
        # up to scales, which one of them counts where they are written and the other where they are added to
        moved = sum(graph.kernels[name].bytes for name in launched)
        assert moved == pytest.approx(sum(k.bytes for k in half.triton), rel=5e-3)


_COMBINED = """
def kernel(in_ptr0, in_ptr1, out_ptr0, out_ptr1):
    if pid < num_xblocks_0:
        tmp0 = tl.load(in_ptr0 + (x0), xmask)
        {scale}
        tl.store(out_ptr0 + (x0), tmp1, xmask)
    elif pid < num_xblocks_1:
        tmp0 = tl.load(in_ptr1 + (x0), xmask)
        {cast}
        tl.store(out_ptr1 + (x0), tmp2, xmask)
"""
_LOOPED = """
def kernel(in_ptr0, out_ptr0):
    r0_numel = 4096
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp0 = tl.load(in_ptr0 + (r0_1 + 4096*x0), xmask)
    {scale}
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp0 = tl.load(in_ptr0 + (r0_1 + 4096*x0), xmask)

        {cast}
        tl.store(out_ptr0 + (r0_1 + 4096*x0), tmp2, xmask)
"""


@pytest.mark.parametrize("form", [_COMBINED, _LOOPED])
def test_arithmetic_of_scales_for_each_element_would_be_seen(form):
    """By what is asked of all that is generated here."""
    scale, cast = "tmp1 = tmp0.to(tl.float64)", "tmp2 = tmp0.to(tl.float8e4nv)"
    assert not repeats_scales(form.format(scale=scale, cast=cast))
    assert repeats_scales(form.format(scale="", cast=f"{scale}; {cast}"))


def test_dropout_is_generated_too():
    """What was dropped is saved, a byte an element; the numbers are drawn where they are compared."""

    class Dropout(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(256, 512)

        def forward(self, x):
            return F.dropout(self.linear(x), 0.1)

    graphs, saved = traced(Dropout, (512, 256))
    forward, _ = lowered(graphs)
    assert any("inductor_random" in kernel.name for kernel in forward.triton)
    assert saved < 512 * (2 * 256 + 512) + 64  # the layer's input and the mask, and scales


class Rounded(nn.Module):
    """A tensor that is computed, rounded and cast: a kernel of its own, beside a layer that is to be trained."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, x):
        y = ops.rounded(torch.tanh(x.detach()))
        return self.layer(x), (y * 3).to(torch.float8_e4m3fn)


def test_a_rounded_tensor_is_rounded_in_its_kernel():
    """Not in memory: one kernel reads ``x`` and writes float8."""
    forward, _ = generated(Rounded, (128, 256), only_fqns=["none"])
    (source,) = (source for _, source in sources_of(forward) if "tanh" in source)
    assert ".to(tl.bfloat16).to(tl.int16, bitcast=True)" in source
    assert ".to(tl.bfloat16, bitcast=True).to(tl.float32)" in source
    assert source.count("tl.store") == 1
    # and no compiler after Inductor takes the rounding for superfluous
    kernel = re.search(r"@triton\.jit\s+def (\w+)", source)[1]
    text = re.sub(r"@triton_heuristics.*?(?=@triton\.jit)", "", source, flags=re.S)
    text = text.replace("triton_helpers.set_driver_to_gpu()", "")
    pointers = {"in_ptr0": "bf16", "out_ptr0": "fp8e4nv"}
    for target in (90, 100):
        compiled = Case(text, kernel, pointers, {"XBLOCK": 1024}, warps=4).compile(target)
        elements = 1024 // (4 * 32)  # of a thread
        assert compiled.ptx["cvt.rn.bf16.f32"] + 2 * compiled.ptx["cvt.rn.bf16x2.f32"] == elements


def test_padding_is_generated_too():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(1000, 2010)

        def forward(self, x):
            return self.linear(x)

    for recipe in ("tensorwise", "rowwise"):
        forward, backward = generated(Odd, (1001, 1000), recipe=recipe)
        assert forward.code.count("_scaled_mm(") == 1 and backward.code.count("_scaled_mm(") == 2


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(
    "module, layers", [(GateUp, 2), pytest.param(QueryKeyValue, 3, marks=pytest.mark.long)]
)
def test_merged_layers_read_each_weight_once_per_cast_and_fill_one_buffer(module, layers, recipe):
    graphs, _ = traced(module, (64, 4096), recipe=recipe)
    forward, backward = lowered(graphs)
    size = weights_of(module)
    assert forward.code.count("_scaled_mm(") == 1 and backward.code.count("_scaled_mm(") == 2
    # once for the amax and once for the cast, or in the kernel that does both; the backward has the scales already
    assert weight_loads(graphs[0], forward) == [2 if recipe == "tensorwise" else 0] * layers
    assert weight_loads(graphs[1], backward) == [1] * layers
    if recipe == "rowwise":
        (launch,) = re.findall(r"row_cast_columns_kernel_\d\.run\((.*)", forward.code)
        given = graphs[0].graph.find_nodes(op="placeholder")
        weights = {node.name for node in given if is_weight(node.meta["val"])}
        assert len(weights) == layers and weights <= set(launch.split(", "))
    # the casts write the gemm's one operand: nothing of its size is moved by any other kernel
    buffers = (
        # the input is as wide, and cast with them
        (forward, f"({size // 4096 + (64 if recipe == 'rowwise' else 0)}, 4096), (4096, 1)"),
        (backward, f"(4096, {size // 4096}), ({size // 4096}, 1)"),
    )
    for half, layout in buffers:
        assert half.code.count(f"({layout}, torch.float8_e4m3fn)") == 1
        others = [
            k for k in half.triton if not any(word in k.name for word in ("amax", "quantize", "row_cast"))
        ]
        assert all(kernel.bytes < size for kernel in others), others


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("module", [GateUp, *seldom(QueryKeyValue)])
def test_fast_saves_the_transposed_weights_more(module, recipe):
    """One byte an element, and only where that spares a read: of weights whose two copies have one scale."""
    lean, fast = (traced(module, (64, 4096), recipe=recipe, save=save)[1] for save in ("lean", "fast"))
    assert abs(fast - lean - (weights_of(module) if recipe == "tensorwise" else 0)) <= 8  # a scale


class StoredInFloat8(nn.Module):
    """A weight that is cast up where it is read, with a scale for each row."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(1024)
        self.weight = nn.Parameter(torch.empty(2048, 1024, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(2048, 1), requires_grad=False)

    def forward(self, x):
        weight = self.weight.to(torch.float32) * self.scale
        return F.linear(self.norm(x), weight.to(x.dtype))


def test_a_weight_that_is_float8_is_read_by_its_gemm_alone():
    with torch.device("meta"), torch.no_grad():
        model, x = StoredInFloat8(), torch.empty(512, 1024, dtype=bf16)
        (graph,), _ = codegen.halves(model, x, recipe="rowwise")
    with codegen.h100():
        half = codegen.generate(graph, is_backward=False, is_inference=True)
    names = {
        tuple(node.meta["val"].shape): node.name
        for node in graph.graph.find_nodes(op="placeholder")
        if "val" in node.meta
    }
    (gemm,) = re.findall(r"^ +extern_kernels\._scaled_mm\((.*)\)$", half.code, re.M)
    kernels = re.findall(r"^ +(triton_\w+)\.run\((.*?), stream=", half.code, re.M)
    assert len(kernels) == 1  # the norm, and the cast of its result
    for shape in ((2048, 1024), (2048, 1)):
        assert names[shape] in gemm
        assert not any(names[shape] in arguments.split(", ") for _, arguments in kernels)


@pytest.mark.long
def test_a_graph_in_which_nothing_was_converted_is_compiled_as_by_plain_inductor():
    plain = generated(Matmuls, (512, 256), float8=False)
    skipped = generated(Matmuls, (512, 256), only_fqns=["none"])
    for ours, inductors in zip(skipped, plain, strict=True):
        assert ours.kernels == inductors.kernels
        assert ours.code == inductors.code
    # and with the options for rewritten graphs it would not be
    with torch._inductor.config.patch(tuning({})):
        tuned = generated(Matmuls, (512, 256), float8=False)
    assert len(tuned[0].triton) < len(plain[0].triton)


@pytest.mark.skipif(not LISTED, reason="the lists below are those of torch 2.13")
class TestKernels(TestCase):
    maxDiff = None

    def test_norm_linear_tensorwise(self):
        """amax rides in the norm's kernel; its second, cheap stage gives the scale; the cast redoes the norm."""
        self.assertExpectedInline(
            listed(generated(NormLinear, (8192, 4096))),
            """\
forward:
   100.8 MB  triton_add_amax_convert_element_type_mean_mul_pow_rsqrt
       tiny  triton_amax_convert_element_type_mul_reciprocal_scale
   151.0 MB  triton_convert_element_type_mul_quantize
   117.4 MB  extern_kernels._scaled_mm
backward:
    67.1 MB  triton_amax
       tiny  triton_amax_reciprocal_scale
   285.3 MB  triton_convert_element_type_mul_quantize_quantize_both
   100.7 MB  extern_kernels._scaled_mm
   117.4 MB  extern_kernels._scaled_mm
   201.4 MB  triton_convert_element_type_div_mul_sub_sum
       tiny  triton_convert_element_type_mul_sum""",
        )

    def test_norm_linear_rowwise(self):
        """Row amax, scale and cast ride in the norm's one kernel."""
        self.assertExpectedInline(
            listed(generated(NormLinear, (8192, 4096), recipe="rowwise")),
            """\
forward:
   100.8 MB  triton_add_amax_convert_element_type_mean_mul_pow_quantize_quantize_rowwise_reciprocal_rsqrt_scale
    50.4 MB  triton_row_cast_columns_kernel
   117.5 MB  extern_kernels._scaled_mm
backward:
    67.7 MB  triton_amax_convert_element_type_mul_quantize_rowwise_reciprocal_scale
   100.7 MB  triton_row_cast_columns_kernel
       tiny  triton_quantize_rowwise_reciprocal_scale
     0.6 MB  triton_amax_convert_element_type_mul_reciprocal_scale
    50.3 MB  triton_quantize
   117.5 MB  extern_kernels._scaled_mm
   201.4 MB  triton_convert_element_type_div_mul_sub_sum
       tiny  triton_convert_element_type_mul_sum
   201.4 MB  triton_convert_element_type_mul_quantize
   100.7 MB  extern_kernels._scaled_mm""",
        )

    def test_swiglu_linear_tensorwise(self):
        self.assertExpectedInline(
            listed(generated(SwiGlu, (8192, 4096), (8192, 4096))),
            """\
forward:
   167.8 MB  triton_add_amax_convert_element_type_div_exp_mul_neg
       tiny  triton_add_amax_convert_element_type_div_exp_mul_neg_reciprocal_scale
   218.1 MB  triton_add_convert_element_type_div_exp_mul_neg_quantize
   117.4 MB  extern_kernels._scaled_mm
backward:
    67.1 MB  triton_amax
       tiny  triton_amax_reciprocal_scale
   184.5 MB  triton_quantize_quantize_both
   117.4 MB  extern_kernels._scaled_mm
   369.1 MB  triton_add_convert_element_type_div_exp_mul_neg_quantize_sigmoid_sub
   100.7 MB  extern_kernels._scaled_mm""",
        )

    def test_norm_linear_rowwise_with_gw_hp(self):
        self.assertExpectedInline(
            listed(generated(NormLinear, (8192, 4096), recipe="rowwise_with_gw_hp")),
            """\
forward:
   218.2 MB  triton_add_amax_convert_element_type_mean_mul_pow_quantize_reciprocal_rounded_rsqrt_scale
       tiny  triton_amax_scale_unsqueeze
   117.5 MB  extern_kernels._scaled_mm
backward:
   167.8 MB  extern_kernels.mm
   100.7 MB  triton_amax_clone_expand_quantize_reciprocal_scale
    50.3 MB  triton_quantize
   117.5 MB  extern_kernels._scaled_mm
   201.4 MB  triton_convert_element_type_div_mul_sub_sum
       tiny  triton_convert_element_type_mul_sum""",
        )

    def test_swiglu_linear_rowwise(self):
        self.assertExpectedInline(
            listed(generated(SwiGlu, (8192, 4096), (8192, 4096), recipe="rowwise")),
            """\
forward:
   167.8 MB  triton_add_amax_convert_element_type_div_exp_mul_neg_quantize_quantize_rowwise_reciprocal_scale
    50.4 MB  triton_row_cast_columns_kernel
   117.5 MB  extern_kernels._scaled_mm
backward:
   134.8 MB  triton_add_amax_convert_element_type_div_exp_mul_neg_quantize_rowwise_reciprocal_scale
   100.7 MB  triton_row_cast_columns_kernel
       tiny  triton_quantize_rowwise_reciprocal_scale
     0.6 MB  triton_add_amax_convert_element_type_div_exp_mul_neg_reciprocal_scale
    50.3 MB  triton_quantize
   268.5 MB  triton_add_convert_element_type_div_exp_mul_neg_quantize
   100.7 MB  extern_kernels._scaled_mm
   117.5 MB  extern_kernels._scaled_mm
   335.5 MB  triton_add_convert_element_type_div_exp_mul_neg_sigmoid_sub""",
        )

    def test_swiglu_linear_rowwise_with_gw_hp(self):
        self.assertExpectedInline(
            listed(generated(SwiGlu, (8192, 4096), (8192, 4096), recipe="rowwise_with_gw_hp")),
            """\
forward:
   285.3 MB  triton_add_amax_convert_element_type_div_exp_mul_neg_quantize_reciprocal_rounded_scale
       tiny  triton_amax_scale_unsqueeze
   117.5 MB  extern_kernels._scaled_mm
backward:
   167.8 MB  extern_kernels.mm
   100.7 MB  triton_amax_clone_expand_quantize_reciprocal_scale
    50.3 MB  triton_quantize
   117.5 MB  extern_kernels._scaled_mm
   335.5 MB  triton_add_convert_element_type_div_exp_mul_neg_sigmoid_sub""",
        )

    def test_norm_linear_sigmoid_tensorwise(self):
        self.assertExpectedInline(
            listed(generated(NormLinearSigmoid, (8192, 4096), recipe="tensorwise")),
            """\
forward:
   100.8 MB  triton_add_amax_convert_element_type_mul_rsqrt_sub_var_mean
       tiny  triton_add_amax_convert_element_type_mul_reciprocal_scale_sub
   151.1 MB  triton_add_convert_element_type_mul_quantize_sub
   117.4 MB  extern_kernels._scaled_mm
   134.2 MB  triton_add_rounded_sigmoid
backward:
   134.3 MB  triton_amax_convert_element_type_mul_rounded_sub_sum
     0.5 MB  triton_convert_element_type_mul_rounded_sub_sum
       tiny  triton_amax_convert_element_type_mul_reciprocal_rounded_scale_sub
   352.4 MB  triton_add_convert_element_type_mul_quantize_quantize_both_rounded_sub
   100.7 MB  extern_kernels._scaled_mm
   117.4 MB  extern_kernels._scaled_mm
   201.4 MB  triton_convert_element_type_div_mul_sub_sum
       tiny  triton_convert_element_type_mul_sub_sum
       tiny  triton_convert_element_type_sum""",
        )

    def test_norm_linear_sigmoid_rowwise(self):
        self.assertExpectedInline(
            listed(generated(NormLinearSigmoid, (8192, 4096), recipe="rowwise")),
            """\
forward:
   100.8 MB  triton_add_amax_convert_element_type_mul_quantize_quantize_rowwise_reciprocal_rsqrt_scale_sub_var_mean
    50.4 MB  triton_row_cast_columns_kernel
   117.5 MB  extern_kernels._scaled_mm
   134.2 MB  triton_add_rounded_sigmoid
backward:
    67.8 MB  triton_add_amax_amax_both_convert_element_type_mul_reciprocal_rounded_scale_sub
   136.4 MB  triton_computed_amaxes_kernel
     0.1 MB  triton_amax_both_convert_element_type_mul_reciprocal_rounded_scale_sub
    50.3 MB  triton_quantize
     0.6 MB  triton_add_amax_convert_element_type_mul_reciprocal_scale_sub
   302.1 MB  triton_add_convert_element_type_mul_quantize_quantize_both_rounded_sub
   117.5 MB  extern_kernels._scaled_mm
   100.7 MB  extern_kernels._scaled_mm
   201.4 MB  triton_convert_element_type_div_mul_sub_sum
       tiny  triton_convert_element_type_mul_sub_sum
       tiny  triton_convert_element_type_sum""",
        )

    def test_norm_linear_sigmoid_rowwise_with_gw_hp(self):
        self.assertExpectedInline(
            listed(generated(NormLinearSigmoid, (8192, 4096), recipe="rowwise_with_gw_hp")),
            """\
forward:
   218.3 MB  triton_add_amax_convert_element_type_mul_quantize_reciprocal_rounded_rsqrt_scale_sub_var_mean
       tiny  triton_amax_scale_unsqueeze
   117.5 MB  extern_kernels._scaled_mm
   134.2 MB  triton_add_rounded_sigmoid
backward:
   234.9 MB  triton_amax_clone_convert_element_type_expand_mul_quantize_reciprocal_rounded_scale_sub
    50.3 MB  triton_quantize
   117.5 MB  extern_kernels._scaled_mm
   167.8 MB  extern_kernels.mm
    67.6 MB  triton_sum
     0.5 MB  triton_sum
   201.4 MB  triton_convert_element_type_div_mul_sub_sum
       tiny  triton_convert_element_type_mul_sub_sum
       tiny  triton_convert_element_type_sum""",
        )


class BiasedBlock(nn.Module):
    """Biases everywhere, RoPE, attention whose output is gated, GELU: 16 heads of 128, four times as wide in the MLP."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(2048) for _ in range(2))
        self.q, self.k, self.v, self.gate, self.o = (nn.Linear(2048, 2048) for _ in range(5))
        self.up, self.down = nn.Linear(2048, 8192), nn.Linear(8192, 2048)

    def forward(self, x, cos, sin):
        h = self.norms[0](x)
        q, k, v = (layer(h).unflatten(-1, (-1, 128)) for layer in (self.q, self.k, self.v))
        heads = (t.transpose(1, 2) for t in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        mixed = torch.ops.aten._scaled_dot_product_flash_attention(*heads, 0.0, True)[0]
        x = x + self.o(mixed.transpose(1, 2).flatten(2) * torch.sigmoid(self.gate(h)))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


@pytest.mark.skipif(not LISTED, reason="the lists below are those of torch 2.13")
class TestBlock(TestCase):
    maxDiff = None

    def large(self, recipe):
        """The Triton kernels that move more than 40 MB, and what all of them do."""
        with torch.device("meta"):
            rotation = [torch.empty(1, 4096, 1, 64) for _ in range(2)]
            x = torch.empty(1, 4096, 2048, dtype=bf16, requires_grad=True)
            model = BiasedBlock().to(bf16)
        halves = lowered(codegen.halves(model, x, *rotation, recipe=recipe)[0])
        moved = [(kernel.bytes + kernel.reread, kernel.name) for half in halves for kernel in half.triton]
        lines = [f"{sum(size for size, _ in moved) / 1e6:.1f} MB by {len(moved)} kernels"]
        lines += [f"{size / 1e6:6.1f} MB  {name}" for size, name in moved if size > 40e6]
        return "\n".join(lines)

    def test_tensorwise(self):
        """The gradient of GELU's input is summed and its amax taken in one kernel, as the others that biases need."""
        self.assertExpectedInline(
            self.large("tensorwise"),
            """\
1974.4 MB by 42 kernels
 126.0 MB  triton_add_amax_concat_convert_element_type_mul_rsqrt_squeeze_sub_var_mean
 188.8 MB  triton_add_concat_convert_element_type_mul_quantize_squeeze_sub
 119.5 MB  triton_add_cat_convert_element_type_mul_rounded_slice_split_sub_view
  50.4 MB  triton_add_amax_mul_permute_rounded_sigmoid_slice_squeeze_view
  41.9 MB  triton_mul_permute_quantize_sigmoid_squeeze_view
  50.4 MB  triton_add_amax_convert_element_type_mul_rounded_rsqrt_squeeze_sub_var_mean_view
  67.1 MB  triton_add_amax_convert_element_type_erf_mul_rounded_squeeze_view
 100.7 MB  triton_add_convert_element_type_erf_mul_quantize_rounded_squeeze_view
  50.3 MB  triton_add_rounded_view
 247.5 MB  triton_add_concat_convert_element_type_mul_quantize_quantize_both_squeeze_sub
 135.3 MB  triton_add_amax_convert_element_type_erf_exp_mul_rounded_squeeze_sum_view
 234.9 MB  triton_add_convert_element_type_erf_exp_mul_quantize_quantize_both_rounded_squeeze_view
  67.1 MB  triton_add_convert_element_type_div_mul_rounded_sub_sum_view
  50.3 MB  triton_amax_convert_element_type_mul_permute_rounded_sigmoid_sub_sum_view
  50.3 MB  triton__scaled_dot_product_flash_attention_backward_mul_permute_sigmoid_view
 144.7 MB  triton_mul_permute_quantize_quantize_both_sigmoid_squeeze_view
  67.1 MB  triton_add_convert_element_type_div_mul_sub_sum_view""",
        )

    def test_rowwise(self):
        self.assertExpectedInline(
            self.large("rowwise"),
            """\
1902.1 MB by 35 kernels
 113.3 MB  triton_row_cast_columns_kernel
 119.5 MB  triton_add_cat_convert_element_type_mul_rounded_slice_split_sub_view
  58.7 MB  triton_add_amax_mul_permute_quantize_reciprocal_rounded_scale_sigmoid_slice_squeeze_view
  58.8 MB  triton_add_amax_convert_element_type_mul_quantize_reciprocal_rounded_rsqrt_scale_squeeze_sub_var_mean_view
 100.7 MB  triton_add_amax_convert_element_type_erf_mul_quantize_reciprocal_rounded_scale_squeeze_view
  50.4 MB  triton_row_cast_columns_kernel
  50.3 MB  triton_add_rounded_view
  51.5 MB  triton_add_amax_amax_both_convert_element_type_erf_exp_mul_permute_quantize_rowwise_reciprocal_rounded_scale_sigmoid_squeeze_sub_sum_view
 163.6 MB  triton_concat_quantize
 136.4 MB  triton_computed_amaxes_kernel
 235.0 MB  triton_add_convert_element_type_erf_exp_mul_quantize_quantize_both_rounded_squeeze_view
  67.1 MB  triton_add_convert_element_type_div_mul_rounded_sub_sum_view
  50.3 MB  triton__scaled_dot_product_flash_attention_backward_mul_permute_sigmoid_view
  69.2 MB  triton_add_cat_convert_element_type_mul_neg_permute_slice
 101.8 MB  triton_computed_amaxes_kernel
 176.2 MB  triton_mul_permute_quantize_quantize_both_sigmoid_squeeze_view
  67.1 MB  triton_add_convert_element_type_div_mul_sub_sum_view
  75.6 MB  triton_add_convert_element_type_mul_quantize_squeeze_sub""",
        )

    @pytest.mark.long
    def test_rowwise_with_gw_hp(self):
        self.assertExpectedInline(
            self.large("rowwise_with_gw_hp"),
            """\
1704.8 MB by 30 kernels
 205.7 MB  triton_add_amax_concat_convert_element_type_mul_quantize_reciprocal_rounded_rsqrt_scale_squeeze_sub_var_mean
 119.5 MB  triton_add_cat_convert_element_type_mul_rounded_slice_split_sub_view
  75.5 MB  triton_add_amax_mul_permute_quantize_reciprocal_rounded_scale_sigmoid_slice_squeeze_view
  75.6 MB  triton_add_amax_convert_element_type_mul_quantize_reciprocal_rounded_rsqrt_scale_squeeze_sub_var_mean_view
 167.8 MB  triton_add_amax_convert_element_type_erf_mul_quantize_reciprocal_rounded_scale_squeeze_view
  50.3 MB  triton_add_rounded_view
 163.6 MB  triton_concat_quantize
 234.9 MB  triton_add_amax_convert_element_type_erf_exp_mul_quantize_reciprocal_rounded_scale_squeeze_view
  67.6 MB  triton_add_convert_element_type_erf_exp_mul_rounded_sum_view
  67.1 MB  triton_add_convert_element_type_div_mul_rounded_sub_sum_view
  50.3 MB  triton__scaled_dot_product_flash_attention_backward_mul_permute_sigmoid_view
  50.4 MB  triton_amax_convert_element_type_mul_permute_reciprocal_scale_sigmoid_sub_sum_view
 203.4 MB  triton_materialize_quantize
  67.1 MB  triton_add_convert_element_type_div_mul_sub_sum_view""",
        )


class BiasedAttention(nn.Module):
    """Attention, which no kernel of Inductor computes, reads projections with biases."""

    def __init__(self, widths):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, width) for width in widths)

    def forward(self, x):
        parts = [part for layer in self.layers for part in layer(x).split(2048, -1)]
        heads = (part.unflatten(-1, (-1, 128)).transpose(1, 2) for part in parts)
        return torch.ops.aten._scaled_dot_product_flash_attention(*heads, 0.0, True)[0]


@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("tensorwise", marks=pytest.mark.long)])
@pytest.mark.parametrize("widths", [*seldom((6144,)), (2048, 2048, 2048)], ids=["one", "merged"])
def test_a_bias_that_the_gemm_adds_is_no_kernel(widths, recipe):
    """What is projected, 6144 numbers a token, is neither read nor written again."""
    build, shape = partial(BiasedAttention, widths), (1, 8192, 4096)
    moved = []
    for bias in ("torchao", "in_gemm"):
        forward, _ = generated(build, shape, recipe=recipe, bias=bias)
        assert [kernel.name for kernel in forward.kernels].count("extern_kernels._scaled_mm") == 1
        moved.append(sum(kernel.bytes for kernel in forward.triton))
    assert moved[0] - moved[1] == pytest.approx(2 * 8192 * 6144 * 2, rel=1e-3)


def test_gradients_of_attention_are_read_twice():
    """Of q, k and v side by side: once for the amaxes of rows and columns, and the sums of columns, once for both copies."""
    _, backward = generated(partial(BiasedAttention, (6144,)), (1, 8192, 4096), recipe="rowwise")
    moved = {kernel.name: kernel.bytes + kernel.reread for kernel in backward.triton}
    size = 8192 * 6144
    assert moved["triton_computed_amaxes_kernel"] == pytest.approx(2 * size, rel=0.05)
    (cast,) = (bytes_ for name, bytes_ in moved.items() if "concat" in name and "quantize_both" in name)
    weight = 4096 * 6144  # is cast in the same launch
    assert cast == pytest.approx(2 * size + 2 * size + 3 * weight, rel=0.01)


class Chain(nn.Module):
    """Three layers of one width, whose weights are cast in one launch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_each_gemm_reads_the_scales_of_its_own_weight():
    """They lie one behind the other; torch 2.11 reads a view by strides from where its buffer begins."""
    forward, _ = generated(Chain, (2048, 1024), recipe="rowwise")
    assert len(re.findall(r"row_cast_columns_kernel_\d\.run\(", forward.code)) == 1
    scales = re.findall(r"reinterpret_tensor\((\w+), \(1, 1024\), \(1024, 1\), (\d+)\)", forward.code)
    # those of the three weights come first; behind them are scales of columns that are saved
    assert len(set(scales[:3])) == 3, scales


@pytest.mark.skipif(not LISTED, reason="the lists below are those of torch 2.13")
class TestOneRead(TestCase):
    """The launch is generated as Inductor's own are, and what follows is fused as ever."""

    def test_the_launch_is_generated(self):
        """By the very call that launches a kernel of Inductor's: no dispatcher and no Python of ours in between."""
        _, backward = generated(NormLinear, (8192, 4096), recipe="rowwise")
        launches = re.findall(r"^ +(\w+)\.run\(.*, stream=(\w+)\)$", backward.code, re.MULTILINE)
        kernels = dict(launches)
        assert {"row_cast_columns_kernel_0"} < set(kernels) and len(set(kernels.values())) == 1
        for name in kernels:
            assert backward.code.count(f"{name} = async_compile.triton(") == 1
        called = [line for line in backward.code.splitlines() if not line.lstrip().startswith("#")]
        assert not any("torch.ops.f8fx" in line for line in called)

    def test_merged_weights(self):
        found = generated(GateUp, (8192, 4096), recipe="rowwise")
        self.assertExpectedInline(
            listed(found),
            """\
forward:
       tiny  triton_quantize_rowwise
   302.1 MB  triton_row_cast_columns_kernel
   369.2 MB  extern_kernels._scaled_mm
       tiny  triton_quantize_rowwise_reciprocal_scale
   402.7 MB  triton_add_convert_element_type_div_exp_mul_neg_slice
   100.7 MB  triton_quantize
backward:
     0.1 MB  triton_add_amax_both_concat_convert_element_type_div_exp_mul_neg_reciprocal_scale_sigmoid_slice_sub
   402.8 MB  triton_computed_amaxes_kernel
     0.2 MB  triton_add_amax_both_concat_convert_element_type_div_exp_mul_neg_reciprocal_scale_sigmoid_slice_sub
   671.2 MB  triton_add_concat_convert_element_type_div_exp_mul_neg_quantize_both_sigmoid_slice_sub
   302.1 MB  extern_kernels._scaled_mm
   201.3 MB  triton_concat_quantize
   268.5 MB  extern_kernels._scaled_mm""",
        )
