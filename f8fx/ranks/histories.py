"""What each rank has decided in a matter, as it stands in the process group's store."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from f8fx.torch_private import process_store_read


@dataclass(frozen=True)
class History:
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
    def read(text: str) -> History:
        if not text:
            return History()
        agreed, repetitions, asides = text.split("|")
        return History(tuple(agreed.split()), tuple(repetitions.split()), int(asides))

    def written(self) -> str:
        return f"{' '.join(self.agreed)}|{' '.join(self.repetitions)}|{self.asides}"

    def then(self, digest: str) -> History:
        return replace(self, agreed=(*self.agreed, digest))

    def repeated(self, digest: str) -> History:
        return replace(self, repetitions=(*self.repetitions, digest))


@dataclass(frozen=True)
class Histories:
    """The histories of ranks in the store, ``agreed|repetitions|asides``."""

    store: Any
    prefix: str
    rank: int

    @staticmethod
    def of(matter: object, store: Any, rank: int) -> Histories:
        """What ``matter`` is known by is alike on all ranks."""
        return Histories(store, f"f8fx/{_digest(matter)}", rank)

    def decided(self, ranks: Sequence[int]) -> dict[int, History]:
        texts = process_store_read(self.store, [f"{self.prefix}/{other}" for other in ranks])
        return {rank: History.read(text) for rank, text in zip(ranks, texts, strict=True)}

    def decide(self, history: History) -> None:
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
