"""What all benchmarks need: the stamp of the machine, results on disk, tables, budgets.

A result is one JSON object::

    {"name": ..., "complete": ..., "stamp": {...}, "settings": {...}, "rows": [...], "summary": {...}}

It is written when a benchmark ends. On the way every row goes to a ``.partial.jsonl`` file beside
it, so that a run that is killed, or runs out of its budget, goes on where it stopped: rows are kept
if they were measured on the same device with the same code and versions.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import f8fx
from f8fx import canary
from f8fx.doctor import version_of
from f8fx.hardware import of_device
from f8fx.sources import source_hash
from f8fx.torch_private import inductor_config

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

#: Standard output, wide enough for the tables when it is a file.
console = Console(width=None if sys.stdout.isatty() else 140, highlight=False, soft_wrap=False)

Row = dict[str, Any]

#: What every smoke says before its tables.
SMOKE = "CPU smoke: the times below are NOT measurements of anything, and are not kept."


# -- the machine ----------------------------------------------------------------------------------


def why_no_gpu() -> str | None:
    """Why speed in float8 cannot be measured here, in one sentence; ``None`` where it can."""
    if not torch.cuda.is_available():
        return "There is no CUDA GPU on this machine, so there is nothing to measure: float8 on CPU is emulation."
    device = torch.device("cuda")
    if not of_device(device).float8_tensor_cores:
        return f"{torch.cuda.get_device_name(device)} has no float8 tensor cores, so there is nothing to measure."
    return None


def commit() -> tuple[str, bool | None]:
    """The git commit of the code and whether files differ from it; ``F8FX_COMMIT`` for what git does not know."""
    if named := os.environ.get("F8FX_COMMIT"):
        return named, None

    def git(*args: str) -> str:
        done = subprocess.run(
            ("git", *args), cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
        )
        return done.stdout.strip()

    try:
        # results are written while the benchmarks run, so they do not count as changes
        changed = bool(git("status", "--porcelain", "--", ".", ":!benchmarks/results"))
        return git("rev-parse", "HEAD"), changed
    except (OSError, subprocess.SubprocessError):
        return "unknown", None


@functools.cache
def sources() -> str:
    """A hash of f8fx's and the benchmarks' own code, as it was at the start: what uncommitted changes are."""
    digest = hashlib.sha256(source_hash().encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


_CLOCKS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "max_sm_mhz": "clocks.max.sm",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
    "throttle_reasons": "clocks_event_reasons.active",
}


def clocks() -> dict[str, Any] | None:
    """What ``nvidia-smi`` says of the current GPU's clocks, power and temperature now; only reads."""
    values = _smi(list(_CLOCKS.values()))
    if values is None:
        return None
    return {name: _number(value) for name, value in zip(_CLOCKS, values, strict=True)}


