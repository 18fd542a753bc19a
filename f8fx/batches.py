"""Whether what a model makes of a sample depends on the others of its batch, which Inductor's ``batch_invariant`` is there to prevent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .options import Options
from .torch_private import inductor_config


def dependence(options: Options, config: Mapping[str, Any]) -> str:
    """A warning where ``batch_invariant`` is on and results depend on other samples all the same; ``""`` otherwise.

    Args:
        config: Inductor options of the compile.
    """
    default = getattr(inductor_config(), "batch_invariant", False)  # torch 2.11 and 2.12 have no such option
    output = options.recipe.output
    if not config.get("batch_invariant", default) or output is None:
        return ""
    reasons, remedy = [], {}
    if output.left.granularity == "tensorwise":
        reasons.append(f"the recipe {options.recipe.name} has one scale for all rows of an input")
        remedy["recipe"] = "rowwise"
    if options.select == "auto":
        reasons.append('select="auto" decides by the number of rows')
        remedy["select"] = "all"
    if output.scales_after_gemm and options.rowwise_scales is None:
        reasons.append("it may decide where scales of rows are applied")
        remedy["rowwise_scales"] = "in_gemm"
    if not reasons:
        return ""
    return (
        f"f8fx: Inductor's batch_invariant is on, but float8 results of a sample depend on the rest of its batch: "
        f"{'; '.join(reasons)}. With options={json.dumps(remedy)} they do not, as far as the gemms themselves do not"
    )
