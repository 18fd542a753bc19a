"""Everything that needs a GPU, in one command of under ten minutes: ``python -m benchmarks.gpu``.

First the tests marked ``gpu``, while other processes compile what the benchmarks will need
(:func:`benchmarks.common.compile_ahead`); then, alone, the benchmarks in their ``--quick`` form, what says most first, each in a
process of its own and within its share of the budget. Every row is kept as it is measured. What does not fit is left, and measured when
the command is run again; what is complete, with the same code on the same device, is not measured twice.

Nothing has to be installed but torch, torchao and what pytest needs. ``F8FX_COMMIT`` names the code where git does not.
``--results`` is where results go and where an earlier run's are found; ``--archive`` packs them into one file as well, after
every part, for a machine from which files must be carried.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from . import common
from .common import ROOT, Grid, Row, console, show

NAME = "gpu"
#: Of ten minutes, the rest is for imports, for tables and pictures, and for what a caller does before.
BUDGET_S = 540.0
#: A process may run this much over its share, to finish what it began and to write it down.
GRACE_S = 20.0
STOP_S = 10.0
#: Tests compile more than they compute, so they run side by side where pytest-xdist is installed.
TEST_PROCESSES = 8
#: Of the budget, at most, until tests and the compilation beside them have to be done.
AHEAD_SHARE = 0.4
_FEW_THREADS = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}  # since many processes compile at once

#: In pytest's summary, or as it goes: by xdist before the test's name, else behind it.
_FAILED = re.compile(r"^(?:\[gw\d+\] \[ *\d+%\] )?(?:FAILED|ERROR) (\S+)", re.MULTILINE)

DONE, ON_RECORD, OUT_OF_TIME = "done", "on record already", "out of time; run again to go on"


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        name: of the part, and of its result.
        command: what Python runs, after ``python -m``.
        share: of the budget that is left for it and all later parts, relative to theirs.
        least: seconds below which it is not begun: its start, and its first case with a cold compile.
        keeps: whether it writes results, and so takes a budget and a folder.
        ahead: in how many processes its cases are compiled while the tests run.
        env: added to its environment.
    """

    name: str
    command: tuple[str, ...]
    share: float
    least: float
    keeps: bool = True
    ahead: int = 0
    env: Mapping[str, str] = field(default_factory=dict)


def _tests() -> Part:
    # these files, since others need packages that a GPU machine may lack
    command = [
        "pytest",
        "tests/test_gpu.py",
        "tests/test_gpu_nccl.py",
        *(["tests/integration/test_gpu.py"] if importlib.util.find_spec("transformers") else []),
        "-m",
        "gpu",
        "-k",
        "not aotinductor",  # compiles C++ for minutes
        "-v",  # what was done is seen even if the rest is stopped
        "--at-once",
        "--tb=short",
        "--no-header",
        "-p",
        "no:cacheprovider",
    ]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(TEST_PROCESSES)]
    return Part("tests", tuple(command), 150, 60, keeps=False, env=_FEW_THREADS)


def _benchmark(name: str, share: float, least: float, *extra: str, ahead: int = 0) -> Part:
    return Part(name, (f"benchmarks.{name}", "--quick", *extra), share, least, ahead=ahead)


#: What says most first. Shares are seconds of :data:`BUDGET_S`, as guessed before the first run.
PARTS = (
    _tests(),
    _benchmark("llama_block", 60, 45, ahead=3),
    _benchmark("kernel_times", 50, 45),
    _benchmark("ceilings", 30, 25),
    _benchmark("ablations", 40, 30, ahead=3),
    _benchmark("linear_sweep", 50, 30, ahead=3),
    _benchmark("kernels", 25, 25, ahead=1),
    _benchmark("inference", 30, 30, ahead=2),
    _benchmark("experts", 20, 20, "--experts", "with_grad_weight", ahead=1),
    _benchmark("train_1b", 55, 55),
    _benchmark("compile_time", 20, 20, "--repeats", "1"),
    Part("calibrate", ("benchmarks.calibrate",), 10, 5, keeps=False),
)


def _started(command: Sequence[str], env: Mapping[str, str], output: Any) -> subprocess.Popen[str]:
    """A process, in a session of its own, so that its compile workers can be stopped with it."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **env},
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


class Ahead:
    """Processes that compile the parts' cases; their compiled code is in the cache when they have ended."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._running: list[tuple[str, subprocess.Popen[str], IO[str]]] = []
        for part in parts:
            for index in range(part.ahead):
                # a file, since a full pipe that nobody reads would stop it
                output = tempfile.TemporaryFile("w+")  # noqa: SIM115
                command = [sys.executable, "-m", *part.command, "--ahead", f"{index}/{part.ahead}"]
                self._running.append((part.name, _started(command, _FEW_THREADS, output), output))

    def finish(self, seconds: float) -> None:
        """Waits, at most so long; then stops what still runs. What failed is compiled when it is measured."""
        end = time.monotonic() + seconds
        for name, process, output in self._running:
            try:
                code: int | None = process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
                os.killpg(process.pid, signal.SIGKILL)  # and its compile workers
            process.wait()
            output.seek(0)
            if code:
                console.print(f"{name}, ahead: {output.read()[-1500:]}", markup=False)
            elif code is None:
                console.print(f"{name}, ahead: stopped, out of time")
            output.close()
        self._running.clear()


