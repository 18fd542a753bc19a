"""The backend around the passes: reports, fallback, installation, and what must not change."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import warnings
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._inductor import list_mode_options
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache

import f8fx
from f8fx import Options, recording, report
from f8fx.backend import _publish, compile_graph
from f8fx.cache import CacheKey
from f8fx.graph_pass import GraphPass
from f8fx.passes import Pipeline, describe
from f8fx.torch_private import (
    boxed,
    check_version,
    compile_fx_module,
    inductor_config,
    joint_custom_pre_pass,
)
from tests.helpers import bf16, compiled, joint_graphs, randn, sqnr


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 64, dtype=bf16)
        self.second = nn.Linear(64, 32, dtype=bf16)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


def test_the_name_works_without_an_import():
    """Entry point of the group ``torch_dynamo_backends``, in a process that never imports f8fx."""
    code = (
        "import torch; assert 'f8fx' in torch.compiler.list_backends();"
        "f = torch.compile(lambda x: x + 1, backend='f8fx', options={'executor': 'eager'});"
        "assert f(torch.zeros(2)).tolist() == [1, 1]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=300)


def test_one_line_at_info(caplog):
    with caplog.at_level(logging.INFO, logger="f8fx"):
        compiled(Net(), filter_fqns=["second"])(randn(16, 32)).sum().backward()
    lines = [r.message for r in caplog.records if r.levelno == logging.INFO and r.name == "f8fx"]
    assert lines == ["f8fx: 3 of 6 matmuls in float8 (tensorwise), 3 skipped: 3 filtered"]


def test_where_float8_is_out_of_the_question_a_warning_says_so_once(caplog, monkeypatch):
    """Whoever has not configured logging would think that the model runs in float8."""
    monkeypatch.setattr(report, "_WARNED", set())
    model, x = Net(), randn(16, 32)
    for select in ("all", "auto", "auto"):
        torch.compiler.reset()
        compiled(model, select=select)(x)
        compiled(torch.sin, select=select)(x)
    warned = [r.message for r in caplog.records if r.levelno == logging.WARNING and r.name == "f8fx"]
    assert warned == [
        "f8fx: a graph has matmuls, and none is converted: no float8 tensor cores on cpu "
        '(select="all" converts anyway, as an emulation)'
    ]


def test_a_graph_without_matmuls_says_so(caplog):
    with caplog.at_level(logging.INFO, logger="f8fx"):
        compiled(torch.sin)(torch.zeros(3))
    assert "f8fx: no matmuls in this graph (tensorwise)" in [r.message for r in caplog.records]


def test_compiled_autograd_reports_what_was_rewritten_before():
    """Its graph inlines the backward of a graph that is in float8 already."""
    options = {"executor": "eager", "select": "all", "strict": True}
    model = compiled(Net())
    again = torch.compile(backend=f8fx.f8fx, options=options)
    with recording() as reports, torch._dynamo.compiled_autograd._enable(again):
        model(randn(16, 32)).sum().backward()
    assert [report.line() for report in reports] == [
        "f8fx: 6 of 6 matmuls in float8 (tensorwise)",
        "f8fx: 0 of 4 matmuls in float8 (tensorwise), 4 skipped: 4 already float8",
    ]


def test_compiled_autograd_leaves_a_backward_beside_what_was_rewritten():
    """Its graph also has the backward of a layer that was not compiled."""
    options = {"executor": "eager", "select": "all", "strict": True}
    model, head = Net(), nn.Linear(32, 16).to(bf16)
    y = head(compiled(model)(randn(16, 32)))
    y.sum().backward(retain_graph=True)
    wanted = [parameter.grad for parameter in (*model.parameters(), *head.parameters())]
    model.zero_grad()
    head.zero_grad()
    again = torch.compile(backend=f8fx.f8fx, options=options)
    with recording() as reports, torch._dynamo.compiled_autograd._enable(again):
        y.sum().backward()
    assert reports[0].line() == (
        "f8fx: 0 of 6 matmuls in float8 (tensorwise), 6 skipped: "
        "4 already float8, 2 decided in the graph it was taken from"
    )
    for parameter, grad in zip((*model.parameters(), *head.parameters()), wanted, strict=True):
        assert torch.equal(parameter.grad, grad)


def test_a_graph_with_rewritten_nodes_is_left_and_reported():
    """Nodes that kept their marks on the way into another graph, beside matmuls that stayed in bf16."""
    options = Options.parse({"select": "all", "filter_fqns": ["second"]})
    texts = []

    def inlined(graph):
        options.pipeline()(graph)
        again = GraphPass(options.pipeline(), CacheKey(None, "inlined"))
        before = describe(graph)
        again(graph)
        assert describe(graph) == before and not again.reports
        with recording() as reports:
            _publish(again, options, {})
        texts.extend(report.line() for report in reports)

    joint_graphs(Net(), randn(16, 32), transform=inlined)
    assert texts == [
        "f8fx: 0 of 6 matmuls in float8 (tensorwise), 6 skipped: "
        "3 already float8, 3 decided in the graph it was taken from"
    ]


def test_verbose_prints_every_decision(capsys):
    compiled(Net(), verbose=True)(randn(16, 32))
    printed = capsys.readouterr().err
    assert "first" in printed and "grad_weight" in printed and "yes" in printed


def test_reports_survive_json():
    import json

    with recording() as reports:
        compiled(Net())(randn(16, 32)).sum().backward()
    (report,) = reports
    again = f8fx.GraphReport.from_dict(json.loads(json.dumps(report.to_dict())))
    assert again == report and report.training and report.total == 6


def test_nothing_is_recorded_after_the_block():
    with recording() as reports:
        pass
    compiled(Net())(randn(16, 32))
    assert reports == []


def test_state_dict_is_untouched():
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    classes = {name: type(module) for name, module in model.named_modules()}
    model_f8 = compiled(model)
    model_f8(randn(16, 32)).sum().backward()
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(after[n].dtype == before[n].dtype and torch.equal(after[n], before[n]) for n in before)
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_everything_filtered_is_the_stock_graph():
    texts = []
    parsed = f8fx.Options.parse({"select": "all", "only_fqns": ["nothing"]})
    joint_graphs(Net(), randn(16, 32), transform=lambda g: texts.append(describe(g)))

    def transform(graph):
        Pipeline(parsed.recipe, parsed.policy())(graph)
        texts.append(describe(graph))

    joint_graphs(Net(), randn(16, 32), transform=transform)
    assert texts[0] == texts[1]


def text_of(gm: fx.GraphModule) -> str:
    """Code and fake values of a graph, with the modules inside it."""
    inner = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
    return "\n".join(part for module in inner for part in (module.code, describe(module.graph)))


STOCK = {"backend": "inductor"}
FILTERED = {"backend": "f8fx", "options": {"select": "all", "only_fqns": ["nothing"], "strict": True}}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_everything_filtered_hands_inductor_the_stock_graphs(monkeypatch, training, dynamic):
    """Forward and backward, as Inductor's partitioner leaves them; nothing is compiled."""
    graphs: dict[str, list[str]] = {}

    def compiles(name, **how):
        def inner_compile(gm, example_inputs, **kwargs):
            graphs.setdefault(name, []).append(text_of(gm))
            return boxed(gm.forward)

        with monkeypatch.context() as patch:
            module = compile_fx_module()
            patch.setattr(module, "compile_fx", partial(module.compile_fx, inner_compile=inner_compile))
            torch._dynamo.reset()
            x = randn(16, 32, grad=training)
            uncached = torch.compiler.config.patch(
                force_disable_caches=True
            )  # another test may have compiled it
            with torch.set_grad_enabled(training), uncached:
                y = torch.compile(Net(), dynamic=dynamic, **how)(x)
            if training:
                y.sum().backward()

    compiles("stock", **STOCK)
    compiles("filtered", **FILTERED)
    compiles("float8", backend="f8fx", options={"select": "all", "strict": True})
    assert len(graphs["stock"]) == (2 if training else 1)
    assert graphs["filtered"] == graphs["stock"]
    assert all("_scaled_mm" in text for text in graphs["float8"])


