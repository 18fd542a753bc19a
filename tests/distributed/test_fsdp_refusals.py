"""What is not gathered in float8, and why; and the tensors by themselves. One process, no sharding."""

from __future__ import annotations

import copy
import io
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import f8fx
from f8fx import Recipe, hardware, ops
from f8fx.fsdp import enable_float8_all_gather, precompute_scales
from f8fx.fsdp.copies import Copies
from f8fx.fsdp.formats import Format
from f8fx.fsdp.shard import Float8Shard
from f8fx.fsdp.weight import Float8Weight
from f8fx.hardware import Hardware
from f8fx.ranks.peers import Peers
from tests.helpers import Block, bf16, graph_after, randn

fp8 = torch.float8_e4m3fn


class Own(nn.Linear):
    """A linear layer that does something else with its weight."""

    def forward(self, x):
        return F.linear(x, self.weight.abs())


class Zoo(nn.Module):
    def __init__(self):
        super().__init__()
        self.fine = nn.Linear(32, 48)
        self.odd_in = nn.Linear(33, 48)
        self.odd_out = nn.Linear(32, 50)
        self.head = nn.Linear(32, 64, bias=False)
        self.embedding = nn.Embedding(64, 32)
        self.head.weight = self.embedding.weight
        self.other = nn.Embedding(16, 32)
        self.own = Own(32, 32)
        self.free = nn.Parameter(torch.zeros(32, 32))
        self.double = nn.Linear(32, 32, dtype=torch.float64)
        self.strided = nn.Linear(32, 48)
        self.strided.weight = nn.Parameter(torch.zeros(32, 48).t())
        self.parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
        self.conv = nn.Conv1d(16, 16, 1)


def decide(model, **options):
    before = dict(model.named_parameters())
    decided = {d.fqn: d.reason for d in enable_float8_all_gather(model, **options)}
    after = dict(model.named_parameters())
    for name, parameter in before.items():
        converted = decided.get(name) == "converted"
        # what is refused is the very object it was
        assert (after[name] is not parameter) == converted and isinstance(
            after[name], Float8Shard
        ) == converted
    return decided


def test_every_reason_leaves_its_parameter_untouched():
    assert decide(Zoo()) == {
        "free": "not the weight of a linear layer",
        "fine.weight": "converted",
        "odd_in.weight": "not a multiple of 16",
        "odd_out.weight": "not a multiple of 16",
        "head.weight": "shared with a module that is no linear layer",
        "other.weight": "not the weight of a linear layer",
        "own.weight": "not the weight of a linear layer",
        "double.weight": "float64 weight",
        "strided.weight": "not contiguous",
        "parametrized.parametrizations.weight.original0": "not the weight of a linear layer",
        "parametrized.parametrizations.weight.original1": "not the weight of a linear layer",
    }


