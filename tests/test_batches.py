"""Inductor's ``batch_invariant``: what float8 makes of a sample, and the others of its batch."""

import warnings

import pytest
import torch

from f8fx import GemmSpec, QuantSpec, Recipe
from tests.helpers import Block, bf16, compiled, randn

needs_the_option = pytest.mark.skipif(
    not hasattr(torch._inductor.config, "batch_invariant"), reason="this torch has no such option"
)

ROW = QuantSpec("e4m3", granularity="rowwise")
EXACT = Recipe("exact", output=GemmSpec(ROW, ROW), grad_input=None, grad_weight=None)

#: What warnings say, by what is the matter.
REASONS = {
    "scale": "one scale for all rows",
    "auto": "decides by the number of rows",
    "where": "where scales of rows are applied",
}


def warned_of(x, model=None, **options):
    """Which of the matters compiling a block, or the model, with these options warns of."""
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        compiled(model or Block().to(bf16), **options)(x)
    (*_, text) = "", *(str(each.message) for each in caught if "batch_invariant" in str(each.message))
    return {name for name, words in REASONS.items() if words in text}


@pytest.fixture(autouse=True)
def _nothing_was_warned_of(monkeypatch):
    monkeypatch.setattr("f8fx.backend._WARNED", set())


@needs_the_option
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"scale"}),
        ({"recipe": EXACT}, {"where"}),
        ({"recipe": EXACT, "rowwise_scales": "torchao"}, set()),
        ({"recipe": "rowwise"}, set()),
        ({"recipe": "rowwise_with_gw_hp"}, set()),
    ],
)
def test_what_depends_on_the_batch_is_warned_of(options, expected):
    on = {"inductor": {"batch_invariant": True}}
    assert warned_of(randn(32, 64), **options, **on) == expected
    assert warned_of(randn(32, 64), **options, **on) == set(), "once"
    assert warned_of(randn(32, 64), **options) == set()


@needs_the_option
def test_a_decision_by_size_is_warned_of_and_none_where_nothing_is_converted():
    x, wide = randn(4096, 1024), torch.nn.Linear(1024, 4096, bias=False, dtype=bf16)
    options = {"recipe": "rowwise", "select": "auto", "target": "h100", "inductor": {"batch_invariant": True}}
    assert warned_of(x[:16], wide, **options) == set()
    assert warned_of(x, wide, **options) == {"auto"}


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", EXACT])
def test_with_scales_of_rows_a_row_has_the_bits_it_has_alone(recipe):
    model = Block().to(bf16)
    x = randn(16, 8, 64) * torch.logspace(-2, 2, 16, dtype=bf16)[:, None, None]
    run = compiled(model, recipe=recipe)
    with torch.no_grad():
        whole = run(x)
        for part in (slice(0, 1), slice(5, 6), slice(3, 7), slice(8, 16)):
            assert torch.equal(run(x[part]), whole[part])


def test_with_one_scale_it_has_not():
    model = Block().to(bf16)
    x = randn(16, 8, 64) * torch.logspace(-2, 2, 16, dtype=bf16)[:, None, None]
    run = compiled(model)
    with torch.no_grad():
        assert not torch.equal(run(x[:1]), run(x)[:1])
