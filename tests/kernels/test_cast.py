"""The definitions of amax, scale and cast are torchao's, bit for bit."""

from __future__ import annotations

import pytest
import torch

from f8fx.kernels import cast
from tests.helpers import bf16, randn

utils = pytest.importorskip("torchao.float8.float8_utils")
config = pytest.importorskip("torchao.float8.config")

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
HIGH = (bf16, torch.float16, torch.float32)


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("high", HIGH)
def test_scale_and_cast_are_torchaos(high, fp8, dim, power_of_2):
    x = randn(33, 47, dtype=torch.float32, grad=False)
    x = (x * torch.logspace(-4, 4, 33)[:, None]).to(high)
    granularity = config.ScalingGranularity.TENSORWISE if dim is None else config.ScalingGranularity.AXISWISE
    theirs = utils.tensor_to_scale(
        x, fp8, scaling_granularity=granularity, axiswise_dim=dim, round_scales_to_power_of_2=power_of_2
    )
    ours = cast.scale(cast.amax(x, dim), fp8, power_of_2)
    assert torch.equal(cast.broadcast(ours, dim), theirs)
    bits = utils.to_fp8_saturated(x.to(torch.float32) * theirs, fp8).view(torch.uint8)
    assert torch.equal(cast.quantize(x, ours, fp8, dim, False, [1, 1]).view(torch.uint8), bits)
    assert torch.equal(cast.quantize(x, ours, fp8, dim, True, [1, 1]).view(torch.uint8), bits.t())


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (7, 1), (0, 5), (5, 0)])
@pytest.mark.parametrize("transpose", [False, True])
def test_thin_and_empty_copies_have_canonical_strides(size, transpose):
    x = randn(*size, grad=False)
    data = cast.quantize(x, torch.ones(()), torch.float8_e4m3fn, None, transpose, [1, 16])
    rows, columns = size[::-1] if transpose else size
    assert data.shape == (rows, max(1, (columns + 15) // 16) * 16)
    assert data.stride() == torch.empty(data.shape).stride()


def test_dequantize_undoes_quantize_within_rounding():
    x = randn(32, 48, grad=False)
    scale = cast.scale(cast.amax(x, 1), torch.float8_e4m3fn, False)
    back = cast.dequantize(cast.quantize(x, scale, torch.float8_e4m3fn, 1, False, [1, 1]), scale, bf16, 1)
    assert back.dtype == bf16 and torch.allclose(back, x, rtol=0.07, atol=1e-3)
