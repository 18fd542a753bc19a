"""What was decided and why: plain data, one :class:`GraphReport` for each compiled graph.

``with recording() as reports:`` collects them; every report is also logged as one line at INFO on
the logger ``f8fx``, whether anything was converted or not.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .recipe import Role

log = logging.getLogger("f8fx")

#: How the reason begins that holds for all matmuls of a device.
NO_TENSOR_CORES = "no float8 tensor cores on"


def dtype_name(dtype: torch.dtype | str) -> str:
    """As reasons and tables have it: without ``torch.``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class GemmInfo:
    """A matmul as user code sees it: what ``filter_fn`` is called with.

    Sizes are of ``[m, k] @ [k, n]``; a dynamic one has the value it was traced with, or is 0 where that is known only at
    run time.
    """

    fqn: str
    role: Role
    m: int
    k: int
    n: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Decision:
    """One matmul and what became of it.

    Attributes:
        fqn: the module whose forward called it, "" where none did.
        role: ``output``, ``grad_input`` or ``grad_weight``.
        m, k, n: sizes of ``[m, k] @ [k, n]``; a string such as ``"s77"`` where dynamic.
        converted: whether it runs in float8.
        reason: why, in a few words that recur and can be counted.
        detail: the same with numbers, or "".
        speedup: predicted time of the matmul in high precision over that in float8, its share of the casts and
            of a merged gemm included; ``None`` where no prediction was asked for.
        seconds: predicted time of the matmul in high precision, ``None`` likewise.
        merge: of a converted one whose input others read too: what it was merged with, or why it was not.
        recomputed: whether activation checkpointing has the backward run it again.
    """

    fqn: str
    role: Role
    m: int | str
    k: int | str
    n: int | str
    converted: bool
    reason: str
    detail: str = ""
    speedup: float | None = None
    seconds: float | None = None
    merge: str = ""
    recomputed: bool = False


@dataclass(frozen=True)
class MergeDecision:
    """Converted layers that read one input, and whether their matmuls run as one gemm.

    Attributes:
        layers: the modules that called them, "" for none.
        merged: whether each of their float8 roles is one gemm.
        reason: why not, in a few words that recur and can be counted.
        detail: the same with names or numbers, or "".
        roles: those that are merged in float8.
        kept_roles: those that the recipe keeps in high precision and that are merged there.
        separate_seconds, merged_seconds: predicted, of these roles' gemms without casts; ``None`` if not merged.
    """

    layers: tuple[str, ...]
    merged: bool
    reason: str
    detail: str = ""
    roles: tuple[Role, ...] = ()
    kept_roles: tuple[Role, ...] = ()
    separate_seconds: float | None = None
    merged_seconds: float | None = None

    @property
    def spared(self) -> int:
        """How many float8 gemms fewer run."""
        return (len(self.layers) - 1) * len(self.roles)


@dataclass(frozen=True)
class CollectiveDecision:
    """One all-gather of the graph and whether it carries float8.

    Attributes:
        fqn: the module it was called in, "" where none did.
        shape, dtype: of the gathered tensor.
        group_size: number of ranks.
        backward: whether it depends on gradients.
        moved: whether float8 travels.
        reason: why, in a few words that recur and can be counted.
        detail: the same with names or numbers, or "".
    """

    fqn: str
    shape: tuple[int | str, ...]
    dtype: str
    group_size: int
    backward: bool
    moved: bool
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class Traffic:
    """What a graph sends over one process group, as far as passes decide it.

    Attributes:
        ranks: the group's ranks.
        gathers: the graph's all-gathers before the passes, in order.
        sends: all-gathers, and reductions of amaxes, after them.
        group: the group's name, which other processes may not know it by.
        training: whether the graph holds a backward.
        is_left: nothing was to be decided (``wire="off"``).
    """

    ranks: tuple[int, ...]
    gathers: tuple[str, ...]
    sends: tuple[str, ...]
    group: str = ""
    training: bool = False
    is_left: bool = False


