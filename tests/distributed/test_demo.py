"""``f8fx demo --nproc 2``: what a user sees, and that it gathers what :mod:`f8fx.communication` predicts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from f8fx.communication import predict
from f8fx.demo.distributed import PARAM_DTYPE, REDUCE_DTYPE
from f8fx.demo.model import Decoder, DecoderConfig
from f8fx.demo.train import KEPT
from f8fx.options import Options

ROOT = Path(__file__).parents[2]


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "f8fx", "demo", "--nproc", "2", "--device", "cpu", "--smoke"]
    return subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_two_ranks_train_in_both(tmp_path: Path):
    run = demo("--recipe", "rowwise", "--out", str(tmp_path))
    assert run.returncode == 0, run.stderr[-3000:]
    said = " ".join((run.stderr + run.stdout).split())
    assert "2 ranks, FSDP2 over gloo" in said and "Graphs run without code generation" in said
    assert run.stdout.count("gathered (MB/step/rank)") == 1  # by one rank
    assert "21 of 21 of the graph that all blocks share" in run.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    assert (tmp_path / "losses.png").stat().st_size > 10_000
    assert (results["plan"]["ranks"], results["plan"]["executor"]) == (2, "eager")
    # seven linears a block, three gemms each, in the graph that the blocks share
    assert results["float8"]["matmuls"]["converted"] == results["float8"]["matmuls"]["total"] == 3 * 7
    # measured 0.005, at losses of 5.5 to 4.6
    assert results["largest_difference"]["value"] < 0.02
    with torch.device("meta"):
        model = Decoder(DecoderConfig.named("tiny"))
    c = predict(
        model,
        2,
        Options.parse({"recipe": "rowwise", "filter_fqns": list(KEPT), "target": "cpu"}),
        param_dtype=PARAM_DTYPE,
        reduce_dtype=REDUCE_DTYPE,
    )
    for name, sent in (("bf16", c.high), ("float8", c.float8)):
        gathered = sum(s.wire_bytes for s in sent if s.op == "all_gather")
        assert results[name]["gathered_bytes"] == gathered


def test_a_rank_leaves_before_python_is_taken_down():
    """Threads that hold tensors then may be ended with the whole process. What was said is not lost."""
    code = """
from f8fx.demo.distributed import leave

class Held:
    def __del__(self):
        print("taken down")

held = Held()
print("said")
leave(3)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout.splitlines()) == (3, ["said"])


@pytest.mark.long
def test_a_rank_that_fails_ends_the_demo(tmp_path: Path):
    (tmp_path / "out" / "results.json").mkdir(parents=True)  # which the first rank writes at the end
    run = demo("--steps", "1", "--out", str(tmp_path / "out"))
    assert run.returncode == 1
    assert "IsADirectoryError" in run.stderr


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="a look at processes")
def test_ctrl_c_ends_all_ranks_at_once(tmp_path: Path):
    """A terminal sends it to all processes of the command, while ranks train or wait for each other."""
    command = [
        sys.executable,
        "-m",
        "f8fx",
        "demo",
        "--nproc",
        "2",
        "--device",
        "cpu",
        "--smoke",
        "--steps",
        "500",
    ]
    run = subprocess.Popen(
        [*command, "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert run.stdout and any("FSDP2 over gloo" in line for line in run.stdout)
    time.sleep(2)
    start = time.monotonic()
    os.killpg(run.pid, signal.SIGINT)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 130 and said.count("interrupted") == 1
    assert time.monotonic() - start < 20  # torchrun gives ranks that do not end 30 s
    sessions = (
        re.search(r"\) \w (?:\d+ ){2}(\d+)", _stat(path)) for path in Path("/proc").glob("[0-9]*/stat")
    )
    assert str(run.pid) not in [found[1] for found in sessions if found]


def _stat(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended
        return ""
