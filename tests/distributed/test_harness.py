"""What the harness makes of ranks that die or stand still, and that no failure is tried again."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed import harness


def counts(folder: Path) -> int:
    """How often a rank 1 came here."""
    with open(folder / "calls", "a") as calls:
        calls.write("x" if dist.get_rank() == 1 else "")
    return len((folder / "calls").read_text())


def fine():
    dist.barrier()


def dies_once(folder: Path):
    if counts(folder) == 1 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def fails(folder: Path):
    counts(folder)
    assert dist.get_rank() == 0, "rank 1 fails"
    dist.barrier()


def stalls(folder: Path):
    counts(folder)
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.barrier()


def found(tmp_path: Path, *checks: harness.Check) -> tuple[dict[str, str], int]:
    outcome = harness.outcomes(2, checks, tmp_path)
    return outcome, len((tmp_path / "calls").read_text())


def test_a_rank_that_dies_is_started_once_more(tmp_path):
    with pytest.warns(UserWarning, match=r"rank 1: ended with -11(.|\n)*Segmentation fault(.|\n)*dies_once"):
        outcome, calls = found(tmp_path, fine, partial(dies_once, tmp_path))
    assert outcome == {} and calls == 2


def test_a_failure_is_not_tried_again(tmp_path):
    check = partial(fails, tmp_path)
    outcome, calls = found(tmp_path, fine, check)
    assert list(outcome) == [harness.name_of(check)] and "rank 1 fails" in outcome[harness.name_of(check)]
    assert calls == 1


def test_ranks_that_stand_still_twice_have_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "LIMIT", timedelta(seconds=10))
    check = partial(stalls, tmp_path)
    with pytest.warns(UserWarning, match="rank 1: did not end"):
        outcome, calls = found(tmp_path, fine, check)
    assert list(outcome) == [harness.name_of(check)] and calls == 2