def test_names_are_those_without_wrappers():
    """As in the backend's filters: activation checkpointing wraps blocks before they are sharded."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)) for _ in range(2)))
    model[0] = checkpoint_wrapper(model[0])
    model[1].compile()
    wrapped = nn.Sequential(torch.compile(model[0]), model[1])
    decided = {d.fqn: d.reason for d in enable_float8_all_gather(wrapped, filter_fqns=["0.1"])}
    assert decided == {
        "0.0.weight": "converted",
        "0.1.weight": "filtered",
        "1.0.weight": "converted",
        "1.1.weight": "converted",
    }


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.zeros(4, 48, 32))
        self.odd = nn.Parameter(torch.zeros(4, 50, 32))
        self.bias = nn.Parameter(torch.zeros(4, 48))
        self.positions = nn.Parameter(torch.zeros(1, 48, 32))
        self.wide = nn.Parameter(torch.zeros(4, 48, 32, dtype=torch.float64))
        self.conv = nn.Conv1d(16, 16, 16)


def test_the_weights_of_experts_if_asked_for(monkeypatch):
    others = {"bias": "not the weight of a linear layer"}
    assert decide(Mixture(), recipe="rowwise") == others
    options = {"recipe": "rowwise", "experts": "convert"}
    others |= {"odd": "not a multiple of 16", "wide": "float64 weight"}
    assert decide(Mixture(), **options) == others | {"up": "converted"}
    why = "grouped matmul under a recipe that is not rowwise"
    assert decide(Mixture(), **options | {"recipe": "tensorwise"}) == others | {"up": why}
    e5m2 = f8fx.GemmSpec(f8fx.QuantSpec("e5m2", "rowwise"), f8fx.QuantSpec("e4m3", "rowwise"))
    recipe = Recipe.named("rowwise").replace(name="e5m2 gradients", grad_input=e5m2)
    why = "grouped float8 gemms take e4m3 alone"
    assert decide(Mixture(), **options | {"recipe": recipe}) == others | {"up": why}
    assert decide(Mixture(), **options, filter_fqns=["up"])["up"] == "converted"  # names of modules count
    assert decide(nn.ModuleDict({"up": Mixture()}), **options, filter_fqns=["up"])["up.up"] == "filtered"
    monkeypatch.setattr(hardware, "of_device", lambda device: hardware.find("b200"))
    assert decide(Mixture(), **options) == others | {"up": "no grouped float8 gemm on b200"}


def test_filters_are_the_backends():
    assert decide(Block(), filter_fqns=["gate"]) == {
        "gate.weight": "filtered",
        "up.weight": "converted",
        "down.weight": "converted",
    }
    assert decide(Block(), only_fqns=["gate"])["up.weight"] == "filtered"


def test_a_gemm_that_needs_the_weight_in_high_precision():
    recipe = Recipe.named("tensorwise").replace(name="half", grad_input=None)
    assert set(decide(Block(), recipe=recipe).values()) == {
        "kept in high precision by the recipe: grad_input reads the weight"
    }


def test_hardware_without_float8(monkeypatch):
    monkeypatch.setattr(hardware, "of_device", lambda device: hardware.find("a100"))
    assert isinstance(hardware.of_device(None), Hardware)
    assert {reason.split(" on ")[0] for reason in decide(Block()).values()} == {"no float8 tensor cores"}


def test_calls_that_mean_nothing():
    for options in (
        {"recipe": "tensorwize"},
        {"wire": "fp8"},
        {"scales": "never"},
        {"experts": True},
        {"filter_fqns": "gate"},
        {"mesh": "fsdp"},
    ):
        model = Block()
        with pytest.raises(ValueError):
            decide(model, **options)
        assert type(model.gate.weight) is nn.Parameter
    model = Block()
    enable_float8_all_gather(model)
    with pytest.raises(ValueError, match="gathered in float8 already"):
        enable_float8_all_gather(nn.Sequential(model))
    with pytest.raises(ValueError, match="was not called on this model"):
        precompute_scales(Block())


def test_before_sharding_the_model_works_as_it_did():
    """On one device nothing is gathered: the parameter is what it was."""
    model, x = Block().to(bf16), randn(16, 64)
    want = model(x).detach()
    enable_float8_all_gather(model)
    assert torch.equal(model(x), want)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.gate.weight.zero_()
    assert (
        isinstance(twin.gate.weight, Float8Shard) and twin.gate.weight.weight is not model.gate.weight.weight
    )
    assert torch.equal(model(x), want) and not torch.equal(twin(x), want)
    assert model.to(torch.float32).gate.weight.dtype == torch.float32
    assert isinstance(model.gate.weight, Float8Shard) and model.gate.weight.plain.dtype == torch.float32


def test_a_pickled_parameter_is_a_plain_tensor():
    model = Block()
    enable_float8_all_gather(model)
    buffer = io.BytesIO()
    torch.save(model.gate.weight.detach(), buffer)
    assert b"f8fx" not in buffer.getvalue()
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), model.gate.weight.plain)


def test_a_parameter_whose_outside_was_moved_alone():
    model = Block()
    enable_float8_all_gather(model)
    model.gate.weight.plain = model.gate.weight.plain.to("meta")
    with pytest.raises(RuntimeError, match="Move the model to its device"):
        model.gate.weight + 0


def test_what_data_is_set_to_is_what_is_inside():
    model = Block()
    enable_float8_all_gather(model)
    weight = model.gate.weight
    for value in (torch.ones_like(weight.plain), weight.data * 2, weight.data.to(torch.float64)):
        before = weight.version()
        weight.data = value
        assert weight.version() != before and weight.dtype == weight.plain.dtype == value.dtype
        wanted = getattr(value, "plain", value)
        assert torch.equal(weight.plain, wanted) and torch.equal(weight + 0, wanted)
        assert torch.equal(model.state_dict()["gate.weight"], wanted)
    assert model.half().gate.weight is weight and weight.plain.dtype == torch.float16
    assert model.to("meta").gate.weight.plain.is_meta


def test_a_parameter_is_read_as_any_other_is():
    model = Block()
    enable_float8_all_gather(model)
    weight, plain = model.float().gate.weight.detach(), model.gate.weight.plain.detach()
    assert weight.tolist() == plain.tolist()
    for read in (lambda tensor: tensor.numpy(), np.asarray, torch.from_dlpack, np.from_dlpack):
        assert np.array_equal(np.asarray(read(weight)), plain.numpy())


def test_python_that_writes_to_a_parameter_writes_to_what_is_inside():
    model = Block()
    enable_float8_all_gather(model)
    weight = model.gate.weight.detach()
    for write in (
        lambda: weight.apply_(lambda value: value + 1),
        lambda: weight.map_(weight, lambda value, other: value + other),
        lambda: weight.map2_(weight, weight, lambda value, a, b: value - a + b),
    ):
        version = weight.version()
        assert write() is weight and weight.version() != version
    assert weight.share_memory_().plain.is_shared() and model.share_memory() is model


def test_a_parameter_that_was_replaced_is_told_of_once(caplog):
    model = Block()
    enable_float8_all_gather(model)
    model.up.weight = nn.Parameter(model.up.weight.detach().plain)
    for _ in range(2):
        model(torch.zeros(1, 64))
    (record,) = caplog.records
    assert "'up.weight' was replaced" in record.getMessage()


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, weight):
        self.calls += 1
        return 2 * weight


def test_a_parametrization_that_comes_later():
    """It is the user's code: nothing but the model runs it. Checkpoints hold what is under it."""
    model, count, x = nn.Sequential(nn.Linear(32, 32, bias=False)), Counts(), torch.ones(16, 32)
    want = 2 * model(x)
    enable_float8_all_gather(model)
    nn.utils.parametrize.register_parametrization(model[0], "weight", count)
    count.calls = 0
    assert torch.equal(model(x), want)
    assert count.calls == 1
    state = model.state_dict()
    key = "0.parametrizations.weight.original"
    assert {type(value) for value in state.values()} == {torch.Tensor}
    assert torch.equal(state[key], model[0].parametrizations.weight.original.plain)
    model.load_state_dict({**state, key: torch.zeros(32, 32)}, assign=True)
    assert isinstance(model[0].parametrizations.weight.original, Float8Shard)
    assert not model.state_dict()[key].any() and count.calls == 1


