"""What is shown of an explanation, figure by figure: explanations by hand, so that each figure can be checked by eye."""

from __future__ import annotations

import dataclasses
import io
import re
from typing import Any

import pytest

from f8fx.communication import Communication
from f8fx.explanation import Explanation, Row
from f8fx.explanation.show import Group, grouped, totals, wire_note, wire_title
from f8fx.report import CollectiveDecision, Decision, GraphReport, MergeDecision
from f8fx.wire import Sent


def _row(fqn: str, high: float | None, float8: float | None, share: float | None, **more: Any) -> Row:
    """A forward matmul, in float8 if it gets faster; times in milliseconds."""
    seconds = [None if ms is None else ms / 1000 for ms in (high, float8)]
    speedup = None if high is None or float8 is None else high / float8
    figures = {"m": 64, "k": 32, "n": 16, "converted": high != float8, "reason": "", "speedup": speedup}
    figures |= {"high_seconds": seconds[0], "float8_seconds": seconds[1], "share": share}
    return Row(0, fqn, "output", detail="", **{**figures, **more})


def _explanation(*rows: Row, **more: Any) -> Explanation:
    figures = {"training": False, "graphs": [], "rows": list(rows), **more}
    return Explanation("Mlp", "h100", "tensorwise", "auto", **figures)


def _page(*rows: Row, **more: Any) -> str:
    return _explanation(*rows, **more).to_html()


DECISION = Decision("w", "output", 64, 32, 16, True, "")
UP = (_row("layers.0.up", 3, 1.5, 0.375), _row("layers.1.up", 3, 1.5, 0.375))
HEAD = _row("head", 2, 2, 0.25, reason="filtered", speedup=0.8)


def _cards(page: str) -> dict[str, str]:
    """Label -> the large figure and the small one."""
    found = re.findall(r'class="card"><b>(.*?)<small>(.*?)</small></b><span>(.*?)</span>', page)
    return {label: big + small for big, small, label in found}


def test_totals():
    assert _cards(_page(*UP, HEAD)) == {
        "speedup of all matmuls together, casts included": "1.60x",
        "matmuls in float8": "2 of 3",
        "float8 gemms, after merging": "0 from 2",
        "time in matmuls and casts": "5 ms from 8 ms",
    }
    sizes = {"saved_bytes_high": 2000, "saved_bytes_float8": 1500, "communicated_bytes_high": 3000}
    cards = _cards(_page(HEAD, training=True, **sizes, communicated_bytes=3000))
    assert cards["time in matmuls and casts, with and without float8"] == "2 ms"
    assert cards["saved for backward"] == "1.5 kB from 2 kB"
    assert cards["in collectives, per device, with and without float8"] == "3 kB"
    assert "float8 gemms, after merging" not in cards


@pytest.mark.parametrize(
    ("graphs", "training", "text"),
    [(1, False, "forward only"), (2, True, "forward and backward, 2 graphs"), (0, False, "0 graphs")],
)
def test_what_was_traced(graphs: int, training: bool, text: str):
    page = _page(HEAD, graphs=[GraphReport("tensorwise")] * graphs, training=training)
    assert f"{text}. Predicted by" in page


def test_what_stands_in_a_banner():
    assert "There are no matmuls in what was traced." in _page()
    page = _page(HEAD, HEAD, _row("a", 1, 1, None, reason="too small"))
    assert "Nothing would run in float8: filtered (2); too small (1)." in page
    assert "Nothing would run" not in _page(*UP, HEAD)


def _segments(page: str) -> list[list[tuple[str, float, str]]]:
    """Of both bars: what a segment says, its width in percent and its text."""
    stacks = re.findall(r'<div class="stack">(.*?)</div></div>', page)
    segment = r'title="(.*?)" style="width:([\d.]+)%;[^"]*">(.*?)(?:</div>|$)'
    return [[(tip, float(width), text) for tip, width, text in re.findall(segment, s)] for s in stacks]


