"""Ranks never disagree: an error at compile time, on every rank, instead of a collective that hangs.

What float8 replaces is decided from global shapes, so that ranks come to the same decision by themselves. Still,
one of them may have another filter, another version, or, under ``select="auto"``, another batch size on the
other side of a threshold. So before a graph with gathers is used, each rank writes what it will send into the process group's
store and reads what the others of the *same group* wrote:

* the entry is found by what the gathers were before, and by the ranks of their group. Pipeline stages, which
  compile different graphs, never wait for each other;
* where a rank compiles once more, the others usually do as well, and are compared. If they do not come within
  :data:`ALONE`, the rank is alone in this, say because only its batch has another size, and goes on if the others have
  once decided the same;
* a graph from a cache is compared like a new one: the record of decisions holds what it sends;
* nothing here is a collective. A rank that never comes is an error after :data:`TIMEOUT`, not a hang.

A store read is a round trip to the rendezvous host; a graph needs one or two for each rank.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from datetime import timedelta

from .report import Traffic
from .torch_private import process_store, process_store_read

#: How long a rank waits for the others to compile the same graph.
TIMEOUT = timedelta(minutes=10)
#: How long for a decision that all of them have made before.
ALONE = timedelta(seconds=10)
_POLL_SECONDS = (0.01, 1.0)
_PLAIN = "as without f8fx"


class RankDisagreement(RuntimeError):
    """Ranks of one process group decided differently about what to send; the message says which and what."""


def confirm(
    traffic: Sequence[Traffic], timeout: timedelta | None = None, alone: timedelta | None = None
) -> None:
    """Returns once all ranks of each group have decided alike.

    Raises:
        RankDisagreement: if one decided differently, or compiled no such graph within `timeout`.
    """
    for one in traffic:
        _confirm(one, timeout or TIMEOUT, alone or ALONE)


def confirm_plain(traffic: Sequence[Traffic]) -> None:
    """:func:`confirm` for a graph that is to run as if f8fx were not there."""
    confirm([Traffic(one.ranks, one.gathers, (_PLAIN,)) for one in traffic])


def _confirm(traffic: Traffic, timeout: timedelta, alone: timedelta) -> None:
    found = process_store()
    if found is None:
        return
    store, rank = found
    prefix = f"f8fx/{_digest([traffic.ranks, traffic.gathers])}"
    mine = _digest(traffic.sends)

    def decided(ranks: Sequence[int]) -> dict[int, list[str]]:
        """What each rank has decided for these gathers, in the order it compiled them."""
        texts = process_store_read(store, [f"{prefix}/{other}" for other in ranks])
        return {other: text.split() for other, text in zip(ranks, texts, strict=True)}

    before = decided([rank])[rank]
    store.set(f"{prefix}/{rank}/{mine}", "\n".join(traffic.sends))  # before the entry that points to it
    store.set(f"{prefix}/{rank}", " ".join([*before, mine]))
    waiting = [other for other in traffic.ranks if other != rank]
    start = time.monotonic()
    pause, longest = _POLL_SECONDS
    while waiting:
        published = decided(waiting)
        for other in waiting:
            theirs = published[other][len(before) :][:1]
            if theirs and theirs != [mine]:
                text = process_store_read(store, [f"{prefix}/{other}/{theirs[0]}"])[0]
                raise RankDisagreement(_difference(rank, traffic.sends, other, text.split("\n")))
        waiting = [other for other in waiting if len(published[other]) <= len(before)]
        waited = timedelta(seconds=time.monotonic() - start)
        if waiting and waited > alone and all(mine in published[other] for other in waiting):
            store.set(f"{prefix}/{rank}", " ".join(before))  # so that the next compile of all counts as one
            return
        if waiting and waited > timeout:
            raise RankDisagreement(_missing(rank, waiting, traffic, timeout))
        time.sleep(pause if waiting else 0)
        pause = min(2 * pause, longest)


def _digest(parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _difference(rank: int, mine: Sequence[str], other: int, theirs: Sequence[str]) -> str:
    length = max(len(mine), len(theirs))
    pairs = zip([*mine, *[""] * (length - len(mine))], [*theirs, *[""] * (length - len(theirs))], strict=True)
    index, (here, there) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    return (
        f"f8fx: ranks decided differently about one graph, and would have hung in it. Collective {index} is "
        f"{here or 'none'!r} on rank {rank} and {there or 'none'!r} on rank {other}. Options, filters, versions and (under "
        'select="auto") batch sizes must be the same on all ranks; options={"wire": "off"} leaves all gathers '
        "as they are"
    )


def _missing(rank: int, waiting: Sequence[int], traffic: Traffic, timeout: timedelta) -> str:
    return (
        f"f8fx: rank {rank} compiled a graph with {len(traffic.gathers)} all-gathers over ranks {list(traffic.ranks)}, but "
        f"rank {', '.join(map(str, waiting))} compiled no such graph within {timeout.total_seconds():.0f} s. If ranks do compile "
        'different graphs over one group, options={"wire": "off"} leaves all gathers as they are'
    )
