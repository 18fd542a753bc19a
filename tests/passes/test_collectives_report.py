"""*collectives*: what is said of gathers."""

from __future__ import annotations

import io
import json

from f8fx.report import GraphReport, Traffic
from f8fx.show import print_report
from tests.passes.gathers import (
    four_ranks,  # noqa: F401
    gather,
    rewritten,
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


def test_the_report_survives_the_cache():
    _, report = rewritten(two_gathers, (16, 64), (24, 64), (24, 64))
    report.traffic = [Traffic((0, 1), ("before",), ("after", "after"), "fsdp")]
    assert GraphReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_off_leaves_all_gathers():
    text, report = rewritten(two_gathers, (16, 64), (24, 64), (24, 64), wire="off")
    assert {(g.moved, g.reason) for g in report.gathers} == {(False, 'wire="off"')}
    assert text.count("bf16[96,64] = _c10d_functional.all_gather_into_tensor(") == 2
