"""What tests need not spend time on in every compilation."""

from __future__ import annotations

import logging

import torch


def test_torch_writes_no_trace_of_a_compilation():
    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert not logging.getLogger("torch.__trace").handlers  # its own leaves with the first record
