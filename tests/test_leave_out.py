"""What each pass spares, counted with it left out: README's table, and that leaving out does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from f8fx import passes

pytest.importorskip("triton")
leave_out = pytest.importorskip("benchmarks.leave_out")

_README = Path(__file__).parents[1] / "README.md"


def published():
    """README's table: what is left out, and a cell of figures for each recipe."""
    cell = r"[\d.]+, \d+, \d+"
    rows = re.findall(rf"^\| (.+?) \| ({cell}) \| ({cell}) \|$", _README.read_text(), re.MULTILINE)
    return {name.strip("*`"): dict(zip(leave_out.RECIPES, figures, strict=True)) for name, *figures in rows}


def test_names_are_those_of_passes():
    """README leaves out what changes nothing, and names it."""
    known = {cls.__name__.lower() for cls in vars(passes).values() if isinstance(cls, type)}
    options = {leave_out.NOTHING, "Inductor's options"}
    assert {name.replace("_", "") for name in leave_out.LEFT_OUT.keys() - options} <= known
    assert leave_out.LEFT_OUT.keys() - published().keys() == {"concatenations", "amaxes", "rounding"}


@pytest.mark.long
def test_a_pass_that_is_left_out_does_nothing():
    """And nothing stays left out."""
    rows = leave_out.measure("mlp", 256, "rowwise", ["nothing", "one_read"])
    assert rows["one_read"]["est_bytes"] > rows["nothing"]["est_bytes"]
    assert leave_out.measure("mlp", 256, "rowwise", ["nothing"])["nothing"] == rows["nothing"]
    assert "one_read" in leave_out.grid("mlp", 256, {"rowwise": rows}).markdown()


@pytest.mark.long
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="what is fused is a release's own")
@pytest.mark.parametrize("recipe", leave_out.RECIPES)
@pytest.mark.parametrize("name", leave_out.LEFT_OUT)
def test_what_readme_says(name, recipe):
    found = leave_out.cells(leave_out.measure("llama", 8192, recipe, [name])[name])
    rows = published()
    assert ", ".join(found) == rows.get(name, rows["nothing"])[recipe]
