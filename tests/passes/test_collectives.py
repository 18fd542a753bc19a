"""*collectives*: gathers that carry float8 from then on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy

from f8fx import ops
from f8fx.passes import Collectives, check, describe
from tests.helpers import bf16
from tests.passes.gathers import (
    GATHER,
    assert_moves,
    assert_stays,
    aten,
    by_hand,
    c10d,
    four_ranks,  # noqa: F401
    gather,
    gathered_into,
    graph_of,
    layer,
    passed,
    rewritten,
    side_by_side,
)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [("tensorwise", "moved"), ("rowwise", "uneven over two dimensions of a mesh, with rowwise scales")],
)
def test_shards_that_are_gathered_themselves_and_uneven(recipe, reason):
    """On a rank of the last shards the same gather is padded in between, and that one decides alike."""

    def f(x, w):
        return x @ gather(gather(w))[:45].t()

    def padded(x, w):
        return x @ gather(torch.nn.functional.pad(gather(w)[:11], (0, 0, 0, 1)))[:45].t()

    for function in (f, padded):
        _, report = rewritten(function, (16, 64), (3, 64), recipe=recipe)
        assert report.gathers[-1].reason == reason, report.gathers


def test_uneven_shards_of_a_sum_over_ranks():
    """What a reduce-scatter gave, and sequence parallelism gathers again, is no gather: on the last ranks it is only padded."""

    def f(x, w):
        return gather(reduce_scattered(x))[:45] @ w.t()

    def padded(x, w):
        return gather(torch.nn.functional.pad(reduce_scattered(x)[:9], (0, 0, 0, 3)))[:45] @ w.t()

    def reduce_scattered(x):
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", 4, "0"))

    for recipe in ("tensorwise", "rowwise"):
        for function in (f, padded):
            assert_moves(function, (48, 64), (32, 64), recipe=recipe)


class TestMoves(TestCase):
    """One test for each thing that may stand between a gather and a cast."""

    maxDiff = None

    def test_weight_sharded_by_rows(self):
        text, _ = rewritten(lambda x, w: x @ gather(w).t(), (16, 64), (24, 64))
        self.assertExpectedInline(
            text,
            """\
