"""HF ``generate`` with a static cache: one graph for the prompt, one for every token after it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from f8fx.report import recording
from tests.helpers import sqnr
from tests.integration import training
from tests.integration.models import llama

transformers = pytest.importorskip("transformers")

OPTIONS = {"select": "all", "executor": "eager", "strict": True, "debug": True}
PROMPT = 7
NEW = 6


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return llama(num_hidden_layers=1, use_cache=True).to(torch.bfloat16).eval()


def generate(model: nn.Module, **options: Any) -> tuple[torch.Tensor, ...]:
    """Logits of each new token of two sequences; what follows is forced, so that runs stay comparable."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 96, (2, PROMPT + NEW), generator=generator)  # 2 ends a text
    torch._dynamo.reset()
    result = model.generate(
        tokens[:, :PROMPT],
        cache_implementation="static",
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        prefix_allowed_tokens_fn=lambda row, seen: [int(tokens[row, len(seen)])],
        **options,
    )
    assert torch.equal(result.sequences, tokens)
    return result.logits


def test_compiled_forward(model: nn.Module):
    compiled = copy.deepcopy(model)
    with recording() as reports:
        compiled.forward = torch.compile(compiled.forward, backend="f8fx", options=OPTIONS, fullgraph=True)
        logits = generate(compiled)
    # 27 dB measured
    assert min(map(sqnr, generate(model), logits)) > 20
    assert [(r.training, r.converted, r.skipped) for r in reports] == [(False, 8, 0)] * 2
    prompt, token = (sorted({d.m for d in r.decisions if d.fqn != "lm_head"}) for r in reports)
    assert (prompt, token) == ([2 * PROMPT], [2])
    assert sorted(d.fqn for d in reports[0].decisions) == sorted(training.linear_names(model))


def test_compile_config(model: nn.Module):
    """``generate`` compiles by itself what follows the prompt."""
    config = transformers.CompileConfig(backend="f8fx", mode=None, options=OPTIONS, fullgraph=True)
    config._compile_all_devices = True  # otherwise on accelerators only
    with recording() as reports:
        logits = generate(copy.deepcopy(model), compile_config=config)
    reference = generate(model)
    assert torch.equal(reference[0], logits[0])
    assert min(map(sqnr, reference[1:], logits[1:])) > 20
    assert [(r.training, r.converted, r.skipped) for r in reports] == [(False, 8, 0)]
