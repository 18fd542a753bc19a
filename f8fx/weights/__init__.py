"""Weights that are quantized outside of the graphs that read them: ``weights="cached"`` and ``"reused"``.

:mod:`f8fx.weights.kept` holds the copies, :mod:`f8fx.weights.watch` says whether a parameter has changed since,
:mod:`f8fx.weights.last_call` whether any has, and :mod:`f8fx.weights.inputs` hands the copies to compiled graphs.
"""

from .kept import refresh_weights, reuse_weights

__all__ = ["refresh_weights", "reuse_weights"]
