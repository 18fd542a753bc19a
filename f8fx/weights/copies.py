"""The float8 copies of one parameter, or of several side by side, and when they are made again (:mod:`f8fx.weights`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from f8fx import ops
from f8fx.kernels.grouped import below_each_other
from f8fx.passes.reuse import CastFormat, ScaleFormat
from f8fx.streams import Made, capturing
from f8fx.torch_private import is_fake, managed_by_fsdp

from .watch import LOCK, Watch, memories_changed

Format = ScaleFormat | CastFormat


#: The attribute of a fake parameter that says what :func:`refusal` says of the one it stands for, without a promise and with one.
_REFUSALS = "_f8fx_refusals"


def refusal(parameter: Tensor, promised: bool = False) -> str | None:
    """Why writes to a parameter cannot be noticed, so that it must be cast at each call; else ``None``.

    Args:
        promised: there are none, or a call of ``refresh_weights`` tells (``weights="constant"``). It is the user's word, and what
            FSDP writes is not the user's.
    """
    if is_fake(parameter):
        return vars(parameter).get(_REFUSALS, {}).get(promised)
    if managed_by_fsdp(parameter):
        return "FSDP gathers weights into it without a trace"
    if promised:
        return None
    if parameter.is_inference():
        return "it was made under torch.inference_mode, where PyTorch counts no changes"
    if parameter.untyped_storage().nbytes() != parameter.numel() * parameter.itemsize:
        return "it is a part of a larger tensor, through which it can be changed without a trace"
    if not parameter.is_cuda and parameter.is_shared():  # CUDA memory says so of itself always
        return "it is in memory that is shared with other processes, whose writes leave no trace here"
    return None


def note_refusals(fake: Tensor, parameter: Tensor) -> None:
    """Lets a fake parameter be refused for the same reasons as the one it stands for."""
    reasons = {promised: refusal(parameter, promised) for promised in (False, True)}
    if any(reasons.values()):
        setattr(fake, _REFUSALS, reasons)


_NOTHING: tuple[Sequence[Format] | None, list[Tensor]] = (None, [])


class Copies:
    """The scales and float8 data of one parameter, or of several side by side.

    Args:
        dim: how they are put together; see :func:`arranged`.
        in_place: for graphs whose inputs keep their address: a new cast goes into the memory of
            the old one. Not so between microbatches, where a backward may still have to read that.
        promised: see :func:`refusal`.
    """

    def __init__(self, dim: int, in_place: bool, promised: bool = False) -> None:
        self.dim = dim
        self.in_place = in_place
        self.promised = promised
        #: a backward may have to read them still
        self.trains = False
        self.tensors: dict[Format, Tensor] = {}
        self.fresh: set[Format] = set()
        #: what was asked for, by the identity of the sequence, which a graph keeps, and what it was given
        self.served: dict[int, tuple[Sequence[Format], list[Tensor]]] = {}
        self.state: Any = None
        self.made: Made | None = None

    def get(
        self, parameters: Sequence[Tensor], watches: Sequence[Watch], formats: Sequence[Format], stream: Any
    ) -> list[Tensor]:
        """The tensors of these formats, made now or when the parameters were in their present state.

        Args:
            stream: the current one; it waits for the casts if another one runs them.
        """
        if capturing():
            # into a CUDA graph: the casts run at every replay, when nobody looks at states, into memory that is the graph's
            return Copies(self.dim, in_place=False).made_anew(parameters, formats)
        state = self._state(parameters, watches)
        if state is not None and state == self.state:
            asked, tensors = self.served.get(id(formats), _NOTHING)
            if asked is formats:
                if self.made is not None:
                    self.made.before(stream, self.tensors.values())
                return tensors
        with LOCK:
            if self.made is not None and state is not None:
                self.made.before(stream, self.tensors.values())
            self._renew(parameters, state, formats)
            self.made = None if state is None else Made(parameters[0].device)
            tensors = [self.tensors[form] for form in formats]
            self.served[id(formats)] = formats, tensors
        return tensors

    @property
    def devices(self) -> set[torch.device]:
        """Where they are; nowhere before the first is made."""
        return {tensor.device for tensor in self.tensors.values()}

    def made_anew(self, parameters: Sequence[Tensor], formats: Sequence[Format]) -> list[Tensor]:
        """The tensors of these formats, whatever there was."""
        self._renew(parameters, None, formats)
        return [self.tensors[form] for form in formats]

    def _state(self, parameters: Sequence[Tensor], watches: Sequence[Watch]) -> Any:
        if len(parameters) == 1:
            return watches[0].state(parameters[0], self.in_place, self.promised)
        states = [
            watch.state(parameter, self.in_place, self.promised)
            for watch, parameter in zip(watches, parameters, strict=True)
        ]
        return None if None in states else states

    def _renew(self, parameters: Sequence[Tensor], state: Any, formats: Sequence[Format]) -> None:
        if state is None or state != self.state:
            self.fresh.clear()
            self.served.clear()
            memories_changed()
        if not self.fresh.issuperset(formats):
            with torch.inference_mode(False), torch.no_grad():
                sources = [parameter.detach() for parameter in parameters]
                source = arranged(sources, self.dim)
                for form in formats:
                    self._make(source, form)
        self.state = None if any(refusal(p, self.promised) for p in parameters) else state

    def _make(self, source: Tensor, form: Format) -> None:
        """One scale or copy, by its definition, if there is none that is fresh."""
        if form in self.fresh:
            return
        if isinstance(form, ScaleFormat):
            amax = ops.amax(source, form.dim)
            new = ops.scale(amax, dtype=form.dtype, power_of_2=form.power_of_2)
        else:
            self._make(source, form.scale)
            new = ops.quantize(
                source,
                self.tensors[form.scale],
                dtype=form.scale.dtype,
                dim=form.scale.dim,
                transpose=form.transpose,
                align=list(form.align),
            )
        old = self.tensors.get(form) if self.in_place else None
        if old is not None and old.shape == new.shape and old.device == new.device:
            # a sign of change is no change: autograd minds writes, also those of the same bits
            same = self.trains and not old.is_meta and _same_bits(old, new)
            new = old if same else old.copy_(new)
        self.tensors[form] = new
        self.fresh.add(form)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    bits = torch.int32 if a.dtype == torch.float32 else torch.uint8
    return torch.equal(a.view(bits), b.view(bits))


def arranged(sources: Sequence[Tensor], dim: int) -> Tensor:
    """What is cast of parameters: see :class:`passes.reuse.Place`."""
    first = sources[0]
    if first.dim() == 3:
        return below_each_other(first, dim)
    return first if len(sources) == 1 else ops.concat(sources, dim)
