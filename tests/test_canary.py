"""Canaries: wrong kernels are found before they are used, and replaced."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

import f8fx
from f8fx import canary, canary_cases, lowerings, ops
from f8fx.backend import compile_graph
from f8fx.kernel_forms import FORMS, NOT_EVERYWHERE, TRYING, VERDICTS, Verdict, candidates, form, key
from f8fx.kernels import cast, computed_amaxes
from f8fx.options import Options
from f8fx.tuning import tuning
from tests.helpers import bf16, compiled, randn

CPU = torch.device("cpu")
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """No verdicts of this process, none on disk."""
    monkeypatch.setattr(canary, "inductor_cache_dir", lambda: str(tmp_path))
    with patch.dict(VERDICTS, clear=True):
        yield


@pytest.fixture
def checked(monkeypatch):
    """The CPU is checked as GPUs are."""
    monkeypatch.setattr(canary, "applies", lambda device: True)


def break_casts(monkeypatch, kind, *forms):
    """Float8 copies of a kind are wrong when lowered in one of these forms, as a miscompiled kernel's would be."""
    right = lowerings._quantize

    def wrong(table, x, scale, **kwargs):
        is_kind = kind == ("transpose" if kwargs.get("transpose") else "cast")
        if is_kind and form(CPU, kind) in forms:
            scale = table(aten.mul, scale, 2.0)
        return right(table, x, scale, **kwargs)

    monkeypatch.setattr(lowerings, "_quantize", wrong)


def break_amax(monkeypatch, *forms):
    right = lowerings._amax

    def wrong(table, x, dim):
        result = right(table, x, dim)
        return table(aten.mul, result, 0.5) if form(CPU, "reduction") in forms else result

    monkeypatch.setattr(lowerings, "_amax", wrong)


@pytest.mark.slow
def test_the_kernels_of_this_machine_are_right():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        verdict = canary.verdict_on(CPU)
    assert verdict.ok and set(verdict.forms) == FORMS.keys() - NOT_EVERYWHERE, verdict
    assert str(verdict) == "bytes agree in cast, transpose, reduction, one read"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "broken", "chosen"),
    [
        ("cast", ["fused"], "definition"),
        ("transpose", ["fused"], "realized"),
        ("transpose", ["fused", "realized"], "definition"),
        ("reduction", ["fused"], "separate"),
        ("reduction", ["fused", "separate"], "definition"),
    ],
)
def test_a_wrong_kernel_is_replaced_with_one_warning(monkeypatch, checked, kind, broken, chosen):
    if kind == "reduction":
        break_amax(monkeypatch, *broken)
    else:
        break_casts(monkeypatch, kind, *broken)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patches = canary.ensure([CPU, CPU])
        canary.ensure([CPU])
    said = [str(w.message) for w in caught if "f8fx" in str(w.message)]
    assert len(said) == 1 and f"{kind} in its form {chosen!r}" in said[0]
    verdict = canary.verdict_on(CPU)
    assert verdict.changed == {kind: chosen}
    assert len(verdict.failures) == len(broken) and "differs from its definition" in verdict.failures[0]
    options = ("triton.mix_order_reduction", "triton.nested_reduction") if kind == "reduction" else ()
    known = torch._inductor.config.get_config_copy()
    assert patches == {option: False for option in options if option in known}
    assert key([CPU]) == (("cpu", (kind, chosen)),)


@pytest.mark.parametrize("op", [ops.quantize_rowwise, ops.amax_both], ids=str)
def test_kernels_of_ours_that_are_wrong_are_replaced(op):
    """Either of them; a CPU has neither, so the compiler stands in."""

    def compile_fx(graph, inputs, **kwargs):
        wrong = form(CPU, "one read") == "fused" and graph.graph.find_nodes(op="call_function", target=op)
        return lambda *args: [x.flip(0) if wrong else x for x in graph(*args)]

    with pytest.warns(UserWarning, match="one read in its form 'composed'"):
        verdict = canary.verdict_on(CPU, compile_fx)
    assert verdict.changed == {"one read": "composed"}
    (failure,) = verdict.failures
    assert failure.startswith("one read in its form 'fused'") and "differs from its definition" in failure
    assert key([CPU]) == (("cpu", ("one read", "composed")),)


