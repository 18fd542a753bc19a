"""Explanations as text for a terminal, and the grouping of equal layers that the page shares."""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from f8fx.recipe import ROLES
from f8fx.show import FILE_WIDTH

if TYPE_CHECKING:
    from f8fx.communication import Communication

    from .result import Explanation, Row

#: Fewer leave none for names and reasons; a narrower terminal breaks lines by itself.
_LEAST_WIDTH = 80


@dataclass(frozen=True)
class Group:
    """Matmuls that are the same but for the layer they are in.

    Attributes:
        label: their common name, with ``*`` for the numbers of layers.
        rows: the matmuls, at least one.
    """

    label: str
    rows: tuple[Row, ...]

    @property
    def first(self) -> Row:
        return self.rows[0]

    @property
    def share(self) -> float | None:
        """Of the seconds of all matmuls as they are."""
        shares = [row.share for row in self.rows if row.share is not None]
        return sum(shares) if shares else None

    @property
    def high_seconds(self) -> float:
        return sum(row.high_seconds or 0.0 for row in self.rows)

    @property
    def why(self) -> str:
        """Reason and numbers, "" where the other columns say it all."""
        row = self.first
        if row.converted:
            detail = re.sub(r"^(pays|loses): [\d.]+x(; )?", "", row.detail)
        elif row.detail.startswith(row.reason):
            detail = row.detail
        else:
            detail = f"{row.reason}: {row.detail}" if row.detail else row.reason
        return "; ".join(text for text in (detail, row.merge) if text)


def pattern_of(fqn: str) -> str:
    """The name with ``*`` for each number: equal for the same module of all layers."""
    return ".".join("*" if part.isdecimal() else part for part in fqn.split("."))


def grouped(rows: Iterable[Row], expand: bool = False) -> list[Group]:
    """Rows by module in graph order, and within a module by role; equal layers are one group.

    Args:
        expand: a group for each row.
    """
    modules: dict[str, dict[tuple[object, ...], list[Row]]] = {}
    for number, row in enumerate(rows):
        name = row.fqn if expand else pattern_of(row.fqn)
        what = (
            row.role,
            row.m,
            row.k,
            row.n,
            row.converted,
            row.reason,
            row.detail if row.reason == "filtered" else "",  # by which filter
            row.merge,
            f"{row.speedup or 0:.2f}",
        )
        alone = (number,) if expand else ()
        modules.setdefault(name, defaultdict(list))[what + alone].append(row)
    result: list[Group] = []
    for name, kinds in modules.items():
        ordered = sorted(kinds.values(), key=lambda rows: ROLES.index(rows[0].role))
        for members in ordered:
            split = sum(other[0].role == members[0].role for other in ordered) > 1
            label = name if expand else _label([row.fqn for row in members], split)
            result.append(Group(label or "(no module)", tuple(members)))
    return result


def _label(names: Sequence[str], split: bool) -> str:
    """``layers.*.attn.wq``; where not all layers are alike (`split`), which: ``layers.0-3,7.attn.wq``."""
    columns = zip(*(name.split(".") for name in names), strict=True)
    parts: list[str] = []
    for column in columns:
        distinct = list(dict.fromkeys(column))
        if len(distinct) == 1:
            parts.append(distinct[0])
        else:
            parts.append(_ranges(sorted(map(int, distinct))) if split else "*")
    return ".".join(parts)


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def bytes_text(count: int) -> str:
    """``1.15 GB``; decimal units."""
    return _in_units(count, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)))


def seconds_text(seconds: float) -> str:
    """``12.3 ms``."""
    return _in_units(seconds, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)))


def _in_units(value: float, units: Sequence[tuple[str, float]]) -> str:
    """A number of three digits in the largest unit of which there is one, else in the smallest."""
    rounded = float(f"{value:.3g}")  # first, since 999.9 kB are 1 MB
    unit, size = next((each for each in units if rounded >= each[1]), units[-1])
    number = rounded / size
    return f"{number:.3g} {unit}" if number < 1000 else f"{number:,.0f} {unit}"


def print_explanation(explanation: Explanation, file: TextIO | None = None, expand: bool = False) -> None:
    """See :meth:`f8fx.explanation.Explanation.print`."""
    file = file or sys.stdout
    plain = functools.partial(Console, file=file, highlight=False, markup=False, emoji=False)
    console = plain()
    console = plain(width=max(console.width, _LEAST_WIDTH) if console.is_terminal else FILE_WIDTH)
    console.print(explanation.line(), style="bold")
    console.print(_table(explanation, expand))
    for label, text in totals(explanation):
        console.print(Text.assemble((label, "bold"), f": {text}"))
    if gathers := grouped_gathers(explanation):
        console.print()
        console.print(_gathers_table(gathers))
    if explanation.communication is not None:
        console.print()
        console.print(_wire_table(explanation.communication))
        console.print(wire_note(explanation.communication), style="dim")


GATHER_COLUMNS = ("gathered in", "shape", "dtype", "ranks", "float8", "why")


def grouped_gathers(explanation: Explanation) -> list[tuple[str, ...]]:
    """The text of :data:`GATHER_COLUMNS` for the all-gathers of the graphs; equal layers are one row."""
    found: Counter[tuple[str, ...]] = Counter()
    for g in (gather for graph in explanation.graphs for gather in graph.gathers):
        why = f"{g.reason}: {g.detail}" if g.detail else g.reason
        name = pattern_of(g.fqn) or "(no module)"
        shape = " x ".join(map(str, g.shape))
        found[name, shape, g.dtype, str(g.group_size), "yes" if g.moved else "-", why] += 1
    return [(f"{row[0]} x{count}" if count > 1 else row[0], *row[1:]) for row, count in found.items()]


