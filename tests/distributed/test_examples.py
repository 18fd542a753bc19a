"""The README's examples of collectives, run on two ranks."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from f8fx import f8fx, recording
from tests.distributed.examples import collectives as examples
from tests.distributed.harness import outcome_fixture
from tests.helpers import bf16, randn, sqnr


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(64, 128, bias=False, dtype=bf16)
        self.up = nn.Linear(64, 128, bias=False, dtype=bf16)
        self.down = nn.Linear(128, 64, bias=False, dtype=bf16)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def run(example, fullgraph=True):
    """Runs an example as written, but with an executor that compiles fast and everything converted."""
    options = {"executor": "eager", "select": "all", "strict": True}
    plain = torch.compile
    try:
        torch.compile = lambda model, backend: plain(
            model, backend=f8fx, options=options, fullgraph=fullgraph
        )
        model = example(Gate())
    finally:
        torch.compile = plain
    with recording() as reports:
        model(randn(2, 16, 64, seed=torch.distributed.get_rank())).sum().backward()
    (report,) = reports
    assert report.converted == report.total == 9
    return [gather.moved for gather in report.gathers]


def check_ddp():
    models = []
    # DDP's own buckets are what splits the model into graphs
    assert run(lambda model: models.append(model) or examples.ddp(model), fullgraph=False) == []
    for parameter in models[0].parameters():
        summed = parameter.grad.clone()
        torch.distributed.all_reduce(summed)
        assert torch.equal(summed, 2 * parameter.grad)  # other data on every rank, the same gradients


def check_simple_fsdp():
    assert run(examples.simple_fsdp) == [True] * 3


def check_tensor_parallel():
    assert run(examples.tensor_parallel) == [True] * 2


def check_graph_trainer():
    from torch.fx.experimental.proxy_tensor import make_fx

    def layer(x, w):
        c10d = torch.ops._c10d_functional
        return x @ c10d.wait_tensor(c10d.all_gather_into_tensor(w, 2, "0")).t()

    x, w = randn(16, 64, grad=False), randn(24, 64, grad=False, seed=torch.distributed.get_rank())
    joint = make_fx(layer, tracing_mode="fake")(x, w)
    wanted = joint(x, w)
    report = examples.graph_trainer(joint)
    assert report.line() == "f8fx: 1 of 1 matmuls in float8 (tensorwise); 1 of 1 gathers in float8"
    assert sqnr(wanted, joint(x, w)) > 20  # of float8 against bf16


CHECKS = [check_ddp, check_simple_fsdp, check_tensor_parallel, check_graph_trainer]
outcome = outcome_fixture(2, CHECKS)


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_two_ranks(outcome, check):
    assert check not in outcome, outcome[check]


@pytest.mark.parametrize("name", ["ddp", "simple_fsdp", "tensor_parallel", "graph_trainer"])
def test_the_readme_shows_what_is_run(name):
    """All of it, line by line and in order, but for the mesh, which is one of CPUs here, and imports left out there."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (shown,) = re.findall(rf"<!-- example: collectives.{name} -->\n```python\n(.*?)```", readme, re.DOTALL)
    _, body = inspect.getsource(getattr(examples, name)).split("\n", 1)
    imports, source = parts(textwrap.dedent(body))
    imports_shown, lines = parts(shown)
    assert lines and lines == source
    assert set(imports_shown) <= set(imports)


def parts(code):
    """Imports, and what else there is to compare; what an example returns is the README's model, or nothing."""
    lines = [line for line in code.splitlines() if line]
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    rest = [line for line in lines if line not in imports and "init_device_mesh(" not in line]
    rest = [re.sub(r"^return (?=torch)", "model = ", line) for line in rest]
    return imports, [line for line in rest if not line.startswith("return ")]
