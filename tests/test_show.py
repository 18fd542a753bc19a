"""Reports as tables."""

from __future__ import annotations

import io

from f8fx.report import CollectiveDecision, Decision, GraphReport
from f8fx.show import print_report


def _rows(report: GraphReport) -> list[list[str]]:
    """The cells of the tables, row by row."""
    file = io.StringIO()
    print_report(report, file)
    lines = [line.replace("┃", "│").strip() for line in file.getvalue().splitlines()]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]


def test_every_decision_is_a_row():
    """Names are the user's: what looks like markup is shown."""
    report = GraphReport(
        recipe="tensorwise",
        target="h100",
        training=False,
        decisions=[
            Decision(
                "layers[0]", "output", "s7", 32, 48, True, "converted", "pays: 2x", merge="merged with :key:"
            ),
            Decision("[bold]head", "output", 16, 32, 48, False, "filtered"),
        ],
        gathers=[
            CollectiveDecision("layers[0]", (96, "s7"), "bfloat16", 4, True, True, "moved", "4 bytes"),
            CollectiveDecision("head", (8,), "float32", 2, False, False, "no float8 matmul reads it"),
        ],
    )
    assert _rows(report) == [
        ["module", "gemm", "M x K x N", "float8", "why"],
        ["layers[0]", "output", "s7 x 32 x 48", "yes", "converted (pays: 2x); merged with :key:"],
        ["[bold]head", "output", "16 x 32 x 48", "-", "filtered"],
        ["gathered in", "shape", "dtype", "ranks", "float8", "why"],
        ["layers[0]", "96 x s7", "bfloat16", "4", "yes", "moved (4 bytes)"],
        ["head", "8", "float32", "2", "-", "no float8 matmul reads it"],
    ]


def test_a_graph_without_gathers_has_one_table():
    assert len(_rows(GraphReport(recipe="tensorwise", target="h100", training=False))) == 1
