"""``explain``: tables, pages and messages."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import f8fx
from f8fx.explanation import ExplainError, Explanation, Row
from f8fx.explanation.show import bytes_text, grouped, seconds_text
from f8fx.report import Decision, GraphReport
from f8fx.show import print_report
from tests.explained import Mlp, meta_input, meta_mlp, tiny_decoder
from tests.helpers import compiled
from tests.long import seldom


def test_a_graph_that_runs_more_than_once_is_told_of(capsys: pytest.CaptureFixture[str]):
    """Equal blocks that a break separates share it, so figures are not those of the model."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            torch._dynamo.graph_break()
            return x

    for depth in (1, 5):
        model = nn.Sequential(*(Block() for _ in range(depth))).bfloat16()
        x = torch.zeros(32, 64, dtype=torch.bfloat16, requires_grad=True)
        e = f8fx.explain(model, x, select="all")
        assert e.most_runs == depth and Explanation.from_dict(json.loads(e.to_json())) == e
        e.print()
        said = "Counted once: a graph that runs 5 times" in capsys.readouterr().out
        assert said == ("Counted once" in e.to_html()) == (depth > 1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_narrow_terminal_has_names_and_reasons(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    rows = [Row(0, "up_proj", "output", 8192, 4096, 14336, False, "too small", "", 0.9, 1e-3, 1e-3, 1.0)]
    terminal = Terminal()
    Explanation("Mlp", "h100", "tensorwise", "auto", False, [], rows).print(terminal)
    table = terminal.getvalue()
    assert all(text in table for text in ("up_proj", "8192 x 4096 x 14336", "0.90x", "100.0%", "too small"))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (1_152_000_000, "1.15 GB"),
        (2_388_797_494_272, "2.39 TB"),
        (10**15, "1,000 TB"),
        (1_234_567 * 10**9, "1,230 TB"),
    ],
)
def test_bytes_are_three_digits_of_the_largest_unit(count: int, text: str):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (1e-9, "0.001 us"),
        (999.4e-6, "999 us"),
        (999.6e-6, "1 ms"),
        (0.0123456, "12.3 ms"),
        (0.9996, "1 s"),
        (1234.5, "1,230 s"),
    ],
)
def test_seconds_are_three_digits_of_the_largest_unit(seconds: float, text: str):
    assert seconds_text(seconds) == text


def test_equal_layers_share_a_line_and_add_up():
    row = Row(0, "layers.0.up", "output", 64, 64, 64, False, "too small", "", 0.9, 1e-3, 1e-3, 0.5)
    (group,) = grouped([row, dataclasses.replace(row, fqn="layers.1.up")])
    assert group.label == "layers.*.up"
    assert group.share == 1.0 and group.high_seconds == 2e-3


def test_unknown_options_name_the_nearest():
    with pytest.raises(f8fx.OptionError, match="did you mean 'h100'"):
        f8fx.explain(Mlp(16, 16), torch.ones(4, 16), target="h10")
    with pytest.raises(f8fx.OptionError, match="did you mean 'recipe'"):
        f8fx.explain(Mlp(16, 16), torch.ones(4, 16), recip="rowwise")