def test_both_bars_have_one_scale():
    page = _page(*UP, HEAD)
    assert _segments(page) == [
        [("layers.*.up: 6 ms, 75%", 75, "up<br>75%"), ("head: 2 ms, 25%", 25, "head<br>25%")],
        [("layers.*.up: 3 ms, 60%", 37.5, "up<br>60%"), ("head: 2 ms, 40%", 25, "head<br>40%")],
    ]
    for cells in ("2</td><td>6 ms</td><td>3 ms</td><td>2.00x", "1</td><td>2 ms</td><td>2 ms</td><td>1.00x"):
        assert f"<td>{cells}</td></tr>" in page
    slower = _segments(_page(_row("a", 1, 2, 1.0)))
    assert [width for ((_, width, _),) in slower] == [50, 100]


def test_matmuls_of_unknown_time_are_in_no_bar():
    assert "Where matmul time goes" not in _page(_row("a", None, None, None))
    ((one,), _) = _segments(_page(_row("a", None, None, None), _row("", 2, 1, 1.0)))
    assert one == ("(no module): 2 ms, 100%", 100, "(no module)<br>100%")


def test_modules_beyond_the_colours_are_one():
    """Those with the least time; segments too narrow for text have none."""
    page = _page(*(_row(f"m{'abcdefghij'[i]}", 10 - i, 5, 0.1) for i in reversed(range(10))))
    high, float8 = _segments(page)
    assert [tip.split(":")[0] for tip, *_ in high] == [*(f"m{c}" for c in "abcdefgh"), "2 others"]
    assert high[-1][0] == "2 others: 3 ms, 5%" and float8[-1][0] == "2 others: 10 ms, 20%"
    # of 55 ms, 5 are more than the least part with a text
    assert [bool(text) for *_, text in high] == [True] * 6 + [False] * 3
    assert page.count("var(--c7)") == 3 and page.count("var(--rest)") == 3
    assert "(--c8)" not in page
    assert "2 others</td><td>2</td><td>3 ms</td><td>10 ms</td><td>0.30x</td>" in page


def _bars(page: str) -> list[tuple[str, ...]]:
    """Kind, left, width and height of the speedups' bars, and where the text is and what it says."""
    bar = r'class="bar( \w+)?" style="left:([\d.]+)%;width:([\d.]+)%;height:(\d+)px"></div><em style="left:([\d.]+)%">(.*?)</em>'
    return re.findall(bar, page)


def test_bars_of_speedups_begin_at_one():
    """From 0.8 to 2, with 2 % around it: 1 is at 0.216 of 1.256."""
    page = _page(HEAD, *UP, _row("loses", 1, 1.25, 0.0, converted=True))
    assert _bars(page) == [
        ("", "17.20", "79.62", "18", "96.82", "2.00x"),  # the longest, in two layers
        (" skip", "1.27", "15.92", "9", "17.20", "0.80x"),
        (" lose", "1.27", "15.92", "5", "17.20", "0.80x"),
    ]
    (axis,) = re.findall(r'<div class="track axis">(.*?)</div>', page)
    assert re.findall(r"left:([\d.]+)%\">(.*?)</span>", axis) == [
        ("17.20", "1x"),
        ("37.10", "1.25x"),
        ("57.01", "1.5x"),
        ("76.91", "1.75x"),
        ("96.82", "2x"),
    ]
    assert page.count('<i class=one style="left:17.20%">') == 3
    assert "layers.*.up x2 <small>output</small>" in page
    assert 'title="layers.*.up x2 output, 64 x 32 x 16, 75.0% of matmul time"' in page


@pytest.mark.parametrize(
    ("speedup", "ticks"),
    [
        (1.05, ["0.9x", "1x", "1.1x"]),
        (1.7, ["1x", "1.25x", "1.5x"]),
        (4.5, ["1x", "1.5x", "2x", "2.5x", "3x", "3.5x", "4x", "4.5x"]),
        (5.5, ["1x", "2x", "3x", "4x", "5x"]),
    ],
)
def test_marks_of_the_scale_are_few(speedup: float, ticks: list[str]):
    page = _page(_row("a", speedup, 1, 1.0))
    (axis,) = re.findall(r'<div class="track axis">(.*?)</div>', page)
    assert re.findall(r">([^<]+)</span>", axis) == ticks


