"""The README's example of FSDP2 runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parent / "examples" / "fsdp2.py"
README = Path(__file__).parents[2] / "README.md"


def test_the_example_trains():
    """With "auto" selection on a CPU, which converts only weights that exist in float8 alone."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run([*torchrun, str(EXAMPLE)], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run.stdout)]
    assert len(losses) == 3 and losses[-1] < losses[0], run.stdout
    assert "high precision" not in run.stderr and "rounding" not in run.stderr


def test_the_readme_has_it_word_for_word():
    quoted = re.search(r"<!-- example: fsdp2 -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert quoted is not None
    assert quoted.group(1) == EXAMPLE.read_text()
