"""Through Inductor's own code generation, on CPU: numerics, layouts and features of Inductor."""

from __future__ import annotations

import copy
import logging
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

import f8fx
from f8fx import recording
from f8fx.torch_private import supports_rowwise_scaled_mm
from tests.helpers import E4M3, Block, bf16, compiled, gradients, graph_after, randn, sqnr

pytestmark = pytest.mark.slow


def torchao_compiled(model, config):
    torchao = pytest.importorskip("torchao.float8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converted = torchao.convert_to_float8_training(copy.deepcopy(model), config=config)
    torch._dynamo.reset()
    return converted, torch.compile(converted)


def test_the_readmes_quick_start_for_cpus_logs_what_it_says(caplog: pytest.LogCaptureFixture):
    """Executed as it stands there."""
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    quoted = re.search(
        r"<!-- example: quick_start -->\n```python\n(.*?)# INFO:f8fx:(.*?)\n```", readme, re.DOTALL
    )
    assert quoted is not None
    code, line = quoted.groups()
    torch._dynamo.reset()
    with caplog.at_level(logging.INFO, logger="f8fx"):
        exec(compile(code, "README.md", "exec"), {})
    assert [
        record.getMessage().removesuffix(" [cached]") for record in caplog.records if record.name == "f8fx"
    ] == [line]


@pytest.mark.parametrize(
    "recipe",
    ["rowwise", *(pytest.param(name, marks=pytest.mark.long) for name in ("e4m3", "rowwise_with_gw_hp"))],
)
def test_sqnr_against_bf16_and_torchao(recipe):
    """Above 20 dB everywhere, and at most 0.5 dB below the same model through compiled torchao."""
    torch.manual_seed(0)
    # large enough for the ratio not to be a matter of luck
    model = nn.Linear(256, 384, dtype=bf16)
    x, grad = randn(4, 64, 256, grad=False), randn(4, 64, 384, grad=False, seed=1)
    reference = gradients(model, model, x, grad)
    own = E4M3 if recipe == "e4m3" else recipe
    ours = gradients(model, compiled(model, recipe=own, executor="inductor"), x, grad)
    quality = {name: sqnr(want, ours[name]) for name, want in reference.items()}
    assert min(quality.values()) > 20, quality
    if recipe != "e4m3" and not supports_rowwise_scaled_mm("cpu"):
        return  # torchao's rowwise recipes do not run on this torch's CPU
    from torchao.float8 import CastConfig, Float8LinearConfig

    if recipe == "e4m3":
        config = Float8LinearConfig(cast_config_grad_output=CastConfig(target_dtype=torch.float8_e4m3fn))
    else:
        config = Float8LinearConfig.from_recipe_name(recipe)
    converted, call = torchao_compiled(model, config)
    theirs = gradients(converted, call, x, grad)
    for name, want in reference.items():
        # two exact results, as a bias gradient's, are both infinitely good
        assert min(quality[name], 100) > min(sqnr(want, theirs[name]), 100) - 0.5, name


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "save"),
    [
        ("tensorwise", "lean"),
        ("rowwise", "fast"),
        ("rowwise_with_gw_hp", "lean"),
    ],
)
def test_merged_gemms(recipe, save):
    """Parts of one operand are cast into one buffer, in both layouts, and slices of results are read in place."""
    torch.manual_seed(0)
    model = Block(64, 96).to(bf16)
    x, grad = randn(4, 32, 64, grad=False), randn(4, 32, 64, grad=False, seed=1)
    options = {"recipe": recipe, "save": save, "target": "h100"}
    assert graph_after(model, x, **options).count("f8fx.concat(") == 2  # weights, output gradients
    eager = gradients(model, compiled(model, **options), x, grad)
    generated = gradients(model, compiled(model, executor="inductor", **options), x, grad)
    for name, want in eager.items():
        assert sqnr(want, generated[name]) > 25, name


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_generated_code_agrees_with_eager(recipe):
    """Odd sizes, so that padding, slicing and ragged contraction go through code generation too.

    Inductor keeps fused intermediates in float32 where eager rounds to bfloat16, hence a tolerance.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 50), nn.Sigmoid(), nn.Linear(50, 16)).to(bf16)
    x, grad = randn(5, 30, grad=False), randn(5, 16, grad=False, seed=1)
    eager = gradients(model, compiled(model, recipe=recipe), x, grad)
    generated = gradients(model, compiled(model, recipe=recipe, executor="inductor"), x, grad)
    for name, want in eager.items():
        assert sqnr(want, generated[name]) > 25, name


@pytest.mark.long
def test_dynamic_sizes():
    torch.manual_seed(0)
    model = nn.Linear(32, 48, dtype=bf16)
    f8 = compiled(model, executor="inductor", dynamic=True)
    with recording() as reports:
        for m in (16, 7, 33):
            x = randn(m, 32)
            y = f8(x)
            y.backward(torch.ones_like(y))
            assert sqnr(model(x.detach()).detach(), y.detach()) > 20 and x.grad.shape == (m, 32)
    assert len(reports) == 1


def test_modes_and_inductor_options_reach_inductor():
    model = nn.Linear(32, 48, dtype=bf16)
    seen = []
    from torch._inductor import config

    class Spy(f8fx.torch_private.CustomGraphPass):
        def __call__(self, graph):
            seen.append((config.max_autotune, config.epilogue_fusion))

        def uuid(self):
            return None

    torch._dynamo.reset()
    f8 = torch.compile(
        model,
        backend="f8fx",
        options={"select": "all", "inductor": {"max_autotune": True, "joint_custom_pre_pass": Spy()}},
    )
    f8(randn(16, 32, grad=False))
    assert seen == [(True, config.epilogue_fusion)]
    assert config.max_autotune is False  # per compile, not global


@pytest.mark.long
def test_inference_of_a_shared_input_casts_it_once():
    """Inductor's CPU code for q, k, v holds one cast of the input."""
    from torch._inductor.utils import run_and_get_code

    class Qkv(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(64, 64, bias=False, dtype=bf16) for _ in range(3))

        def forward(self, x):
            return self.q(x), self.k(x), self.v(x)

    with torch.no_grad():
        _, codes = run_and_get_code(compiled(Qkv(), executor="inductor"), randn(48, 64, grad=False))
    inputs = re.findall(r"_scaled_mm\((buf\d+),", codes[0])
    assert len(inputs) == 3 and len(set(inputs)) == 1


