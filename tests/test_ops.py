"""The operators of the intermediate representation: schema, fake and definition agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from f8fx import ops
from tests.helpers import IR, bf16, randn

fp8 = torch.float8_e4m3fn
SIZES = st.sampled_from([0, 1, 2, 5, 16, 17, 33])


def samples():
    x = randn(5, 7, grad=False)
    row, column, one = torch.ones(5), torch.ones(7), torch.ones(())
    data = torch.zeros(5, 7, dtype=fp8)
    ends = torch.tensor([3, 3, 5], dtype=torch.int32)
    return [
        (ops.amax, (x, None), {}),
        (ops.amax, (x, 0), {}),
        (ops.amax, (x.t(), 1), {}),
        (ops.amax_both, (x, [x * 2, x.clone()], [x]), {}),
        (ops.scale, (row,), {"dtype": fp8, "power_of_2": True}),
        (ops.quantize, (x, one), {"dtype": fp8}),
        (ops.quantize, (x, row), {"dtype": fp8, "dim": 1, "align": [16, 16]}),
        (ops.quantize, (x, column), {"dtype": fp8, "dim": 0, "transpose": True, "align": [1, 16]}),
        (ops.quantize_both, (x, row, column), {"dtype": fp8, "dim": 1, "dim_t": 0, "align_t": [1, 16]}),
        (ops.quantize_rowwise, ([x, x.clone()], [1, 1]), {"dtype": fp8, "power_of_2": True}),
        (ops.dequantize, (data, one), {"dtype": bf16}),
        (ops.dequantize_both, (data, row, data.clone(), column), {"dtype": bf16, "dim": 1, "dim_other": 0}),
        (ops.materialize, (x.t(),), {}),
        (ops.rounded, (x.t(),), {}),
        (ops.relayout, (data,), {"transpose": True, "align": [16, 16]}),
        (ops.amax_groups, (x, ends), {}),
        (ops.padded_ends, (ends,), {}),
        (ops.quantize_groups, (x, torch.ones(3, 7), ends, ops.padded_ends(ends)), {"dtype": fp8}),
    ]


@pytest.mark.parametrize(("op", "args", "kwargs"), samples())
def test_opcheck(op, args, kwargs):
    # the schema check multiplies its inputs, which torch cannot do to a float8 tensor
    takes_float8 = op in (*ops.MARKERS, ops.relayout)
    schema = () if takes_float8 else ("test_schema",)
    torch.library.opcheck(op, args, kwargs, test_utils=(*schema, "test_faketensor"))


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=SIZES,
    columns=SIZES,
    transposed_input=st.booleans(),
    transpose=st.booleans(),
    align=st.tuples(st.sampled_from([1, 16]), st.sampled_from([1, 16])),
)
def test_fake_and_real_agree_on_shape_and_strides(rows, columns, transposed_input, transpose, align):
    x = randn(columns, rows, grad=False).t() if transposed_input else randn(rows, columns, grad=False)
    call = {"dtype": fp8, "transpose": transpose, "align": list(align)}
    real = ops.quantize(x, torch.ones(()), **call)
    fake = ops.quantize(x.to("meta"), torch.ones((), device="meta"), **call)
    assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=4), behind=st.integers(0, 20), columns=SIZES)
def test_groups_are_the_matrices_that_their_rows_are(counts, behind, columns):
    """Each cast as a matrix of its own, padded to multiples of 16; zeros behind the last."""
    x = randn(sum(counts) + behind, columns, grad=False)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    amaxes, padded = ops.amax_groups(x, ends), ops.padded_ends(ends)
    scale = ops.scale(amaxes, dtype=fp8)
    copy = ops.quantize_groups(x, scale, ends, padded, dtype=fp8)
    fake = ops.quantize_groups(*(t.to("meta") for t in (x, scale, ends, padded)), dtype=fp8)
    assert (copy.shape, copy.stride(), copy.dtype) == (fake.shape, fake.stride(), fake.dtype)
    assert copy.shape[1] % 16 == 0
    parts = x[: sum(counts)].split(counts)
    for part, amax, own in zip(parts, amaxes, scale, strict=True):
        assert torch.equal(amax, ops.amax(part, 0)) and torch.equal(own, ops.scale(amax, dtype=fp8))
    want = [
        ops.quantize(part, own, dtype=fp8, dim=0, transpose=True, align=[1, 16]).view(torch.uint8)
        for part, own in zip(parts, scale, strict=True)
    ]  # of one without rows, too, there are 16 zeros
    assert padded.tolist() == torch.tensor([matrix.shape[1] for matrix in want]).cumsum(0).tolist()
    behind_last = torch.zeros(columns, copy.shape[1] - int(padded[-1]), dtype=torch.uint8)
    assert torch.equal(copy.view(torch.uint8), torch.cat([*want, behind_last], 1))


def test_only_matrices_are_taken():
    with pytest.raises(RuntimeError, match="takes 2-D tensors"):
        ops.amax(torch.ones(2, 3, 4, device="meta"), None)
    with pytest.raises(RuntimeError, match="takes 2-D tensors"):
        ops.quantize(torch.ones(2, 3, 4, device="meta"), torch.ones((), device="meta"), dtype=fp8)


def test_quantize_both_is_quantize_twice():
    x = randn(24, 40, grad=False)
    row, column = torch.rand(24) + 0.5, torch.rand(40) + 0.5
    plain, transposed = ops.quantize_both(x, row, column, dtype=fp8, dim=1, dim_t=0, align_t=[1, 16])
    u8 = torch.uint8
    assert torch.equal(plain.view(u8), ops.quantize(x, row, dtype=fp8, dim=1).view(u8))
    other = ops.quantize(x, column, dtype=fp8, dim=0, transpose=True, align=[1, 16])
    assert torch.equal(transposed.view(u8), other.view(u8))


def test_no_operator_waits_or_mutates():
    for op in IR:
        assert not op._schema.is_mutable


def test_relayout_keeps_every_byte():
    """All 256 of them, NaN with either sign included."""
    for dtype in (fp8, torch.float8_e5m2):
        data = torch.arange(256, dtype=torch.uint8).view(8, 32)
        made = ops.relayout(data.view(dtype), transpose=True, align=[1, 16])
        assert made.dtype == dtype and made.stride() == (16, 1)
        bits = made.view(torch.uint8)
        assert torch.equal(bits[:, :8], data.t()) and not bits[:, 8:].any()
