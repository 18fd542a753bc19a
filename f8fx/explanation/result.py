"""What f8fx would do to a model, as data, text and a page."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from f8fx.recipe import Role
from f8fx.report import GraphReport, MergeDecision

if TYPE_CHECKING:
    from f8fx.communication import Communication


@dataclass(frozen=True)
class Row:
    """One matmul.

    Attributes:
        graph: index of the graph it is in; more than one where the graph breaks.
        fqn: the module whose forward called it, "" where none did.
        role: ``output``, ``grad_input`` or ``grad_weight``.
        m, k, n: sizes of ``[m, k] @ [k, n]``; a string such as ``"s77"`` where dynamic.
        converted: whether it would run in float8.
        reason, detail: why.
        speedup: predicted seconds as it is over those in float8, its share of the casts included; also of a
            matmul that is left as it is, where float8 would be legal. ``None`` where there is no prediction.
        high_seconds: predicted, as it is; ``None`` where sizes are unknown.
        float8_seconds: predicted, as decided: in float8 with its share of casts and of a merged gemm if converted,
            else as it is.
        share: of the predicted seconds of all matmuls as they are, 0 to 1.
        merge: where others read the input too: what it would be merged with, or why it would not.
    """

    graph: int
    fqn: str
    role: Role
    m: int | str
    k: int | str
    n: int | str
    converted: bool
    reason: str
    detail: str
    speedup: float | None
    high_seconds: float | None
    float8_seconds: float | None
    share: float | None
    merge: str = ""

    @property
    def size(self) -> str:
        """``M x K x N``."""
        return f"{self.m} x {self.k} x {self.n}"


@dataclass
class Explanation:
    """What f8fx would do to a model, and what it would gain.

    Attributes:
        model: name of the module's class or of the function.
        target: name of the hardware.
        recipe, select: the options that matter most.
        training: whether a backward was traced.
        graphs: one report for each graph.
        rows: one for each matmul, in graph order.
        saved_bytes_high, saved_bytes_float8: bytes kept from forward to backward, with the high-precision graph and
            with the float8 one: intermediates, and inputs that no module holds; parameters are there anyway.
        communicated_bytes_high, communicated_bytes: bytes in collectives of the graphs, likewise: of each its
            input or output, whichever is larger; 0 on a single device.
        most_runs: how often the graph runs that runs most; it is counted once in all figures.
        filters_without_match: those of ``filter_fqns`` and ``only_fqns`` that no matmul's name contains, with a suggestion.
        communication: what a step sends: under FSDP2 on the world that was asked for, and in the graphs. ``None``
            without either.
    """

    model: str
    target: str
    recipe: str
    select: str
    training: bool
    graphs: list[GraphReport] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    saved_bytes_high: int = 0
    saved_bytes_float8: int = 0
    communicated_bytes_high: int = 0
    communicated_bytes: int = 0
    most_runs: int = 1
    filters_without_match: list[str] = field(default_factory=list)
    communication: Communication | None = None

    @property
    def total(self) -> int:
        """Matmuls seen."""
        return len(self.rows)

    @property
    def converted(self) -> int:
        """Matmuls that would run in float8."""
        return sum(row.converted for row in self.rows)

    @property
    def gemms(self) -> int:
        """Float8 gemms that would run: as many as matmuls in float8, fewer where some are merged."""
        return sum(graph.gemms for graph in self.graphs)

    @property
    def merges(self) -> list[MergeDecision]:
        """Sets of layers that read one input, and whether each would be merged."""
        return [merge for graph in self.graphs for merge in graph.merges]

    @property
    def reasons(self) -> dict[str, int]:
        """How many matmuls are skipped for each reason, most frequent first."""
        return dict(Counter(row.reason for row in self.rows if not row.converted).most_common())

    @property
    def high_seconds(self) -> float:
        """Predicted seconds of all matmuls as they are."""
        return sum(row.high_seconds or 0.0 for row in self.rows)

    @property
    def float8_seconds(self) -> float:
        """Predicted seconds of all matmuls as decided, casts included."""
        return sum(row.float8_seconds or 0.0 for row in self.rows)

    @property
    def gemm_speedup(self) -> float:
        """Predicted speedup of all matmuls together, casts included; 1 where nothing is converted."""
        return self.high_seconds / self.float8_seconds if self.float8_seconds else 1.0

    def line(self) -> str:
        """The summary in a line."""
        text = f"{self.converted} of {self.total} matmuls of {self.model} in float8 ({self.recipe})"
        text += f" on {self.target}"
        if self.gemms < self.converted:
            text += f", merged into {self.gemms} gemm{'s' * (self.gemms > 1)}"
        if self.reasons:
            text += "; " + ", ".join(f"{count} {reason}" for reason, count in self.reasons.items())
        return text

    # -- as data

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON-ready data; ``totals`` repeats what can be computed from the rest."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        own["graphs"] = [graph.to_dict() for graph in self.graphs]
        own["rows"] = [dataclasses.asdict(row) for row in self.rows]
        own["communication"] = self.communication.to_dict() if self.communication else None
        names = ("total", "converted", "gemms", "reasons", "high_seconds", "float8_seconds", "gemm_speedup")
        own["totals"] = {name: getattr(self, name) for name in names}
        return own

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Explanation:
        """The inverse of :meth:`to_dict`."""
        own = {name: value for name, value in data.items() if name != "totals"}
        own["graphs"] = [GraphReport.from_dict(graph) for graph in own["graphs"]]
        own["rows"] = [Row(**row) for row in own["rows"]]
        if own.get("communication") is not None:
            from f8fx.communication import Communication

            own["communication"] = Communication.from_dict(own["communication"])
        return Explanation(**own)

    def to_json(self, indent: int | None = 2) -> str:
        """:meth:`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=indent)

    # -- to look at

    def print(self, file: TextIO | None = None, expand: bool = False) -> None:
        """Prints a table of the matmuls and the totals, to stdout by default.

        Args:
            expand: a line for each matmul; by default equal ones of repeated layers share one.
        """
        from .show import print_explanation

        print_explanation(self, file, expand)

    def to_html(self) -> str:
        """One page with charts and a table; it loads nothing."""
        from .html import page

        return page(self)

    def save_html(self, path: str | PathLike[str]) -> None:
        """Writes :meth:`to_html` to a file."""
        Path(path).write_text(self.to_html(), encoding="utf-8")
