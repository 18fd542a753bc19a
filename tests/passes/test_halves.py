"""What the halves of a split graph read of weights whose copies are there in their own half only."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch.utils.checkpoint import checkpoint

from f8fx import ops
from f8fx.executor import compile_eager
from f8fx.options import Options
from f8fx.partition import Partitioner
from f8fx.passes.halves import ANYTHING, HALF, NOTHING, Half, Reads, ReadsOther, mark, reads
from tests.helpers import bf16, randn, shown

fp8 = torch.float8_e4m3fn
ROWWISE = Options.parse({"recipe": "rowwise", "select": "all", "target": "cpu"})


def marked(data, scale, other, scale_other, alternate=True):
    return ops.dequantize_both(
        data,
        scale,
        other,
        scale_other,
        dtype=bf16,
        dim=1,
        dim_other=0,
        power_of_2=True,
        power_of_2_other=True,
        alternate=alternate,
    )


def linear(x, *copies, **kwargs):
    return F.linear(x, marked(*copies, **kwargs))


def weight(rows=48, columns=32):
    zeros = torch.zeros(rows, columns, dtype=fp8)
    return zeros, torch.ones(rows), zeros.clone(), torch.ones(columns)


def inputs():
    return randn(16, 32).requires_grad_(), *weight()


def split(f, passes=True, keep_to_halves=True, args=None):
    """Compiles forward and backward of a function; the halves' graphs."""
    halves: list[fx.Graph] = []
    pipeline = ROWWISE.pipeline() if passes else mark

    def backend(gm, examples):
        partitioner = Partitioner("lean", keep_to_halves)
        look = shown(partitioner, lambda *parts: halves.extend(part.graph for part in parts))
        return compile_eager(gm, examples, pipeline, look)

    torch._dynamo.reset()
    torch.compile(f, backend=backend)(*(args or inputs()))
    return halves


def found_in(f, args=None) -> Reads:
    with pytest.raises(Exception) as caught:
        split(f, args=args)
    other = ReadsOther.within(caught.value)
    assert other is not None, caught.value
    return other.reads


def test_each_half_reads_its_copy():
    forward, backward = split(linear)
    copies = {
        half: {n.meta.get(HALF) for n in graph.nodes if n.op == "placeholder"} - {None}
        for half, graph in ((Half.FORWARD, forward), (Half.BACKWARD, backward))
    }
    assert copies[Half.BACKWARD] == {Half.BACKWARD}
    assert Half.FORWARD in copies[Half.FORWARD]


def test_a_recomputed_forward_reads_its_copy_in_the_backward():
    def f(x, *copies):
        return checkpoint(lambda y: torch.sin(linear(y, *copies)), x, use_reentrant=False)

    assert found_in(f) == Reads(early=(1,))  # the first of four tensors of which one is its copy
    assert len(split(f, keep_to_halves=False)) == 2


def test_other_weights_of_the_graph_keep_to_their_halves():
    """Of a region only those are read again whose results something in the backward needs."""

    def f(x, *copies):
        first, second, third = copies[:4], copies[4:8], copies[8:]
        y = torch.sin(linear(x, *first))

        def region(y):
            return linear(torch.sin(linear(y, *second)), *third)

        return checkpoint(region, y, use_reentrant=False)

    args = (randn(16, 32).requires_grad_(), *weight(48, 32), *weight(64, 48), *weight(32, 64))
    assert found_in(f, args) == Reads(early=(5,))  # the second's first tensor


def test_copies_that_are_always_there_may_be_read_by_anyone():
    def f(x, *copies):
        return checkpoint(lambda y: torch.sin(linear(y, *copies, alternate=False)), x, use_reentrant=False)

    assert len(split(f)) == 2


def test_a_mark_that_is_not_folded_reads_the_forwards_copy():
    """In the forward, and its rounding is saved: there is no other half that reads it."""
    assert len(split(linear, passes=False)) == 2


def test_a_view_of_a_copy_is_the_copy():
    def f(first, second):
        return torch.ops.aten.permute.default(first, [1, 0]), second

    joint, forward, backward = graphs(f, lambda second: second + 1, f)
    view = next(node for node in joint.nodes if node.op == "call_function")
    assert reads(joint, forward, backward) == NOTHING
    # saved by the view's name
    with backward.inserting_before():
        saved = backward.placeholder(view.name)
    output = next(node for node in backward.nodes if node.op == "output")
    with backward.inserting_before(output):
        total = backward.call_function(torch.ops.aten.neg.default, (saved,))
    output.args = (total,)
    assert reads(joint, forward, backward) == Reads(early=(FIRST,))


FIRST, SECOND = 3, 5


def graphs(forward, backward, joint):
    """fx graphs of functions whose inputs are ``first`` and ``second``, of the two halves."""
    made = [fx.symbolic_trace(f).graph for f in (joint, forward, backward)]
    for graph in made[:1]:
        for node in graph.nodes:
            if node.op == "placeholder":
                is_first = node.name == "first"
                node.meta[HALF] = Half.FORWARD if is_first else Half.BACKWARD
                node.meta["desc"] = PlainAOTInput(FIRST if is_first else SECOND)
    return made


def test_the_forward_reading_the_backwards_copy():
    def both(first, second):
        return first + second

    def first_only(first):
        return first + 1

    def passed_on(first, second):
        return first + 1, second

    assert reads(*graphs(both, lambda second: second + 1, both)) == Reads(late=(SECOND,))
    assert reads(*graphs(passed_on, lambda second: second + 1, both)) == NOTHING
    assert reads(*graphs(first_only, both, both)) == Reads(early=(FIRST,))


def test_what_cannot_be_seen_counts_as_everything():
    joint, forward, backward = graphs(
        lambda first: first + 1, lambda second: second + 1, lambda first, second: first + second
    )
    assert reads(joint, forward, backward) == NOTHING
    total = next(node for node in joint.nodes if node.op == "call_function")
    total.meta[HALF] = Half.FORWARD  # a copy that is no input
    assert reads(joint, forward, backward) == ANYTHING
    del total.meta[HALF]
    total.target = torch.ops.higher_order.invoke_subgraph
    assert reads(joint, forward, backward) == ANYTHING


def test_another_failure_is_no_read_of_the_other_half():
    """One that a failure comes from, or came while it was dealt with, is found."""
    reads = Reads(early=(1,))
    assert ReadsOther.within(None) is None
    for way in ("__cause__", "__context__"):
        for error in (KeyError(), ReadsOther(reads)):
            last, between = ValueError(), TypeError()
            setattr(last, way, between)
            setattr(between, way, error)
            found = ReadsOther.within(last)
            assert found is (None if isinstance(error, KeyError) else error)