def test_weights_that_others_hold():
    """They would be two from then on; what only variables and the model hold, wrapped or not, is nobody else's."""
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
    model[2].weight = model[1].weight
    tied, listed = nn.Embedding(32, 32), nn.ParameterList([model[3].weight])
    tied.weight = model[0].weight
    variables = [model[1].weight, torch.compile(model), copy.copy(dict(model.named_parameters()))]
    decided = {decision.fqn: decision.reason for decision in enable_float8_all_gather(model)}
    outside = "shared with a module outside of the model"
    assert decided == {"0.weight": outside, "1.weight": "converted", "3.weight": outside}
    assert tied.weight is model[0].weight and listed[0] is model[3].weight
    assert model[2].weight is model[1].weight and variables


def test_garbage_holds_no_weights():
    """Which ranks may have collected or not."""
    model, other = nn.Linear(32, 32), nn.Embedding(32, 32)
    other.weight, other.cycle = model.weight, [other]
    del other
    (decision,) = enable_float8_all_gather(model)
    assert decision.converted


# -- the gathered weight


def gathered(name="", dim=None, power_of_2=False, seed=1):
    """A weight [48, 32] as FSDP2 hands it to the layers, and what it stands for."""
    w = randn(48, 32, grad=False, seed=seed)
    scale = ops.scale(ops.amax(w, dim), dtype=fp8, power_of_2=power_of_2)
    data = ops.quantize(w, scale, dtype=fp8, dim=dim)
    copies = Copies(name, 1, "auto", Peers((), ()))
    weight = Float8Weight((data,), (scale,), (Format(fp8, dim, power_of_2),), bf16, name, copies=copies)
    return weight, ops.dequantize(data, scale, dtype=bf16, dim=dim)


def test_eagerly_it_is_its_rounding_and_says_so_once():
    x = randn(16, 32)
    for _ in range(2):  # of each model
        weight, rounded = gathered("some.layer.weight")
        with pytest.warns(UserWarning, match="some.layer.weight"):
            y = F.linear(x, weight)
        assert torch.equal(y, F.linear(x, rounded))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(F.linear(x, weight), y)
    parameter = nn.Parameter(weight)
    F.linear(x, parameter).sum().backward()
    assert type(parameter.grad) is torch.Tensor and parameter.grad.shape == (48, 32)


def test_a_model_that_is_not_compiled_warns_of_one_weight(caplog):
    x, first, second = randn(16, 32), gathered("first.weight")[0], gathered("second.weight")[0]
    second.copies.peers = first.copies.peers
    with caplog.at_level("INFO", "f8fx"):
        with pytest.warns(UserWarning, match="first.weight"):
            F.linear(x, first)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            F.linear(x, second)
    assert "reads 'second.weight' outside of a graph" in caplog.text


def test_what_is_left_is_counted_by_its_reason(caplog):
    with caplog.at_level("INFO", "f8fx"):
        enable_float8_all_gather(Zoo(), filter_fqns=["fine", "haed"])
    assert caplog.messages[-1].startswith("f8fx: 0 of 11 weights gathered in float8 (tensorwise), 11 left: ")
    assert ", 1 filtered" in caplog.messages[-1]
    assert caplog.messages[-1].endswith("; no weight's name contains 'haed'; did you mean 'head'?")