def test_everything_filtered_generates_code_from_the_stock_graphs(monkeypatch):
    """After Inductor's own passes too; a linear layer has no kernels that take long to compile."""
    graphs: dict[str, list[str]] = {}
    plain = GraphLowering.run

    def compiles(name, **how):
        def run(self, *args):
            graphs.setdefault(name, []).append(text_of(self.module))
            return plain(self, *args)

        with monkeypatch.context() as patch, fresh_cache():
            patch.setattr(GraphLowering, "run", run)
            torch._dynamo.reset()
            x, w = randn(16, 32), randn(48, 32)
            torch.compile(F.linear, **how)(x, w).backward(torch.ones(16, 48, dtype=bf16))

    compiles("stock", **STOCK)
    compiles("filtered", **FILTERED)
    assert len(graphs["stock"]) == 2 and all("mm" in text for text in graphs["stock"])
    assert graphs["filtered"] == graphs["stock"]


# -- failures


class Boom(RuntimeError):
    pass


def _explode(self, graph, conversions):
    # half way through: some matmuls are already rewritten
    _REWRITE(self, graph, conversions[:1])
    raise Boom("no such thing")


_REWRITE = __import__("f8fx.passes.quantize", fromlist=["Quantize"]).Quantize.__call__


@pytest.fixture
def uncached():
    """Another test may have compiled the graph, and what is found in a cache runs no pass."""
    with torch.compiler.config.patch(force_disable_caches=True):
        yield


