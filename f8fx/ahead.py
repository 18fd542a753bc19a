"""Packages of AOTInductor (``torch._inductor.aoti_compile_and_package``): compiled once, run without Python.

Their graphs hold the weights as constants. Inductor can compute what depends on constants alone when
a package is loaded or given other constants (``aot_inductor.use_runtime_constant_folding``), or when
it is made (``freezing``, which drops the originals); float8 copies of weights are such values. That
is what ``weights="cached"`` means here: there is no Python to keep copies. Inductor does not ask whether a graph
writes to its constants (a buffer that counts steps, a state), and would go on with what was computed of their first
values; for such graphs it is not asked to (torch 2.11 to 2.15).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .options import OptionError, Options
from .torch_private import inductor_config, written_constants

_FOLDING = "aot_inductor.use_runtime_constant_folding"


def settled(
    options: Options, config: Mapping[str, Any], graph: fx.GraphModule
) -> tuple[Options, dict[str, Any]]:
    """The options under which a package is compiled, and its Inductor options.

    Warns of buffers that stand in the way of ``weights="cached"``, or that Inductor freezes.

    Args:
        config: Inductor options asked for; they come before those that f8fx sets.

    Raises:
        OptionError: for ``executor="eager"``, which compiles nothing.
    """
    if options.executor == "eager":
        raise OptionError("executor='eager' runs graphs in Python: it makes no package of AOTInductor")
    settings, names = dict(config), ", ".join(written_constants(graph))
    if options.weights != "dynamic" and not casts_once(config) and _FOLDING not in config:
        if names:
            warnings.warn(
                f'f8fx: weights="{options.weights}" has no effect on this package, whose weights are quantized in every call: '
                f"the model writes to {names}, and Inductor would also compute once what depends on nothing but these. If "
                "nothing does (what is read of a cache of keys and values depends on the input, too), ask for it by "
                f"inductor={{{_FOLDING!r}: True}}",
                stacklevel=4,
            )
        else:
            settings[_FOLDING] = True
    if names and casts_once(settings):
        warnings.warn(
            f"f8fx: the model writes to {names}, and under freezing or {_FOLDING} Inductor takes these for constants: what is "
            "computed of nothing but constants stays what it was when the package was made or loaded",
            stacklevel=4,
        )
    return replace(options, weights="dynamic"), settings


def casts_once(config: Mapping[str, Any]) -> bool:
    """Whether a package does not compute what depends on its constants alone in every call."""
    return _is_frozen(config) or bool(
        config.get(_FOLDING, inductor_config().aot_inductor.use_runtime_constant_folding)
    )


def _is_frozen(config: Mapping[str, Any]) -> bool:
    return bool(config.get("freezing", inductor_config().freezing)) and not torch.is_grad_enabled()
