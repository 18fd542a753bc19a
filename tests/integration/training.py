"""Three training steps of a tiny model, with and without float8, and what was recorded on the way."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import nn

from f8fx.report import Decision, GraphReport, recording
from tests.helpers import compiled
from tests.integration.models import CASES, Batch, Case

ROLES = ("output", "grad_input", "grad_weight")
STEPS = 3
LEARNING_RATE = 5e-3


@dataclass
class Run:
    """
    Attributes:
        losses: one for each step.
        gradients: of the first step, by parameter.
        state: the model's ``state_dict`` after the first forward and backward, before any update.
        model: after the last step.
        reports: of the graphs f8fx compiled; none for a run without it.
    """

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    model: nn.Module
    reports: list[GraphReport]

    @property
    def decisions(self) -> list[Decision]:
        return [decision for report in self.reports for decision in report.decisions]


def batch_of(case: Case, dtype: torch.dtype, seed: int = 1) -> Batch:
    """The case's batch with its floating-point tensors in `dtype`."""
    batch = case.batch(torch.Generator().manual_seed(seed))
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}


@cache
def initial(name: str) -> nn.Module:
    """A bfloat16 model; to be copied, not trained."""
    torch.manual_seed(0)
    return CASES[name].build().to(torch.bfloat16)


@cache
def run(
    name: str,
    recipe: str | None,
    target: str | None = None,
    device: str = "cpu",
    executor: Literal["eager", "inductor"] = "eager",
) -> Run:
    """Trains the named case; ``recipe=None``: plain eager PyTorch. For an H100 as target gemms are merged."""
    case = CASES[name]
    model = copy.deepcopy(initial(name)).to(device)
    batch = {key: x.to(device) for key, x in batch_of(case, torch.bfloat16).items()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    result = Run([], {}, {}, model, [])
    with recording() as result.reports:
        options = {"filter_fqns": list(case.filtered), "target": target, "executor": executor}
        forward = compiled(model, recipe=recipe, **options) if recipe else model
        for _ in range(STEPS):
            loss = case.loss(forward(**batch), batch)
            loss.backward()
            result.losses.append(loss.item())
            if not result.gradients:
                result.gradients = {
                    n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
                }
                result.state = {n: x.clone() for n, x in model.state_dict().items()}
            optimizer.step()
            optimizer.zero_grad()
    return result


def linear_names(model: nn.Module) -> list[str]:
    """Names of the modules that are one matmul."""
    # LoRA wraps a linear module in one that is called "Linear" too
    return [
        name
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D") and not hasattr(module, "base_layer")
    ]


def expected(name: str) -> Counter[tuple[str, str]]:
    """How often each (module, role) is to be converted, from the model and what the case says."""
    case = CASES[name]
    wanted = {(linear, role) for linear in linear_names(initial(name)) for role in ROLES}
    return Counter(wanted - {(linear, role) for linear, _ in wanted for role in case.without(linear)})
