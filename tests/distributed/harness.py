"""Running checks on several ranks: gloo, one process a rank, started once for many checks.

A *check* is a function without arguments that asserts. Every rank runs all of them in order;
:func:`run_checks` then fails with what went wrong on any rank, and :func:`outcome_fixture` gives each check a
test of its own.

Importing torch, Dynamo and Inductor takes a process more time than most checks do. So ranks are forked from a
server that has imported them (:mod:`tests.processes`). What one model has compiled, others use again, as in a process
of a user's: a check that is of compiling, or of what is said then, resets Dynamo itself.

Many processes on few cores may also fail for reasons of the machine's. Ranks of which one was ended by a signal,
or that stand still, are started once more, and a warning tells with what stacks they ended; what a check
has found on any rank is never tried again.
"""

from __future__ import annotations

import faulthandler
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist

from f8fx.ranks import ledger
from tests.long import with_long
from tests.processes import start

#: A function at the top level of a module, or a ``partial`` of one.
Check = Callable[[], None]

#: Of collectives between ranks, for all checks of a set together, and for what is left to do when a rank has died.
TIMEOUT, LIMIT, GRACE = timedelta(seconds=60), timedelta(seconds=300), timedelta(seconds=20)


def join_group(rank: int, world_size: int, folder: str | Path, timeout: timedelta = TIMEOUT) -> None:
    """Makes this process a rank; the ranks find each other through a file in the folder."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def outcomes(world_size: int, checks: Sequence[Check], folder: Path) -> dict[str, str]:
    """Runs the checks on new processes; what went wrong on any rank, by name of the check."""
    for attempt in ("first", "second"):
        files = folder / attempt
        files.mkdir()
        processes = start(world_size, _run, world_size, list(checks), str(files))
        codes = _end(processes)
        failed, unfinished = _found(codes, checks, files)
        if failed or not unfinished:
            break
        warnings.warn(f"{attempt} attempt: ranks that did not end:\n{unfinished}", stacklevel=2)
    return unfinished | failed


def _found(codes: Sequence[int | None], checks: Sequence[Check], folder: Path) -> tuple[dict[str, str], ...]:
    """By name of the check: what it found on any rank; and how those ranks ended that did not run it."""
    failed: dict[str, str] = {}
    unfinished: dict[str, str] = {}
    killed = any(code is None or code < 0 for code in codes)
    for rank, code in enumerate(codes):
        path, stacks = folder / f"outcome{rank}", folder / f"stacks{rank}"
        of_rank = torch.load(path) if path.exists() else {}
        for check in checks:
            name = name_of(check)
            if name not in of_rank:
                how = f"ended with {code}, in it or before" if code is not None else "did not end"
                text = f"{name}, rank {rank}: {how}\n{stacks.read_text() if stacks.exists() else ''}\n"
                unfinished[name] = unfinished.get(name, "") + text
            elif error := of_rank[name]:
                where = unfinished if killed and _lost_a_peer(error) else failed
                where[name] = where.get(name, "") + f"{name}, rank {rank}:\n{error}\n"
    return failed, unfinished


def _end(processes: Sequence[BaseProcess]) -> list[int | None]:
    """Waits for the processes, and ends those that take too long; exit codes, ``None`` of those it ended."""
    end = time.monotonic() + LIMIT.total_seconds()
    running = {process.sentinel: process for process in processes}
    while running and (left := end - time.monotonic()) > 0:
        for sentinel in wait(list(running), timeout=left):
            if running.pop(sentinel).exitcode != 0:
                end = min(end, time.monotonic() + GRACE.total_seconds())
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def _lost_a_peer(error: str) -> bool:
    """Whether gloo says that another rank, or its connection, has gone."""
    return any(words in error for words in ("Connection closed by peer", "Connection reset by peer"))


def _run(rank: int, world_size: int, checks: list[Check], folder: str) -> None:
    with open(f"{folder}/stacks{rank}", "w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.dump_traceback_later((LIMIT - GRACE).total_seconds(), file=stacks)
        join_group(rank, world_size, folder)
        torch._dynamo.config.recompile_limit = 100
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # else what follows would run uncompiled
        found = {}
        for check in checks:
            ledger._AGREED.clear()  # so that a check's graphs are compared in calls for what it compiles itself
            torch.manual_seed(0)
            try:
                check()
                found[name_of(check)] = ""
            except Exception:
                found[name_of(check)] = traceback.format_exc()
            torch.save(found, f"{folder}/outcome{rank}")
            dist.barrier()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
    dist.destroy_process_group()


def name_of(check: Check) -> str:
    """Of the function, with the arguments it was given."""
    if isinstance(check, partial):
        given = (str(getattr(argument, "__name__", argument)) for argument in check.args)
        return f"{check.func.__name__}({', '.join(given)})"
    return check.__name__  # type: ignore[attr-defined]


def checks_of(module: Mapping[str, Any], *long: Check) -> tuple[Check, ...]:
    """The functions of a module that are named ``check_...``, in their order; the long ones last, and with ``--long`` only."""
    named = [value for name, value in module.items() if name.startswith("check_") and value not in long]
    return with_long(named, *long)


def run_checks(world_size: int, checks: Sequence[Check]) -> None:
    """Fails with all that went wrong on any rank."""
    with TemporaryDirectory() as folder:
        failures = outcomes(world_size, checks, Path(folder))
    assert not failures, "\n\n".join(failures.values())


def outcome_fixture(world_size: int, checks: Sequence[Check]) -> Any:
    """A fixture that runs the checks, when the first test of the file asks for it."""

    @pytest.fixture(scope="module")
    def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
        return outcomes(world_size, checks, tmp_path_factory.mktemp("ranks"))

    return outcome