x_1: bf16[16,64]
w_1: bf16[24,64]
amax: f32[] = f8fx.amax(w_1, None)
view: i32[] = view(amax, i32)
bitwise_and: i32[] = bitwise_and(view, 2147483647)
all_reduce: i32[] = _c10d_functional.all_reduce(bitwise_and, max, 0)
wait_tensor: i32[] = _c10d_functional.wait_tensor(all_reduce)
view_1: f32[] = view(wait_tensor, f32)
scale: f32[] = f8fx.scale(view_1, dtype=e4m3, power_of_2=False)
quantize: e4m3[24,64] = f8fx.quantize(w_1, scale, dtype=e4m3, transpose=False, align=[1, 1])
all_gather_into_tensor: e4m3[96,64] = _c10d_functional.all_gather_into_tensor(quantize, 4, 0)
wait_tensor_1: e4m3[96,64] = _c10d_functional.wait_tensor(all_gather_into_tensor)
amax_1: f32[] = f8fx.amax(x_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[16,64] = f8fx.quantize(x_1, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale_1)
reciprocal_1: f32[] = reciprocal(scale)
permute: e4m3[64,96] = permute(wait_tensor_1, [1, 0])
scaled_mm: bf16[16,96] = _scaled_mm(quantize_1, permute, reciprocal, reciprocal_1, None, None, bf16, True)
return scaled_mm""",
        )

    def test_weight_gathered_into_a_tensor(self):
        """``dist.all_gather_into_tensor(out, shard)``: the tensor made for it is gone."""
        text, _ = rewritten(lambda x, w: x @ gathered_into(w, bf16).t(), (16, 64), (24, 64))
        self.assertEqual(text, rewritten(lambda x, w: x @ gather(w).t(), (16, 64), (24, 64))[0])

        def sliced(gathered):
            """Side by side along the second dimension, as newer versions cut it."""
            return torch.cat([gathered[16 * i : 16 * (i + 1)] for i in range(4)], 1)

        def f(x, w):
            return x @ sliced(gathered_into(w, bf16)).t()

        text, report = rewritten(f, (16, 64), (16, 16))
        assert [g.moved for g in report.gathers] == [True]
        self.assertEqual(text, rewritten(lambda x, w: x @ sliced(gather(w)).t(), (16, 64), (16, 16))[0])

    def test_forward_and_backward_read_one_copy(self):
        """The transposed copy for the backward is made from the gathered float8 data."""
        text, _ = rewritten(
            lambda x, w, tangents: layer(x, gather(w), tangents), (16, 64), (24, 64), (16, 96)
        )
        self.assertExpectedInline(
            text,
            """\
x_1: bf16[16,64]
w_1: bf16[24,64]
tangents_1: bf16[16,96]
amax: f32[] = f8fx.amax(w_1, None)
view: i32[] = view(amax, i32)
bitwise_and: i32[] = bitwise_and(view, 2147483647)
all_reduce: i32[] = _c10d_functional.all_reduce(bitwise_and, max, 0)
wait_tensor: i32[] = _c10d_functional.wait_tensor(all_reduce)
view_1: f32[] = view(wait_tensor, f32)
scale: f32[] = f8fx.scale(view_1, dtype=e4m3, power_of_2=False)
quantize: e4m3[24,64] = f8fx.quantize(w_1, scale, dtype=e4m3, transpose=False, align=[1, 1])
all_gather_into_tensor: e4m3[96,64] = _c10d_functional.all_gather_into_tensor(quantize, 4, 0)
wait_tensor_1: e4m3[96,64] = _c10d_functional.wait_tensor(all_gather_into_tensor)
amax_1: f32[] = f8fx.amax(x_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[16,64] = f8fx.quantize(x_1, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale_1)
reciprocal_1: f32[] = reciprocal(scale)
permute: e4m3[64,96] = permute(wait_tensor_1, [1, 0])
scaled_mm: bf16[16,96] = _scaled_mm(quantize_1, permute, reciprocal, reciprocal_1, None, None, bf16, True)
amax_2: f32[] = f8fx.amax(tangents_1, None)
scale_2: f32[] = f8fx.scale(amax_2, dtype=e5m2, power_of_2=False)
quantize_both: (e5m2[16,96], e5m2[96,16]) = f8fx.quantize_both(tangents_1, scale_2, scale_2, dtype=e5m2, align=[1, 1], align_t=[1, 1])
getitem: e5m2[16,96] = getitem(quantize_both, 0)
getitem_1: e5m2[96,16] = getitem(quantize_both, 1)
reciprocal_2: f32[] = reciprocal(scale_2)
full: f32[] = full([], 1.0, dtype=f32, device=cpu, pin_memory=False)
quantize_2: e4m3[64,96] = f8fx.quantize(wait_tensor_1, full, dtype=e4m3, transpose=True, align=[1, 1])
permute_1: e4m3[96,64] = permute(quantize_2, [1, 0])
scaled_mm_1: bf16[16,64] = _scaled_mm(getitem, permute_1, reciprocal_2, reciprocal_1, None, None, bf16, False)
quantize_3: e4m3[64,16] = f8fx.quantize(x_1, scale_1, dtype=e4m3, transpose=True, align=[1, 1])
permute_2: e4m3[16,64] = permute(quantize_3, [1, 0])
scaled_mm_2: bf16[96,64] = _scaled_mm(getitem_1, permute_2, reciprocal_2, reciprocal, None, None, bf16, False)
return [scaled_mm, scaled_mm_1, scaled_mm_2]""",
        )

    def test_weight_sharded_by_columns(self):
        text, _ = rewritten(lambda x, w: x @ side_by_side(w, 1).t(), (16, 64), (96, 16))
        self.assertExpectedInline(
            text,
            """\
x_1: bf16[16,64]
w_1: bf16[96,16]
amax: f32[] = f8fx.amax(w_1, None)
view: i32[] = view(amax, i32)
bitwise_and: i32[] = bitwise_and(view, 2147483647)
all_reduce: i32[] = _c10d_functional.all_reduce(bitwise_and, max, 0)
wait_tensor: i32[] = _c10d_functional.wait_tensor(all_reduce)
view_1: f32[] = view(wait_tensor, f32)
scale: f32[] = f8fx.scale(view_1, dtype=e4m3, power_of_2=False)
quantize: e4m3[96,16] = f8fx.quantize(w_1, scale, dtype=e4m3, transpose=False, align=[1, 1])
all_gather_into_tensor: e4m3[384,16] = _c10d_functional.all_gather_into_tensor(quantize, 4, 0)
wait_tensor_1: e4m3[384,16] = _c10d_functional.wait_tensor(all_gather_into_tensor)
split: (e4m3[96,16], e4m3[96,16], e4m3[96,16], e4m3[96,16]) = split(wait_tensor_1, 96)
getitem: e4m3[96,16] = getitem(split, 0)
getitem_1: e4m3[96,16] = getitem(split, 1)
getitem_2: e4m3[96,16] = getitem(split, 2)
getitem_3: e4m3[96,16] = getitem(split, 3)
cat: e4m3[96,64] = cat([getitem, getitem_1, getitem_2, getitem_3], 1)
amax_1: f32[] = f8fx.amax(x_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[16,64] = f8fx.quantize(x_1, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale_1)
reciprocal_1: f32[] = reciprocal(scale)
permute: e4m3[64,96] = permute(cat, [1, 0])
scaled_mm: bf16[16,96] = _scaled_mm(quantize_1, permute, reciprocal, reciprocal_1, None, None, bf16, True)
return scaled_mm""",
        )

    def test_slices_instead_of_split(self):
        def f(x, w):
            whole = gather(w)
            return x @ torch.cat([whole[96 * i : 96 * i + 96] for i in range(4)], 1).t()

        text, _ = rewritten(f, (16, 64), (96, 16))
        self.assertExpectedInline(
            text,
            """\
x_1: bf16[16,64]
w_1: bf16[96,16]
amax: f32[] = f8fx.amax(w_1, None)
view: i32[] = view(amax, i32)
bitwise_and: i32[] = bitwise_and(view, 2147483647)
all_reduce: i32[] = _c10d_functional.all_reduce(bitwise_and, max, 0)
wait_tensor: i32[] = _c10d_functional.wait_tensor(all_reduce)
view_1: f32[] = view(wait_tensor, f32)
scale: f32[] = f8fx.scale(view_1, dtype=e4m3, power_of_2=False)
quantize: e4m3[96,16] = f8fx.quantize(w_1, scale, dtype=e4m3, transpose=False, align=[1, 1])
all_gather_into_tensor: e4m3[384,16] = _c10d_functional.all_gather_into_tensor(quantize, 4, 0)
wait_tensor_1: e4m3[384,16] = _c10d_functional.wait_tensor(all_gather_into_tensor)
slice: e4m3[96,16] = slice(wait_tensor_1, 0, 0, 96)
slice_1: e4m3[96,16] = slice(wait_tensor_1, 0, 96, 192)
slice_2: e4m3[96,16] = slice(wait_tensor_1, 0, 192, 288)
slice_3: e4m3[96,16] = slice(wait_tensor_1, 0, 288, 384)
cat: e4m3[96,64] = cat([slice, slice_1, slice_2, slice_3], 1)
amax_1: f32[] = f8fx.amax(x_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[16,64] = f8fx.quantize(x_1, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale_1)
reciprocal_1: f32[] = reciprocal(scale)
permute: e4m3[64,96] = permute(cat, [1, 0])
scaled_mm: bf16[16,96] = _scaled_mm(quantize_1, permute, reciprocal, reciprocal_1, None, None, bf16, True)
return scaled_mm""",
        )

    def test_uneven_shards(self):
        """90 rows over 4 ranks are 23, 23, 23 and 21 padded to 23; the gemm wants 96."""
        text, _ = rewritten(lambda x, w: x @ gather(w)[:90].t(), (16, 64), (23, 64))
        self.assertExpectedInline(
            text,
            """\
x_1: bf16[16,64]
w_1: bf16[23,64]
amax: f32[] = f8fx.amax(w_1, None)
view: i32[] = view(amax, i32)
bitwise_and: i32[] = bitwise_and(view, 2147483647)
all_reduce: i32[] = _c10d_functional.all_reduce(bitwise_and, max, 0)
wait_tensor: i32[] = _c10d_functional.wait_tensor(all_reduce)
view_1: f32[] = view(wait_tensor, f32)
scale: f32[] = f8fx.scale(view_1, dtype=e4m3, power_of_2=False)
quantize: e4m3[23,64] = f8fx.quantize(w_1, scale, dtype=e4m3, transpose=False, align=[1, 1])
all_gather_into_tensor: e4m3[92,64] = _c10d_functional.all_gather_into_tensor(quantize, 4, 0)
wait_tensor_1: e4m3[92,64] = _c10d_functional.wait_tensor(all_gather_into_tensor)
slice: e4m3[90,64] = slice(wait_tensor_1, 0, 0, 90)
amax_1: f32[] = f8fx.amax(x_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[16,64] = f8fx.quantize(x_1, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale_1)
full: f32[] = full([], 1.0, dtype=f32, device=cpu, pin_memory=False)
quantize_2: e4m3[96,64] = f8fx.quantize(slice, full, dtype=e4m3, transpose=False, align=[16, 1])
reciprocal_1: f32[] = reciprocal(scale)
permute: e4m3[64,96] = permute(quantize_2, [1, 0])
scaled_mm: bf16[16,96] = _scaled_mm(quantize_1, permute, reciprocal, reciprocal_1, None, None, bf16, True)
slice_1: bf16[16,90] = slice(scaled_mm, 1, 0, 90)
clone: bf16[16,90] = clone(slice_1, memory_format=torch.contiguous_format)
return clone""",
        )

    def test_cast_after_the_gather(self):
        text, _ = rewritten(
            lambda x, w: x.to(bf16) @ gather(w).to(bf16).t(), (16, 64), (24, 64), dtype=torch.float32
        )
        self.assertExpectedInline(
            text,
            """\
x_1: f32[16,64]
w_1: f32[24,64]
convert_element_type: bf16[24,64] = prims.convert_element_type(w_1, bf16)
amax: f32[] = f8fx.amax(convert_element_type, None)
view: i32[] = view(amax, i32)
bitwise_and: i32[] = bitwise_and(view, 2147483647)
all_reduce: i32[] = _c10d_functional.all_reduce(bitwise_and, max, 0)
wait_tensor: i32[] = _c10d_functional.wait_tensor(all_reduce)
view_1: f32[] = view(wait_tensor, f32)
scale: f32[] = f8fx.scale(view_1, dtype=e4m3, power_of_2=False)
quantize: e4m3[24,64] = f8fx.quantize(convert_element_type, scale, dtype=e4m3, transpose=False, align=[1, 1])
all_gather_into_tensor: e4m3[96,64] = _c10d_functional.all_gather_into_tensor(quantize, 4, 0)
wait_tensor_1: e4m3[96,64] = _c10d_functional.wait_tensor(all_gather_into_tensor)
amax_1: f32[] = f8fx.amax(x_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[16,64] = f8fx.quantize(x_1, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale_1)
reciprocal_1: f32[] = reciprocal(scale)
permute: e4m3[64,96] = permute(wait_tensor_1, [1, 0])
scaled_mm: bf16[16,96] = _scaled_mm(quantize_1, permute, reciprocal, reciprocal_1, None, None, bf16, True)
return scaled_mm""",
        )

    def test_cast_before_the_gather(self):
        text, _ = rewritten(
            lambda x, w: x.to(bf16) @ gather(w.to(bf16)).t(), (16, 64), (24, 64), dtype=torch.float32
        )
        self.assertExpectedInline(
            text,
            """\
x_1: f32[16,64]
w_1: f32[24,64]
_to_copy: bf16[24,64] = _to_copy(w_1, dtype=bf16)
rounded: bf16[24,64] = f8fx.rounded(_to_copy)
amax: f32[] = f8fx.amax(rounded, None)
view: i32[] = view(amax, i32)
bitwise_and: i32[] = bitwise_and(view, 2147483647)
all_reduce: i32[] = _c10d_functional.all_reduce(bitwise_and, max, 0)
wait_tensor: i32[] = _c10d_functional.wait_tensor(all_reduce)
view_1: f32[] = view(wait_tensor, f32)
scale: f32[] = f8fx.scale(view_1, dtype=e4m3, power_of_2=False)
quantize: e4m3[24,64] = f8fx.quantize(rounded, scale, dtype=e4m3, transpose=False, align=[1, 1])
all_gather_into_tensor: e4m3[96,64] = _c10d_functional.all_gather_into_tensor(quantize, 4, 0)
wait_tensor_1: e4m3[96,64] = _c10d_functional.wait_tensor(all_gather_into_tensor)
amax_1: f32[] = f8fx.amax(x_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[16,64] = f8fx.quantize(x_1, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale_1)
reciprocal_1: f32[] = reciprocal(scale)
permute: e4m3[64,96] = permute(wait_tensor_1, [1, 0])
scaled_mm: bf16[16,96] = _scaled_mm(quantize_1, permute, reciprocal, reciprocal_1, None, None, bf16, True)
return scaled_mm""",
        )

    def test_sequence_parallel_activation(self):
        """Gathered along dimension 1 of three, then seen as a matrix."""

        def f(x, w):
            return (side_by_side(x, 1).view(64, 64) @ w.t()).view(2, 32, 32)

        text, _ = rewritten(f, (2, 8, 64), (32, 64))
        self.assertExpectedInline(
            text,
            """\
x_1: bf16[2,8,64]
w_1: bf16[32,64]
reshape: bf16[16,64] = reshape(x_1, [-1, 64])
amax: f32[] = f8fx.amax(reshape, None)
view: i32[] = view(amax, i32)
bitwise_and: i32[] = bitwise_and(view, 2147483647)
all_reduce: i32[] = _c10d_functional.all_reduce(bitwise_and, max, 0)
wait_tensor: i32[] = _c10d_functional.wait_tensor(all_reduce)
view_1: f32[] = view(wait_tensor, f32)
scale: f32[] = f8fx.scale(view_1, dtype=e4m3, power_of_2=False)
quantize: e4m3[16,64] = f8fx.quantize(reshape, scale, dtype=e4m3, transpose=False, align=[1, 1])
reshape_1: e4m3[2,8,64] = reshape(quantize, [2, 8, 64])
all_gather_into_tensor: e4m3[8,8,64] = _c10d_functional.all_gather_into_tensor(reshape_1, 4, 0)
wait_tensor_1: e4m3[8,8,64] = _c10d_functional.wait_tensor(all_gather_into_tensor)
split: (e4m3[2,8,64], e4m3[2,8,64], e4m3[2,8,64], e4m3[2,8,64]) = split(wait_tensor_1, 2)
getitem: e4m3[2,8,64] = getitem(split, 0)
getitem_1: e4m3[2,8,64] = getitem(split, 1)
getitem_2: e4m3[2,8,64] = getitem(split, 2)
getitem_3: e4m3[2,8,64] = getitem(split, 3)
cat: e4m3[2,32,64] = cat([getitem, getitem_1, getitem_2, getitem_3], 1)
view_2: e4m3[64,64] = view(cat, [64, 64])
reciprocal: f32[] = reciprocal(scale)
amax_1: f32[] = f8fx.amax(w_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[32,64] = f8fx.quantize(w_1, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal_1: f32[] = reciprocal(scale_1)
permute: e4m3[64,32] = permute(quantize_1, [1, 0])
scaled_mm: bf16[64,32] = _scaled_mm(view_2, permute, reciprocal, reciprocal_1, None, None, bf16, True)
view_3: bf16[2,32,32] = view(scaled_mm, [2, 32, 32])
return view_3""",
        )

    def test_gradient_of_sequence_parallel_output(self):
        """Row-major and transposed copies of a gathered gradient."""

        def f(x, w, tangents):
            y = x @ w.t()
            whole = side_by_side(tangents, 1).view(64, 32)
            return y, whole @ w, whole.t() @ x

        text, _ = rewritten(f, (64, 64), (32, 64), (2, 8, 32))
        self.assertExpectedInline(
            text,
            """\
x_1: bf16[64,64]
w_1: bf16[32,64]
tangents_1: bf16[2,8,32]
amax: f32[] = f8fx.amax(x_1, None)
scale: f32[] = f8fx.scale(amax, dtype=e4m3, power_of_2=False)
quantize: e4m3[64,64] = f8fx.quantize(x_1, scale, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale)
amax_1: f32[] = f8fx.amax(w_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[32,64] = f8fx.quantize(w_1, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal_1: f32[] = reciprocal(scale_1)
permute: e4m3[64,32] = permute(quantize_1, [1, 0])
scaled_mm: bf16[64,32] = _scaled_mm(quantize, permute, reciprocal, reciprocal_1, None, None, bf16, True)
reshape: bf16[16,32] = reshape(tangents_1, [-1, 32])
amax_2: f32[] = f8fx.amax(reshape, None)
view: i32[] = view(amax_2, i32)
bitwise_and: i32[] = bitwise_and(view, 2147483647)
all_reduce: i32[] = _c10d_functional.all_reduce(bitwise_and, max, 0)
wait_tensor: i32[] = _c10d_functional.wait_tensor(all_reduce)
view_1: f32[] = view(wait_tensor, f32)
scale_2: f32[] = f8fx.scale(view_1, dtype=e5m2, power_of_2=False)
quantize_2: e5m2[16,32] = f8fx.quantize(reshape, scale_2, dtype=e5m2, transpose=False, align=[1, 1])
reshape_1: e5m2[2,8,32] = reshape(quantize_2, [2, 8, 32])
all_gather_into_tensor: e5m2[8,8,32] = _c10d_functional.all_gather_into_tensor(reshape_1, 4, 0)
wait_tensor_1: e5m2[8,8,32] = _c10d_functional.wait_tensor(all_gather_into_tensor)
split: (e5m2[2,8,32], e5m2[2,8,32], e5m2[2,8,32], e5m2[2,8,32]) = split(wait_tensor_1, 2)
getitem: e5m2[2,8,32] = getitem(split, 0)
getitem_1: e5m2[2,8,32] = getitem(split, 1)
getitem_2: e5m2[2,8,32] = getitem(split, 2)
getitem_3: e5m2[2,8,32] = getitem(split, 3)
cat: e5m2[2,32,32] = cat([getitem, getitem_1, getitem_2, getitem_3], 1)
view_2: e5m2[64,32] = view(cat, [64, 32])
full: f32[] = full([], 1.0, dtype=f32, device=cpu, pin_memory=False)
quantize_3: e5m2[32,64] = f8fx.quantize(view_2, full, dtype=e5m2, transpose=True, align=[1, 1])
reciprocal_2: f32[] = reciprocal(scale_2)
quantize_4: e4m3[64,32] = f8fx.quantize(w_1, scale_1, dtype=e4m3, transpose=True, align=[1, 1])
permute_1: e4m3[32,64] = permute(quantize_4, [1, 0])
scaled_mm_1: bf16[64,64] = _scaled_mm(view_2, permute_1, reciprocal_2, reciprocal_1, None, None, bf16, False)
quantize_5: e4m3[64,64] = f8fx.quantize(x_1, scale, dtype=e4m3, transpose=True, align=[1, 1])
permute_2: e4m3[64,64] = permute(quantize_5, [1, 0])
scaled_mm_2: bf16[32,64] = _scaled_mm(quantize_3, permute_2, reciprocal_2, reciprocal, None, None, bf16, False)
return [scaled_mm, scaled_mm_1, scaled_mm_2]""",
        )

    def test_rowwise_scales_that_are_local_travel_with_the_data(self):
        text, _ = rewritten(lambda x, w: x @ gather(w).t(), (16, 64), (24, 64), recipe="rowwise")
        self.assertExpectedInline(
            text,
            """\
x_1: bf16[16,64]
w_1: bf16[24,64]
amax: f32[24] = f8fx.amax(w_1, 1)
scale: f32[24] = f8fx.scale(amax, dtype=e4m3, power_of_2=True)
quantize: e4m3[24,64] = f8fx.quantize(w_1, scale, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reshape: f32[24,1] = reshape(scale, [24, 1])
all_gather_into_tensor: f32[96,1] = _c10d_functional.all_gather_into_tensor(reshape, 4, 0)
wait_tensor: f32[96,1] = _c10d_functional.wait_tensor(all_gather_into_tensor)
reshape_1: f32[96] = reshape(wait_tensor, [-1])
all_gather_into_tensor_1: e4m3[96,64] = _c10d_functional.all_gather_into_tensor(quantize, 4, 0)
wait_tensor_1: e4m3[96,64] = _c10d_functional.wait_tensor(all_gather_into_tensor_1)
amax_1: f32[16] = f8fx.amax(x_1, 1)
scale_1: f32[16] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=True)
quantize_1: e4m3[16,64] = f8fx.quantize(x_1, scale_1, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal: f32[16] = reciprocal(scale_1)
reciprocal_1: f32[96] = reciprocal(reshape_1)
permute: e4m3[64,96] = permute(wait_tensor_1, [1, 0])
as_strided: f32[16,1] = as_strided(reciprocal, [16, 1], [1, 1])
as_strided_1: f32[1,96] = as_strided(reciprocal_1, [1, 96], [96, 1])
scaled_mm: bf16[16,96] = _scaled_mm(quantize_1, permute, as_strided, as_strided_1, None, None, bf16, True)
return scaled_mm""",
        )

    def test_rowwise_scales_of_uneven_shards(self):
        text, _ = rewritten(lambda x, w: x @ gather(w)[:90].t(), (16, 64), (23, 64), recipe="rowwise")
        self.assertExpectedInline(
            text,
            """\
x_1: bf16[16,64]
w_1: bf16[23,64]
amax: f32[23] = f8fx.amax(w_1, 1)
scale: f32[23] = f8fx.scale(amax, dtype=e4m3, power_of_2=True)
quantize: e4m3[23,64] = f8fx.quantize(w_1, scale, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reshape: f32[23,1] = reshape(scale, [23, 1])
all_gather_into_tensor: f32[92,1] = _c10d_functional.all_gather_into_tensor(reshape, 4, 0)
wait_tensor: f32[92,1] = _c10d_functional.wait_tensor(all_gather_into_tensor)
slice: f32[90,1] = slice(wait_tensor, 0, 0, 90)
reshape_1: f32[90] = reshape(slice, [-1])
all_gather_into_tensor_1: e4m3[92,64] = _c10d_functional.all_gather_into_tensor(quantize, 4, 0)
wait_tensor_1: e4m3[92,64] = _c10d_functional.wait_tensor(all_gather_into_tensor_1)
slice_1: e4m3[90,64] = slice(wait_tensor_1, 0, 0, 90)
amax_1: f32[16] = f8fx.amax(x_1, 1)
scale_1: f32[16] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=True)
quantize_1: e4m3[16,64] = f8fx.quantize(x_1, scale_1, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal: f32[16] = reciprocal(scale_1)
full: f32[] = full([], 1.0, dtype=f32, device=cpu, pin_memory=False)
quantize_2: e4m3[96,64] = f8fx.quantize(slice_1, full, dtype=e4m3, transpose=False, align=[16, 1])
reciprocal_1: f32[90] = reciprocal(reshape_1)
permute: e4m3[64,96] = permute(quantize_2, [1, 0])
as_strided: f32[16,1] = as_strided(reciprocal, [16, 1], [1, 1])
constant_pad_nd: f32[96] = constant_pad_nd(reciprocal_1, [0, 6], 1.0)
as_strided_1: f32[1,96] = as_strided(constant_pad_nd, [1, 96], [96, 1])
scaled_mm: bf16[16,96] = _scaled_mm(quantize_1, permute, as_strided, as_strided_1, None, None, bf16, True)
slice_2: bf16[16,90] = slice(scaled_mm, 1, 0, 90)
clone: bf16[16,90] = clone(slice_2, memory_format=torch.contiguous_format)
return clone""",
        )

    def test_rowwise_scales_of_a_sequence_parallel_activation(self):
        def f(x, w):
            return (side_by_side(x, 1).view(64, 64) @ w.t()).view(2, 32, 32)

        text, _ = rewritten(f, (2, 8, 64), (32, 64), recipe="rowwise")
        self.assertExpectedInline(
            text,
            """\
x_1: bf16[2,8,64]
w_1: bf16[32,64]
reshape: bf16[16,64] = reshape(x_1, [-1, 64])
amax: f32[16] = f8fx.amax(reshape, 1)
scale: f32[16] = f8fx.scale(amax, dtype=e4m3, power_of_2=True)
quantize: e4m3[16,64] = f8fx.quantize(reshape, scale, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reshape_1: f32[2,8,1] = reshape(scale, [2, 8, 1])
all_gather_into_tensor: f32[8,8,1] = _c10d_functional.all_gather_into_tensor(reshape_1, 4, 0)
wait_tensor: f32[8,8,1] = _c10d_functional.wait_tensor(all_gather_into_tensor)
split: (f32[2,8,1], f32[2,8,1], f32[2,8,1], f32[2,8,1]) = split(wait_tensor, 2)
getitem: f32[2,8,1] = getitem(split, 0)
getitem_1: f32[2,8,1] = getitem(split, 1)
getitem_2: f32[2,8,1] = getitem(split, 2)
getitem_3: f32[2,8,1] = getitem(split, 3)
cat: f32[2,32,1] = cat([getitem, getitem_1, getitem_2, getitem_3], 1)
reshape_2: f32[64,1] = reshape(cat, [64, 1])
reshape_3: f32[64] = reshape(reshape_2, [-1])
reshape_4: e4m3[2,8,64] = reshape(quantize, [2, 8, 64])
all_gather_into_tensor_1: e4m3[8,8,64] = _c10d_functional.all_gather_into_tensor(reshape_4, 4, 0)
wait_tensor_1: e4m3[8,8,64] = _c10d_functional.wait_tensor(all_gather_into_tensor_1)
split_1: (e4m3[2,8,64], e4m3[2,8,64], e4m3[2,8,64], e4m3[2,8,64]) = split(wait_tensor_1, 2)
getitem_4: e4m3[2,8,64] = getitem(split_1, 0)
getitem_5: e4m3[2,8,64] = getitem(split_1, 1)
getitem_6: e4m3[2,8,64] = getitem(split_1, 2)
getitem_7: e4m3[2,8,64] = getitem(split_1, 3)
cat_1: e4m3[2,32,64] = cat([getitem_4, getitem_5, getitem_6, getitem_7], 1)
unsafe_view: e4m3[64,64] = _unsafe_view(cat_1, [64, 64])
reciprocal: f32[64] = reciprocal(reshape_3)
amax_1: f32[32] = f8fx.amax(w_1, 1)
scale_1: f32[32] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=True)
quantize_1: e4m3[32,64] = f8fx.quantize(w_1, scale_1, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal_1: f32[32] = reciprocal(scale_1)
permute: e4m3[64,32] = permute(quantize_1, [1, 0])
as_strided: f32[64,1] = as_strided(reciprocal, [64, 1], [1, 1])
as_strided_1: f32[1,32] = as_strided(reciprocal_1, [1, 32], [32, 1])
scaled_mm: bf16[64,32] = _scaled_mm(unsafe_view, permute, as_strided, as_strided_1, None, None, bf16, True)
view: bf16[2,32,32] = view(scaled_mm, [2, 32, 32])
return view""",
        )

    def test_rowwise_scales_across_shards_are_reduced(self):
        """Rows are cut into pieces: each rank has a part of every row."""
        text, _ = rewritten(lambda x, w: x @ side_by_side(w, 1).t(), (16, 64), (96, 16), recipe="rowwise")
        self.assertExpectedInline(
            text,
            """\
x_1: bf16[16,64]
w_1: bf16[96,16]
amax: f32[96] = f8fx.amax(w_1, 1)
view: i32[96] = view(amax, i32)
bitwise_and: i32[96] = bitwise_and(view, 2147483647)
all_reduce: i32[96] = _c10d_functional.all_reduce(bitwise_and, max, 0)
wait_tensor: i32[96] = _c10d_functional.wait_tensor(all_reduce)
view_1: f32[96] = view(wait_tensor, f32)
scale: f32[96] = f8fx.scale(view_1, dtype=e4m3, power_of_2=True)
quantize: e4m3[96,16] = f8fx.quantize(w_1, scale, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reshape: f32[96,1] = reshape(scale, [96, 1])
reshape_1: f32[96] = reshape(reshape, [-1])
all_gather_into_tensor: e4m3[384,16] = _c10d_functional.all_gather_into_tensor(quantize, 4, 0)
wait_tensor_1: e4m3[384,16] = _c10d_functional.wait_tensor(all_gather_into_tensor)
split: (e4m3[96,16], e4m3[96,16], e4m3[96,16], e4m3[96,16]) = split(wait_tensor_1, 96)
getitem: e4m3[96,16] = getitem(split, 0)
getitem_1: e4m3[96,16] = getitem(split, 1)
getitem_2: e4m3[96,16] = getitem(split, 2)
getitem_3: e4m3[96,16] = getitem(split, 3)
cat: e4m3[96,64] = cat([getitem, getitem_1, getitem_2, getitem_3], 1)
amax_1: f32[16] = f8fx.amax(x_1, 1)
scale_1: f32[16] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=True)
quantize_1: e4m3[16,64] = f8fx.quantize(x_1, scale_1, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reciprocal: f32[16] = reciprocal(scale_1)
reciprocal_1: f32[96] = reciprocal(reshape_1)
permute: e4m3[64,96] = permute(cat, [1, 0])
as_strided: f32[16,1] = as_strided(reciprocal, [16, 1], [1, 1])
as_strided_1: f32[1,96] = as_strided(reciprocal_1, [1, 96], [96, 1])
scaled_mm: bf16[16,96] = _scaled_mm(quantize_1, permute, as_strided, as_strided_1, None, None, bf16, True)
return scaled_mm""",
        )

    def test_a_scaled_dimension_between_others_is_turned_on_the_shard(self):
        """[2, 16, 32] in each shard, a scale for each column of 16: what travels is as it is read."""

        def f(x):
            columns = gather(x).permute(0, 2, 1).clone(memory_format=torch.contiguous_format).view(-1, 16)
            scale = ops.scale(ops.amax(columns, 1), dtype=torch.float8_e4m3fn)
            return ops.quantize(columns, scale, dtype=torch.float8_e4m3fn, dim=1), scale

        graph = by_hand(f, (2, 16, 32))
        (decision,) = Collectives()(graph)
        assert decision.moved
        check(graph, "collectives")
        self.assertExpectedInline(
            describe(graph),
            """\
x_1: bf16[2,16,32]
permute: bf16[2,32,16] = permute(x_1, [0, 2, 1])
clone: bf16[2,32,16] = clone(permute, memory_format=torch.contiguous_format)
reshape: bf16[64,16] = reshape(clone, [-1, 16])
amax: f32[64] = f8fx.amax(reshape, 1)
scale: f32[64] = f8fx.scale(amax, dtype=e4m3)
quantize: e4m3[64,16] = f8fx.quantize(reshape, scale, dtype=e4m3, dim=1, transpose=False, align=[1, 1])
reshape_1: f32[2,1,32] = reshape(scale, [2, 1, 32])
all_gather_into_tensor: f32[8,1,32] = _c10d_functional.all_gather_into_tensor(reshape_1, 4, 0)
wait_tensor: f32[8,1,32] = _c10d_functional.wait_tensor(all_gather_into_tensor)
permute_1: f32[8,32,1] = permute(wait_tensor, [0, 2, 1])
reshape_2: f32[8,32,1] = reshape(permute_1, [8, 32, 1])
reshape_3: f32[256,1] = reshape(reshape_2, [256, 1])
reshape_4: f32[256] = reshape(reshape_3, [-1])
reshape_5: e4m3[2,32,16] = reshape(quantize, [2, 32, 16])
all_gather_into_tensor_1: e4m3[8,32,16] = _c10d_functional.all_gather_into_tensor(reshape_5, 4, 0)
wait_tensor_1: e4m3[8,32,16] = _c10d_functional.wait_tensor(all_gather_into_tensor_1)
permute_2: e4m3[8,16,32] = permute(wait_tensor_1, [0, 2, 1])
permute_3: e4m3[8,32,16] = permute(permute_2, [0, 2, 1])
unsafe_view: e4m3[256,16] = _unsafe_view(permute_3, [-1, 16])
return [unsafe_view, reshape_4]""",
        )

    def test_padded_after_the_gather(self):
        def f(x, w):
            return x @ aten.constant_pad_nd(gather(w), [0, 0, 0, 32], 0.0).t()

        text = assert_moves(f, (16, 64), (24, 64))
        movement = [line for line in text.splitlines() if "128,64" in line or "(wait_tensor_1" in line]
        self.assertExpectedInline(
            "\n".join(movement),
            """\
view_2: u8[96,64] = view(wait_tensor_1, u8)
constant_pad_nd: u8[128,64] = constant_pad_nd(view_2, [0, 0, 0, 32], 0)
view_3: e4m3[128,64] = view(constant_pad_nd, e4m3)""",
        )
        assert_stays(
            ("padded after the gather, with rowwise scales", ""), f, (16, 64), (24, 64), recipe="rowwise"
        )

    def test_as_bytes(self):
        text, _ = rewritten(lambda x, w: x @ side_by_side(w, 1).t(), (16, 64), (96, 16), wire="uint8")
        self.assertExpectedInline(
            text,
            """\
x_1: bf16[16,64]
w_1: bf16[96,16]
amax: f32[] = f8fx.amax(w_1, None)
view: i32[] = view(amax, i32)
bitwise_and: i32[] = bitwise_and(view, 2147483647)
all_reduce: i32[] = _c10d_functional.all_reduce(bitwise_and, max, 0)
wait_tensor: i32[] = _c10d_functional.wait_tensor(all_reduce)
view_1: f32[] = view(wait_tensor, f32)
scale: f32[] = f8fx.scale(view_1, dtype=e4m3, power_of_2=False)
quantize: e4m3[96,16] = f8fx.quantize(w_1, scale, dtype=e4m3, transpose=False, align=[1, 1])
view_2: u8[96,16] = view(quantize, u8)
all_gather_into_tensor: u8[384,16] = _c10d_functional.all_gather_into_tensor(view_2, 4, 0)
wait_tensor_1: u8[384,16] = _c10d_functional.wait_tensor(all_gather_into_tensor)
split: (u8[96,16], u8[96,16], u8[96,16], u8[96,16]) = split(wait_tensor_1, 96)
getitem: u8[96,16] = getitem(split, 0)
getitem_1: u8[96,16] = getitem(split, 1)
getitem_2: u8[96,16] = getitem(split, 2)
getitem_3: u8[96,16] = getitem(split, 3)
cat: u8[96,64] = cat([getitem, getitem_1, getitem_2, getitem_3], 1)
amax_1: f32[] = f8fx.amax(x_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[16,64] = f8fx.quantize(x_1, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale_1)
view_3: e4m3[96,64] = view(cat, e4m3)
reciprocal_1: f32[] = reciprocal(scale)
permute: e4m3[64,96] = permute(view_3, [1, 0])
scaled_mm: bf16[16,96] = _scaled_mm(quantize_1, permute, reciprocal, reciprocal_1, None, None, bf16, True)
return scaled_mm""",
        )

    def test_all_weights_are_reduced_at_once(self):
        def f(x, a, b, c):
            return x @ gather(a).t(), x @ gather(b).t() + x @ gather(c).t()

        text, _ = rewritten(f, (16, 64), (24, 64), (16, 64), (16, 64))
        assert text.count("all_reduce(") == 1
        self.assertExpectedInline(
            text.split("scale:")[0],
            """\
x_1: bf16[16,64]
a_1: bf16[24,64]
b_1: bf16[16,64]
c_1: bf16[16,64]
amax: f32[] = f8fx.amax(a_1, None)
amax_1: f32[] = f8fx.amax(b_1, None)
amax_2: f32[] = f8fx.amax(c_1, None)
reshape: f32[1] = reshape(amax, [1])
reshape_1: f32[1] = reshape(amax_1, [1])
reshape_2: f32[1] = reshape(amax_2, [1])
cat: f32[3] = cat([reshape, reshape_1, reshape_2])
view: i32[3] = view(cat, i32)
bitwise_and: i32[3] = bitwise_and(view, 2147483647)
all_reduce: i32[3] = _c10d_functional.all_reduce(bitwise_and, max, 0)
wait_tensor: i32[3] = _c10d_functional.wait_tensor(all_reduce)
view_1: f32[3] = view(wait_tensor, f32)
slice: f32[1] = slice(view_1, 0, 0, 1)
reshape_3: f32[] = reshape(slice, [])
slice_1: f32[1] = slice(view_1, 0, 1, 2)
reshape_4: f32[] = reshape(slice_1, [])
slice_2: f32[1] = slice(view_1, 0, 2, 3)
reshape_5: f32[] = reshape(slice_2, [])
""",
        )

    def test_one_value_gathered_twice_is_gathered_once(self):
        def f(x, a, b):
            return side_by_side(x, 1).view(64, 64) @ a.t() + side_by_side(x, 1).view(64, 64) @ b.t()

        text, report = rewritten(f, (2, 8, 64), (32, 64), (32, 64))
        assert text.count(GATHER) == 1 and text.count("all_reduce(") == 1
        assert len(report.gathers) == 1

    def test_sharded_over_two_dimensions_of_a_mesh(self):
        """Gathered over one group, then over another: the amax is reduced over both, and the cast is on the shard."""
        first, second = (dist.new_group([0, 1, 2, 3]).group_name for _ in range(2))

        def f(x, w):
            return x @ gather(gather(w, first), second).t()

        text = assert_moves(f, (16, 64), (8, 64))
        text = text.replace(f"max, {first})", "max, first)").replace(f"max, {second})", "max, second)")
        text = text.replace(f"4, {first})", "4, first)").replace(f"4, {second})", "4, second)")
        self.assertExpectedInline(
            text.split("amax_1:")[0],
            """\
x_1: bf16[16,64]
w_1: bf16[8,64]
amax: f32[] = f8fx.amax(w_1, None)
view: i32[] = view(amax, i32)
bitwise_and: i32[] = bitwise_and(view, 2147483647)
all_reduce: i32[] = _c10d_functional.all_reduce(bitwise_and, max, first)
wait_tensor: i32[] = _c10d_functional.wait_tensor(all_reduce)
view_1: f32[] = view(wait_tensor, f32)
view_2: i32[] = view(view_1, i32)
bitwise_and_1: i32[] = bitwise_and(view_2, 2147483647)
all_reduce_1: i32[] = _c10d_functional.all_reduce(bitwise_and_1, max, second)
wait_tensor_1: i32[] = _c10d_functional.wait_tensor(all_reduce_1)
view_3: f32[] = view(wait_tensor_1, f32)
scale: f32[] = f8fx.scale(view_3, dtype=e4m3, power_of_2=False)
quantize: e4m3[8,64] = f8fx.quantize(w_1, scale, dtype=e4m3, transpose=False, align=[1, 1])
all_gather_into_tensor: e4m3[32,64] = _c10d_functional.all_gather_into_tensor(quantize, 4, first)
wait_tensor_2: e4m3[32,64] = _c10d_functional.wait_tensor(all_gather_into_tensor)
all_gather_into_tensor_1: e4m3[128,64] = _c10d_functional.all_gather_into_tensor(wait_tensor_2, 4, second)
wait_tensor_3: e4m3[128,64] = _c10d_functional.wait_tensor(all_gather_into_tensor_1)
""",
        )

    def test_weights_that_are_sharded_over_two_dimensions_are_reduced_at_once_over_each(self):
        first, second = (dist.new_group([0, 1, 2, 3]).group_name for _ in range(2))

        def f(x, a, b, c):
            return tuple(x @ gather(gather(w, first), second).t() for w in (a, b, c))

        text = assert_moves(f, (16, 64), (8, 64), (8, 64), (8, 64))
        assert [text.count(f"max, {group})") for group in (first, second)] == [1, 1]

    def test_reductions_of_two_groups_stay_two(self):
        other = dist.new_group([0, 1, 2, 3]).group_name

        def f(x, a, b):
            return x @ gather(a).t(), x @ gather(b, other).t()

        text = assert_moves(f, (16, 64), (24, 64), (24, 64))
        assert text.count("all_reduce(") == 2

    def test_reductions_of_forward_and_backward_stay_two(self):
        """A gradient is an input of the joint graph, but it is not there when the forward starts."""

        def f(x, w, tangents):
            whole = gather(tangents)
            return x @ gather(w).t(), whole.t() @ x

        text = assert_moves(f, (64, 64), (8, 64), (16, 32))
        assert text.count("all_reduce(") == 2

    def test_reduction_of_what_is_computed_later_waits_for_it(self):
        def f(x, a, b):
            return gather(gather(x) @ gather(a).t()) @ b.t()

        text = assert_moves(f, (16, 64), (16, 64), (32, 64))
        # x and the weight at once; the result of their product later
        assert [line.split(" =")[0] for line in text.splitlines() if "all_reduce(" in line] == [
            "all_reduce: i32[2]",
            "all_reduce_1: i32[]",
        ]

    def test_a_gather_that_is_redone_for_the_backward_is_two(self):
        """Copies with scales of rows and of columns: two of one byte instead of bf16 twice."""

        def f(x, w, tangents):
            y, grad_input, _ = layer(x, gather(w), tangents)
            return y, grad_input

        kwargs = {"recipe": "rowwise"}
        shapes = (16, 64), (24, 64), (16, 96)
        assert_stays(("its readers need different float8 copies", "granularities"), f, *shapes, **kwargs)
        text = assert_moves(f, *shapes, **kwargs, recompute=True)
        gathers = [line.split(": ")[1].split(" =")[0] for line in text.splitlines() if GATHER in line]
        assert gathers == ["f32[96,1]", "e4m3[96,64]", "e4m3[96,64]"]
        # columns run across shards
        assert [line.split(" =")[0] for line in text.splitlines() if "all_reduce(" in line] == [
            "all_reduce: i32[64]"
        ]

    def test_of_a_graph_that_holds_its_loss(self):
        """As TorchTitan's graph_trainer traces it: no input is a tangent, and autograd's nodes are marked."""

        def f(x, w, grad):
            y, grad_input, _ = layer(x, gather(w), grad)
            return y, grad_input

        graph = graph_of(f, (16, 64), (24, 64), (16, 96))
        matmuls = [node for node in graph.nodes if node.target is aten.mm.default]
        matmuls[-1].meta["autograd_backward"] = True
        for node in graph.nodes:
            if node.target in (c10d.all_gather_into_tensor.default, c10d.wait_tensor.default):
                node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 1}
        report = passed(graph, recipe="rowwise")
        assert report.training and [(g.moved, g.reason) for g in report.gathers] == [(True, "moved")]

    def test_activations_of_one_sequence_are_sent_as_a_matrix(self):
        """The gemm reads what arrives as it is, a form that async tensor parallelism knows."""

        def f(x, w):
            return gather(x).view(1, 64, 64).view(-1, 64) @ w.t()

        text = assert_moves(f, (1, 16, 64), (32, 64))
        self.assertExpectedInline(
            text,
            """\
x_1: bf16[1,16,64]
w_1: bf16[32,64]
reshape: bf16[16,64] = reshape(x_1, [-1, 64])
amax: f32[] = f8fx.amax(reshape, None)
view: i32[] = view(amax, i32)
bitwise_and: i32[] = bitwise_and(view, 2147483647)
all_reduce: i32[] = _c10d_functional.all_reduce(bitwise_and, max, 0)
wait_tensor: i32[] = _c10d_functional.wait_tensor(all_reduce)
view_1: f32[] = view(wait_tensor, f32)
scale: f32[] = f8fx.scale(view_1, dtype=e4m3, power_of_2=False)
quantize: e4m3[16,64] = f8fx.quantize(reshape, scale, dtype=e4m3, transpose=False, align=[1, 1])
all_gather_into_tensor: e4m3[64,64] = _c10d_functional.all_gather_into_tensor(quantize, 4, 0)
wait_tensor_1: e4m3[64,64] = _c10d_functional.wait_tensor(all_gather_into_tensor)
reciprocal: f32[] = reciprocal(scale)
amax_1: f32[] = f8fx.amax(w_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[32,64] = f8fx.quantize(w_1, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal_1: f32[] = reciprocal(scale_1)
permute: e4m3[64,32] = permute(quantize_1, [1, 0])
scaled_mm: bf16[64,32] = _scaled_mm(wait_tensor_1, permute, reciprocal, reciprocal_1, None, None, bf16, True)
return scaled_mm""",
        )

    def test_it_keeps_its_dimensions_where_something_asks_for_their_sizes(self):
        graph = graph_of(lambda x, w: gather(x).view(-1, 64) @ w.t(), (4, 16, 64), (32, 64))
        (wait,) = [node for node in graph.nodes if node.target is c10d.wait_tensor.default]
        (matmul,) = [node for node in graph.nodes if node.target is aten.mm.default]
        with graph.inserting_after(wait):
            size = graph.call_function(aten.sym_size.int, (wait, 1))
        size.meta["val"] = 16
        graph.output_node().args = ((matmul, size),)
        report = passed(graph)
        assert [g.moved for g in report.gathers] == [True]
        text = describe(graph)
        assert "all_gather_into_tensor: e4m3[16,16,64]" in text and "sym_size(wait_tensor_1, 1)" in text


def test_what_turns_bytes_into_float8_is_redone_with_the_gather():
    """The matmul is kept, as a policy for memory may ask; its operand, which all of the weight is, must not be."""
    graph = graph_of(lambda x, w: x @ gather(w).t(), (16, 64), (24, 64))
    for node in graph.nodes:
        if node.target in (c10d.all_gather_into_tensor.default, c10d.wait_tensor.default):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        elif node.target is aten.mm.default:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    passed(graph, wire="uint8")
    (view,) = [n for n in graph.nodes if n.target is aten.view.dtype and n.args[1] is torch.float8_e4m3fn]
    assert view.meta["recompute"] is CheckpointPolicy.PREFER_RECOMPUTE


def test_another_rank_pads_and_this_one_does_not():
    """Rank 3 of four has 21 rows and a padding of two; the decision is that of the other ranks."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)

    def f(x, w):
        return x @ gather(aten.constant_pad_nd(w, [0, 0, 0, 2], 0.0))[:90].t()

    assert_moves(f, (16, 64), (21, 64))
    assert_moves(f, (16, 64), (21, 64), recipe="rowwise")


def test_what_is_moved_stays_bucketable():
    """Inductor joins the float8 gathers of a group into one."""
    from torch._inductor.fx_passes.bucketing import bucket_all_gather

    def f(x, a, b):
        return x @ gather(a).t(), x @ gather(b).t()

    graph = graph_of(f, (16, 64), (24, 64), (32, 64))
    passed(graph)
    module = fx.GraphModule(torch.nn.Module(), graph)
    bucket_all_gather(module, lambda index: 100.0)
    gathers = [node for node in module.graph.nodes if "all_gather_into_tensor" in str(node.target)]
    assert len(gathers) == 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_copy_of_float8_data_has_its_bytes(dtype):
    """``quantize`` with scale one, on every value; casts saturate, so that data holds no infinity."""
    data = torch.arange(256).to(torch.uint8).view(16, 16).view(dtype)
    copy = ops.quantize(data, torch.ones(()), dtype=dtype, transpose=True)
    nan, infinite = data.float().isnan(), data.float().isinf()
    assert torch.equal(copy.t().float().isnan(), nan)
    kept = ~(nan | infinite)
    assert torch.equal(copy.t().contiguous().view(torch.uint8)[kept], data.view(torch.uint8)[kept])
    worst = torch.tensor([[float("inf"), 1.0, -float("inf"), 0.0]])
    assert not ops.quantize(worst, ops.scale(ops.amax(worst), dtype=dtype), dtype=dtype).float().isinf().any()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_magnitude_as_integers(sign):
    """NaN of either sign is above infinity, which is above every number."""
    values = torch.tensor([0.0, 1e-45, 1e-38, 0.5, 448.0, 3e38, float("inf"), float("nan")])
    values[-1] = torch.copysign(values[-1], torch.tensor(sign))
    bits = values.view(torch.int32).bitwise_and(0x7FFFFFFF)
    assert torch.equal(bits.sort().values, bits)
    assert bits[-1:].view(torch.float32).isnan().all()
