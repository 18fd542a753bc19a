"""What f8fx keeps from call to call may be read on another stream than the one it was made on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from f8fx import streams, weights
from f8fx.fsdp.amaxes import Reduced
from f8fx.fsdp.formats import Format
from f8fx.fsdp.scales import Scales
from tests.helpers import bf16, compiled, randn


class Streams:
    """Stands for a GPU's: logs who records which event, and who waits for it. ``now`` is the current one."""

    def __init__(self) -> None:
        self.now = "main"
        self.log: list[str] = []
        self.events = 0

    def event(self, device):
        name = f"event {self.events}"
        self.events += 1

        def record(stream):
            self.log.append(f"{stream.name} records {name}")

        return SimpleNamespace(name=name, record=record)

    def current(self, device):
        name = self.now

        def wait_event(event):
            self.log.append(f"{name} waits for {event.name}")

        return SimpleNamespace(name=name, stream_id=hash(name), wait_event=wait_event)

    def keeps(self, tensor, stream):
        self.log.append(f"memory of {tuple(tensor.shape)} is kept for {stream.name}")

    def taken(self) -> list[str]:
        """The log, which begins anew."""
        log, self.log = self.log, []
        return log


@pytest.fixture
def fake(monkeypatch):
    fake = Streams()
    monkeypatch.setattr("f8fx.streams._event", fake.event)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: fake.keeps(tensor, stream))
    for module in ("f8fx.streams", "f8fx.weights.kept", "f8fx.weights.last_call", "f8fx.fsdp.amaxes"):
        monkeypatch.setattr(f"{module}.current", fake.current)  # for tensors on the CPU, too
    return fake


def test_a_cpu_has_no_streams():
    assert streams.current(torch.device("cpu")) is None
    streams.Made(torch.device("cpu")).before(None, [])


def test_where_there_are_no_streams_nothing_waits(fake, monkeypatch):
    """Weights move from a GPU to a CPU, and back; ``.to()`` has waited for what was to be done."""
    cpu = torch.device("cpu")
    on_gpu, stream = streams.Made(cpu), streams.current(cpu)
    monkeypatch.setattr(streams, "current", lambda device: None)
    on_cpu = streams.Made(cpu)
    on_gpu.before(None, [torch.empty(2)])
    on_cpu.before(stream, [torch.empty(2)])
    assert fake.taken() == ["main records event 0"]


def test_scales_of_gathered_weights(fake):
    """FSDP2 casts what it sends on a stream of its own."""
    form = Format(torch.float8_e4m3fn, None, False)
    reduced = Reduced(torch.empty(2, device="meta"), {("a", None): (0, ()), ("b", None): (1, ())})
    fake.now = "copy-in"
    reduced.scales("a", form, bf16)
    fake.now = "main"
    assert reduced.scales("b", form, bf16).shape == ()
    assert fake.taken() == [
        "main records event 0",
        "copy-in waits for event 0",
        "memory of (2,) is kept for copy-in",
        "copy-in records event 1",
        "main waits for event 1",
        "memory of (2,) is kept for main",
    ]
    fake.now = "copy-in"
    reduced.scales("b", form, bf16)
    fake.now = "main"
    reduced.scales("a", form, bf16)
    assert fake.taken() == []  # what follows a wait is after it


def test_cached_weights(fake):
    """Two threads that serve one model, each on a stream of its own."""
    model, x = nn.Linear(32, 48, bias=False, dtype=bf16), randn(16, 32, grad=False)
    call = compiled(model, weights="cached")
    with torch.no_grad():
        call(x)
        call(x)  # compiling reads `.data`, after which a weight is cast again
        made = fake.taken()[-1].removeprefix("main records ")
        fake.now = "second"
        call(x)
        assert fake.taken() == [
            f"second waits for {made}",
            "memory of () is kept for second",
            "memory of (48, 32) is kept for second",
        ]
        call(x)
        assert fake.taken() == []
        model.weight.mul_(2)  # cast anew, into the same memory, which is made by then
        call(x)
        made = fake.taken()[-1].removeprefix("second records ")
        fake.now = "main"
        call(x)
        assert fake.taken()[0] == f"main waits for {made}"
    weights.refresh_weights(model)


def test_amaxes_captured_into_a_cuda_graph_are_taken_at_every_replay(monkeypatch):
    """Though no weight has changed when it is captured: at a replay nobody looks."""
    scales = Scales("step")
    scales.begin_forward()
    scales.end_forward()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not scales.due(scales.weights)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert scales.due(scales.weights)
    assert not Scales("manual").due([])
    settled = []
    monkeypatch.setattr("f8fx.fsdp.scales.settle", lambda copies: settled.append(copies))
    scales.begin_forward()
    assert not settled  # the host would wait
