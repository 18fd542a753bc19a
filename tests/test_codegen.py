"""What Inductor would run on an H100, as expected text; needs no GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import nn

from tests.helpers import bf16

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


def generated(module, *shapes, **options):
    with torch.device("meta"):
        model = module().to(bf16)
        inputs = [torch.empty(*shape, dtype=bf16, requires_grad=True) for shape in shapes]
    graphs, _ = codegen.halves(model, *inputs, **options)
    with codegen.h100():
        return [codegen.generate(g, backward) for g, backward in zip(graphs, (False, True), strict=True)]


def listed(halves):
    """Kernels of forward and backward with the megabytes they move; tiny ones without."""
    lines = []
    for name, half in zip(("forward", "backward"), halves, strict=True):
        lines.append(f"{name}:")
        for kernel in half.kernels:
            size = f"{kernel.bytes / 1e6:6.1f} MB" if kernel.bytes > 1e5 else "     tiny"
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
   218.2 MB  triton_amax_convert_element_type_mul_quantize
       tiny  triton_amax_reciprocal_scale
   134.2 MB  triton_quantize_both
   100.7 MB  extern_kernels._scaled_mm
   117.4 MB  extern_kernels._scaled_mm
   201.9 MB  triton_convert_element_type_div_mul_sub_sum
     0.5 MB  triton_convert_element_type_mul_sum""",
        )

    def test_norm_linear_rowwise(self):
        """Row amax, scale and cast ride in the norm's one kernel."""
        self.assertExpectedInline(
            listed(generated(NormLinear, (8192, 4096), recipe="rowwise")),
            """\
forward:
   151.2 MB  triton_add_amax_convert_element_type_mean_mul_pow_quantize_reciprocal_rsqrt_scale
   117.5 MB  extern_kernels._scaled_mm
backward:
   101.7 MB  triton_amax
     1.1 MB  triton_amax_reciprocal_scale
   184.7 MB  triton_amax_quantize_quantize_both_reciprocal_scale
   117.5 MB  extern_kernels._scaled_mm
   202.4 MB  triton_amax_convert_element_type_div_mul_sub_sum
     1.1 MB  triton_amax_convert_element_type_mul_reciprocal_scale_sum
   100.7 MB  triton_convert_element_type_mul_quantize
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
   117.5 MB  triton_amax_quantize
       tiny  triton_amax_reciprocal_scale
   134.2 MB  triton_quantize_both
   117.4 MB  extern_kernels._scaled_mm
   369.1 MB  triton_add_convert_element_type_div_exp_mul_neg_quantize_sigmoid_sub
   100.7 MB  extern_kernels._scaled_mm""",
        )
