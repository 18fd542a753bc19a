"""What ranks have decided, written where all of them can read it.

Before something that ranks must decide alike is used, each rank writes its decision into the process group's store and
reads what the others wrote about the *same matter*. A rank waits until all others have decided, too. What is known of
earlier decisions makes the wait shorter:

* if all ranks have decided as this one does, and never otherwise, there is nobody to wait for: who decides
  otherwise decides anew and finds that out. Such repetitions are noted: a rank may be behind others that have made
  the same one and then decided otherwise;
* if all have decided as this one does, but also otherwise, it goes on after :data:`ALONE`: it decides alone, say because
  only its batch has another size. Whether others use what it uses is then to be seen in each use (:func:`others_known`);
* if the others have decided before, but never as this one does, and do not come within :data:`ANEW`, they will not: they
  go on as decided before, and this rank alone would not. That is an error;
* if another has said that it decides nothing (:func:`stand_aside`), and does not come within :data:`ALONE`, that is one.

Nothing here is a collective. A rank that never comes is an error after the process group's timeout, as it would be in a
collective. A store read is a round trip to the rendezvous host; a decision needs one or two for each rank.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from f8fx.torch_private import group_timeout, process_store, process_store_read

#: How long a rank waits for the others to decide where the process group does not say.
TIMEOUT = timedelta(minutes=10)
#: How long for a decision that all of them have made before, among others, and for a rank that decided nothing.
ALONE = timedelta(seconds=10)
#: How long at most for a decision that is new, where the others have made another before. Ranks leave a collective
#: together; what then separates them is the time to trace one graph, or to find it in a cache. At most half of the process
#: group's timeout, so that the error is there before the others' collective fails.
ANEW = timedelta(minutes=5)
_POLL_SECONDS = (0.01, 1.0)


class RankDisagreement(RuntimeError):
    """Ranks of one process group decided differently; the message says which and what."""


@dataclass(frozen=True)
class Matter(ABC):
    """Something that ranks must decide alike, and the words for when they do not.

    Attributes:
        ranks: those that must.
        about: what it is known by on all of them.
        decided: this rank's decision, in parts: messages name the first that differs.
        group: the process group whose timeout is that of a wait; which other processes may not know it by.
    """

    ranks: tuple[int, ...]
    about: tuple[str, ...]
    decided: tuple[str, ...]
    group: str = ""

    @abstractmethod
    def differs(self, index: int, what: str) -> str:
        """Part ``index`` of what another rank decided is another: ``what`` is on which."""

    @abstractmethod
    def alone(self, rank: int, others: str, seconds: float, index: int, what: str) -> str:
        """This rank has decided anew, and others, who stay with what they decided before, have not."""

    @abstractmethod
    def missing(self, rank: int, others: str, seconds: float) -> str:
        """Others have not decided at all."""

    @abstractmethod
    def aside(self, others: str) -> str:
        """Others decide nothing, and not all do."""


#: What this process has agreed on in each matter, in full; per rank, for tests in which threads are ranks.
_AGREED: dict[Any, list[tuple[str, ...]]] = {}


def others_known(matter: Matter) -> list[tuple[str, ...]]:
    """Other decisions that all ranks have agreed on in a matter: whoever uses one must then make sure that all do.

    Ranks agree at the same place of their programs, so all of them get the same answer.
    """
    return [decided for decided in _AGREED.get(_key(matter), ()) if decided != matter.decided]


def _key(matter: Matter) -> Any:
    found = process_store()
    return None if found is None else (found[1], matter.ranks, matter.about)


def agree(matter: Matter) -> None:
    """Returns once all ranks have decided alike.

    Raises:
        RankDisagreement: if one decided differently, or not at all within the process group's timeout.
    """
    if (found := process_store()) is None:
        return
    first = _agree(matter, *found)
    known = _AGREED.setdefault(_key(matter), [])
    if first:  # with other processes than before
        known.clear()
    if matter.decided not in known:
        known.append(matter.decided)


def stand_aside(matter: Matter) -> None:
    """Says that this rank decides nothing in a matter, at this place of its program, and waits for nobody.

    Raises:
        RankDisagreement: if others have decided there. Those that come later find out by themselves.
    """
    if (found := process_store()) is None:
        return
    ledger = _Ledger.of(matter, *found)
    rank = ledger.rank
    before = ledger.decided([rank])[rank]
    ledger.decide(replace(before, asides=before.asides + 1))
    history = ledger.decided([other for other in matter.ranks if other != rank])
    # who has stood aside more often has decided at a later place
    if any(len(o.agreed) > len(before.agreed) and o.asides <= before.asides for o in history.values()):
        raise RankDisagreement(matter.aside(str(rank)))


def _agree(matter: Matter, store: Any, rank: int) -> bool:
    """:func:`agree`; whether it is this rank's first decision in the matter."""
    timeout = group_timeout(matter.group) or TIMEOUT
    ledger = _Ledger.of(matter, store, rank)
    history = ledger.decided([*{*matter.ranks, rank}])
    before, mine = history.pop(rank), ledger.write(matter.decided)
    everybody = [before, *history.values()]
    agreed = all(mine in decisions.agreed for decisions in everybody)
    anew = not agreed and all(decisions.agreed for decisions in everybody)

    def is_behind(decisions: _History) -> bool:
        """Whether this rank makes again what the other one made again some time ago."""
        return agreed and decisions.repetitions.count(mine) > before.repetitions.count(mine)

    def compare(published: dict[int, _History]) -> None:
        for other, decisions in published.items():
            theirs = decisions.agreed[len(before.agreed) :][:1]
            if theirs and theirs != (mine,) and not is_behind(decisions):
                ledger.decide(before.then(mine))  # the other one waits for it
                raise RankDisagreement(
                    matter.differs(*_difference(rank, matter.decided, other, ledger.read(other, theirs[0])))
                )

    def wait(limit: timedelta, is_done: Callable[[_History], bool]) -> list[int]:
        """Those who have not done so in time."""
        waiting, start, pause = list(history), time.monotonic(), _POLL_SECONDS[0]
        while True:
            published = ledger.decided(waiting)
            compare(published)
            waiting = [other for other in waiting if not is_done(published[other])]
            waited = time.monotonic() - start
            asides = {o: count for o in waiting if (count := published[o].asides) > before.asides}
            if asides and not agreed and waited >= min(ALONE, limit).total_seconds():
                ledger.decide(replace(before, asides=max(asides.values())))  # the next decision of all is one
                raise RankDisagreement(matter.aside(", ".join(map(str, asides))))
            if not waiting or waited >= limit.total_seconds():
                return waiting
            time.sleep(min(pause, limit.total_seconds() - waited))
            pause = min(2 * pause, _POLL_SECONDS[1])

    compare(history)
    if all({*decisions.agreed} == {mine} for decisions in everybody):
        ledger.decide(before.repeated(mine))
        return False
    if any(is_behind(decisions) for decisions in history.values()):
        ledger.decide(before.repeated(mine))
        wait(min(ALONE, timeout), is_behind)
        return False
    limit = min(ALONE, timeout) if agreed else min(ANEW, timeout / 2) if anew else timeout
    ledger.decide(before.then(mine))
    waiting = wait(limit, lambda decisions: len(decisions.agreed) > len(before.agreed))
    if not waiting:
        return not before.agreed
    # so that the next decision of all counts as one
    ledger.decide(before.repeated(mine) if agreed else before)
    if agreed:
        return False
    others, seconds = ", ".join(map(str, waiting)), limit.total_seconds()
    if not anew:
        raise RankDisagreement(matter.missing(rank, others, seconds))
    earlier = ledger.read(waiting[0], ledger.decided(waiting)[waiting[0]].agreed[-1])
    difference = _difference(rank, matter.decided, waiting[0], earlier)
    raise RankDisagreement(matter.alone(rank, others, seconds, *difference))