def run(part: Part, seconds: float, extra: tuple[str, ...] = ()) -> Row:
    """Runs a part, stopped when it takes longer than its share and the grace; its output is shown."""
    console.rule(f"{part.name}: {seconds:.0f} s", characters="-")
    limit = ("--budget-s", str(max(1, int(seconds)))) if part.keeps else ()
    command = [sys.executable, "-m", *part.command, *limit, *extra]
    start = time.monotonic()
    process = _started(command, part.env, subprocess.PIPE)
    try:
        output, _ = process.communicate(timeout=seconds + GRACE_S)
    except subprocess.TimeoutExpired:
        output = _stop(process) + "\nstopped: out of time"
    console.print(output[-6000:], markup=False, end="")
    sys.stdout.flush()  # what is shown must be there if the command is killed later
    code = process.returncode
    return {
        "part": part.name,
        "seconds": time.monotonic() - start,
        "returncode": code,
        "outcome": _outcome(part, code, output),
        "failed": sorted(set(_FAILED.findall(output))),
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
        return OUT_OF_TIME
    if part.name == "tests":
        summary = next(
            (x for x in reversed(lines) if re.search(r"\d+ (passed|failed|skipped)|no tests ran", x)), ""
        )
        if code == 5:
            return "no GPU tests were found"
        return summary.strip("= ") or f"exit code {code}"
    if code:
        return f"failed: {lines[-1]}"
    return OUT_OF_TIME if "Out of time" in output or "Interrupted:" in output else DONE


def grids(result: dict[str, Any]) -> list[Grid]:
    """What ran, for how long."""
    rows = tuple((row["part"], row["outcome"], show(row["seconds"], ".0f")) for row in result["rows"])
    return [Grid("Everything on this GPU", ("", "outcome", "seconds"), rows)]


def on_record(part: Part, folder: Path, stamp: Mapping[str, Any]) -> bool:
    """Whether an earlier run ended this part, with the same code, versions and device."""
    name = part.name if part.keeps else NAME
    for path in common.results_of(folder, name):
        result = json.loads(path.read_text())
        if any(result["stamp"].get(key) != stamp[key] for key in common.SAME):
            continue
        if part.keeps:
            done = result["complete"]
        else:  # a row for each part, in the result of this command itself
            passed = any(row["part"] == part.name and row["returncode"] == 0 for row in result["rows"])
            done = part.name == "tests" and passed
        if done:
            return True
    return False


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, budget=BUDGET_S, quick=False)
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="parts to run")
    parser.add_argument("--archive", type=Path, help="also pack all results into this .tar.gz")
    args = parser.parse_args(argv)
    if reason := common.why_no_gpu():
        console.print(reason)
        return 0
    budget = common.Budget(args.budget_s)
    stamp = common.stamp(torch.device("cuda", torch.cuda.current_device()))  # which checks generated kernels
    args.results.mkdir(parents=True, exist_ok=True)
    parts = [part for part in PARTS if not args.only or part.name in args.only]
    known = {} if args.fresh else {part.name: on_record(part, args.results, stamp) for part in parts}
    # the parts keep what they measured themselves; here only what ran is noted, always anew
    recorder = common.Recorder(NAME, stamp, {"budget_s": args.budget_s}, args.results, fresh=True)
    ahead = Ahead([part for part in parts if not known.get(part.name)])
    ahead_until = time.monotonic() + AHEAD_SHARE * args.budget_s
    try:
        for index, part in enumerate(parts):
            if part.keeps:
                ahead.finish(ahead_until - time.monotonic())  # nothing is measured beside them
            if known.get(part.name):
                recorder.add({"part": part.name, "seconds": 0.0, "returncode": 0, "outcome": ON_RECORD})
                continue
            left = budget.left - GRACE_S - STOP_S
            share = part.share / sum(later.share for later in parts[index:] if not known.get(later.name))
            seconds = max(share * left, part.least)
            if seconds > left:
                recorder.add({"part": part.name, "seconds": 0.0, "returncode": None, "outcome": OUT_OF_TIME})
                continue
            recorder.add(run(part, seconds, _extra(part, args.results, args.fresh)))
            if args.archive:
                archive(args.results, stamp, args.archive)
    finally:
        ahead.finish(0.0)  # also where it is interrupted
    good = {DONE, ON_RECORD}
    complete = not args.only and all(
        row["outcome"] in good or row["part"] == "tests" for row in recorder.rows
    )
    failed = [
        row["part"] for row in recorder.rows if row["returncode"] and "out of time" not in row["outcome"]
    ]
    result, path = recorder.finish({"failed": failed, "clocks_after": common.clocks()}, complete)
    for grid in grids(result):
        grid.print()
    console.print(f"Written to {path}")
    _write_reports(args.results, result["stamp"])
    if args.archive:
        archive(args.results, stamp, args.archive)
    return 1 if failed else 0


def _extra(part: Part, folder: Path, fresh: bool) -> tuple[str, ...]:
    if part.name == "calibrate":
        return ("--results-folder", str(folder.resolve()))
    if not part.keeps:
        return ()
    return ("--results", str(folder.resolve()), *(("--fresh",) if fresh else ()))


def archive(folder: Path, stamp: Mapping[str, Any], target: Path) -> None:
    """Packs this device's results, partial ones included."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(target.name + ".tmp")
    with tarfile.open(unfinished, "w:gz") as packed:
        for path in sorted(folder.glob(f"*{common.slug(stamp['device'])}-*")):
            if path.resolve() not in (target.resolve(), unfinished.resolve()):
                packed.add(path, path.name)
    unfinished.replace(target)


def _write_reports(folder: Any, stamp: dict[str, Any]) -> None:
    from . import report  # it knows this module

    prefix = f"{stamp['date'][:10]}-{common.slug(stamp['device'])}-"
    for path in sorted(folder.glob(f"{prefix}*.json")):
        for written in report.write(path):
            console.print(f"Written to {written}", markup=False)


if __name__ == "__main__":
    raise SystemExit(main())
