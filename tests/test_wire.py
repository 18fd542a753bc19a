"""The collectives that stand in a graph, as one rank of four sees them."""

from __future__ import annotations

import torch.distributed as dist

from f8fx.wire import IN_GRAPH, Call, calls_of
from tests.passes.gathers import (
    c10d,
    four_ranks,  # noqa: F401
    gather,
    graph_of,
    passed,
)


def test_ranks_that_are_not_next_to_each_other():
    pair = dist.new_group([1, 3]).group_name
    graph = graph_of(lambda x: (gather(x), gather(x, pair, 2)), (24, 64))
    sent = {"bfloat16": 2 * 24 * 64}
    assert calls_of(graph, True) == [
        Call("all_gather", IN_GRAPH, "", True, 4, sent, stride=1),
        Call("all_gather", IN_GRAPH, "", True, 2, sent, stride=2),
    ]


def test_what_nobody_else_gets_or_is_sent_over_a_group_of_others_is_not_counted():
    alone = dist.new_group([1]).group_name
    graph = graph_of(lambda x: (gather(x, alone, 1), gather(x, "of others", 2)), (24, 64))
    assert calls_of(graph, False) == []


def test_amaxes_are_those_that_passes_reduce():
    def f(x, w):
        return x @ gather(w).t(), c10d.wait_tensor(c10d.all_reduce(x, "sum", "0"))

    graph = graph_of(f, (16, 64), (24, 64))
    passed(graph)
    found = [(call.op, call.what, call.bytes) for call in calls_of(graph, False)]
    assert sorted(found, key=str) == [
        ("all_gather", IN_GRAPH, {"float8_e4m3fn": 24 * 64}),
        ("all_reduce", "amaxes", {"int32": 4}),
        ("all_reduce", IN_GRAPH, {"bfloat16": 2 * 16 * 64}),
    ]