def test_a_kernel_is_checked_as_any_candidate_it_is_tuned_among():
    """Another one may be the fastest at other sizes."""
    choices = [{"num_warps": warps} for warps in (4, 8, 16)]
    tried = []

    def compile_fx(graph, inputs, **kwargs):
        ours = form(CPU, "one read") == "fused"
        if not graph.graph.find_nodes(op="call_function", target=ops.amax_both) or not ours:
            return graph
        (choice,) = candidates(choices)
        (fewer,) = candidates(choices[:2])
        tried.append((choice["num_warps"], fewer["num_warps"]))
        wrong = choice is choices[-1]
        return lambda *args: [x.flip(0) if wrong else x for x in graph(*args)]

    with pytest.warns(UserWarning, match="one read in its form 'composed'"):
        verdict = canary.verdict_on(CPU, compile_fx)
    assert tried == [(4, 4), (8, 8), (16, 8)] and verdict.changed == {"one read": "composed"}
    assert candidates(choices) is choices and TRYING.candidate is None


@pytest.mark.parametrize("candidate", range(3))
def test_the_candidate_that_is_tried_is_the_one_that_is_launched(candidate, monkeypatch):
    monkeypatch.setattr(TRYING, "candidate", candidate)
    code = generated("amaxes of a computed tensor").code
    (launched,) = re.findall(r"configs=\[(.*?)\],\n", code, re.DOTALL)
    choice = computed_amaxes.choices(1)[min(candidate, 1)]
    assert f"'num_warps': {choice['num_warps']}" in launched and f"'STAGES': {choice['STAGES']}" in code
    assert launched.count("num_warps") == 1


def test_an_option_of_the_users_brings_no_wrong_kernel_back(monkeypatch):
    monkeypatch.setattr(canary, "ensure", lambda *args: {"triton.mix_order_reduction": False})
    asked = {}

    def compile_fx(graph, inputs, config_patches):
        asked.update(config_patches)
        return graph

    options = Options.parse({"inductor": {"triton.mix_order_reduction": True, "shape_padding": False}})
    compile_graph(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.zeros(2)], options, compile_fx)
    assert asked["triton.mix_order_reduction"] is False and asked["shape_padding"] is False


def test_float32_is_checked_on_gpus_only(monkeypatch):
    asked = []
    monkeypatch.setattr(canary, "data", lambda shape, device, dtype: asked.append((device.type, dtype)))
    every = canary.cases(CPU, torch.float8_e4m3fn, torch.float8_e5m2)
    assert {c.dtype for c in every if c.kind in ("cast", "transpose")} == {bf16, torch.float32}
    for case in every:
        for device in ("cpu", "cuda"):
            canary._first_failure([case], torch.device(device), None)
    assert {dtype for device, dtype in asked if device == "cpu"} == {bf16}
    assert {dtype for device, dtype in asked if device == "cuda"} == {bf16, torch.float32}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("form", ["realized", "definition"])
def test_a_graph_compiled_with_safe_kernels_is_right(monkeypatch, checked, form):
    """And one compiled with the wrong kernels is not: the injected fault does reach the graphs."""

    def train(model):
        x, w = randn(48, 32), randn(64, 32, seed=1)
        y = model(x, w)
        y.backward(randn(48, 64, grad=False, seed=2))
        return [y.detach(), x.grad, w.grad]

    want = train(compiled(F.linear))
    break_casts(monkeypatch, "transpose", "fused", *(["realized"] if form == "definition" else []))
    with torch._inductor.config.patch(force_disable_caches=True):
        with pytest.warns(UserWarning, match="are replaced by slower ones"):
            got = train(compiled(F.linear, executor="inductor"))
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        VERDICTS.clear()
        monkeypatch.setattr(canary, "applies", lambda device: False)
        got = train(compiled(F.linear, executor="inductor"))
        assert not all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_the_forms_in_use_are_in_the_cache_key(monkeypatch):
    from f8fx.backend import _graph_pass

    gm, x = torch.fx.symbolic_trace(F.relu), [randn(2, 2)]
    options = f8fx.Options.parse()
    plain = _graph_pass(gm, x, options, {}).uuid()
    fused = dict.fromkeys(FORMS, "fused")
    monkeypatch.setitem(VERDICTS, CPU, Verdict("cpu", fused))
    assert _graph_pass(gm, x, options, {}).uuid() == plain
    monkeypatch.setitem(VERDICTS, CPU, Verdict("cpu", {**fused, "transpose": "realized"}))
    assert _graph_pass(gm, x, options, {}).uuid() != plain


