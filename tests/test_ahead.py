"""Packages of AOTInductor: float8 through ``f8fx.installed``, weights cast once, names and roles as in ``torch.compile``."""

from __future__ import annotations

import copy
import re
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch._inductor.virtualized import V
from torch.export import Dim, export

import f8fx
from f8fx import ahead, canary, recording
from f8fx.passes import describe
from f8fx.report import GraphReport
from f8fx.torch_private import compile_fx_module, compiles_ahead_of_time, written_constants
from f8fx.torch_private.versions import release
from tests.helpers import Block, bf16, compiled, randn, same_bits, sqnr


def block() -> Block:
    torch.manual_seed(0)
    return Block(128, 256).to(bf16).eval()


def graph_ahead(model: nn.Module, *args: Tensor, **options: Any) -> tuple[str, GraphReport]:
    """Text of the graph that AOTInductor lowers, and the report on it."""
    texts: list[str] = []

    def lower(graph: fx.GraphModule, *_: Any, **__: Any) -> Any:
        assert compiles_ahead_of_time()
        texts.append(describe(graph.graph))
        return graph

    with torch.no_grad(), recording() as reports:
        exported = export(model, args).module(check_guards=False)
        installed = f8fx.installed(**{"select": "all", "strict": True, "debug": True, **options})
        with installed, V.set_aot_compilation(True):
            compile_fx_module().compile_fx(exported, list(args), inner_compile=lower)
    (text,), (report,) = texts, reports
    return text, report


# -- graphs


def test_expected_graph():
    """The weight is a constant; everything else is as in ``torch.compile``."""
    layer = nn.Linear(32, 48, bias=False, dtype=bf16)
    assert_expected_inline(
        graph_ahead(layer, randn(16, 32, grad=False))[0],
        """\
weight: bf16[48,32]
arg1_1: bf16[16,32]
permute: bf16[32,48] = permute(weight, [1, 0])
amax: f32[] = f8fx.amax(arg1_1, None)
scale: f32[] = f8fx.scale(amax, dtype=e4m3, power_of_2=False)
quantize: e4m3[16,32] = f8fx.quantize(arg1_1, scale, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale)
amax_1: f32[] = f8fx.amax(weight, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[48,32] = f8fx.quantize(weight, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal_1: f32[] = reciprocal(scale_1)
permute_1: e4m3[32,48] = permute(quantize_1, [1, 0])
scaled_mm: bf16[16,48] = _scaled_mm(quantize, permute_1, reciprocal, reciprocal_1, None, None, bf16, True)
return [scaled_mm]""",
    )


def test_names_and_filters():
    report = graph_ahead(block(), randn(32, 128, grad=False), filter_fqns=["up"])[1]
    assert {d.fqn: d.reason for d in report.decisions} == {
        "gate": "converted",
        "up": "filtered",
        "down": "converted",
    }


class Latents(nn.Module):
    """A weight on the left of an input, which nothing but its being a parameter tells."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(48, 32, dtype=bf16))

    def forward(self, x: Tensor) -> Tensor:
        """[32, M] -> [48, M]"""
        return self.mix @ x


def test_roles():
    e4m3, e5m2 = f8fx.QuantSpec("e4m3"), f8fx.QuantSpec("e5m2")
    recipe = f8fx.Recipe("by role", output=f8fx.GemmSpec(e5m2, e4m3, use_fast_accum=True))
    text = graph_ahead(Latents(), randn(32, 16, grad=False), recipe=recipe)[0]
    assert "e4m3[48,32] = f8fx.quantize(mix," in text and "e5m2[16,32] = f8fx.quantize(arg" in text


def test_repeated_weight():
    """A frozen weight on a turned input, which arrives as a batched matmul."""

    class Turned(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.transpose(0, 1))

    report = graph_ahead(Turned(32, 48, dtype=bf16), randn(4, 8, 32, grad=False))[1]
    assert [d.reason for d in report.decisions] == ["converted"]


def test_kept_weights_cost_nothing():
    """What is computed once does not count against a matmul."""
    x = randn(256, 4096, grad=False)
    layer = nn.Linear(4096, 4096, bias=False, dtype=bf16)
    options = {"select": "auto", "target": "h100"}
    dynamic, cached = (graph_ahead(layer, x, weights=w, **options)[1] for w in ("dynamic", "cached"))
    assert [d.reason for d in dynamic.decisions] == ["too small"]
    assert [d.reason for d in cached.decisions] == ["converted"]
    assert cached.line().endswith("; 1 weight kept in float8"), cached.line()


class Counting(nn.Module):
    """Counts its calls, and has a buffer for a weight of which it changes some rows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)
        self.register_buffer("steps", torch.zeros(64))
        self.register_buffer("state", randn(64, 64, grad=False))

    def forward(self, x):
        y = self.layer(x) + x @ self.state
        self.steps.add_(1)
        self.state[1:].mul_(-0.5)
        return y, self.steps + 0


