"""Reports by hand: what is counted, what the line says, what becomes of several."""

from __future__ import annotations

import json
import logging
from dataclasses import fields

import pytest

from f8fx import recording
from f8fx.report import CollectiveDecision, Decision, GraphReport, MergeDecision, Traffic, publish


def _decision(converted: bool, reason: str = "", fqn: str = "w") -> Decision:
    return Decision(
        fqn, "output", 16, "s7", 16, converted, reason, "numbers", 1.5, 1e-6, "merged with k", True
    )


def _full(name: str, training: bool = False, cached: bool = True) -> GraphReport:
    """A report that says something of everything."""
    return GraphReport(
        recipe="rowwise",
        target=name,
        training=training,
        decisions=[_decision(True, fqn=name), _decision(False, "filtered"), _decision(True)],
        merges=[
            MergeDecision((name, "w"), True, "merged", "1 us", ("output",), ("grad_weight",), 2e-6, 1e-6)
        ],
        reused_weights=2,
        gathers=[CollectiveDecision(name, (8, "s7"), "bfloat16", 4, True, False, "too small", "why")],
        traffic=[Traffic((0, 1), (name,), ("a", "b"), name, True, True)],
        pass_seconds={"find": 1.0, name: 2.0},
        cached=cached,
        warnings=[f"of {name}"],
    )


def test_a_report_survives_json_whole():
    report = _full("h100", training=True)
    report.fallback = "a failure"
    assert all(getattr(report, field.name) for field in fields(report)), "of everything there is something"
    assert GraphReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_lists_that_were_not_written_are_empty():
    whole = _full("h100").to_dict()
    for name in ("merges", "gathers", "traffic"):
        del whole[name]
    again = GraphReport.from_dict(whole)
    assert (again.merges, again.gathers, again.traffic) == ([], [], [])


def test_several_are_one_with_all_that_each_has():
    first, second = _full("h100"), _full("cpu", training=True, cached=False)
    (whole,) = GraphReport.merged([first, second])
    assert whole == GraphReport(
        recipe="rowwise",
        target="cpu, h100",
        training=True,
        decisions=[*first.decisions, *second.decisions],
        merges=[*first.merges, *second.merges],
        reused_weights=4,
        gathers=[*first.gathers, *second.gathers],
        traffic=[*first.traffic, *second.traffic],
        pass_seconds={"find": 2.0, "h100": 2.0, "cpu": 2.0},
        cached=False,
        warnings=["of h100", "of cpu"],
    )
    assert GraphReport.merged([first]) == [first] and GraphReport.merged([]) == []
    (one,) = GraphReport.merged([first, first])
    assert one.target == "h100" and one.cached and not one.training


def test_the_line_says_all_that_there_is():
    report = _full("h100")
    assert report.line() == (
        "f8fx: 2 of 3 matmuls in float8 (rowwise), merged into 1 gemm, 1 skipped: 1 filtered; 2 weights kept in "
        "float8; 0 of 1 gathers in float8, not 1: too small [cached]"
    )
    assert (report.total, report.converted, report.gemms, report.skipped) == (3, 2, 1, 1)
    report.reused_weights = 1
    assert "; 1 weight kept in float8;" in report.line()
    report.merges, report.cached = [], False
    assert "2 of 3 matmuls in float8 (rowwise), 1 skipped" in report.line()
    assert report.line().endswith("not 1: too small")


def test_reasons_are_counted_the_most_frequent_first():
    decisions = [_decision(False, reason) for reason in ("a", "b", "c", "b", "c", "c")]
    report = GraphReport("rowwise", decisions=[*decisions, _decision(True, "d")])
    assert list(report.reasons.items()) == [("c", 3), ("b", 2), ("a", 1)]
    assert report.line().endswith(", 6 skipped: 3 c, 2 b, 1 a")


def test_where_f8fx_gave_up_nothing_is_in_float8():
    report = _full("h100")
    report.fallback = "a failure"
    assert (report.total, report.converted, report.gemms, report.skipped) == (3, 0, 0, 3)
    assert report.reasons == {"a failure": 3}
    assert report.line() == "f8fx: plain Inductor for this graph, nothing in float8: a failure"
    assert GraphReport("rowwise").line() == "f8fx: no matmuls in this graph (rowwise)"


@pytest.mark.parametrize("layers", [2, 3])
def test_a_merge_spares_gemms_of_each_role(layers: int):
    names = tuple("qkv"[:layers])
    assert MergeDecision(names, True, "merged", roles=("output", "grad_input")).spared == 2 * (layers - 1)
    assert MergeDecision(names, False, "would be no faster").spared == 0


def test_what_is_published_is_logged_and_recorded_by_all(caplog: pytest.LogCaptureFixture):
    report = _full("h100")
    with caplog.at_level(logging.INFO, "f8fx"), recording() as outer:
        with recording() as inner:
            publish(report)
        publish(_full("h200"))
    assert inner == [report] and len(outer) == 2
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said[:2] == [("INFO", report.line()), ("WARNING", "of h100")]
