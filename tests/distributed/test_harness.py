"""What the harness makes of ranks that die or stand still, and that no failure is tried again."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import harness

CLOSED = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:11905"


def fine():
    dist.barrier()


def dies_once(folder: Path):
    with open(folder / "calls", "a") as calls:
        calls.write(str(dist.get_rank()))
    if dist.get_rank() == 1 and (folder / "calls").read_text().count("1") == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def test_a_rank_that_dies_is_started_once_more(tmp_path):
    check = partial(dies_once, tmp_path)
    with pytest.warns(UserWarning, match=r"rank 1: ended with -11(.|\n)*Segmentation fault(.|\n)*dies_once"):
        assert harness.outcomes(2, [fine, check], tmp_path) == {}
    assert (tmp_path / "calls").read_text().count("1") == 2


@pytest.fixture
def ranks(monkeypatch):
    """Ranks that only exist on paper: what each found, attempt by attempt, and how it ended."""

    def ranks(*attempts):
        started = []

        def start(world_size, work, *arguments):
            found = attempts[len(started)]
            started.append(found)
            for rank, (of_rank, _) in enumerate(found):
                torch.save(of_rank, f"{arguments[-1]}/outcome{rank}")
            return []

        monkeypatch.setattr(harness, "start", start)
        monkeypatch.setattr(harness, "_end", lambda processes: [code for _, code in started[-1]])
        return started

    return ranks


def test_a_failure_is_not_tried_again(ranks, tmp_path):
    """Whatever became of the rank that waits for the one that failed."""
    started = ranks([({"fine": ""}, None), ({"fine": "AssertionError"}, 0)])
    outcome = harness.outcomes(2, [fine], tmp_path)
    assert len(started) == 1 and "AssertionError" in outcome["fine"]


def test_a_check_that_was_not_run_has_failed(ranks, tmp_path):
    ranks([({"fine": "AssertionError"}, 0), ({}, None)])
    check = partial(dies_once, tmp_path)
    assert set(harness.outcomes(2, [fine, check], tmp_path)) == {"fine", harness.name_of(check)}


@pytest.mark.parametrize("error", ["", CLOSED])
def test_ranks_that_stand_still_are_started_once_more(ranks, tmp_path, error):
    started = ranks([({"fine": error}, 1), ({}, None)], [({"fine": ""}, 0), ({"fine": ""}, 0)])
    with pytest.warns(UserWarning, match="rank 1: did not end"):
        assert harness.outcomes(2, [fine], tmp_path) == {}
    assert len(started) == 2


def test_twice_is_a_failure(ranks, tmp_path):
    started = ranks(*[[({"fine": ""}, 0), ({}, None)]] * 2)
    with pytest.warns(UserWarning, match="rank 1: did not end"):
        outcome = harness.outcomes(2, [fine], tmp_path)
    assert len(started) == 2 and "did not end" in outcome["fine"]


def test_a_lost_connection_alone_is_a_failure(ranks, tmp_path):
    """Where no rank was ended, one of them did something else than the other."""
    started = ranks([({"fine": CLOSED}, 0), ({"fine": ""}, 0)])
    assert CLOSED in harness.outcomes(2, [fine], tmp_path)["fine"]
    assert len(started) == 1
