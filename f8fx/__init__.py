"""f8fx: float8 matmuls for any PyTorch model, by rewriting its graph.

    model = torch.compile(model, backend="f8fx")

No module is swapped; see README.md. The names below are the public interface; everything is
imported on first use, so that ``import f8fx`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import f8fx
    from .explanation import ExplainError, Explanation, explain
    from .graph_pass import PassError
    from .hardware import Hardware
    from .installation import install, installed, uninstall
    from .options import OptionError, Options
    from .recipe import GemmSpec, QuantSpec, Recipe
    from .report import Decision, GemmInfo, GraphReport, recording
    from .weights import refresh_weights, reuse_weights

__version__ = "0.1.0"

_HOME = {
    "f8fx": "backend",
    "ExplainError": "explanation",
    "Explanation": "explanation",
    "explain": "explanation",
    "PassError": "graph_pass",
    "Hardware": "hardware",
    "install": "installation",
    "installed": "installation",
    "uninstall": "installation",
    "OptionError": "options",
    "Options": "options",
    "GemmSpec": "recipe",
    "QuantSpec": "recipe",
    "Recipe": "recipe",
    "Decision": "report",
    "GemmInfo": "report",
    "GraphReport": "report",
    "recording": "report",
    "refresh_weights": "weights",
    "reuse_weights": "weights",
}

__all__ = [
    "Decision",
    "ExplainError",
    "Explanation",
    "GemmInfo",
    "GemmSpec",
    "GraphReport",
    "Hardware",
    "OptionError",
    "Options",
    "PassError",
    "QuantSpec",
    "Recipe",
    "__version__",
    "explain",
    "f8fx",
    "install",
    "installed",
    "recording",
    "refresh_weights",
    "reuse_weights",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name == "fsdp":  # a module, not part of `import *`: it needs torch.distributed
        return importlib.import_module(".fsdp", __name__)
    if name not in _HOME:
        raise AttributeError(f"module 'f8fx' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
