"""What needs a GPU, without one: the parts that no device takes part in, and smokes of the rest."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import tarfile
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from benchmarks import (
    ablations,
    ceilings,
    common,
    gpu,
    headline,
    inference,
    kernel_times,
    kernels,
    report,
    shapes,
    timeline,
    timing,
    train_1b,
    variants,
)
from benchmarks.codegen import Kernel, Lowered
from f8fx.demo import data
from f8fx.demo.model import DecoderConfig
from f8fx.tuning import TUNING

CPU = torch.device("cpu")
LLAMA = DecoderConfig.named("llama3_8b")
BENCHMARKS = [ceilings, kernel_times, ablations, inference, kernels, train_1b, gpu]


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


# -- smokes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda module: module.NAME)
def test_without_a_gpu_it_says_so_and_ends_well(benchmark: Any, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark.main(["--results", str(tmp_path)]) == 0
    assert "There is no CUDA GPU on this machine" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "benchmark, arguments",
    [
        (ceilings, []),
        (kernel_times, []),
        (kernels, []),
        pytest.param(ablations, ["--only", "merge"], marks=pytest.mark.long),
        pytest.param(train_1b, ["--only", "f8fx tensorwise"], marks=pytest.mark.long),
    ],
    ids=lambda value: getattr(value, "NAME", ""),
)
def test_cpu_smoke_runs_and_keeps_nothing(benchmark: Any, arguments: list[str], one_thread, capsys):
    kept = sorted(common.RESULTS.iterdir())
    assert benchmark.main(["--cpu-smoke", *arguments]) == 0
    assert "NOT measurements" in capsys.readouterr().out
    assert sorted(common.RESULTS.iterdir()) == kept


def test_inference_on_one_tiny_shape(one_thread):
    before = torch._inductor.config.get_config_copy()
    row = inference.measure("tiny", "decode", 16, "tensorwise", False, device="cpu", seconds=0.0)
    assert torch._inductor.config.get_config_copy() == before  # for whatever is compiled next
    assert set(row["errors"]) <= {"torchao"}  # which asks for a GPU
    assert row["converted"]["f8fx"] == [7, 7] and row["converted"]["f8fx_auto"] == [0, 7]
    assert row["sqnr_db"]["f8fx"] > 20


def test_memory_of_a_step_is_told_only_where_it_is_not_a_pool_of_cuda_graphs():
    times = dict.fromkeys(variants.NAMES, 1.0)
    row = {"model": "llama3_8b", "recipe": "rowwise", "phase": "decode", "tokens": 16, "ms": times}
    rows = [
        {**row, "wall_ms": times, "cuda_graphs": graphs, "peak": {} if graphs else {"f8fx": 2**21}}
        for graphs in (False, True)
    ]
    without, graphs = inference.grids({"rows": rows})
    assert without.headers[-1] == "f8fx peak MiB" and without.rows[0][-1] == "2"
    assert graphs.headers[-1] == "f8fx / torchao" and graphs.rows[0][-1] == "1.00"
    assert len(graphs.rows[0]) == len(graphs.headers)


# -- shapes and ceilings --------------------------------------------------------------------------


def test_merging_leaves_the_floating_point_operations_of_a_block_as_they_are():
    merged, separate = (shapes.of_block(LLAMA, 8192, merged) for merged in (True, False))
    assert (len(merged), len(separate)) == (12, 21)
    assert sum(g.flops for g in merged) == sum(g.flops for g in separate) == 6 * 8192 * 218_103_808


def test_each_gemm_is_measured_once_and_finds_its_operands_as_its_role_does():
    todo = [case for case in ceilings.cases(quick=True) if case["kind"] == "gemm"]
    assert len({tuple(case.values()) for case in todo}) == len(todo) == 39
    for role, lies in (
        ("output", (True, False)),
        ("grad_input", (True, True)),
        ("grad_weight", (False, True)),
    ):
        left, right = ceilings._operands(shapes.GemmShape(role, 32, 48, 64), "bf16", CPU)
        assert (left.is_contiguous(), right.is_contiguous()) == lies
        left, right, *scales = ceilings._operands(shapes.GemmShape(role, 32, 48, 64), "rowwise_fast", CPU)
        assert left.is_contiguous() and right.t().is_contiguous()
        assert [tuple(scale.shape) for scale in scales] == [(32, 1), (1, 64)]


def test_sustained_time_is_per_step():
    calls = {"a": 0, "b": 0}

    def step(name: str) -> None:
        calls[name] += 1

    found = timing.sustained({name: lambda name=name: step(name) for name in calls}, CPU, seconds=0.05)
    assert set(found) == {"a", "b"} and all(0 < ms < 1 for ms in found.values())
    assert min(calls.values()) > 5


# -- a profile ------------------------------------------------------------------------------------


def _trace() -> dict[str, Any]:
    """One step as a profiler writes it: a float8 gemm of two kernels, generated kernels, a copy, an unknown one."""

    def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}

    dims = [[8192, 4096], [4096, 6144], [], [], [], []]
    return {
        "traceEvents": [
            {"ph": "M", "name": "process_name"},
            event("user_annotation", "forward", 0, 1000),
            event("user_annotation", "backward", 1000, 1000),
            event("gpu_user_annotation", "forward", 100, 500),
            event("cpu_op", "aten::_scaled_mm", 10, 5, **{"External id": 7, "Input Dims": dims}),
            event("cuda_runtime", "cudaLaunchKernel", 11, 1, correlation=70, **{"External id": 7}),
            event("kernel", "nvjet_qqtst", 100, 300, correlation=70, **{"External id": 7}),
            event("kernel", "reduce_split_k", 400, 20, correlation=70),  # its number is the call's
            event("kernel", "triton_red_fused_0", 430, 50, correlation=71),
            event("kernel", "triton_red_fused_0", 1100, 80, correlation=72),
            event("gpu_memcpy", "Memcpy DtoD", 1190, 10, bytes=1_000_000, correlation=73),
            event("kernel", "vectorized_elementwise", 1210, 5, correlation=74),
        ]
    }


def test_a_profile_against_its_floor():
    ran = timeline.launches(_trace(), kernel_times.PHASES)
    assert [launch.phase for launch in ran] == ["forward"] * 3 + ["backward"] * 3
    assert timeline.idle_us(ran) == pytest.approx(0 + 10 + 10 + 10)
    # what runs between two forwards is no idle time of theirs
    later = [
        dataclasses.replace(launch, start_us=launch.start_us + 5000, turn=launch.turn + 2) for launch in ran
    ]
    assert timeline.idle_us([*ran, *later]) == 2 * timeline.idle_us(ran)
    outside = [dataclasses.replace(ran[0], phase="", turn=-1, start_us=start) for start in (2500, 9000)]
    assert timeline.idle_us([*ran, *outside]) == timeline.idle_us(ran)
    # kernels of forward and backward may have the same name
    lowered = [
        Lowered(False, {"triton_red_fused_0": Kernel("triton_red_fused_0", 40_000_000)}),
        Lowered(True, {"triton_red_fused_0": Kernel("triton_red_fused_0", 60_000_000)}),
    ]
    asked = []

    def gemm_floor(shape: tuple[int, int, int], float8: bool) -> float:
        asked.append((shape, float8))
        return 0.25

    found = kernel_times.entries(ran, lowered, gemm_floor, bandwidth=1e12)
    assert set(asked) == {((8192, 4096, 6144), True)}
    lines = [(e.phase, e.kind, e.name, e.count, e.us, e.floor_us) for e in found]
    assert lines == [
        ("forward", "gemm", "_scaled_mm 8192 x 4096 x 6144", 1, 320, 250),
        ("backward", "triton", "triton_red_fused_0", 1, 80, 60),
        ("forward", "triton", "triton_red_fused_0", 1, 50, 40),
        ("backward", "copy", "Memcpy DtoD", 1, 10, 2),
        ("backward", "other", "vectorized_elementwise", 1, 5, None),
    ]
    total = kernel_times.totals(found, hand_bytes=90_000_000, bandwidth=1e12)
    assert total["busy_us"] == 465 and total["floor_us"] == 352 and total["hand_floor_us"] == 340
    assert total["unknown_us"] == 5


def test_what_is_known_of_each_launch():
    ran = timeline.launches(_trace(), kernel_times.PHASES)
    gemm = ((8192, 4096), (4096, 6144), (), (), (), ())
    assert [(launch.op, launch.dims, launch.bytes, launch.turn) for launch in ran] == [
        ("aten::_scaled_mm", gemm, 0, 0),
        ("aten::_scaled_mm", gemm, 0, 0),
        ("", (), 0, 0),
        ("", (), 0, 1),
        ("", (), 1_000_000, 1),
        ("", (), 0, 1),
    ]
    assert [(launch.start_us, launch.us) for launch in ran[:2]] == [(100, 300), (400, 20)]
    assert [launch.is_float8 for launch in ran] == [True] * 2 + [False] * 4


def test_a_launch_is_of_the_range_in_which_its_middle_lies():
    def launched(start: float, us: float, name: str = "forward") -> tuple[str, int]:
        trace = _trace()
        trace["traceEvents"][1]["name"] = name
        kernel = {"ph": "X", "cat": "kernel", "name": "last", "ts": start, "dur": us, "args": {}}
        trace["traceEvents"].insert(1, kernel)
        (found,) = (x for x in timeline.launches(trace, kernel_times.PHASES) if x.name == "last")
        return found.phase, found.turn

    assert launched(990, 18) == ("forward", 0)
    assert launched(990, 22) == ("backward", 1)
    assert launched(2000, 10) == launched(-20, 10) == ("", -1)
    assert launched(10, 10, "optimizer") == ("", -1)  # a range that was not asked for


def test_a_kernel_that_has_the_operators_number_needs_no_call():
    events = [event for event in _trace()["traceEvents"] if event.get("cat") != "cuda_runtime"]
    ran = timeline.launches({"traceEvents": events}, kernel_times.PHASES)
    assert [launch.op for launch in ran[:2]] == ["aten::_scaled_mm", ""]


def test_a_trace_has_the_sizes_of_what_ran():
    trace = timeline.traced(lambda: torch.ones(2, 3) @ torch.ones(3, 5), CPU)
    (ran,) = timeline.launches(trace, (), on_cpu=True)
    assert ran.gemm == (2, 3, 5) and ran.phase == ""


def test_in_time_order_whatever_the_order_of_the_events():
    trace = _trace()
    trace["traceEvents"].reverse()
    found = timeline.launches(trace, kernel_times.PHASES)
    assert [(x.name, x.op) for x in found] == [
        (x.name, x.op) for x in timeline.launches(_trace(), kernel_times.PHASES)
    ]


def test_without_a_device_the_gemms_are_what_ran():
    (ran,) = timeline.launches({"traceEvents": _trace()["traceEvents"][:6]}, kernel_times.PHASES, on_cpu=True)
    assert (ran.name, ran.op, ran.phase) == ("aten::_scaled_mm", "aten::_scaled_mm", "forward")
    assert (ran.start_us, ran.us, ran.gemm) == (10, 5, (8192, 4096, 6144))


@pytest.mark.parametrize(
    ("op", "dims", "gemm"),
    [
        ("aten::mm", ((2, 3), (3, 5)), (2, 3, 5)),
        ("aten::_scaled_mm", ((2, 3), (3, 5), (), (5,)), (2, 3, 5)),
        ("aten::_scaled_mm_v2", ((2, 3), (3, 5), (), (5,)), (2, 3, 5)),
        ("aten::addmm", ((5,), (2, 3), (3, 5), (), ()), (2, 3, 5)),
        ("aten::addmm", ((5,), (2, 3)), None),
        ("aten::bmm", ((7, 2, 3), (7, 3, 5)), None),
        ("aten::mm", ((2, 3),), None),
        ("aten::add", ((2, 3), (3, 5)), None),
        ("", (), None),
    ],
)
def test_the_sizes_of_a_gemm(op: str, dims: tuple[tuple[int, ...], ...], gemm: tuple[int, int, int] | None):
    assert timeline.Launch("kernel", "forward", 0.0, 1.0, op, dims).gemm == gemm


def test_a_fill_only_writes_what_a_copy_reads_and_writes():
    ran = [
        timeline.Launch(name, "forward", 0.0, 10.0, bytes=1_000_000)
        for name in ("Memcpy DtoD (Device -> Device)", "Memset (Device)")
    ]
    found = kernel_times.entries(ran, [], lambda shape, float8: None, bandwidth=1e12)
    assert {entry.name.split()[0]: entry.floor_us for entry in found} == {"Memcpy": 2, "Memset": 1}


def test_a_generated_kernel_named_after_attention_is_no_attention():
    names = {
        "triton_poi_fused__scaled_dot_product_flash_attention_3": "triton",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop": "attention",
        "nvjet_tst_192x192": "other",  # a gemm that no operator's shapes are known of
    }
    for name, kind in names.items():
        assert kernel_times.kind_of(timeline.Launch(name, "forward", 0.0, 1.0)) == kind


# -- training -------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_that_was_cut_off_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch, one_thread, capsys):
    torch.set_num_threads(1)
    corpus = data.load(max_bytes=1 << 14)
    setting, stamp = dataclasses.replace(train_1b._SMOKE, steps=3), common.stamp(CPU)
    whole = train_1b.run("bf16", setting, corpus, common.Budget(None), tmp_path / "unused", stamp)
    step = train_1b.Training.step

    def interrupted(self: Any, *batch: Any) -> None:
        if len(self.losses) == 2:
            raise KeyboardInterrupt
        step(self, *batch)

    monkeypatch.setattr(train_1b.Training, "step", interrupted)
    part = train_1b.run("bf16", setting, corpus, common.Budget(None), tmp_path, stamp)
    assert (part["steps"], part["finished"]) == (2, False)
    assert [path.name for path in tmp_path.glob("*.pt")] == ["bf16.pt"]
    monkeypatch.setattr(train_1b.Training, "step", step)
    rest = train_1b.run("bf16", setting, corpus, common.Budget(None), tmp_path, stamp)
    assert "goes on after step 2" in capsys.readouterr().out
    assert rest["finished"] and rest["losses"] == whole["losses"]
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize("changed", ["code", "contender", "setting"])
def test_a_checkpoint_of_something_else_is_not_gone_on_from(changed, tmp_path, one_thread, capsys):
    torch.set_num_threads(1)
    same, path = {"commit": "abc", "torch": "2.11.0"}, tmp_path / "run.pt"
    contender, setting = train_1b.Contender("bf16"), train_1b._SMOKE
    train_1b.Training(contender, setting, same).save(path)
    assert train_1b.Training(contender, setting, same).load(path)
    if changed == "code":
        same = {**same, "commit": "def"}
    elif changed == "contender":
        contender = dataclasses.replace(contender, seed=1)
    else:
        setting = dataclasses.replace(setting, steps=5)
    assert not train_1b.Training(contender, setting, same).load(path)
    assert "run.pt is of other code or another setting" in capsys.readouterr().out


def _runs() -> list[dict[str, Any]]:
    offsets = {"bf16": 0.0, "f8fx tensorwise": 0.01, "bf16, other seed": -0.04, "f8fx rowwise": 0.002}
    return [
        {
            "run": name,
            "finished": name != "f8fx rowwise",
            "steps": 100 if name != "f8fx rowwise" else 60,
            "losses": [5 - 0.01 * step + offset for step in range(100 if name != "f8fx rowwise" else 60)],
            "tokens_per_second": 1000.0 if name.startswith("bf16") else 1300.0,
            "step_ms": [8.0] * 100,
            "peak": 2**34,
            "converted": [10, 12],
        }
        for name, offset in offsets.items()
    ]


def test_gaps_are_given_in_multiples_of_what_another_seed_makes():
    found = train_1b.summary([{**_runs()[1], "steps": 7, "losses": [9.0] * 7}, *_runs()])
    assert found["spread_of_seeds"] == pytest.approx(0.04)
    assert found["gap_over_spread"] == pytest.approx({"f8fx tensorwise": 0.25, "f8fx rowwise": 0.05})
    assert found["steps"]["f8fx rowwise"] == 60 and found["speedup"]["f8fx tensorwise"] == 1.3


def test_a_run_that_diverged_has_no_gap():
    runs = _runs()
    runs[1]["losses"][60:] = [float("nan")] * 40
    found = train_1b.summary(runs)
    assert found["diverged"] == ["f8fx tensorwise"] and not found["finite"]
    assert found["gap_to_bf16"]["f8fx tensorwise"] is None
    assert list(found["gap_over_spread"]) == ["f8fx rowwise"]
    assert headline._gap("tensorwise")({"summary": found}) == "diverged"
    (grid,) = train_1b.grids({"rows": runs, "settings": {"steps": 100}})
    assert grid.rows[1][3] == "diverged"


def test_a_gap_and_the_spread_it_is_compared_with_are_of_the_same_steps():
    """Runs drift apart, so the spread of a run that was cut off is smaller than that of all steps."""

    def row(name: str, drift: float, steps: int) -> dict[str, Any]:
        return {**_runs()[0], "run": name, "steps": steps, "losses": [5 + drift * i for i in range(steps)]}

    runs = [row("bf16", 0, 100), row("f8fx tensorwise", 1e-3, 100), row("bf16, other seed", 2e-3, 40)]
    found = train_1b.summary(runs)
    assert found["gap_over_spread"] == pytest.approx({"f8fx tensorwise": 0.5})
    assert headline._gap("tensorwise")({"summary": found}) == "0.50 (40 steps)"
    runs[-1] = row("bf16, other seed", 2e-3, 0)
    assert train_1b.summary(runs)["gap_over_spread"] == {}


# -- reports --------------------------------------------------------------------------------------


def _gemm_row() -> dict[str, Any]:
    ms = dict.fromkeys(ceilings.VERSIONS, 0.5) | {"bf16": 1.0}
    return {
        "kind": "gemm",
        "role": "output",
        "m": 8192,
        "k": 4096,
        "n": 6144,
        "ms": ms,
        "errors": {},
        "tflops": {name: 412 / value for name, value in ms.items()},
    }


def _ablation() -> dict[str, Any]:
    timings = {
        name: timing.Timing(ms, ms, ms, 0.1, 20).to_dict()
        for name, ms in (("default", 10.0), ("never", 12.5))
    }
    return {
        "model": "llama3_8b",
        "recipe": "tensorwise",
        "experiment": "merge",
        "errors": {},
        "ms": {"default": 10.0, "never": 12.5},
        "wall_ms": {"default": 11.0, "never": 14.0},
        "timings": timings,
        "compile_s": {"default": 20.0, "never": 21.0},
        "compile_cached": {"default": True, "never": False},
        "memory": {},
        "output_db": {},
    }


def _profiled() -> dict[str, Any]:
    entry = kernel_times.Entry("forward", "triton", "triton_red_fused_0", 1, 50.0, 40.0)
    return {
        "model": "llama3_8b",
        "recipe": "tensorwise",
        "version": "f8fx",
        "ms": {"f8fx": 0.06},
        "wall_ms": 0.07,
        "launches": 1,
        "totals": kernel_times.totals([entry], 40_000_000, 1e12),
        "kernels": [dataclasses.asdict(entry)],
    }


_ROWS: list[tuple[Any, list[dict[str, Any]], str]] = [
    (ceilings, [_gemm_row(), {"kind": "launch", "us": 2.5}], "| output 8192 x 4096 x 6144 | 412 | 824 |"),
    (ablations, [_ablation()], "| merge: never | 12.500 | 14.000 | 0.800 | 0.786 | 0.0 | 21.0 | - |"),
    (kernel_times, [_profiled()], "| triton_red_fused_0 | forward | triton | 1 | 50.0 | 40.0 | 10.0 | 80 |"),
    (train_1b, _runs(), "| f8fx rowwise | 60 of 100 |"),
]


@pytest.mark.parametrize("benchmark, rows, line", _ROWS, ids=[entry[0].NAME for entry in _ROWS])
def test_a_result_becomes_a_page_and_a_picture(benchmark: Any, rows: list[Any], line: str, tmp_path):
    stamp = {**common.stamp(CPU), "device": "Synthetic GPU", "device_type": "cuda", "driver": "1.2"}
    result = {
        "name": benchmark.NAME,
        "complete": False,
        "stamp": stamp,
        "settings": {"steps": 100},
        "rows": rows,
        "summary": benchmark.summary(rows),
    }
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    assert report.main([str(path)]) == 0
    page = (tmp_path / "result.md").read_text()
    assert "**Not complete**" in page and line in page
    assert (tmp_path / "result.png").stat().st_size > 5_000


def _results(folder: Path) -> None:
    stamp = {**common.stamp(CPU), "device": "NVIDIA H200", "device_type": "cuda", "torch": "2.11.0"}
    block = {
        "model": "llama3_8b",
        "recipe": "tensorwise",
        "checkpointing": False,
        "ms": {"bf16": 14, "f8fx": 10},
        "memory": {"torchao": {"peak": 10}, "f8fx": {"peak": 12}},
    }
    training = _runs()
    served = {
        "model": "llama3_8b",
        "recipe": "rowwise",
        "phase": "decode",
        "tokens": 16,
        "cuda_graphs": False,
    }
    served["ms"] = {"bf16": 3, "torchao": 2, "f8fx": 2}
    times = [{"low": ms - 0.1, "high": ms + 0.1} for ms in (2.0, 2.15, 2.25)]
    layers = [{"timings": {"torchao": times[0], "f8fx": each}} for each in times]
    sweep = {"auto_slower_than_bf16": []}
    for day, name, rows, summary in (
        ("2026-01-01", "inference", [served], {}),
        ("2026-01-01", "linear_sweep", [*layers, {"timings": {}}], sweep),
        ("2026-01-03", "llama_block", [{**block, "checkpointing": True}], {}),
        ("2026-01-01", "llama_block", [block], {}),
        ("2026-01-01", "train_1b", training, train_1b.summary(training)),
        ("2026-01-02", "llama_block", [{**block, "ms": {"bf16": 15, "f8fx": 10}}], {}),
    ):
        result = {"name": name, "stamp": {**stamp, "date": day}, "rows": rows, "summary": summary}
        (folder / f"{day}-nvidia-h200-{name}.json").write_text(json.dumps(result))


def test_the_headline_holds_what_results_hold_and_nothing_else(tmp_path, capsys):
    _results(tmp_path)
    assert headline.main(["--results", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    assert "### NVIDIA H200" in page
    assert "| 8B block, tensorwise: f8fx over bf16 | >= 1.40 | 1.50 | 2026-01-02, " in page
    assert "| 8B block, tensorwise: f8fx over torchao | >= 1.10 | not measured | - |" in page
    assert "f8fx over torchao | - | 1.20 | 2026-01-02" in page
    assert "| 8B block, tensorwise, checkpointed: f8fx over bf16 | - | 1.40 | 2026-01-03, " in page
    assert "no gradients, decode 16: f8fx over bf16 | - | 1.50 | 2026-01-01, " in page
    assert "no gradients, decode 1: f8fx over bf16 | - | not measured | - |" in page
    assert '`select="auto"` is slower than bf16 | none | 0 of 4 | 2026-01-01, ' in page
    assert "slower than torchao, beyond noise | none | 1 of 3 | 2026-01-01, " in page
    assert "| 0.25 (100 steps) | 2026-01-01" in page


def test_results_of_several_gpus_are_not_put_together(tmp_path, capsys):
    _results(tmp_path)
    (path,) = tmp_path.glob("*inference.json")
    other = json.loads(path.read_text())
    other["stamp"] |= {"device": "NVIDIA B200"}
    (tmp_path / "b200.json").write_text(json.dumps(other))
    assert headline.main(["--results", str(tmp_path)]) == 2
    said = capsys.readouterr().out
    assert "name one with --device (nvidia-b200, nvidia-h200)" in " ".join(said.split())
    assert headline.main(["--results", str(tmp_path), "--device", "nvidia-b200"]) == 0
    page = capsys.readouterr().out
    assert "### NVIDIA B200\n" in page and "decode 16: f8fx over bf16 | - | 1.50 |" in page
    assert "tensorwise: f8fx over bf16 | >= 1.40 | not measured | - |" in page


def test_results_of_a_cpu_are_in_no_headline_and_the_latest_is_last(tmp_path):
    for name, day, kind in (("c", 1, "cuda"), ("b", 3, "cuda"), ("d", 2, "cuda"), ("a", 4, "cpu")):
        stamp = {"device_type": kind, "device": "NVIDIA H200", "date": f"2026-01-0{day}"}
        (tmp_path / f"{name}.json").write_text(json.dumps({"name": name, "stamp": stamp}))
    assert [result["name"] for result in headline.gpu_results(tmp_path)] == ["c", "d", "b"]
    assert len(headline.gpu_results(tmp_path, "nvidia-h200")) == 3
    assert headline.gpu_results(tmp_path, "nvidia-h100") == []


def test_kernels_over_their_floor_are_those_of_f8fx():
    def row(version: str, recipe: str, floor: float | None) -> dict[str, Any]:
        totals = {"busy_us": 15.0, "hand_floor_us": floor}
        return {"version": version, "recipe": recipe, "totals": totals}

    others = [row("torchao", "tensorwise", 5.0), row("f8fx", "rowwise", 6.0)]
    assert headline._floor({"rows": [*others, row("f8fx", "tensorwise", 12.0)]}) == "1.25"
    assert headline._floor({"rows": [*others, row("f8fx", "tensorwise", None)]}) is None


def test_figures_that_a_result_lacks_are_not_measured():
    found = {"summary": {"lowest_share": {"cast": 0.914}, "speedup": {"f8fx tensorwise": 1.236}}, "rows": []}
    assert headline._share("cast")(found) == "91 %" and headline._share("cast + transpose")(found) is None
    assert headline._tokens("tensorwise")(found) == "1.24" and headline._tokens("rowwise")(found) is None
    assert headline._slower(found) is None and headline._slower_than_torchao(found) is None
    result = {"model": "llama3_8b", "recipe": "rowwise", "checkpointing": True}
    memory = {"f8fx": {"peak": 3}, "bf16": {"peak": 2}}
    checkpointed, plain = ({**result, "checkpointing": c, "memory": memory} for c in (True, False))
    for rows, over, peak in (
        ([checkpointed], "bf16", None),
        ([checkpointed, plain], "bf16", "1.50"),
        ([plain], "torchao", None),
    ):
        assert headline._peak("llama3_8b", "rowwise", over)({"rows": rows}) == peak


def test_readmes_table_is_what_committed_results_hold():
    text = (common.ROOT / "README.md").read_text()
    ((device, lines),) = re.findall(r"headline --device (\S+)\n(.*?)^!\[", text, re.MULTILINE | re.DOTALL)
    cells = [line.strip("| ").split(" | ")[-1] for line in lines.splitlines() if line.startswith("| ")]
    outside_brackets = " ".join(re.sub(r"\(.*?\)", "", cell) for cell in cells)
    said = re.findall(r"\d+ of \d+|\d+ %|\d+\.\d\d", outside_brackets)
    table = headline.table(headline.gpu_results(common.RESULTS, device))
    measured = [value for _, _, value, _ in table.rows if value != "not measured"]
    assert len(measured) > 20
    assert sorted(said) == sorted([*measured, "1.06"])  # that of experts, which the headline leaves out


def test_without_gpu_results_there_is_no_headline(capsys):
    if headline.gpu_results(common.RESULTS):
        pytest.skip("there are")
    assert headline.main([]) == 0
    assert "No GPU measurements are committed" in capsys.readouterr().out


# -- everything in one command --------------------------------------------------------------------


class _NothingAhead:
    """Instead of processes: for which parts they would be, and how many parts had run when they had to end."""

    parts: ClassVar[list[str]] = []
    ran: ClassVar[list[tuple[str, float]]] = []
    ended: ClassVar[list[str]] = []

    def __init__(self, parts: list[gpu.Part]) -> None:
        type(self).parts = [part.name for part in parts if part.ahead]
        type(self).ended = []

    def finish(self, seconds: float) -> None:
        if not self.ended:
            type(self).ended = [name for name, _ in self.ran]


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A GPU command whose parts run in no time and write complete results; what ran, and for how long."""
    ran: list[tuple[str, float]] = []
    stamp = {**common.stamp(CPU), "device": "NVIDIA H200", "device_type": "cuda", "driver": "1.2"}

    def run(part: gpu.Part, seconds: float, extra: tuple[str, ...] = ()) -> dict[str, Any]:
        ran.append((part.name, seconds))
        failed = part.name == "ablations"
        if part.keeps:
            folder = Path(extra[extra.index("--results") + 1])
            result = {
                "name": part.name,
                "complete": not failed,
                "stamp": stamp,
                "settings": {},
                "rows": [{"ms": 1}],
            }
            path = folder / f"{stamp['date'][:10]}-nvidia-h200-{part.name}.json"
            path.write_text(json.dumps({**result, "summary": {}}))
        outcome = "failed: x" if failed else "3 passed" if part.name == "tests" else "done"
        return {"part": part.name, "seconds": 1.0, "returncode": int(failed), "outcome": outcome}

    monkeypatch.setattr(common, "why_no_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(common, "stamp", lambda device: stamp)
    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(gpu, "Ahead", _NothingAhead)
    monkeypatch.setattr(gpu, "_write_reports", lambda folder, stamp: None)
    monkeypatch.setattr(_NothingAhead, "ran", ran)
    return ran


def test_the_gpu_command_gives_each_part_its_share_and_goes_on_where_it_stopped(on_a_gpu, tmp_path):
    packed = tmp_path / "out" / "all.tar.gz"
    command = ["--results", str(tmp_path), "--archive", str(packed)]
    assert gpu.main(command) == 1
    assert [name for name, _ in on_a_gpu] == [part.name for part in gpu.PARTS]
    shares, ends = sum(part.share for part in gpu.PARTS), gpu.GRACE_S + gpu.STOP_S
    assert on_a_gpu[0][1] == pytest.approx((gpu.BUDGET_S - ends) * gpu.PARTS[0].share / shares, abs=1)
    assert on_a_gpu[-1][1] == pytest.approx(
        gpu.BUDGET_S - ends, abs=5
    )  # nobody else is left, and nothing was used
    assert _NothingAhead.parts == [part.name for part in gpu.PARTS if part.ahead]
    assert _NothingAhead.ended == ["tests"]  # nothing is measured beside them
    (path,) = tmp_path.glob("*-nvidia-h200-gpu.json")
    assert json.loads(path.read_text())["summary"]["failed"] == ["ablations"]
    with tarfile.open(packed) as archive:
        kept = [path.name.replace("-gpu.", f"-{part.name}.") for part in gpu.PARTS if part.keeps]
        assert {path.name, *kept} <= set(archive.getnames())
    # again: only what is not complete, and what writes nothing
    on_a_gpu.clear()
    gpu.main(command)
    assert [name for name, _ in on_a_gpu] == ["ablations", "calibrate"]
    assert _NothingAhead.parts == ["ablations"]
    on_a_gpu.clear()
    gpu.main([*command, "--fresh"])
    assert len(on_a_gpu) == len(gpu.PARTS)


def test_a_part_that_would_not_get_to_its_first_row_is_left_for_the_next_run(on_a_gpu, tmp_path):
    seconds = 40 + gpu.GRACE_S + gpu.STOP_S
    gpu.main(["--results", str(tmp_path), "--budget-s", str(int(seconds))])
    assert [name for name, _ in on_a_gpu] == [p.name for p in gpu.PARTS if p.least <= 40]
    (path,) = tmp_path.glob("*-nvidia-h200-gpu.json")
    rows = {row["part"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["kernel_times"]["outcome"] == "out of time; run again to go on"
    assert not gpu.on_record(gpu.PARTS[0], tmp_path, json.loads(path.read_text())["stamp"])


def test_some_parts_are_not_everything(on_a_gpu, tmp_path):
    gpu.main(["--results", str(tmp_path), "--only", "tests"])
    (path,) = tmp_path.glob("*-nvidia-h200-gpu.json")
    result = json.loads(path.read_text())
    assert result["rows"][0]["outcome"] == "3 passed" and not result["complete"]


def test_all_parts_fit_into_one_run():
    assert sum(part.share for part in gpu.PARTS) <= gpu.BUDGET_S
    assert all(part.least <= part.share for part in gpu.PARTS)


_PART_AHEAD = """
import sys, time
from pathlib import Path
index = sys.argv[sys.argv.index("--ahead") + 1]
if index == "1/3":
    sys.exit("no memory left")
time.sleep(60 if index == "2/3" else 0)
Path(__file__).with_name("done").write_text(index)
"""


@pytest.mark.long
def test_cases_are_compiled_ahead_in_processes_that_end_before_anything_is_measured(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "a_part.py").write_text(_PART_AHEAD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ahead = gpu.Ahead([gpu.Part("a part", ("a_part",), 1, 1, ahead=3), gpu.Part("other", ("missing",), 1, 1)])
    processes = [process for _, process, _ in ahead._running]
    ahead.finish(10.0)
    assert [process.poll() for process in processes] == [0, 1, -signal.SIGKILL]
    assert (tmp_path / "done").read_text() == "0/3"
    shown = capsys.readouterr().out
    assert "no memory left" in shown and "a part, ahead: stopped, out of time" in shown


def test_compiling_ahead_runs_its_share_of_the_cases_and_measures_none(monkeypatch, capsys):
    ran = []

    def measure(size: int, seconds: float) -> dict[str, Any]:
        ran.append((size, seconds, torch._inductor.config.autotune_local_cache))
        if size == 2:
            raise RuntimeError("too large")
        return {}

    cases = [{"size": size} for size in range(6)]
    assert common.compile_ahead(cases, (0, 2), measure) == 1
    assert ran == [(0, 0.0, False), (2, 0.0, False), (4, 0.0, False)]
    assert "FAILED: {'size': 2}" in capsys.readouterr().out
    assert common.compile_ahead(cases, (1, 2), measure) == 0
    parser = common.parser("x", ahead=True)
    assert parser.parse_args(["--ahead", "1/3"]).ahead == (1, 3)
    for wrong in ("3/3", "1", "-1/2"):
        with pytest.raises(SystemExit):
            parser.parse_args([f"--ahead={wrong}"])


def test_a_part_that_takes_too_long_is_stopped(monkeypatch):
    monkeypatch.setattr(gpu, "GRACE_S", 0.0)
    part = gpu.Part("tests", ("timeit", "-n1", "-r1", "import time; time.sleep(60)"), 1.0, 0.0, keeps=False)
    row = gpu.run(part, 0.5)
    assert row["outcome"] == "out of time; run again to go on"
    assert row["seconds"] < 20


def test_failed_tests_are_named(monkeypatch):
    lines = "FAILED tests/test_gpu.py::test_x - no\\n1 failed, 2 passed in 3s"
    code = f"import os; print('{lines}', flush=True); os._exit(1)"
    part = gpu.Part("tests", ("timeit", "-n1", "-r1", code), 1.0, 0.0, keeps=False)
    row = gpu.run(part, 30)
    assert (row["outcome"], row["failed"]) == ("1 failed, 2 passed in 3s", ["tests/test_gpu.py::test_x"])


def test_failed_tests_are_named_as_they_go(monkeypatch):
    """By xdist, of a run that was stopped before its summary."""
    lines = (
        "[gw7] [ 84%] FAILED tests/test_gpu.py::test_x[a-b] \\n[gw1] [ 86%] PASSED tests/test_gpu.py::test_y "
    )
    code = f"import os; print('{lines}', flush=True); os._exit(1)"
    row = gpu.run(gpu.Part("tests", ("timeit", "-n1", "-r1", code), 1.0, 0.0, keeps=False), 30)
    assert row["failed"] == ["tests/test_gpu.py::test_x[a-b]"]


def test_what_compiles_ahead_ends_when_the_command_is_interrupted(on_a_gpu, tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    ended = []
    monkeypatch.setattr(gpu, "run", interrupted)
    monkeypatch.setattr(_NothingAhead, "finish", lambda self, seconds: ended.append(seconds))
    with pytest.raises(KeyboardInterrupt):
        gpu.main(["--results", str(tmp_path)])
    assert ended == [0.0]


def test_a_commit_that_is_named_is_the_one(monkeypatch):
    """Where files were copied, git may know an older one."""
    monkeypatch.setenv("F8FX_COMMIT", "abc")
    assert common.commit() == ("abc", None)
    monkeypatch.delenv("F8FX_COMMIT")
    assert common.commit()[0] != "abc"


def test_what_the_default_is_without_is_no_experiment(monkeypatch):
    def experiments():
        return {case["experiment"] for case in ablations.cases(quick=True)}

    monkeypatch.setattr(ablations, "tuning", lambda given: dict(TUNING))
    assert experiments() == set(ablations.EXPERIMENTS)
    own_blocks = "combo_kernel_per_subkernel_blocks"
    monkeypatch.setattr(ablations, "tuning", lambda given: {k: TUNING[k] for k in TUNING if k != own_blocks})
    assert experiments() == set(ablations.EXPERIMENTS) - {own_blocks}
