"""Scales are read on streams other than the one that the amaxes were taken on: FSDP2 casts on its own."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from f8fx.fsdp.amaxes import Reduced
from f8fx.fsdp.formats import Format


def test_every_stream_waits_for_what_it_reads(monkeypatch):
    log: list[str] = []
    current = ["forward"]

    class Event:
        def __init__(self, device):
            self.name = ""

        def record(self, stream):
            self.name = f"event {sum('record' in line for line in log)}"
            log.append(f"{stream.name} records {self.name}")

    def current_stream(device):
        name = current[0]
        return SimpleNamespace(
            name=name, wait_event=lambda event: log.append(f"{name} waits for {event.name}")
        )

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", current_stream)
    form = Format(torch.float8_e4m3fn, None, False)
    reduced = Reduced(torch.empty(2, device="meta"), {("a", None): (0, 1), ("b", None): (1, 1)})
    current[0] = "copy-in"
    reduced.scales("a", form, torch.bfloat16)
    current[0] = "forward"
    assert reduced.scales("b", form, torch.bfloat16).shape == ()
    assert log == [
        "forward records event 0",
        "copy-in waits for event 0",
        "copy-in records event 1",
        "copy-in waits for event 1",
        "forward waits for event 1",
    ]