def _smi(fields: Sequence[str]) -> list[str] | None:
    if not torch.cuda.is_available():
        return None
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    chosen = ["-i", f"GPU-{str(uuid).removeprefix('GPU-')}"] if uuid is not None else []
    command = ["nvidia-smi", *chosen, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.strip().splitlines()
    values = [value.strip() for value in lines[0].split(",")] if lines else []
    return values if len(values) == len(fields) else None


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else platform.machine()


def stamp(device: torch.device) -> dict[str, Any]:
    """Where and with what a result was measured. No host names, no paths.

    Generated kernels of a GPU are checked here, if they never were: once per machine, and in no measured time.
    """
    code, changed = commit()
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": code,
        "uncommitted_changes": changed,
        "sources": sources(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "device_type": device.type,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "driver": None,
        "cuda": torch.version.cuda,
        "clocks": None,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": version_of("triton"),
        "torchao": version_of("torchao"),
        "f8fx": f8fx.__version__,  # also where it runs from a checkout that was not installed
    }
    if device.type == "cuda":
        driver = _smi(["driver_version"])
        result["driver"] = driver[0] if driver else None
        result["clocks"] = clocks()
        properties = torch.cuda.get_device_properties(device)
        result["sms"] = properties.multi_processor_count
        result["l2_bytes"] = getattr(properties, "L2_cache_size", None)
        result["memory_bytes"] = properties.total_memory
        result["canaries"] = str(canary.verdict_on(device)) if canary.applies(device) else None
    return result


#: Rows measured with equal values of these belong together. Older results lack ``sources``.
SAME = ("commit", "uncommitted_changes", "sources", "device", "driver", "torch", "triton", "torchao", "f8fx")


def slug(text: str) -> str:
    """A name for files: lower case, words joined by dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


# -- results --------------------------------------------------------------------------------------


@dataclass
class Recorder:
    """The rows of one benchmark, each on disk as soon as it is measured.

    Args:
        name: of the benchmark.
        stamp: from :func:`stamp`.
        settings: what decides whether rows of an earlier run are comparable, beside the stamp.
        folder: where files go; ``None`` keeps nothing.
        fresh: do not go on from an earlier run.
    """

    name: str
    stamp: dict[str, Any]
    settings: dict[str, Any]
    folder: Path | None
    fresh: bool = False
    rows: list[Row] = field(default_factory=list)
    failed: bool = False  # a case was not measured: what a benchmark exits with

    def __post_init__(self) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.fresh:
            self.rows = self._earlier()
            if not self.rows and self._partial.exists():  # of other code, another driver...: not to be lost
                self._partial.replace(self._partial.with_suffix(f".{self._partial.stat().st_mtime_ns}.jsonl"))
        lines = [self._head(), *self.rows]
        self._partial.write_text("".join(json.dumps(line) + "\n" for line in lines))

    @property
    def _partial(self) -> Path:
        assert self.folder is not None
        return self.folder / f"{slug(self.stamp['device'])}-{self.name}.partial.jsonl"

    def _head(self) -> dict[str, Any]:
        return {"same": {key: self.stamp[key] for key in SAME}, "settings": self.settings}

    def _earlier(self) -> list[Row]:
        try:
            head, *rows = map(json.loads, self._partial.read_text().splitlines())
        except (OSError, ValueError):
            return []  # none, or one that was cut off in the middle of a line
        return rows if head == json.loads(json.dumps(self._head())) else []

    def has(self, **case: Any) -> bool:
        """Whether a row with these values has been measured."""
        return any(all(row.get(key) == value for key, value in case.items()) for row in self.rows)

    def has_all(self, cases: Iterable[Mapping[str, Any]]) -> bool:
        """Whether all of these cases have been measured, by this run or the ones it goes on from."""
        return all(self.has(**case) for case in cases)

    def add(self, row: Row) -> None:
        """Keeps a row."""
        self.rows.append(row)
        if self.folder is not None:
            with self._partial.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def finish(self, summary: Mapping[str, Any], complete: bool) -> tuple[dict[str, Any], Path | None]:
        """The result, and the file it was written to. A complete one ends the partial file.

        What another commit measured that day, or the same one with more rows, is not overwritten: the name then ends in the commit, and a number.
        """
        result = {
            "name": self.name,
            "complete": complete,
            "stamp": self.stamp,
            "settings": self.settings,
            "rows": self.rows,
            "summary": dict(summary),
        }
        if self.folder is None:
            return result, None
        day, code = self.stamp["date"][:10], self.stamp["commit"][:8]
        path = self.folder / f"{day}-{slug(self.stamp['device'])}-{self.name}.json"
        name, number = path.stem, 1
        while self._says_more(path, complete):
            path = path.with_name(
                "-".join((name, slug(code), *([str(number)] if number > 1 else []))) + ".json"
            )
            number += 1
        path.write_text(json.dumps(result, indent=1) + "\n")
        if complete:
            self._partial.unlink(missing_ok=True)
        return result, path

    def _says_more(self, path: Path, complete: bool) -> bool:
        """Whether a file holds what this result does not: of other code, with other settings, or with more cases."""
        try:
            there = json.loads(path.read_text())
        except (OSError, ValueError):
            return False  # none, or one that was cut off
        head = {"same": {key: there["stamp"].get(key) for key in SAME}, "settings": there["settings"]}
        if head != json.loads(json.dumps(self._head())):
            return True
        return len(there["rows"]) > len(self.rows) or (there["complete"] and not complete)


def results_of(folder: Path, name: str) -> list[Path]:
    """The files with results of a benchmark, the latest last."""
    found = []
    for path in folder.glob(f"*-{name}*.json"):
        result = json.loads(path.read_text())
        if result.get("name") == name:
            found.append((result["stamp"]["date"], path))
    return [path for _, path in sorted(found)]


# -- command lines --------------------------------------------------------------------------------


def parser(
    doc: str | None,
    budget: float | None = None,
    smoke: bool = False,
    quick: bool = True,
    ahead: bool = False,
) -> argparse.ArgumentParser:
    """A parser with the options that benchmarks share; ``ahead`` is for :func:`compile_ahead`."""
    result = argparse.ArgumentParser(
        description=(doc or "").split("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if quick:
        result.add_argument("--quick", action="store_true", help="only the cases that say most")
    result.add_argument("--fresh", action="store_true", help="do not go on from an interrupted run")
    result.add_argument("--results", type=Path, default=RESULTS, help="folder for results (%(default)s)")
    result.add_argument(
        "--budget-s", type=float, default=budget, help="start no new case after this many seconds"
    )
    if ahead:
        result.add_argument(
            "--ahead",
            type=_share,
            metavar="I/N",
            help="only compile cases I, I + N, ..., which leaves their code in the cache; several at once do no harm",
        )
    if smoke:
        result.add_argument(
            "--cpu-smoke",
            action="store_true",
            help="tiny shapes on CPU without code generation: shows that everything runs; keeps no result",
        )
    return result


def _share(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 0/4")
    return int(index), int(count)


class Budget:
    """Seconds left of a time limit; ``None`` is no limit."""

    def __init__(self, seconds: float | None) -> None:
        self.end = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float:
        return float("inf") if self.end is None else self.end - time.monotonic()


def run_cases(
    cases: Sequence[Mapping[str, Any]], recorder: Recorder, budget: Budget, measure: Callable[..., Row]
) -> bool:
    """Measures the cases that are not yet on record; whether all are at the end.

    A case is not begun if the longest one so far would not fit into what is left of the budget. An
    interrupt (Ctrl-C) ends the run like a budget that is used up; a case that fails is told of, and tried again
    by the next run.
    """
    longest = 0.0
    todo = [case for case in cases if not recorder.has(**case)]
    if len(todo) < len(cases):
        console.print(f"{len(cases) - len(todo)} of {len(cases)} cases are on record already.")
    for index, case in enumerate(todo):
        if budget.left < longest:
            console.print(f"Out of time: {len(todo) - index} cases left; run again to go on.")
            return False
        start = time.monotonic()
        try:
            row = {**case, **measure(**case)}
        except KeyboardInterrupt:
            console.print(f"Interrupted: {len(todo) - index} cases left; run again to go on.")
            return False
        except Exception:
            recorder.failed = True
            console.print(f"FAILED: {case}\n{traceback.format_exc()}", markup=False)
            continue
        longest = max(longest, time.monotonic() - start)
        recorder.add(row)
        label = " ".join(f"{key}={value}" for key, value in case.items())
        console.print(f"[{index + 1}/{len(todo)}] {label}  {time.monotonic() - start:.1f} s", markup=False)
    return not recorder.failed


def compile_ahead(
    cases: Sequence[Mapping[str, Any]], share: tuple[int, int], measure: Callable[..., Row]
) -> int:
    """Runs a share of the cases once and keeps nothing but their compiled code; the exit code.

    Compiling takes one core and most of a benchmark's time. What Inductor finds by timing kernels is not kept,
    since others use the device meanwhile.
    """
    index, count = share
    failed = 0
    with inductor_config().patch(autotune_local_cache=False):
        for case in cases[index::count]:
            try:
                measure(**case, seconds=0.0)
            except Exception:
                failed = 1  # short of memory beside the others, say; it is compiled when it is measured
                console.print(f"FAILED: {case}\n{traceback.format_exc()}", markup=False)
            gc.collect()
            torch.cuda.empty_cache()
    return failed


# -- tables ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """A table that can be printed and written as Markdown; all cells are text."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def print(self) -> None:
        table = Table(title=self.title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for index, header in enumerate(self.headers):
            table.add_column(header, justify="left" if index == 0 else "right")
        for row in self.rows:
            table.add_row(*row)
        console.print()
        console.print(table)

    def markdown(self) -> str:
        align = [":---", *("---:" for _ in self.headers[1:])]
        lines = [self.headers, tuple(align), *self.rows]
        text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"### {self.title}\n\n{text}\n"


def end_smoke(rows: Sequence[Row], grids: Iterable[Grid]) -> int:
    """Shows what a smoke of several versions gave; the exit code, 1 if one but torchao's did not run."""
    console.print(SMOKE)
    for grid in grids:
        grid.print()
    for row in rows:
        if row["errors"]:
            console.print(f"{row['errors']}", markup=False)
    return 1 if any(set(row["errors"]) - {"torchao"} for row in rows) else 0


def show(value: float | None, spec: str = ".2f") -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None or value != value else format(value, spec)


def median(values: Iterable[float]) -> float | None:
    """The middle value, ``None`` of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
