"""*collectives*: gathers that stay as they were, each with its reason."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import f8fx
from f8fx import ops
from f8fx.passes import Collectives, Pipeline, check, collectives, describe
from f8fx.torch_private import group_rank
from tests.helpers import bf16
from tests.passes.gathers import (
    F32,
    GATHER,
    assert_moves,
    assert_stays,
    assert_stays_by_hand,
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
    symbolic,
)


def test_stays_when_a_reader_is_no_float8_matmul():
    """Several users, one of which reads bf16."""

    def f(x, w):
        whole = gather(w)
        return x @ whole.t(), whole.sum(0)

    assert_stays(("also read in high precision", "sum"), f, (16, 64), (24, 64))


def test_stays_when_an_operator_between_is_unknown():
    def f(x, w):
        return x @ gather(w).relu().t()

    assert_stays(("no float8 matmul reads it", "relu"), f, (16, 64), (24, 64))


def test_stays_when_it_is_moved_to_another_device():
    """``_to_copy`` is a cast where it does not."""

    def f(x):
        whole = aten._to_copy.default(gather(x), device=torch.device("cuda:0"))
        return ops.quantize(
            whole, ops.scale(ops.amax(whole), dtype=torch.float8_e4m3fn), dtype=torch.float8_e4m3fn
        )

    assert_stays_by_hand(("no float8 matmul reads it", "_to_copy"), f, (16, 64))


def test_stays_when_it_is_written_to_a_tensor_of_another_kind():
    why = ("no float8 matmul reads it", "copy")
    assert_stays(why, lambda x, w: x @ gathered_into(w, torch.float32).to(bf16).t(), (16, 64), (24, 64))

    def turned(x, w):
        return x @ aten.copy.default(w.new_empty(64, 96).t(), gather(w)).t()

    assert_stays(why, turned, (16, 64), (24, 64))

    def repeated(x, w):
        return x @ aten.copy.default(w.new_empty(64, 64, 64), gather(w)).view(4096, 64).t()

    assert_stays(why, repeated, (16, 64), (16, 64))


def test_gathers_of_gathers_into_tensors():
    """As of a weight that is sharded over two dimensions of a mesh."""
    text = assert_moves(lambda x, w: x @ gathered_into(gathered_into(w, bf16), bf16).t(), (16, 64), (6, 64))
    assert text == assert_moves(lambda x, w: x @ gather(gather(w)).t(), (16, 64), (6, 64))


def test_stays_when_it_is_returned():
    def f(x, w):
        whole = gather(w)
        return x @ whole.t(), whole

    assert_stays(("also read in high precision", "output"), f, (16, 64), (24, 64))


def test_stays_when_the_recipe_keeps_a_reader_in_high_precision():
    def f(x, w, tangents):
        whole = gather(x)
        return whole @ w.t(), tangents.t() @ whole

    shapes = (16, 64), (96, 64), (64, 96)
    assert_stays(("also read in high precision", "mm"), f, *shapes, recipe="rowwise_with_gw_hp")


def test_stays_when_readers_round_differently():
    """One reader quantizes the tensor, the other its rounding to another dtype: two copies, as many bytes."""

    def f(x, w):
        whole = gather(w)
        return x @ whole.t(), x.to(torch.float16) @ whole.to(torch.float16).t()

    assert_stays(("its readers need different float8 copies", "roundings"), f, (16, 64), (24, 64))
    # of float32, two copies are half the bytes
    text = assert_moves(f, (16, 64), (24, 64), recipe=F32, dtype=torch.float32)
    assert text.count(GATHER) == 2


def test_bytes_are_padded_as_they_are():
    def f(x, w):
        return x @ aten.constant_pad_nd(gather(w), [0, 16, 0, 0], 0.0).t()

    text = assert_moves(f, (64, 64), (24, 48), wire="uint8")
    assert "constant_pad_nd: u8[96,64] = constant_pad_nd(wait_tensor_1, [0, 16, 0, 0], 0)" in text
    assert text.count("u8]") == 0 and text.count(", u8)") == 1 and text.count(", e4m3)") == 1


def test_stays_when_copies_have_different_dtypes():
    def f(x):
        whole, copies = gather(x), []
        amax = ops.amax(whole)
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            copies.append(ops.quantize(whole, ops.scale(amax, dtype=dtype), dtype=dtype))
        return copies

    assert_stays_by_hand(("its readers need different float8 copies", "dtypes"), f, (16, 64))


@pytest.mark.parametrize("other", [{"dtype": torch.float8_e5m2}, {"power_of_2": True}])
def test_two_copies_of_one_amax_are_reduced_once(other):
    """Together they are half of a float32 tensor; what sets them apart is how they are scaled."""
    kinds = [{"dtype": torch.float8_e4m3fn}, {"dtype": torch.float8_e4m3fn, **other}]

    def f(x):
        whole = gather(x)
        amax = ops.amax(whole)
        return [ops.quantize(whole, ops.scale(amax, **kind), dtype=kind["dtype"]) for kind in kinds]

    def float32(fn, *shapes):
        return graph_of(fn, *shapes, dtype=torch.float32)

    graph = by_hand(f, (16, 64), trace=float32)
    (decision,) = Collectives()(graph)
    assert decision.moved, decision
    check(graph, "collectives")
    gathers = graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)
    assert [node.meta["val"].element_size() for node in gathers] == [1, 1]
    assert len(graph.find_nodes(op="call_function", target=c10d.all_reduce.default)) == 1
    assert len(graph.find_nodes(op="call_function", target=ops.amax)) == 1


def test_stays_with_a_scale_of_this_rank_alone():
    """What is not the amax of all shards cannot scale them."""

    def f(x):
        scale = ops.scale(ops.amax(x), dtype=torch.float8_e4m3fn)
        return ops.quantize(gather(x), scale, dtype=torch.float8_e4m3fn)

    assert_stays_by_hand(("scale is not the amax of the gathered tensor", "scale"), f, (16, 64))


def test_stays_with_a_scale_of_another_rounding():
    def f(x):
        whole = gather(x)
        scale = ops.scale(ops.amax(whole.to(torch.float16)), dtype=torch.float8_e4m3fn)
        return ops.quantize(whole, scale, dtype=torch.float8_e4m3fn)

    assert_stays_by_hand(("scale is not the amax of the gathered tensor", "scale"), f, (16, 64))


def test_stays_when_a_piece_has_another_use():
    """It would go on reading what one rank has sent."""

    def f(x):
        pieces = torch.split(gather(x), x.shape[0])
        whole = torch.cat(pieces, 1)
        scale = ops.scale(ops.amax(whole), dtype=torch.float8_e4m3fn)
        return ops.quantize(whole, scale, dtype=torch.float8_e4m3fn), pieces[1].sin()

    assert_stays_by_hand(("no float8 matmul reads it", "split"), f, (16, 64))


def test_stays_when_an_amax_has_another_use():
    """It would go on reading the gathered tensor."""

    def f(x):
        whole = gather(x)
        scale = ops.scale(ops.amax(whole), dtype=torch.float8_e4m3fn)
        return ops.quantize(whole, scale, dtype=torch.float8_e4m3fn), ops.amax(whole, 1)

    assert_stays_by_hand(("an amax of it is no scale of its copy", "amax_1"), f, (16, 64))


def test_stays_when_only_a_part_is_read():
    def f(x, w):
        return x @ torch.split(gather(w), 24)[0].t()

    assert_stays(("no float8 matmul reads it", "split"), f, (16, 64), (24, 64))


def test_stays_when_shards_are_not_in_order():
    def f(x, w):
        return x @ torch.cat(torch.split(gather(w), 96)[::-1], 1).t()

    assert_stays(("no float8 matmul reads it", "split"), f, (16, 64), (96, 16))


NOT_WHOLE = {
    "split along another dimension": (lambda whole: torch.cat(torch.split(whole, 16, 1)), (16, 64), "split"),
    "without one of the shards": (lambda whole: torch.cat(torch.split(whole, 96)[:3], 1), (96, 16), "split"),
    "without one of the slices": (
        lambda whole: torch.cat([whole[start : start + 96] for start in (0, 96, 288)], 1),
        (96, 16),
        "cat, slice",
    ),
    "one shard twice": (
        lambda whole: torch.cat([whole[start : start + 96] for start in (0, 96, 96, 288)], 1),
        (96, 16),
        "cat, slice",
    ),
    "without its beginning": (lambda whole: whole[16:], (24, 64), "slice"),
    "without every other row": (lambda whole: whole[::2], (24, 64), "slice"),
    "without its last columns": (lambda whole: whole[:, :48], (24, 64), "slice"),
    "without its margin": (
        lambda whole: aten.constant_pad_nd(whole, [0, 0, 0, -16]),
        (24, 64),
        "constant_pad_nd",
    ),
    "with a margin that is not zero": (
        lambda whole: aten.constant_pad_nd(whole, [0, 0, 0, 16], 1.0),
        (24, 64),
        "constant_pad_nd",
    ),
    "through another dtype": (
        lambda whole: whole.to(torch.float64).to(bf16),
        (24, 64),
        "_to_copy",
    ),
}


@pytest.mark.parametrize("name", NOT_WHOLE)
def test_stays_when_something_else_is_made_of_it(name):
    """Of all of it, in order, shards in float8 would be a copy."""
    made, shape, operator = NOT_WHOLE[name]

    def f(x, w):
        weight = made(gather(w))
        return x[:, : weight.shape[1]] @ weight.t()

    assert_stays(("no float8 matmul reads it", operator), f, (16, 288), shape)


def test_stays_when_more_than_padding_is_dropped():
    """Rank 1 has rows 16 to 31, and only 20 are read: rank 0, which has all of its own, is not to move it either."""

    def f(x, w):
        return x @ gather(w)[:20].t()

    for rank in (1, 0):
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        detail = "44 of 64 rows"
        assert_stays(
            ("the end of it is dropped, and may be more than padding", detail), f, (16, 64), (16, 64)
        )


@pytest.mark.parametrize(("pads", "value"), [([0, 0, 0, 2], 5.0), ([0, 16], 0.0), ([0, 16, 2, 0], 0.0)])
def test_stays_when_the_padding_is_not_zeros(pads, value):
    """Or when it is not of what is dropped: of columns, or in front."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    rows = 23 - sum(pads[2:])

    def f(x, w):
        return x @ gather(aten.constant_pad_nd(w, pads, value))[:90].t()

    reason = "the end of it is dropped, and may be more than padding"
    assert_stays((reason, "2 of 23 rows"), f, (16, 64 + pads[1]), (rows, 64))


