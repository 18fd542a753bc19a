"""The memory that kernels are tested in has fences."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.fences import fenced
from tests.helpers import same_bits

READ = """
import ctypes, sys, torch
from tests.fences import fenced
x = fenced(torch.ones(3, 5, dtype=torch.bfloat16), sys.argv[1] == "at_end")
first, behind = x.data_ptr(), x.data_ptr() + 30
print(ctypes.c_char.from_address(first), ctypes.c_char.from_address(behind - 1), flush=True)
print(ctypes.c_char.from_address(behind if sys.argv[1] == "at_end" else first - 1).value)
"""


@pytest.mark.parametrize("side", ["at_end", "at_start"])
def test_a_byte_beside_a_tensor_is_out_of_reach(side):
    command = [sys.executable, "-c", READ, side]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGSEGV
    assert done.stdout.count("c_char") == 2


@pytest.mark.parametrize("at_end", [True, False])
def test_tensors_stay_as_they_are(at_end):
    x = torch.randn(4, 6, 8)
    for view in (x, x[:, 1:4, ::2], x.permute(2, 0, 1), x[0, 0, 0], x[:0], x[:1].expand(3, 6, 8)):
        copy = fenced(view, at_end)
        same_bits(copy, view)
        assert copy.stride() == view.stride()
        assert not copy.numel() or copy.data_ptr() != view.data_ptr()