def test_the_matmuls_with_most_time_have_bars():
    rows = [_row(f"m{'ab'[i % 2]}.{'x' * (i + 1)}", 2, 1, i / 528) for i in range(33)]
    page = _page(*rows, _row("unknown", 1, 1, None, speedup=None))
    assert len(_bars(page)) == 30 and "share a bar. 3 more, with less time," in page
    assert f"{'x' * 33} <small>" in page and ">ma.x <small>" not in page
    assert "Speedup of each matmul" not in _page(_row("unknown", 1, 1, None, speedup=None))
    assert "more, with less time" not in _page(*rows[:30])


def _cells(page: str) -> list[list[tuple[str, str]]]:
    """Of each row of both tables: what it is sorted by, and what it says."""
    rows = re.findall(r"<tr data-float8.*?</tr>", page)
    return [re.findall(r'<td(?: class="[^"]*")?(?: data-key="(.*?)")?>(.*?)</td>', row) for row in rows]


def test_the_table_is_sorted_by_numbers():
    page = _page(
        *UP, _row("head", None, None, None, m="s7", reason="size known only at run time", converted=False)
    )
    folded = _cells(page)
    assert folded[0] == [
        ("", "layers.*.up <b>x2</b>"),
        ("", "output"),
        (str(64 * 32 * 16), "64 x 32 x 16"),
        ("", "yes"),
        ("2.0000", "2.00x"),
        ("0.006000000", "6 ms"),
        ("0.750000", "75.0%"),
        ("", ""),
    ]
    assert folded[1] == [
        ("", "head"),
        ("", "output"),
        (str(32 * 16), "s7 x 32 x 16"),
        ("", "no"),
        ("0.0000", ""),
        ("0.000000000", ""),
        ("0.000000", ""),
        ("", "size known only at run time"),
    ]
    assert [cells[0][1] for cells in folded[2:]] == ["layers.0.up", "layers.1.up", "head"]
    assert re.findall(r'data-float8="(\w+)" data-count="(\d)"', page) == [
        ("yes", "2"),
        ("no", "1"),
        *[("yes", "1")] * 2,
        ("no", "1"),
    ]
    assert re.findall(r"<th[^>]*>", page)[-8:] == [
        f'<th scope="col" aria-sort="none"{more}>'
        for more in (*[" class=l"] * 2, " data-numeric", " class=l", *[" data-numeric"] * 3, " class=l")
    ]
    assert "Every matmul" not in _page()


def _gather(fqn: str, moved: bool, detail: str = "") -> CollectiveDecision:
    reason = "read by a float8 matmul" if moved else "no float8 matmul reads it"
    return CollectiveDecision(fqn, (96, "s1"), "bfloat16", 4, False, moved, reason, detail)


def _graph(*gathers: CollectiveDecision, **more: Any) -> GraphReport:
    return GraphReport("tensorwise", gathers=list(gathers), **more)


def test_gathers_of_all_graphs_equal_ones_in_a_row():
    graphs = [
        _graph(_gather("layers.0.up", True), _gather("", False, "<2 bytes>")),
        _graph(_gather("layers.1.up", True)),
    ]
    (table,) = re.findall('id="gathers".*?<tbody>(.*?)</tbody>', _page(HEAD, graphs=graphs))
    rows = [re.findall("<td class=l>(.*?)</td>", row) for row in table.split("</tr>")[:-1]]
    assert rows == [
        ["layers.*.up x2", "96 x s1", "bfloat16", "4", "yes", "read by a float8 matmul"],
        ["(no module)", "96 x s1", "bfloat16", "4", "-", "no float8 matmul reads it: &lt;2 bytes&gt;"],
    ]
    text = io.StringIO()
    _explanation(HEAD, graphs=graphs).print(text)
    assert "layers.*.up x2  96 x s1  bfloat16  4      yes     read by a float8 matmul" in text.getvalue()
    assert "gathers" not in _page(HEAD, graphs=[_graph()])


def _communication(**more: Any) -> Communication:
    """Of one bfloat16 gather of which half is float8, and gradients that stay as they are."""
    gathered = [
        Sent("all_gather", "weights", d, 1, n, n) for d, n in (("bfloat16", 4000), ("float8_e4m3fn", 2000))
    ]
    reduced = Sent("reduce_scatter", "gradients", "bfloat16", 1, 3000, 3000)
    sides = {"high": (gathered[0], reduced), "float8": (gathered[1], reduced)}
    figures = {"training": True, "interconnect": "h100", "high_seconds": 2e-3, "float8_seconds": 1e-3}
    return Communication(4, 1, "tensorwise", "auto", **{**sides, **figures, "gathers": (), **more})


