"""Explanations as one HTML page, to look at rather than read.

Everything is in the file: it loads nothing, and without JavaScript only sorting and filtering are
lost. Charts are HTML boxes, not pictures: their text scales, wraps and is read aloud. Colours follow
the reader's light or dark setting; those of the modules are Okabe and Ito's, made for all eyes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from .show import (
    GATHER_COLUMNS,
    Group,
    bytes_text,
    grouped,
    grouped_gathers,
    notes,
    pattern_of,
    seconds_text,
    wire_note,
    wire_text,
    wire_title,
)
from .style import SCRIPT, STYLE

if TYPE_CHECKING:
    from .result import Explanation, Row

_COLOURS = 8  #: Modules with a colour of their own in the first chart; the rest is "others".
_SPEEDUPS = 30  #: Rows of the second chart.
_LABELLED = 0.085  #: Segments narrower than this part of the chart carry no text.


def page(explanation: Explanation) -> str:
    """The whole document."""
    e = explanation
    title = f"{e.model} in float8 on {e.target}"
    kind = "forward and backward" if e.training else "forward only"
    graphs = f", {len(e.graphs)} graphs" if len(e.graphs) != 1 else ""
    parts = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>f8fx explain: {escape(title)}</title>",
        f"<style>{STYLE}</style></head><body><main>",
        f"<header><h1>{escape(title)}</h1><p>Recipe <b>{escape(e.recipe)}</b>, "
        f"select <b>{escape(e.select)}</b>, {kind}{graphs}. "
        "Predicted by f8fx's cost model; nothing was run.</p></header>",
        _cards(e),
        _banner(e),
        *(f'<p class="banner">{escape(label)}: {escape(_sentence(text))}</p>' for label, text in notes(e)),
        _time_chart(e),
        _speedup_chart(e),
        _gathers(e),
        _wire(e),
        _table(e),
        f"</main><script>{SCRIPT}</script></body></html>\n",
    )
    return "\n".join(part for part in parts if part)


# -- totals ---------------------------------------------------------------------------------------


def _cards(e: Explanation) -> str:
    merged = e.gemms < e.converted
    cards = [
        (f"{e.gemm_speedup:.2f}x", "", "speedup of all matmuls together, casts included"),
        (f"{e.converted}", f" of {e.total}", "matmuls in float8"),
        *([(f"{e.gemms}", f" from {e.converted}", "float8 gemms, after merging")] if merged else []),
        _change(e.high_seconds, e.float8_seconds, seconds_text, "time in matmuls and casts"),
    ]
    if e.training:
        cards.append(_change(e.saved_bytes_high, e.saved_bytes_float8, bytes_text, "saved for backward"))
    if e.communicated_bytes_high:
        cards.append(
            _change(e.communicated_bytes_high, e.communicated_bytes, bytes_text, "in collectives, per device")
        )
    if (c := e.communication) is not None:
        cards.append(_change(c.high_bytes, c.float8_bytes, bytes_text, f"a rank sends, FSDP2 on {c.world}"))
    boxes = (
        f'<div class="card"><b>{escape(big)}<small>{escape(small)}</small></b>'
        f"<span>{escape(label)}</span></div>"
        for big, small, label in cards
    )
    return f'<section class="cards" aria-label="Totals">{"".join(boxes)}</section>'


def _change(before, after, text, label: str) -> tuple[str, str, str]:
    if before == after:
        return text(after), "", f"{label}, with and without float8"
    return text(after), f" from {text(before)}", label


def _banner(e: Explanation) -> str:
    if not e.total:
        return '<p class="banner">There are no matmuls in what was traced.</p>'
    if e.converted:
        return ""
    why = "; ".join(f"{reason} ({count})" for reason, count in e.reasons.items())
    return f'<p class="banner">Nothing would run in float8: {escape(why)}.</p>'


def _sentence(text: str) -> str:
    return text if text.endswith("?") else f"{text}."


# -- where time goes ------------------------------------------------------------------------------


@dataclass
class _Module:
    name: str
    colour: str
    high: float = 0.0
    float8: float = 0.0
    count: int = 0


def _modules(rows: Iterable[Row]) -> list[_Module]:
    """Matmul time by module, layers together, longest first; what has no colour is one."""
    found: dict[str, _Module] = {}
    for row in rows:
        if row.high_seconds is not None:
            name = pattern_of(row.fqn) or "(no module)"
            module = found.setdefault(name, _Module(name, ""))
            module.high += row.high_seconds
            module.float8 += row.float8_seconds or 0.0
            module.count += 1
    ranked = sorted(found.values(), key=lambda module: -module.high)
    named, others = ranked[:_COLOURS], ranked[_COLOURS:]
    for index, module in enumerate(named):
        module.colour = f"c{index}"
    if others:
        rest = _Module(f"{len(others)} others", "rest")
        for module in others:
            rest.high += module.high
            rest.float8 += module.float8
            rest.count += module.count
        named.append(rest)
    return named


def _time_chart(e: Explanation) -> str:
    modules = _modules(e.rows)
    if not modules:
        return ""
    longest = max(e.high_seconds, e.float8_seconds)
    bars = [
        ("as it is", e.high_seconds, [(module, module.high) for module in modules]),
        ("with float8", e.float8_seconds, [(module, module.float8) for module in modules]),
    ]
    drawn = "".join(
        f'<div class="name">{name}<small>{seconds_text(total)}</small></div>{_stack(parts, total, longest)}'
        for name, total, parts in bars
    )
    legend = "".join(
        f'<tr><td class="l fqn"><span class="swatch" style="background:var(--{module.colour})"></span>'
        f"{escape(module.name)}</td><td>{module.count}</td><td>{seconds_text(module.high)}</td>"
        f"<td>{seconds_text(module.float8)}</td><td>{module.high / (module.float8 or 1):.2f}x</td></tr>"
        for module in modules
    )
    return (
        '<section><h2>Where matmul time goes</h2><p class="note">Both bars have the same scale. '
        "A module's float8 time includes its share of the casts; matmuls that are left as they are "
        "count in both.</p>"
        f'<div class="bars" aria-hidden="true">{drawn}</div><div class="scroll"><table class="legend">'
        '<thead><tr><th class="l">module</th><th>matmuls</th><th>as it is</th><th>with float8</th>'
        f"<th>speedup</th></tr></thead><tbody>{legend}</tbody></table></div></section>"
    )


def _stack(parts: list[tuple[_Module, float]], total: float, longest: float) -> str:
    segments: list[str] = []
    for module, seconds in parts:
        share = seconds / longest
        tip = escape(f"{module.name}: {seconds_text(seconds)}, {seconds / total:.0%}")
        label = f"{escape(module.name.split('.')[-1])}<br>{seconds / total:.0%}" if share >= _LABELLED else ""
        segments.append(
            f'<div{"" if label else " class=thin"} title="{tip}" '
            f'style="width:{share:.4%};background:var(--{module.colour});color:var(--t{module.colour})">'
            f"{label}</div>"
        )
    return f'<div class="stack">{"".join(segments)}</div>'


# -- speedups -------------------------------------------------------------------------------------


def _speedup_chart(e: Explanation) -> str:
    groups = [group for group in grouped(e.rows) if group.first.speedup is not None]
    if not groups:
        return ""
    groups.sort(key=lambda group: -(group.share or 0.0))
    shown = groups[:_SPEEDUPS]
    high = max(1.1, *(group.first.speedup or 0.0 for group in shown)) * 1.02
    low = min(0.9, *(group.first.speedup or 0.0 for group in shown)) * 0.98
    step = next((step for step in (0.1, 0.25, 0.5) if high - low < 8 * step), 1.0)
    # from 1 outwards, so that 1 is hit exactly
    ticks = [1 + count * step for count in range(-int((1 - low) / step), int((high - 1) / step) + 1)]

    def place(speedup: float) -> float:
        return (speedup - low) / (high - low)

    lines = "".join(
        f'<i{" class=one" if tick == 1 else ""} style="left:{place(tick):.2%}"></i>' for tick in ticks
    )
    axis = "".join(f'<span style="left:{place(tick):.2%}">{tick:g}x</span>' for tick in ticks)
    largest = max(group.share or 0.0 for group in shown) or 1.0
    rows = "".join(_speedup_row(group, place, lines, largest) for group in shown)
    more = len(groups) - len(shown)
    note = f" {more} more, with less time, are in the table below." if more else ""
    return (
        '<section><h2>Speedup of each matmul</h2><p class="note">Longest first; the thicker a bar, '
        f"the more of the matmul time. Equal layers share a bar.{note}</p>"
        '<p class="key"><span><span class="swatch" style="background:var(--yes)"></span>in float8</span>'
        '<span><span class="swatch" style="background:var(--loss)"></span>in float8, though slower</span>'
        '<span><span class="swatch hollow"></span>left as it is: what float8 would give</span></p>'
        '<div class="speed" aria-hidden="true"><div></div>'
        f'<div class="track axis">{axis}</div>{rows}</div></section>'
    )


def _speedup_row(group: Group, place, lines: str, largest: float) -> str:
    row = group.first
    speedup = row.speedup or 0.0
    left, right = sorted((place(1.0), place(speedup)))
    kind = " skip" if not row.converted else " lose" if speedup < 1 else ""
    height = 5 + round(13 * (group.share or 0.0) / largest)
    times = f" x{len(group.rows)}" if len(group.rows) > 1 else ""
    tip = escape(f"{group.label}{times} {row.role}, {row.size}, {_percent(group.share)} of matmul time")
    return (
        f'<div class="what">{escape(group.label)}{times} <small>{row.role}</small></div>'
        f'<div class="track" title="{tip}">{lines}<div class="bar{kind}" style="left:{left:.2%};'
        f'width:{right - left:.2%};height:{height}px"></div>'
        f'<em style="left:{right:.2%}">{speedup:.2f}x</em></div>'
    )


# -- all-gathers in the graph ---------------------------------------------------------------------


def _gathers(e: Explanation) -> str:
    rows = grouped_gathers(e)
    if not rows:
        return ""
    heads = "".join(f'<th class="l">{name}</th>' for name in GATHER_COLUMNS)
    body = "".join(f"<tr>{''.join(f'<td class=l>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        '<section id="gathers"><h2>All-gathers in the graph</h2><div class="scroll"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


# -- the wire -------------------------------------------------------------------------------------


def _wire(e: Explanation) -> str:
    c = e.communication
    if c is None:
        return ""
    longest = max((1, *(size for row in c.rows for size in row[3:])))

    def cells(high: int, float8: int) -> str:
        bars = "".join(
            f'<div style="width:{size / longest:.2%};height:7px;margin:2px 0;background:var(--{colour})"></div>'
            for size, colour in ((high, "rest"), (float8, "yes"))
        )
        return (
            f"<td>{wire_text(high)}</td><td>{wire_text(float8)}</td>"
            f'<td style="min-width:120px" aria-hidden="true">{bars}</td>'
        )

    body = "".join(
        f'<tr><td class="l">{op}</td><td class="l">{escape(dtype)}</td><td class="l">{what}</td>'
        f"{cells(high, float8)}</tr>"
        for op, what, dtype, high, float8 in c.rows
    )
    body += (
        f'<tr><td class="l"><b>all</b></td><td></td><td></td><td><b>{wire_text(c.high_bytes)}</b></td>'
        f"<td><b>{wire_text(c.float8_bytes)}</b></td><td></td></tr>"
    )
    if c.high_seconds is not None and c.float8_seconds is not None:
        body += (
            f'<tr><td class="l">predicted time</td><td></td><td></td><td>{seconds_text(c.high_seconds)}</td>'
            f"<td>{seconds_text(c.float8_seconds)}</td><td></td></tr>"
        )
    return (
        f'<section id="wire"><h2>{escape(wire_title(c))}</h2><p class="note">{escape(wire_note(c))}</p>'
        '<div class="scroll"><table><thead><tr><th class="l">collective</th><th class="l">dtype</th>'
        '<th class="l">of</th><th>as it is</th><th>with float8</th><th></th></tr></thead>'
        f"<tbody>{body}</tbody></table></div></section>"
    )


# -- the table ------------------------------------------------------------------------------------

_COLUMNS = (
    ("module", False),
    ("gemm", False),
    ("M x K x N", True),
    ("float8", False),
    ("speedup", True),
    ("time", True),
    ("share", True),
    ("why", False),
)
_LEFT = ("module", "gemm", "float8", "why")


def _table(e: Explanation) -> str:
    if not e.rows:
        return ""
    heads = "".join(
        f'<th scope="col" aria-sort="none"{" class=l" if name in _LEFT else ""}'
        f'{" data-numeric" if numeric else ""}><button type="button">{name}</button></th>'
        for name, numeric in _COLUMNS
    )
    bodies = [
        "".join(_table_row(group) for group in grouped(e.rows, expand=expand)) for expand in (False, True)
    ]
    return (
        '<section><h2>Every matmul</h2><div class="tools" hidden><label>Find <input id="find" type="search" '
        'placeholder="module, gemm, reason"></label>'
        '<label>Show <select id="which"><option value="">all</option>'
        '<option value="yes">in float8</option><option value="no">left as they are</option></select></label>'
        '<label><input id="expand" type="checkbox"> a line for each layer</label>'
        '<output id="count" aria-live="polite"></output></div><div class="scroll"><table id="matmuls">'
        "<caption hidden>Matmuls, what was decided, why, and what is predicted</caption>"
        f"<thead><tr>{heads}</tr></thead><tbody>{bodies[0]}</tbody><tbody hidden>{bodies[1]}</tbody>"
        "</table></div></section>"
    )


def _table_row(group: Group) -> str:
    row, count = group.first, len(group.rows)
    decided = "yes" if row.converted else "no"
    label = f"{escape(group.label)} <b>x{count}</b>" if count > 1 else escape(group.label)
    speedup = "" if row.speedup is None else f"{row.speedup:.2f}x"
    volume = 1
    for size in (row.m, row.k, row.n):
        volume *= size if isinstance(size, int) else 1
    timed = group.share is not None
    return (
        f'<tr data-float8="{decided}" data-count="{count}"><td class="l fqn">{label}</td>'
        f'<td class="l">{row.role}</td>'
        f'<td data-key="{volume}">{escape(row.size)}</td><td class="l {decided}">{decided}</td>'
        f'<td data-key="{row.speedup or 0:.4f}">{speedup}</td>'
        f'<td data-key="{group.high_seconds:.9f}">{seconds_text(group.high_seconds) if timed else ""}</td>'
        f'<td data-key="{group.share or 0:.6f}">{_percent(group.share)}</td>'
        f'<td class="l why">{escape(group.why)}</td></tr>'
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
