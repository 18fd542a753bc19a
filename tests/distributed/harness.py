"""Running checks on several ranks: gloo, one process a rank, started once for many checks.

A *check* is a function without arguments that asserts. Every rank runs all of them in order;
:func:`run_checks` then fails with what went wrong on any rank, and :func:`outcome_fixture` gives each check a
test of its own.

Importing torch, Dynamo and Inductor takes a process more time than most checks do. So ranks are forked from a
server that has imported them and done nothing else.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist

#: A function at the top level of a module, or a ``partial`` of one.
Check = Callable[[], None]

#: Of collectives between ranks, and for all checks of a set together.
TIMEOUT, LIMIT = timedelta(seconds=60), timedelta(seconds=600)

_PRELOADED = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "f8fx.backend",
    "f8fx.fsdp",
)


def start(world_size: int, work: Callable[..., None], *args: Any) -> list[BaseProcess]:
    """One process for each rank, which calls ``work(rank, *args)``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED])
    processes: list[BaseProcess] = [
        context.Process(target=work, args=(rank, *args), daemon=True) for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return processes


def join_group(rank: int, world_size: int, folder: str | Path, timeout: timedelta = TIMEOUT) -> None:
    """Makes this process a rank; the ranks find each other through a file in the folder."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def outcomes(world_size: int, checks: Sequence[Check], folder: Path) -> dict[str, str]:
    """Runs the checks on new processes; what went wrong on any rank, by name of the check."""
    processes = start(world_size, _run, world_size, list(checks), str(folder))
    end = time.monotonic() + LIMIT.total_seconds()
    for process in processes:
        process.join(max(0, end - time.monotonic()))
    for process in processes:
        process.kill()
    found: dict[str, str] = {}
    for rank in range(world_size):
        path = folder / f"outcome{rank}"
        of_rank = {name_of(check): "did not end" for check in checks}
        of_rank |= torch.load(path) if path.exists() else {}
        for name, error in of_rank.items():
            if error:
                found[name] = found.get(name, "") + f"{name}, rank {rank}:\n{error}\n"
    return found


def _run(rank: int, world_size: int, checks: list[Check], folder: str) -> None:
    join_group(rank, world_size, folder)
    found = {}
    for check in checks:
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            check()
            found[name_of(check)] = ""
        except Exception:
            found[name_of(check)] = traceback.format_exc()
        torch.save(found, f"{folder}/outcome{rank}")
        dist.barrier()
    dist.destroy_process_group()


def name_of(check: Check) -> str:
    """Of the function, with the arguments it was given."""
    if isinstance(check, partial):
        given = (str(getattr(argument, "__name__", argument)) for argument in check.args)
        return f"{check.func.__name__}({', '.join(given)})"
    return check.__name__  # type: ignore[attr-defined]


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