def test_buffers_that_are_written_are_no_constants():
    """Inductor would compute once what depends on nothing but them (torch 2.11 to 2.15)."""
    folding = "aot_inductor.use_runtime_constant_folding"
    model, x = Counting().to(bf16), randn(16, 64, grad=False)
    with pytest.warns(UserWarning, match=f"no effect on this package.*writes to steps, state, .*{folding}"):
        report = graph_ahead(model, x, weights="cached")[1]
    assert (report.converted, report.reused_weights) == (2, 0)
    with warnings.catch_warnings(record=True) as others:
        assert graph_ahead(model, x)[1].converted == 2
        assert graph_ahead(nn.Linear(64, 64, dtype=bf16), x, weights="cached")[1].reused_weights == 1
    assert not [str(each.message) for each in others if "f8fx" in str(each.message)]
    with pytest.warns(UserWarning, match="writes to steps, state, and under freezing"):
        assert graph_ahead(model, x, weights="cached", inductor={folding: True})[1].reused_weights == 1
    graph, options = export(model, (x,)).module(), f8fx.Options.parse({"weights": "cached"})
    with torch.no_grad(), pytest.warns(UserWarning, match="writes to steps, state, and under freezing"):
        assert ahead.settled(options, {"freezing": True}, graph)[1] == {"freezing": True}


def without_gradients(state):
    with torch.no_grad():
        state.mul_(-0.5)


def under_autocast(state):
    with torch.autocast("cpu", bf16):
        state.mul_(-0.5)


def in_a_branch(state):
    torch.cond(state.sum() > 0, lambda s: s.mul_(2).sum(), lambda s: s.sum(), (state,))


WRITES = {
    "in place": lambda state: state.mul_(-0.5),
    "a part": lambda state: state.chunk(2)[1].mul_(-0.5),
    "a view": lambda state: state.t().to(bf16)[1:].add_(1),
    "several": lambda state: torch._foreach_mul_([state], 2.0),
    "without gradients": without_gradients,
    "under autocast": under_autocast,
    "a result": lambda state: torch.mul(state, 2.0, out=state),
}
COPIES = {
    "another dtype": lambda state: state.to(torch.float32).mul_(2),
    "another layout": lambda state: state.t().contiguous().mul_(2),
    "computed": lambda state: (state * 2).mul_(2),
    "without gradients": lambda state: without_gradients(state * 2),
}


