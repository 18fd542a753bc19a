"""Where in an optimizer's step a program is: ``Optimizer.profile_hook_step`` wraps the ``step`` of every optimizer."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from types import CodeType, FrameType

from torch.optim import Optimizer


def _lines_with(code: CodeType, name: str) -> frozenset[int]:
    """The lines of a function that read a variable."""
    starts, lines, line = dict(dis.findlinestarts(code)), set(), None
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset, line)
        if instruction.argval == name and line is not None:
            lines.add(line)
    return frozenset(lines)


_WRAPPER = Optimizer.profile_hook_step(lambda optimizer: None).__code__
#: Where it calls the step itself, not a hook.
_CALLS = _lines_with(_WRAPPER, "func")


def _steps() -> Iterator[FrameType]:
    """Of every step that runs in any thread; not of those that Dynamo compiled."""
    for frame in sys._current_frames().values():
        caller: FrameType | None = frame
        while caller is not None:
            if caller.f_code is _WRAPPER:
                yield caller
            caller = caller.f_back


def optimizer_step_runs() -> bool:
    """Whether any thread is in an optimizer's step or in a hook of one."""
    return any(True for _ in _steps())


def optimizer_hooks_run() -> bool:
    """Whether any thread iterates over the hooks of optimizers, which then may not change."""
    return any(step.f_lineno not in _CALLS for step in _steps())
