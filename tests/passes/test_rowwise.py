"""Where rowwise scales are applied if a device leaves it to the size of a gemm; the gemms are those of Llama-3-70B's MLP."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import f8fx
from f8fx.report import GraphReport
from tests.helpers import bf16, joint_graphs

aten = torch.ops.aten
TOKENS, DIM, HIDDEN = 8192, 8192, 28672


def gate_up(x, gate, up):
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def passed(
    tokens: int = TOKENS, hidden: int = HIDDEN, dynamic: bool = False, **options
) -> tuple[GraphReport, list[tuple]]:
    """What was done, and of every float8 gemm its sizes and whether a kernel of its own applies the scales."""
    with torch.device("meta"):
        x, gate, up = (
            torch.empty(*size, dtype=bf16, requires_grad=True)
            for size in ((tokens, DIM), (hidden, DIM), (hidden, DIM))
        )
    pipeline = f8fx.Options.parse({"select": "all", "recipe": "rowwise", **options}).pipeline(
        debug=True, rowwise_scales=lambda device: "by_size"
    )
    found: list[tuple[GraphReport, list[tuple]]] = []

    def transform(graph):
        report = pipeline(graph)
        gemms = []
        for node in graph.find_nodes(op="call_function", target=aten._scaled_mm.default):
            left, right, scale = (arg.meta["val"] for arg in node.args[:3])
            gemms.append((*left.shape, right.shape[1], not scale.dim()))
        found.append((report, gemms))

    joint_graphs(gate_up, x, gate, up, transform=transform, dynamic=dynamic)
    return found[0]


def test_large_gemms_with_exact_accumulation_on_an_h100():
    report, gemms = passed(target="h100")
    (merge,) = report.merges
    assert (merge.merged, merge.reason) == (False, "would be no faster")
    assert sorted(gemms) == sorted(
        2
        * [
            (TOKENS, DIM, HIDDEN, False),  # fast accumulation
            (TOKENS, HIDDEN, DIM, True),
            (HIDDEN, TOKENS, DIM, False),  # exact, of smaller operands
        ]
    )


@pytest.mark.parametrize("options", [{"target": "h200"}, {"target": "h100", "hidden": 8192}], ids=str)
def test_elsewhere_the_gemm_applies_them(options):
    report, gemms = passed(**options)
    (merge,) = report.merges
    assert merge.merged and len(gemms) == 3
    assert not any(after for *_, after in gemms)


def test_dynamic_sizes_are_those_the_graph_was_traced_with():
    for tokens, after in ((TOKENS, 2), (512, 0)):
        _, gemms = passed(tokens, dynamic=True, merge="never", target="h100")
        assert sum(by_kernel for *_, by_kernel in gemms) == after
