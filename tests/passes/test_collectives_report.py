"""*collectives*: what is said of gathers."""

from __future__ import annotations

import io
import json

import pytest
import torch.distributed as dist

from f8fx.passes.traffic import gathers, traffic
from f8fx.report import GraphReport, Traffic
from f8fx.show import print_report
from tests.passes.gathers import (
    c10d,
    four_ranks,  # noqa: F401
    gather,
    graph_of,
    passed,
    rewritten,
    symbolic,
)


def two_gathers(x, a, b):
    return x @ gather(a).t() + gather(b).sum(), x


def test_the_line_and_the_table_say_what_became_of_gathers():
    _, report = rewritten(two_gathers, (16, 64), (24, 64), (24, 64))
    line = "f8fx: 1 of 1 matmuls in float8 (tensorwise); 1 of 2 gathers in float8, not 1: no float8 matmul reads it"
    assert report.line() == line
    file = io.StringIO()
    print_report(report, file)
    shown = " ".join(file.getvalue().split())
    assert "12288 bytes become 6152" in shown.replace("│ ", "")
    assert "gathered in ┃ shape ┃ dtype ┃ ranks ┃ float8 ┃ why" in shown


@pytest.fixture
def not_on_paper(monkeypatch):
    """The group counts as one of processes that are there."""
    return lambda: monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")


def test_what_is_sent_over_each_group_before_and_after(not_on_paper):
    """Of reductions those of the passes: what else a graph sends is as it was."""

    def f(x, a, b):
        return x @ gather(a).t() + gather(b).sum(), c10d.wait_tensor(c10d.all_reduce(x, "sum", "0"))

    graph = graph_of(f, (16, 64), (24, 64), (24, 64))
    before = gathers(graph)
    passed(graph)
    whole = "all_gather_into_tensor bf16[96,64]"
    moved = ("all_reduce i32[]", "all_gather_into_tensor e4m3[96,64]", whole)
    assert traffic(before, gathers(graph), True) == []
    not_on_paper()
    for training in (False, True):
        sent = traffic(before, gathers(graph), training)
        assert sent == [Traffic((0, 1, 2, 3), (whole, whole), moved, "0", training)]
    assert traffic(before, before, False, True)[0].is_left


def test_what_is_sent_over_a_group_of_one_needs_nobodys_consent(not_on_paper):
    not_on_paper()
    alone = dist.new_group([1]).group_name
    graph = graph_of(lambda x: (gather(x, alone, 1), gather(x)), (24, 64))
    sent = gathers(graph)
    assert len(sent) == 2 and [one.ranks for one in traffic(sent, sent, False)] == [(0, 1, 2, 3)]


def test_sizes_that_are_sent_are_those_of_the_call():
    assert [*gathers(symbolic(lambda x: gather(x), (24, 64))).values()] == [
        ("all_gather_into_tensor bf16[96,64]",)
    ]


def test_the_report_survives_the_cache():
    _, report = rewritten(two_gathers, (16, 64), (24, 64), (24, 64))
    report.traffic = [Traffic((0, 1), ("before",), ("after", "after"), "fsdp")]
    assert GraphReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_off_leaves_all_gathers():
    text, report = rewritten(two_gathers, (16, 64), (24, 64), (24, 64), wire="off")
    assert {(g.moved, g.reason) for g in report.gathers} == {(False, 'wire="off"')}
    assert text.count("bf16[96,64] = _c10d_functional.all_gather_into_tensor(") == 2
