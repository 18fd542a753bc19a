"""Running checks in several processes with gloo: all checks of a file in one set of workers.

Starting a worker costs seconds, so a test file has *checks*, plain functions without arguments that every
rank runs in order, and one test that spawns the workers and reports every check that failed on any rank.
"""

from __future__ import annotations

import datetime
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Check = Callable[[], None]


def run_checks(world: int, checks: Sequence[Check]) -> None:
    """Runs checks, functions at the top level of a module, on `world` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        names = [(check.__module__, check.__name__) for check in checks]
        mp.spawn(_worker, (world, folder, names), nprocs=world)
        failures = [path.read_text() for path in sorted(Path(folder).glob("failed-*"))]
    assert not failures, "\n\n".join(failures)


def _worker(rank: int, world: int, folder: str, names: list[tuple[str, str]]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60)
    )
    for module, name in names:
        __import__(module)
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            getattr(sys.modules[module], name)()
        except BaseException:
            text = f"{name}, rank {rank}:\n{traceback.format_exc()}"
            Path(folder, f"failed-{name}-{rank}").write_text(text)
            # the others may wait for this rank in a collective: leave, so that they end too
            break
    else:
        dist.destroy_process_group()
