"""Ranks never disagree: an error at compile time instead of a collective that hangs.

What float8 replaces is decided from global shapes, so that ranks come to the same decision by themselves. Still,
one of them may have another filter, another version, or, under ``select="auto"``, another batch size on the
other side of a threshold. So before a graph with gathers is used, ranks compare what they will send
(:mod:`f8fx.ranks.ledger`). A graph is known by what the gathers were before, and by the
ranks of their group: pipeline stages, which compile different graphs, never wait for each other.

A graph from a cache is compared like a new one: the record of decisions holds what it sends.

Ranks may agree on two decisions about equal graphs, one after the other: on batches of both sides of a threshold, say. Each rank then has
both graphs, and nobody compiles when one takes the other's. So graphs of such a matter, and no others, compare what they send in
each call (:func:`checked`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from f8fx.report import Traffic
from f8fx.torch_private import assert_on_device, same_on_all

from .ledger import Matter, RankDisagreement, agree, first_difference, others_known, stand_aside

_PLAIN = "as without f8fx"
_REMEDY = (
    'Options, filters, versions and (under select="auto") batch sizes must be the same on all ranks, and no rank\'s batch be empty; '
    'options={"wire": "off"} leaves all gathers as they are'
)


def confirm(traffic: Sequence[Traffic]) -> None:
    """Returns once all ranks of each group have decided alike, at once where the gathers are left as they are.

    Raises:
        RankDisagreement: if one decided differently, or compiled no such graph within the process group's timeout.
    """
    for one in traffic:
        if one.is_left:
            stand_aside(_Graph.of(one))
        else:
            agree(_Graph.of(one))


def as_plain(traffic: Iterable[Traffic]) -> list[Traffic]:
    """What a graph sends that is to run as if f8fx were not there."""
    return [replace(one, sends=(_PLAIN,)) for one in traffic]


def checked(
    compiled: Callable[..., Any], traffic: Iterable[Traffic], example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """A compiled graph that makes sure, where ranks have agreed on several decisions, that all run the same one.

    That costs an all-reduce of 16 bytes a call and no wait of the host: on GPUs the error is an assertion on the device.

    Args:
        traffic: what was confirmed for the graph.
    """
    matters = [_Graph.of(one) for one in dict.fromkeys(traffic) if not one.is_left]
    devices = [value.device for value in example_inputs if isinstance(value, torch.Tensor)]
    if not matters or not devices:
        return compiled
    # that of the gathers: a number may be on the CPU, where NCCL carries nothing
    device = next((each for each in devices if each.type != "cpu"), devices[0])

    def run(*args: Any) -> Any:
        for matter in matters:
            if others := others_known(matter):
                matter.compare(others, device)
        return compiled(*args)

    return run


class _Graph(Matter):
    """What a graph sends over one group."""

    @staticmethod
    def of(traffic: Traffic) -> _Graph:
        # those of training and of evaluation may be decided differently, and all ranks do the same of the two
        about = ("training" if traffic.training else "inference", *traffic.gathers)
        return _Graph(traffic.ranks, about, traffic.sends, traffic.group)

    def compare(self, others: Sequence[tuple[str, ...]], device: torch.device) -> None:
        """All ranks of the group tell each other, in one small all-reduce, a hash of what was decided for the graph that they are about to run.

        Raises:
            RankDisagreement: if ranks are about to run graphs that were decided differently; not on GPUs.
        """
        digest = int.from_bytes(hashlib.sha256(repr(self.decided).encode()).digest()[:4], "big")
        with torch.no_grad():
            same = same_on_all(digest, self.group, device)
        index, what = first_difference("on this rank", self.decided, "on another", others[0])
        message = (
            f"f8fx: ranks run graphs that were decided differently, and would have hung or read each other's bytes as "
            f"something else. Collective {index} would be {what}. {_REMEDY}"
        )
        if device.type == "cpu":
            if not same:
                raise RankDisagreement(message)
        else:
            assert_on_device(same, message)

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
            f"f8fx: rank {rank} compiled a graph with {len(self.about) - 1} all-gathers over ranks {list(self.ranks)}, but "
            f"rank {others} compiled no such graph within {seconds:.0f} s. If ranks do compile different graphs over one "
            'group, options={"wire": "off"} on all of them leaves all gathers as they are'
        )

    def aside(self, others: str) -> str:
        return (
            f"f8fx: rank {others} compiled a graph with {len(self.about) - 1} all-gathers over ranks {list(self.ranks)} with "
            'options={"wire": "off"}, and not all ranks did. That option must be the same on all of them'
        )
