"""Ranks never disagree: an error at compile time instead of a collective that hangs.

What float8 replaces is decided from global shapes, so that ranks come to the same decision by themselves. Still,
one of them may have another filter, another version, or, under ``select="auto"``, another batch size on the
other side of a threshold. So before a graph with gathers is used, ranks compare what they will send
(:mod:`f8fx.ledger`). A graph is known by what the gathers were before, and by the
ranks of their group: pipeline stages, which compile different graphs, never wait for each other.

A graph from a cache is compared like a new one: the record of decisions holds what it sends.

Graphs whose weights FSDP2 has gathered hold no gathers. There it is the options that are compared, the first time
that any graph of a model is compiled with them: ranks with different ones would not hang, but train different models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .ledger import Matter, agree
from .options import Options
from .report import Traffic
from .sources import source_hash
from .torch_private import local_part

_PLAIN = "as without f8fx"
_REMEDY = (
    'Options, filters, versions and (under select="auto") batch sizes must be the same on all ranks; '
    'options={"wire": "off"} leaves all gathers as they are'
)
_SAME_OPTIONS = "Options, filters and versions must be the same on all ranks"


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


@dataclass(eq=False)
class Peers:
    """The ranks that hold a model whose weights FSDP2 gathers in float8; what they compile it with.

    Attributes:
        ranks: none, if there is nobody to compare with.
        model: what it is known by on all of them.
        group: the name of a process group of theirs.
        confirmed: options that all ranks have compiled a graph of it with.
    """

    ranks: tuple[int, ...]
    model: tuple[str, ...]
    group: str = ""
    confirmed: set[tuple[str, ...]] = field(default_factory=set)

    def confirm(self, options: Iterable[str]) -> None:
        """Returns once all ranks compile with these options.

        Raises:
            RankDisagreement: if one compiles with others, or not with f8fx within the process group's timeout.
        """
        options = tuple(options)
        if len(self.ranks) > 1 and options not in self.confirmed:
            agree(_Blocks(self.ranks, ("FSDP2", *self.model), options, self.group))
            self.confirmed.add(options)


def confirm_options(example_inputs: Iterable[Any], options: Options) -> None:
    """Returns once the ranks of each FSDP2 model that a graph reads float8 weights of compile with the same options.

    Raises:
        RankDisagreement: as :meth:`Peers.confirm`.
    """
    gathered = [getattr(local_part(value), "copies", None) for value in example_inputs]
    for peers in dict.fromkeys(copies.peers for copies in gathered if copies is not None):
        peers.confirm(_in_words(options))


def _in_words(options: Options) -> list[str]:
    """What decides on a graph besides the graph."""
    values = dict(options.decision_key())
    if fn := options.filter_fn:
        values["filter_fn"] = getattr(fn, "uuid", None) or getattr(fn, "__qualname__", type(fn).__name__)
    values |= {"torch": torch.__version__, "code of f8fx": source_hash()[:12]}
    return [f"{name}={value!r}" for name, value in values.items()]


class _Blocks(Matter):
    """The options that the blocks of a model are compiled with."""

    def differs(self, index: int, what: str) -> str:
        return (
            "f8fx: ranks compile one model, whose weights FSDP2 gathers in float8, with different options: "
            f"{what}. {_SAME_OPTIONS}"
        )

    def alone(self, rank: int, others: str, seconds: float, index: int, what: str) -> str:
        return (
            f"f8fx: rank {rank} compiles a model, whose weights FSDP2 gathers in float8, with options it was not compiled "
            f"with before, and rank {others} did not within {seconds:.0f} s: {what}. {_SAME_OPTIONS}"
        )

    def missing(self, rank: int, others: str, seconds: float) -> str:
        return (
            f"f8fx: rank {rank} compiles a model whose weights FSDP2 gathers in float8, and rank {others} compiled no part of "
            f'it with backend="f8fx" within {seconds:.0f} s. All ranks must'
        )