def test_the_wire_in_rows():
    page = _page(HEAD, communication=_communication())
    assert _cards(page)["a rank sends, FSDP2 on 4"] == "5 kB from 7 kB"
    (table,) = re.findall('id="wire".*?<tbody>(.*?)</tbody>', page)
    cells = [re.findall("<td[^>]*>(?:<b>)?([^<]*)", row) for row in table.split("</tr>")[:-1]]
    assert [row[:5] for row in cells] == [
        ["all_gather", "bfloat16", "weights", "4 kB", "-"],
        ["all_gather", "float8_e4m3fn", "weights", "-", "2 kB"],
        ["reduce_scatter", "bfloat16", "gradients", "3 kB", "3 kB"],
        ["all", "", "", "7 kB", "5 kB"],
        ["predicted time", "", "", "2 ms", "1 ms"],
    ]
    widths = re.findall(r"width:([\d.]+)%;height:7px;margin:2px 0;background:var\(--(\w+)\)", table)
    assert widths == [
        (width, colour)
        for pair in (("100.00", "0.00"), ("0.00", "50.00"), ("75.00", "75.00"))
        for width, colour in zip(pair, ("rest", "yes"), strict=True)
    ]
    unknown = _communication(interconnect="", high_seconds=None, float8_seconds=None)
    assert "predicted time" not in _page(HEAD, communication=unknown)


@pytest.mark.parametrize(
    ("more", "title"),
    [
        ({}, "On the wire under FSDP2, a step, each rank of 4"),
        ({"training": False}, "On the wire under FSDP2, a forward, each rank of 4"),
        ({"fsdp": 1}, "On the wire in the graphs, a step, each rank"),
    ],
)
def test_whose_wire_it_is(more: dict[str, Any], title: str):
    assert wire_title(dataclasses.replace(_communication(), **more)) == title


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"interconnect": ""}, set()),
        ({}, {"line rate of h100 nodes"}),
        ({"doubled": True}, {"line rate of h100 nodes", "sends two float8 copies"}),
        ({"tp": 2}, {"line rate of h100 nodes", "parallelize= says"}),
        ({"tp": 2, "graphs_counted": True}, {"line rate of h100 nodes"}),
    ],
)
def test_what_the_figures_of_the_wire_mean(more: dict[str, Any], said: set[str]):
    note = wire_note(dataclasses.replace(_communication(), **more))
    known = {"line rate of h100 nodes", "sends two float8 copies", "parallelize= says", "gathered in float8"}
    assert {each for each in known if each in note} == said


def _totals(*rows: Row, **more: Any) -> dict[str, str]:
    return dict(totals(_explanation(*rows, **more)))


def test_what_is_said_under_the_table():
    graphs = [_graph()]
    assert _totals(*UP, HEAD, graphs=[_graph(decisions=[DECISION] * 2)]) == {
        "All matmuls on h100": "predicted 8 ms as they are, 5 ms with float8 and its casts: 1.60x"
    }
    sizes = {"saved_bytes_high": 2000, "saved_bytes_float8": 1500}
    sizes |= {"communicated_bytes_high": 3000, "communicated_bytes": 2500}
    said = _totals(HEAD, graphs=graphs * 2, training=True, **sizes)
    assert said["Saved for backward"] == "2 kB as it is, 1.5 kB with float8"
    assert said["Communicated"] == "3 kB as it is, 2.5 kB with float8"
    assert said["Graphs"] == "2; the graph breaks between them"
    assert "Graphs" not in _totals(HEAD, graphs=graphs)
    assert _totals()["Graphs"].startswith("none: Dynamo traced nothing")


def test_the_line_counts_what_is_left_by_its_reason():
    rows = [*UP, HEAD, HEAD, dataclasses.replace(HEAD, reason="too small")]
    e = _explanation(*rows, graphs=[_graph(decisions=[DECISION] * 2)])
    assert e.line() == "2 of 5 matmuls of Mlp in float8 (tensorwise) on h100; 2 filtered, 1 too small"


