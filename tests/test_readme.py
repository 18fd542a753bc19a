"""What README lists is what there is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import f8fx
import f8fx.fsdp

README = (Path(__file__).parents[1] / "README.md").read_text()


def section(title: str) -> str:
    """The text between a heading and the next one that is no smaller."""
    level = title.split(" ")[0]
    (text,) = re.findall(
        rf"^{re.escape(title)}$(.*?)(?=^#{{2,{len(level)}}} |\Z)", README, re.MULTILINE | re.DOTALL
    )
    return text


def first_column(text: str) -> list[str]:
    """The names in code in the first column of tables."""
    return [
        name
        for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    ]


def test_every_option_has_a_row():
    names = [field.name for field in dataclasses.fields(f8fx.Options)]
    assert sorted(first_column(section("## Options"))) == sorted(names)


def test_every_public_name_is_listed():
    text = section("## Python interface")
    assert set(re.findall(r"`(\w+)`", text)) >= {*f8fx.__all__, *f8fx.fsdp.__all__} - {"__version__"}
    assert set(first_column(text)) <= set(f8fx.__all__)


def test_links_lead_to_headings():
    headings = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = set(re.findall(r"\]\(#(.*?)\)", README))
    assert len(links) > 10
    assert links <= anchors, links - anchors


def test_files_that_are_named_exist():
    root = Path(__file__).parents[1]
    named = re.findall(r"`((?:f8fx|passes|kernels|tests|benchmarks)/[\w/]+\.py)`", README)
    named += re.findall(r"\]\((benchmarks/.*?)\)", README)
    assert len(named) > 3
    assert all((root / name).exists() for name in named)