@dataclass(frozen=True)
class _History:
    """What a rank has decided in one matter, in order, by digest.

    Attributes:
        agreed: with the others.
        repetitions: of what all had agreed on, by itself.
        asides: how often it has decided nothing.
    """

    agreed: tuple[str, ...] = ()
    repetitions: tuple[str, ...] = ()
    asides: int = 0

    @staticmethod
    def read(text: str) -> _History:
        if not text:
            return _History()
        agreed, repetitions, asides = text.split("|")
        return _History(tuple(agreed.split()), tuple(repetitions.split()), int(asides))

    def written(self) -> str:
        return f"{' '.join(self.agreed)}|{' '.join(self.repetitions)}|{self.asides}"

    def then(self, digest: str) -> _History:
        return replace(self, agreed=(*self.agreed, digest))

    def repeated(self, digest: str) -> _History:
        return replace(self, repetitions=(*self.repetitions, digest))


@dataclass(frozen=True)
class _Ledger:
    """The histories of ranks in the store, ``agreed|repetitions|asides``."""

    store: Any
    prefix: str
    rank: int

    @staticmethod
    def of(matter: Matter, store: Any, rank: int) -> _Ledger:
        return _Ledger(store, f"f8fx/{_digest([matter.ranks, matter.about])}", rank)

    def decided(self, ranks: Sequence[int]) -> dict[int, _History]:
        texts = process_store_read(self.store, [f"{self.prefix}/{other}" for other in ranks])
        return {rank: _History.read(text) for rank, text in zip(ranks, texts, strict=True)}

    def decide(self, history: _History) -> None:
        self.store.set(f"{self.prefix}/{self.rank}", history.written())

    def write(self, decided: Sequence[str]) -> str:
        """A decision in full, before an entry points to it; its digest."""
        digest = _digest(decided)
        self.store.set(f"{self.prefix}/{self.rank}/{digest}", "\n".join(decided))
        return digest

    def read(self, other: int, digest: str) -> list[str]:
        return process_store_read(self.store, [f"{self.prefix}/{other}/{digest}"])[0].split("\n")


def _digest(parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _difference(rank: int, mine: Sequence[str], other: int, theirs: Sequence[str]) -> tuple[int, str]:
    return first_difference(f"on rank {rank}", mine, f"on rank {other}", theirs)


def first_difference(here: str, mine: Sequence[str], there: str, theirs: Sequence[str]) -> tuple[int, str]:
    """The first part in which two decisions differ: its index, and what it is where."""
    for index, (one, other) in enumerate(itertools.zip_longest(mine, theirs)):
        if one != other:
            return index, f"{one or 'none'!r} {here} and {other or 'none'!r} {there}"
    raise AssertionError("the decisions are the same")
