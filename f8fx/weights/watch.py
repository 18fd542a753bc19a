"""Signs that a parameter has changed since its float8 copies were made (:mod:`f8fx.weights`)."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from f8fx.torch_private import (
    local_part,
    optimizer_hooks_run,
    optimizer_step_runs,
    storage_key,
    version_counter,
)

from .parameter_data import Installation, version_probe, with_version_of


class Watch:
    """What is known of one parameter's changes, beyond what its tensor says itself."""

    def __init__(self, parameter: Tensor) -> None:
        key = id(parameter)
        self_reference = weakref.ref(self)

        def gone(_: Any, ends: Callable[[], bool] = sys.is_finalizing) -> None:
            if not ends():  # where modules lose their names
                _forget(key, self_reference())

        self.reference = weakref.ref(parameter, gone)
        #: of it and of those that are cast with it, by the dimension along which they stand side by side, and whether there is a
        #: promise (:func:`f8fx.weights.copies.refusal`); kept by the first
        self.copies: dict[tuple[int, tuple[Watch, ...], bool], Any] = {}
        #: those that keep copies in which it has a part
        self.keepers: set[Watch] = set()
        #: the last read of ``.data``, optimizer step or refresh
        self.changes = 0
        #: training graphs that have run and that it needed a gradient in
        self.trained = 0
        # empty tensors that count the versions of the aliases that ``.data`` handed out, and of the tensors
        # it was set to: the first and the last on the memory it has
        self.alias: Tensor | None = None
        self.sources: tuple[Tensor, ...] = ()
        self.source_memory: int | None = None
        # the DTensor that it was last read as a part of, and how often that was written to
        self.whole: tuple[int, int] | None = None

    def state(self, parameter: Tensor, inference: bool, promised: bool = False) -> Any:
        """Equal at two times only if nothing is known to have changed between them; ``None``: not known.

        Args:
            inference: whether a training graph that ran is a sign of change. Not between microbatches.
            promised: see :func:`f8fx.weights.copies.refusal`.
        """
        if (parameter.is_inference() and not promised) or not _SIGNALS.are_there() or _is_stepped(parameter):
            return None
        return (
            version_of(parameter),
            parameter.data_ptr(),
            self.changes,
            -1 if self.alias is None else version_counter(self.alias),
            tuple(map(version_counter, self.sources)),
            self._trainings(parameter, inference),
        )

    def _trainings(self, parameter: Tensor, inference: bool) -> Any:
        if parameter.requires_grad:
            return _STEPS, _RUNS if inference else 0
        # frozen again, it may have been written to in between; by others' training it is not
        return (_STEPS, self.trained, "frozen") if self.trained else None

    def note_whole(self, whole: Tensor) -> None:
        """Notes which DTensor it is read as a part of: what was written to that may have changed it."""
        state = id(whole), version_of(whole)
        if self.whole != state:
            self.whole = state
            self.changed()

    def changed(self) -> None:
        """Notes that it may have changed."""
        self.changes = _next_sign()

    @property
    def probes(self) -> tuple[Tensor, ...]:
        """What counts the versions of its aliases."""
        return self.sources if self.alias is None else (self.alias, *self.sources)

    def drop(self) -> None:
        """Drops the copies in which it has a part."""
        _next_sign()
        for call in list(LAST_CALLS):
            call.forget()
        # a list: what is made here may have Python collect garbage, and with it another of a keeper's parameters
        for keeper in list(self.keepers):
            others = {watch for key in keeper.copies if self in key[1] for watch in key[1]} - {self}
            keeper.copies = {key: copies for key, copies in keeper.copies.items() if self not in key[1]}
            for watch in others.difference(*(key[1] for key in keeper.copies)):
                watch.keepers.discard(keeper)
        self.keepers.clear()

    def _has_copies_beside(self, device: torch.device) -> bool:
        """Whether it has a part in copies on other devices than this one."""
        return any(
            copies.devices - {device}
            for keeper in self.keepers
            for (_, watches, _), copies in keeper.copies.items()
            if self in watches
        )

    def was_read(self, alias: Tensor) -> Tensor:
        """Notes that ``.data`` was read; the alias to hand out."""
        self.changed()
        if alias.is_inference():
            return alias
        if self.alias is None:
            self.alias = version_probe(alias)
        return with_version_of(self.alias, alias)

    def was_set(self, value: Tensor) -> None:
        """Notes that ``.data`` was set to a tensor, which from then on shares the parameter's memory.

        On another device (``.to()``), or of none that has elements, copies would hold memory that was to be freed, and serve
        nobody: their address is of no use there.
        """
        self.changed()
        with LOCK:
            if not value.numel() or self._has_copies_beside(value.device):
                self.drop()
        memory = memory_of(value)
        first = self.sources[:1] if memory is not None and memory == self.source_memory else ()
        self.sources = first if value.is_inference() else (*first, version_probe(value))
        self.source_memory = memory


LOCK = threading.RLock()
if hasattr(
    os, "register_at_fork"
):  # of a process that is forked while another thread holds it, nobody would let it go
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)
WATCHES: dict[int, Watch] = {}
#: of graphs, what they were given last
LAST_CALLS: weakref.WeakSet[Any] = weakref.WeakSet()
_STEPS = 0
_RUNS = 0
_SIGNS = itertools.count(1)
_LAST_SIGN = 0