def test_padding_before_a_cast():
    """Zeros stay zeros."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)

    def f(x, w):
        return x.to(bf16) @ gather(aten.constant_pad_nd(w, [0, 0, 0, 2], 0.0).to(bf16).clone())[:90].t()

    assert_moves(f, (16, 64), (21, 64), dtype=torch.float32)


def test_stays_where_one_graph_is_for_all_ranks(monkeypatch):
    """It names no group, and what this rank knows of its padding says nothing of another's."""
    group = fx.Graph().placeholder("group")
    group.meta["val"] = dist.group.WORLD
    assert group_rank(group) is None and group_rank(dist.group.WORLD.group_name) == 1
    monkeypatch.setattr(collectives, "group_rank", lambda group: None)
    reason = "the end of it is dropped, and may be more than padding"
    assert_stays((reason, ""), lambda x, w: x @ gather(w)[:90].t(), (16, 64), (23, 64))


def test_a_view_of_the_same_shape_is_no_movement():
    """As DTensor makes them; what comes behind is still unpadding."""
    assert_moves(lambda x, w: x @ gather(w).view(92, 64)[:90].t(), (16, 64), (23, 64))


def test_stays_when_float8_has_no_fewer_bytes():
    """A shard of two elements: the reduction costs more."""

    def f(x, w):
        return x @ gather(w).t()

    assert_stays(("would save no bytes", "16 as it is, 16 in float8"), f, (16, 2), (1, 2))


