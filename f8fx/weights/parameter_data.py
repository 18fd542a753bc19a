"""Noticing what happens through ``parameter.data``.

An in-place write through ``p.data`` does not count in ``p._version``: each alias has a version counter of
its own, which is what the alias is for. To see such writes, ``nn.Parameter`` gets a Python property ``data``
(:class:`Installation`) for as long as someone watches. It does what PyTorch's does and tells the watcher; and the
aliases of one parameter can be made to share one counter (:func:`with_version_of`), which then
tells of writes through any of them, and through any view of them, at any later time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from f8fx.torch_private import outside_of_tracers


class Installation:
    """The property, while it stands on ``nn.Parameter``.

    Args:
        on_read: called with a parameter and a new alias of it; returns the alias to hand out.
        on_set: called after ``parameter.data = value``.
    """

    def __init__(
        self, on_read: Callable[[Tensor, Tensor], Tensor], on_set: Callable[[Tensor, Tensor], None]
    ) -> None:
        native = inspect.getattr_static(nn.Parameter, "data")

        # what Dynamo runs between two graphs is not to be compiled for it
        @torch.compiler.disable
        def read(parameter: Tensor) -> Tensor:
            return on_read(parameter, native.__get__(parameter, type(parameter)))

        @torch.compiler.disable
        def write(parameter: Tensor, value: Tensor) -> None:
            native.__set__(parameter, value)
            on_set(parameter, value)

        self.own = vars(nn.Parameter).get("data")
        self.property = property(read, write, doc=native.__doc__)
        self._put(self.property)

    def remove(self) -> None:
        """Takes the property away again, unless something else was put over it."""
        if vars(nn.Parameter).get("data") is not self.property:
            return
        if self.own is not None:
            self._put(self.own)
        else:
            del nn.Parameter.data

    def _put(self, value: Any) -> None:
        setattr(nn.Parameter, "data", value)  # noqa: B010


def version_probe(tensor: Tensor) -> Tensor:
    """An empty tensor whose ``_version`` is that of ``tensor``, now and later; holds none of its memory."""
    with outside_of_tracers(), _where_versions_count():
        probe = tensor.detach()  # shares the counter
        probe.data = tensor.new_empty(0)  # keeps the counter, lets go of the memory
    return probe


def with_version_of(probe: Tensor, tensor: Tensor) -> Tensor:
    """An alias of ``tensor`` that counts its versions in ``probe``, made as ``.data`` makes it: a tracer sees no operator."""
    with outside_of_tracers(), _where_versions_count():
        alias = probe.detach()
        alias.data = tensor
    return alias


def _where_versions_count() -> AbstractContextManager[Any]:
    """Tensors that are made in inference mode count none. Entered for every read of a parameter's ``data``, it costs next to nothing elsewhere."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING


_NOTHING = nullcontext()
