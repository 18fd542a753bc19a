"""Options: every key and value is checked, and the message says what to write instead."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn

import f8fx
from f8fx import OptionError, Options, Recipe
from f8fx.recipe import PRESETS
from f8fx.torch_private import inductor_config, inductor_option_type
from tests.helpers import bf16, compiled, randn, report_of


def test_defaults():
    options = Options.parse()
    assert options == Options()
    assert (options.recipe.name, options.select, options.pad) == ("tensorwise", "auto", "auto")
    assert (options.strict, options.executor, options.target) == (False, "inductor", None)


def test_options_travel_to_other_processes():
    options = Options.parse({"recipe": "rowwise", "target": "h100"}, "max-autotune")
    again = pickle.loads(pickle.dumps(options))
    assert again == options == copy.deepcopy(options) and again.inductor["max_autotune"]
    with pytest.raises(TypeError):
        again.inductor["max_autotune"] = False


def test_a_target_may_be_data():
    mine = dataclasses.replace(f8fx.hardware.find("h100"), name="mine")
    assert Options.parse({"target": mine}).target is mine
    report = report_of(nn.Linear(32, 48, dtype=bf16), randn(16, 32), target=mine)
    assert (report.target, report.converted) == ("mine", 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"recipes": "rowwise"}, "unknown option 'recipes'; did you mean 'recipe'"),
        ({"max_autotune": True}, "Inductor option: give it as options={\"inductor\": {'max_autotune': ...}}"),
        ({"triton.cudagraphs": True}, "is an Inductor option"),
        ({"epilogue-fusion": True}, "is an Inductor option"),
        ({"mode": "rowwise"}, "is an argument of torch.compile"),
        ({"pad_inner_dim": True}, 'is a setting of torchao\'s; here it is pad="auto", the default'),
        ({"recipe": "rowise"}, "unknown recipe 'rowise'; did you mean 'rowwise'"),
        ({"recipe": 3}, "recipe must be the name of one"),
        ({"recipe": ["rowwise"]}, "recipe must be the name of one"),
        ({"rowwise_scales": "gemm"}, "unknown value of rowwise_scales: 'gemm'; did you mean 'in_gemm'"),
        ({"select": "al"}, "unknown value of select: 'al'; did you mean 'all'"),
        ({"pad": "always"}, "unknown value of pad: 'always'"),
        ({"executor": "eagr"}, "did you mean 'eager'"),
        ({"target": "h10"}, "target: .*h100"),
        ({"target": 7}, "target"),
        ({"filter_fqns": "output"}, "filter_fqns must be a list of substrings"),
        ({"filter_fqns": map(str, ["head"])}, "filter_fqns must be a list of substrings"),
        ({"only_fqns": (name for name in ["head"])}, "only_fqns must be a list of substrings"),
        ({"only_fqns": 3}, "only_fqns must be a list of substrings"),
        ({"only_fqns": [""]}, "only_fqns must hold non-empty strings"),
        ({"filter_fn": "x"}, "filter_fn must be a function"),
        ({"strict": 1}, "strict must be True or False"),
        ({"verbose": "yes"}, "verbose must be True or False"),
        ({"inductor": ["max_autotune"]}, "inductor must be a dict"),
        (
            {"inductor": {"max_autotun": True}},
            "unknown Inductor option 'max_autotun'; did you mean 'max_autotune'",
        ),
        (
            {"inductor": {"max_autotune": "yes please"}},
            "Inductor option 'max_autotune' must be of type bool, got 'yes please'",
        ),
        ({"inductor": {"triton.cudagraphs": "no"}}, "'triton.cudagraphs' must be of type bool, got 'no'"),
        ({"inductor": {"max-autotune": None}}, "'max-autotune' must be of type bool"),
        ({"inductor": {"joint_custom_pre_pass": 3}}, "must be a pass or a list of passes, got 3"),
        ({"inductor": {"joint_custom_pre_pass": [print, 3]}}, "must be a pass or a list of passes"),
        ({"filter_fqns": ["auto_filter_small_kn"], "select": "all"}, 'means select="auto"'),
    ],
)
def test_what_is_wrong_is_said(given, message):
    with pytest.raises(OptionError, match=message):
        Options.parse(given)


def test_every_default_can_be_given():
    from dataclasses import fields

    given = {field.name: getattr(Options(), field.name) for field in fields(Options)}
    assert Options.parse(given) == Options()


def test_a_set_of_names_is_the_same_in_all_processes():
    names = {"lm_head", "router", "embed", "gate"}
    assert Options.parse({"filter_fqns": names}).filter_fqns == ("embed", "gate", "lm_head", "router")
    assert Options.parse({"filter_fqns": ["b", "a"]}).filter_fqns == ("b", "a")


def test_options_reach_the_user_through_torch_compile():
    model = torch.compile(nn.Linear(16, 16), backend=f8fx.f8fx, options={"recipee": "rowwise"})
    with pytest.raises(Exception, match="did you mean 'recipe'"):
        model(torch.zeros(1, 16))


def test_torchtitan_auto_filter_means_auto():
    options = Options.parse({"filter_fqns": ["output", "auto_filter_small_kn"]})
    assert options.select == "auto" and options.filter_fqns == ("output",)


@pytest.mark.parametrize("name", PRESETS)
def test_mode_can_be_a_recipe(name):
    assert Options.parse(None, name).recipe is PRESETS[name]


def test_mode_can_be_an_inductor_mode_a_recipe_or_both():
    both = Options.parse(None, "max-autotune+rowwise")
    assert both.recipe.name == "rowwise" and both.inductor["max_autotune"] is True
    assert Options.parse(None, "rowwise+max-autotune") == both
    assert Options.parse(None, " max-autotune + rowwise") == both
    assert Options.parse(None, "reduce-overhead").inductor["triton.cudagraphs"] is True
    assert Options.parse(None, "default") == Options()


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("rowise", "unknown mode 'rowise'; did you mean 'rowwise'"),
        ("rowwise+tensorwise", "names two recipes"),
        ("max-autotune+reduce-overhead", "names two Inductor modes"),
        ("defualt", r"known: default, (?!.*default)"),
        (3, "mode must be a string"),
    ],
)
def test_bad_modes(mode, message):
    with pytest.raises(OptionError, match=message):
        Options.parse(None, mode)


def test_a_recipe_in_mode_and_options_must_agree():
    with pytest.raises(OptionError, match="give one"):
        Options.parse({"recipe": "rowwise"}, "tensorwise")
    assert Options.parse({"recipe": "rowwise"}, "rowwise").recipe.name == "rowwise"


def test_explicit_inductor_options_win_over_the_mode():
    options = Options.parse({"inductor": {"max_autotune": False}}, "max-autotune")
    assert options.inductor["max_autotune"] is False


def test_inductor_options_are_as_free_as_in_torch_compile():
    """Dashes for underscores; a bool is an int; anything where several types are allowed."""
    given = {"max-autotune": True, "max_fusion_size": True, "joint_custom_pre_pass": None}
    parsed = Options.parse({"inductor": given}).inductor
    assert parsed == {key.replace("-", "_"): value for key, value in given.items()}
    stock = torch._TorchCompileInductorWrapper("default", given, False)
    assert parsed == stock.config
    for name, value in inductor_config().get_config_copy().items():
        wanted = inductor_option_type(name)
        assert wanted is None or isinstance(value, wanted)


def test_own_recipe_is_used():
    recipe = Recipe("mine", grad_input=None, grad_weight=None)
    with f8fx.recording() as reports:
        compiled(nn.Linear(32, 32, dtype=bf16), recipe=recipe)(randn(16, 32)).sum().backward()
    assert reports[0].recipe == "mine" and (reports[0].converted, reports[0].skipped) == (1, 2)


def test_unknown_backend_arguments_are_named():
    gm = torch.fx.symbolic_trace(lambda x: (x + 1,))
    with pytest.warns(UserWarning, match="ignoring unknown backend arguments \\['colour'\\]"):
        f8fx.f8fx(gm, [torch.zeros(1)], options={"executor": "eager"}, colour="blue")


def test_float32_is_converted_when_the_recipe_says_so():
    recipe = PRESETS["tensorwise"].replace(convert_dtypes=(torch.float32,))
    with f8fx.recording() as reports:
        x = randn(16, 32, dtype=torch.float32)
        y = compiled(nn.Linear(32, 32), recipe=recipe)(x)
        y.sum().backward()
    assert reports[0].converted == 3 and y.dtype == x.grad.dtype == torch.float32
