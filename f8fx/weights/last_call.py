"""What a graph was given at its last call with the same weights, if nothing has changed since.

To ask each parameter for its state (:meth:`f8fx.weights.watch.Watch.state`) takes microseconds, and a model has hundreds
of parameters: more than it takes a CUDA graph to replay a layer. So first it is seen whether there was a sign of change of
*any* parameter, and whether those of the graph are the same objects, in the same memory, of the same versions. Every sign that
counts for one of them counts here for all: what is given again here would be given again there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from f8fx.streams import capturing, current
from f8fx.torch_private import version_counter

from .watch import LAST_CALLS, LOCK, last_sign, version_of, watch_of


class _Signs(NamedTuple):
    """All that is equal at two times only if nothing is known to have changed between them."""

    number: int
    identities: list[int]  # as long as the number is the last one, none of them has gone
    counted: bool  # none was made in inference mode
    versions: list[int]
    addresses: list[int]
    trainable: list[bool]
    probes: list[Tensor]
    probed: list[int]
    streams: list[tuple[torch.device, int | None]]

    def still(self, parameters: Sequence[Tensor]) -> bool:
        """Whether they are those of these parameters now, and of the streams that are current."""
        return (
            self.number == last_sign()
            and self.identities == list(map(id, parameters))
            and self.versions == list(map(version_counter if self.counted else version_of, parameters))
            and self.addresses == [parameter.data_ptr() for parameter in parameters]
            and self.trainable == [parameter.requires_grad for parameter in parameters]
            and self.probed == list(map(version_counter, self.probes))
            and all(stream == _stream(device) for device, stream in self.streams)
            and not capturing()
        )


class LastCall:
    """The copies that one graph was given at its last calls: one for each layer, where layers share a graph.

    Args:
        promised: see :func:`f8fx.weights.copies.refusal`.
    """

    def __init__(self, promised: bool = False) -> None:
        self.promised = promised
        #: by the first parameter, which has gone if another has its id: and with it all that is here
        self._given: dict[int, tuple[_Signs, list[Tensor]]] = {}
        with LOCK:
            LAST_CALLS.add(self)

    def forget(self) -> None:
        """Lets go of the copies."""
        self._given = {}

    def tensors(
        self, parameters: Sequence[Tensor], fetch: Callable[[], tuple[list[Tensor], bool]]
    ) -> list[Tensor]:
        """The copies of these parameters, those of the last call if nothing has changed since.

        Args:
            fetch: asks each parameter; gives the copies, and whether they last.
        """
        first = id(parameters[0])
        given = self._given.get(first)
        if given is not None and given[0].still(parameters):
            return given[1]
        # in what there is now: if copies are dropped in the meantime, what is put there is not found again
        kept = self._given
        kept.pop(first, None)
        # those from before: what changes while the copies are made may be in them or not
        counted = not any(parameter.is_inference() for parameter in parameters)
        signs = _signs(parameters, counted) if counted or self.promised else None
        tensors, last = fetch()
        # what is captured into a CUDA graph has no values before that is replayed, and lies in memory of that graph's
        if last and signs is not None and not capturing():
            kept[first] = signs, tensors
        return tensors


def _signs(parameters: Sequence[Tensor], counted: bool) -> _Signs:
    probes = [probe for parameter in parameters for probe in watch_of(parameter).probes]
    devices = dict.fromkeys(parameter.device for parameter in parameters)
    return _Signs(
        last_sign(),
        list(map(id, parameters)),
        counted,
        list(map(version_of, parameters)),
        [parameter.data_ptr() for parameter in parameters],
        [parameter.requires_grad for parameter in parameters],
        probes,
        list(map(version_counter, probes)),
        [(device, _stream(device)) for device in devices],
    )


def _stream(device: torch.device) -> int | None:
    stream = current(device)
    return None if stream is None else stream.stream_id