@pytest.mark.parametrize("executor", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_an_internal_failure_falls_back_with_a_warning(monkeypatch, uncached, executor):
    monkeypatch.setattr("f8fx.passes.quantize.Quantize.__call__", _explode)
    model, x = Net(), randn(16, 32)
    with recording() as reports, pytest.warns(UserWarning, match="runs without float8.*Boom: no such thing"):
        y = compiled(model, strict=False, executor=executor)(x)
    y.sum().backward()
    expected = model(x)
    assert torch.allclose(y.float(), expected.float(), atol=0.05)
    assert reports[-1].converted == 0 and "Boom" in reports[-1].line()
    assert x.grad is not None


def test_a_fallback_knows_which_inputs_keep_their_address(monkeypatch, uncached):
    """What Dynamo says of a graph beside its nodes; without it, CUDA graphs copy parameters at each replay."""
    monkeypatch.setattr("f8fx.passes.quantize.Quantize.__call__", _explode)
    seen = []

    def stock(gm, inputs, **kwargs):
        sources = [node._dynamo_source for node in gm.graph.find_nodes(op="placeholder")]
        seen.append((sources, gm._param_name_to_source, gm.meta["dynamo_compile_id"]))
        return gm if len(seen) == 2 else compile_fx_module().compile_fx(gm, inputs, **kwargs)

    def backend(gm, inputs):
        return compile_graph(gm, inputs, Options.parse({"select": "all"}), compile_fx=stock)

    with pytest.warns(UserWarning, match="runs without float8"):
        torch.compile(Net(), backend=backend)(randn(16, 32))
    first, second = seen
    assert first == second


class Nested(nn.Module):
    @torch.compiler.nested_compile_region
    def block(self, x):
        return x + self.layer(x).tanh()

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(32, 32, dtype=bf16), nn.Linear(32, 16, dtype=bf16)

    def forward(self, x):
        return self.last(self.block(self.block(x)))


@pytest.mark.parametrize(
    "executor", ["eager", pytest.param("inductor", marks=(pytest.mark.slow, pytest.mark.long))]
)
def test_a_fallback_keeps_no_region_that_was_rewritten(monkeypatch, executor):
    """The failure comes after the body of the region was rewritten; another trace would be handed that."""
    passes, calls = Pipeline.__call__, []

    def second_fails(self, graph):
        calls.append(graph)
        if len(calls) == 2:
            raise Boom("the second graph")
        return passes(self, graph)

    monkeypatch.setattr(Pipeline, "__call__", second_fails)
    model, x = Nested(), randn(16, 32, grad=False)
    with fresh_cache(), torch.no_grad(), pytest.warns(UserWarning, match="without float8.*the second graph"):
        y = compiled(model, strict=False, executor=executor)(x)
    assert len(calls) == 2 and sqnr(model(x), y) > 45  # in bf16, fused or not; float8 gives 30


def test_cached_weights_know_the_layers_of_regions():
    """They are counted in a trace of their own; the one that is compiled starts afresh."""
    model, x = Nested(), randn(16, 32, grad=False)
    with torch.no_grad(), recording() as reports:
        compiled(model)(x)
        compiled(model, weights="cached")(x)
    assert reports[0].converted == reports[1].converted == 2


def test_a_training_graph_with_regions_keeps_the_weights_beside_them():
    """AOTAutograd splits the body of a region before the graph it is in, also in the trace that tells which weights are cast."""
    model, x = Nested(), randn(16, 32)
    with recording() as reports:
        compiled(model)(x)
        compiled(model, weights="reused")(x)
        model.last.weight.requires_grad_(False)
        compiled(model, weights="cached")(x)
    assert [report.reused_weights for report in reports] == [0, 1, 1]


def test_the_body_of_a_region_is_counted_once():
    """After AOTAutograd has split it, its owner has the whole one as well, which nothing calls."""
    with recording() as reports:
        compiled(Nested())(randn(16, 32))
    assert Counter((decision.fqn, decision.role) for decision in reports[0].decisions) == Counter(
        itertools.product(("layer", "last"), ("output", "grad_input", "grad_weight"))
    )


def test_strict_raises(monkeypatch):
    monkeypatch.setattr("f8fx.passes.quantize.Quantize.__call__", _explode)
    with pytest.raises(Exception, match="no such thing"):
        compiled(Net(), strict=True)(randn(16, 32))


def test_strict_raises_where_a_graph_is_kept_for_another_attempt(monkeypatch):
    """For one with weights of which each half of a step reads its own copy."""
    monkeypatch.setattr("f8fx.halves.positions", lambda inputs: [0])
    monkeypatch.setattr("f8fx.passes.quantize.Quantize.__call__", _explode)
    with pytest.raises(Exception, match="no such thing"):
        compiled(Net(), strict=True)(randn(16, 32))


def test_a_users_own_failure_is_not_swallowed():
    """A model that Inductor cannot compile fails as it would without f8fx, and no fallback is claimed."""

    def bad(gm, inputs, **kwargs):
        raise Boom("the user's")

    gm = torch.fx.symbolic_trace(Net())

    with warnings.catch_warnings(), pytest.raises(Boom, match="the user's"):
        warnings.simplefilter("error")
        compile_graph(gm, [randn(16, 32)], f8fx.Options.parse(), compile_fx=bad)


@pytest.mark.parametrize("weights", ["dynamic", "cached"])
def test_where_inductor_runs_no_passes_nothing_is_said_to_be_converted(monkeypatch, weights):
    """Not even if the decisions about an equal graph are on record."""
    monkeypatch.setattr("f8fx.backend._WARNED", set())
    monkeypatch.setattr("f8fx.backend.load_report", lambda *_: pytest.fail("nothing was decided"))
    patches = {}

    def plain(gm, inputs, config_patches):
        patches.update(config_patches)
        return gm.forward

    options = f8fx.Options.parse({"select": "all", "weights": weights, "strict": True}, mode="lite")
    x = randn(16, 32)
    with recording() as reports, pytest.warns(UserWarning, match='without float8: .* mode="lite"'):
        run = compile_graph(torch.fx.symbolic_trace(Net()), [x], options, compile_fx=plain)
    assert isinstance(run(x), torch.Tensor)
    assert "joint_custom_pre_pass" not in patches and patches["use_joint_graph_passes"] is False
    assert [report.converted for report in reports] == [0] and "runs no passes" in reports[0].line()


def test_version_warning():
    assert check_version("2.13.0+cpu") is None
    assert check_version("2.11.1") is None
    for version in ("2.9.0", "2.16.0.dev20261101", "3.0.0a0+git1234"):
        assert "tested on torch 2.11, 2.12, 2.13, 2.14, 2.15" in check_version(version)


def test_another_version_is_warned_of_once(monkeypatch):
    monkeypatch.setattr("f8fx.backend.check_version", lambda: check_version("2.10.1"))
    monkeypatch.setattr("f8fx.backend._WARNED", set())
    with pytest.warns(
        UserWarning, match=r"tested on torch 2\.11, .*; this is 2\.10\.1, which is none of them"
    ):
        compiled(torch.sin)(torch.zeros(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(torch.cos)(torch.zeros(3))


def test_a_tested_version_is_not_warned_of(monkeypatch):
    monkeypatch.setattr("f8fx.backend.check_version", lambda: check_version("2.13.0+cpu"))
    monkeypatch.setattr("f8fx.backend._WARNED", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(torch.sin)(torch.zeros(3))


# -- Inductor's modes


MODES = ("max-autotune-no-cudagraphs", "reduce-overhead")


@pytest.mark.parametrize("mode", [*MODES, "max-autotune-no-cudagraphs+rowwise", None])
def test_a_mode_is_handed_to_inductor_and_runs(monkeypatch, mode):
    """Forward and backward are compiled under it, and nothing afterwards. No float8: no kernels to compile."""
    stands_for = {each: list_mode_options(each) for each in MODES}
    options = stands_for[mode.partition("+")[0]] if mode else {}
    assert bool(options) == bool(mode)
    config, seen = inductor_config(), []
    plain = GraphLowering.run

    def settings():
        values = config.get_config_copy()
        return {key: values[key] for each in MODES for key in stands_for[each]}

    def run(self, *args):
        seen.append(settings())
        return plain(self, *args)

    before = settings()
    monkeypatch.setattr(GraphLowering, "run", run)
    # else autotuning compiles C++ templates that cannot win at this size
    with fresh_cache(), config.patch(max_autotune_gemm_backends="ATEN"), recording() as reports:
        torch._dynamo.reset()
        x, w = randn(16, 32), randn(48, 32)
        y = torch.compile(F.linear, backend="f8fx", mode=mode)(x, w)
        y.backward(torch.ones_like(y))
    assert seen == [before | options] * 2
    assert settings() == before
    assert torch.equal(y, F.linear(x, w)) and x.grad is not None and w.grad is not None
    assert [r.recipe for r in reports] == ["rowwise" if "rowwise" in str(mode) else "tensorwise"]


# -- installation


def stock(fn):
    torch._dynamo.reset()
    return torch.compile(fn, backend="inductor")


def test_install_puts_the_passes_on_the_stock_backend_and_uninstall_restores_it():
    original = compile_fx_module().compile_fx
    f8fx.install(select="all", executor="eager")
    try:
        with recording() as reports:
            stock(Net())(randn(16, 32)).sum().backward()
        assert reports[0].converted == 6
        with pytest.raises(RuntimeError, match="already installed"):
            f8fx.install()
    finally:
        f8fx.uninstall()
    assert compile_fx_module().compile_fx is original
    assert joint_custom_pre_pass() is None
    f8fx.uninstall()  # does nothing


def test_installed_is_a_block_and_nests():
    original = compile_fx_module().compile_fx
    with recording() as reports, f8fx.installed(select="all", executor="eager"):
        with f8fx.installed(select="all", executor="eager", recipe="rowwise"):
            stock(Net())(randn(16, 32))
        stock(Net())(randn(16, 32))
    assert [r.recipe for r in reports] == ["rowwise", "tensorwise"]
    assert compile_fx_module().compile_fx is original


@pytest.mark.long
def test_models_of_one_class_before_in_and_after_blocks():
    """Dynamo keeps graphs for code: that of another time is not taken for theirs."""
    torch._dynamo.reset()
    wrapper = torch._TorchCompileInductorWrapper.__init__

    def recipes() -> list[str]:
        with recording() as reports, torch.no_grad():
            torch.compile(Net(), backend="inductor")(randn(16, 32))
        return [report.recipe for report in reports]

    options = {"select": "all", "executor": "eager"}
    assert recipes() == []
    with f8fx.installed(**options):
        assert recipes() == ["tensorwise"]
        with f8fx.installed(**options, recipe="rowwise"):
            assert recipes() == ["rowwise"]
        assert recipes() == []  # that of the outer block, compiled above
    with f8fx.installed(**options, recipe="rowwise"):
        assert recipes() == ["rowwise"]
    model, x = Net(), randn(16, 32)
    assert torch.equal(torch.compile(model, backend="inductor")(x), model(x))
    assert torch._TorchCompileInductorWrapper.__init__ is wrapper


def test_install_checks_its_options():
    with pytest.raises(f8fx.OptionError, match="did you mean"):
        f8fx.install(recpie="rowwise")
    assert "f8fx" not in compile_fx_module().compile_fx.__module__


# -- a user's own passes


def test_a_users_joint_pass_runs_first():
    from f8fx.torch_private import CustomGraphPass

    seen = []

    class Own(CustomGraphPass):
        def __call__(self, graph):
            seen.append(describe(graph))

        def uuid(self):
            return "own"

    compiled(Net(), inductor={"joint_custom_pre_pass": Own()})(randn(16, 32))
    assert len(seen) == 1 and "f8fx" not in seen[0]


# -- found by review


def test_uninstall_inside_a_block():
    original = compile_fx_module().compile_fx
    with f8fx.installed(select="all", executor="eager"):
        f8fx.uninstall()
    assert compile_fx_module().compile_fx is original


def test_blocks_that_do_not_end_in_order():
    """Of two threads, say: who leaves ends its own options, and no other's."""
    module = compile_fx_module()
    original = module.compile_fx
    first, second = (
        f8fx.installed(select="all", executor="eager", recipe=r) for r in ("tensorwise", "rowwise")
    )
    with recording() as reports:
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        stock(Net())(randn(16, 32))
        second.__exit__(None, None, None)
    assert [report.recipe for report in reports] == ["rowwise"]
    assert module.compile_fx is original


def test_uninstall_leaves_what_others_have_put_over_it(monkeypatch):
    """Tools that wrap Inductor's entry while f8fx is installed stay; below them f8fx is gone, and what it replaced is back."""
    module, calls = compile_fx_module(), []

    def stand_in(gm, inputs, **kwargs):
        calls.append("stock")
        return gm.forward

    monkeypatch.setattr(module, "compile_fx", stand_in)
    f8fx.install(select="all", executor="eager")
    installed = module.compile_fx

    def other(*args, **kwargs):
        calls.append("other")
        return installed(*args, **kwargs)

    module.compile_fx = other
    with recording() as reports:
        stock(Net())(randn(16, 32))
        f8fx.uninstall()
        assert module.compile_fx is other
        stock(Net())(randn(16, 32))
    assert calls == ["other", "other", "stock"] and len(reports) == 1


@pytest.mark.slow
def test_an_explicit_backend_is_not_rewritten_again_by_an_installed_one():
    """Its own filter holds: the installed passes do not come after it."""
    f8fx.install(select="all")
    try:
        with recording() as reports:
            compiled(Net(), executor="inductor", filter_fqns=["second"])(randn(16, 32, grad=False))
    finally:
        f8fx.uninstall()
    assert [r.reasons for r in reports] == [{"filtered": 3}]
    assert all(d.fqn == "first" for d in reports[0].decisions if d.converted)


@pytest.mark.slow
def test_an_explicit_backend_that_fails_does_without_what_is_installed(monkeypatch, uncached):
    def explode(self, graph, conversions):
        if conversions[0].spec.is_rowwise:
            raise Boom
        return _REWRITE(self, graph, conversions)

    monkeypatch.setattr("f8fx.passes.quantize.Quantize.__call__", explode)
    model, x = Net(), randn(16, 32, grad=False)
    with (
        f8fx.installed(select="all"),
        recording() as reports,
        pytest.warns(UserWarning, match="without float8"),
    ):
        compiled(model, strict=False, recipe="rowwise", executor="inductor")(x)
    assert [report.converted for report in reports] == [0] and "Boom" in reports[0].line()


def test_a_filter_function_that_raises_is_the_users_error():
    def broken(fqn, gemm):
        return gemm.colour

    with pytest.raises(Exception, match=r"filter_fn raised AttributeError for 'first'.*output"):
        compiled(Net(), strict=False, filter_fn=broken)(randn(16, 32))


def test_a_filter_function_whose_answer_is_neither_is_the_users_error():
    with pytest.raises(Exception, match=r"filter_fn raised RuntimeError for 'first'.*ambiguous"):
        compiled(Net(), strict=False, filter_fn=lambda fqn, gemm: torch.ones(2))(randn(16, 32))


def test_a_filter_function_that_gives_no_answer_is_the_users_error_too():
    """Say for want of a ``return``: taken for false, it would leave everything in high precision."""
    with pytest.raises(Exception, match=r"filter_fn returned None for 'first'.*output"):
        compiled(Net(), strict=False, filter_fn=lambda fqn, gemm: None)(randn(16, 32))


def test_a_filter_function_that_raises_in_a_later_graph_does_too():
    """Where an earlier one, here the other branch, has been converted."""
    asked = []

    def broken(fqn, gemm):
        asked.append(fqn)
        if len(asked) > 3:
            raise KeyError("mine")
        return True

    w, v = (nn.Parameter(randn(64, 64, seed=i, grad=False)) for i in (1, 2))

    def f(x):
        return torch.cond(
            x.float().sum() > 0, lambda x: F.linear(x, w).sin(), lambda x: F.linear(x, v).cos(), (x,)
        )

    with pytest.raises(Exception, match="filter_fn raised KeyError"):
        compiled(f, strict=False, filter_fn=broken)(randn(32, 64))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_failure_in_the_backward_alone_falls_back_as_well(monkeypatch, uncached, dynamic):
    """AOTAutograd would compile a dynamic backward when it first runs, too late to fall back."""
    from f8fx import lowerings, ops

    lowerings.register()
    from torch._inductor import lowering

    def explode(*args, **kwargs):
        raise Boom("no such lowering")

    monkeypatch.setitem(lowering.lowerings, ops.quantize_both, explode)
    model, x = Net(), randn(17, 32)
    with pytest.warns(UserWarning, match="runs without float8"):
        y = compiled(model, strict=False, executor="inductor", dynamic=dynamic)(x)
    y.sum().backward()
    assert x.grad is not None
