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


@pytest.mark.parametrize("executor", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_the_example_trains(tmp_path: Path, executor: str):
    """With "auto" selection on a CPU, which converts only weights that exist in float8 alone."""
    text = EXAMPLE.read_text()
    if executor != "inductor":  # the default, which takes minutes to compile for two ranks on a CPU
        option = '"recipe": "tensorwise"'
        assert text.count(option) == 1
        text = text.replace(option, f'{option}, "executor": "{executor}"')
    program = tmp_path / EXAMPLE.name
    program.write_text(text)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run([*torchrun, str(program)], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run.stdout)]
    assert len(losses) == 3 and losses[-1] < losses[0], run.stdout
    assert "high precision" not in run.stderr and "rounding" not in run.stderr


def test_the_readme_has_it_word_for_word():
    quoted = re.search(r"<!-- example: fsdp2 -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert quoted is not None
    assert quoted.group(1) == EXAMPLE.read_text()