def test_stays_where_gloo_was_asked_to_send_float8(monkeypatch):
    for module in ("f8fx.passes.collectives", "f8fx.torch_private.distributed"):
        monkeypatch.setattr(f"{module}.group_backend", lambda group, device: "gloo")

    def f(x, w):
        return x @ gather(w).t()

    detail = 'wire="float8"; "auto" and "uint8" send it as bytes'
    assert_stays(("gloo sends no float8", detail), f, (16, 64), (24, 64), wire="float8")
    for wire in ("auto", "uint8"):
        text, report = rewritten(f, (16, 64), (24, 64), wire=wire)
        assert report.gathers[0].moved and "u8[96,64] = _c10d_functional.all_gather_into_tensor(" in text


GATHERED_AGAIN = "gathered over another group more than once"


def test_stays_when_its_amax_is_reduced_over_another_group_more_than_once():
    """Once for each gather that follows; the copy before this one would have to have the scales of both."""
    second = dist.new_group([0, 1, 2, 3]).group_name

    @torch.inference_mode()  # views without detach
    def f(x):
        whole, copies = gather(x), []
        for _ in range(2):
            bits = ops.amax(whole).view(torch.int32)
            amax = c10d.wait_tensor(c10d.all_reduce(bits, "max", second)).view(torch.float32)
            scale = ops.scale(amax, dtype=torch.float8_e4m3fn)
            copies.append(ops.quantize(whole, scale, dtype=torch.float8_e4m3fn))
        return copies

    assert_stays_by_hand((GATHERED_AGAIN, ""), f, (16, 64))


