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

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from f8fx.torch_private import group_timeout, process_store

from .histories import Histories, History

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


def _histories(matter: Matter, store: Any, rank: int) -> Histories:
    return Histories.of([matter.ranks, matter.about], store, rank)


def agree(matter: Matter) -> None:
    """Returns once all ranks have decided alike.

    Raises:
        RankDisagreement: if one decided differently, or not at all within the process group's timeout.
    """
    if (found := process_store()) is None:
        return
    decision = _Decision.of(matter, *found)
    decision.settle()
    known = _AGREED.setdefault(_key(matter), [])
    if not decision.before.agreed:  # with other processes than before
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
    histories = _histories(matter, *found)
    rank = histories.rank
    before = histories.decided([rank])[rank]
    histories.decide(replace(before, asides=before.asides + 1))
    others = histories.decided([other for other in matter.ranks if other != rank])
    # who has stood aside more often has decided at a later place
    if any(len(o.agreed) > len(before.agreed) and o.asides <= before.asides for o in others.values()):
        raise RankDisagreement(matter.aside(str(rank)))


@dataclass(frozen=True)
class _Decision:
    """A decision of this rank, and what had been decided when it was made.

    Attributes:
        digest: of what this rank has decided.
        before: what it had decided earlier.
        others: what the others had.
        timeout: of the process group.
    """

    matter: Matter
    histories: Histories
    digest: str
    before: History
    others: dict[int, History]
    timeout: timedelta

    @staticmethod
    def of(matter: Matter, store: Any, rank: int) -> _Decision:
        histories = _histories(matter, store, rank)
        others = histories.decided([*{*matter.ranks, rank}])
        before, digest = others.pop(rank), histories.write(matter.decided)
        return _Decision(matter, histories, digest, before, others, group_timeout(matter.group) or TIMEOUT)

    @property
    def _everybody(self) -> list[History]:
        return [self.before, *self.others.values()]

    @property
    def _is_known(self) -> bool:
        """Whether all ranks have decided so before."""
        return all(self.digest in history.agreed for history in self._everybody)

    @property
    def _is_new(self) -> bool:
        """Whether all have decided before, but not all of them so."""
        return not self._is_known and all(history.agreed for history in self._everybody)

    def settle(self) -> None:
        """Compares with the others, and waits for those who must decide now, too.

        Raises:
            RankDisagreement: see :func:`agree`.
        """
        self._compare(self.others)
        alone = min(ALONE, self.timeout)
        if all({*history.agreed} == {self.digest} for history in self._everybody):
            self.histories.decide(self.before.repeated(self.digest))
        elif any(map(self._is_ahead, self.others.values())):
            self.histories.decide(self.before.repeated(self.digest))
            self._wait(alone, self._is_ahead)
        elif self._is_known:
            self.histories.decide(self.before.then(self.digest))
            if self._wait(alone, self._has_decided):  # so that the next decision of all counts as one
                self.histories.decide(self.before.repeated(self.digest))
        else:
            limit = min(ANEW, self.timeout / 2) if self._is_new else self.timeout
            self.histories.decide(self.before.then(self.digest))
            if absent := self._wait(limit, self._has_decided):
                self.histories.decide(self.before)
                raise RankDisagreement(self._left_alone(absent, limit.total_seconds()))

    def _is_ahead(self, other: History) -> bool:
        """Whether this rank makes again what the other one made again some time ago."""
        return self._is_known and other.repetitions.count(self.digest) > self.before.repetitions.count(
            self.digest
        )

    def _has_decided(self, other: History) -> bool:
        """Whether the other one has made as many decisions as this rank with this one."""
        return len(other.agreed) > len(self.before.agreed)

    def _compare(self, published: dict[int, History]) -> None:
        for other, history in published.items():
            theirs = history.agreed[len(self.before.agreed) :][:1]
            if theirs and theirs != (self.digest,) and not self._is_ahead(history):
                self.histories.decide(self.before.then(self.digest))  # the other one waits for it
                raise RankDisagreement(self.matter.differs(*self._difference(other, theirs[0])))

    def _wait(self, limit: timedelta, is_done: Callable[[History], bool]) -> list[int]:
        """Those who have not done so in time."""
        waiting, start, pause = list(self.others), time.monotonic(), _POLL_SECONDS[0]
        while True:
            published = self.histories.decided(waiting)
            self._compare(published)
            waiting = [other for other in waiting if not is_done(published[other])]
            waited = time.monotonic() - start
            if waited >= min(ALONE, limit).total_seconds():
                self._refuse_aside({other: published[other].asides for other in waiting})
            if not waiting or waited >= limit.total_seconds():
                return waiting
            time.sleep(min(pause, limit.total_seconds() - waited))
            pause = min(2 * pause, _POLL_SECONDS[1])

    def _refuse_aside(self, asides: dict[int, int]) -> None:
        """An error if one of those who are waited for has said that it decides nothing here."""
        aside = {other: count for other, count in asides.items() if count > self.before.asides}
        if aside and not self._is_known:
            self.histories.decide(
                replace(self.before, asides=max(aside.values()))
            )  # the next decision of all is one
            raise RankDisagreement(self.matter.aside(", ".join(map(str, aside))))

    def _left_alone(self, absent: Sequence[int], seconds: float) -> str:
        rank, others = self.histories.rank, ", ".join(map(str, absent))
        if not self._is_new:
            return self.matter.missing(rank, others, seconds)
        earlier = self.histories.decided(absent)[absent[0]].agreed[-1]
        return self.matter.alone(rank, others, seconds, *self._difference(absent[0], earlier))

    def _difference(self, other: int, theirs: str) -> tuple[int, str]:
        decided = self.histories.read(other, theirs)
        return first_difference(
            f"on rank {self.histories.rank}", self.matter.decided, f"on rank {other}", decided
        )


def first_difference(here: str, mine: Sequence[str], there: str, theirs: Sequence[str]) -> tuple[int, str]:
    """The first part in which two decisions differ: its index, and what it is where."""
    for index, (one, other) in enumerate(itertools.zip_longest(mine, theirs)):
        if one != other:
            return index, f"{one or 'none'!r} {here} and {other or 'none'!r} {there}"
    raise AssertionError("the decisions are the same")
