"""The pipeline as Inductor calls it: a graph pass with a cache key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import fx

from .cache import CacheKey
from .passes import FilterError, Pipeline
from .passes.backward import depending_on_tangents
from .passes.decided import is_decided, mark_decided
from .passes.parameters import KnownInputs
from .passes.traffic import gathers, traffic
from .ranks.agreement import as_plain, confirm
from .report import GraphReport, Traffic
from .torch_private import CustomGraphPass, forget_traced_regions


class PassError(RuntimeError):
    """A pass of f8fx failed; the cause is attached."""


class GraphPass(CustomGraphPass):
    """The pipeline as Inductor calls it: one object, with an honest cache key.

    Args:
        pipeline: the passes.
        key: what the decisions depend on beyond the graph itself.
        before: the passes a user had put into ``joint_custom_pre_pass``; they run first.
        tuning: Inductor options for graphs that were rewritten (:mod:`f8fx.tuning`).
        known: what is known of the inputs of the Dynamo graph.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        key: CacheKey,
        before: Sequence[Any] = (),
        tuning: Mapping[str, Any] = MappingProxyType({}),
        known: KnownInputs = KnownInputs(),  # noqa: B008
    ) -> None:
        self.pipeline = pipeline
        self.key = key
        #: as they were before an attempt changed them
        self.first = pipeline, key
        self.before = tuple(before)
        self.tuning = tuning
        self.known = known
        #: copies of weights are to be kept, and no warning has said why they are not
        self.should_keep = False
        self.reports: list[GraphReport] = []
        #: on graphs that came with rewritten nodes in them; published where there is no other report
        self.met_again: list[GraphReport] = []
        #: what the graph sends, as agreed on by all ranks
        self.confirmed: list[Traffic] = []

    def __call__(self, graph: fx.Graph) -> None:
        for other in self.before:
            other(graph)
        if is_decided(graph):
            # half of a nested region that was seen before it was split, or nodes that compiled autograd inlined
            self.met_again.append(self.pipeline.rewritten(graph))
            return
        self.known.mark(graph)
        before, is_left = gathers(graph), self.pipeline.collectives.wire == "off"
        training = bool(depending_on_tangents(graph))
        try:
            report = self.pipeline(graph)
        except FilterError:
            raise  # the user's to mend, not ours to work around
        except Exception as error:
            # the graph can run as it was, if that is what happens on all ranks
            self.confirm(as_plain(traffic(before, {}, training, is_left)))
            raise PassError(f"{type(error).__name__}: {error}") from error
        mark_decided(graph)
        report.traffic = traffic(before, gathers(graph), training, is_left)
        self.confirm(report.traffic)
        self.reports.append(report)

    def confirm(self, sent: list[Traffic]) -> None:
        """Returns once all ranks have decided alike (:func:`f8fx.ranks.agreement.confirm`)."""
        confirm(sent)
        self.confirmed += sent

    def begin_again(self, otherwise: Any) -> None:
        """Forgets an attempt; the next one differs by ``otherwise``."""
        self.forget()
        self.pipeline, key = self.first
        self.key = key.extended(otherwise)

    def forget(self) -> None:
        """Forgets an attempt, with the nested regions that were rewritten in it."""
        forget_traced_regions()
        self.reports, self.met_again, self.confirmed = [], [], []

    def uuid(self) -> Any:
        """Key for Inductor's caches; ``None``: no caching."""
        return self.key.uuid
