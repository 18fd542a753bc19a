"""How many optimizer steps this process has made, by whichever optimizer."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook


class _Steps:
    """The count, and the hook of all optimizers that keeps it; hung in when it is first asked for."""

    def __init__(self) -> None:
        self.count = 0
        self.handle: Any = None

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.count += 1


_STEPS = _Steps()


def optimizer_steps() -> int:
    """Calls of ``Optimizer.step`` that ended, since this function was first called."""
    if _STEPS.handle is None:
        _STEPS.handle = register_optimizer_step_post_hook(_STEPS)
    return _STEPS.count
