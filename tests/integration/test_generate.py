"""HF ``generate`` with a static cache: one graph for the prompt, one for every token after it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import f8fx
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
        compiled.forward = torch.compile(compiled.forward, backend=f8fx.f8fx, options=OPTIONS, fullgraph=True)
        logits = generate(compiled)
    # 27 dB measured
    assert min(map(sqnr, generate(model), logits)) > 20
    assert [(r.training, r.converted, r.skipped) for r in reports] == [(False, 8, 0)] * 2
    prompt, token = (sorted({d.m for d in r.decisions if d.fqn != "lm_head"}) for r in reports)
    assert (prompt, token) == ([2 * PROMPT], [2])
    assert sorted(d.fqn for d in reports[0].decisions) == sorted(training.linear_names(model))


def test_compile_config(model: nn.Module):
    """``generate`` compiles by itself what follows the prompt."""
    config = transformers.CompileConfig(backend=f8fx.f8fx, mode=None, options=OPTIONS, fullgraph=True)
    config._compile_all_devices = True  # otherwise on accelerators only
    with recording() as reports:
        logits = generate(copy.deepcopy(model), compile_config=config)
    reference = generate(model)
    assert torch.equal(reference[0], logits[0])
    assert min(map(sqnr, reference[1:], logits[1:])) > 20
    assert [(r.training, r.converted, r.skipped) for r in reports] == [(False, 8, 0)]


def test_weights_are_quantized_once_for_prompt_and_tokens(model: nn.Module, monkeypatch: pytest.MonkeyPatch):
    """Both graphs read the same copies, and the logits are those of quantizing in every call."""
    from f8fx.kernels import cast

    shapes: list[tuple[int, ...]] = []
    definition = cast.quantize

    def counted(x: torch.Tensor, *args: Any) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return definition(x, *args)

    weights = [tuple(p.shape) for p in model.parameters() if p.dim() == 2]
    results, casts = [], []
    for choice in ("dynamic", "cached"):
        compiled = copy.deepcopy(model)
        options = {**OPTIONS, "weights": choice}
        compiled.forward = torch.compile(compiled.forward, backend=f8fx.f8fx, options=options, fullgraph=True)
        logits = generate(compiled)
        with monkeypatch.context() as patch:
            patch.setattr(cast, "quantize", counted)
            shapes.clear()
            results.append((logits, continued(compiled)))
            casts.append(sum(shape in weights for shape in shapes))
    for dynamic, cached in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(dynamic, cached, strict=True))
    assert casts[0] > 0 and casts[1] == 0


def continued(model: nn.Module) -> tuple[torch.Tensor, ...]:
    """One more call with what is compiled already."""
    with torch.no_grad():
        return (model(torch.arange(3, 3 + 2 * PROMPT).view(2, PROMPT), use_cache=False).logits,)
