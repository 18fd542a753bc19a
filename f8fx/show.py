"""Reports as text for a terminal."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .report import GraphReport

#: Columns where output is no terminal and so has no width.
FILE_WIDTH = 140


def print_report(report: GraphReport, file: TextIO | None = None) -> None:
    """Prints every decision of one graph as a table, to stderr by default."""
    console = Console(file=file or sys.stderr, markup=False, emoji=False)  # names are the user's
    if not console.is_terminal:
        console.width = FILE_WIDTH
    table = Table(title=Text(report.line(), "table.title"), title_justify="left", expand=False)
    for column in ("module", "gemm", "M x K x N", "float8", "why"):
        table.add_column(column, overflow="fold")
    for d in report.decisions:
        why = f"{d.reason} ({d.detail})" if d.detail else d.reason
        why = f"{why}; {d.merge}" if d.merge else why
        table.add_row(d.fqn, d.role, f"{d.m} x {d.k} x {d.n}", "yes" if d.converted else "-", why)
    console.print(table)
    if report.gathers:
        console.print(_gathers(report))


def _gathers(report: GraphReport) -> Table:
    table = Table(expand=False)
    for column in ("gathered in", "shape", "dtype", "ranks", "float8", "why"):
        table.add_column(column, overflow="fold")
    for g in report.gathers:
        why = f"{g.reason} ({g.detail})" if g.detail else g.reason
        shape = " x ".join(map(str, g.shape))
        table.add_row(g.fqn, shape, g.dtype, str(g.group_size), "yes" if g.moved else "-", why)
    return table
