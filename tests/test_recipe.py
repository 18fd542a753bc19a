"""Recipes: torchao's meaning, and a sentence for every combination that means nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from f8fx import GemmSpec, QuantSpec, Recipe
from f8fx.recipe import PRESETS, ROLE_OPERANDS, ROLES

torchao = pytest.importorskip("torchao.float8")
Float8LinearRecipeName = pytest.importorskip("torchao.float8.config").Float8LinearRecipeName


@pytest.mark.parametrize("name", PRESETS)
def test_presets_mean_what_torchao_means(name):
    config = torchao.Float8LinearConfig.from_recipe_name(name)
    assert Recipe.from_torchao(config) is PRESETS[name]
    assert Recipe.from_torchao(name) is PRESETS[name]
    assert Recipe.from_torchao(Float8LinearRecipeName(name)) is PRESETS[name]


def test_from_torchao_wants_a_config_and_not_its_class():
    with pytest.raises(TypeError, match=r"takes a torchao\.float8\.Float8LinearConfig"):
        Recipe.from_torchao(torchao.Float8LinearConfig)


def test_from_torchao_says_what_it_takes():
    with pytest.raises(ValueError, match="did you mean 'tensorwise'"):
        Recipe.from_torchao("tensorwize")
    with pytest.raises(TypeError, match="or the name of its recipe, got 3"):
        Recipe.from_torchao(3)


def test_eps_is_torchaos():
    from torchao.float8.float8_utils import EPS

    from f8fx.recipe import EPS as OURS

    assert OURS == EPS


def test_from_torchao_keeps_details():
    base = torchao.Float8LinearConfig()
    config = dataclasses.replace(base, round_scales_to_power_of_2=True)
    recipe = Recipe.from_torchao(config)
    assert recipe.output.left.power_of_2_scale and recipe.name == "torchao"
    assert recipe.grad_input.left.dtype == "e5m2"


def test_from_torchao_keeps_what_grad_weight_has_of_its_own():
    from torchao.float8.config import CastConfig, ScalingGranularity

    rows = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=torch.float8_e4m3fn)
    whole = CastConfig(target_dtype=torch.float8_e4m3fn)
    recipe = Recipe.from_torchao(
        torchao.Float8LinearConfig(
            cast_config_input=rows,
            cast_config_weight=rows,
            cast_config_grad_output=rows,
            cast_config_weight_for_grad_input=rows,
            cast_config_input_for_grad_weight=whole,
            cast_config_grad_output_for_grad_weight=whole,
        )
    )
    assert recipe.output.left == recipe.grad_input.left == QuantSpec("e4m3", "rowwise")
    assert recipe.grad_weight == GemmSpec(QuantSpec("e4m3"), QuantSpec("e4m3"))


@pytest.mark.parametrize("setting", ["emulate", "enable_fsdp_float8_all_gather"])
def test_from_torchao_refuses_what_a_graph_cannot_do(setting):
    config = dataclasses.replace(torchao.Float8LinearConfig(), **{setting: True})
    with pytest.raises(ValueError, match=setting) as refusal:
        Recipe.from_torchao(config)
    instead = {
        "emulate": 'select="all"',
        "enable_fsdp_float8_all_gather": "f8fx.fsdp.enable_float8_all_gather(",
    }
    assert instead[setting] in str(refusal.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: QuantSpec("e4m4"),
            "QuantSpec.dtype must be one of 'e4m3', 'e5m2', got 'e4m4'; did you mean 'e4m3'",
        ),
        (lambda: QuantSpec(granularity="row"), "did you mean 'rowwise'"),
        (lambda: QuantSpec(scaling="delayed"), "QuantSpec.scaling must be one of 'dynamic'"),
        (lambda: GemmSpec(QuantSpec("e5m2"), QuantSpec("e5m2")), "e5m2 x e5m2"),
        (lambda: Recipe(output=None, grad_input=None, grad_weight=None), "every gemm is None"),
        (lambda: Recipe(output="fp8"), "must be a GemmSpec or None"),
        (lambda: Recipe(convert_dtypes=(torch.int8,)), "convert_dtypes must be a tuple of some of"),
        (lambda: Recipe(convert_dtypes=()), "convert_dtypes must be a tuple of some of"),
        (lambda: Recipe(convert_dtypes=torch.float32), "convert_dtypes must be a tuple of some of"),
        (lambda: Recipe(name=3), "Recipe.name must be a string"),
        (lambda: GemmSpec("e4m3", "e4m3"), "GemmSpec.left must be a QuantSpec"),
        (lambda: GemmSpec(use_fast_accum="no"), "use_fast_accum must be True or False"),
        (lambda: QuantSpec(power_of_2_scale=2), "power_of_2_scale must be True or False"),
        (lambda: Recipe.named("rowise"), "did you mean 'rowwise'"),
    ],
)
def test_impossible_combinations_say_why(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_operands_by_kind():
    recipe = Recipe.named("tensorwise")
    for role in ROLES:
        for kind in ROLE_OPERANDS[role]:
            assert recipe.operand(role, kind) is not None
    with pytest.raises(ValueError, match="not grad_output"):
        recipe.operand("output", "grad_output")
    assert Recipe.named("rowwise_with_gw_hp").operand("grad_weight", "input") is None


def test_recipes_are_values():
    assert Recipe.named("rowwise") == Recipe.named("rowwise").replace()
    assert hash(Recipe.named("rowwise")) == hash(Recipe.named("rowwise").replace())
    assert Recipe.named("rowwise").replace(name="other") != Recipe.named("rowwise")
