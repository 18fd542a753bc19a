"""Ranks never disagree: an error at compile time instead of a collective that hangs.

What float8 replaces is decided from global shapes, so that ranks come to the same decision by themselves. Still,
one of them may have another filter, another version, or, under ``select="auto"``, another batch size on the
other side of a threshold. So before a graph with gathers is used, each rank writes what it will send into the process group's
store and reads what the others of the *same group* wrote. The entry is found by what the gathers were before, and by the
ranks of their group: pipeline stages, which compile different graphs, never wait for each other. A rank waits until
all others have decided, too. What is known of earlier compiles makes the wait shorter:

* if all ranks have decided as this one does, and never otherwise, there is nobody to wait for: who decides
  otherwise decides anew and finds that out;
* if all have decided as this one does, but also otherwise (several graphs may have the same gathers), it goes on
  after :data:`ALONE`: it compiles alone, say because only its batch has another size;
* if the others have decided before, but never as this one does, and do not come within :data:`ANEW`, they will not: their
  graphs run as decided before, and this rank alone would send something else. That is an error.

A graph from a cache is compared like a new one: the record of decisions holds what it sends. Nothing here is a
collective. A rank that never comes is an error after the process group's timeout, as it would be in a collective.

A store read is a round trip to the rendezvous host; a graph needs one or two for each rank.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from .report import Traffic
from .torch_private import group_timeout, process_store, process_store_read

#: How long at most a rank waits for the others to compile the same graph; less if the process group's timeout is less.
TIMEOUT = timedelta(minutes=10)
#: How long for a decision that all of them have made before, among others.
ALONE = timedelta(seconds=10)
#: How long at most for a decision that is new, where the others have made another before. Ranks leave a collective
#: together; what then separates them is the time to trace one graph, or to find it in a cache. At most half of the process
#: group's timeout, so that the error is there before the others' collective fails.
ANEW = timedelta(minutes=5)
_POLL_SECONDS = (0.01, 1.0)
_PLAIN = "as without f8fx"


class RankDisagreement(RuntimeError):
    """Ranks of one process group decided differently about what to send; the message says which and what."""


def confirm(traffic: Sequence[Traffic]) -> None:
    """Returns once all ranks of each group have decided alike.

    Raises:
        RankDisagreement: if one decided differently, or compiled no such graph within the process group's timeout.
    """
    for one in traffic:
        _confirm(one, min(TIMEOUT, group_timeout(one.group) or TIMEOUT))


def confirm_plain(traffic: Sequence[Traffic]) -> None:
    """:func:`confirm` for a graph that is to run as if f8fx were not there."""
    confirm([replace(one, sends=(_PLAIN,)) for one in traffic])


def _confirm(traffic: Traffic, timeout: timedelta) -> None:
    found = process_store()
    if found is None:
        return
    store, rank = found
    ledger = _Ledger(store, f"f8fx/{_digest([traffic.ranks, traffic.gathers])}", rank)
    history = ledger.decided([*{*traffic.ranks, rank}])
    before, mine = history.pop(rank), ledger.write(traffic.sends)

    def compare(published: dict[int, list[str]]) -> None:
        for other, decisions in published.items():
            theirs = decisions[len(before) :][:1]
            if theirs and theirs != [mine]:
                ledger.decide([*before, mine])  # the other one waits for it
                raise RankDisagreement(_difference(rank, traffic.sends, other, ledger.read(other, theirs[0])))

    compare(history)
    if all({*decisions} == {mine} for decisions in (before, *history.values())):
        return
    agreed = all(mine in decisions for decisions in (before, *history.values()))
    anew = not agreed and all((before, *history.values()))
    limit = min(ALONE, timeout) if agreed else min(ANEW, timeout / 2) if anew else timeout
    ledger.decide([*before, mine])
    waiting, start, pause = list(history), time.monotonic(), _POLL_SECONDS[0]
    while True:
        published = ledger.decided(waiting)
        compare(published)
        waiting = [other for other in waiting if len(published[other]) <= len(before)]
        if not waiting:
            return
        waited = time.monotonic() - start
        if waited >= limit.total_seconds():
            break
        time.sleep(min(pause, limit.total_seconds() - waited))
        pause = min(2 * pause, _POLL_SECONDS[1])
    ledger.decide(before)  # so that the next compile of all counts as one
    if agreed:
        return
    if not anew:
        raise RankDisagreement(_missing(rank, traffic, waiting, limit))
    earlier = ledger.read(waiting[0], published[waiting[0]][-1])
    raise RankDisagreement(_alone(rank, traffic.sends, waiting, earlier, limit))


@dataclass(frozen=True)
class _Ledger:
    """What each rank has decided for the same gathers, in the order it compiled them, by digest."""

    store: Any
    prefix: str
    rank: int

    def decided(self, ranks: Sequence[int]) -> dict[int, list[str]]:
        texts = process_store_read(self.store, [f"{self.prefix}/{other}" for other in ranks])
        return {other: text.split() for other, text in zip(ranks, texts, strict=True)}

    def decide(self, decisions: Sequence[str]) -> None:
        self.store.set(f"{self.prefix}/{self.rank}", " ".join(decisions))

    def write(self, sends: Sequence[str]) -> str:
        """A decision in full, before an entry points to it; its digest."""
        digest = _digest(sends)
        self.store.set(f"{self.prefix}/{self.rank}/{digest}", "\n".join(sends))
        return digest

    def read(self, other: int, digest: str) -> list[str]:
        return process_store_read(self.store, [f"{self.prefix}/{other}/{digest}"])[0].split("\n")


def _digest(parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _first_difference(rank: int, mine: Sequence[str], other: int, theirs: Sequence[str]) -> tuple[int, str]:
    for index, (here, there) in enumerate(itertools.zip_longest(mine, theirs)):
        if here != there:
            return index, f"{here or 'none'!r} on rank {rank} and {there or 'none'!r} on rank {other}"
    raise AssertionError("the decisions are the same")


_REMEDY = (
    'Options, filters, versions and (under select="auto") batch sizes must be the same on all ranks; '
    'options={"wire": "off"} leaves all gathers as they are'
)


def _difference(rank: int, mine: Sequence[str], other: int, theirs: Sequence[str]) -> str:
    index, what = _first_difference(rank, mine, other, theirs)
    return f"f8fx: ranks decided differently about one graph, and would have hung in it. Collective {index} is {what}. {_REMEDY}"


def _alone(
    rank: int, mine: Sequence[str], waiting: Sequence[int], theirs: Sequence[str], limit: timedelta
) -> str:
    index, what = _first_difference(rank, mine, waiting[0], theirs)
    return (
        f"f8fx: rank {rank} compiled a graph anew and decided differently, and rank {_listed(waiting)} compiled none within "
        f"{limit.total_seconds():.0f} s, so it would send what was decided before. Collective {index} would be "
        f"{what}. {_REMEDY}"
    )


def _missing(rank: int, traffic: Traffic, waiting: Sequence[int], limit: timedelta) -> str:
    return (
        f"f8fx: rank {rank} compiled a graph with {len(traffic.gathers)} all-gathers over ranks {list(traffic.ranks)}, but "
        f"rank {_listed(waiting)} compiled no such graph within {limit.total_seconds():.0f} s. If ranks do compile "
        'different graphs over one group, options={"wire": "off"} leaves all gathers as they are'
    )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
