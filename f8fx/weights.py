"""Float8 copies of parameters, kept from call to call, and never older than the parameter.

With ``weights="cached"`` an inference graph takes the scales and float8 data of its weights as inputs
(:mod:`passes.reuse`), and the copies live here: one for each parameter and format, whatever number
of graphs read it. Their memory keeps its address when the weight changes, as CUDA graphs want it,
and goes when the parameter goes.

A copy is used again only if the parameter's *state* is what it was when the copy was made. The state
is read at every call, without a look at the data and without waiting for a device:

* ``_version``: in-place operations, ``copy_`` (``load_state_dict``), foreach optimizers;
* the Parameter object and its address: ``load_state_dict(assign=True)``, and whatever moves its memory;
* the number of ``torch.optim`` steps, of any optimizer: fused ones change weights and leave ``_version``
  as it was. A parameter with ``requires_grad=False`` only minds optimizers that hold it or another
  parameter on its memory;
* the number of training graphs that f8fx ran with this option: an optimizer that is not
  ``torch.optim``'s comes after one of them;
* ``p.data = other``, which is how ``.to()`` works, and reads of ``p.data``. What is written through that alias
  counts in a version of its own. So while there are copies, ``nn.Parameter.data`` is a Python property
  (:mod:`f8fx.parameter_data`): it hands out aliases that all share one version counter, and that counter
  is part of the state. A read by itself makes the next call cast again.

What no signal tells is listed at :func:`refresh_weights`. Where a parameter is known to be written
behind all of these (:func:`refusal`), it is cast at each call.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import ops
from .parameter_data import Installation, version_probe, with_version_of
from .passes.reuse import CastFormat, ScaleFormat
from .streams import Made, capturing, current
from .torch_private import managed_by_fsdp, storage_key, version_counter

Format = ScaleFormat | CastFormat


# -- what the user calls --------------------------------------------------------------------------


def refresh_weights(model: nn.Module | Iterable[Tensor] | None = None) -> None:
    """Drops the float8 copies of a model's weights: the next call casts them anew.

    Needed after writes that leave no trace in PyTorch:

    * through an alias that ``p.data`` handed out before the weight was first cached;
    * through ``.data`` of another tensor with the same memory: one out of ``state_dict()``, ``p.detach()``, ``p.view(...)``;
    * by a collective, a CUDA kernel or a library that is given the memory's address (``data_ptr``, DLPack, NumPy);
    * by replaying a CUDA graph that holds an optimizer step;
    * by an optimizer that is not derived from ``torch.optim.Optimizer`` and writes memory in one of these ways, if
      no training graph compiled with this option ran before it;
    * by calling a fused optimizer kernel (``torch._fused_adamw_``, ``torch.optim.adamw.adamw(fused=True)``) oneself;
    * under ``torch.autograd._unsafe_preserve_version_counter``, which hides writes of every kind.

    Args:
        model: a module, or parameters; default: all there are.
    """
    with _LOCK:
        if model is None:
            chosen = list(_WATCHES.values())
        else:
            parameters = model.parameters() if isinstance(model, nn.Module) else model
            found = (_WATCHES.get(id(parameter)) for parameter in parameters)
            chosen = [watch for watch in found if watch is not None]
        for watch in chosen:
            watch.changes += 1
            watch.copies = None


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
    inference (:mod:`f8fx.weights`).
    """
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
            'backend="f8fx", options={"weights": "reused"}, and some of its matmuls converted',
            stacklevel=3,
        )


# -- what graphs call -----------------------------------------------------------------------------


def cached(parameters: Iterable[tuple[Tensor, Sequence[Format]]]) -> list[Tensor]:
    """Scales and copies of parameters for an inference graph, those of each in turn."""
    result: list[Tensor] = []
    streams: dict[torch.device, Any] = {}
    for parameter, formats in parameters:
        watch = _WATCHES.get(id(parameter))
        if watch is None or watch.reference() is not parameter:
            watch = _watch(parameter)
        if watch.copies is None:
            watch.copies = _Copies(in_place=True)
        result += watch.copies.get(parameter, watch, formats, _stream(parameter, streams))
    return result


