"""Tells, of every optimizer's step, the models whose weights the optimizer holds."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from f8fx.torch_private import local_part


@cache
def watch_optimizers() -> None:
    """Hangs a hook into all optimizers, once.

    It runs before a step, which may fail halfway, and after it, since a step may run forwards (``closure``) before it
    changes weights. Compiled steps run it, too.
    """
    register_optimizer_step_pre_hook(_stepped)
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
    from .shard import Float8Shard

    locals_ = (
        local_part(param)
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad or param.grad is not None  # else no optimizer writes to it
    )
    for manager in {local.weight.manager for local in locals_ if isinstance(local, Float8Shard)}:
        manager.stepped()
