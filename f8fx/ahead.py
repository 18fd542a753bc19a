"""Packages of AOTInductor (``torch._inductor.aoti_compile_and_package``): compiled once, run without Python.

Their graphs hold the weights as constants. Inductor can compute what depends on constants alone when
a package is loaded or given other constants (``aot_inductor.use_runtime_constant_folding``), or when
it is made (``freezing``, which drops the originals); float8 copies of weights are such values. That
is what ``weights="cached"`` means here: there is no Python to keep copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from .options import OptionError, Options
from .torch_private import inductor_config

_FOLDING = "aot_inductor.use_runtime_constant_folding"


def settled(options: Options, config: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
    """The options under which a package is compiled, and its Inductor options.

    Args:
        config: Inductor options asked for; they come before those that f8fx sets.

    Raises:
        OptionError: for ``executor="eager"``, which compiles nothing.
    """
    if options.executor == "eager":
        raise OptionError("executor='eager' runs graphs in Python: it makes no package of AOTInductor")
    if options.weights == "dynamic":
        return options, dict(config)
    folding = {} if _is_frozen(config) else {_FOLDING: True}
    return replace(options, weights="dynamic"), {**folding, **config}


def casts_once(config: Mapping[str, Any]) -> bool:
    """Whether a package does not compute what depends on its constants alone in every call."""
    return _is_frozen(config) or bool(
        config.get(_FOLDING, inductor_config().aot_inductor.use_runtime_constant_folding)
    )


def _is_frozen(config: Mapping[str, Any]) -> bool:
    return bool(config.get("freezing", inductor_config().freezing)) and not torch.is_grad_enabled()
