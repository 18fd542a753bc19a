"""Other processes that have imported what takes long to import, and done nothing else.

They are forked from a server that has. So they know nothing of what this process has compiled; what they share with it
is on disk.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


def start(count: int, work: Callable[..., None], *args: Any) -> list[BaseProcess]:
    """That many processes, which call ``work(0, *args)``, ``work(1, *args)``, ..."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    processes: list[BaseProcess] = [
        context.Process(target=work, args=(number, *args), daemon=True) for number in range(count)
    ]
    for process in processes:
        process.start()
    return processes


def printed_by(code: str, *arguments: str, caches: Path, limit: float = 300) -> str:
    """What a program prints that runs in a process of its own.

    Args:
        arguments: ``sys.argv[1:]``.
        caches: the folder of Inductor's caches.
        limit: in seconds.
    """
    with TemporaryDirectory() as folder:
        (process,) = start(1, _run, code, arguments, {"TORCHINDUCTOR_CACHE_DIR": str(caches)}, folder)
        process.join(limit)
        process.kill()
        process.join()
        files = {name: Path(folder, name) for name in ("out", "error")}
        found = {name: file.read_text() if file.exists() else "" for name, file in files.items()}
    assert process.exitcode == 0, found["error"][-3000:] or f"ended with {process.exitcode}"
    return found["out"]


def _run(_: int, code: str, arguments: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
    import torch._functorch.config
    import torch._inductor.config

    os.environ.update(environment)
    torch._inductor.config.fx_graph_cache = True
    torch._functorch.config.enable_autograd_cache = True
    sys.argv = ["-c", *arguments]
    with open(f"{folder}/out", "w") as out, redirect_stdout(out):
        try:
            exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
        except BaseException:
            Path(folder, "error").write_text(traceback.format_exc())
            raise