def test_what_cannot_be_traced_says_why(capfd: pytest.CaptureFixture[str]):
    """In a line of the error, and nowhere else."""
    with pytest.raises(ExplainError) as raised:
        f8fx.explain(Mlp(16, 16), torch.ones(4, 7))
    assert re.fullmatch(
        r"could not trace Mlp: RuntimeError: .*\[4, 7\] X \[16, 16\].* \(at explained.py:\d+: return self.down.*\)",
        str(raised.value),
    ), raised.value
    assert capfd.readouterr().err == ""

    def looks_at_values(x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else -x

    with pytest.raises(ExplainError, match="depend on values"):
        f8fx.explain(looks_at_values, torch.ones(4))


def test_json_round_trip():
    model, tokens = tiny_decoder()
    e = f8fx.explain(model, tokens, target="b200", recipe="rowwise")
    again = Explanation.from_dict(json.loads(e.to_json()))
    assert again == e and again.to_dict() == e.to_dict()
    assert e.to_dict()["totals"]["gemm_speedup"] == e.gemm_speedup


def test_printing_folds_equal_layers():
    model, tokens = tiny_decoder()
    e = f8fx.explain(model, tokens)
    folded, expanded = io.StringIO(), io.StringIO()
    e.print(folded)
    e.print(expanded, expand=True)
    assert "blocks.*.ffn.up_proj x2" in folded.getvalue() and "Saved for backward" in folded.getvalue()
    assert "blocks.1.ffn.up_proj" in expanded.getvalue()


def test_layers_that_differ_are_named():
    def row(layer: int, converted: bool) -> Row:
        return Row(
            0, f"layers.{layer}.w", "output", 16, 16, 16, converted, "filtered", "", None, 1e-6, 1e-6, 0.1
        )

    labels = [g.label for g in grouped(row(layer, layer not in (0, 5)) for layer in range(8))]
    assert labels == ["layers.0,5.w", "layers.1-4,6-7.w"]


@pytest.mark.parametrize("target", ["h100", *seldom("a100")])
def test_the_page_holds_everything_and_loads_nothing(target: str, tmp_path: Path):
    model, tokens = tiny_decoder()
    e = f8fx.explain(model, tokens, target=target)
    e.save_html(tmp_path / "explained.html")
    page = (tmp_path / "explained.html").read_text()
    assert {row.fqn for row in e.rows} <= set(re.findall(r"[\w.]+", page))
    assert all(reason in page for reason in e.reasons)
    assert not re.search(r"https?:|\b(src|href)\s*=|@import|url\(", page)
    assert ("Nothing would run in float8" in page) == (e.converted == 0)


def test_names_are_escaped():
    e = f8fx.explain(meta_mlp(), meta_input(64, 2048))
    e.model = "<script>alert(1)</script>"
    assert "<script>alert" not in e.to_html()


def test_names_and_filters_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]):
    """Not read as rich's markup: a tag would vanish, and a closing one raise."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("[inst]", "[/inst]", ":tada:")})

        def forward(self, x: Tensor) -> Tensor:
            for head in self.heads.values():
                x = head(x)
            return x

    model, x, shown = Heads().bfloat16(), torch.randn(32, 64, dtype=torch.bfloat16), io.StringIO()
    e = f8fx.explain(model, x, filter_fqns=["[a-z]+_proj", "q[/]"], select="all")
    e.print(shown)
    for name in (
        "heads.[inst",
        "heads.[/inst",
        ":tada:",
        "contains '[a-z]+_proj'",
        "contains 'q[/]'",
    ):
        assert name in shown.getvalue()
    assert " yes " in shown.getvalue()
    compiled(model, select="all", executor="eager", verbose=True)(x)
    printed = capsys.readouterr().err
    assert "heads.[inst" in printed and "heads.[/inst" in printed
    decision = Decision("head", "output", 16, 16, 16, False, "filtered", "by [a-z]+")
    print_report(GraphReport("tensorwise", cached=True, decisions=[decision]))
    printed = capsys.readouterr().err
    assert "[cached]" in printed and "[a-z]+" in printed


def test_a_report_in_a_file_has_lines_of_its_own_length(capsys: pytest.CaptureFixture[str]):
    name = "model.layers.0.attention.query_projection"
    decision = Decision(
        name, "output", 4096, 4096, 4096, False, "filtered", "filter_fqns has 'query_projection'"
    )
    print_report(GraphReport("tensorwise", decisions=[decision]))
    (line,) = (line for line in capsys.readouterr().err.splitlines() if name in line)
    assert "4096 x 4096 x 4096" in line and "filter_fqns has 'query_projection'" in line


def test_layers_that_two_filters_leave_are_shown_with_their_own(capsys: pytest.CaptureFixture[str]):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).bfloat16()
    f8fx.explain(model, meta_input(32, 64), select="all", filter_fqns=["0", "2"]).print()
    lines = capsys.readouterr().out.splitlines()
    for name in "02":
        assert any(line.startswith(f"{name} ") and f"has '{name}'" in line for line in lines)


def test_keys_that_are_digits_and_no_numbers(capsys: pytest.CaptureFixture[str]):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e = nn.ModuleDict({"²": nn.Linear(64, 64), "³": nn.Linear(64, 64), "4": nn.Linear(64, 128)})

        def forward(self, x: Tensor) -> list[Tensor]:
            return [layer(x) for layer in self.e.values()]

    e = f8fx.explain(Net().bfloat16(), meta_input(32, 64), select="all", merge="never")
    e.print()
    assert "e.²" in capsys.readouterr().out and "e.²" in e.to_html()


def test_filters_that_match_nothing_are_named():
    shown = io.StringIO()
    e = f8fx.explain(meta_mlp(), meta_input(64, 2048), filter_fqns=["up", "dwon"], only_fqns=["gate"])
    assert e.filters_without_match == ["'dwon'; did you mean 'down'?", "'gate'"]
    e.print(shown)
    assert "no matmul's name contains 'dwon'; did you mean 'down'?" in shown.getvalue()
    assert "did you mean &#x27;down&#x27;?</p>" in e.to_html()
    assert "contains &#x27;gate&#x27;.</p>" in e.to_html()
    assert Explanation.from_dict(json.loads(e.to_json())) == e


def test_what_to_do_about_float32_is_said():
    shown = io.StringIO()
    f8fx.explain(nn.Linear(64, 64), torch.zeros(64, 64)).print(shown)
    assert "In float32: model.bfloat16() or torch.autocast" in shown.getvalue()
