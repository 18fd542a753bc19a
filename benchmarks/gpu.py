"""Everything that needs a GPU, in one command of under ten minutes: ``python -m benchmarks.gpu``.

The tests marked ``gpu``, then the benchmarks in their ``--quick`` form, each in a process of its own and
within its share of the budget. What does not fit is left, and measured when the command is run
again: results so far are kept. ``F8FX_COMMIT`` names the code where there is no git.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from . import common
from .common import ROOT, Grid, Row, console, show

NAME = "gpu"
BUDGET_S = 570.0
#: A process may run this much over its share, to finish what it began and to write it down.
GRACE_S = 10.0
STOP_S = 10.0


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        name: of the part.
        command: what Python runs, after ``python -m``.
        share: of the budget that is left for it and all later parts, relative to theirs.
    """

    name: str
    command: tuple[str, ...]
    share: float


PARTS = (
    Part("tests", ("pytest", "-m", "gpu", "-q", "--no-header", "-p", "no:cacheprovider"), 0.25),
    Part("kernels", ("benchmarks.kernels", "--quick"), 0.15),
    Part("linear_sweep", ("benchmarks.linear_sweep", "--quick"), 0.25),
    Part("llama_block", ("benchmarks.llama_block", "--quick"), 0.25),
    Part("compile_time", ("benchmarks.compile_time", "--quick", "--repeats", "1"), 0.1),
)


def run(part: Part, seconds: float, extra: tuple[str, ...] = ()) -> Row:
    """Runs a part, stopped when it takes longer than its share and the grace; its output is shown."""
    console.rule(f"{part.name}: {seconds:.0f} s", characters="-")
    limit = () if part.name == "tests" else ("--budget-s", str(max(1, int(seconds))))
    command = [sys.executable, "-m", *part.command, *limit, *extra]
    start = time.monotonic()
    # a session of its own, so that compile workers can be stopped with it
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=seconds + GRACE_S)
    except subprocess.TimeoutExpired:
        output = _stop(process) + "\nstopped: out of time"
    console.print(output[-6000:], markup=False, end="")
    code = process.returncode
    return {
        "part": part.name,
        "seconds": time.monotonic() - start,
        "returncode": code,
        "outcome": _outcome(part, code, output),
    }


def _stop(process: subprocess.Popen[str]) -> str:
    """Interrupts a part, which then writes what it has; kills it if that takes too long."""
    process.send_signal(signal.SIGINT)
    try:
        output, _ = process.communicate(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        output = None
    try:
        os.killpg(process.pid, signal.SIGKILL)  # and its compile workers
    except (ProcessLookupError, AttributeError):  # all gone; or no POSIX
        process.kill()
    return process.communicate()[0] if output is None else output


def _outcome(part: Part, code: int, output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()] or [""]
    if "stopped: out of time" in lines[-1]:
        return "out of time; run again to go on"
    if part.name == "tests":
        summary = next(
            (x for x in reversed(lines) if re.search(r"\d+ (passed|failed|skipped)|no tests ran", x)), ""
        )
        if code == 5:
            return "no GPU tests were found"
        return summary.strip("= ") or f"exit code {code}"
    if code:
        return f"failed: {lines[-1]}"
    return "out of time; run again to go on" if "Out of time" in output else "done"


def grids(result: dict[str, Any]) -> list[Grid]:
    """What ran, for how long."""
    rows = tuple((row["part"], row["outcome"], show(row["seconds"], ".0f")) for row in result["rows"])
    return [Grid("Everything on this GPU", ("", "outcome", "seconds"), rows)]


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, budget=BUDGET_S)
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="parts to run")
    args = parser.parse_args(argv)
    if reason := common.why_no_gpu():
        console.print(reason)
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    # the parts keep what they measured themselves; here only what ran is noted, always anew
    recorder = common.Recorder(
        NAME, common.stamp(device), {"budget_s": args.budget_s}, args.results, fresh=True
    )
    budget = common.Budget(args.budget_s)
    parts = [part for part in PARTS if not args.only or part.name in args.only]
    for index, part in enumerate(parts):
        share = part.share / sum(later.share for later in parts[index:])
        seconds = share * (budget.left - GRACE_S - STOP_S)
        extra = () if part.name == "tests" else ("--results", str(args.results.resolve()))
        if args.fresh and part.name != "tests":
            extra = (*extra, "--fresh")
        recorder.add(run(part, seconds, extra))
    good = {"done"}
    complete = all(row["outcome"] in good or row["part"] == "tests" for row in recorder.rows)
    failed = [
        row["part"] for row in recorder.rows if row["returncode"] and "out of time" not in row["outcome"]
    ]
    result, path = recorder.finish({"failed": failed, "clocks_after": common.clocks()}, complete)
    for grid in grids(result):
        grid.print()
    console.print(f"Written to {path}")
    _write_reports(args.results, result["stamp"])
    return 1 if failed else 0


def _write_reports(folder: Any, stamp: dict[str, Any]) -> None:
    from . import report  # it knows this module

    prefix = f"{stamp['date'][:10]}-{common.slug(stamp['device'])}-"
    for path in sorted(folder.glob(f"{prefix}*.json")):
        for written in report.write(path):
            console.print(f"Written to {written}", markup=False)


if __name__ == "__main__":
    raise SystemExit(main())
