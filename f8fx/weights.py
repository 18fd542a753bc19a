"""Float8 copies of parameters, kept from call to call, and never older than the parameter.

With ``weights="cached"`` an inference graph takes the scales and float8 data of its weights as inputs
(:mod:`passes.reuse`), a training graph those of its frozen ones, and the copies live here: one for each parameter, or
parameters side by side, and format, whatever number of graphs read it. Their memory keeps its address when the
weight changes, as CUDA graphs want it, and goes when the parameter goes.

A copy is used again only if the parameter's *state* is what it was when the copy was made. The state
is read at every call, without a look at the data and without waiting for a device:

* ``_version``: in-place operations, ``copy_`` (``load_state_dict``), foreach optimizers;
* the Parameter object and its address: ``load_state_dict(assign=True)``, and whatever moves its memory;
* the number of ``torch.optim`` steps, of any optimizer: fused ones change weights and leave ``_version``
  as it was. A parameter with ``requires_grad=False`` only minds optimizers that train it or another
  parameter on its memory, and, if it was trained itself before, all of them;
* the number of training graphs that f8fx ran with this option, of a frozen parameter those that trained it: an
  optimizer that is not ``torch.optim``'s comes after one of them;
* ``p.data = other``, which is how ``.to()`` works, and reads of ``p.data``. What is written through that alias
  counts in a version of its own. So while there are copies, ``nn.Parameter.data`` is a Python property
  (:mod:`f8fx.parameter_data`): it hands out aliases that all share one version counter, and that counter
  is part of the state. A read by itself makes the next call cast again.

What no signal tells is listed at :func:`refresh_weights`. Where a parameter is known to be written
behind all of these (:func:`refusal`), it is cast at each call.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from . import ops
from .kernels.grouped import below_each_other
from .passes.reuse import CastFormat, ScaleFormat
from .streams import Made, capturing, current
from .torch_private import managed_by_fsdp
from .weight_watch import LOCK, WATCHES, Watch, memory_of, watch_of

Format = ScaleFormat | CastFormat


# -- what the user calls --------------------------------------------------------------------------


def refresh_weights(model: nn.Module | Iterable[nn.Module | Tensor] | None = None) -> None:
    """Drops the float8 copies of a model's weights: the next call casts them anew.

    Needed after writes that leave no trace in PyTorch:

    * through an alias that ``p.data`` handed out before the weight was first cached;
    * through ``.data`` of another tensor with the same memory: one out of ``state_dict()``, ``p.detach()``, ``p.view(...)``;
    * by a collective, a CUDA kernel or a library that is given the memory (``data_ptr``, DLPack, NumPy, ``p.untyped_storage()``);
    * by another process that shares its CUDA memory (on a CPU such weights are not kept);
    * through ``p.data`` inside a function compiled with a backend that runs Dynamo's graphs as they are (``"eager"``);
    * by replaying a CUDA graph that holds an optimizer step;
    * by an optimizer that is not derived from ``torch.optim.Optimizer`` and writes memory in one of these ways, if
      no training graph compiled with this option ran before it;
    * by calling a fused optimizer kernel (``torch._fused_adamw_``, ``torch.optim.adamw.adamw(fused=True)``) oneself;
    * under ``torch.autograd._unsafe_preserve_version_counter``, which hides writes of every kind.

    Args:
        model: a module, or some; or tensors: parameters, and others with the memory of one (``state_dict().values()``).
            Default: all weights there are.

    Raises:
        TypeError: for anything else.
    """
    memory = None if model is None else {memory_of(tensor) for tensor in _tensors(model)} - {None}
    with LOCK:
        watches = list(WATCHES.values())
        chosen = [watch for watch in watches if memory is None or memory_of(watch.reference()) in memory]
        for watch in chosen:
            watch.changes += 1
            watch.drop()


def _tensors(given: nn.Module | Iterable[nn.Module | Tensor]) -> Iterator[Tensor]:
    """The parameters of modules, and tensors as they are."""
    if isinstance(given, nn.Module):
        yield from given.parameters()
        return
    if isinstance(given, (Tensor, str, Mapping)) or not isinstance(given, Iterable):
        raise TypeError(
            f"refresh_weights takes a module, or parameters in a list; got a {type(given).__name__}"
        )
    for part in given:
        if not isinstance(part, (Tensor, nn.Module)):
            hint = "; give .parameters(), not .named_parameters()" if isinstance(part, tuple) else ""
            raise TypeError(
                f"refresh_weights takes a module, or parameters; got a {type(part).__name__}{hint}"
            )
        yield from [part] if isinstance(part, Tensor) else part.parameters()


@contextmanager
def reuse_weights(model: nn.Module) -> Iterator[None]:
    """Casts each weight of a training model once for all microbatches inside the block.

    ::

        for batches in steps:
            with f8fx.reuse_weights(model):
                for batch in batches:
                    model(batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    For graphs compiled with ``options={"weights": "reused"}``. Both copies of a weight, the one the
    forward reads and the one the input gradient reads, stay in memory until the block ends; the bits are
    those of casting anew. A weight that changes inside the block is cast anew, by the same signs as in
    inference (:mod:`f8fx.weights`), but that a training graph ran: between microbatches it tells nothing.

    Raises:
        TypeError: if the model is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"reuse_weights takes a module, got a {type(model).__name__}")
    scope = _Scope(model)
    _SCOPES.append(scope)
    try:
        yield
    finally:
        _SCOPES[:] = [other for other in _SCOPES if other is not scope]
        unused = not scope.copies
        scope.copies.clear()
    if unused:
        warnings.warn(
            "f8fx: no weight was reused inside reuse_weights: the model is to be compiled with "
            'backend="f8fx", options={"weights": "reused"}, and some of its converted matmuls are to read parameters '
            "themselves; weights that the graph computes (weight_norm, masks, W + B @ A) are cast in every call",
            stacklevel=3,
        )