@pytest.mark.parametrize("broken", ["cases", "of_device", "_patches"])
def test_a_check_that_fails_itself_chooses_the_safe_forms(monkeypatch, broken):
    def fail(*args):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(canary, broken, fail)
    with pytest.warns(UserWarning, match="RuntimeError: no such thing") as caught:
        verdict = canary.check(CPU)
    assert len([w for w in caught if "f8fx" in str(w.message)]) == 1
    there = FORMS.keys() - (NOT_EVERYWHERE if broken == "_patches" else set())
    assert verdict.forms == {kind: FORMS[kind][-1] for kind in there}


def test_a_kernel_that_does_not_compile_counts_as_wrong():
    def compile_fx(*args, **kwargs):
        raise RuntimeError("ptxas died")

    with pytest.warns(UserWarning, match="'cast' failed: RuntimeError: ptxas died"):
        verdict = canary.check(CPU, compile_fx)
    assert verdict.forms == {kind: FORMS[kind][-1] for kind in FORMS.keys() - NOT_EVERYWHERE}


def test_what_raised_is_not_held_against_the_versions(monkeypatch):
    """A GPU was full, say: the next process tries again. Bytes that differ will differ there, too."""

    def compile_fx(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.warns(UserWarning, match="OutOfMemoryError"):
        assert not canary.verdict_on(CPU, compile_fx).ok
    assert not canary.verdict_on(CPU).ok and canary._load(CPU) is None
    VERDICTS.clear()
    with pytest.warns(UserWarning, match="differs from its definition"):
        canary.verdict_on(
            CPU, lambda graph, inputs, **kwargs: lambda *args: [x.flip(0) for x in graph(*args)]
        )
    assert canary._load(CPU) is not None


def test_the_data_is_made_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        x, y = canary_cases.data((4, 4), CPU)
    assert x.device == y.device == CPU


def test_a_later_process_reads_the_result(monkeypatch):
    canary._store(CPU, Verdict("cpu", dict.fromkeys(FORMS, "fused"), (), 3.0))
    monkeypatch.setattr(canary, "check", None)
    assert canary.verdict_on(CPU).ok
    VERDICTS.clear()
    path = canary._path(CPU)
    for forms in ({"cast": "?"}, []):
        path.write_text(json.dumps({"device": "cpu", "forms": forms, "failures": []}))
        assert canary._load(CPU) is None
    path.write_text("{")
    assert canary._load(CPU) is None


def test_another_version_does_not(monkeypatch):
    here = canary._path(CPU)
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert canary._path(CPU) != here


def test_another_triton_does_not_whatever_its_distribution_is_called(monkeypatch):
    paths = []
    for version in ("3.6.0", "3.7.0"):
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
        paths.append(canary._path(CPU))
        assert canary.triton_version() == version
    monkeypatch.setitem(sys.modules, "triton", None)  # not installed
    assert canary.triton_version() is None
    assert len({*paths, canary._path(CPU)}) == 3


def test_nothing_is_checked_at_import_or_for_a_cpu(monkeypatch):
    code = "import sys, f8fx; assert 'torch' not in sys.modules and 'f8fx.canary' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    monkeypatch.setattr(canary, "check", None)
    assert canary.ensure([CPU]) == {} and key([CPU]) == ()


def test_doctor_shows_what_was_found(monkeypatch):
    from f8fx.doctor import diagnose

    assert "not checked" in diagnose().devices[0].kernels
    forms = {"cast": "fused", "transpose": "realized", "reduction": "fused"}
    monkeypatch.setitem(VERDICTS, CPU, Verdict("cpu", forms, ("why",)))
    assert diagnose(canaries=True).devices[0].kernels == "transpose in its form 'realized'; why"


def test_bytes_are_compared_but_for_those_of_nan():
    e4m3 = torch.float8_e4m3fn
    one = torch.tensor([1.0, float("nan"), 0.0]).to(e4m3)
    nan = one.clone()
    nan.view(torch.uint8)[1] ^= 0x80
    assert canary._same(one, nan)
    zero = one.clone()
    zero.view(torch.uint8)[2] = 0x80  # -0
    assert not canary._same(one, zero)
    assert not canary._same(one, one.view(torch.float8_e5m2))


@pytest.mark.parametrize("dtype", [bf16, torch.float32])
@pytest.mark.parametrize("shape", [(20, 33), (33, 20), (520, 777)])
def test_scales_of_the_data_are_clear_of_powers_of_two(shape, dtype):
    """So that the last bit of a logarithm decides nothing."""
    for x in canary.data(shape, CPU, dtype):
        assert x.dtype == dtype
        for dim in (None, 0, 1):
            assert (cast.amax(x, dim) == 3).all()


# -- what a GPU would be given


def generated(name, monkeypatch=None, **forms):
    """Code that Inductor makes of a function for an H100, in these forms."""
    (case,) = (c for c in canary.cases(CPU, torch.float8_e4m3fn, torch.float8_e5m2) if c.name == name)
    return generated_for(case, monkeypatch, **forms)


def generated_for(case, monkeypatch=None, **forms):
    pytest.importorskip("triton")
    codegen = pytest.importorskip("benchmarks.codegen")
    from torch.fx.experimental.proxy_tensor import make_fx

    with codegen.fake_tensor_mode():
        inputs = [torch.empty(case.gpu_shape, dtype=case.dtype) for _ in range(2)]
        graph = make_fx(case.run, tracing_mode="real")(*inputs)
    if forms:
        chosen = {**dict.fromkeys(FORMS, "fused"), **forms}
        monkeypatch.setitem(VERDICTS, torch.device("cuda", 0), Verdict("h100", chosen))
    with codegen.h100(), torch._inductor.config.patch(canary._patches(forms)):
        return codegen.generate(graph, False)


def test_casts_are_checked_in_one_launch_too():
    """In graphs several kernels are one launch, which is other code; on a GPU functions are compiled with the options of graphs."""
    code = generated("casts in one launch").code
    launched = re.findall(r"^    +(triton_\S+?)\.run\(", code, re.MULTILINE)
    assert len(launched) < 4 and code.count("tl.store(") == 4, launched
    seen = []

    def compile_fx(graph, example_inputs, config_patches):
        seen.append(config_patches)
        return graph

    assert canary.check(torch.device("cpu"), compile_fx).ok
    for patches in seen:
        assert patches.pop("joint_custom_pre_pass").tuning == tuning({}) != {}
        assert patches.keys() - {"force_disable_caches"} == tuning({}).keys()
    assert seen


@pytest.mark.parametrize("name", ["transposed cast", "both casts", "both casts of float32"])
def test_the_transposed_store_stands_beside_a_minimum_or_maximum(name, monkeypatch):
    """Else the check would not see the bug it is there for; in the safe form it stands alone."""

    def casts(
        code,
    ):  # kernels that load anything, others write zeros beside a copy; whether they cast what they load
        return [".to(tl.float8" in text for text in code.split("@triton.jit")[1:] if "tl.load" in text]

    assert casts(generated(name).code) == [True]
    assert casts(generated(name, monkeypatch, transpose="realized").code) == [False, True]


def test_of_tensors_side_by_side_the_transposed_store_stands_alone_too(monkeypatch):
    def casts(x, y):
        whole = ops.concat([torch.maximum(x, y), torch.minimum(x, y)], 1)
        scale = torch.full([], 100.0, dtype=torch.float32)
        return (ops.quantize(whole, scale, dtype=torch.float8_e4m3fn, transpose=True),)

    def read(code):
        """Whether the kernels that cast read both tensors, or what another has computed of them."""
        kernels = [text for text in code.split("@triton.jit")[1:] if ".to(tl.float8" in text]
        return {"in_ptr1" in text for text in kernels}

    case = canary_cases.Case("side by side", "transpose", casts, (20, 33), (520, 777))
    assert read(generated_for(case).code) == {True}
    assert read(generated_for(case, monkeypatch, transpose="realized").code) == {False}


def test_definitions_are_called_out_of_the_code(monkeypatch):
    code = generated("both casts", monkeypatch, transpose="definition").code
    assert "torch.ops.f8fx.quantize_both.default(" in code and "tl.float8" not in code


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="a choice of Inductor's, read off 2.13")
def test_rows_and_columns_are_reduced_in_one_kernel_unless_separate(monkeypatch):
    assert "RSPLIT" in generated("row amax and column sum").code
    assert "RSPLIT" not in generated("row amax and column sum", monkeypatch, reduction="separate").code