def _next_sign() -> int:
    """The number of a change, of any parameter, that no other has: two threads may get theirs at once."""
    global _LAST_SIGN
    _LAST_SIGN = sign = next(_SIGNS)
    return sign


def last_sign() -> int:
    """The number of the last change of any parameter that there was a sign of, but for those that tensors count."""
    return _LAST_SIGN


def training_ran(inputs: Iterable[Any]) -> None:
    """Notes that a training graph ran with these inputs, after which weights are likely to change."""
    global _RUNS
    with LOCK:
        _RUNS += 1
        _next_sign()
        for value in inputs:
            if not isinstance(value, Tensor) or not value.requires_grad:
                continue
            if (watch := WATCHES.get(id(local_part(value)))) is not None:
                watch.trained += 1


def watch_of(parameter: Tensor) -> Watch:
    watch = WATCHES.get(id(parameter))
    if watch is not None and watch.reference() is parameter:
        return watch
    with LOCK:  # looked up again: another thread's watch must not be put out of the record while it is in use
        watch = WATCHES.get(id(parameter))
        if watch is None or watch.reference() is not parameter:
            watch = WATCHES[id(parameter)] = Watch(parameter)
            memories_changed()
            _SIGNALS.install()
    return watch


def version_of(parameter: Tensor) -> int:
    """How often a parameter was written to, as far as PyTorch counts: not at all what was made under ``torch.inference_mode``."""
    return -1 if parameter.is_inference() else version_counter(parameter)


def _forget(key: int, watch: Watch | None) -> None:
    """A parameter is gone, and with it its copies."""
    with LOCK:
        if watch is not None and WATCHES.get(key) is watch:
            del WATCHES[key]
            memories_changed()
            watch.drop()
        if not WATCHES:
            _SIGNALS.uninstall()


class _Signals:
    """The optimizer hooks and the ``.data`` property; there while any parameter is watched.

    The hooks run before a step, which may fail halfway or have a post-hook of its own that evaluates, and after it, since a
    step may run forwards (``closure``) before it changes weights. PyTorch iterates over hooks while it calls them, so these
    neither come nor go in another one: until they are there nothing is known of any parameter.
    """

    def __init__(self) -> None:
        self.hooks: list[Any] = []
        self.data: Any = None

    def are_there(self) -> bool:
        if not self.hooks:
            with LOCK:
                self.install()
        return bool(self.hooks)

    def install(self) -> None:
        if not self.hooks and not optimizer_hooks_run():
            self.hooks = [
                register_optimizer_step_pre_hook(_stepped),
                register_optimizer_step_post_hook(_stepped),
            ]
            self.data = Installation(_on_read, _on_set)
            if optimizer_step_runs():
                _STEPPED.add(None)  # of which the first of the hooks has not been called

    def uninstall(self) -> None:
        if self.hooks and not optimizer_hooks_run():
            for hook in self.hooks:
                hook.remove()
            self.data.remove()
            self.hooks, self.data = [], None


_SIGNALS = _Signals()
#: The memory of what optimizers write to whose steps have begun and are not known to have ended.
_STEPPED: set[int | None] = set()


def _is_stepped(parameter: Tensor) -> bool:
    """Whether an optimizer may be about to write to a parameter, perhaps without a trace (fused ones do).

    A frozen one may share the memory of another. What does not is kept: there are trainers that run all of a training
    step in the optimizer's closure.
    """
    if not _STEPPED or not (parameter.requires_grad or memory_of(parameter) in _STEPPED):
        return False
    with LOCK:  # a step that begins now is seen here, or says so after this
        if not optimizer_step_runs():
            _STEPPED.clear()
    return bool(_STEPPED)


@torch.compiler.disable
def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    global _STEPS
    with LOCK:
        _STEPS += 1
        _next_sign()
        # by memory: a frozen copy of a model may share that of the model in training
        watched = _by_memory()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad or parameter.grad is not None:  # else no optimizer writes to it
                memory = memory_of(parameter)
                _STEPPED.add(memory)
                for watch in watched.get(memory, ()):
                    watch.changed()


#: The watches by the memory of their parameters; ``None``: to be asked for. There may be an optimizer for each parameter.
_WATCHED: dict[int | None, list[Watch]] | None = None


def _by_memory() -> dict[int | None, list[Watch]]:
    global _WATCHED
    found = _WATCHED
    if found is None:
        found = {}
        for watch in list(WATCHES.values()):  # garbage that is collected meanwhile may have been watched
            found.setdefault(memory_of(watch.reference()), []).append(watch)
        found.pop(None, None)
        _WATCHED = found
    return found


def memories_changed() -> None:
    """Notes that there is another parameter, or one less, or that copies were made of one, which may have moved before.

    One that moves later need not be found by its memory: its state tells that the copies are old.
    """
    global _WATCHED
    _WATCHED = None


def memory_of(parameter: Tensor | None) -> int | None:
    """Equal for parameters on one memory; ``None`` for those that have none: gone, sparse, lazy."""
    try:
        return None if parameter is None else storage_key(local_part(parameter))
    except (NotImplementedError, ValueError):
        return None


def _on_read(parameter: Tensor, alias: Tensor) -> Tensor:
    watch = WATCHES.get(id(parameter))
    return alias if watch is None or watch.reference() is not parameter else watch.was_read(alias)


def _on_set(parameter: Tensor, value: Tensor) -> None:
    watch = WATCHES.get(id(parameter))
    if watch is not None and watch.reference() is parameter:
        watch.was_set(value)
