"""Ranks never disagree: an error at compile time instead of a collective that hangs.

What float8 replaces is decided from global shapes, so that ranks come to the same decision by themselves. Still,
one of them may have another filter, another version, or, under ``select="auto"``, another batch size on the
other side of a threshold. So before a graph with gathers is used, ranks compare what they will send
(:mod:`f8fx.ledger`). A graph is known by what the gathers were before, and by the
ranks of their group: pipeline stages, which compile different graphs, never wait for each other.

A graph from a cache is compared like a new one: the record of decisions holds what it sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .ledger import Matter, agree
from .report import Traffic

_PLAIN = "as without f8fx"
_REMEDY = (
    'Options, filters, versions and (under select="auto") batch sizes must be the same on all ranks; '
    'options={"wire": "off"} leaves all gathers as they are'
)


def confirm(traffic: Sequence[Traffic]) -> None:
    """Returns once all ranks of each group have decided alike.

    Raises:
        RankDisagreement: if one decided differently, or compiled no such graph within the process group's timeout.
    """
    for one in traffic:
        agree(_Graph(one.ranks, one.gathers, one.sends, one.group))


def confirm_plain(traffic: Sequence[Traffic]) -> None:
    """:func:`confirm` for a graph that is to run as if f8fx were not there."""
    confirm([replace(one, sends=(_PLAIN,)) for one in traffic])


class _Graph(Matter):
    """What a graph sends over one group."""

    def differs(self, index: int, what: str) -> str:
        return (
            f"f8fx: ranks decided differently about one graph, and would have hung in it. Collective {index} is {what}. "
            f"{_REMEDY}"
        )

    def alone(self, rank: int, others: str, seconds: float, index: int, what: str) -> str:
        return (
            f"f8fx: rank {rank} compiled a graph anew and decided differently, and rank {others} compiled none within "
            f"{seconds:.0f} s, so it would send what was decided before. Collective {index} would be {what}. {_REMEDY}"
        )

    def missing(self, rank: int, others: str, seconds: float) -> str:
        return (
            f"f8fx: rank {rank} compiled a graph with {len(self.about)} all-gathers over ranks {list(self.ranks)}, but "
            f"rank {others} compiled no such graph within {seconds:.0f} s. If ranks do compile different graphs over one "
            'group, options={"wire": "off"} leaves all gathers as they are'
        )
