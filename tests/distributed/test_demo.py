"""``f8fx demo --nproc 2``: what a user sees, and that it gathers what :mod:`f8fx.communication` predicts."""

from __future__ import annotations

import json
import subprocess
import sys
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


@pytest.mark.long
def test_a_rank_that_fails_ends_the_demo(tmp_path: Path):
    (tmp_path / "out" / "results.json").mkdir(parents=True)  # which the first rank writes at the end
    run = demo("--steps", "1", "--out", str(tmp_path / "out"))
    assert run.returncode == 1
    assert "IsADirectoryError" in run.stderr