def test_what_merging_gains_is_of_what_is_merged():
    """The others' seconds are none; weight gradients count by the layer."""
    merges = [
        MergeDecision(tuple("qkv"), True, "merged", "", ("output",), ("grad_weight",), 3e-3, 2e-3),
        MergeDecision(tuple("ab"), False, "would be no faster", separate_seconds=1.0, merged_seconds=2.0),
    ]
    graph = _graph(decisions=[DECISION] * 3, merges=merges)
    e = _explanation(*(_row(name, 2, 1, 0.3) for name in "qkv"), graphs=[graph])
    assert dict(totals(e))["Merged"] == (
        "3 matmuls run as 1 float8 gemm, and 3 weight gradients in high precision are merged too; those "
        "concerned are predicted to take 2 ms instead of 3 ms, casts not counted"
    )
    assert _cards(e.to_html())["float8 gemms, after merging"] == "1 from 3"
    assert e.line() == "3 of 3 matmuls of Mlp in float8 (tensorwise) on h100, merged into 1 gemm"
    graph.merges = [dataclasses.replace(merges[0], layers=tuple("qk"))]
    assert e.line().endswith(" on h100, merged into 2 gemms")
    graph.merges = [dataclasses.replace(merges[0], kept_roles=())]
    assert "weight gradients" not in dict(totals(e))["Merged"]


@pytest.mark.parametrize(
    ("converted", "reason", "detail", "merge", "why"),
    [
        (True, "", "pays: 1.20x", "", ""),
        (True, "", "pays: 1.20x; others make casts it needs", "", "others make casts it needs"),
        (True, "", "loses: 0.90x", "merged with k", "merged with k"),
        (True, "", "x; pays: 1.20x", "not merged: y", "x; pays: 1.20x; not merged: y"),
        (False, "too small", "too small: float8 would be 0.9x", "", "too small: float8 would be 0.9x"),
        (False, "filtered", "filter_fqns has 'q'", "", "filtered: filter_fqns has 'q'"),
        (False, "filtered", "", "", "filtered"),
    ],
)
def test_why_says_nothing_twice(converted: bool, reason: str, detail: str, merge: str, why: str):
    row = dataclasses.replace(HEAD, converted=converted, reason=reason, detail=detail, merge=merge)
    assert Group("head", (row,)).why == why


def test_a_module_has_a_line_for_each_role_in_their_order():
    """Its name is in the first; what differs by layer has lines of its own."""
    roles = ("grad_weight", "output", "grad_input")
    rows = [dataclasses.replace(HEAD, fqn=f"l.{i}.w", role=role) for i in range(2) for role in roles]
    rows[-1] = dataclasses.replace(rows[-1], k=48)
    text = io.StringIO()
    _explanation(*rows).print(text)
    lines = text.getvalue().splitlines()[2:6]
    assert [line.split("64 x")[0].split() for line in lines] == [
        ["l.*.w", "x2", "output"],
        ["l.0.w", "grad_input"],
        ["l.1.w", "grad_input"],
        ["l.*.w", "x2", "grad_weight"],
    ]
    assert "  64 x 32 x 16    -       0.80x  50.0%  filtered" in lines[0]
    expanded = io.StringIO()
    _explanation(*rows[:3]).print(expanded, expand=True)
    assert [line.split("64 x")[0].split() for line in expanded.getvalue().splitlines()[2:5]] == [
        ["l.0.w", "output"],
        ["grad_input"],
        ["grad_weight"],
    ]


@pytest.mark.parametrize(
    ("layers", "label"),
    [((0,), "l.0.w"), ((0, 1), "l.0-1.w"), ((10, 2, 9), "l.2,9-10.w"), ((0, 2, 4), "l.0,2,4.w")],
)
def test_layers_are_named_by_ranges(layers: tuple[int, ...], label: str):
    rows = [dataclasses.replace(HEAD, fqn=f"l.{i}.w", k=48 if i in layers else 32) for i in range(12)]
    groups = {group.first.k: group.label for group in grouped(rows)}
    assert groups[48] == label
