"""Time of several versions of one computation on one device, interleaved.

* **Device time.** On CUDA a call is timed by events around it. Before the first event the stream is
  kept busy for longer than the host needs to enqueue the call, so that no gaps between launches are in
  the figure: it is the sum the published float8 tables give. The host's own time is kept beside it.
* **Interleaved.** One round times every version once; the order turns from round to round. Clocks and
  temperature drift over seconds, and so hit all versions alike.
* **Cold cache.** Before each call a buffer of twice the L2 cache is overwritten: inputs that fit into
  the cache would otherwise be measured out of it.
  Kernels of microseconds are better called several times in a row on inputs that rotate
  (:mod:`benchmarks.kernels`): they then meet a cache as full of unwritten lines as they leave it.
* **Median**, with the 20th and 80th percentile as spread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from f8fx.torch_private import busy_wait

Step = Callable[[], Any]

_MAX_ROUNDS = 60
_MIN_ROUNDS = 12
_WARM_UP = 3


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one version.

    Attributes:
        ms: median.
        low, high: 20th and 80th percentile.
        host_ms: time the host needs to enqueue the call; where it exceeds ``ms`` the device waits in
            practice, unless CUDA graphs are used.
        rounds: number of measurements.
    """

    ms: float
    low: float
    high: float
    host_ms: float
    rounds: int

    @property
    def spread(self) -> float:
        """Half the distance between the percentiles, relative to the median."""
        return (self.high - self.low) / 2 / self.ms

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def interleaved(steps: Mapping[str, Step], device: torch.device, seconds: float = 1.0) -> dict[str, Timing]:
    """Times each step, warmed up, in about the given number of seconds for all together.

    Args:
        steps: by name; each is called without arguments, and its result dropped.
        device: a CUDA device, or the CPU, where wall time is taken.
        seconds: 0 times each step once: enough to see that it runs.
    """
    fewest = _MIN_ROUNDS if seconds else 1
    for step in steps.values():
        for _ in range(_WARM_UP if seconds else 0):
            step()
    clock = _Events(device) if device.type == "cuda" else _Wall()
    host = {name: clock.host_seconds(step) for name, step in steps.items()}
    clock.prepare(max(host.values()))
    names = list(steps)
    samples: dict[str, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    rounds = 0
    while rounds < fewest or (rounds < _MAX_ROUNDS and time.perf_counter() - start < seconds):
        turn = rounds % len(names)
        for name in (*names[turn:], *names[:turn]):
            samples[name].append(clock.milliseconds(steps[name]))
        rounds += 1
    return {name: _timing(samples[name], host[name]) for name in names}


def sustained(steps: Mapping[str, Step], device: torch.device, seconds: float = 1.0) -> dict[str, float]:
    """Milliseconds of a step when steps follow each other as in training: launch gaps and host time included.

    Each version runs some steps at a stretch, then the next one does; the median stretch counts.

    Args:
        steps: by name, warmed up.
        seconds: for all together; 0 runs each step once.
    """

    def stretch(step: Step, count: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            step()
        synchronize(device)
        return (time.perf_counter() - start) / count

    rounds = 5 if seconds else 1
    counts = dict.fromkeys(steps, 1)
    if seconds:
        share = seconds / rounds / len(steps)
        counts = {name: max(1, min(100, int(share / stretch(step, 2)))) for name, step in steps.items()}
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            samples[name].append(stretch(step, counts[name]))
    return {name: sorted(found)[len(found) // 2] * 1e3 for name, found in samples.items()}


def in_a_row(calls: Sequence[Step]) -> list[Any]:
    """Makes the calls, one after the other; all results, so that none is written into the memory of one before."""
    return [call() for call in calls]


def synchronize(device: torch.device) -> None:
    """Waits for what a CUDA device has been given to do; on others all is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timing(samples: list[float], host: float) -> Timing:
    ordered = sorted(samples)

    def at(fraction: float) -> float:
        return ordered[round(fraction * (len(ordered) - 1))]

    return Timing(at(0.5), at(0.2), at(0.8), host * 1e3, len(ordered))


class _Wall:
    """The CPU: wall time, nothing to flush."""

    def host_seconds(self, step: Step) -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    def prepare(self, host_seconds: float) -> None:
        pass

    def milliseconds(self, step: Step) -> float:
        return self.host_seconds(step) * 1e3


class _Events:
    """CUDA events behind a head start and a cold cache."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
        self.buffer = torch.empty(max(2 * l2, 64 << 20), dtype=torch.int8, device=device)
        self.cycles = 0

    def host_seconds(self, step: Step) -> float:
        times = []
        for _ in range(3):
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        torch.cuda.synchronize(self.device)
        return sorted(times)[1]

    def prepare(self, host_seconds: float) -> None:
        probe = 1_000_000
        busy_wait(probe)  # the first launch loads the kernel
        # the fastest: clocks may still be on their way up from idle
        milliseconds = min(self._between(lambda: busy_wait(probe)) for _ in range(3))
        wanted = 1.5e3 * host_seconds + 0.2
        # a step that needs the device's answers cannot be enqueued ahead; the limit keeps that short
        self.cycles = int(probe * min(wanted, 200.0) / milliseconds)

    def milliseconds(self, step: Step) -> float:
        torch.cuda.synchronize(self.device)
        self.buffer.zero_()
        busy_wait(self.cycles)
        return self._between(step)

    def _between(self, step: Step) -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        step()
        after.record()
        torch.cuda.synchronize(self.device)
        return before.elapsed_time(after)