@pytest.mark.parametrize(
    ("name", "kernel", "launches"),
    [
        # of several tensors, and of one that is several matrices
        ("row cast and column amax", "row_cast_columns_kernel", 2),
        ("amaxes of a computed tensor", computed_amaxes.NAME, 1),
    ],
)
def test_kernels_of_ours_are_launched_unless_composed(name, kernel, launches, monkeypatch):
    """In their place come kernels that Inductor generates, and no definitions; what a CPU runs is composed, too."""
    ours = ("row_cast_columns_kernel", computed_amaxes.NAME)
    fused = generated(name)
    assert [f"triton_{kernel}" == k.name for k in fused.kernels].count(True) == launches
    composed = generated(name, monkeypatch, **{"one read": "composed"})
    assert composed.kernels and composed.triton == composed.kernels
    assert not any(own in composed.code for own in ours)
    called = [line for line in composed.code.splitlines() if not line.lstrip().startswith("#")]
    assert not any("torch.ops.f8fx" in line for line in called)


def test_kernels_of_groups_are_launched_unless_they_are_wrong(monkeypatch):
    """Inductor has none; the definitions are called out of the code."""
    name, kernels = "columns of groups of rows", ("amax_groups_kernel", "quantize_groups_kernel")
    launched = [kernel.name for kernel in generated(name).kernels]
    assert [f"triton_{kernel}" in launched for kernel in kernels] == [True, True]
    code = generated(name, monkeypatch, groups="definition").code
    assert not any(kernel in code for kernel in kernels)
    assert all(f"torch.ops.f8fx.{op}_groups.default(" in code for op in ("amax", "quantize"))


