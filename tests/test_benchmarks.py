"""The benchmarks: they run end to end, keep what they measured, and say so where they cannot."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    ablations,
    comm,
    common,
    compile_time,
    experts,
    gpu,
    graphs,
    linear_sweep,
    llama_block,
    report,
    timing,
    variants,
)
from f8fx.demo.model import DecoderConfig
from f8fx.options import Options
from f8fx.passes import Pipeline, check
from tests.long import seldom
from tests.processes import printed_by

CPU = torch.device("cpu")
TINY = DecoderConfig.named("tiny")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# -- machines that cannot measure -----------------------------------------------------------------


BENCHMARKS = pytest.mark.parametrize(
    "benchmark", [linear_sweep, llama_block, experts], ids=lambda module: module.NAME
)


@BENCHMARKS
def test_without_a_gpu_it_says_so_and_ends_well(benchmark: Any, no_gpu, capsys, tmp_path):
    assert benchmark.main(["--results", str(tmp_path)]) == 0
    assert "There is no CUDA GPU on this machine" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_gpu_without_float8_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert common.why_no_gpu() == (
        "NVIDIA A100-SXM4-80GB has no float8 tensor cores, so there is nothing to measure."
    )


@pytest.mark.parametrize(
    "benchmark", [linear_sweep, experts, *seldom(llama_block)], ids=lambda module: module.NAME
)
def test_cpu_smoke_runs_every_version_and_keeps_nothing(benchmark: Any, capsys):
    kept = sorted(common.RESULTS.iterdir())
    threads = torch.get_num_threads()
    try:
        assert benchmark.main(["--cpu-smoke"]) == 0
    finally:
        torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert "NOT measurements" in out
    assert any(recipe in out for recipe in variants.RECIPES)
    assert sorted(common.RESULTS.iterdir()) == kept


# -- results --------------------------------------------------------------------------------------


def test_the_stamp_says_what_was_measured_with_what_and_not_where():
    stamp = common.stamp(CPU)
    assert stamp["date"].startswith("20") and stamp["date"].endswith("+00:00")
    assert stamp["commit"] == "unknown" or len(stamp["commit"]) == 40
    for field in ("device", "device_type", "cpus", "python", "torch"):
        assert stamp[field], field
    for field in ("driver", "clocks", "cuda", "triton", "torchao", "f8fx", "uncommitted_changes"):
        assert field in stamp
    text = json.dumps(stamp)
    assert socket.gethostname() not in map(str, stamp.values())
    assert str(Path.home()) not in text and str(common.ROOT) not in text


def _recorder(folder: Path, **settings: Any) -> common.Recorder:
    stamp = {**dict.fromkeys(common.SAME, "x"), "device": "NVIDIA H200", "date": "2026-01-02T03:04:05+00:00"}
    return common.Recorder("sweep", stamp, settings, folder)


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path):
    measured = []

    def measure(m: int) -> dict[str, int]:
        measured.append(m)
        if m == 3 and len(measured) == 3:
            raise KeyboardInterrupt
        return {"ms": 10 * m}

    cases = [{"m": m} for m in (1, 2, 3, 4)]
    assert not common.run_cases(cases, _recorder(tmp_path), common.Budget(None), measure)
    again = _recorder(tmp_path)
    assert common.run_cases(cases, again, common.Budget(None), measure)
    assert measured == [1, 2, 3, 3, 4]
    result, path = again.finish({"best": 1}, complete=True)
    assert path == tmp_path / "2026-01-02-nvidia-h200-sweep.json"
    assert json.loads(path.read_text()) == result
    assert [row["ms"] for row in result["rows"]] == [10, 20, 30, 40]
    assert list(tmp_path.iterdir()) == [path]


def test_rows_of_other_settings_or_another_commit_are_not_mixed(tmp_path):
    _recorder(tmp_path, seq=1).add({"m": 1})
    assert _recorder(tmp_path, seq=2).rows == []
    (kept,) = tmp_path.glob("*.partial.*.jsonl")
    assert kept.read_text().splitlines()[1:] == ['{"m": 1}']


def test_a_result_of_another_commit_or_with_more_rows_is_not_overwritten(tmp_path):
    def finished(rows: int, complete: bool, commit: str = "0123456789", seq: int = 1) -> str:
        recorder = _recorder(tmp_path, seq=seq)
        recorder.stamp["commit"], recorder.rows = commit, [{"m": m} for m in range(rows)]
        _, path = recorder.finish({}, complete)
        assert path is not None and len(json.loads(path.read_text())["rows"]) == rows
        return path.name.removeprefix("2026-01-02-nvidia-h200-")

    assert finished(2, False) == "sweep.json"
    assert finished(3, True) == "sweep.json"  # the same went on
    assert finished(2, False) == "sweep-01234567.json"
    assert finished(3, True, seq=2) == "sweep-01234567-2.json"
    assert finished(3, False, commit="abcdefabcdef") == "sweep-abcdefab.json"
    assert finished(2, False, commit="abcdefabcdef") == "sweep-abcdefab-2.json"
    names = [
        path.name.removeprefix("2026-01-02-nvidia-h200-") for path in common.results_of(tmp_path, "sweep")
    ]
    assert sorted(names) == [
        "sweep-01234567-2.json",
        "sweep-01234567.json",
        "sweep-abcdefab-2.json",
        "sweep-abcdefab.json",
        "sweep.json",
    ]
    assert common.results_of(tmp_path, "swee") == []


def test_rows_of_other_uncommitted_code_are_not_mixed(tmp_path):
    recorder = _recorder(tmp_path)
    recorder.add({"m": 1})
    recorder.finish({}, complete=False)
    changed = {**recorder.stamp, "sources": "y"}
    assert common.Recorder("sweep", changed, {}, tmp_path).rows == []
    assert common.stamp(CPU)["sources"] == common.sources()


def test_a_result_that_does_not_say_its_sources_is_kept(tmp_path):
    recorder = _recorder(tmp_path)
    _, older = recorder.finish({}, complete=True)
    text = json.loads(older.read_text())
    del text["stamp"]["sources"]
    older.write_text(json.dumps(text))
    assert not gpu.on_record(gpu.Part("sweep", (), 1, 1), tmp_path, recorder.stamp)
    _, path = _recorder(tmp_path).finish({}, complete=True)
    assert path != older and gpu.on_record(gpu.Part("sweep", (), 1, 1), tmp_path, recorder.stamp)


def test_a_case_that_fails_is_told_of_and_the_others_are_measured(tmp_path, capsys):
    def measure(m: int) -> dict[str, int]:
        return {"inverse": 6 // m}

    recorder = _recorder(tmp_path)
    cases = [{"m": m} for m in (1, 0, 2)]
    assert not common.run_cases(cases, recorder, common.Budget(None), measure)
    assert [row["m"] for row in recorder.rows] == [1, 2] and recorder.failed
    assert "FAILED: {'m': 0}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "benchmark, some",
    [
        (ablations, ["--only", "merge"]),
        (linear_sweep, ["--sizes", "1024"]),
        (compile_time, ["--no-compile"]),
        (compile_time, ["--nodes", "1000"]),
    ],
)
def test_a_choice_of_the_cases_is_no_complete_result(benchmark, some, tmp_path, monkeypatch, capsys):
    stamp = {**common.stamp(CPU), "device": "NVIDIA H200"}
    monkeypatch.setattr(common, "why_no_gpu", lambda: None)
    monkeypatch.setattr(common, "stamp", lambda device: stamp)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    measured = []

    def run_cases(cases: Any, recorder: Any, budget: Any, measure: Any) -> bool:
        todo = [case for case in cases if not recorder.has(**case)]
        measured.append(len(todo))
        for case in todo:
            recorder.add(dict(case))
        return True

    monkeypatch.setattr(common, "run_cases", run_cases)
    monkeypatch.setattr(benchmark, "summary", lambda rows: {"goals": {}, "exponents": {}})
    monkeypatch.setattr(benchmark, "grids", lambda result: [])
    monkeypatch.setattr(linear_sweep, "print_verdicts", lambda found: None)

    def complete(*arguments: str) -> bool:
        assert benchmark.main([*arguments, "--results", str(tmp_path)]) == 0
        (path,) = tmp_path.glob("*.json")
        return json.loads(path.read_text())["complete"]

    assert not complete(*some)
    assert complete()  # goes on from the choice
    assert all(measured)


def test_a_partial_file_cut_off_in_a_line_is_started_over(tmp_path):
    recorder = _recorder(tmp_path)
    recorder.add({"m": 1})
    recorder._partial.write_text(recorder._partial.read_text()[:-4])
    assert _recorder(tmp_path).rows == []


def test_no_case_is_begun_that_would_not_fit_into_the_budget(tmp_path):
    recorder = _recorder(tmp_path)
    cases = [{"m": m} for m in range(3)]
    assert not common.run_cases(cases, recorder, common.Budget(-1.0), lambda m: {})
    assert recorder.rows == []


# -- comparing ------------------------------------------------------------------------------------


def _row(bf16: float, torchao: float, f8fx: float, auto: float, spread: float = 0.01, **case: Any) -> dict:
    ms = dict(zip(variants.NAMES, (bf16, torchao, f8fx, auto), strict=True))
    timings = {
        name: timing.Timing(value, value * (1 - spread), value * (1 + spread), 0.1, 20).to_dict()
        for name, value in ms.items()
    }
    return {
        **case,
        "ms": ms,
        "timings": timings,
        "same_graph": {},
        "sqnr_db": {},
        "converted": {"f8fx": [3, 3], "f8fx_auto": [3, 3]},
        "errors": {},
        "clocks": None,
    }


def test_broken_promises_of_auto_are_reported_when_they_are_larger_than_noise():
    rows = [
        _row(1.0, 0.8, 0.7, 0.7, case="good"),
        _row(1.0, 1.2, 1.1, 1.1, case="slower"),
        _row(1.0, 1.2, 1.1, 1.01, case="within noise"),
        _row(1.0, 0.9, 0.8, 1.0, case="left behind"),
    ]
    found = variants.verdicts(rows, ("case",))
    assert [entry["case"] for entry in found["auto_slower_than_bf16"]] == ["slower"]
    assert [entry["case"] for entry in found["auto_left_behind"]] == ["left behind"]
    assert found["failed"] == []


def test_interleaved_timing_calls_every_step_equally_often():
    calls = {"a": 0, "b": 0}

    def step(name: str) -> None:
        calls[name] += 1

    found = timing.interleaved({name: lambda name=name: step(name) for name in calls}, CPU, seconds=0.01)
    assert calls["a"] == calls["b"]
    assert found["a"].rounds == found["b"].rounds >= 12
    assert found["a"].low <= found["a"].ms <= found["a"].high


# -- synthetic graphs -----------------------------------------------------------------------------


@pytest.mark.long
def test_two_copies_of_a_block_are_what_two_traced_blocks_are():
    def decisions(graph: torch.fx.Graph) -> list[tuple[Any, ...]]:
        options = Options.parse({"select": "all"})
        report = Pipeline(options.recipe, options.policy(), debug=True)(graph)
        return [(d.fqn, d.role, d.m, d.k, d.n, d.converted, d.reason) for d in report.decisions]

    stacked, traced = graphs.stack(graphs.traced(TINY, 32), 2), graphs.traced(TINY, 32, layers=2)
    assert len(stacked.nodes) == len(traced.nodes)
    expected = decisions(traced)
    assert decisions(stacked) == expected
    assert ("layers.1.ffn.up_proj", "grad_weight") in [d[:2] for d in expected]
    check(stacked, "stack")


def test_compile_time_at_a_thousand_nodes(tmp_path, capsys):
    arguments = ["--nodes", "1000", "2000", "--repeats", "1", "--quick", "--no-compile"]
    assert compile_time.main([*arguments, "--results", str(tmp_path)]) == 0
    assert "Seconds of each pass" in capsys.readouterr().out
    (path,) = tmp_path.glob("*-compile_time.json")
    result = json.loads(path.read_text())
    assert len(result["rows"]) == 4 and not result["complete"]  # the whole compiles were left out
    for row in result["rows"]:
        assert 0.8 * row["nodes"] < row["nodes_in"] < 1.2 * row["nodes"]
        assert row["converted"] == row["matmuls"] > 0
        assert set(row["passes"]) == set(compile_time.PASSES)
        # a thousand nodes take a tenth of a second; the bound is for a machine busy with other things
        assert row["seconds"] < 5
    by_pass = next(grid for grid in compile_time.grids(result) if "each pass on" in grid.title)
    assert [line[0] for line in by_pass.rows] == list(compile_time.PASSES)
    largest = [row for row in result["rows"] if row["nodes"] == 2000]
    assert by_pass.headers[1:] == tuple(f"{row['recipe']} {row['select']}" for row in largest)
    (page, image) = report.write(path)
    assert "tensorwise all" in page.read_text()
    assert image.stat().st_size > 10_000


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_the_exponent_tells_linear_from_quadratic(power):
    rows = [{"nodes": n, "nodes_in": n, "cpu_seconds": 1e-5 * n**power} for n in (5_000, 10_000, 50_000)]
    assert compile_time.exponent(rows, "cpu_seconds") == pytest.approx(power)


# -- on the wire ----------------------------------------------------------------------------------


@pytest.mark.long
def test_bytes_on_the_wire_by_world_size(tmp_path, capsys):
    assert comm.main(["--quick", "--results", str(tmp_path)]) == 0
    assert "llama3_405b, each rank, a step, h100 nodes of 8; predicted" in capsys.readouterr().out
    (path,) = tmp_path.glob("*-comm.json")
    result = json.loads(path.read_text())
    assert result["complete"] and len(result["rows"]) == 3 * 2 * 4
    for row in result["rows"]:
        # all but the embedding, the output projection and the norms are gathered in half the bytes
        assert 0.5 < row["gathered"]["float8"] / row["gathered"]["bf16"] < 0.6
        assert row["bytes"]["float8"] < 0.75 * row["bytes"]["bf16"]
        assert 0 < row["seconds"]["float8"] < row["seconds"]["bf16"]
        layers = DecoderConfig.named(row["model_name"]).layers
        assert row["converted"] == [7 * layers, 7 * layers + 2]
    page, image = report.write(path)
    assert "predicted" in page.read_text() and image.stat().st_size > 10_000


def _sent(world: int, recipe: str, float8: float) -> dict[str, Any]:
    """Twice as much in bf16 of everything; gathers are a half of what is sent."""
    pairs = {"gathered": 0.5e9, "bytes": 1e9, "seconds": 0.1}
    row = {"model_name": "llama3_8b", "recipe": recipe, "world": world, "cluster": "p5"}
    return row | {what: {"bf16": 2 * each, "float8": float8 * each} for what, each in pairs.items()}


def test_savings_on_the_wire_are_a_range_over_the_worlds():
    rows = [_sent(8, "rowwise", 1.5), _sent(64, "rowwise", 1.2), _sent(512, "rowwise", 1.0)]
    rows.append(_sent(8, "tensorwise", 1.1))
    assert comm.summary(rows) == {
        "llama3_8b rowwise": dict.fromkeys(("gathered", "bytes", "seconds"), (0.5, 0.75)),
        "llama3_8b tensorwise": dict.fromkeys(("gathered", "bytes", "seconds"), (0.55, 0.55)),
    }


def test_what_is_sent_in_a_table_for_each_model():
    rows = [_sent(8, "rowwise", 1.5), _sent(8, "tensorwise", 1.1), _sent(64, "rowwise", 1.2)]
    (grid,) = comm.grids({"rows": rows})
    assert grid.title == "llama3_8b, each rank, a step, p5 nodes of 8; predicted"
    assert grid.headers == (
        "ranks",
        *("gathers GB, bf16", "tensorwise", "rowwise"),
        *("all GB, bf16", "tensorwise", "rowwise"),
        *("predicted s, bf16", "tensorwise", "rowwise"),
    )
    assert grid.rows == (
        ("8", "1.00", "0.55", "0.75", "2.00", "1.10", "1.50", "0.200", "0.110", "0.150"),
        ("64", "1.00", "-", "0.60", "2.00", "-", "1.20", "0.200", "-", "0.120"),
    )


def test_what_two_ranks_send_by_hand():
    """A block gathers twice and the root once, a half of each on two ranks; one byte for two where in float8."""
    row = comm.measure("tiny", "tensorwise", 2, "h100")
    matrices = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 176)
    norms, root = 2 * 2 * 64, 2 * 256 * 64 + 64
    assert row["gathered"]["bf16"] == (2 * (matrices + norms) + root) * 2 // 2
    assert row["gathered"]["float8"] == row["gathered"]["bf16"] - 2 * matrices // 2
    assert row["bytes"]["bf16"] == row["gathered"]["bf16"] + (matrices + norms + root) * 2 // 2
    amaxes = row["bytes"]["float8"] - row["gathered"]["float8"] - (matrices + norms + root)
    assert amaxes == 14 * 4 and row["converted"] == [14, 16]


# -- reports --------------------------------------------------------------------------------------


def _result(name: str, rows: list[dict], summary: dict[str, Any]) -> dict[str, Any]:
    stamp = {**common.stamp(CPU), "device": "Synthetic GPU", "device_type": "cuda", "driver": "1.2"}
    stamp["clocks"] = {"sm_mhz": 1980.0}
    return {
        "name": name,
        "complete": False,
        "stamp": stamp,
        "settings": {},
        "rows": rows,
        "summary": summary,
    }


def _sweep() -> dict[str, Any]:
    shapes = [(1024, 1024, 1024), (8192, 4096, 4096)]
    rows = [
        _row(1.0, 0.9, 0.8, 0.8, m=m, k=k, n=n, recipe=recipe)
        for m, k, n in shapes
        for recipe in variants.RECIPES
    ]
    return _result(linear_sweep.NAME, rows, linear_sweep.summary(rows))


def _block() -> dict[str, Any]:
    memory = {name: {"saved": 2**30 + index, "peak": 2**31} for index, name in enumerate(variants.NAMES)}
    rows = [
        _row(10, 9, 8, 8) | dict(zip(llama_block.CASE, case, strict=True)) | {"memory": memory}
        for case in (("llama3_8b", "rowwise", False), ("llama3_8b", "rowwise", True))
    ]
    return _result(llama_block.NAME, rows, llama_block.summary(rows))


@pytest.mark.parametrize("result", [_sweep(), _block()], ids=lambda result: result["name"])
def test_a_result_becomes_a_page_and_a_picture(result, tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    assert report.main([str(path), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "result.md").read_text()
    assert "Synthetic GPU, driver 1.2" in page and "**Not complete**" in page and "sm_mhz 1980.0" in page
    assert "| 1.25 |" in page  # 1.0 / 0.8 and 10 / 8
    if result["name"] == llama_block.NAME:
        assert "| llama3_8b rowwise |" in page and "| llama3_8b rowwise, checkpointed |" in page
    assert "![" in page
    assert (tmp_path / "out" / "result.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_says_what_was_measured_with_what():
    result = _sweep()
    stamp = {"date": "2026-01-02", "device": "Some CPU", "device_type": "cpu", "driver": None, "cpus": 3}
    versions = {"python": "3.11", "torch": "2.13.0", "triton": None, "torchao": "0.18", "f8fx": "0.1.0"}
    stamp |= {**versions, "commit": "0123456789abcdef", "uncommitted_changes": False, "clocks": None}
    lines = report.markdown(result | {"stamp": stamp, "complete": True}).splitlines()
    assert lines[:5] == [
        "# linear_sweep",
        "",
        "2026-01-02, Some CPU, 3 processors.",
        "python 3.11, torch 2.13.0, torchao 0.18, f8fx 0.1.0; commit 0123456789ab.",
        "",
    ]
    assert lines[5].startswith("###")
    changed = stamp | {"uncommitted_changes": True, "device_type": "cuda", "clocks": {"sm": 1, "mem": 2}}
    lines = report.markdown(result | {"stamp": changed}).splitlines()
    assert lines[2:7] == [
        "2026-01-02, Some CPU.",
        "python 3.11, torch 2.13.0, torchao 0.18, f8fx 0.1.0; commit 0123456789ab with uncommitted changes.",
        "Clocks before: sm 1, mem 2.",
        "",
        "**Not complete**: the run ended before all cases were measured.",
    ]


def test_a_result_of_nothing_has_a_page_and_no_picture(tmp_path):
    path = tmp_path / "deep" / "result.json"
    path.parent.mkdir()
    path.write_text(json.dumps(_result(linear_sweep.NAME, [], {})))
    assert report.write(path) == [path.with_suffix(".md")]
    assert "![" not in path.with_suffix(".md").read_text()


def test_more_saved_than_bf16_under_checkpointing_is_reported():
    (first, second) = _block()["summary"]["checkpointing_saves_more_than_bf16"]
    assert first["f8fx"] > first["bf16"] and second["f8fx_auto"] > second["bf16"]


def test_rows_of_experts_are_uneven_and_in_groups_of_16():
    """What torchao wants; all rows are some expert's."""
    module, x, grad = experts.experts_of(experts.Mixture(8, 2, 32, 48), "cpu", tokens=512)
    rows = module.offsets.diff(prepend=torch.zeros(1, dtype=torch.int32))
    assert x.shape == grad.shape == (1024, 32) and int(rows.sum()) == 1024
    assert bool((rows > 0).all()) and bool((rows % 16 == 0).all()) and len(rows.unique()) > 1
    assert module(x).shape == x.shape


@pytest.mark.parametrize("name", ["calibrate", "gpu", "report"])
def test_the_commands_start(name, tmp_path):
    code = f"import runpy, sys; sys.argv[1:] = ['--help']; runpy.run_module('benchmarks.{name}', run_name='__main__')"
    assert "usage:" in printed_by(code, caches=tmp_path)