class Writing(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.write = write
        self.register_buffer("state", randn(64, 64, grad=False))

    def forward(self, x):
        y = x @ self.state
        self.write(self.state)
        return y


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", [*WRITES, *(f"of a copy, {name}" for name in COPIES)])
def test_what_counts_as_a_write_to_a_buffer(name, grad):
    """Exported with and without gradients: then blocks without gradients are operators with a body, or none."""
    is_copy = name.startswith("of a copy, ")
    write = COPIES[name.removeprefix("of a copy, ")] if is_copy else WRITES[name]
    with torch.set_grad_enabled(grad):
        module = export(Writing(write), (randn(16, 64, grad=False),)).module()
    assert written_constants(module) == ([] if is_copy else ["state"])


@pytest.mark.skipif(release() < (2, 13), reason="torch exports no such branch")
def test_a_write_in_a_branch():
    with torch.no_grad():
        module = export(Writing(in_a_branch), (randn(16, 64, grad=False),)).module()
    assert written_constants(module) == ["state"]


def test_packages_that_cast_weights_once():
    """Inductor freezes nothing where there may be a backward."""
    folding = "aot_inductor.use_runtime_constant_folding"
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert [ahead.casts_once(config) for config in ({}, {folding: True})] == [False, True]
            assert ahead.casts_once({"freezing": True}) is not grad
            with torch._inductor.config.patch({"freezing": True}):
                assert ahead.casts_once({}) is not grad
                assert not ahead.casts_once({"freezing": False})


# -- options


def test_the_eager_executor_makes_no_package():
    with pytest.raises(f8fx.OptionError, match="AOTInductor"):
        graph_ahead(block(), randn(32, 128, grad=False), executor="eager")


def test_a_failing_pass_leaves_the_package_in_high_precision(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise ValueError("made to fail")

    monkeypatch.setattr("f8fx.passes.Quantize.__call__", fail)
    with pytest.warns(UserWarning, match="made to fail"):
        text = graph_ahead(block(), randn(32, 128, grad=False), strict=False)[0]
    assert "f8fx" not in text


def test_a_failing_pass_does_not_run_again_and_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Inductor's entry calls itself, and options of Inductor come along."""
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        raise ValueError("made to fail")

    monkeypatch.setattr("f8fx.passes.Pipeline.__call__", fail)
    with pytest.warns(UserWarning, match="made to fail"):
        options = {"strict": False, "inductor": {"max_autotune": False}}
        text = graph_ahead(block(), randn(32, 128, grad=False), **options)[0]
    assert len(calls) == 1 and "f8fx" not in text


def test_other_inner_compilers_are_let_through():
    """A tool that calls Inductor with a compiler of its own asked for no stock backend."""
    texts = []

    def lower(graph: fx.GraphModule, *_: Any, **__: Any) -> Any:
        texts.append(describe(graph.graph))
        return graph

    graph = fx.symbolic_trace(nn.Linear(32, 48, dtype=bf16))
    with f8fx.installed(select="all"), torch.no_grad():
        compile_fx_module().compile_fx(graph, [randn(16, 32, grad=False)], inner_compile=lower)
    assert len(texts) == 1 and "f8fx" not in texts[0]


def test_canaries_compile_what_can_be_called_at_once():
    with V.set_aot_compilation(True):
        with canary._trying(torch.device("cpu"), {}):
            assert not compiles_ahead_of_time()
        assert compiles_ahead_of_time()


def test_what_is_compiled_alone_and_saved(tmp_path):
    """``standalone_compile`` inside of a backend, as servers call it."""
    from torch._inductor.standalone_compile import CompiledArtifact, standalone_compile

    given: list[Any] = []
    path = str(tmp_path / "compiled")

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        given[:] = inputs
        with f8fx.installed(select="all", strict=True):
            made = standalone_compile(graph, inputs, dynamic_shapes="from_example_inputs", options={})
        made.save(path=path, format="unpacked")
        return made

    model, x = nn.Linear(32, 48, dtype=bf16), randn(16, 32, grad=False)
    with torch.no_grad(), recording() as reports:
        y = torch.compile(model, backend=backend)(x)
        assert [report.converted for report in reports] == [1]
        same_bits(y, compiled(model, executor="inductor")(x))
        (again,) = CompiledArtifact.load(path=path, format="unpacked")(*given)
    same_bits(again, y)


# -- packages

#: Its C++ code for CPUs does not know the float8 types it uses ("'Float8_e4m3fn' is not a member of 'at'").
compiles_float8 = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="AOTInductor on CPUs since torch 2.13"
)


def package(model: nn.Module, x: Tensor, path: Path, inductor: dict[str, Any], **options: Any) -> Any:
    """A package for any number of rows, loaded; what was compiled for it stays at ``path``."""
    with torch.no_grad():
        exported = export(model, (x,), dynamic_shapes=({0: Dim("rows", min=2, max=512)},))
        with f8fx.installed(**{"select": "all", "strict": True, **options}):
            made = torch._inductor.aoti_compile_and_package(
                exported, package_path=str(path), inductor_configs=inductor
            )
    return torch._inductor.aoti_load_package(made)


def matrices(path: Path) -> dict[str, list[str]]:
    """Dtypes of the two-dimensional constants of a package: those it holds, and those it computes when loaded."""
    with zipfile.ZipFile(path) as files:
        code = "".join(files.read(n).decode() for n in files.namelist() if n.endswith(".wrapper.cpp"))
    found: dict[str, list[str]] = {"held": [], "computed": []}
    for part in code.split("].name = ")[1:]:
        shape = re.search(r"shape = \{(\d+), (\d+)\}", part)
        if shape:
            of = "computed" if "from_folded = true" in part else "held"
            found[of] += re.findall(r"dtype = cached_torch_dtype_(\w+)", part)
    return found


def assert_as_compiled(run: Callable[[Tensor], Tensor], model: nn.Module, **options: Any) -> None:
    """The same graph run eagerly, for several numbers of rows; fused kernels round less often."""
    eager = compiled(model, dynamic=True, **options)
    with torch.no_grad():
        for rows in (32, 48):
            x = randn(rows, 128, grad=False, seed=rows)
            assert sqnr(eager(x), run(x)) > 30
            assert not torch.equal(run(x), model(x))


@compiles_float8
@pytest.mark.long
@pytest.mark.slow
def test_a_package_whose_weights_are_cast_when_they_are_loaded(tmp_path: Path):
    path, model = tmp_path / "model.pt2", block()
    run = package(model, randn(32, 128, grad=False), path, {}, weights="cached")
    assert matrices(path) == {"held": ["bfloat16"] * 3, "computed": ["float8_e4m3fn"] * 3}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    run.load_constants(dict(model.state_dict()), check_full_update=True)
    assert_as_compiled(run, model)


@compiles_float8
@pytest.mark.long
def test_a_package_of_a_model_that_writes_to_its_buffers(tmp_path: Path):
    model, x = Counting().to(bf16), randn(16, 64, grad=False)
    run = package(copy.deepcopy(model), x, tmp_path / "model.pt2", {}, weights="cached")
    with torch.no_grad():
        for calls in (1, 2, 3):
            (want, _), (found, steps) = model(x), run(x)
            assert sqnr(want, found) > 20 and steps.unique().item() == calls


@compiles_float8
@pytest.mark.long
def test_a_package_without_the_high_precision_weights(tmp_path: Path):
    path, model = tmp_path / "model.pt2", block()
    run = package(model, randn(32, 128, grad=False), path, {"freezing": True}, recipe="rowwise")
    assert sorted(matrices(path)["held"]) == ["float32"] * 3 + ["float8_e4m3fn"] * 3  # scales, copies
    assert_as_compiled(run, model, recipe="rowwise")