def _gathers_table(rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False, title="All-gathers in the graph", title_justify="left")
    for column in GATHER_COLUMNS:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _wire_table(c: Communication) -> Table:
    table = Table(box=None, pad_edge=False, title=wire_title(c), title_justify="left")
    table.add_column("collective", no_wrap=True)
    for column in ("dtype", "of"):
        table.add_column(column, no_wrap=True)
    for column in ("as it is", "with float8"):
        table.add_column(column, justify="right", no_wrap=True)
    for op, what, dtype, high, float8 in c.rows:
        table.add_row(op, dtype, what, wire_text(high), wire_text(float8))
    table.add_row("all", "", "", wire_text(c.high_bytes), wire_text(c.float8_bytes), style="bold")
    if c.high_seconds is not None and c.float8_seconds is not None:
        table.add_row("predicted time", "", "", seconds_text(c.high_seconds), seconds_text(c.float8_seconds))
    return table


def wire_title(c: Communication) -> str:
    """What the table of the collectives is of."""
    what = "a step" if c.training else "a forward"
    if c.world.size == 1:
        return f"On the wire in the graphs, {what}, each rank"
    return f"On the wire under FSDP2, {what}, each rank of {c.world}"


def wire_text(count: int) -> str:
    """Bytes, "-" for none."""
    return bytes_text(count) if count else "-"


def wire_note(c: Communication) -> str:
    """What the figures mean and how they came about."""
    text = f"{c.converted} of {len(c.gathers)} matrices gathered in float8. " if c.gathers else ""
    if c.converted:  # by FSDP2's hooks, of which the graphs that were traced know nothing
        text += "The table of matmuls is of the model before it is sharded: weights that arrive in float8 are not cast again, and their layers not merged. "
    text += (
        "What a rank sends, and receives, by the ring "
        "formula: (N - 1) / N of a gathered or scattered tensor, twice that of a reduced one, all of a broadcast one."
    )
    if c.interconnect:
        text += f" Time at line rate of {c.interconnect} nodes of 8, nothing overlapped."
    if c.doubled:
        text += ' This recipe sends two float8 copies of a weight; copies="auto" halves that.'
    if c.tp > 1 and not c.graphs_counted:
        text += (
            " What tensor parallelism itself sends is not in it; parallelize= says how the model is split."
        )
    return text


def _table(explanation: Explanation, expand: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("module", overflow="fold")
    table.add_column("gemm", no_wrap=True)
    table.add_column("M x K x N", justify="right", no_wrap=True)
    table.add_column("float8", justify="center", no_wrap=True)
    for column in ("speedup", "time"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold", style="dim")
    previous = None
    for group in grouped(explanation.rows, expand):
        row = group.first
        label = f"{group.label} x{len(group.rows)}" if len(group.rows) > 1 else group.label
        table.add_row(
            "" if label == previous else label,
            row.role,
            row.size,
            Text("yes", "green") if row.converted else "-",
            "" if row.speedup is None else f"{row.speedup:.2f}x",
            "" if group.share is None else f"{group.share:.1%}",
            group.why,
        )
        previous = label
    return table


def totals(explanation: Explanation) -> list[tuple[str, str]]:
    """What to say under the table: label and text."""
    e = explanation
    result = [
        (
            f"All matmuls on {e.target}",
            f"predicted {seconds_text(e.high_seconds)} as they are, {seconds_text(e.float8_seconds)} "
            f"with float8 and its casts: {e.gemm_speedup:.2f}x",
        )
    ]
    if e.gemms < e.converted:
        merged = [merge for merge in e.merges if merge.merged]
        before, after = (
            sum(getattr(merge, name) or 0.0 for merge in merged)
            for name in ("separate_seconds", "merged_seconds")
        )
        kept = sum(len(merge.layers) for merge in merged if merge.kept_roles)
        beside = f", and {kept} weight gradients in high precision are merged too" if kept else ""
        result.append(
            (
                "Merged",
                f"{e.converted} matmuls run as {e.gemms} float8 gemm{'s' * (e.gemms > 1)}{beside}; those concerned are predicted to take "
                f"{seconds_text(after)} instead of {seconds_text(before)}, casts not counted",
            )
        )
    if e.training:
        result.append(
            (
                "Saved for backward",
                f"{bytes_text(e.saved_bytes_high)} as it is, {bytes_text(e.saved_bytes_float8)} with float8",
            )
        )
    if e.communicated_bytes_high:
        result.append(
            (
                "Communicated",
                f"{bytes_text(e.communicated_bytes_high)} as it is, "
                f"{bytes_text(e.communicated_bytes)} with float8",
            )
        )
    result += notes(e)
    if not e.graphs:
        result.append(("Graphs", "none: Dynamo traced nothing of it, so nothing is known of its matmuls"))
    elif len(e.graphs) > 1:
        result.append(("Graphs", f"{len(e.graphs)}; the graph breaks between them"))
    return result


def notes(explanation: Explanation) -> list[tuple[str, str]]:
    """What was perhaps not meant: label and text."""
    result = []
    if explanation.most_runs > 1:
        result.append(("Counted once", f"a graph that runs {explanation.most_runs} times"))
    if "float32 matmul" in explanation.reasons:
        text = "model.bfloat16() or torch.autocast makes bf16 of it; or list torch.float32 in the recipe's convert_dtypes"
        result.append(("In float32", text))
    for each in explanation.filters_without_match:
        result.append(("Filter without a match", f"no matmul's name contains {each}"))
    return result
