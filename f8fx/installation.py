"""Float8 for tools that hard-code ``backend="inductor"``.

``torch.compile`` does not look the stock backend up by name: it calls
``torch._inductor.compile_fx.compile_fx``. While installed, that name leads to f8fx, which rewrites
the graph and calls the original; uninstalling puts the original back. Graphs compiled before stay as
they are (``torch.compiler.reset()`` drops them). AOTInductor ends in the same function, with an inner compiler of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .backend import GraphPass, compile_graph
from .options import Options
from .torch_private import compile_fx_module, compiles_ahead_of_time, joint_custom_pre_pass

#: What each nested installation replaced; the last one is in force.
_REPLACED: list[Any] = []


def install(**options: Any) -> None:
    """Puts the float8 passes on every graph that the stock ``"inductor"`` backend compiles.

    Args:
        options: as in ``torch.compile(backend="f8fx", options=...)``.

    Raises:
        OptionError: for unknown options or values.
        RuntimeError: if already installed; uninstall first, since options do not add up.
    """
    if _REPLACED:
        raise RuntimeError("f8fx is already installed; call f8fx.uninstall() before installing other options")
    _push(options)


def uninstall() -> None:
    """Restores the stock backend; does nothing if nothing is installed."""
    while _REPLACED:
        _pop()


@contextmanager
def installed(**options: Any) -> Iterator[None]:
    """:func:`install` for the graphs compiled inside a block; blocks nest, the inner options hold.

    Dynamo compiles at the first call, not at ``torch.compile``: run the model once inside the block.
    """
    _push(options)
    try:
        yield
    finally:
        _pop()


def _push(options: dict[str, Any]) -> None:
    parsed = Options.parse(options)
    module = compile_fx_module()
    original = _REPLACED[0] if _REPLACED else module.compile_fx

    def compile_fx(
        model_: Any, example_inputs_: Sequence[Any], *args: Any, config_patches: Any = None, **kwargs: Any
    ) -> Any:
        # Inductor calling itself, or backend="f8fx" with options of its own: this graph has been here before
        other_compiler = "inner_compile" in kwargs and not compiles_ahead_of_time()
        if args or other_compiler or _has_pass(config_patches):
            return original(model_, example_inputs_, *args, config_patches=config_patches, **kwargs)
        return compile_graph(model_, example_inputs_, parsed, original, config_patches, kwargs)

    _REPLACED.append(module.compile_fx)
    module.compile_fx = compile_fx


def _pop() -> None:
    if _REPLACED:  # uninstall() inside a block has done it already
        compile_fx_module().compile_fx = _REPLACED.pop()


def _has_pass(config_patches: Any) -> bool:
    """Whether a compile is one with the passes already, or goes on within one."""
    passes = (config_patches or {}).get("joint_custom_pre_pass"), joint_custom_pre_pass()
    return any(isinstance(each, GraphPass) for each in passes)
