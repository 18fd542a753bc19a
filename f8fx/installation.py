"""Float8 for tools that hard-code ``backend="inductor"``.

``torch.compile`` does not look the stock backend up by name: it calls
``torch._inductor.compile_fx.compile_fx``. While installed, that name leads to f8fx, which rewrites
the graph and calls the original; uninstalling puts the original back. Graphs compiled before stay as
they are (``torch.compiler.reset()`` drops them). AOTInductor ends in the same function, with an inner compiler of its own.

Dynamo keeps graphs for code, which all models of a class share, and takes one for another's where the objects that
``torch.compile`` makes of its arguments are equal. So those that it makes while something is installed are equal among
themselves alone: a model that goes through ``torch.compile`` before, in or after a block gets graphs of that time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .backend import compile_graph
from .graph_pass import GraphPass
from .options import Options
from .torch_private import (
    compile_fx_module,
    compiles_ahead_of_time,
    joint_custom_pre_pass,
    mark_stock_wrappers,
)


@dataclass(eq=False)
class _Installed:
    """One installation.

    Attributes:
        replaced: what Inductor's entry was.
        ended: it calls what it replaced. It may still be called, where others have wrapped it since.
    """

    replaced: Any
    ended: bool = False


class _Within(threading.local):
    """Whether this thread is compiling a graph: ahead of time, Inductor calls its entry again without saying so."""

    graph = False


_WITHIN = _Within()
#: Those in force; of several the last one holds.
_INSTALLED: list[_Installed] = []
_UNMARK: list[Callable[[], None]] = []


def install(**options: Any) -> None:
    """Puts the float8 passes on every graph that the stock ``"inductor"`` backend compiles.

    Args:
        options: as in ``torch.compile(backend="f8fx", options=...)``.

    Raises:
        OptionError: for unknown options or values.
        RuntimeError: if already installed; uninstall first, since options do not add up.
    """
    if _INSTALLED:
        raise RuntimeError("f8fx is already installed; call f8fx.uninstall() before installing other options")
    _push(options)


def uninstall() -> None:
    """Restores the stock backend, or what was there; does nothing if nothing is installed."""
    while _INSTALLED:
        _remove(_INSTALLED[-1])


@contextmanager
def installed(**options: Any) -> Iterator[None]:
    """:func:`install` for the graphs compiled inside a block; blocks nest, the inner options hold.

    Dynamo compiles at the first call, not at ``torch.compile``: call both inside the block. A model that went through
    ``torch.compile`` before keeps the graphs that it, or another of its class, has.
    """
    this = _push(options)
    try:
        yield
    finally:
        _remove(this)


def _push(options: dict[str, Any]) -> _Installed:
    parsed = Options.parse(options)
    module = compile_fx_module()
    this = _Installed(module.compile_fx)
    # of nested ones the inner options hold
    original = _INSTALLED[0].replaced if _INSTALLED else this.replaced

    def compile_fx(
        model_: Any, example_inputs_: Sequence[Any], *args: Any, config_patches: Any = None, **kwargs: Any
    ) -> Any:
        if this.ended:
            return this.replaced(model_, example_inputs_, *args, config_patches=config_patches, **kwargs)
        # Inductor calling itself, or backend="f8fx" with options of its own: this graph has been here before
        other_compiler = "inner_compile" in kwargs and not compiles_ahead_of_time()
        if args or other_compiler or _has_pass(config_patches) or _WITHIN.graph:
            return original(model_, example_inputs_, *args, config_patches=config_patches, **kwargs)
        _WITHIN.graph = True
        try:
            return compile_graph(model_, example_inputs_, parsed, original, config_patches, kwargs)
        finally:
            _WITHIN.graph = False

    compile_fx.installation = this  # type: ignore[attr-defined]
    module.compile_fx = compile_fx
    _INSTALLED.append(this)
    if not _UNMARK:
        _UNMARK.append(mark_stock_wrappers(lambda: _INSTALLED[-1] if _INSTALLED else None))
    return this


def _remove(this: _Installed) -> None:
    if this.ended:  # uninstall() inside a block has done it already
        return
    this.ended = True
    _INSTALLED.remove(this)
    while _UNMARK and not _INSTALLED:
        _UNMARK.pop()()
    module = compile_fx_module()
    # others may lie over it, of another thread's block, say: they pass it over
    while (last := getattr(module.compile_fx, "installation", None)) is not None and last.ended:
        module.compile_fx = last.replaced


def _has_pass(config_patches: Any) -> bool:
    """Whether a compile is one with the passes already, or goes on within one."""
    passes = (config_patches or {}).get("joint_custom_pre_pass"), joint_custom_pre_pass()
    return any(isinstance(each, GraphPass) for each in passes)