def test_groups_are_checked_where_a_gemm_reads_them():
    kinds = lambda *args: {case.kind for case in canary_cases.cases(CPU, *[torch.float8_e4m3fn] * 2, *args)}  # noqa: E731
    assert kinds() - kinds(False) == {"groups"}


def test_a_device_without_a_number_is_the_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    verdict = Verdict("GPU", {"cast": "definition", "transpose": "fused", "reduction": "fused"}, ())
    monkeypatch.setitem(VERDICTS, torch.device("cuda:1"), verdict)
    for device in (torch.device("cuda"), torch.device("cuda:1")):
        assert canary.verdict_on(device) is verdict
        assert form(device, "cast") == "definition"
        assert key([device]) == key([torch.device("cuda:1")]) != ()
    assert form(torch.device("cuda:0"), "cast") == "fused"


@pytest.mark.parametrize("shape", [(20, 33), (33, 20), (520, 777), (777, 520), (16400, 325)])
def test_no_two_zeros_of_different_signs_are_compared(shape):
    """Which of them is the larger differs between kernels: on GPUs that was a false alarm, and slow kernels for everybody."""
    x, y = canary_cases.data(shape, torch.device("cpu"))
    both = (x == 0) & (y == 0)
    assert both.any() and torch.equal(x.signbit()[both], y.signbit()[both])
    assert ((y == 0) & y.signbit()).any()
