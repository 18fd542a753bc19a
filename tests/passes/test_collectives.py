"""*collectives*: which gathers carry float8, and which stay as they were."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch.testing._internal.distributed.fake_pg import FakeStore

import f8fx
from f8fx.passes import Pipeline, describe
from f8fx.torch_private import fake_tensor_mode
from tests.helpers import bf16

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@pytest.fixture(autouse=True)
def four_ranks():
    """A process group of four that only exists on paper; this is its rank 1."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def gather(x, group="0"):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 4, group))


def graph_of(fn, *shapes, dtype=bf16):
    """The aten graph of a function of tensors, traced without running anything."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with fake_tensor_mode():
        args = [torch.empty(*shape, dtype=dtype) for shape in shapes]
    graph = make_fx(fn, tracing_mode="real")(*args).graph
    graph.eliminate_dead_code()
    return graph


def rewritten(fn, *shapes, recipe="tensorwise", wire="auto", dtype=bf16):
    """The graph after all passes and what they report."""
    graph = graph_of(fn, *shapes, dtype=dtype)
    options = f8fx.Options.parse({"select": "all", "recipe": recipe})
    pipeline = Pipeline(
        options.recipe, options.policy(), debug=True, rowwise_in_gemm=lambda device: True, wire=wire
    )
    report = pipeline(graph)
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    return describe(graph), report


class TestMoves(TestCase):
    def test_weight_sharded_by_rows(self):
        text, report = rewritten(lambda x, w: x @ gather(w).t(), (16, 64), (24, 64))
        self.assertExpectedInline(
            text,
            """\
x_1: bf16[16,64]
w_1: bf16[24,64]
amax: f32[] = f8fx.amax(w_1, None)
view: torch.int32[] = view(amax, torch.int32)
bitwise_and: torch.int32[] = bitwise_and(view, 2147483647)
all_reduce: torch.int32[] = _c10d_functional.all_reduce(bitwise_and, max, 0)
wait_tensor: torch.int32[] = _c10d_functional.wait_tensor(all_reduce)
view_1: f32[] = view(wait_tensor, f32)
scale: f32[] = f8fx.scale(view_1, dtype=e4m3, power_of_2=False)
quantize: e4m3[24,64] = f8fx.quantize(w_1, scale, dtype=e4m3, transpose=False, align=[1, 1])
all_gather_into_tensor: e4m3[96,64] = _c10d_functional.all_gather_into_tensor(quantize, 4, 0)
wait_tensor_1: e4m3[96,64] = _c10d_functional.wait_tensor(all_gather_into_tensor)
amax_1: f32[] = f8fx.amax(x_1, None)
scale_1: f32[] = f8fx.scale(amax_1, dtype=e4m3, power_of_2=False)
quantize_1: e4m3[16,64] = f8fx.quantize(x_1, scale_1, dtype=e4m3, transpose=False, align=[1, 1])
reciprocal: f32[] = reciprocal(scale_1)
reciprocal_1: f32[] = reciprocal(scale)
permute: e4m3[64,96] = permute(wait_tensor_1, [1, 0])
scaled_mm: bf16[16,96] = _scaled_mm(quantize_1, permute, reciprocal, reciprocal_1, None, None, bf16, True)
return scaled_mm""",
        )
        assert report.gathers[0].moved