@pytest.mark.long
def test_equal_reductions_in_one_kernel():
    """Two uses of one tensor under different layouts have equal row amaxes, which Inductor fuses."""

    def f(x, w):
        one = torch.nn.functional.linear(x, w)
        two = torch.einsum("abcd,ed->eabc", x, w)
        return one.float().pow(2).sum() + two.float().pow(2).sum()

    x, w = randn(2, 3, 8, 64), randn(48, 64, seed=1)
    y = compiled(f, recipe="rowwise", executor="inductor")(x, w)
    y.backward()
    want = f(x.detach(), w.detach())
    assert torch.allclose(y.detach(), want, rtol=0.05)


@pytest.mark.long
def test_nested_compile_region_under_debug():
    """Inductor splits the region's graph and hands both halves to the pass again."""
    linear = nn.Linear(64, 64, bias=False, dtype=bf16)

    @torch.compiler.nested_compile_region
    def region(x):
        return torch.sin(linear(x))

    with recording() as reports:
        x = randn(32, 64)
        compiled(lambda x: region(region(x)), executor="inductor")(x).sum().backward()
    assert len(reports) == 1 and reports[0].converted > 0 and x.grad is not None


@pytest.mark.long
def test_a_nested_region_that_is_left_is_counted_once():
    """Its halves hold nothing of ours that would tell that they were seen."""
    layer, last = nn.Linear(64, 64, bias=False, dtype=bf16), nn.Linear(64, 32, bias=False, dtype=bf16)

    @torch.compiler.nested_compile_region
    def region(x):
        return torch.sin(layer(x))

    with fresh_cache(), recording() as reports:
        f8 = compiled(lambda x: last(region(region(x))), executor="inductor", only_fqns=["none"])
        f8(randn(32, 64)).sum().backward()
    assert reports[0].reasons == {"filtered": 6}


@pytest.mark.long
def test_relayout_through_code_generation_keeps_every_byte():
    """All 256 of them in both formats: on the way no conversion may touch the bits of a NaN."""
    from f8fx import lowerings, ops

    lowerings.register()

    def f(data):
        return (
            ops.relayout(data, transpose=True, align=[1, 16]),
            ops.relayout(data, transpose=True),
            ops.relayout(data, align=[16, 16]),
        )

    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        data = torch.arange(256, dtype=torch.uint8).repeat(3).view(24, 32).view(dtype)
        torch._dynamo.reset()
        for want, got in zip(f(data), torch.compile(f)(data), strict=True):
            assert torch.equal(want.view(torch.uint8), got.view(torch.uint8))
            assert want.stride() == got.stride()


