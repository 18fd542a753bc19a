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
  (:mod:`f8fx.weights.parameter_data`): it hands out aliases that all share one version counter, and that counter
  is part of the state. A read by itself makes the next call cast again.

Most calls of an inference graph find at once that nothing at all has changed (:mod:`f8fx.weights.last_call`).

What no signal tells is listed at :func:`refresh_weights`. Where a parameter is known to be written
behind all of these (:func:`f8fx.weights.copies.refusal`), it is cast at each call; with ``weights="constant"`` it is kept on the
user's promise. So is a DTensor there, of which this rank's part is what is cast and watched: versions of the part and of the
DTensor tell of some writes, but not of those of ``torch._foreach_*`` functions, and each alias has a part with a version of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from f8fx.streams import current

from .copies import Copies, Format
from .last_call import LastCall
from .watch import LOCK, WATCHES, Watch, memory_of, watch_of

# -- what the user calls --------------------------------------------------------------------------


def refresh_weights(model: nn.Module | Iterable[nn.Module | Tensor] | None = None) -> None:
    """Drops the float8 copies of a model's weights: the next call casts them anew.

    Needed after writes that leave no trace in PyTorch:

    * through an alias that ``p.data`` handed out before the weight was first cached;
    * through ``.data`` of another tensor with the same memory: one out of ``state_dict()``, ``p.detach()``, ``p.view(...)``;
    * by a collective, a CUDA kernel or a library that is given the memory (``data_ptr``, DLPack, NumPy, ``p.untyped_storage()``);
    * by another process that shares its CUDA memory (on a CPU such weights are not kept);
    * through ``p.data`` inside a function compiled with a backend that runs Dynamo's graphs as they are (``"eager"``);
    * by ``p.apply_``, ``p.map_`` and ``p.map2_``;
    * by replaying a CUDA graph that holds an optimizer step;
    * by an optimizer that is not derived from ``torch.optim.Optimizer`` and writes memory in one of these ways, if
      no training graph compiled with this option ran before it;
    * with ``weights="constant"``: of a DTensor by ``torch.distributed.checkpoint.load``, through ``p.data`` or a part of an alias
      (``p.detach().to_local()``), or by ``torch._foreach_*`` functions outside of an optimizer; whatever writes to a
      parameter that was made under ``torch.inference_mode``;
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
            watch.changed()
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


#: Parameters that are cast as one, how they are put together (:func:`f8fx.weights.copies.arranged`), and the formats.
Wanted = tuple[Sequence[Tensor], int, Sequence[Format]]


def cached(wanted: Iterable[Wanted], training: bool = False, promised: bool = False) -> list[Tensor]:
    """Scales and copies of parameters that last from call to call, those of each in turn.

    Args:
        training: a graph takes them that may keep them for its backward.
        promised: see :func:`f8fx.weights.copies.refusal`.
    """
    return _cached(wanted, training, promised)[0]


def served(call: LastCall, parameters: Sequence[Tensor], wanted: Iterable[Wanted]) -> list[Tensor]:
    """The same for one inference graph, which looks first whether all is as it was at its last call.

    Args:
        parameters: those of ``wanted``, in turn.
    """
    return call.tensors(parameters, lambda: _cached(wanted, False, call.promised))


def _cached(wanted: Iterable[Wanted], training: bool, promised: bool) -> tuple[list[Tensor], bool]:
    """The tensors, and whether all of them last."""
    result: list[Tensor] = []
    streams: dict[torch.device, Any] = {}
    last = True
    for parameters, dim, formats in wanted:
        watches = tuple(map(watch_of, parameters))
        copies = watches[0].copies.get((dim, watches, promised))
        if copies is None:
            copies = _keep(watches, dim, promised)
        copies.trains |= training
        result += copies.get(parameters, watches, formats, _stream(parameters[0], streams))
        last &= copies.state is not None
    return result, last


def reused(wanted: Iterable[Wanted], training: bool = True) -> list[Tensor]:
    """The same for a training graph: kept inside :func:`reuse_weights`, made anew outside."""
    result: list[Tensor] = []
    streams: dict[torch.device, Any] = {}
    for parameters, dim, formats in wanted:
        copies = None
        key = (dim, *map(id, parameters))
        for scope in _SCOPES:
            if scope.parameters.keys() >= set(key[1:]):
                copies = scope.copies.setdefault(key, Copies(dim, in_place=False))
        copies = copies or Copies(dim, in_place=False)
        watches = tuple(map(watch_of, parameters))
        result += copies.get(parameters, watches, formats, _stream(parameters[0], streams))
    return result


def made_anew(wanted: Iterable[Wanted]) -> list[Tensor]:
    """The same, kept nowhere: of fake tensors, with which DDPOptimizer calls what it has compiled."""
    result: list[Tensor] = []
    for parameters, dim, formats in wanted:
        result += Copies(dim, in_place=False).made_anew(parameters, formats)
    return result


def _stream(parameter: Tensor, known: dict[torch.device, Any]) -> Any:
    """The current stream of the parameter's device, asked for once for each call of a graph."""
    device = parameter.device
    if device not in known:
        known[device] = current(device)
    return known[device]


class _Scope:
    """One :func:`reuse_weights` block."""

    def __init__(self, model: nn.Module) -> None:
        # held, so that no other parameter can have these ids
        self.parameters = {id(parameter): parameter for parameter in model.parameters()}
        self.copies: dict[tuple[int, ...], Copies] = {}


_SCOPES: list[_Scope] = []


def _keep(watches: tuple[Watch, ...], dim: int, promised: bool) -> Copies:
    """Where copies of these parameters are kept."""
    with LOCK:
        new = Copies(dim, in_place=True, promised=promised)
        copies = watches[0].copies.setdefault((dim, watches, promised), new)
        for watch in watches:
            watch.keepers.add(watches[0])
    return copies
