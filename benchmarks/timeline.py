"""The kernels in a trace of ``torch.profiler``: which operator launched each, on what shapes, in which phase.

A trace (``export_chrome_trace``) is a list of events. Of those on the GPU (``kernel``, ``gpu_memcpy``, ``gpu_memset``) each
carries the number of the operator that launched it; the operator's event has its name and, with ``record_shapes``, the sizes of
its inputs. Phases are ``record_function`` ranges that end with a synchronisation, so that a kernel which ran inside one
belongs to it.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
#: Operators that are one gemm, with the position of the left operand; the right one follows.
GEMMS = {"aten::mm": 0, "aten::addmm": 1, "aten::_scaled_mm": 0, "aten::_scaled_mm_v2": 0, "aten::bmm": 0}


@dataclass(frozen=True)
class Launch:
    """Something that ran on the device.

    Attributes:
        name: the kernel's.
        phase: the range it ran in, "" outside all.
        turn: of all ranges, which one.
        start_us, us: when, and for how long.
        op: the operator that launched it, "" where that is not known (Inductor's own kernels).
        dims: sizes of the operator's inputs.
        bytes: of a copy or a fill, 0 for kernels.
    """

    name: str
    phase: str
    start_us: float
    us: float
    op: str = ""
    dims: tuple[tuple[int, ...], ...] = ()
    bytes: int = 0
    turn: int = -1

    @property
    def gemm(self) -> tuple[int, int, int] | None:
        """(m, k, n) of the gemm it is part of."""
        first = GEMMS.get(self.op)
        if first is None or len(self.dims) < first + 2:
            return None
        left, right = self.dims[first : first + 2]
        return (left[-2], left[-1], right[-1]) if len(left) == len(right) == 2 else None

    @property
    def is_float8(self) -> bool:
        return "_scaled_mm" in self.op

    @property
    def is_fill(self) -> bool:
        """Whether it only writes, as memset does; the profiler names what is no kernel by what it does."""
        return self.bytes > 0 and self.name.startswith("Memset")


def launches(trace: Mapping[str, Any], phases: Sequence[str], on_cpu: bool = False) -> list[Launch]:
    """What ran on the device, in time's order.

    Args:
        phases: names of the ranges.
        on_cpu: take the gemm operators themselves, where there is no device: for trying this out.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ranges = [
        (event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"] in phases
    ]
    operators = {
        event["args"]["External id"]: event
        for event in events
        if event.get("cat") == "cpu_op" and "External id" in event.get("args", {})
    }
    # a kernel without the operator's number has it through the call that launched it
    calls = {
        event["args"]["correlation"]: event["args"].get("External id")
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    found = []
    for event in events:
        arguments = event.get("args", {})
        if event.get("cat") in _ON_GPU:
            number = arguments.get("External id") or calls.get(arguments.get("correlation"))
            operator = operators.get(number, {})
        elif on_cpu and event.get("cat") == "cpu_op" and event["name"] in GEMMS:
            operator = event
        else:
            continue
        middle = event["ts"] + event["dur"] / 2
        turns = (i for i, (_, start, end) in enumerate(ranges) if start <= middle <= end)
        turn = next(turns, -1)
        found.append(
            Launch(
                event["name"],
                ranges[turn][0] if turn >= 0 else "",
                event["ts"],
                event["dur"],
                operator.get("name", ""),
                tuple(tuple(d) for d in operator.get("args", {}).get("Input Dims", ()) if _is_shape(d)),
                int(arguments.get("bytes", 0)),
                turn,
            )
        )
    return sorted(found, key=lambda launch: launch.start_us)


def _is_shape(dims: Any) -> bool:
    return isinstance(dims, list) and all(isinstance(size, int) for size in dims)


def idle_us(found: Sequence[Launch]) -> float:
    """Microseconds between launches in which nothing ran, within each turn of a phase."""
    total = 0.0
    for turn in {launch.turn for launch in found} - {-1}:  # that of what ran outside all
        end: float | None = None
        for launch in (x for x in found if x.turn == turn):
            if end is not None:
                total += max(0.0, launch.start_us - end)
            end = max(end or 0.0, launch.start_us + launch.us)
    return total


def traced(steps: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Runs something under the profiler; the trace."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as profiler:
        steps()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return _read(path)


def _read(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
