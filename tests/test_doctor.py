"""``f8fx doctor``: version ranges, which issues apply where, which recipes run on which hardware."""

from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console

from f8fx.doctor import KNOWN_ISSUES, KnownIssue, Versions, cpp_compiler, diagnose, runs
from f8fx.hardware import find
from f8fx.recipe import PRESETS, Recipe


@pytest.mark.parametrize(
    ("versions", "version", "inside"),
    [
        (Versions(), "2.11.0+cu130", True),
        (Versions(since="2.14"), "2.13.0+cpu", False),
        (Versions(since="2.14"), "2.14.0.dev20260729+cu126", True),
        (Versions(since="2.14"), "2.15.0", True),
        (Versions(before="2.12"), "2.11.1", True),
        (Versions(before="2.12"), "2.12.0", False),
        (Versions(since="2.9", before="2.12"), "2.10.0", True),  # numbers, not text
    ],
)
def test_a_range_takes_its_first_release_and_not_its_last(versions: Versions, version: str, inside: bool):
    assert (version in versions) is inside


def test_ranges_read_well():
    assert str(Versions()) == "all"
    assert str(Versions(since="2.12", before="2.15")) == ">=2.12, <2.15"


def _issue(fragment: str) -> KnownIssue:
    (found,) = [issue for issue in KNOWN_ISSUES if fragment in issue.title]
    return found


@pytest.mark.parametrize(
    ("torch_version", "triton_version", "has_cuda", "applies"),
    [
        ("2.11.0+cu130", "3.6.0", True, False),  # Inductor still emits tl.where there
        ("2.13.0+cu130", "3.7.0", True, False),
        ("2.15.0+cu132", "3.9.0", True, True),
        ("2.15.0+cu132", "3.9.0", False, False),
        ("2.15.0+cpu", None, True, False),
    ],
)
def test_the_triton_store_bug_applies_where_inductor_emits_what_triggers_it(
    torch_version: str, triton_version: str | None, has_cuda: bool, applies: bool
):
    assert _issue("transposed float8 store").applies(torch_version, triton_version, has_cuda) is applies


def test_the_stream_of_adas_rowwise_gemm_is_an_issue_of_torch_2_11_on_gpus():
    issue = _issue("default stream")
    assert issue.applies("2.11.0+cu130", "3.6.0", has_cuda=True)
    assert not issue.applies("2.11.0+cpu", None, has_cuda=False)
    assert not issue.applies("2.13.0+cu130", "3.7.0", has_cuda=True)


def test_the_triton_store_bug_matches_the_installed_inductor():
    """The range was read off the code Inductor generates: read it again here, from its source.

    Not from the live class: once f8fx has compiled anything, that one writes ``tl.where``.
    """
    import inspect

    from torch._inductor.codegen import triton

    if torch.version.hip:
        pytest.skip("on ROCm every release emits it, and the bug is NVIDIA's")
    maximum = inspect.getsource(triton).partition("def maximum(a, b)")[2].partition("def ")[0]
    emits = "triton_helpers.maximum" not in maximum  # what CUDA gets where it does not emit it
    assert (str(torch.__version__) in _issue("transposed float8 store").torch) is emits


@pytest.mark.parametrize(
    ("dtype", "title"),
    [
        (torch.float8_e4m3fn, "Casts to float8_e4m3fn overflow"),
        (torch.float8_e5m2, "Casts to float8_e5m2 overflow"),
    ],
)
def test_the_cast_issues_match_the_installed_torch(dtype: torch.dtype, title: str):
    overflows = not torch.tensor(1e6).to(dtype).float().isfinite().item()
    assert (str(torch.__version__) in _issue(title).torch) is overflows


def test_the_silent_compile_issue_matches_the_installed_torch():
    graphs = []

    def backend(graph, inputs, **_):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    linear = torch.nn.Linear(4, 4)
    linear.compile(backend=backend)
    linear(torch.ones(2, 4))
    assert (str(torch.__version__) in _issue("module.compile()").torch) is (not graphs)


def test_every_issue_says_what_happens_and_what_to_do():
    for issue in KNOWN_ISSUES:
        assert issue.title and issue.effect and issue.workaround
        assert not issue.link or issue.link.startswith("https://github.com/")


@pytest.mark.parametrize("recipe", list(PRESETS.values()), ids=str)
def test_every_recipe_runs_on_hopper_and_none_on_ampere(recipe: Recipe):
    assert runs(recipe, "cuda", find("h100")) == "yes"
    assert runs(recipe, "cuda", find("a100")).startswith("no: ")


def test_a_recipe_names_the_granularity_that_the_hardware_lacks():
    import dataclasses

    tensorwise_only = dataclasses.replace(find("h100"), granularities=("tensorwise",))
    assert runs(PRESETS["tensorwise"], "cuda", tensorwise_only) == "yes"
    assert "no rowwise float8 gemm on h100" in runs(PRESETS["rowwise"], "cuda", tensorwise_only)


def test_on_cpu_every_recipe_is_emulation():
    for recipe in PRESETS.values():
        assert runs(recipe, "cpu", find("cpu")).startswith("emulated by ")


def test_the_diagnosis_is_json_and_names_this_machine():
    diagnosis = diagnose()
    data = json.loads(json.dumps(diagnosis.to_dict()))
    assert data["versions"]["torch"] == str(torch.__version__)
    assert data["devices"][0]["name"] == "cpu"
    assert len(data["devices"]) == 1 + torch.cuda.device_count()
    assert set(data["devices"][0]["recipes"]) == set(PRESETS)
    assert {issue["title"] for issue in data["known_issues"]} == {i.title for i in diagnosis.issues}


def test_the_printed_diagnosis_holds_versions_recipes_and_issues():
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    diagnosis = diagnose()
    diagnosis.print(console)
    text = console.export_text()
    assert str(torch.__version__) in text
    for name in PRESETS:
        assert name in text
    for issue in diagnosis.issues:
        assert issue.title in " ".join(text.split())


def test_the_compiler_named_by_cxx_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path):
    compiler = tmp_path / "my-c++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert cpp_compiler() == str(compiler)