def test_stays_when_two_gathers_read_what_it_gathered():
    """They move, as they are two values to the pass: one of them of a view."""
    first, second = (dist.new_group([0, 1, 2, 3]).group_name for _ in range(2))

    def f(x, w):
        rows = gather(w, first)
        viewed = rows.view(-1).view(rows.shape)
        return x @ gather(rows, second).t(), x.cos() @ gather(viewed, second).t()

    text, report = rewritten(f, (16, 64), (8, 64))
    found = [(g.moved, g.reason) for g in report.gathers]
    assert found == [(False, GATHERED_AGAIN), (True, "moved"), (True, "moved")]
    assert f"bf16[32,64] = _c10d_functional.all_gather_into_tensor(w_1, 4, {first})" in text
    assert text.count(f"e4m3[128,64] = {'_c10d_functional.' + GATHER}") == 2
    # over the other group: amaxes of the rows that are there
    assert text.count("all_reduce(") == text.count(f", max, {second})") > 0


def test_stays_when_what_is_gathered_is_no_float_or_float8_already():
    def cast_to(dtype):
        return lambda x: gather(x.to(dtype))

    assert_stays_by_hand(("already float8", ""), cast_to(torch.float8_e4m3fn), (16, 64))
    for dtype in (torch.int64, torch.int8, torch.uint8, torch.bool):
        assert_stays_by_hand(("no floating-point tensor", ""), cast_to(dtype), (16, 64))
    assert_stays_by_hand(("not bf16, fp16 or fp32", ""), cast_to(torch.float64), (16, 64))


def test_stays_when_one_rank_has_all_of_it():
    alone = dist.new_group([1]).group_name
    assert_stays(
        ("would save no bytes", "one rank has all of it"),
        lambda x, w: x @ gather(w, alone, 1).t(),
        (16, 64),
        (32, 64),
    )


def test_stays_when_a_scale_is_for_all_of_it():
    def f(x):
        row = gather(x).view(1, -1)
        scale = ops.scale(ops.amax(row, 1), dtype=torch.float8_e4m3fn)
        return ops.quantize(row, scale, dtype=torch.float8_e4m3fn, dim=1)

    assert_stays_by_hand(("one row that is all of the shard", ""), f, (16, 64))


def test_stays_when_shards_of_dynamic_sizes_are_cut():
    """What this rank drops is known for the size that was traced alone."""

    def f(x):
        whole = gather(x)[:90]
        scale = ops.scale(ops.amax(whole), dtype=torch.float8_e4m3fn)
        return ops.quantize(whole, scale, dtype=torch.float8_e4m3fn)

    reason = ("the end of it is dropped, and may be more than padding", "")
    assert_stays_by_hand(reason, f, (23, 64), trace=symbolic)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_moves_with_dynamic_sizes(dim):
    """The sizes of what is gathered are read, too: no element of it is."""

    def f(x, y):
        whole = gather(x) if dim == 0 else side_by_side(x, dim)
        matrix = whole.view(-1, whole.shape[-1])
        amax = ops.amax(matrix)
        data = ops.quantize(matrix, ops.scale(amax, dtype=torch.float8_e4m3fn), dtype=torch.float8_e4m3fn)
        return data.view(torch.uint8).view(whole.shape), y.expand(whole.shape)

    graph = by_hand(f, (6, 16, 64), (1, 1, 1), trace=symbolic)
    (decision,) = Collectives()(graph)
    assert decision.moved, decision
    check(graph, "collectives")
    gathers = graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)
    assert [node.meta["val"].dtype for node in gathers] == [torch.float8_e4m3fn]


def test_stays_when_nothing_but_its_size_is_read():
    def f(x, y):
        return y.expand(gather(x).shape)

    assert_stays_by_hand(("no float8 matmul reads it", ""), f, (6, 64), (1, 1), trace=symbolic)


def test_stays_when_parts_of_dynamic_sizes_are_read():
    def f(x):
        whole, rows = gather(x), x.shape[0]
        return [
            ops.quantize(
                part, ops.scale(ops.amax(part), dtype=torch.float8_e4m3fn), dtype=torch.float8_e4m3fn
            )
            for part in (whole[rows : 2 * rows], whole[:rows], whole[2 * rows :])
        ]

    graph = by_hand(f, (6, 64), trace=symbolic)
    before = describe(graph)
    (decision,) = Collectives()(graph)
    assert not decision.moved and describe(graph) == before


