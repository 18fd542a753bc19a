"""What a benchmark of cases does when it is called: nothing without a GPU, else measure, write, show."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import common
from .common import Grid, Row, console


def run(
    args: argparse.Namespace,
    name: str,
    cases: Sequence[Mapping[str, Any]],
    measure: Callable[..., Row],
    summary: Callable[[list[Row]], dict[str, Any]],
    grids: Callable[[dict[str, Any]], Sequence[Grid]],
    settings: Mapping[str, Any] | None = None,
    tell: Callable[[dict[str, Any]], None] = lambda summary: None,
    wrong: Callable[[list[Row]], bool] = lambda rows: False,
    every: Sequence[Mapping[str, Any]] | None = None,
) -> int:
    """Measures the cases on the GPU that is there; the exit code: 1 if one could not be measured, or results are wrong.

    Args:
        args: of :func:`benchmarks.common.parser`.
        measure: of one case; called with it and, to compile ahead, with ``seconds=0.0``.
        summary: of the rows.
        grids: the tables of a result.
        settings: as in :class:`benchmarks.common.Recorder`.
        tell: prints what a summary says, below the tables.
        wrong: whether what was measured did not compute what it should.
        every: the cases of a complete result, where ``cases`` may be a choice of them.
    """
    if reason := common.why_no_gpu():
        console.print(reason)
        return 0
    if getattr(args, "ahead", None):
        return common.compile_ahead(cases, args.ahead, measure)
    device = torch.device("cuda", torch.cuda.current_device())
    recorder = common.Recorder(name, common.stamp(device), dict(settings or {}), args.results, args.fresh)
    common.run_cases(cases, recorder, common.Budget(args.budget_s), measure)
    complete = recorder.has_all(cases if every is None else every)
    result, path = recorder.finish(summary(recorder.rows), complete)
    for grid in grids(result):
        grid.print()
    tell(result["summary"])
    console.print(f"Written to {path}")
    return int(recorder.failed or wrong(recorder.rows))


def tell_all(summary: Mapping[str, Any]) -> None:
    """Prints all entries of a summary of lists."""
    for entries in summary.values():
        for entry in entries:
            console.print(f"  {entry}", markup=False)