def reused(parameters: Iterable[tuple[Tensor, Sequence[Format]]]) -> list[Tensor]:
    """The same for a training graph: kept inside :func:`reuse_weights`, made anew outside."""
    result: list[Tensor] = []
    streams: dict[torch.device, Any] = {}
    for parameter, formats in parameters:
        copies = None
        for scope in _SCOPES:
            if id(parameter) in scope.parameters:
                copies = scope.copies.setdefault(id(parameter), _Copies(in_place=False))
        copies = copies or _Copies(in_place=False)
        result += copies.get(parameter, _watch(parameter), formats, _stream(parameter, streams))
    return result


def _stream(parameter: Tensor, known: dict[torch.device, Any]) -> Any:
    """The current stream of the parameter's device, asked for once for each call of a graph."""
    device = parameter.device
    if device not in known:
        known[device] = current(device)
    return known[device]


def training_ran() -> None:
    """Notes that a training graph ran, after which weights are likely to change."""
    global _RUNS
    with _LOCK:
        _RUNS += 1


def refusal(parameter: Tensor) -> str | None:
    """Why writes to a parameter cannot be noticed, so that it must be cast at each call; else ``None``."""
    if parameter.is_inference():
        return "it was made under torch.inference_mode, where PyTorch counts no changes"
    if managed_by_fsdp(parameter):
        return "FSDP gathers weights into it without a trace"
    if parameter.untyped_storage().nbytes() != parameter.numel() * parameter.itemsize:
        return "it is a part of a larger tensor, through which it can be changed without a trace"
    return None


# -- copies ---------------------------------------------------------------------------------------


_NOTHING: tuple[Sequence[Format] | None, list[Tensor]] = (None, [])


class _Copies:
    """The scales and float8 data of one parameter.

    Args:
        in_place: for inference graphs, whose inputs keep their address: a new cast goes into the memory of
            the old one. Not so in training, where a backward may still have to read that.
    """

    def __init__(self, in_place: bool) -> None:
        self.in_place = in_place
        self.tensors: dict[Format, Tensor] = {}
        self.fresh: set[Format] = set()
        #: what was asked for, by the identity of the sequence, which a graph keeps, and what it was given
        self.served: dict[int, tuple[Sequence[Format], list[Tensor]]] = {}
        self.state: Any = None
        self.made: Made | None = None

    def get(self, parameter: Tensor, watch: _Watch, formats: Sequence[Format], stream: Any) -> list[Tensor]:
        """The tensors of these formats, made now or when the parameter was in its present state.

        Args:
            stream: the current one; it waits for the casts if another one runs them.
        """
        state = watch.state(parameter, self.in_place)
        # a cast captured into a CUDA graph runs at every replay, when nobody looks at states
        if state is not None and parameter.is_cuda and capturing():
            state = None
        if state is not None and state == self.state:
            asked, tensors = self.served.get(id(formats), _NOTHING)
            if asked is formats:
                if self.made is not None:
                    self.made.before(stream, self.tensors.values())
                return tensors
        with _LOCK:
            if self.made is not None and state is not None:
                self.made.before(stream, self.tensors.values())
            self._renew(parameter, state, formats)
            self.made = None if state is None else Made(parameter.device)
            tensors = [self.tensors[form] for form in formats]
            self.served[id(formats)] = formats, tensors
        return tensors

    def _renew(self, parameter: Tensor, state: Any, formats: Sequence[Format]) -> None:
        if state is None or state != self.state:
            self.fresh.clear()
            self.served.clear()
        for form in formats:
            self._make(parameter, form)
        self.state = None if refusal(parameter) else state

    def _make(self, parameter: Tensor, form: Format) -> None:
        """One scale or copy, by its definition, if there is none that is fresh."""
        if form in self.fresh:
            return
        with torch.inference_mode(False), torch.no_grad():
            source = parameter.detach()
            if isinstance(form, ScaleFormat):
                amax = ops.amax(source, form.dim)
                new = ops.scale(amax, dtype=form.dtype, power_of_2=form.power_of_2)
            else:
                self._make(parameter, form.scale)
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
                new = old.copy_(new)
        self.tensors[form] = new
        self.fresh.add(form)


class _Scope:
    """One :func:`reuse_weights` block."""

    def __init__(self, model: nn.Module) -> None:
        # held, so that no other parameter can have these ids
        self.parameters = {id(parameter): parameter for parameter in model.parameters()}
        self.copies: dict[int, _Copies] = {}


# -- signs of change ------------------------------------------------------------------------------