@dataclass
class GraphReport:
    """What f8fx did to one graph.

    Attributes:
        recipe: name of the recipe.
        target: name of the hardware the decisions were for.
        training: whether the graph holds a backward.
        decisions: one for each matmul, in graph order.
        merges: one for each set of converted layers that read one input, in graph order.
        reused_weights: how many weights are read in float8, as quantized before (``weights="cached"``, ``"reused"``).
        gathers: one for each all-gather of a graph in which a matmul was converted, in graph order.
        traffic: what ranks must agree on, one for each process group.
        pass_seconds: time of each pass, by name.
        cached: the compiled code came from a cache; the decisions are those made when it was built.
        fallback: why the graph is compiled as if f8fx were not there (an internal failure, say), else "".
        warnings: what the user should know beyond the decisions; logged as warnings.
    """

    recipe: str
    target: str = ""
    training: bool = False
    decisions: list[Decision] = field(default_factory=list)
    merges: list[MergeDecision] = field(default_factory=list)
    reused_weights: int = 0
    gathers: list[CollectiveDecision] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)
    pass_seconds: dict[str, float] = field(default_factory=dict)
    cached: bool = False
    fallback: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Matmuls seen."""
        return len(self.decisions)

    @property
    def converted(self) -> int:
        """Matmuls that run in float8."""
        return 0 if self.fallback else sum(d.converted for d in self.decisions)

    @property
    def gemms(self) -> int:
        """Float8 gemms that run: as many as matmuls in float8, fewer where some were merged."""
        return 0 if self.fallback else self.converted - sum(merge.spared for merge in self.merges)

    @property
    def skipped(self) -> int:
        """Matmuls left as they were."""
        return self.total - self.converted

    @property
    def reasons(self) -> dict[str, int]:
        """How many matmuls were skipped for each reason, most frequent first."""
        if self.fallback:
            return {self.fallback: self.total}
        return dict(Counter(d.reason for d in self.decisions if not d.converted).most_common())

    @staticmethod
    def merged(reports: list[GraphReport]) -> list[GraphReport]:
        """One report for a graph and the bodies of its higher-order operators; none for no graph."""
        if len(reports) < 2:
            return reports
        whole = GraphReport(
            reports[0].recipe,
            ", ".join(sorted({report.target for report in reports if report.target})),
            any(report.training for report in reports),
            [decision for report in reports for decision in report.decisions],
            [merge for report in reports for merge in report.merges],
            sum(report.reused_weights for report in reports),
            [gather for report in reports for gather in report.gathers],
            [traffic for report in reports for traffic in report.traffic],
            warnings=[warning for report in reports for warning in report.warnings],
            cached=all(report.cached for report in reports),
        )
        for report in reports:
            for name, seconds in report.pass_seconds.items():
                whole.pass_seconds[name] = whole.pass_seconds.get(name, 0.0) + seconds
        return [whole]

    def line(self) -> str:
        """The summary that is logged."""
        if self.fallback:
            return f"f8fx: plain Inductor for this graph, nothing in float8: {self.fallback}"
        if not self.total:
            return f"f8fx: no matmuls in this graph ({self.recipe})"
        text = f"f8fx: {self.converted} of {self.total} matmuls in float8 ({self.recipe})"
        if self.gemms < self.converted:
            text += f", merged into {self.gemms} gemm{'s' * (self.gemms > 1)}"
        if self.skipped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.reasons.items())
            text += f", {self.skipped} skipped: {reasons}"
        if self.reused_weights:
            text += f"; {self.reused_weights} weight{'s' * (self.reused_weights > 1)} kept in float8"
        if self.gathers:
            text += f"; {sum(g.moved for g in self.gathers)} of {len(self.gathers)} gathers in float8"
            stay = Counter(g.reason for g in self.gathers if not g.moved).most_common()
            if stay:
                text += ", not " + ", ".join(f"{count}: {reason}" for reason, count in stay)
        return text + (" [cached]" if self.cached else "")

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> GraphReport:
        """The inverse of :meth:`to_dict`."""
        gathers = [CollectiveDecision(**{**g, "shape": tuple(g["shape"])}) for g in data.get("gathers", ())]
        decisions = [Decision(**d) for d in data["decisions"]]
        merges = [
            MergeDecision(
                **{
                    **m,
                    "layers": tuple(m["layers"]),
                    "roles": tuple(m["roles"]),
                    "kept_roles": tuple(m.get("kept_roles", ())),
                }
            )
            for m in data.get("merges", ())
        ]
        tuples = ("ranks", "gathers", "sends")
        traffic = [Traffic(**{**t, **{k: tuple(t[k]) for k in tuples}}) for t in data.get("traffic", ())]
        lists = {"decisions": decisions, "merges": merges, "gathers": gathers, "traffic": traffic}
        return GraphReport(**{**data, **lists})


_RECORDERS: list[list[GraphReport]] = []


@contextmanager
def recording() -> Iterator[list[GraphReport]]:
    """Collects the reports of all graphs compiled inside the block, from any thread."""
    reports: list[GraphReport] = []
    _RECORDERS.append(reports)
    try:
        yield reports
    finally:
        # by identity: two empty lists are equal
        _RECORDERS[:] = [recorder for recorder in _RECORDERS if recorder is not reports]


def publish(report: GraphReport) -> None:
    """Logs a report and hands it to every open :func:`recording` block."""
    log.info(report.line())
    _warn_of_hardware(report)
    for warning in report.warnings:
        log.warning(warning)
    for recorder in _RECORDERS:
        recorder.append(report)


_WARNED: set[str] = set()


def _warn_of_hardware(report: GraphReport) -> None:
    """Where float8 is out of the question: once for each kind of hardware, whatever the level of the log."""
    for decision in report.decisions:
        reason = decision.reason
        if reason.startswith(NO_TENSOR_CORES) and not report.converted and reason not in _WARNED:
            _WARNED.add(reason)
            hint = f" ({decision.detail})" if decision.detail else ""
            log.warning("f8fx: a graph has matmuls, and none is converted: %s%s", reason, hint)
