"""A tiny Llama through Inductor's own C++ code: what users run, on the device at hand."""

from __future__ import annotations

import copy

import pytest
import torch

import f8fx
from f8fx.report import recording
from tests.helpers import compiled, sqnr
from tests.integration.models import llama, llama_batch

pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_three_training_steps():
    torch.manual_seed(0)
    model = llama(num_hidden_layers=1).to(torch.bfloat16)
    reference, eager = copy.deepcopy(model), copy.deepcopy(model)
    torch._dynamo.reset()
    forwards = {
        "bf16": (reference, reference),
        "eager": (eager, compiled(eager)),
        "inductor": (
            model,
            torch.compile(model, backend=f8fx.f8fx, options={"select": "all", "strict": True}),
        ),
    }
    losses: dict[str, list[float]] = {}
    gradients: dict[str, torch.Tensor] = {}
    with recording() as reports:
        for name, (module, forward) in forwards.items():
            optimizer = torch.optim.AdamW(module.parameters(), lr=5e-3)
            for step in range(3):
                loss = forward(**llama_batch(torch.Generator().manual_seed(1))).loss
                loss.backward()
                losses.setdefault(name, []).append(loss.item())
                if step == 0:
                    gradients[name] = torch.cat([p.grad.flatten() for p in module.parameters()])
                optimizer.step()
                optimizer.zero_grad()
    print({name: sqnr(gradients["bf16"], gradient) for name, gradient in gradients.items()})
    assert [(r.converted, r.skipped) for r in reports] == [(24, 0)] * 2
    assert losses["inductor"] == pytest.approx(losses["bf16"], rel=0.01)
    assert losses["inductor"] == pytest.approx(losses["eager"], rel=0.01)
    assert losses["inductor"][2] < losses["inductor"][0]
    for name in ("eager", "inductor"):
        assert sqnr(gradients["bf16"], gradients[name]) > 20