@pytest.mark.long
@pytest.mark.parametrize("dim", [0, 1])
def test_amaxes_of_parts_below_each_other_and_side_by_side(dim):
    """Of several sizes; rows of parts that stand side by side have an amax in common, others do not."""
    from f8fx import lowerings, ops

    lowerings.register()

    def f(a, b):
        whole = ops.concat([a.sin(), b.cos()], dim)
        return ops.amax_both(whole, [a * 2], [])

    a, b = randn(16, 32, grad=False), randn(*((48, 32) if dim == 0 else (16, 64)), grad=False, seed=1)
    torch._dynamo.reset()
    with fresh_cache():  # whose keys know nothing of lowerings
        found = torch.compile(f)(a, b)
    for want, got in zip(f(a, b), found, strict=True):
        assert torch.allclose(want, got, rtol=1e-2)  # of bfloat16's rounding, made or not


@pytest.mark.long
@pytest.mark.parametrize(
    ("converted", "by"),
    [
        (True, "option"),
        (True, "config"),
        (False, "option"),
        (False, "config"),
    ],
)
def test_tuning_is_for_rewritten_graphs_and_undone(monkeypatch, converted, by):
    """Forward and backward are compiled with it, from their first nodes; later graphs without; the user's own setting wins."""
    from f8fx import tuning
    from f8fx.torch_private import inductor_config, tuned_graphs

    seen = []
    config = inductor_config()
    own = {"realize_reads_threshold": 3}
    before = config.realize_opcount_threshold, config.realize_reads_threshold
    ours = {"realize_opcount_threshold": 77, "realize_reads_threshold": 5}
    monkeypatch.setattr(tuning, "TUNING", ours)
    monkeypatch.setattr(tuned_graphs, "TUNED_DEVICES", frozenset(("cpu",)))

    from torch._inductor.graph import GraphLowering

    plain = GraphLowering.placeholder

    def placeholder(self, *args):
        seen.append((config.realize_opcount_threshold, config.realize_reads_threshold))
        return plain(self, *args)

    monkeypatch.setattr(GraphLowering, "placeholder", placeholder)
    options = {"inductor": own if by == "option" else {}, "executor": "inductor"}
    options |= {} if converted else {"only_fqns": ["nothing"]}
    with torch._inductor.utils.fresh_cache(), config.patch(own if by == "config" else {}):
        model = nn.Linear(32, 32).to(bf16)
        compiled(model, **options)(randn(16, 32)).sum().backward()
    assert len(seen) >= 6 and set(seen) == {(77 if converted else before[0], 3)}
    assert (config.realize_opcount_threshold, config.realize_reads_threshold) == before


class Overwriting(nn.Module):
    """A layer beside one whose weight is a buffer that it writes to when it has read it."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.layer = nn.Linear(32, 48, bias=False)
        self.register_buffer("state", randn(48, 32, grad=False))

    def forward(self, x):
        y = F.linear(x, self.state)
        self.write(self.state, x)
        return y + 1, self.layer(x) - 1


@torch.library.custom_op("f8fx_tests::overwrite", mutates_args={"state"})
def overwrite(state: torch.Tensor, x: torch.Tensor) -> None:
    state[8:24] = x * 9


def assigned(state, x):
    state[8:24] = x * 9


@pytest.mark.long
@pytest.mark.parametrize("write", [overwrite, assigned])
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_a_merged_weight_that_is_overwritten_later(write, recipe):
    """Parts of the joined weight are read where they lie, but as they were."""
    x, results = randn(16, 32, grad=False), []
    for merge in ("auto", "never"):
        torch.manual_seed(0)
        model = Overwriting(write).to(bf16)
        with torch.no_grad(), fresh_cache():
            found = compiled(model, merge=merge, target="h100", recipe=recipe, executor="inductor")(x)
        results.append((*found, model.state))
    for merged, separate in zip(*results, strict=True):
        assert sqnr(separate, merged) > 20


@pytest.mark.long
def test_columns_of_parts_are_cast_in_the_safe_form(monkeypatch):
    """It lies in one piece before it is cast, and its scales are those of the parts still."""
    from f8fx import kernel_forms, lowerings, ops

    fused = dict.fromkeys(kernel_forms.FORMS, "fused")
    device = torch.device("cpu")
    monkeypatch.setitem(
        kernel_forms.VERDICTS, device, kernel_forms.Verdict("cpu", {**fused, "transpose": "realized"})
    )

    def f(a, b):
        whole = ops.concat([a * 2, b * 2], 1)
        scales = ops.scale(ops.amax(whole, 0), dtype=torch.float8_e4m3fn)
        return (
            ops.quantize(whole, scales, dtype=torch.float8_e4m3fn, dim=0, transpose=True).view(torch.uint8),
        )

    args = [randn(32, 16, grad=False), randn(32, 48, grad=False, seed=1)]
    lowerings.register()
    torch._dynamo.reset()
    with fresh_cache():
        found = torch.compile(f)(*args)
    assert torch.equal(found[0], f(*args)[0])