def test_stays_when_rowwise_scales_have_dynamic_sizes():
    def f(x):
        whole = gather(x)
        scale = ops.scale(ops.amax(whole, 1), dtype=torch.float8_e4m3fn)
        return ops.quantize(whole, scale, dtype=torch.float8_e4m3fn, dim=1)

    assert_stays_by_hand(("rowwise scales of dynamic sizes", ""), f, (16, 64), trace=symbolic)


def test_stays_when_rows_of_several_sequences_have_dynamic_sizes():
    """Whether a view of them cuts across a row is not known either."""

    def f(x):
        whole = gather(x).view(-1, 64)
        scale = ops.scale(ops.amax(whole, 1), dtype=torch.float8_e4m3fn)
        return ops.quantize(whole, scale, dtype=torch.float8_e4m3fn, dim=1)

    assert_stays_by_hand(("rowwise scales of dynamic sizes", ""), f, (6, 16, 64), trace=symbolic)


def test_stays_when_gathered_in_one_call_with_others():
    def f(x, w, v):
        first, second = map(c10d.wait_tensor, c10d.all_gather_into_tensor_coalesced([w, v], 4, "0"))
        return x @ first.t(), x @ second.t()

    together = ("gathered in one call with others", "")
    assert_stays(together, f, (16, 64), (24, 64), (12, 64))
    _, report = rewritten(f, (16, 64), (24, 64), (12, 64))
    assert [(g.shape, g.dtype, g.group_size) for g in report.gathers] == [
        ((96, 64), "bfloat16", 4),
        ((48, 64), "bfloat16", 4),
    ]
    line = "f8fx: 2 of 2 matmuls in float8 (tensorwise); 0 of 2 gathers in float8, not 2: gathered in one call with others"
    assert report.line() == line


def test_an_input_that_is_gathered_into_stays_an_input():
    def f(x, w, whole):
        return x @ aten.copy.default(whole, gather(w)).t()

    text = assert_moves(f, (16, 64), (24, 64), (96, 64))
    assert text.splitlines()[2] == "whole_1: bf16[96,64]"


@pytest.mark.parametrize(("moved", "count"), [(lambda v: v.view(24, 64), 1), (torch.relu, 2)])
def test_amaxes_of_views_that_are_made_later_are_reduced_with_the_first(moved, count):
    """What is computed later is not there yet."""

    def f(x, w, v):
        y = x @ gather(w).t()
        return y, x @ gather(moved(v)).t()

    text = assert_moves(f, (16, 64), (24, 64), (24, 64))
    assert text.count("= _c10d_functional.all_reduce(") == count


def test_gathers_of_the_backward_are_known_as_such():
    """In one call, and alone."""

    def f(x, w, tangents_1):
        first, second = map(c10d.wait_tensor, c10d.all_gather_into_tensor_coalesced([w, tangents_1], 4, "0"))
        return gather(w), first, second, gather(tangents_1)

    graph = graph_of(f, (16, 64), (24, 64), (16, 64))
    for node, name in zip(graph.find_nodes(op="placeholder"), ("x", "w", "tangents_1"), strict=True):
        node.name = node.target = name
    found = Collectives()(graph)
    assert [(g.shape, g.backward) for g in found] == [
        ((96, 64), False),
        ((64, 64), True),
        ((96, 64), True),
        ((64, 64), True),
    ]


def test_stays_when_a_view_cuts_across_the_scaled_dimension():
    """Rows of 64 elements are halves of the rows of 128 that are gathered."""

    def f(x, w):
        return x @ gather(w).view(48, 64).t()

    assert_stays(
        ("a view cuts across the dimension that is scaled", ""), f, (16, 64), (6, 128), recipe="rowwise"
    )
    assert_moves(f, (16, 64), (6, 128))  # one scale for all does not care


def test_a_graph_without_conversions_is_untouched():
    def f(x, w):
        return x @ gather(w).t()

    graph = graph_of(f, (16, 64), (24, 64))
    before = describe(graph)
    options = f8fx.Options.parse({"select": "all", "filter_fqns": ["nothing"], "only_fqns": ["nothing"]})
    Pipeline(options.recipe, options.policy())(graph)
    assert describe(graph) == before


def test_a_second_run_changes_nothing():
    """The pass alone, on a graph in which gathers carry float8 already."""

    def f(x, w, tangents):
        return layer(x, gather(w), tangents)

    graph = graph_of(f, (16, 64), (24, 64), (16, 96))
    passed(graph)
    before = describe(graph)
    decisions = Collectives()(graph)
    assert describe(graph) == before
    assert [(d.moved, d.reason) for d in decisions] == [(False, "already float8")]
