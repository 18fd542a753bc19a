"""Whether an optimizer steps."""

from __future__ import annotations

import sys
from types import FrameType

from torch.optim import Optimizer

#: What the ``step`` of every optimizer is wrapped in, with its hooks.
_STEP = Optimizer.profile_hook_step(lambda optimizer: None).__code__


def optimizer_step_runs() -> bool:
    """Whether any thread is in an optimizer's step or in a hook of one; not where Dynamo compiled it."""
    for frame in sys._current_frames().values():
        caller: FrameType | None = frame
        while caller is not None:
            if caller.f_code is _STEP:
                return True
            caller = caller.f_back
    return False