def test_graphs_are_found_in_the_cache_by_what_they_depend_on():
    """torch asks for a key that is the same in every process, and warns where there is none."""
    weight, _ = gathered("a")
    key = weight._stable_hash_for_caching()
    assert key == gathered("b", seed=2)[0]._stable_hash_for_caching()  # neither name nor values
    others = [gathered(dim=1)[0], gathered(power_of_2=True)[0], nn.Parameter(weight)]
    assert len({key, *(other._stable_hash_for_caching() for other in others)}) == 4


def test_it_cannot_be_written_to():
    weight, _ = gathered()
    with pytest.raises(RuntimeError, match="Change the sharded parameter"):
        weight.mul_(2)


def test_a_graph_that_converts_nothing_reads_the_rounding_and_says_so():
    weight, rounded = gathered()
    x = randn(16, 32, grad=False)
    options = {"select": "all", "executor": "eager", "filter_fqns": [""], "strict": True}
    torch._dynamo.reset()
    with pytest.raises(Exception, match="filter_fqns"):
        torch.compile(F.linear, backend=f8fx.f8fx, options=options)(x, weight)
    with f8fx.recording() as reports:
        call = torch.compile(
            lambda x, w: F.linear(x, w),
            backend=f8fx.f8fx,
            options={**options, "filter_fqns": [], "only_fqns": ["x"]},
        )
        assert torch.equal(call(x, weight), F.linear(x, rounded))
    (report,) = reports
    assert not report.converted and "float8 rounding" in report.warnings[0]


class TestGraph(TestCase):
    def test_a_compiled_layer_reads_the_bytes(self):
        """Forward and backward; the gradient is that of a plain weight."""
        weight, _ = gathered()
        self.assertExpectedInline(
            graph_after(F.linear, randn(16, 32), nn.Parameter(weight)),
            """\
primals_1: bf16[16,32]
primals_2: e4m3[48,32]
primals_3: f32[]
tangents_1: bf16[16,48]
amax: f32[] = f8fx.amax(primals_1, None)
scale: f32[] = f8fx.scale(amax, dtype=e4m3, power_of_2=False)
quantize: e4m3[16,32] = f8fx.quantize(primals_1, scale, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale)
reciprocal_1: f32[] = reciprocal(primals_3)
permute: e4m3[32,48] = permute(primals_2, [1, 0])
scaled_mm: bf16[16,48] = _scaled_mm(quantize, permute, reciprocal, reciprocal_1, None, None, bf16, True)
amax_1: f32[] = f8fx.amax(tangents_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e5m2, power_of_2=False)
quantize_both: (e5m2[16,48], e5m2[48,16]) = f8fx.quantize_both(tangents_1, scale_1, scale_1, dtype=e5m2, align=[1, 1], align_t=[1, 1])
getitem: e5m2[16,48] = getitem(quantize_both, 0)
getitem_1: e5m2[48,16] = getitem(quantize_both, 1)
reciprocal_2: f32[] = reciprocal(scale_1)
quantize_1: e4m3[32,16] = f8fx.quantize(primals_1, scale, dtype=e4m3, transpose=True, align=[1, 1])
permute_1: e4m3[16,32] = permute(quantize_1, [1, 0])
scaled_mm_1: bf16[48,32] = _scaled_mm(getitem_1, permute_1, reciprocal_2, reciprocal, None, None, bf16, False)
permute_2: bf16[32,48] = permute(scaled_mm_1, [1, 0])
relayout: e4m3[32,48] = f8fx.relayout(primals_2, transpose=True, align=[1, 1])
permute_3: e4m3[48,32] = permute(relayout, [1, 0])
scaled_mm_2: bf16[16,32] = _scaled_mm(getitem, permute_3, reciprocal_2, reciprocal_1, None, None, bf16, False)
permute_4: bf16[48,32] = permute(permute_2, [1, 0])
return [scaled_mm, scaled_mm_2, permute_4]""",
        )

    def test_under_autocast_a_float32_weight_is_read_through_its_cast(self):
        weight, _ = gathered()
        wide = Float8Weight(
            tuple(weight._tensors()[:1]), tuple(weight._tensors()[1:]), weight.formats, torch.float32
        )

        def f(x, w):
            with torch.autocast("cpu", bf16):
                return F.linear(x, w)

        text = graph_after(f, randn(16, 32, dtype=torch.float32), nn.Parameter(wide))
        assert (
            "dequantize" not in text and text.count("_scaled_mm(") == 3 and text.count("f8fx.relayout(") == 1
        )