# -- what graphs call -----------------------------------------------------------------------------


#: Parameters that are cast as one, how they are put together (:func:`arranged`), and the formats.
Wanted = tuple[Sequence[Tensor], int, Sequence[Format]]


def cached(wanted: Iterable[Wanted], training: bool = False) -> list[Tensor]:
    """Scales and copies of parameters that last from call to call, those of each in turn.

    Args:
        training: a graph takes them that may keep them for its backward.
    """
    result: list[Tensor] = []
    streams: dict[torch.device, Any] = {}
    for parameters, dim, formats in wanted:
        watches = tuple(map(watch_of, parameters))
        copies = watches[0].copies.get((dim, watches))
        if copies is None:
            copies = _keep(watches, dim)
        copies.trains |= training
        result += copies.get(parameters, watches, formats, _stream(parameters[0], streams))
    return result


def reused(wanted: Iterable[Wanted], training: bool = True) -> list[Tensor]:
    """The same for a training graph: kept inside :func:`reuse_weights`, made anew outside."""
    result: list[Tensor] = []
    streams: dict[torch.device, Any] = {}
    for parameters, dim, formats in wanted:
        copies = None
        key = (dim, *map(id, parameters))
        for scope in _SCOPES:
            if scope.parameters.keys() >= set(key[1:]):
                copies = scope.copies.setdefault(key, _Copies(dim, in_place=False))
        copies = copies or _Copies(dim, in_place=False)
        watches = tuple(map(watch_of, parameters))
        result += copies.get(parameters, watches, formats, _stream(parameters[0], streams))
    return result


def made_anew(wanted: Iterable[Wanted], training: bool = False) -> list[Tensor]:
    """The same, kept nowhere: of fake tensors, with which DDPOptimizer calls what it has compiled."""
    result: list[Tensor] = []
    for parameters, dim, formats in wanted:
        result += _Copies(dim, in_place=False).made_anew(parameters, formats)
    return result


def _stream(parameter: Tensor, known: dict[torch.device, Any]) -> Any:
    """The current stream of the parameter's device, asked for once for each call of a graph."""
    device = parameter.device
    if device not in known:
        known[device] = current(device)
    return known[device]


def refusal(parameter: Tensor) -> str | None:
    """Why writes to a parameter cannot be noticed, so that it must be cast at each call; else ``None``."""
    if parameter.is_inference():
        return "it was made under torch.inference_mode, where PyTorch counts no changes"
    if managed_by_fsdp(parameter):
        return "FSDP gathers weights into it without a trace"
    if parameter.untyped_storage().nbytes() != parameter.numel() * parameter.itemsize:
        return "it is a part of a larger tensor, through which it can be changed without a trace"
    if not parameter.is_cuda and parameter.is_shared():  # CUDA memory says so of itself always
        return "it is in memory that is shared with other processes, whose writes leave no trace here"
    return None


# -- copies ---------------------------------------------------------------------------------------


_NOTHING: tuple[Sequence[Format] | None, list[Tensor]] = (None, [])


class _Copies:
    """The scales and float8 data of one parameter, or of several side by side.

    Args:
        dim: how they are put together; see :func:`arranged`.
        in_place: for graphs whose inputs keep their address: a new cast goes into the memory of
            the old one. Not so between microbatches, where a backward may still have to read that.
    """

    def __init__(self, dim: int, in_place: bool) -> None:
        self.dim = dim
        self.in_place = in_place
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
        state = self._state(parameters, watches)
        # a cast captured into a CUDA graph runs at every replay, when nobody looks at states
        if state is not None and parameters[0].is_cuda and capturing():
            state = None
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

    def made_anew(self, parameters: Sequence[Tensor], formats: Sequence[Format]) -> list[Tensor]:
        """The tensors of these formats, whatever there was."""
        self._renew(parameters, None, formats)
        return [self.tensors[form] for form in formats]

    def _state(self, parameters: Sequence[Tensor], watches: Sequence[Watch]) -> Any:
        if len(parameters) == 1:
            return watches[0].state(parameters[0], self.in_place)
        states = [
            watch.state(parameter, self.in_place)
            for watch, parameter in zip(watches, parameters, strict=True)
        ]
        return None if None in states else states

    def _renew(self, parameters: Sequence[Tensor], state: Any, formats: Sequence[Format]) -> None:
        if state is None or state != self.state:
            self.fresh.clear()
            self.served.clear()
        if not self.fresh.issuperset(formats):
            with torch.inference_mode(False), torch.no_grad():
                sources = [parameter.detach() for parameter in parameters]
                source = arranged(sources, self.dim)
                for form in formats:
                    self._make(source, form)
        self.state = None if any(map(refusal, parameters)) else state

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
            same = self.trains and not capturing() and _same_bits(old, new)
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


class _Scope:
    """One :func:`reuse_weights` block."""

    def __init__(self, model: nn.Module) -> None:
        # held, so that no other parameter can have these ids
        self.parameters = {id(parameter): parameter for parameter in model.parameters()}
        self.copies: dict[tuple[int, ...], _Copies] = {}


_SCOPES: list[_Scope] = []


def _keep(watches: tuple[Watch, ...], dim: int) -> _Copies:
    """Where copies of these parameters are kept."""
    with LOCK:
        copies = watches[0].copies.setdefault((dim, watches), _Copies(dim, in_place=True))
        for watch in watches:
            watch.keepers.add(watches[0])
    return copies