class _Watch:
    """What is known of one parameter's changes, beyond what its tensor says itself."""

    def __init__(self, parameter: Tensor) -> None:
        key = id(parameter)
        self.reference = weakref.ref(parameter, lambda _: _forget(key, self_reference()))
        self_reference = weakref.ref(self)
        self.copies: _Copies | None = None
        #: reads of ``.data``, optimizer steps, refreshes
        self.changes = 0
        # empty tensors that count the versions of the aliases that ``.data`` handed out, and of the tensor
        # it was last set to
        self.alias: Tensor | None = None
        self.source: Tensor | None = None

    def state(self, parameter: Tensor, inference: bool) -> Any:
        """Equal at two times only if nothing is known to have changed between them; ``None``: not known.

        Args:
            inference: whether a training graph that ran is a sign of change. Not between microbatches.
        """
        if parameter.is_inference():
            return None
        return (
            version_counter(parameter),
            parameter.data_ptr(),
            self.changes,
            -1 if self.alias is None else version_counter(self.alias),
            -1 if self.source is None else version_counter(self.source),
            (_STEPS + _RUNS if inference else _STEPS) if parameter.requires_grad else -1,
        )

    def was_read(self, alias: Tensor) -> Tensor:
        """Notes that ``.data`` was read; the alias to hand out."""
        self.changes += 1
        if alias.is_inference():
            return alias
        if self.alias is None:
            self.alias = version_probe(alias)
        return with_version_of(self.alias, alias)

    def was_set(self, value: Tensor) -> None:
        """Notes that ``.data`` was set to a tensor, which from then on shares the parameter's memory."""
        self.changes += 1
        self.source = None if value.is_inference() else version_probe(value)


_LOCK = threading.RLock()
_WATCHES: dict[int, _Watch] = {}
_SCOPES: list[_Scope] = []
_STEPS = 0
_RUNS = 0


def _watch(parameter: Tensor) -> _Watch:
    watch = _WATCHES.get(id(parameter))
    if watch is not None and watch.reference() is parameter:
        return watch
    with (
        _LOCK
    ):  # looked up again: another thread's watch must not be put out of the record while it is in use
        watch = _WATCHES.get(id(parameter))
        if watch is None or watch.reference() is not parameter:
            watch = _WATCHES[id(parameter)] = _Watch(parameter)
            _SIGNALS.install()
    return watch


def _forget(key: int, watch: _Watch | None) -> None:
    """A parameter is gone, and with it its copies."""
    with _LOCK:
        if watch is not None and _WATCHES.get(key) is watch:
            del _WATCHES[key]
        if not _WATCHES:
            _SIGNALS.uninstall()


class _Signals:
    """The optimizer hook and the ``.data`` property; there while any parameter is watched."""

    def __init__(self) -> None:
        self.hook: Any = None
        self.data: Any = None

    def install(self) -> None:
        if self.hook is None:
            self.hook = register_optimizer_step_post_hook(_after_step)
            self.data = Installation(_on_read, _on_set)

    def uninstall(self) -> None:
        if self.hook is not None:
            self.hook.remove()
            self.data.remove()
            self.hook = self.data = None


_SIGNALS = _Signals()


@torch.compiler.disable
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    global _STEPS
    with _LOCK:
        _STEPS += 1
        watches = list(_WATCHES.values())
    # by memory: a frozen copy of a model may share that of the model in training
    watched: dict[int | None, list[_Watch]] = {}
    for watch in watches:
        watched.setdefault(_memory(watch.reference()), []).append(watch)
    watched.pop(None, None)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for watch in watched.get(_memory(parameter), ()):
                watch.changes += 1


def _memory(parameter: Tensor | None) -> int | None:
    """Equal for parameters on one memory; ``None`` for those that have none: gone, sparse, lazy."""
    try:
        return None if parameter is None else storage_key(parameter)
    except (NotImplementedError, ValueError):
        return None


def _on_read(parameter: Tensor, alias: Tensor) -> Tensor:
    watch = _WATCHES.get(id(parameter))
    return alias if watch is None or watch.reference() is not parameter else watch.was_read(alias)


def _on_set(parameter: Tensor, value: Tensor) -> None:
    watch = _WATCHES.get(id(parameter))
    if watch is not None and watch.reference() is parameter:
        watch.was_set(value)
